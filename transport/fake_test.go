// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/metaroce/metaroce/transport/core"
)

// fabric joins fake engines: requests are performed at once, in memory, unless
// it is held. It keeps engine.go's contract and reports who breaks it.
type fabric struct {
	t       testing.TB
	mu      sync.Mutex
	next    uint32
	held    bool
	looks   int                    // calls of SendDone, RecvDone, ArmSend and ArmRecv
	lazy    bool                   // a refusal is found by who asks for the request, as in package xdp
	conns   map[uint32]*fakeConn   // by QPN
	regions map[uint32]*fakeRegion // by key
}

func newFabric(t testing.TB) *fabric {
	return &fabric{t: t, next: 1, conns: map[uint32]*fakeConn{}, regions: map[uint32]*fakeRegion{}}
}

// hold stops all traffic, release lets it go on.
func (f *fabric) hold() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.held = true
}

func (f *fabric) release() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.held = false
	for _, c := range f.conns {
		c.run()
	}
}

// empty says whether nothing is left in any engine.
func (f *fabric) empty() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.conns) == 0 && len(f.regions) == 0
}

func (f *fabric) conn(qpn uint32) *fakeConn {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.conns[qpn]
}

type fakeEngine struct {
	f        *fabric
	planes   []core.PlaneAddr
	payload  int
	startErr error // what Start says
	connErr  error // what NewConn says

	startWaits bool          // Start waits for its context, as for a neighbour that is silent
	startTime  time.Duration // how long it may take
}

func (e *fakeEngine) Planes() []core.PlaneAddr { return e.planes }
func (e *fakeEngine) MaxPayload() int          { return e.payload }
func (e *fakeEngine) Close() error             { return nil }

type fakeRegion struct {
	f    *fabric
	pd   uint32
	key  uint32
	data []byte
	acc  core.Access
}

const fakeBase = 0x10000

func (e *fakeEngine) AllocRegion(size uint64, access core.Access, pd uint32) (region, error) {
	e.f.mu.Lock()
	defer e.f.mu.Unlock()
	e.f.next++
	r := &fakeRegion{f: e.f, pd: pd, key: e.f.next << 8, data: make([]byte, size), acc: access}
	e.f.regions[r.key] = r
	return r, nil
}

func (r *fakeRegion) Bytes() []byte { return r.data }
func (r *fakeRegion) Addr() uint64  { return fakeBase }
func (r *fakeRegion) Key() uint32   { return r.key }
func (r *fakeRegion) Close() error {
	r.f.mu.Lock()
	defer r.f.mu.Unlock()
	if r.f.regions[r.key] == nil {
		r.f.t.Errorf("region %#x closed twice", r.key)
	}
	delete(r.f.regions, r.key)
	return nil
}

type fakeConn struct {
	onArm       func(n uint32) // called once, when receive n is about to be armed
	e           *fakeEngine
	pd          uint32
	qpn         uint32
	started     bool
	closed      bool
	peer        uint32
	posted      uint32
	wrs         map[uint32]core.WorkRequest // not performed yet
	head        uint32                      // next to perform
	sends       map[uint32]core.Status
	recvPosted  uint32
	recvs       map[uint32]core.Received
	armS, armR  int64 // -1: not armed
	events      chan struct{}
	failed      chan struct{}
	err         error
	psn, recvPS uint32
}

var errRefused = errors.New("the peer refused a request")

const fakePSN = 0xfffffff0 // wraps soon

func (e *fakeEngine) NewConn(pd uint32) (engineConn, error) {
	if e.connErr != nil {
		return nil, e.connErr
	}
	e.f.mu.Lock()
	defer e.f.mu.Unlock()
	e.f.next++
	c := &fakeConn{
		e: e, pd: pd, qpn: e.f.next, armS: -1, armR: -1, psn: fakePSN, recvPS: fakePSN,
		wrs: map[uint32]core.WorkRequest{}, sends: map[uint32]core.Status{}, recvs: map[uint32]core.Received{},
		events: make(chan struct{}, 1), failed: make(chan struct{}),
	}
	e.f.conns[c.qpn] = c
	return c, nil
}

// enter locks the fabric and notes the use of a freed connection.
func (c *fakeConn) enter(what string) func() {
	c.e.f.mu.Lock()
	if c.closed {
		c.e.f.t.Errorf("%s on connection %d after Close", what, c.qpn)
	}
	return c.e.f.mu.Unlock
}

func (c *fakeConn) QPN() uint32             { return c.qpn }
func (c *fakeConn) Token() uint32           { return c.qpn * 7 }
func (c *fakeConn) InitialPSN() uint32      { return fakePSN }
func (c *fakeConn) Events() <-chan struct{} { return c.events }
func (c *fakeConn) Failed() <-chan struct{} { return c.failed }

