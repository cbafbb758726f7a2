// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
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

// middle is a network namespace between two hosts, which forwards by the kernel's stack: what passes
// meets the qdiscs of its interfaces. Neither a redirect nor XDP_TX on a host's own interface does.
type middle struct {
	ns     netns.NsHandle
	nl     *netlink.Handle
	egress [2]netlink.Link // towards host 0 and host 1
}

// middleMTU leaves room for an XDP program on kernels whose veth wants a frame in one page.
const middleMTU = 3400

// middleAddr is the address of a host on its interface r0, or of the middle's end, a router.
func middleAddr(host int, router bool) string {
	if router {
		return fmt.Sprintf("198.18.%d.254", 101+host)
	}
	return fmt.Sprintf("198.18.%d.1", 101+host)
}

// newMiddle joins hosts 0 and 1 of a lab by a router: the hosts get r0. The namespace has no name, so
// that it ends with the test or its process, and its interfaces with it.
func newMiddle(t *testing.T, l *lab.Lab) *middle {
	t.Helper()
	ns := newNetNS(t)
	err := inside(ns, func() error {
		return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0)
	})
	if err != nil {
		t.Fatal(err)
	}
	nl, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nl.Close)
	m := &middle{ns: ns, nl: nl}
	for host := range m.egress {
		m.join(t, l, host)
	}
	return m
}

// join makes the veth pair to a host.
func (m *middle) join(t *testing.T, l *lab.Lab, host int) {
	t.Helper()
	theirs, err := netns.GetFromPath(l.NetNS(host))
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	a := netlink.NewLinkAttrs()
	a.Name, a.MTU = fmt.Sprintf("h%d", host), middleMTU
	veth := &netlink.Veth{LinkAttrs: a, PeerName: "r0", PeerMTU: middleMTU, PeerNamespace: netlink.NsFd(theirs)}
	if err := m.nl.LinkAdd(veth); err != nil {
		t.Fatalf("veth pair to host %d: %v", host, err)
	}
	itf, err := m.nl.LinkByName(a.Name)
	if err != nil {
		t.Fatal(err)
	}
	m.egress[host] = itf
	addr, err := netlink.ParseAddr(middleAddr(host, true) + "/24")
	if err := errors.Join(err, m.nl.AddrAdd(itf, addr), m.nl.LinkSetUp(itf)); err != nil {
		t.Fatal(err)
	}
	passNatively(t, m.ns, itf)
	linkOf(t, l, host, "r0", func(nl *netlink.Handle, r0 netlink.Link) error {
		addr, err := netlink.ParseAddr(middleAddr(host, false) + "/24")
		if err := errors.Join(err, nl.AddrAdd(r0, addr), nl.LinkSetUp(r0)); err != nil {
			return err
		}
		dst, err := netlink.ParseIPNet(middleAddr(1-host, false) + "/24")
		if err != nil {
			return err
		}
		dst.IP = dst.IP.Mask(dst.Mask)
		gateway, err := netlink.ParseAddr(middleAddr(host, true) + "/24")
		if err != nil {
			return err
		}
		return nl.RouteAdd(&netlink.Route{LinkIndex: r0.Attrs().Index, Dst: dst, Gw: gateway.IP})
	})
}

// middleHandle is the handle of the qdiscs that setQdisc makes: 1:0.
const middleHandle = 1 << 16

// setQdisc gives both egress interfaces a qdisc. It skips the test if this kernel has none of its kind.
func (m *middle) setQdisc(t *testing.T, q func(netlink.QdiscAttrs) netlink.Qdisc) {
	t.Helper()
	for _, itf := range m.egress {
		qdisc := q(netlink.QdiscAttrs{LinkIndex: itf.Attrs().Index, Handle: middleHandle, Parent: netlink.HANDLE_ROOT})
		if old := m.root(t, itf); old != nil {
			if err := m.nl.QdiscDel(old); err != nil {
				t.Fatalf("remove qdisc %s from %s: %v", old.Type(), itf.Attrs().Name, err)
			}
		}
		err := m.nl.QdiscAdd(qdisc)
		if errors.Is(err, unix.ENOENT) {
			t.Skipf("this kernel has no qdisc %s", qdisc.Type())
		}
		if err != nil {
			t.Fatalf("qdisc %s on %s: %v", qdisc.Type(), itf.Attrs().Name, err)
		}
	}
}

// qdiscCounters are what a qdisc has counted: packets that left by it, packets that it dropped, and how
// often it had to hold back.
type qdiscCounters struct{ packets, drops, overlimits uint32 }

