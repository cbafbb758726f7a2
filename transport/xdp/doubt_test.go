// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"bytes"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/transport/core"
)

// hopNow is what the router knows of a hop.
func hopNow(r *router, h *hop) (mac net.HardwareAddr, state int, up bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return h.mac, h.state, h.up()
}

func setNeighbour(t *testing.T, h *host, a netip.Addr, state int, mac net.HardwareAddr) {
	t.Helper()
	link, err := h.nl.LinkByName("p0")
	if err != nil {
		t.Fatal(err)
	}
	err = h.nl.NeighSet(&netlink.Neigh{LinkIndex: link.Attrs().Index, IP: a.AsSlice(), State: state, HardwareAddr: mac})
	if err != nil {
		t.Fatal(err)
	}
}

func TestDoubtedNeighbourIsAskedForByBroadcast(t *testing.T) {
	wrong := net.HardwareAddr{2, 0, 0, 0, 0, 0x99}
	for _, c := range []struct{ name, local, remote string }{
		{"IPv4", "198.18.0.1", "198.18.0.2"},
		{"IPv6", "fd12:0::1", "fd12:0::2"},
	} {
		for state, name := range map[int]string{unix.NUD_STALE: "stale", unix.NUD_REACHABLE: "reachable"} {
			t.Run(c.name+" "+name, func(t *testing.T) {
				hosts := newHosts(t, 1)
				r := newTestRouter(t, hosts[0], 0)
				r.watch()
				remote := netip.MustParseAddr(c.remote)
				h := takeHops(t, r, pathsTo(netip.MustParseAddr(c.local), []netip.Addr{remote}))[0]
				right, _, _ := hopNow(r, h)
				setNeighbour(t, hosts[0], remote, state, wrong)
				waitFor(t, "the wrong link address learnt", func() bool {
					mac, _, _ := hopNow(r, h)
					return bytes.Equal(mac, wrong)
				})
				start := time.Now()
				r.doubt(h)
				waitFor(t, "the right link address again", func() bool {
					mac, _, up := hopNow(r, h)
					if !up {
						t.Fatal("the way is down meanwhile")
					}
					return bytes.Equal(mac, right)
				})
				t.Logf("right again after %v", time.Since(start))
				waitFor(t, "managed again", func() bool {
					found, err := r.neighbour1(h)
					return err == nil && found.ours()
				})
			})
		}
	}
}

// neighbour1 asks the kernel, from a socket of its own: the worker has the other.
func (r *router) neighbour1(h *hop) (entry, error) {
	var n neighbours
	r.mu.Lock()
	ifindex, gateway := h.plane.ifindex, h.gateway
	r.mu.Unlock()
	var e entry
	err := inside(r.e.ns, func() (err error) {
		e, err = n.get(ifindex, gateway)
		return err
	})
	return e, err
}

func TestFixedNeighbourIsNotAskedAnew(t *testing.T) {
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 0x42}
	hosts := newHosts(t, 1)
	r := newTestRouter(t, hosts[0], 0)
	remote := netip.MustParseAddr("198.18.0.2")
	setNeighbour(t, hosts[0], remote, unix.NUD_PERMANENT, mac)
	r.watch()
	h := takeHops(t, r, pathsTo(r.e.planes[0].addr, []netip.Addr{remote}))[0]
	r.doubt(h)
	waitFor(t, "the doubt handled", func() bool {
		r.dirty.mu.Lock()
		defer r.dirty.mu.Unlock()
		return len(r.dirty.doubts) == 0
	})
	r.close() // the worker has finished what it had taken
	found, err := r.neighbour1(h)
	if err != nil || found.State != unix.NUD_PERMANENT || !bytes.Equal(found.HardwareAddr, mac) {
		t.Errorf("neighbour %+v (%v), want it as permanent as before", found, err)
	}
}

