// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/fabric/lab"
	"github.com/metaroce/metaroce/loader"
	"github.com/metaroce/metaroce/transport"
)

// kernelRepair is how long the kernel trusts a wrong link address by itself before it begins to ask.
const kernelRepair = 5 * time.Second

// linkDo calls f with a plane's interface of a lab's host, in the host's namespace.
func linkDo(t *testing.T, l *lab.Lab, host, plane int, f func(netlink.Link) error) {
	t.Helper()
	err := l.Do(host, func() error {
		itf, err := netlink.LinkByName(l.Interfaces(host)[plane])
		if err != nil {
			return err
		}
		return f(itf)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// setNeighbour sets what host believes of other's link address on a plane.
func setNeighbour(t *testing.T, l *lab.Lab, host, other, plane, state int, mac net.HardwareAddr) {
	t.Helper()
	linkDo(t, l, host, plane, func(itf netlink.Link) error {
		return netlink.NeighSet(&netlink.Neigh{
			LinkIndex: itf.Attrs().Index, IP: l.Addr(other, plane).AsSlice(), State: state, HardwareAddr: mac,
		})
	})
}

// resolveNeighbours takes away the permanent neighbours that a lab has, so that the kernel resolves them.
func resolveNeighbours(t *testing.T, l *lab.Lab) {
	t.Helper()
	for host := range 2 {
		for plane := range l.Config().Planes {
			linkDo(t, l, host, plane, func(itf netlink.Link) error {
				list, err := netlink.NeighList(itf.Attrs().Index, netlink.FAMILY_ALL)
				if err != nil {
					return err
				}
				for _, n := range list {
					if n.State&unix.NUD_PERMANENT == 0 {
						continue
					}
					if err := netlink.NeighDel(&n); err != nil {
						return fmt.Errorf("neighbour %v: %w", n, err)
					}
				}
				return nil
			})
		}
	}
}

// flow is traffic from host 0 to host 1.
type flow struct {
	*busy
	h [2]*host
}

func startFlow(t *testing.T, h [2]*host, most mostRepairs) (*flow, [2]*transport.Conn) {
	t.Helper()
	conn := connect(t, h[0], h[1], most)
	d := newDirection(t, h[0], h[1], conn[0], conn[1], 1, mixed(1, pick[uint64](16<<20, 200<<10)))
	f := &flow{h: h}
	f.busy = keepBusy(t, d)
	f.waitFor(t, "a transfer", func() bool { return f.rounds() > 0 })
	return f, conn
}

// goesOn waits until data flows, and says after how long. What is under way when this is called does
// not count.
func (f *flow) goesOn(t *testing.T) time.Duration {
	t.Helper()
	start := time.Now()
	n := f.rounds()
	placed := f.h[1].counters(t).RcvdPkts
	f.waitFor(t, "data flowing again", func() bool { return f.h[1].counters(t).RcvdPkts > placed+2*8*256 })
	took := time.Since(start)
	f.waitFor(t, "whole transfers again", func() bool { return f.rounds() > n+1 })
	return took
}

func unknownDestinations(t *testing.T, l *lab.Lab) (n uint64) {
	t.Helper()
	st, err := l.Status()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range st.Planes {
		n += p.Counters.Unknown
	}
	return n
}

func TestWrongLinkAddressOfThePeerInMidTransferIsMended(t *testing.T) {
	for _, c := range fewer(1, []struct {
		planes int
		state  int
		name   string
	}{
		{1, unix.NUD_REACHABLE, "one plane, believed reachable"},
		{2, unix.NUD_STALE, "two planes, stale"},
		{1, unix.NUD_STALE, "one plane, stale"},
	}) {
		t.Run(c.name, func(t *testing.T) {
			l := newLab(t, lab.Config{Planes: c.planes})
			resolveNeighbours(t, l)
			h := openPair(t, l, transport.Config{RetryTime: time.Minute})
			f, _ := startFlow(t, h, outage(2*8))
			for range 2 {
				astray := unknownDestinations(t, l)
				for plane := range c.planes {
					setNeighbour(t, l, 0, 1, plane, c.state, net.HardwareAddr{0x02, 0, 0, 0, 0, 0x99})
				}
				took := f.goesOn(t)
				t.Logf("data flowed again after %v, %d frames went astray", took, unknownDestinations(t, l)-astray)
				if unknownDestinations(t, l) == astray {
					t.Error("no frame went astray: the wrong link address was not used")
				}
				if took > kernelRepair {
					t.Errorf("data flowed again after %v, which is the kernel's time", took)
				}
				// One may be doubted a second after the last time.
				f.waitFor(t, "the neighbour asked for", func() bool { return neighbourState(t, l, 0, 1, 0)&unix.NUD_REACHABLE != 0 })
			}
			f.stop(t)
		})
	}
}

// neighbourState is what the kernel of host says of other.
func neighbourState(t *testing.T, l *lab.Lab, host, other, plane int) (state int) {
	t.Helper()
	linkDo(t, l, host, plane, func(itf netlink.Link) error {
		list, err := netlink.NeighList(itf.Attrs().Index, netlink.FAMILY_V4)
		for _, n := range list {
			if a, ok := netip.AddrFromSlice(n.IP); ok && a.Unmap() == l.Addr(other, plane) {
				state = n.State
			}
		}
		return err
	})
	return state
}

// ignoreARP has a host neither answer ARP on plane 0, nor learn from what others ask.
func ignoreARP(t *testing.T, l *lab.Lab, host int, on bool) {
	t.Helper()
	value := map[bool]string{true: "8", false: "0"}[on] // arp_ignore: for all local addresses
	err := l.Do(host, func() error {
		return os.WriteFile("/proc/sys/net/ipv4/conf/"+l.Interfaces(host)[0]+"/arp_ignore", []byte(value), 0)
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestTransfersGoOnWhileTheKernelCallsTheNeighbourFailed(t *testing.T) {
	l := newLab(t, lab.Config{Planes: 1})
	resolveNeighbours(t, l)
	h := openPair(t, l, transport.Config{RetryTime: time.Minute})
	f, conn := startFlow(t, h, outage(8))
	ignoreARP(t, l, 1, true)
	setNeighbour(t, l, 0, 1, 0, unix.NUD_FAILED, nil)
	for _, state := range []int{unix.NUD_INCOMPLETE, unix.NUD_FAILED} { // the kernel asks, and gives up
		f.waitFor(t, "the neighbour's state", func() bool {
			r := h[0].register(t, conn[0])
			for i := range r.Tx[:r.Npaths] {
				if r.Tx[i].State == loader.PathDown {
					t.Fatalf("path %d is down", i)
				}
			}
			return neighbourState(t, l, 0, 1, 0)&state != 0
		})
	}
	f.goesOn(t)
	ignoreARP(t, l, 1, false)
	// TCP closes the connection over the same neighbour.
	f.waitFor(t, "the neighbour known again", func() bool { return neighbourState(t, l, 0, 1, 0)&unix.NUD_REACHABLE != 0 })
	f.stop(t)
}

// learner is a bridge in a namespace of its own that forwards to the link addresses it was told, and floods
// nothing but broadcasts: like a switch whose table has no room for guesses.
type learner struct {
	nl    *netlink.Handle
	ports [2]netlink.Link
}

// throughBridge replaces the veth pair of a direct lab by two that meet in a bridge.
func throughBridge(t *testing.T, l *lab.Lab) *learner {
	t.Helper()
	ns := newNetNS(t)
	m := &learner{}
	var err error
	if m.nl, err = netlink.NewHandleAt(ns, unix.NETLINK_ROUTE); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.nl.Close)
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = "br0", l.Config().MTU
	bridge := &netlink.Bridge{LinkAttrs: attrs}
	if err := m.nl.LinkAdd(bridge); errors.Is(err, unix.EOPNOTSUPP) {
		t.Skipf("this kernel makes no bridges: %v", err)
	} else if err != nil {
		t.Fatal(err)
	}
	if err := m.nl.LinkSetUp(bridge); err != nil {
		t.Fatal(err)
	}
	linkDo(t, l, 0, 0, netlink.LinkDel)
	name := l.Interfaces(0)[0]
	for host := range 2 {
		port := fmt.Sprintf("m%d", host)
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU, attrs.HardwareAddr = name, l.Config().MTU, net.HardwareAddr{2, 0x4d, 0x52, 0, 0, byte(host)}
		err := l.Do(host, func() error {
			return netlink.LinkAdd(&netlink.Veth{
				LinkAttrs: attrs, PeerName: port, PeerMTU: uint32(attrs.MTU), PeerNamespace: netlink.NsFd(ns),
			})
		})
		if err != nil {
			t.Fatal(err)
		}
		linkDo(t, l, host, 0, func(itf netlink.Link) error {
			a := &netlink.Addr{IPNet: &net.IPNet{IP: l.Addr(host, 0).AsSlice(), Mask: net.CIDRMask(24, 32)}}
			return errors.Join(netlink.AddrAdd(itf, a), netlink.LinkSetUp(itf))
		})
		if m.ports[host], err = m.nl.LinkByName(port); err != nil {
			t.Fatal(err)
		}
		p := m.ports[host]
		err = errors.Join(m.nl.LinkSetMaster(p, bridge), m.nl.LinkSetUp(p), m.nl.LinkSetLearning(p, false), m.nl.LinkSetFlood(p, false))
		if err != nil {
			t.Fatal(err)
		}
		m.know(t, host, attrs.HardwareAddr)
	}
	passNatively(t, ns, m.ports[:]...)
	return m
}

func (m *learner) entry(host int, mac net.HardwareAddr) *netlink.Neigh {
	return &netlink.Neigh{
		LinkIndex: m.ports[host].Attrs().Index, Family: unix.AF_BRIDGE, Flags: netlink.NTF_MASTER,
		State: unix.NUD_NOARP, HardwareAddr: mac,
	}
}

// know has frames to a link address forwarded to a host, forget no more.
func (m *learner) know(t *testing.T, host int, mac net.HardwareAddr) {
	t.Helper()
	if err := m.nl.NeighSet(m.entry(host, mac)); err != nil {
		t.Fatal(err)
	}
}

func (m *learner) forget(t *testing.T, host int, mac net.HardwareAddr) {
	t.Helper()
	if err := m.nl.NeighDel(m.entry(host, mac)); err != nil {
		t.Fatal(err)
	}
}

func TestPeerWhoseLinkAddressMovesInMidTransferIsFound(t *testing.T) {
	for _, c := range fewer(1, []struct {
		name string
		deaf bool // the sender does not learn from the questions that the peer asks when it has moved
	}{
		{"by its questions", false},
		{"by its answers alone", true},
	}) {
		t.Run(c.name, func(t *testing.T) {
			l := newLab(t, lab.Config{Planes: 1, Direct: true})
			m := throughBridge(t, l)
			h := openPair(t, l, transport.Config{RetryTime: time.Minute})
			f, _ := startFlow(t, h, outage(2*8))
			ignoreARP(t, l, 0, c.deaf)
			was := net.HardwareAddr{2, 0x4d, 0x52, 0, 0, 1}
			for round := range byte(2) {
				now := net.HardwareAddr{2, 0, 0, 0, 1, round}
				m.know(t, 1, now)
				linkDo(t, l, 1, 0, func(itf netlink.Link) error { return netlink.LinkSetHardwareAddr(itf, now) })
				m.forget(t, 1, was)
				took := f.goesOn(t)
				t.Logf("data flowed again after %v", took)
				if took > kernelRepair {
					t.Errorf("data flowed again after %v, which is the kernel's time", took)
				}
				was = now
			}
			ignoreARP(t, l, 0, false)
			f.stop(t)
		})
	}
}

// remakePair deletes the veth pair of a direct lab's plane, and makes it anew under its name and addresses.
func remakePair(t *testing.T, l *lab.Lab, plane int, gone func() bool) {
	t.Helper()
	linkDo(t, l, 0, plane, netlink.LinkDel)
	waitFor(t, "the interface missed", gone)
	peer, err := netns.GetFromPath(l.NetNS(1))
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	name, mtu := l.Interfaces(0)[plane], l.Config().MTU
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = name, mtu
	err = l.Do(0, func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: name, PeerMTU: uint32(mtu), PeerNamespace: netlink.NsFd(peer)})
	})
	if err != nil {
		t.Fatal(err)
	}
	for host := range 2 {
		linkDo(t, l, host, plane, func(itf netlink.Link) error {
			a := &netlink.Addr{IPNet: &net.IPNet{IP: l.Addr(host, plane).AsSlice(), Mask: net.CIDRMask(24, 32)}}
			return errors.Join(netlink.AddrAdd(itf, a), netlink.LinkSetUp(itf))
		})
	}
}

func TestInterfaceThatIsMadeAnewInMidTransferIsUsedAgain(t *testing.T) {
	for _, c := range fewer(1, []struct {
		name   string
		planes int
	}{
		{"one of two planes", 2},
		{"the only plane", 1},
	}) {
		t.Run(c.name, func(t *testing.T) {
			l := newLab(t, lab.Config{Planes: c.planes, Direct: true})
			h := openPair(t, l, transport.Config{RetryTime: time.Minute})
			f, conn := startFlow(t, h, outage(8))
			plane := c.planes - 1
			all := func(holds func(loader.TxPath) bool) bool {
				for i := range h {
					r := h[i].register(t, conn[i])
					for _, path := range onPlane(conn[i], plane) {
						if !holds(r.Tx[path]) {
							return false
						}
					}
				}
				return true
			}
			remakePair(t, l, plane, func() bool {
				return all(func(p loader.TxPath) bool { return p.State == loader.PathDown })
			})
			start := time.Now()
			f.waitFor(t, "its paths active", func() bool {
				r := h[0].register(t, conn[0])
				for _, path := range onPlane(conn[0], plane) {
					if r.Tx[path].State != loader.PathActive {
						return false
					}
				}
				return true
			})
			t.Logf("active %v after the interface was back", time.Since(start))
			before := h[0].register(t, conn[0])
			f.waitFor(t, "data over it", func() bool {
				r := h[0].register(t, conn[0])
				for _, path := range onPlane(conn[0], plane) {
					if r.Tx[path].Sent-r.Tx[path].Probes < before.Tx[path].Sent-before.Tx[path].Probes+10 {
						return false
					}
				}
				return true
			})
			f.goesOn(t)
			for host := range h {
				d, ok := findDevice(t, l, host)
				linkDo(t, l, host, plane, func(itf netlink.Link) error {
					if !ok || !d.Alive || d.Owner.Interfaces[plane].Index != itf.Attrs().Index {
						t.Errorf("host %d: the state file says %+v, want ifindex %d", host, d, itf.Attrs().Index)
					}
					return nil
				})
			}
			f.stop(t)
		})
	}
}