func (c *fakeConn) Start(ctx context.Context, p core.ConnParams) error {
	if c.e.startWaits {
		end, _ := ctx.Deadline()
		c.e.startTime = time.Until(end)
		<-ctx.Done()
		return fmt.Errorf("path 0: no neighbour: %w", ctx.Err())
	}
	defer c.enter("Start")()
	if c.e.startErr != nil {
		return c.e.startErr
	}
	c.started, c.peer = true, p.Remote.QPN
	return nil
}

// run performs requests as far as it can. Under the fabric's lock.
func (c *fakeConn) run() {
	for c.err == nil && !c.e.f.held && c.head != c.posted {
		peer := c.e.f.conns[c.peer]
		if peer == nil || peer.err != nil {
			return
		}
		if !peer.started {
			c.e.f.t.Errorf("connection %d sends before its peer %d has started", c.qpn, c.peer)
		}
		wr := c.wrs[c.head]
		if wr.Op == core.OpWriteImm && uint32(len(peer.recvs)) == peer.recvPosted {
			return // no receive posted
		}
		dst, src := c.e.f.regions[wr.RKey], c.e.f.regions[wr.LKey]
		off := wr.RemoteAddr - fakeBase
		if wr.Length > 0 {
			if dst == nil || dst.pd != peer.pd || dst.acc&core.RemoteWrite == 0 || off > uint64(len(dst.data)) || uint64(wr.Length) > uint64(len(dst.data))-off {
				c.sends[c.head] = core.StatusRemAccess
				if !c.e.f.lazy {
					c.fail(errRefused)
				}
				c.wakeIf()
				return
			}
			copy(dst.data[off:], src.data[wr.LocalAddr-fakeBase:][:wr.Length])
		}
		delete(c.wrs, c.head)
		c.sends[c.head] = core.StatusSuccess
		c.psn++
		peer.recvPS++
		if wr.Op == core.OpWriteImm {
			peer.recvs[uint32(len(peer.recvs))] = core.Received{Imm: wr.Imm, Length: wr.Length}
			peer.wakeIf()
		}
		c.head++
		c.wakeIf()
	}
}

func (c *fakeConn) wakeIf() {
	fire := c.err != nil
	if _, done := c.sends[uint32(c.armS)]; c.armS >= 0 && done {
		c.armS, fire = -1, true
	}
	if c.armR >= 0 && int64(len(c.recvs)) > c.armR {
		c.armR, fire = -1, true
	}
	if fire {
		select {
		case c.events <- struct{}{}:
		default:
		}
	}
}

func (c *fakeConn) fail(err error) {
	if c.err == nil {
		c.err = err
		close(c.failed)
		c.wakeIf()
	}
}

func (c *fakeConn) PostSend(msn uint32, wr core.WorkRequest) {
	defer c.enter("PostSend")()
	if msn != c.posted {
		c.e.f.t.Errorf("PostSend(%d), want %d", msn, c.posted)
	}
	c.wrs[msn] = wr
	c.posted++
	c.run()
}

func (c *fakeConn) PostRecv(n uint32) {
	defer c.enter("PostRecv")()
	if n != c.recvPosted+1 {
		c.e.f.t.Errorf("PostRecv(%d), want %d", n, c.recvPosted+1)
	}
	c.recvPosted = n
	if peer := c.e.f.conns[c.peer]; peer != nil {
		peer.run()
	}
}

func (c *fakeConn) SendDone(msn uint32) (core.Status, bool) {
	defer c.enter("SendDone")()
	c.e.f.looks++
	s, ok := c.sends[msn]
	if ok && s != core.StatusSuccess {
		c.fail(errRefused)
	}
	if ok || c.err == nil {
		return s, ok
	}
	if msn == c.head && errors.As(c.err, new(*core.RetryExceededError)) {
		return core.StatusRetryExceeded, true
	}
	return core.StatusFlushed, true
}

func (c *fakeConn) RecvDone(n uint32) (core.Received, bool) {
	defer c.enter("RecvDone")()
	c.e.f.looks++
	r, ok := c.recvs[n]
	if !ok && c.err != nil {
		return core.Received{Status: core.StatusFlushed}, true
	}
	return r, ok
}

func (c *fakeConn) ArmSend(msn uint32) {
	defer c.enter("ArmSend")()
	c.e.f.looks++
	c.armS = int64(msn)
}

func (c *fakeConn) ArmRecv(n uint32) {
	defer c.enter("ArmRecv")()
	c.e.f.looks++
	if f := c.onArm; f != nil {
		c.onArm = nil
		f(n)
	}
	c.armR = int64(n)
}

func (c *fakeConn) Drained() bool {
	defer c.enter("Drained")()
	return c.head == c.posted
}

func (c *fakeConn) SentPSN() uint32 {
	defer c.enter("SentPSN")()
	return c.psn
}

func (c *fakeConn) RecvPSN() uint32 {
	defer c.enter("RecvPSN")()
	return c.recvPS
}

func (c *fakeConn) Err() error {
	c.e.f.mu.Lock()
	defer c.e.f.mu.Unlock()
	return c.err
}

