// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/loader"
	"github.com/metaroce/metaroce/transport/core"
)

// TestOneDevicePair has what needs no device of its own: making one takes the verifier's time.
func TestOneDevicePair(t *testing.T) {
	e := openPair(t, 1, Config{RetryTime: 500 * time.Millisecond})
	for _, c := range []struct {
		name string
		test func(*testing.T, [2]*Engine)
	}{
		{"ImmediateCompletesAReceiveAndWakesWhoArmedForIt", immediateCompletesAReceiveAndWakesWhoArmedForIt},
		{"LostEventLeavesNobodyAsleep", lostEventLeavesNobodyAsleep},
		{"SenderWithoutCreditGoesOnWhenAReceiveIsPostedLater", senderWithoutCreditGoesOnWhenAReceiveIsPostedLater},
		{"RefusedRequestSaysWhyAndTheConnectionFails", refusedRequestSaysWhyAndTheConnectionFails},
		{"RefusalFailsTheConnectionThoughNobodyAsks", refusalFailsTheConnectionThoughNobodyAsks},
		{"RegionSizesAndRightsOutOfBoundsAreRefused", regionSizesAndRightsOutOfBoundsAreRefused},
		{"RegionIsGoneFromTheKernelAfterClose", regionIsGoneFromTheKernelAfterClose},
		{"FirstReasonOfAFailureCounts", firstReasonOfAFailureCounts},
		{"NeighbourThatDoesNotAnswerIsNamedWithItsState", neighbourThatDoesNotAnswerIsNamedWithItsState},
		{"PeerThatIsGoneIsARetryExceededErrorNamingIt", peerThatIsGoneIsARetryExceededErrorNamingIt},
		{"CloseWithDataUnderWayEndsBothSides", closeWithDataUnderWayEndsBothSides},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, e) })
	}
}

// notShort skips what asks nothing of the kernel that other tests do not ask too: each load takes an
// emulated machine's verifier seconds.
func notShort(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("short: loads programs, and the kernel makes no difference")
	}
}

func wantStatus(t *testing.T, c *Conn, msn uint32, want core.Status) {
	t.Helper()
	if got := waitSend(t, c, msn); got != want {
		t.Fatalf("request %d ended with %v, want %v (connection: %v)", msn, got, want, c.Err())
	}
}

func wantEqual(t *testing.T, from, to *Region) {
	t.Helper()
	if !bytes.Equal(from.Bytes(), to.Bytes()) {
		t.Error("the peer's memory differs from what was written")
	}
}

func TestWriteLandsInThePeersMemoryAndCompletes(t *testing.T) {
	const size = 1<<20 + 3
	for _, c := range []struct {
		name string
		cfg  Config
	}{
		{"IPv4", Config{DSCP: 26}},
		{"IPv6", Config{DSCP: 26, PreferIPv6: true}},
		{"payload 1024", Config{Payload: 1024}},
		{"no checksum", Config{ChecksumOff: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := openPair(t, 1, c.cfg)
			conn := connect(t, e, 8)
			from, to := alloc(t, e[0], size), alloc(t, e[1], size)
			fill(from.Bytes(), 1)
			conn[0].PostSend(0, write(from, to, size))
			wantStatus(t, conn[0], 0, core.StatusSuccess)
			wantEqual(t, from, to)
			if !conn[0].Drained() {
				t.Error("not drained though everything is complete")
			}
			if sent, recv := conn[0].SentPSN(), conn[1].RecvPSN(); sent != recv {
				t.Errorf("sent up to psn %#x, peer has all below %#x", sent, recv)
			}
			wantRepairs(t, 0, e[:]...)
		})
	}
}

func immediateCompletesAReceiveAndWakesWhoArmedForIt(t *testing.T, e [2]*Engine) {
	c := connect(t, e, 2)
	from, to := alloc(t, e[0], 100), alloc(t, e[1], 100)
	fill(from.Bytes(), 2)
	if _, ok := c[1].RecvDone(0); ok {
		t.Fatal("receive 0 complete before anything was sent")
	}
	c[1].PostRecv(1)
	c[1].ArmRecv(0)
	c[0].ArmSend(0)
	wr := write(from, to, 100)
	wr.Op, wr.Imm = core.OpWriteImm, 0xCAFE
	c[0].PostSend(0, wr)
	for i, who := range []string{"sender", "receiver"} {
		select {
		case <-c[i].Events():
		case <-time.After(20 * time.Second):
			t.Fatalf("no event at the %s", who)
		}
	}
	var got core.Received
	waitFor(t, "receive 0", func() (ok bool) { got, ok = c[1].RecvDone(0); return ok })
	if want := (core.Received{Imm: 0xCAFE, Length: 100}); got != want {
		t.Errorf("received %+v, want %+v", got, want)
	}
	wantStatus(t, c[0], 0, core.StatusSuccess)
	wantEqual(t, from, to)
}

