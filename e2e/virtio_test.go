// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/fabric/lab"
	"github.com/metaroce/metaroce/loader"
	"github.com/metaroce/metaroce/transport"
	"github.com/metaroce/metaroce/transport/core"
)

// The virtio_net interfaces that scripts/vm.sh gives a virtual machine (VM_PAIRS) have link addresses
// 02:4d:52:76:PAIR:END.
const (
	pairPlain    = 0 // MTU 1500, one queue, guest offloads off
	pairJumbo    = 1 // MTU 9000, else the same
	pairQueues   = 2 // MTU 1500, two queues in use, guest offloads that the driver may turn off
	pairOffloads = 3 // one interface, whose guest offloads stay on
)

func virtioMAC(pair, end int) string { return fmt.Sprintf("02:4d:52:76:%02x:%02x", pair, end) }

// virtioLab makes a lab whose first hosts have the ends of a pair as p0, and no veth pair. It skips the
// test where these interfaces are not there.
func virtioLab(t *testing.T, pair, ends int) *lab.Lab {
	t.Helper()
	links, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	found := make([]netlink.Link, ends)
	for end := range found {
		mac := virtioMAC(pair, end)
		i := slices.IndexFunc(links, func(l netlink.Link) bool { return l.Attrs().HardwareAddr.String() == mac })
		if i < 0 {
			t.Skipf("no interface has link address %s: scripts/test-kernels.sh gives it to its virtual machines, where it can", mac)
		}
		found[end] = links[i]
	}
	l := newLab(t, lab.Config{Direct: true})
	linkOf(t, l, 0, "p0", func(nl *netlink.Handle, veth netlink.Link) error { return nl.LinkDel(veth) })
	for i, link := range found {
		lend(t, l, i, link)
	}
	return l
}

// lend gives a lab's host an interface of this process's network namespace as p0, until the end of the
// test.
func lend(t *testing.T, l *lab.Lab, host int, link netlink.Link) {
	t.Helper()
	own, err := netns.Get()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { own.Close() })
	theirs, err := netns.GetFromPath(l.NetNS(host))
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	name := link.Attrs().Name
	if err := errors.Join(netlink.LinkSetDown(link), netlink.LinkSetNsFd(link, int(theirs))); err != nil {
		t.Fatalf("move %s: %v", name, err)
	}
	linkOf(t, l, host, name, func(nl *netlink.Handle, link netlink.Link) error {
		addr, err := netlink.ParseAddr(l.Addr(host, 0).String() + "/24")
		return errors.Join(err, nl.LinkSetName(link, "p0"), nl.AddrAdd(link, addr), nl.LinkSetUp(link))
	})
	t.Cleanup(func() {
		linkOf(t, l, host, "p0", func(nl *netlink.Handle, link netlink.Link) error {
			return errors.Join(nl.LinkSetDown(link), nl.LinkSetName(link, name), nl.LinkSetNsFd(link, int(own)))
		})
	})
	waitFor(t, name+" has its carrier", func() (up bool) {
		linkOf(t, l, host, "p0", func(_ *netlink.Handle, link netlink.Link) error {
			up = link.Attrs().OperState == netlink.OperUp || link.Attrs().RawFlags&unix.IFF_LOWER_UP != 0
			return nil
		})
		return up
	})
}

// inOnePiece fails if a host has got frames in several pieces.
func inOnePiece(t *testing.T, h *host) {
	t.Helper()
	if n := h.counters(t).DropNonlinear; n != 0 {
		t.Errorf("host %d: drop_nonlinear is %d, want frames in one piece", h.index, n)
	}
}

