// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/loader"
	"github.com/metaroce/metaroce/transport/core"
)

// newTestRouter makes a router over a host's interfaces, without programs and connections.
func newTestRouter(t testing.TB, h *host, buffer int) *router {
	t.Helper()
	e := &Engine{log: slog.New(slog.DiscardHandler), ns: h.ns, payload: 1024, cfg: Config{watchBytes: buffer}}
	var err error
	if e.clk, err = newClock(); err != nil {
		t.Fatal(err)
	}
	if e.router, err = newRouter(e); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.router.close)
	for k, name := range h.names {
		link, err := h.nl.LinkByName(name)
		if err != nil {
			t.Fatal(err)
		}
		a := link.Attrs()
		p := &plane{
			name: name, ifindex: a.Index, out: egress{ifindex: a.Index}, mac: a.HardwareAddr, lower: name, mtu: a.MTU,
			addr: netip.AddrFrom4([4]byte{198, 18, byte(k), 1}),
		}
		p.up.Store(carrier(a))
		e.planes = append(e.planes, p)
	}
	e.router.reattach = func(context.Context, string, func([]loader.Interface, int) error) (loader.Interface, error) {
		return loader.Interface{}, fmt.Errorf("no programs here")
	}
	return e.router
}

// neighboursOf puts n permanent neighbours behind a host's plane 0, from 198.18.0.4 on in a /16.
func neighboursOf(t testing.TB, h *host, n int) []netip.Addr {
	t.Helper()
	link, err := h.nl.LinkByName(h.names[0])
	if err != nil {
		t.Fatal(err)
	}
	wide := &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(198, 18, 0, 1), Mask: net.CIDRMask(16, 32)}}
	if err := h.nl.AddrAdd(link, wide); err != nil {
		t.Fatal(err)
	}
	var out []netip.Addr
	a := netip.MustParseAddr("198.18.0.3")
	for i := range n {
		a = a.Next()
		err := h.nl.NeighSet(&netlink.Neigh{
			LinkIndex: link.Attrs().Index, IP: a.AsSlice(), State: unix.NUD_PERMANENT,
			HardwareAddr: net.HardwareAddr{2, 0, 0, 0, byte(i >> 8), byte(i)},
		})
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, a)
	}
	return out
}

func pathsTo(local netip.Addr, remotes []netip.Addr) (paths []core.PathParams) {
	for _, a := range remotes {
		paths = append(paths, core.PathParams{Local: local, Remote: a})
	}
	return paths
}

func takeHops(t *testing.T, r *router, paths []core.PathParams) []*hop {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	hops, err := r.take(ctx, paths)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.give(hops) })
	return hops
}

// floodRoutes adds routes to host addresses of 198.19.0.0/16 that no hop leads to.
func floodRoutes(h *host, n int) error {
	link, err := h.nl.LinkByName(h.names[0])
	if err != nil {
		return err
	}
	for i := range n {
		err := h.nl.RouteAdd(&netlink.Route{
			LinkIndex: link.Attrs().Index, Scope: netlink.SCOPE_LINK,
			Dst: &net.IPNet{IP: net.IPv4(198, 19, byte(i>>8), byte(i)), Mask: net.CIDRMask(32, 32)},
		})
		if err != nil {
			return fmt.Errorf("route %d: %w", i, err)
		}
	}
	return nil
}

func TestCarrierIsLearntWhileRoutesFloodNetlink(t *testing.T) {
	for _, c := range []struct {
		name   string
		buffer int // 1: the least that the kernel gives, so that messages are lost
	}{
		{"usual buffer", 0},
		{"smallest buffer", 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			hosts := newHosts(t, 2)
			neighs := neighboursOf(t, hosts[0], 3000)
			setLink(t, hosts[1], "p1", false)
			waitFor(t, "no carrier on p1", func() bool {
				link, err := hosts[0].nl.LinkByName("p1")
				return err == nil && !carrier(link.Attrs())
			})
			r := newTestRouter(t, hosts[0], c.buffer)
			p := r.e.planes
			r.watch()
			takeHops(t, r, pathsTo(p[0].addr, neighs[:100]))
			looks := r.looks.Load()

			flood := make(chan error, 1)
			go func() { flood <- floodRoutes(hosts[0], 4098) }()
			setLink(t, hosts[1], "p1", true)
			waitFor(t, "carrier of p1 learnt", p[1].up.Load)
			if err := <-flood; err != nil {
				t.Fatal(err)
			}
			if c.buffer == 0 {
				// A flood of what concerns no path costs no request at all, and loses nothing.
				if n := r.looks.Load() - looks; n != 0 || r.lost.Load() != 0 {
					t.Errorf("%d looks and %d gaps, want none", n, r.lost.Load())
				}
			}
			t.Logf("%d gaps, %d looks", r.lost.Load(), r.looks.Load()-looks)
		})
	}
}