func senderWithoutCreditGoesOnWhenAReceiveIsPostedLater(t *testing.T, e [2]*Engine) {
	c := connect(t, e, 2)
	from, to := alloc(t, e[0], 100), alloc(t, e[1], 100)
	wr := write(from, to, 100)
	wr.Op = core.OpWriteImm
	c[0].PostSend(0, wr)
	waitFor(t, "sender stalled", func() bool {
		s, err := c[0].snapshot()
		return err == nil && s.NoCredit
	})
	c[1].PostRecv(1)
	wantStatus(t, c[0], 0, core.StatusSuccess)
	s, err := c[0].snapshot()
	if err != nil {
		t.Fatal(err)
	}
	for i, p := range s.Paths {
		if p.Retx != 0 {
			t.Errorf("path %d: %d retransmissions, want none", i, p.Retx)
		}
	}
}

func refusedRequestSaysWhyAndTheConnectionFails(t *testing.T, e [2]*Engine) {
	for _, c := range []struct {
		name   string
		spoil  func(*core.WorkRequest)
		status core.Status
		remote bool
	}{
		{"unknown rkey", func(w *core.WorkRequest) { w.RKey ^= 0xff }, core.StatusRemAccess, true},
		{"beyond the peer's region", func(w *core.WorkRequest) { w.RemoteAddr++ }, core.StatusRemAccess, true},
		{"unknown lkey", func(w *core.WorkRequest) { w.LKey ^= 0xff }, core.StatusLocProt, false},
		{"beyond the own region", func(w *core.WorkRequest) { w.LocalAddr++ }, core.StatusLocProt, false},
		{"unknown operation", func(w *core.WorkRequest) { w.Op = 99 }, core.StatusLocQPOp, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			conn := connect(t, e, 4)
			const size = 100000
			from, to := alloc(t, e[0], size), alloc(t, e[1], size)
			fill(from.Bytes(), 3)
			good, bad := write(from, to, size), write(from, to, size)
			c.spoil(&bad)
			conn[0].PostSend(0, good)
			wantStatus(t, conn[0], 0, core.StatusSuccess)
			wantEqual(t, from, to)
			conn[0].PostSend(1, good)
			conn[0].PostSend(2, bad)
			conn[0].PostSend(3, good)
			wantStatus(t, conn[0], 1, core.StatusSuccess)
			wantStatus(t, conn[0], 2, c.status)
			if s, ok := conn[0].SendDone(3); ok {
				t.Errorf("the request behind the refused one completed with %v", s)
			}
			select {
			case <-conn[0].Failed():
			case <-time.After(20 * time.Second):
				t.Fatal("the connection goes on")
			}
			re, ok := errors.AsType[*RequestError](conn[0].Err())
			if !ok || re.Status != c.status || re.Remote != c.remote {
				t.Errorf("connection's error %v, want a request error with %v, remote %v", conn[0].Err(), c.status, c.remote)
			}
			if s, _ := conn[0].SendDone(2); s != c.status {
				t.Errorf("asked again, the refused request has %v, want %v", s, c.status)
			}
		})
	}
}

func refusalFailsTheConnectionThoughNobodyAsks(t *testing.T, e [2]*Engine) {
	c := connect(t, e, 4)
	from, to := alloc(t, e[0], 100), alloc(t, e[1], 100)
	wr := write(from, to, 100)
	wr.RKey ^= 0xff
	c[0].PostSend(0, wr)
	select {
	case <-c[0].Failed():
	case <-time.After(20 * time.Second):
		t.Fatal("the connection goes on")
	}
	wantStatus(t, c[0], 0, core.StatusRemAccess)
}

