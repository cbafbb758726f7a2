// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"encoding/binary"
	"math"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/loader"
	"github.com/metaroce/metaroce/transport/core"
	"github.com/metaroce/metaroce/wire"
)

// takeReady does what mr_tx does with the head of the ready ring of a connection that then has
// nothing to send: not ready any more first, then off the ring.
func takeReady(w *loader.Pump) (slot uint32, ok bool) {
	n := uint32(len(w.Ring))
	head := atomic.LoadUint32(&w.Head)
	entry := atomic.LoadUint32(&w.Ring[head%n])
	if head == atomic.LoadUint32(&w.Tail) || entry == 0 {
		return 0, false
	}
	atomic.SwapUint32(&w.Ready[entry-1], 0)
	atomic.StoreUint32(&w.Ring[head%n], 0)
	atomic.StoreUint32(&w.Head, head+1)
	return entry - 1, true
}

func TestEveryRingOfTheBellIsSeenByAPumpThatSleepsInBetween(t *testing.T) {
	const slots, posts = 5, 20000
	var (
		words  loader.Pump
		posted [slots]atomic.Uint32
		wakes  = make(chan struct{}, 1)
		wg     sync.WaitGroup
	)
	b := bell{words: &words, wake: func() { wakes <- struct{}{} }}
	for s := range uint32(slots) {
		wg.Go(func() {
			for range posts {
				posted[s].Add(1)
				b.ring(s)
			}
		})
	}
	var seen [slots]uint32
	done := func() bool {
		for _, n := range seen {
			if n != posts {
				return false
			}
		}
		return true
	}
	naps := 0
	for !done() {
		if s, ok := takeReady(&words); ok {
			seen[s] = posted[s].Load()
			continue
		}
		atomic.SwapUint32(&words.Sleeping, 1)
		if atomic.LoadUint32(&words.Head) != atomic.LoadUint32(&words.Tail) {
			if atomic.SwapUint32(&words.Sleeping, 0) == 0 {
				<-wakes // somebody has taken it back: one wake is under way
			}
			continue
		}
		naps++
		select {
		case <-wakes:
		case <-time.After(20 * time.Second):
			t.Fatalf("asleep with work posted: seen %v of %d each, sleeping %d", seen, posts, words.Sleeping)
		}
	}
	wg.Wait()
	t.Logf("%d naps", naps)
}

func TestBellOfAReadyConnectionAddsNothingToTheRing(t *testing.T) {
	var words loader.Pump
	b := bell{words: &words, wake: func() { t.Error("woken though awake") }}
	b.ring(3)
	b.ring(3)
	if words.Tail != 1 || words.Ring[0] != 4 || words.Ready[3] != 1 {
		t.Errorf("tail %d, ring[0] %d, ready[3] %d; want 1, 4, 1", words.Tail, words.Ring[0], words.Ready[3])
	}
}

func TestBellWakesASleeperOnceAlsoWhenReadyAlready(t *testing.T) {
	var words loader.Pump
	woken := 0
	b := bell{words: &words, wake: func() { woken++ }}
	b.ring(3)
	words.Sleeping = 1
	b.ring(3)
	b.ring(3)
	if woken != 1 || words.Sleeping != 0 {
		t.Errorf("woken %d times, sleeping %d; want 1 and 0", woken, words.Sleeping)
	}
}

func TestBellPassesTheRingsEndAndTheCountersWrap(t *testing.T) {
	var words loader.Pump
	words.Head, words.Tail = math.MaxUint32-1, math.MaxUint32-1
	b := bell{words: &words, wake: func() {}}
	for s := range uint32(4) {
		b.ring(s)
	}
	for want := range uint32(4) {
		if s, ok := takeReady(&words); !ok || s != want {
			t.Fatalf("took %d, %v; want %d", s, ok, want)
		}
	}
	if _, ok := takeReady(&words); ok {
		t.Error("took a fifth of four")
	}
}

func TestBatchFollowsTheLoad(t *testing.T) {
	for _, c := range []struct {
		name             string
		batch, max       uint32
		sent, runs, want uint64
	}{
		{"idle stays at one", 1, 32, 0, 2048, 1},
		{"a stream grows it", 1, 32, 1500, 2048, 4},
		{"no further than allowed", 16, 32, 2048, 2048, 32},
		{"not beyond one if one is allowed", 1, 1, 2048, 2048, 1},
		{"medium load keeps it", 8, 32, 600, 2048, 8},
		{"single packets shrink it", 32, 32, 100, 2048, 8},
		{"to one at last", 2, 32, 0, 2048, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := tempo{c.batch, c.max}
			if p.adapt(c.sent, c.runs); uint64(p.batch) != c.want {
				t.Errorf("batch %d, want %d", p.batch, c.want)
			}
		})
	}
}