// counters reads those of the qdisc towards a host.
func (m *middle) counters(t *testing.T, host int) qdiscCounters {
	t.Helper()
	q := m.root(t, m.egress[host])
	if q == nil || q.Attrs().Statistics == nil {
		t.Fatalf("%s has no qdisc with counters", m.egress[host].Attrs().Name)
	}
	s := q.Attrs().Statistics
	return qdiscCounters{s.Basic.Packets, s.Queue.Drops, s.Queue.Overlimits}
}

// root is the qdisc that setQdisc gave an interface, nil if there is none.
func (m *middle) root(t *testing.T, itf netlink.Link) netlink.Qdisc {
	t.Helper()
	qdiscs, err := m.nl.QdiscList(itf)
	if err != nil {
		t.Fatal(err)
	}
	for _, q := range qdiscs {
		if a := q.Attrs(); a.Parent == netlink.HANDLE_ROOT && a.Handle == middleHandle {
			return q
		}
	}
	return nil
}

// bucket is a TBF with a rate in bit/s and a queue of so many bytes.
func bucket(rate uint64, queue uint32) func(netlink.QdiscAttrs) netlink.Qdisc {
	return func(a netlink.QdiscAttrs) netlink.Qdisc {
		return &netlink.Tbf{QdiscAttrs: a, Rate: rate / 8, Limit: queue, Buffer: netlink.Xmittime(rate/8, 32<<10)}
	}
}

// delay is a netem that holds each packet back.
func delay(d time.Duration) func(netlink.QdiscAttrs) netlink.Qdisc {
	return func(a netlink.QdiscAttrs) netlink.Qdisc {
		return netlink.NewNetem(a, netlink.NetemQdiscAttrs{Latency: uint32(d.Microseconds()), Limit: 100_000})
	}
}

func TestRouterInTheMiddleForwardsEveryByteThroughItsQdiscs(t *testing.T) {
	rate := pick[uint64](400_000_000, 100_000_000)
	l := newLab(t, lab.Config{Direct: true})
	m := newMiddle(t, l)
	h := openPair(t, l, transport.Config{Interfaces: []string{"r0"}, RetryTime: time.Minute})
	for _, c := range fewer(3, []struct {
		name  string
		qdisc func(netlink.QdiscAttrs) netlink.Qdisc
		held  bool // the qdisc is slower than the hosts
		drops bool // and its queue shorter than what they may have under way
		most  mostRepairs
	}{
		// Congestion control hears of no queue that neither marks nor drops: it grows to a second, and what takes
		// longer than two probes passes for lost. Up to 41 % seen; nothing is lost.
		{"a slow queue that holds what is under way", bucket(rate/8, 64<<20), true, false, perCent(75)},
		{"a queue that holds what is under way", bucket(rate, 64<<20), true, false, perCent(75)},
		// Nor of one that drops before it does: 42 to 63 % seen.
		{"a queue that drops", bucket(rate, 64<<10), true, true, perCent(85)},
		{"a round trip of 10 ms", delay(5 * time.Millisecond), false, false, learning},
	}) {
		t.Run(c.name, func(t *testing.T) {
			m.setQdisc(t, c.qdisc)
			conn := connect(t, h[0], h[1], c.most)
			before := [2]loader.Counters{h[0].counters(t), h[1].counters(t)}
			was := [2]qdiscCounters{m.counters(t, 0), m.counters(t, 1)}
			d := bothWays(t, h, conn, 5, mixed(5, pick[uint64](8<<20, 1<<20)))
			start := time.Now()
			exchange(t, d...)
			took := time.Since(start)
			t.Logf("%.3f Gbit/s each way", float64(d[0].bytes())*8/float64(took.Nanoseconds()))
			for i := range h {
				q := m.counters(t, 1-i)
				q.packets, q.drops, q.overlimits = q.packets-was[1-i].packets, q.drops-was[1-i].drops, q.overlimits-was[1-i].overlimits
				t.Logf("host %d: the qdisc on the way forwarded %d packets, dropped %d, held back %d times", i, q.packets, q.drops, q.overlimits)
				if placed := h[1-i].counters(t).RcvdPkts - before[1-i].RcvdPkts; uint64(q.packets) < placed {
					t.Errorf("host %d: %d packets left by the qdisc on the way, %d were placed: they went past it", i, q.packets, placed)
				}
				if c.held && q.overlimits == 0 || c.drops != (q.drops > 0) {
					t.Errorf("host %d: the qdisc dropped %d packets and held back %d times, want drops %v, held back %v", i, q.drops, q.overlimits, c.drops, c.held)
				}
			}
		})
	}
}