func TestVirtioInterfacesCarryEveryByte(t *testing.T) {
	for _, c := range []struct {
		name                       string
		pair, mtu, queues, payload int
	}{
		{"MTU 1500", pairPlain, 1500, 1, 1024},
		{"MTU 1500 and several queues", pairQueues, 1500, 2, 1024},
		{"MTU 9000", pairJumbo, 9000, 1, 3072},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := virtioLab(t, c.pair, 2)
			for i := range 2 {
				linkOf(t, l, i, "p0", func(_ *netlink.Handle, link netlink.Link) error {
					if a := link.Attrs(); a.MTU != c.mtu || a.NumTxQueues < c.queues {
						return fmt.Errorf("host %d: MTU %d, %d queues, want %d and %d", i, a.MTU, a.NumTxQueues, c.mtu, c.queues)
					}
					return nil
				})
			}
			if c.mtu > loader.MaxNativeMTU && !kernelAtLeast(t, 6, 3) {
				refusedForItsMTU(t, l)
				return
			}
			h := openPair(t, l, transport.Config{RetryTime: time.Minute})
			renewBuffers(t, l)
			// QEMU takes frames out of the ring when its main loop gets to it: when the host is busy, that stops for
			// longer than a round trip, which no ACK tells in time. At most 0.1 % is lost alone, up to 6 % beside another.
			conn := connect(t, h[0], h[1], perCent(15))
			if got := conn[0].Info().Payload; got != c.payload {
				t.Errorf("payload is %d bytes, want %d", got, c.payload)
			}
			for round := range uint64(3) {
				before := [2]loader.Counters{h[0].counters(t), h[1].counters(t)}
				d := bothWays(t, h, conn, round, append(edges(uint64(c.payload)), mixed(round, 4<<20)...))
				exchange(t, d...)
				for i := range h {
					inOnePiece(t, h[i])
					wholePayloads(t, d[i], before[i], uint64(c.payload))
				}
			}
			compareWithTCP(t, h, conn)
		})
	}
}

// wholePayloads fails if a direction's messages were cut into other packets than those of a payload:
// smaller ones, because those of full size did not get through.
func wholePayloads(t *testing.T, d *direction, before loader.Counters, payload uint64) {
	t.Helper()
	want := uint64(0)
	for _, m := range d.messages {
		want += max(1, (m.size+payload-1)/payload)
	}
	k := d.a.counters(t)
	if got := (k.SentPkts - before.SentPkts) - (k.Retransmits - before.Retransmits); got != want {
		t.Errorf("host %d: messages went as %d packets, want %d of %d bytes", d.a.index, got, want, payload)
	}
}

// renewBuffers uses up the receive buffers that the driver made before it had a program. Those that are
// for 1500 bytes cut larger frames into pieces, our full-size probes too: as many as the ring has.
func renewBuffers(t *testing.T, l *lab.Lab) {
	t.Helper()
	for way, ends := range [][2]int{{0, 1}, {1, 0}} {
		if _, err := tcpStream(l, ends[0], ends[1], 4<<20, uint64(way)); err != nil {
			t.Fatal(err)
		}
	}
}

// refusedForItsMTU wants the error of a driver that takes frames of one page only: virtio_net's before
// Linux 6.3.
func refusedForItsMTU(t *testing.T, l *lab.Lab) {
	t.Helper()
	h := &host{lab: l}
	err := h.open(t, transport.Config{})
	if !errors.Is(err, loader.ErrUnsupported) {
		t.Fatalf("open at MTU 9000: %v, want %v", err, loader.ErrUnsupported)
	}
	t.Log(err)
	for _, want := range []string{"p0", "virtio_net", "MTU is 9000", fmt.Sprintf("want at most %d", loader.MaxNativeMTU)} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q does not contain %q", err, want)
		}
	}
}

func TestVirtioInterfaceWhoseGuestOffloadsStayOnIsRefused(t *testing.T) {
	l := virtioLab(t, pairOffloads, 1)
	h := &host{lab: l}
	err := h.open(t, transport.Config{})
	if !errors.Is(err, loader.ErrUnsupported) {
		t.Fatalf("open with guest offloads on: %v, want %v", err, loader.ErrUnsupported)
	}
	t.Log(err)
	for _, want := range []string{
		"p0", "virtio_net", "merged", "ethtool -K p0 lro off rx-gro-hw off", "virtio-net-pci,guest_tso4=off,guest_tso6=off",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q does not contain %q", err, want)
		}
	}
}