func TestPumpSleepsOnlyWhenNothingIsDue(t *testing.T) {
	const us, ms = int64(time.Microsecond), int64(time.Millisecond)
	for _, c := range []struct {
		name  string
		o     outlook
		sleep bool
		d     int64
	}{
		{"just sent: spins", outlook{now: 100 * us, lastSent: 50 * us, spin: 200 * us}, false, 0},
		{"long idle: until woken", outlook{now: 500 * us, lastSent: 0, spin: 200 * us}, true, math.MaxInt64},
		{"long idle, somebody ready: a moment", outlook{now: 500 * us, spin: 200 * us, ready: 1}, true, int64(stuckNap)},
		{"paced soon: spins", outlook{now: ms, paced: ms + 90*us, spin: us, ready: 1}, false, 0},
		{"paced later: until a little before", outlook{now: ms, paced: ms + 500*us, spin: us, ready: 1}, true, 450 * us},
		{"paced far ahead: looks now and then", outlook{now: ms, paced: 60 * ms, spin: us, ready: 1}, true, int64(stuckNap)},
		{"paced later, but others are ready: not long", outlook{now: ms, paced: ms + 500*us, spin: us, ready: 2}, true, 200 * us},
		{"paced and due: spins", outlook{now: ms, paced: ms, spin: us, ready: 1}, false, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			if d, sleep := c.o.nap(); sleep != c.sleep || d != c.d {
				t.Errorf("sleep %v for %d ns, want %v for %d", sleep, d, c.sleep, c.d)
			}
		})
	}
}

func TestIndexComesBackLastAndWithTheNextGeneration(t *testing.T) {
	x := newIndexes("things", 1, 4, 0xff, 0)
	take := func() (index, gen uint32) {
		t.Helper()
		index, gen, err := x.take()
		if err != nil || index < 1 || index > 3 {
			t.Fatalf("index %d, %v; want 1 to 3", index, err)
		}
		return index, gen
	}
	first, gen := take()
	x.give(first)
	for range 2 {
		if i, _ := take(); i == first {
			t.Errorf("index %d is back while others were unused for longer", i)
		}
	}
	if i, g := take(); i != first || g != (gen+1)&0xff {
		t.Errorf("index %d generation %d, want %d and %d", i, g, first, (gen+1)&0xff)
	}
	if _, _, err := x.take(); err == nil {
		t.Error("a fourth of three indexes")
	}
}

func TestGenerationsWrapToTheFirstOne(t *testing.T) {
	x := newIndexes("things", 0, 1, 3, 1)
	_, last, err := x.take()
	if err != nil {
		t.Fatal(err)
	}
	for range 5 {
		x.give(0)
		_, gen, err := x.take()
		if err != nil {
			t.Fatal(err)
		}
		if want := last%3 + 1; gen != want {
			t.Fatalf("generation %d after %d, want %d", gen, last, want)
		}
		last = gen
	}
}

// What one process was given tells nobody what another is given: of 200 tables no first index and no
// generation is in nearly all.
func TestIndexesAndGenerationsBeginAtRandom(t *testing.T) {
	const tables = 200
	indexes, gens := map[uint32]int{}, map[uint32]int{}
	for range tables {
		x := newIndexes("memory regions", 1, 256, 0xff, 0)
		i, gen, err := x.take()
		if err != nil {
			t.Fatal(err)
		}
		indexes[i]++
		gens[gen]++
		seen := map[uint32]bool{i: true}
		for range 254 {
			i, _, err := x.take()
			if err != nil || i < 1 || i > 255 || seen[i] {
				t.Fatalf("index %d, %v; want each of 1 to 255 once", i, err)
			}
			seen[i] = true
		}
	}
	// 255 and 256 values: by chance some 115 different ones of 200 come.
	if len(indexes) < 60 || len(gens) < 60 {
		t.Errorf("%d first indexes and %d generations in %d tables, want many", len(indexes), len(gens), tables)
	}
}

func TestNoQPNIsOneOfInfiniBandsOwn(t *testing.T) {
	for range 1000 {
		for _, c := range []struct{ conns, first uint32 }{{1, 2}, {2, 1}, {256, 1}} {
			x := newIndexes("connection slots", 0, int(c.conns), 1<<24/c.conns-1, c.first)
			slot, gen, err := x.take()
			if qpn := gen*c.conns + slot; err != nil || qpn < 2 || qpn >= 1<<24 {
				t.Fatalf("%d slots: QPN %#x, %v; want 2 to 0xffffff", c.conns, qpn, err)
			}
		}
	}
}