func TestNeighbourIsDoubtedOnceASecondAtMost(t *testing.T) {
	hosts := newHosts(t, 1)
	r := newTestRouter(t, hosts[0], 0) // no worker: what is taken is counted here
	p := r.e.planes[0]
	var hops []*hop
	r.mu.Lock()
	for _, local := range []string{"198.18.0.1", "198.18.0.9"} {
		h := r.newHop(hopKey{p, netip.MustParseAddr(local), netip.MustParseAddr("198.18.0.2")})
		h.refs = 1
		r.reach(h, h.remote)
		hops = append(hops, h)
	}
	r.mu.Unlock()
	taken := func() int {
		b, _ := r.dirty.take(time.Now())
		return len(b.doubts)
	}
	start := time.Now()
	total := 0
	for range 1000 {
		for _, h := range hops {
			r.doubt(h)
			total += taken()
		}
	}
	if most := 1 + int(time.Since(start)/doubtTime); total < 1 || total > most {
		t.Errorf("asked %d times within %v, want 1 to %d", total, time.Since(start), most)
	}
	for _, h := range hops { // a second later
		h.doubtNs.Add(-int64(doubtTime))
		h.via.asked = time.Now().Add(-doubtTime)
	}
	if r.doubt(hops[1]); taken() != 1 {
		t.Error("not asked again after a second")
	}
}

func TestFailedNeighbourKeepsItsLastLinkAddressAndStaysUp(t *testing.T) {
	hosts := newHosts(t, 1)
	r := newTestRouter(t, hosts[0], 0)
	r.watch()
	remote := netip.MustParseAddr("198.18.0.2")
	h := takeHops(t, r, pathsTo(r.e.planes[0].addr, []netip.Addr{remote}))[0]
	right, _, _ := hopNow(r, h)
	// The peer answers no more.
	link, err := hosts[1].nl.LinkByName("p0")
	if err != nil {
		t.Fatal(err)
	}
	if err := hosts[1].nl.LinkSetARPOff(link); err != nil {
		t.Fatal(err)
	}
	setNeighbour(t, hosts[0], remote, unix.NUD_FAILED, nil)
	waitFor(t, "the kernel's verdict learnt", func() bool {
		mac, state, up := hopNow(r, h)
		if !up || !bytes.Equal(mac, right) {
			t.Fatalf("up %v with link address %v, want it up with %v", up, mac, right)
		}
		return state&(unix.NUD_FAILED|unix.NUD_INCOMPLETE) != 0
	})
	waitFor(t, "FAILED after the kernel's questions", func() bool {
		mac, state, up := hopNow(r, h)
		if !up || !bytes.Equal(mac, right) {
			t.Fatalf("up %v with link address %v, want it up with %v", up, mac, right)
		}
		return state&unix.NUD_FAILED != 0
	})
	if err := hosts[1].nl.LinkSetARPOn(link); err != nil {
		t.Fatal(err)
	}
	r.doubt(h)
	waitFor(t, "reachable again", func() bool {
		_, state, _ := hopNow(r, h)
		return state&unix.NUD_REACHABLE != 0
	})
}

// For IPv4 the kernel takes every address to be on the link when a packet names its interface, so that
// only IPv6 can be without a route.
func TestWayWithoutARouteIsDownUntilThereIsOne(t *testing.T) {
	hosts := newHosts(t, 1)
	r := newTestRouter(t, hosts[0], 0)
	r.watch()
	h := takeHops(t, r, pathsTo(netip.MustParseAddr("fd12:0::1"), []netip.Addr{netip.MustParseAddr("fd12:0::2")}))[0]
	route := &netlink.Route{
		LinkIndex: r.e.planes[0].ifindex, Dst: &net.IPNet{IP: net.ParseIP("fd12:0::"), Mask: net.CIDRMask(64, 128)},
	}
	if err := hosts[0].nl.RouteDel(route); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "down", func() bool { _, _, up := hopNow(r, h); return !up })
	if err := hosts[0].nl.RouteAdd(route); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "up again", func() bool { _, _, up := hopNow(r, h); return up })
}

// The address is outside the prefix of the route to the peer, which stays as it is.
func TestWayFromAnAddressThatIsGoneIsDownUntilItReturns(t *testing.T) {
	hosts := newHosts(t, 1)
	r := newTestRouter(t, hosts[0], 0)
	r.watch()
	link, err := hosts[0].nl.LinkByName("p0")
	if err != nil {
		t.Fatal(err)
	}
	local := netip.MustParseAddr("198.18.9.1")
	addr := &netlink.Addr{IPNet: &net.IPNet{IP: local.AsSlice(), Mask: net.CIDRMask(32, 32)}}
	if err := hosts[0].nl.AddrAdd(link, addr); err != nil {
		t.Fatal(err)
	}
	h := takeHops(t, r, pathsTo(local, []netip.Addr{netip.MustParseAddr("198.18.0.2")}))[0]
	if err := hosts[0].nl.AddrDel(link, addr); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "down", func() bool { _, _, up := hopNow(r, h); return !up })
	if err := hosts[0].nl.AddrAdd(link, addr); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "up again", func() bool { _, _, up := hopNow(r, h); return up })
}