func kernelAtLeast(t *testing.T, major, minor int) bool {
	t.Helper()
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		t.Fatal(err)
	}
	var a, b int
	if _, err := fmt.Sscanf(string(release), "%d.%d", &a, &b); err != nil {
		t.Fatalf("kernel release %q: %v", release, err)
	}
	return a > major || a == major && b >= minor
}

// compareWithTCP logs how fast Writes of 1 MiB are and how fast TCP is over the same interfaces: the
// median of some turns each. It asserts nothing: how fast a machine is, is no matter of tests.
func compareWithTCP(t *testing.T, h [2]*host, c [2]*transport.Conn) {
	t.Helper()
	const turns, span = 3, 1500 * time.Millisecond
	var ours, tcp []float64
	for range turns {
		ours = append(ours, writeRate(t, h, c, span))
		tcp = append(tcp, tcpRate(t, h[0].lab, span))
	}
	slices.Sort(ours)
	slices.Sort(tcp)
	t.Logf("payload %d: Writes %.3f Gbit/s, TCP %.3f, ratio %.2f (medians of %d; Writes %.3f, TCP %.3f)", c[0].Info().Payload,
		ours[turns/2], tcp[turns/2], ours[turns/2]/tcp[turns/2], turns, ours, tcp)
}

// writeRate keeps 4 Writes of 1 MiB outstanding for a while and returns Gbit/s.
func writeRate(t *testing.T, h [2]*host, c [2]*transport.Conn, span time.Duration) float64 {
	t.Helper()
	const size, depth = 1 << 20, 4
	from, to := h[0].alloc(t, size), h[1].alloc(t, size)
	start := time.Now()
	posted, completed := 0, 0
	for {
		for ; posted-completed < depth && time.Since(start) < span; posted++ {
			w := transport.WriteRequest{WRID: uint64(posted), Local: from, Length: size, RemoteAddr: to.Addr(), RKey: to.RKey()}
			if err := c[0].PostWrite(w); err != nil {
				t.Fatal(err)
			}
		}
		if posted == completed {
			break
		}
		if got := next(t, c[0].SendCQ()); got.WRID != uint64(completed) || got.Status != core.StatusSuccess {
			t.Fatalf("write %d: completion %+v: %v", completed, got, c[0].Err())
		}
		completed++
	}
	return float64(completed) * size * 8 / float64(time.Since(start).Nanoseconds())
}

// tcpRate sends over one TCP connection from host 0 to host 1 for a while and returns Gbit/s.
func tcpRate(t *testing.T, l *lab.Lab, span time.Duration) float64 {
	t.Helper()
	var listener net.Listener
	err := l.Do(1, func() (err error) {
		listener, err = net.Listen("tcp", net.JoinHostPort(l.Addr(1, 0).String(), "0"))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	type result struct {
		n   int64
		err error
	}
	arrived := make(chan result, 1)
	go func() {
		var r result
		c, err := listener.Accept()
		if err == nil {
			defer c.Close()
			_ = c.SetReadDeadline(time.Now().Add(patience))
			// Not by splice: what is compared puts the bytes into user space's memory.
			r.n, err = io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{c}, make([]byte, 256<<10))
		}
		r.err = err
		arrived <- r
	}()
	var c net.Conn
	err = l.Do(0, func() (err error) {
		c, err = net.DialTimeout("tcp", listener.Addr().String(), patience)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetWriteDeadline(time.Now().Add(patience))
	start, block := time.Now(), make([]byte, 64<<10)
	for time.Since(start) < span {
		if _, err := c.Write(block); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	r := <-arrived
	if r.err != nil {
		t.Fatal(r.err)
	}
	return float64(r.n) * 8 / float64(time.Since(start).Nanoseconds())
}