func TestPathPoolGivesRowsAndTakesThemBack(t *testing.T) {
	p := &ranges{used: make([]bool, 8)}
	take := func(n, want int) {
		t.Helper()
		if base, err := p.take(n); err != nil || base != want {
			t.Errorf("%d in a row at %d, %v; want at %d", n, base, err, want)
		}
	}
	take(3, 0)
	take(3, 3)
	if base, err := p.take(3); err == nil {
		t.Errorf("a row of 3 at %d though only 2 are free", base)
	}
	p.give(0, 3)
	take(2, 0)
	take(2, 6)
	if base, err := p.take(2); err == nil {
		t.Errorf("a row of 2 at %d though entry 2 stands alone", base)
	}
	take(1, 2)
}

// frameOf puts a UDP datagram behind a template the way mr_tx does it.
func frameOf(p *loader.Path, payload []byte) []byte {
	l3, l4 := int(p.L3Off), int(p.L4Off)
	f := append([]byte(nil), p.Tmpl[:l4]...)
	f = wire.UDP{Sport: 50000, Dport: 4791, Length: uint16(8 + len(payload))}.Append(f)
	f = append(f, payload...)
	fold := func(s uint32) uint16 { return ^uint16(s + s>>16) }
	if p.V6 == 0 {
		binary.BigEndian.PutUint16(f[l3+2:], uint16(len(f)-l3))
		sum := uint64(p.L3Sum) + uint64(binary.NativeEndian.Uint16(f[l3+2:]))
		binary.NativeEndian.PutUint16(f[l3+10:], fold(uint32(sum&0xffff+sum>>16)))
	} else {
		binary.BigEndian.PutUint16(f[l3+4:], uint16(len(f)-l4))
	}
	sum := p.PseudoSum + wordSum(f[l4+4:l4+6]) + wordSum(f[l4:])
	sum = sum&0xffff + sum>>16
	binary.NativeEndian.PutUint16(f[l4+6:], fold(sum))
	return f
}

func TestTemplateAndItsSumsMakeAFrameThatTheReferenceCodecAccepts(t *testing.T) {
	src, dst := net.HardwareAddr{2, 0, 0, 0, 0, 1}, net.HardwareAddr{2, 0, 0, 0, 0, 2}
	plain, tag := egress{ifindex: 9}, uint16(5<<13|100)
	tagged := egress{ifindex: 9, tagged: true, tci: tag}
	for _, c := range []struct {
		name, local, remote string
		out                 egress
		vlan                *uint16
	}{
		{"IPv4", "198.18.0.1", "198.18.255.254", plain, nil},
		{"IPv6", "fd00::1", "fd00:ffff:ffff::ffff", plain, nil},
		{"IPv4 mapped", "::ffff:198.18.0.1", "198.18.0.2", plain, nil},
		{"IPv4 with VLAN tag", "198.18.0.1", "198.18.255.254", tagged, &tag},
		{"IPv6 with VLAN tag", "fd00::1", "fd00:ffff:ffff::ffff", tagged, &tag},
	} {
		t.Run(c.name, func(t *testing.T) {
			local, remote := netip.MustParseAddr(c.local), netip.MustParseAddr(c.remote)
			var p loader.Path
			if err := fillTemplate(&p, c.out, local, remote, src, dst, 26); err != nil {
				t.Fatal(err)
			}
			f := frameOf(&p, []byte{1, 2, 3, 4, 5, 6})
			l3, l4 := int(p.L3Off), int(p.L4Off)
			var eth wire.Ethernet
			if err := eth.Decode(f); err != nil || net.HardwareAddr(eth.Src[:]).String() != src.String() || net.HardwareAddr(eth.Dst[:]).String() != dst.String() {
				t.Errorf("Ethernet %+v, %v; want from %v to %v", eth, err, src, dst)
			}
			if d := cmp.Diff(c.vlan, eth.VLAN); d != "" {
				t.Errorf("VLAN tag (-want +got):\n%s", d)
			}
			tos := byte(0)
			if local.Unmap().Is4() {
				var ip wire.IPv4
				if err := ip.Decode(f[l3:]); err != nil {
					t.Fatalf("IPv4 header: %v", err)
				}
				if wire.Fold(wire.Sum(0, f[l3:l4])) != 0xffff {
					t.Error("IPv4 header checksum is wrong")
				}
				if f[l3+6] != 0x40 || f[l3+8] != 64 {
					t.Errorf("flags %#x, TTL %d; want don't fragment and 64", f[l3+6], f[l3+8])
				}
				tos = f[l3+1]
			} else {
				var ip wire.IPv6
				if err := ip.Decode(f[l3:]); err != nil {
					t.Fatalf("IPv6 header: %v", err)
				}
				tos = f[l3]<<4 | f[l3+1]>>4
			}
			if tos != 26<<2|2 {
				t.Errorf("traffic class %#x, want DSCP 26 with ECT(0)", tos)
			}
			if !wire.UDPVerify(local.Unmap(), remote.Unmap(), f[l4:]) {
				t.Error("UDP checksum from the template's pseudo header sum is wrong")
			}
			if p.Ifindex != 9 || p.Peer != addrWords(remote) || p.Local != addrWords(local) {
				t.Errorf("ifindex %d, local %x, peer %x", p.Ifindex, p.Local, p.Peer)
			}
		})
	}
}