func TestWhatWasLostFromASubscriptionIsReadAgain(t *testing.T) {
	hosts := newHosts(t, 1)
	h := hosts[0]
	link, err := h.nl.LinkByName("p0")
	if err != nil {
		t.Fatal(err)
	}
	index := link.Attrs().Index
	other := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "other", MTU: 1500}, PeerName: "other2"}
	if err := h.nl.LinkAdd(other); err != nil {
		t.Fatal(err)
	}
	remote := netip.MustParseAddr("198.18.0.2")
	p := &plane{name: "p0", ifindex: index}
	k := neighKey{p, remote}
	set := func(a net.IP, mac byte) error {
		return h.nl.NeighSet(&netlink.Neigh{
			LinkIndex: index, IP: a, State: unix.NUD_PERMANENT, HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, mac},
		})
	}
	route := func(a netip.Addr) error {
		return h.nl.RouteReplace(&netlink.Route{
			LinkIndex: index, Scope: netlink.SCOPE_LINK, Dst: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(32, 32)},
		})
	}
	for i, c := range []struct {
		noise  func(i int) error
		change func() error
		dirty  func(*batch) bool
	}{
		{
			func(i int) error { return h.nl.LinkSetMTU(other, 1400+i) },
			func() error { return h.nl.LinkSetDown(link) },
			func(b *batch) bool { _, ok := b.links[p]; return ok },
		},
		{
			func(i int) error { return set(net.IPv4(198, 18, 0, 100), byte(i)) },
			func() error { return set(remote.AsSlice(), 1) },
			func(b *batch) bool { _, ok := b.neighs[k]; return ok },
		},
		{
			func(i int) error { return route(netip.AddrFrom4([4]byte{198, 19, 0, byte(i)})) },
			func() error { return route(remote) },
			func(b *batch) bool { _, ok := b.routes[remote]; return ok },
		},
	} {
		s := subscriptions()[i]
		t.Run(s.kind, func(t *testing.T) {
			if err := h.nl.LinkSetUp(link); err != nil {
				t.Fatal(err)
			}
			d := newDirty()
			d.addPlane(p, []int{index}, []string{"p0"})
			d.watch(k)
			d.addEnd(remote, 1)
			if err := s.open(h.ns, 1); err != nil {
				t.Fatal(err)
			}
			for i := range 200 { // nobody reads: the queue overflows
				if err := c.noise(i); err != nil {
					t.Fatal(err)
				}
			}
			// While what did find room is being read, nothing more does.
			lost, over := 0, make(chan struct{})
			var changed error
			go func() {
				defer close(over)
				_ = s.read(s.file, d, func() {
					lost++
					changed = c.change()
				})
			}()
			waitFor(t, "the change noticed", func() bool {
				d.mu.Lock()
				defer d.mu.Unlock()
				return c.dirty(&d.batch)
			})
			_ = s.file.Close()
			<-over
			if lost != 1 || changed != nil {
				t.Errorf("%d gaps (%v), want 1: the test is about a gap", lost, changed)
			}
		})
	}
}

func TestBrokenSubscriptionIsRenewed(t *testing.T) {
	hosts := newHosts(t, 1)
	r := newTestRouter(t, hosts[0], 0)
	p := r.e.planes[0]
	p.up.Store(false)
	r.watch()
	waitFor(t, "the first look", p.up.Load)
	broken := map[*subscription]*os.File{}
	r.mu.Lock()
	for _, s := range r.subs {
		broken[s] = s.file
		_ = s.file.Close()
	}
	r.mu.Unlock()
	// Nobody hears of it. Of carrier the kernel would tell once more within a second.
	link, err := hosts[0].nl.LinkByName("p0")
	if err != nil {
		t.Fatal(err)
	}
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 0x77}
	if err := hosts[0].nl.LinkSetHardwareAddr(link, mac); err != nil {
		t.Fatal(err)
	}
	for s, file := range broken {
		waitFor(t, "subscription to "+s.kind+" renewed", func() bool {
			r.mu.Lock()
			defer r.mu.Unlock()
			return s.file != file
		})
	}
	waitFor(t, "the new link address learnt", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return bytes.Equal(p.mac, mac)
	})
	setLink(t, hosts[0], "p0", false)
	waitFor(t, "carrier lost", func() bool { return !p.up.Load() })
	setLink(t, hosts[0], "p0", true)
	waitFor(t, "carrier back", p.up.Load)
}

func TestInterfaceThatWasReplacedBeforeTheSubscriptionIsNoticed(t *testing.T) {
	hosts := newHosts(t, 1)
	r := newTestRouter(t, hosts[0], 0)
	p := r.e.planes[0]
	now := loader.Interface{Name: p.name, Index: p.ifindex, MTU: p.mtu, MAC: p.mac.String()}
	r.reattach = func(context.Context, string, func([]loader.Interface, int) error) (loader.Interface, error) {
		return now, nil
	}
	p.ifindex += 1000 // of the one that the programs were loaded for
	r.watch()
	waitFor(t, "the interface of now in use", func() bool { return indexOf(r.e, 0) == now.Index && p.up.Load() })
}