func (c *fakeConn) Fail(err error) {
	defer c.enter("Fail")()
	c.fail(err)
}

func (c *fakeConn) Close() error {
	defer c.enter("Close")()
	c.closed = true
	delete(c.e.f.conns, c.qpn)
	return nil
}

// newTestDevice makes a device on the fabric. It is closed with the test.
func newTestDevice(t testing.TB, f *fabric) (*Device, *fakeEngine) {
	t.Helper()
	ns, err := currentNetNS()
	if err != nil {
		t.Fatal(err)
	}
	f.mu.Lock()
	f.next++
	addr := netip.AddrFrom4([4]byte{198, 18, 0, byte(f.next)})
	f.mu.Unlock()
	e := &fakeEngine{f: f, payload: 1024, planes: []core.PlaneAddr{{Addr: addr, MTU: 1500}}}
	cfg, err := Config{Interfaces: []string{"fake0"}, Logger: slog.New(slog.DiscardHandler)}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	d := newDevice(e, ns, cfg)
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Errorf("Device.Close: %v", err)
		}
	})
	return d, e
}

// bench is two devices and a connection between them.
type bench struct {
	f      *fabric
	da, db *Device
	a, b   *Conn // the dialler's and the listener's end
}

func newBench(t testing.TB) *bench {
	t.Helper()
	x := &bench{f: newFabric(t)}
	x.da, _ = newTestDevice(t, x.f)
	x.db, _ = newTestDevice(t, x.f)
	x.a, x.b = connect(t, x.da, x.db)
	return x
}

// testPD is the domain of a device's memory and connections in tests that are not
// about domains.
func testPD(t testing.TB, d *Device) *PD {
	t.Helper()
	d.mu.Lock()
	for _, p := range d.pds {
		if !p.own { // tests about domains do not use this one
			d.mu.Unlock()
			return p
		}
	}
	d.mu.Unlock()
	p, err := d.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// connect sets a connection up from da to db, in the devices' test domains unless
// opts say otherwise of da's end.
func connect(t testing.TB, da, db *Device, opts ...ConnOption) (a, b *Conn) {
	t.Helper()
	return connectPD(t, da, db, append([]ConnOption{WithPD(testPD(t, da))}, opts...), []ConnOption{WithPD(testPD(t, db))})
}

// connectPD is connect with all options given.
func connectPD(t testing.TB, da, db *Device, dial, accept []ConnOption) (a, b *Conn) {
	t.Helper()
	l := listen(t, db)
	defer l.Close()
	type result struct {
		c   *Conn
		err error
	}
	accepted := make(chan result, 1)
	go func() {
		in, err := l.Accept(testCtx(t))
		if err != nil {
			accepted <- result{nil, err}
			return
		}
		c, err := in.Accept(testCtx(t), []byte("from the listener"), accept...)
		accepted <- result{c, err}
	}()
	a, err := da.Dial(testCtx(t), l.Addr().String(), []byte("from the dialler"), dial...)
	if err != nil {
		t.Fatalf("Dial: %v", err)
	}
	r := <-accepted
	if r.err != nil {
		t.Fatalf("Accept: %v", r.err)
	}
	return a, r.c
}

func listen(t testing.TB, d *Device) *Listener {
	t.Helper()
	l, err := d.Listen(testCtx(t), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// testCtx bounds what should not take long even on a slow machine.
func testCtx(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func alloc(t testing.TB, d *Device, size uint64) *Memory {
	t.Helper()
	m, err := testPD(t, d).AllocMemory(size, core.LocalWrite|core.RemoteWrite)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// write posts a write of the first n bytes of src to the start of dst.
func write(t testing.TB, c *Conn, id uint64, src, dst *Memory, n uint64) {
	t.Helper()
	w := WriteRequest{WRID: id, Local: src, Length: n, RemoteAddr: dst.Addr(), RKey: dst.RKey()}
	if err := c.PostWrite(w); err != nil {
		t.Fatal(err)
	}
}

// collect waits for n completions.
func collect(t testing.TB, q *CQ, n int) []Completion {
	t.Helper()
	var all []Completion
	into := make([]Completion, 16)
	for len(all) < n {
		got, err := q.Wait(testCtx(t), into[:min(len(into), n-len(all))])
		if err != nil {
			t.Fatalf("Wait after %d of %d completions: %v", len(all), n, err)
		}
		all = append(all, into[:got]...)
	}
	return all
}

// summary is what most tests compare of completions.
func summary(cs []Completion) []string {
	out := make([]string, 0, len(cs))
	for _, c := range cs {
		out = append(out, fmt.Sprintf("%d %v: %v", c.WRID, c.Op, c.Status))
	}
	return out
}

// over waits for the end of a connection.
func over(t testing.TB, c *Conn) error {
	t.Helper()
	select {
	case <-c.Done():
		return c.Err()
	case <-testCtx(t).Done():
		t.Fatal("the connection does not end")
		return nil
	}
}

// eventually waits for a condition.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not so within 30 s: %s", what)
		}
	}
}