func TestTemplateRefusesMixedFamiliesAndBadLinkAddresses(t *testing.T) {
	var p loader.Path
	v4, v6 := netip.MustParseAddr("198.18.0.1"), netip.MustParseAddr("fd00::1")
	mac := make(net.HardwareAddr, 6)
	if fillTemplate(&p, egress{ifindex: 1}, v4, v6, mac, mac, 0) == nil {
		t.Error("no error for IPv4 to IPv6")
	}
	if fillTemplate(&p, egress{ifindex: 1}, v4, v4, mac, mac[:4], 0) == nil {
		t.Error("no error for a link address of 4 bytes")
	}
}

func TestLinkAddressesAreRewrittenAndNothingElse(t *testing.T) {
	var p loader.Path
	mac := func(b byte) net.HardwareAddr { return net.HardwareAddr{b, b, b, b, b, b} }
	a := netip.MustParseAddr("198.18.0.1")
	if err := fillTemplate(&p, egress{ifindex: 1}, a, a, mac(1), mac(2), 0); err != nil {
		t.Fatal(err)
	}
	want := p.Tmpl
	copy(want[:], mac(4))
	copy(want[6:], mac(3))
	if writeLinkAddrs(&p.Tmpl, mac(4), mac(3)); p.Tmpl != want {
		t.Errorf("template %x, want %x", p.Tmpl, want)
	}
}

func TestAddressesAreStoredAsTheWireHasThem(t *testing.T) {
	w := addrWords(netip.MustParseAddr("198.18.0.1"))
	var b [16]byte
	for i, v := range w {
		binary.NativeEndian.PutUint32(b[4*i:], v)
	}
	want := [16]byte{10: 0xff, 11: 0xff, 12: 198, 13: 18, 14: 0, 15: 1}
	if b != want {
		t.Errorf("bytes %x, want %x", b, want)
	}
}

func TestPayloadIsTheLargestThatTheMTUTakes(t *testing.T) {
	v4, v6 := netip.MustParseAddr("198.18.0.1"), netip.MustParseAddr("fd00::1")
	for _, c := range []struct {
		addr      netip.Addr
		mtu, want int
	}{
		{v4, 9000, 3072},
		{v4, 3072 + 96, 3072},
		{v4, 3072 + 95, 2048},
		{v6, 3072 + 95, 2048},
		{v6, 3072 + 115, 2048},
		{v6, 3072 + 116, 3072},
		{v4, 1500, 1024},
		{v4, 1024 + 95, 0},
	} {
		if got := fitPayload(c.addr, c.mtu); got != c.want {
			t.Errorf("payload at MTU %d from %v: %d, want %d", c.mtu, c.addr, got, c.want)
		}
	}
}

func TestClockIsTheKernelsMonotonicClock(t *testing.T) {
	c, err := newClock()
	if err != nil {
		t.Fatal(err)
	}
	read := func() int64 {
		var ts unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
			t.Fatal(err)
		}
		return ts.Nano()
	}
	time.Sleep(10 * time.Millisecond)
	// newClock reads two clocks one after the other: however long it was interrupted in between,
	// its clock is only ahead by that.
	before, now := read(), c.now()
	if now < before-int64(time.Millisecond) || now > read()+int64(20*time.Second) {
		t.Errorf("clock says %d, CLOCK_MONOTONIC said %d before", now, before)
	}
}