func TestNeighbourThatAnAdministratorManagesStaysHis(t *testing.T) {
	hosts := newHosts(t, 1)
	r := newTestRouter(t, hosts[0], 0)
	remote := netip.MustParseAddr("198.18.0.2")
	err := hosts[0].nl.NeighSet(&netlink.Neigh{
		LinkIndex: r.e.planes[0].ifindex, IP: remote.AsSlice(), State: unix.NUD_NONE, Flags: netlink.NTF_USE, FlagsExt: netlink.NTF_EXT_MANAGED,
	})
	if err != nil {
		t.Fatal(err)
	}
	r.watch()
	hops, err := r.take(t.Context(), pathsTo(r.e.planes[0].addr, []netip.Addr{remote}))
	if err != nil {
		t.Fatal(err)
	}
	wrong := net.HardwareAddr{2, 0, 0, 0, 0, 0x99}
	err = hosts[0].nl.NeighSet(&netlink.Neigh{
		LinkIndex: r.e.planes[0].ifindex, IP: remote.AsSlice(), State: unix.NUD_STALE, HardwareAddr: wrong, FlagsExt: netlink.NTF_EXT_MANAGED,
	})
	if err != nil {
		t.Fatal(err)
	}
	r.doubt(hops[0])
	waitFor(t, "the neighbour asked anew", func() bool {
		found, err := r.neighbour1(hops[0])
		return err == nil && found.State&unix.NUD_REACHABLE != 0 && !bytes.Equal(found.HardwareAddr, wrong)
	})
	r.give(hops)
	r.close()
	found, err := (&router{e: r.e}).neighbour1(hops[0])
	if err != nil || !found.managed() || found.ours() {
		t.Errorf("neighbour %+v (%v), want it managed and not ours", found, err)
	}
}

func TestOnlyUnansweredShortProbesOfSuspectPathsAreADoubt(t *testing.T) {
	type step struct {
		state core.PathState
		acks  uint32
		probe bool
		doubt bool
	}
	const suspect, active = core.PathSuspect, core.PathActive
	for _, c := range []struct {
		name  string
		steps []step
	}{
		{"first probe", []step{{suspect, 0, true, false}}},
		{"unanswered", []step{{suspect, 0, true, false}, {suspect, 0, true, true}}},
		{"answered", []step{{suspect, 0, true, false}, {suspect, 1, true, false}, {suspect, 2, true, false}}},
		{"no probe is ordered", []step{{suspect, 0, true, false}, {suspect, 0, false, false}, {suspect, 0, true, true}}},
		{"active meanwhile", []step{{suspect, 0, true, false}, {active, 0, false, false}, {suspect, 0, true, false}}},
		{"active", []step{{active, 0, true, false}, {active, 0, true, false}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := &Engine{log: nil}
			var err error
			if e.clk, err = newClock(); err != nil {
				t.Fatal(err)
			}
			e.router = &router{e: e, dirty: newDirty()}
			p := &plane{}
			conn := &Conn{e: e, hops: []*hop{{via: &neighbour{neighKey: neighKey{p, netip.IPv4Unspecified()}}}}}
			for i, s := range c.steps {
				conn.snap.Paths = []core.PathSnapshot{{State: s.state, Acks: s.acks}}
				conn.doubtUnanswered(uint32(b2i(s.probe)))
				b, _ := e.router.dirty.take(time.Now())
				if got := len(b.doubts) == 1; got != s.doubt {
					t.Errorf("step %d: doubt %v, want %v", i, got, s.doubt)
				}
			}
		})
	}
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// BenchmarkOneNeighbour is a look at one neighbour, with 4000 in the table.
func BenchmarkOneNeighbour(b *testing.B) {
	h := newHosts(b, 1)[0]
	r := newTestRouter(b, h, 0)
	all := neighboursOf(b, h, 4000)
	b.Run("get", func(b *testing.B) {
		for b.Loop() {
			if e, err := r.neighbours.get(r.e.planes[0].ifindex, all[2000]); err != nil || e.State != unix.NUD_PERMANENT {
				b.Fatal(e, err)
			}
		}
	})
	b.Run("dump", func(b *testing.B) { // as it was
		for b.Loop() {
			if list, err := r.nl.NeighList(r.e.planes[0].ifindex, netlink.FAMILY_V4); err != nil || len(list) < 4000 {
				b.Fatal(len(list), err)
			}
		}
	})
}