func peerThatIsGoneIsARetryExceededErrorNamingIt(t *testing.T, e [2]*Engine) {
	c := connect(t, e, 4)
	from, to := alloc(t, e[0], 100), alloc(t, e[1], 100)
	if err := c[1].Close(); err != nil {
		t.Fatal(err)
	}
	c[0].PostSend(0, write(from, to, 100))
	select {
	case <-c[0].Failed():
	case <-time.After(20 * time.Second):
		t.Fatal("the connection goes on")
	}
	re, ok := errors.AsType[*core.RetryExceededError](c[0].Err())
	if !ok || !strings.Contains(re.Error(), "198.18.0.2") {
		t.Errorf("error %v, want retry exceeded, naming 198.18.0.2", c[0].Err())
	}
}

func TestConnectionNumbersAndKeysAreNewEachTimeTheirSlotIs(t *testing.T) {
	notShort(t)
	e := openPair(t, 1, Config{MaxConns: 2, MaxRegions: 2})[0]
	qpns, keys := map[uint32]bool{}, map[uint32]bool{}
	for range 6 {
		c, err := e.NewConn(testPD)
		if err != nil {
			t.Fatal(err)
		}
		if c.QPN() < 2 || c.QPN() >= 1<<24 || c.Token() == 0 {
			t.Errorf("QPN %#x, token %#x; want 2 to 0xffffff, not 0", c.QPN(), c.Token())
		}
		qpns[c.QPN()] = true
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		r := alloc(t, e, 1)
		keys[r.Key()] = true
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if len(qpns) != 6 || len(keys) != 6 || keys[0] {
		t.Errorf("QPNs %v, keys %v; want 6 of each, none 0", qpns, keys)
	}
}

func TestFullTablesAreErrorsAndFreeOnesServeAgain(t *testing.T) {
	notShort(t)
	e := openPair(t, 1, Config{MaxConns: 2, MaxRegions: 2, PathPool: 8})
	c := connect(t, e, 8)
	spare, err := e[0].NewConn(testPD)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := e[0].NewConn(testPD); err == nil || !strings.Contains(err.Error(), "connection slots") {
		t.Errorf("a third connection of two: %v", err)
	}
	if err := spare.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := tryConnect(e, 8); err == nil || !strings.Contains(err.Error(), "path pool") {
		t.Errorf("16 paths of a pool of 8: %v", err)
	}
	r := alloc(t, e[0], 1)
	if _, err := e[0].AllocRegion(1, core.AllAccess, testPD); err == nil || !strings.Contains(err.Error(), "memory regions") {
		t.Errorf("a second region of one: %v", err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	alloc(t, e[0], 1)
	for i := range c {
		if err := c[i].Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func regionSizesAndRightsOutOfBoundsAreRefused(t *testing.T, e [2]*Engine) {
	for _, size := range []uint64{0, core.MaxRegion + 1} {
		if _, err := e[0].AllocRegion(size, core.AllAccess, testPD); err == nil || !strings.Contains(err.Error(), fmt.Sprint(size)) {
			t.Errorf("size %d: %v, want an error that names it", size, err)
		}
	}
	if _, err := e[0].AllocRegion(1, 1<<30, testPD); err == nil {
		t.Error("unknown access right was accepted")
	}
}

func regionIsGoneFromTheKernelAfterClose(t *testing.T, e [2]*Engine) {
	r := alloc(t, e[0], 65537)
	index := r.Key() >> 8
	var w loader.Region
	if err := e[0].reg.Region.Lookup(&index, &w); err != nil || w.Key != r.Key() || w.Pd != testPD || w.Len != 65537 || w.Base != r.Addr() {
		t.Fatalf("entry %+v, %v", w, err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if err := e[0].reg.Region.Lookup(&index, &w); err != nil || w != (loader.Region{}) {
		t.Errorf("entry %+v after close, %v; want it clear", w, err)
	}
	var id uint32
	if err := e[0].reg.Mem.Lookup(&index, &id); err == nil {
		t.Errorf("mr_mem still has map %d", id)
	}
	if err := r.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}
}

// openFiles is how many descriptors this process has.
func openFiles(t *testing.T) int {
	t.Helper()
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(names)
}

func TestConnectionsThatComeAndGoLeaveNothingBehind(t *testing.T) {
	e := openPair(t, 2, Config{MaxConns: 4, PathPool: 16})
	once := func() {
		c := connect(t, e, 8)
		from, to := alloc(t, e[0], 5000), alloc(t, e[1], 5000)
		c[0].PostSend(0, write(from, to, 5000))
		wantStatus(t, c[0], 0, core.StatusSuccess)
		for i := range c {
			if err := c[i].Close(); err != nil {
				t.Fatal(err)
			}
		}
		for _, r := range []*Region{from, to} {
			if err := r.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	once()
	files, routines := openFiles(t), runtime.NumGoroutine()
	for range 30 {
		once()
	}
	if n := openFiles(t); n > files {
		t.Errorf("%d descriptors after 30 more connections, %d before", n, files)
	}
	waitFor(t, "goroutines back where they were", func() bool { return runtime.NumGoroutine() <= routines })
	for i := range e {
		if len(e[i].slots.free) != 4 || slices.Contains(e[i].pool.used, true) || len(e[i].router.hops) != 0 || len(e[i].open) != 0 {
			t.Errorf("host %d: free slots %v, pool %v, hops %v, open %v", i, e[i].slots.free, e[i].pool.used, e[i].router.hops, e[i].open)
		}
		for slot := range uint32(4) {
			var w loader.Conn
			if err := e[i].reg.Conn.Lookup(&slot, &w); err != nil || w != (loader.Conn{}) {
				t.Errorf("host %d: slot %d is not clear: QPN %#x, %v", i, slot, w.Qpn, err)
			}
			var id uint32
			if e[i].reg.QP.Lookup(&slot, &id) == nil {
				t.Errorf("host %d: mr_qp still has map %d in slot %d", i, id, slot)
			}
		}
	}
}

func TestDeviceThatClosesLeavesNoDescriptor(t *testing.T) {
	hosts := newHosts(t, 1)
	once := func() {
		e := [2]*Engine{openOn(t, hosts[0], Config{}), openOn(t, hosts[1], Config{})}
		connect(t, e, 2)
		alloc(t, e[0], 1)
		for i := range e {
			if err := e[i].Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	once()
	files, routines := openFiles(t), runtime.NumGoroutine()
	once()
	waitFor(t, "descriptors back where they were", func() bool { return openFiles(t) <= files })
	waitFor(t, "goroutines back where they were", func() bool { return runtime.NumGoroutine() <= routines })
}

func closeWithDataUnderWayEndsBothSides(t *testing.T, e [2]*Engine) {
	c := connect(t, e, 8)
	from, to := alloc(t, e[0], 1<<20), alloc(t, e[1], 1<<20)
	wr := write(from, to, 1<<20)
	for msn := range uint32(core.SQDepth) {
		c[0].PostSend(msn, wr)
	}
	wantStatus(t, c[0], 0, core.StatusSuccess)
	if err := c[1].Close(); err != nil {
		t.Fatal(err)
	}
	if err := to.Close(); err != nil {
		t.Fatal(err)
	}
	if err := c[0].Close(); err != nil {
		t.Fatal(err)
	}
	if _, ok := c[0].SendDone(core.SQDepth - 1); ok {
		t.Error("a request of a closed connection completed")
	}
	c[0].PostSend(0, wr) // must not touch what is unmapped
	c[0].PostRecv(1)
	c[0].ArmSend(0)
	if c[0].Drained() {
		t.Error("a closed connection with requests outstanding says that it is drained")
	}
}

func firstReasonOfAFailureCounts(t *testing.T, e [2]*Engine) {
	c := connect(t, e, 1)
	first := errors.New("first")
	c[0].Fail(first)
	c[0].Fail(errors.New("second"))
	if err := c[0].Err(); err != first {
		t.Errorf("error %v, want the first", err)
	}
	var w loader.Conn
	if err := e[0].lookupConn(c[0].slot, &w); err != nil || w.State != loader.ConnError {
		t.Errorf("state in the kernel %d, %v; want %d", w.State, err, loader.ConnError)
	}
}

func TestPumpSleepsAndWakesForEveryPost(t *testing.T) {
	const rounds = 2000
	e := openPair(t, 1, Config{Spin: 1})
	c := connect(t, e, 1)
	from, to := alloc(t, e[0], 8), alloc(t, e[1], 8)
	before := e[0].pump.naps.Load()
	for msn := range uint32(rounds) {
		c[0].PostSend(msn, write(from, to, 8))
		wantStatus(t, c[0], msn, core.StatusSuccess)
	}
	waitFor(t, "the pump asleep at the end", func() bool { return !e[0].pump.awake.Load() })
	// how often depends on who is faster, the pump or the next post
	if n := e[0].pump.naps.Load() - before; n == 0 {
		t.Errorf("the pump never slept in %d rounds", rounds)
	}
}

func TestPumpIsNeverTheFirstThread(t *testing.T) {
	// Goroutines start on whatever thread is free; so many meet the first one sooner or later.
	p := &pump{}
	p.stop.Store(true)
	ns, err := netns.Get()
	if err != nil {
		t.Skip(err)
	}
	defer ns.Close()
	for range 1000 {
		p.done = make(chan struct{})
		p.tid.Store(0)
		if err := p.start(ns); err != nil {
			t.Skip(err)
		}
		<-p.done
		if int(p.tid.Load()) == os.Getpid() {
			t.Fatal("the pump ran on the process's first thread")
		}
	}
}

// snapshot is the connection's state in the kernel now.
func (c *Conn) snapshot() (core.Snapshot, error) {
	var (
		s core.Snapshot
		w loader.Conn
	)
	c.use.RLock()
	defer c.use.RUnlock()
	if c.q == nil {
		return s, fmt.Errorf("connection %#x: closed", c.qpn)
	}
	if err := c.e.lookupConn(c.slot, &w); err != nil {
		return s, err
	}
	fillSnapshot(&s, &w, atomic.LoadUint32(&c.q.SqTail), int(w.Npaths))
	return s, nil
}

// pin moves the pump's thread to a CPU.
func (p *pump) pin(cpu int) error {
	var set unix.CPUSet
	set.Set(cpu)
	if err := unix.SchedSetaffinity(int(p.tid.Load()), &set); err != nil {
		return fmt.Errorf("pump: move to CPU %d: %w", cpu, err)
	}
	return nil
}

// wantRepairs fails if a device has sent more than perCent of its packets again, a thousandth and one for
// each of 8 paths besides: a path that is timed out too hastily sends one before a late ACK comes.
func wantRepairs(t *testing.T, perCent uint64, e ...*Engine) {
	t.Helper()
	for i, e := range e {
		c, err := e.reg.State().Counters()
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("device %d: %d repairs of %d packets sent", i, c.Retransmits, c.SentPkts)
		if most := c.SentPkts*perCent/100 + c.SentPkts/1000 + 8; c.Retransmits > most {
			t.Errorf("device %d: %d repairs of %d packets sent, want at most %d", i, c.Retransmits, c.SentPkts, most)
		}
	}
}

func TestTransferSurvivesAPumpThatMovesBetweenCPUs(t *testing.T) {
	if runtime.NumCPU() < 2 {
		t.Skip("needs 2 CPUs")
	}
	const size = 4 << 20
	e := openPair(t, 2, Config{})
	c := connect(t, e, 8)
	from, to := alloc(t, e[0], size), alloc(t, e[1], size)
	fill(from.Bytes(), 4)
	var stop atomic.Bool
	moved := make(chan error)
	go func() {
		for cpu := 0; !stop.Load(); cpu ^= 1 {
			if err := e[0].pump.pin(cpu); err != nil {
				moved <- err
				return
			}
			time.Sleep(200 * time.Microsecond)
		}
		moved <- nil
	}()
	for msn := range uint32(50) {
		c[0].PostSend(msn, write(from, to, size))
		wantStatus(t, c[0], msn, core.StatusSuccess)
	}
	stop.Store(true)
	if err := <-moved; err != nil {
		t.Fatal(err)
	}
	wantEqual(t, from, to)
	wantRepairs(t, 0, e[:]...)
}

// states are the states of a connection's paths.
func states(t *testing.T, c *Conn) []core.PathState {
	t.Helper()
	s, err := c.snapshot()
	if err != nil {
		t.Fatal(err)
	}
	var out []core.PathState
	for _, p := range s.Paths {
		out = append(out, p.State)
	}
	return out
}

func setLink(t *testing.T, h *host, name string, up bool) {
	t.Helper()
	link, err := h.nl.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	set := h.nl.LinkSetDown
	if up {
		set = h.nl.LinkSetUp
	}
	if err := set(link); err != nil {
		t.Fatal(err)
	}
}

func TestPathsOfAPlaneWithoutCarrierAreDownAndComeBack(t *testing.T) {
	hosts := newHosts(t, 2)
	e := [2]*Engine{openOn(t, hosts[0], Config{}), openOn(t, hosts[1], Config{})}
	c := connect(t, e, 4) // paths 1 and 3 on plane 1
	const size = 1 << 20
	from, to := alloc(t, e[0], size), alloc(t, e[1], size)
	msn := uint32(0)
	transfer := func() {
		t.Helper()
		fill(from.Bytes(), uint64(msn))
		c[0].PostSend(msn, write(from, to, size))
		wantStatus(t, c[0], msn, core.StatusSuccess)
		wantEqual(t, from, to)
		msn++
	}
	transfer()
	setLink(t, hosts[1], "p1", false)
	want := []core.PathState{core.PathActive, core.PathDown, core.PathActive, core.PathDown}
	waitFor(t, "plane 1 down", func() bool { return slices.Equal(states(t, c[0]), want) })
	transfer()
	setLink(t, hosts[1], "p1", true)
	waitFor(t, "all paths active", func() bool {
		transfer()
		return slices.Equal(states(t, c[0]), make([]core.PathState, 4))
	})
}

func TestConnectionBeginsWithoutThePlaneThatIsDown(t *testing.T) {
	hosts := newHosts(t, 2)
	e := [2]*Engine{openOn(t, hosts[0], Config{}), openOn(t, hosts[1], Config{})}
	setLink(t, hosts[1], "p1", false)
	waitFor(t, "carrier lost", func() bool { return !e[0].planes[1].up.Load() && !e[1].planes[1].up.Load() })
	c := connect(t, e, 2)
	from, to := alloc(t, e[0], 100000), alloc(t, e[1], 100000)
	fill(from.Bytes(), 5)
	c[0].PostSend(0, write(from, to, 100000))
	wantStatus(t, c[0], 0, core.StatusSuccess)
	wantEqual(t, from, to)
	setLink(t, hosts[1], "p1", true)
	waitFor(t, "plane 1 active", func() bool { return states(t, c[0])[1] == core.PathActive })
}

func TestNewLinkAddressOfThePeerIsFollowed(t *testing.T) {
	hosts := newHosts(t, 1)
	e := [2]*Engine{openOn(t, hosts[0], Config{}), openOn(t, hosts[1], Config{})}
	c := connect(t, e, 2)
	link, err := hosts[1].nl.LinkByName("p0")
	if err != nil {
		t.Fatal(err)
	}
	mac := net.HardwareAddr{2, 0x12, 0x34, 0x56, 0x78, 0x9a}
	if err := hosts[1].nl.LinkSetHardwareAddr(link, mac); err != nil {
		t.Fatal(err)
	}
	// What a gratuitous ARP does, which this kernel does not send here.
	if link, err = hosts[0].nl.LinkByName("p0"); err != nil {
		t.Fatal(err)
	}
	err = hosts[0].nl.NeighSet(&netlink.Neigh{LinkIndex: link.Attrs().Index, IP: net.IPv4(198, 18, 0, 2), State: netlink.NUD_REACHABLE, HardwareAddr: mac})
	if err != nil {
		t.Fatal(err)
	}
	for path := range 2 {
		waitFor(t, "new destination in the sender's templates", func() bool {
			return bytes.Equal(e[0].pathWords[c[0].base+path].Tmpl[:6], mac)
		})
		waitFor(t, "new source in the peer's templates", func() bool {
			return bytes.Equal(e[1].pathWords[c[1].base+path].Tmpl[6:12], mac)
		})
	}
	from, to := alloc(t, e[0], 100), alloc(t, e[1], 100)
	c[0].PostSend(0, write(from, to, 100))
	wantStatus(t, c[0], 0, core.StatusSuccess)
}

func neighbourThatDoesNotAnswerIsNamedWithItsState(t *testing.T, e [2]*Engine) {
	c, err := e[0].NewConn(testPD)
	if err != nil {
		t.Fatal(err)
	}
	remote := endpoint(e[0], c, 1)
	remote.Planes = slices.Clone(remote.Planes)
	remote.Planes[0].Addr = remote.Planes[0].Addr.Next().Next()
	p, err := core.PairPaths(endpoint(e[0], c, 1), remote, rand.New(rand.NewPCG(1, 1)))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	err = c.Start(ctx, p)
	if err == nil || !strings.Contains(err.Error(), "198.18.0.3") || !strings.Contains(err.Error(), "path 0") ||
		!strings.Contains(err.Error(), "INCOMPLETE") && !strings.Contains(err.Error(), "FAILED") || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v, want one that names path 0, 198.18.0.3 and the neighbour's state", err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}

func TestPacketsToAnotherNetworkGoToTheRouterAndFollowItsRoute(t *testing.T) {
	hosts := newHosts(t, 1)
	e := [2]*Engine{openOn(t, hosts[0], Config{}), openOn(t, hosts[1], Config{})}
	link, err := hosts[0].nl.LinkByName("p0")
	if err != nil {
		t.Fatal(err)
	}
	far := &net.IPNet{IP: net.IPv4(198, 19, 0, 0), Mask: net.CIDRMask(24, 32)}
	route := func(gateway byte) {
		t.Helper()
		r := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: far, Gw: net.IPv4(198, 18, 0, gateway)}
		if err := hosts[0].nl.RouteReplace(r); err != nil {
			t.Fatal(err)
		}
	}
	route(2)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	hops, err := e[0].router.take(ctx, []core.PathParams{{
		Local: e[0].planes[0].addr, Remote: netip.MustParseAddr("198.19.0.1"),
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer e[0].router.give(hops)
	if mac := e[1].planes[0].mac; !bytes.Equal(hops[0].mac, mac) {
		t.Errorf("link address %v, want the router's, %v", hops[0].mac, mac)
	}
	route(99)
	waitFor(t, "the other router", func() bool {
		e[0].router.mu.Lock()
		defer e[0].router.mu.Unlock()
		return hops[0].gateway == netip.MustParseAddr("198.18.0.99")
	})
}

func TestNeighboursAreKeptAliveWhileTheyAreUsed(t *testing.T) {
	hosts := newHosts(t, 1)
	e := [2]*Engine{openOn(t, hosts[0], Config{}), openOn(t, hosts[1], Config{})}
	managed := func() bool {
		list, err := hosts[0].nl.NeighList(e[0].planes[0].ifindex, netlink.FAMILY_V4)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range list {
			if n.IP.Equal(net.IPv4(198, 18, 0, 2)) {
				return n.FlagsExt&netlink.NTF_EXT_MANAGED != 0
			}
		}
		return false
	}
	c := connect(t, e, 2)
	if !managed() {
		t.Error("the kernel does not manage the neighbour of an open connection")
	}
	if err := c[0].Close(); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the neighbour of a closed connection let go", func() bool { return !managed() })
}

func TestPermanentNeighbourIsLeftAsItIs(t *testing.T) {
	hosts := newHosts(t, 1)
	e := [2]*Engine{openOn(t, hosts[0], Config{}), openOn(t, hosts[1], Config{})}
	peer := net.IPv4(198, 18, 0, 2)
	err := hosts[0].nl.NeighSet(&netlink.Neigh{
		LinkIndex: e[0].planes[0].ifindex, IP: peer, State: netlink.NUD_PERMANENT, HardwareAddr: e[1].planes[0].mac,
	})
	if err != nil {
		t.Fatal(err)
	}
	c := connect(t, e, 2)
	if err := c[0].Close(); err != nil {
		t.Fatal(err)
	}
	list, err := hosts[0].nl.NeighList(e[0].planes[0].ifindex, netlink.FAMILY_V4)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(list, func(n netlink.Neigh) bool { return n.IP.Equal(peer) })
	if i < 0 || list[i].State != netlink.NUD_PERMANENT {
		t.Errorf("neighbours after the connection %+v, want %v as permanent as before", list, peer)
	}
}

func TestOpenRefusesBadConfigurationNamingTheValue(t *testing.T) {
	notShort(t)
	hosts := newHosts(t, 1)
	for _, c := range []struct {
		cfg  Config
		word string
	}{
		{Config{DSCP: 64}, "64"},
		{Config{Payload: 1500}, "1500"},
		{Config{Interfaces: []string{"nosuch0"}}, "nosuch0"},
		{Config{RetryTime: -1}, "retry time"},
	} {
		if c.cfg.Interfaces == nil {
			c.cfg.Interfaces = hosts[0].names
		}
		err := hosts[0].in(func() error {
			_, err := Open(context.Background(), c.cfg)
			return err
		})
		if err == nil || !strings.Contains(err.Error(), c.word) {
			t.Errorf("%+v: %v, want an error that names %s", c.cfg, err, c.word)
		}
	}
}