func TestInitialStateHasEveryPathAtTheAgreedSequence(t *testing.T) {
	e := &Engine{cfg: Config{DSCP: 26}, planes: []*plane{{ring: 1}}}
	c := &Conn{e: e, qpn: 0x123, token: 5, psn: math.MaxUint32, pd: 3, base: 16}
	p := core.ConnParams{
		Remote:  core.Endpoint{QPN: 0x456, Token: 6, InitialPSN: 0},
		Payload: 1024, Checksum: true,
		Paths: []core.PathParams{{Sport: 50001}, {Sport: 50002}},
	}
	w := c.initial(p, core.Actions{Sets: []core.PathSet{{Path: 1, Cwnd: 9, Pace: 100}}}, 0b01)
	if w.Tx[1].Egress != 1 {
		t.Errorf("path 1 leaves by ring %d, want its plane's, 1", w.Tx[1].Egress)
	}
	if w.State != loader.ConnFree {
		t.Errorf("state %d, want %d until mr_ctl opens it", w.State, loader.ConnFree)
	}
	if w.PsnNext != c.psn || w.PsnCum != c.psn || w.PsnLimit != psnLimit-1 || w.Rxs.Cum != 0 {
		t.Errorf("psn next %#x, cum %#x, limit %#x, received %#x", w.PsnNext, w.PsnCum, w.PsnLimit, w.Rxs.Cum)
	}
	if w.Tx[0].Next != c.psn || w.Tx[0].Una != c.psn || w.Tx[0].Sport != 50001 || w.Rx[1].Max != math.MaxUint32 {
		t.Errorf("path 0 %+v, path 1's highest %#x", w.Tx[0], w.Rx[1].Max)
	}
	if w.Tx[1].Cwnd != 9 || w.Tx[1].Pace != 100 || w.Tx[1].PaceMax != 200 {
		t.Errorf("path 1 %+v, want what the policy said", w.Tx[1])
	}
	if w.Active != 0 || w.Tx[0].State != loader.PathSuspect || w.Tx[1].State != loader.PathDown {
		t.Errorf("active %b, states %d and %d; want path 0 to be proven and path 1 down", w.Active, w.Tx[0].State, w.Tx[1].State)
	}
}

func TestNeighbourStatesHaveIproutesNames(t *testing.T) {
	p := &plane{}
	p.up.Store(true)
	for state, want := range map[int]string{0: "NONE", unix.NUD_FAILED: "FAILED", unix.NUD_INCOMPLETE: "INCOMPLETE", unix.NUD_STALE: "STALE"} {
		if got := stateName(&hop{hopKey: hopKey{plane: p}, state: state}); got != want {
			t.Errorf("state %#x is called %s, want %s", state, got, want)
		}
	}
	p.up.Store(false)
	if got := stateName(&hop{hopKey: hopKey{plane: p}}); got != "behind an interface without carrier" {
		t.Errorf("without carrier: %s", got)
	}
}

func TestCarrierNeedsTheLinkUpAtBothEnds(t *testing.T) {
	for flags, want := range map[uint32]bool{
		unix.IFF_UP | unix.IFF_LOWER_UP: true, unix.IFF_UP: false, unix.IFF_LOWER_UP: false,
	} {
		if got := carrier(&netlink.LinkAttrs{RawFlags: flags}); got != want {
			t.Errorf("flags %#x: carrier %v, want %v", flags, got, want)
		}
	}
}

func TestVLANInterfaceLeavesByItsParentWithThePriorityOfItsEgressMap(t *testing.T) {
	qos := map[uint32]uint32{0: 1, 2: 3, 4: 7, 6: 5}
	vlan := loader.Interface{Name: "e.100", Index: 8, VLAN: &loader.VLAN{ID: 100, Parent: "e", ParentIndex: 3, Egress: qos}}
	bare := vlan
	bare.VLAN = &loader.VLAN{ID: 4094, Parent: "e", ParentIndex: 3}
	for _, c := range []struct {
		name string
		itf  loader.Interface
		dscp int
		want egress
	}{
		{"no VLAN", loader.Interface{Name: "e", Index: 3}, 26, egress{ifindex: 3}},
		{"no map", bare, 26, egress{ifindex: 3, tagged: true, tci: 4094}},
		// What a socket with that IP_TOS has as SO_PRIORITY: rt_tos2priority.
		{"best effort", vlan, 0, egress{ifindex: 3, tagged: true, tci: 1<<13 | 100}},
		{"bulk", vlan, 26, egress{ifindex: 3, tagged: true, tci: 3<<13 | 100}},
		{"interactive bulk", vlan, 46, egress{ifindex: 3, tagged: true, tci: 7<<13 | 100}},
		{"interactive", vlan, 4, egress{ifindex: 3, tagged: true, tci: 5<<13 | 100}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := egressOf(c.itf, c.dscp); got != c.want {
				t.Errorf("leaves as %+v, want %+v", got, c.want)
			}
		})
	}
}