func TestCarrierThatChangesBetweenReadingAndWatchingIsLearnt(t *testing.T) {
	hosts := newHosts(t, 1)
	setLink(t, hosts[1], "p0", false)
	r := newTestRouter(t, hosts[0], 0)
	p := r.e.planes[0]
	waitFor(t, "no carrier on p0", func() bool {
		link, err := hosts[0].nl.LinkByName("p0")
		return err == nil && !carrier(link.Attrs())
	})
	p.up.Store(false) // as read by now
	setLink(t, hosts[1], "p0", true)
	waitFor(t, "carrier on p0", func() bool {
		link, err := hosts[0].nl.LinkByName("p0")
		return err == nil && carrier(link.Attrs())
	})
	r.watch()
	waitFor(t, "carrier learnt", p.up.Load)
}

func TestOnlyRoutesThatCoverARemoteAddressAreLookedAt(t *testing.T) {
	remotes := []string{"198.18.0.2", "198.18.0.77", "198.18.1.2", "fd12::2", "fd12:1::2"}
	for _, c := range []struct {
		route string
		want  []string
	}{
		{"198.18.0.2/32", []string{"198.18.0.2"}},
		{"198.18.0.3/32", nil},
		{"198.18.0.0/24", []string{"198.18.0.2", "198.18.0.77"}},
		{"198.18.0.64/26", []string{"198.18.0.77"}},
		{"198.18.0.0/15", []string{"198.18.0.2", "198.18.0.77", "198.18.1.2"}},
		{"198.19.0.0/16", nil},
		{"0.0.0.0/0", []string{"198.18.0.2", "198.18.0.77", "198.18.1.2"}},
		{"::/0", []string{"fd12::2", "fd12:1::2"}},
		{"fd12:1::/32", []string{"fd12:1::2"}},
		{"255.255.255.255/32", nil},
	} {
		t.Run(c.route, func(t *testing.T) {
			d := newDirty()
			for _, a := range remotes {
				d.addEnd(netip.MustParseAddr(a), 1)
			}
			d.routeChanged(netip.MustParsePrefix(c.route))
			var got []string
			for a := range d.routes {
				got = append(got, a.String())
			}
			slices.Sort(got)
			slices.Sort(c.want)
			if !slices.Equal(got, c.want) {
				t.Errorf("to be looked at are the ways to %v, want %v", got, c.want)
			}
		})
	}
}

func TestDirtySetHoldsEachThingOnceAndNothingThatNobodyWatches(t *testing.T) {
	d := newDirty()
	p := &plane{name: "p0", ifindex: 5}
	d.addPlane(p, []int{5, 3}, []string{"p0", "parent"})
	a := netip.MustParseAddr("198.18.0.2")
	d.watch(neighKey{p, a})
	for i := range 1000 {
		d.linkChanged(5, "p0")
		d.linkChanged(9, "parent") // it returned
		d.linkChanged(100+i, "other")
		d.neighbourChanged(5, a)
		d.neighbourChanged(100+i, a)
		d.neighbourChanged(5, netip.AddrFrom4([4]byte{198, 19, byte(i >> 8), byte(i)}))
	}
	b, _ := d.take(time.Now())
	if len(b.links) != 1 || len(b.neighs) != 1 || len(b.routes)+len(b.hops)+len(b.doubts)+len(b.freed) != 0 {
		t.Errorf("batch %+v, want one link and one neighbour", b)
	}
	if b, _ := d.take(time.Now()); len(b.links)+len(b.neighs) != 0 {
		t.Errorf("second batch %+v, want nothing", b)
	}
	d.addPlane(p, []int{6}, []string{"p0"}) // the interface returned
	if d.linkChanged(5, ""); len(d.links) != 0 {
		t.Error("news of the former interface count")
	}
}

func TestRouteChangesAreCollectedForAWhile(t *testing.T) {
	d := newDirty()
	a := netip.MustParseAddr("198.18.0.2")
	d.addEnd(a, 1)
	now := time.Now()
	d.routeChanged(netip.PrefixFrom(a, 32))
	b, next := d.take(now)
	if len(b.routes) != 0 || next.IsZero() || next.Sub(now) > 10*time.Second {
		t.Fatalf("taken at once: %v, next at %v", b.routes, next)
	}
	d.routeChanged(netip.PrefixFrom(a, 24))
	if b, next = d.take(next); len(b.routes) != 1 || !next.IsZero() {
		t.Errorf("taken later: %v, next at %v, want the one remote and no more", b.routes, next)
	}
}
