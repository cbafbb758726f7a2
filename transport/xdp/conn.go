// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"context"
	crand "crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/cilium/ebpf"

	"github.com/metaroce/metaroce/loader"
	"github.com/metaroce/metaroce/transport/core"
)

// Conn is one connection: its slot in the kernel, its mapped queues and its policy.
type Conn struct {
	e     *Engine
	slot  uint32
	qpn   uint32
	token uint32
	psn   uint32
	pd    uint32

	// use guards q: whoever looks into the queues holds it for reading, so that Close unmaps
	// nothing under their hands.
	use   sync.RWMutex
	q     *loader.QPage // nil once closed
	qmem  []byte
	pages *ebpf.Map

	done    atomic.Uint32 // requests that SendDone has reported as successful
	latched atomic.Uint32 // receives that are known to be complete, see latchReceives
	over    atomic.Bool   // failed or closed: the control loop leaves it alone
	events  chan struct{}
	failed  chan struct{}

	mu      sync.Mutex
	started bool // the kernel knows it
	closed  bool
	err     error

	params core.ConnParams
	base   int // first entry in the path pool
	hops   []*hop
	wayUp  atomic.Uint32 // mask of paths whose way is open, by the router

	// The control loop's part.
	tickMu sync.Mutex
	policy *core.Policy
	snap   core.Snapshot
	words  loader.Conn
	nextNs int64
	force  atomic.Bool // tick at once
	calls  uint64      // of the pump, at the last tick

	asked     uint32                  // mask of suspect paths that were probed
	askedAcks [loader.MaxPaths]uint32 // what had been acknowledged then
}

// RequestError is why a connection ended when one of its requests could not be carried out.
type RequestError struct {
	QPN    uint32
	Status core.Status
	PSN    uint32 // refused by the peer, if Remote
	MSN    uint32 // refused by this end, if not Remote
	Remote bool
}

func (e *RequestError) Error() string {
	if e.Remote {
		return fmt.Sprintf("connection %#x: the peer refused packet %d: %v", e.QPN, e.PSN, e.Status)
	}
	return fmt.Sprintf("connection %#x: request %d cannot be sent: %v", e.QPN, e.MSN, e.Status)
}

// NewConn reserves a connection slot and its queues. The connection neither sends nor accepts
// anything before Start.
func (e *Engine) NewConn(pd uint32) (_ *Conn, err error) {
	slot, gen, err := e.slots.take()
	if err != nil {
		return nil, fmt.Errorf("new connection: %w", err)
	}
	c := &Conn{
		e: e, slot: slot, qpn: gen*uint32(e.reg.MaxConns) + slot, pd: pd,
		events: make(chan struct{}, 1), failed: make(chan struct{}),
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("new connection in slot %d: %w", slot, err), c.unmap())
			e.slots.give(slot)
		}
	}()
	var random [8]byte
	for c.token == 0 {
		crand.Read(random[:]) // never fails
		c.token, c.psn = binary.NativeEndian.Uint32(random[:]), binary.NativeEndian.Uint32(random[4:])
	}
	if c.pages, err = e.reg.NewQPage(); err != nil {
		return nil, err
	}
	if c.q, c.qmem, err = mapOne[loader.QPage](c.pages); err != nil {
		return nil, err
	}
	if err = e.reg.QP.Put(&slot, c.pages); err != nil {
		return nil, fmt.Errorf("put its queues into mr_qp: %w", err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.broken != nil {
		return nil, errors.Join(e.broken, e.reg.QP.Delete(&slot))
	}
	e.open[c] = struct{}{}
	return c, nil
}

// unmap gives the queues back.
func (c *Conn) unmap() error {
	var errs []error
	if c.qmem != nil {
		errs = append(errs, loader.Munmap(c.qmem))
	}
	if c.pages != nil {
		errs = append(errs, c.pages.Close())
	}
	c.q, c.qmem, c.pages = nil, nil, nil
	return errors.Join(errs...)
}

// QPN is the connection's queue pair number, 24 bits.
func (c *Conn) QPN() uint32 { return c.qpn }

// Token is what the peer's packets have to carry; it is never 0.
func (c *Conn) Token() uint32 { return c.token }

// InitialPSN is the first psn, and every path's first pseq, that this end sends.
func (c *Conn) InitialPSN() uint32 { return c.psn }

// Start opens the connection with what both ends agreed on. It waits, within ctx, for the
// neighbours behind the paths; those that do not answer while others do begin as down. The error
// when no path can be used names path, address and the neighbour's state.
func (c *Conn) Start(ctx context.Context, p core.ConnParams) (err error) {
	n := len(p.Paths)
	if n < 1 || n > loader.MaxPaths {
		return fmt.Errorf("connection %#x: %d paths, want 1 to %d", c.qpn, n, loader.MaxPaths)
	}
	if p.Payload < 1 || p.Payload > c.e.payload {
		return fmt.Errorf("connection %#x: payload of %d bytes, want 1 to %d", c.qpn, p.Payload, c.e.payload)
	}
	for i, path := range p.Paths {
		if path.Plane < 0 || path.Plane >= len(c.e.planes) {
			return fmt.Errorf("connection %#x: path %d: plane %d, want 0 to %d", c.qpn, i, path.Plane, len(c.e.planes)-1)
		}
	}
	hops, err := c.e.router.take(ctx, p.Paths)
	if err != nil {
		return fmt.Errorf("connection %#x: %w", c.qpn, err)
	}

	c.tickMu.Lock()
	defer c.tickMu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	defer func() {
		if err != nil {
			c.e.router.give(hops)
		}
	}()
	switch {
	case c.err != nil:
		return c.err
	case c.closed || c.started:
		return fmt.Errorf("connection %#x: closed or started before", c.qpn)
	}
	base, err := c.e.pool.take(n)
	if err != nil {
		return fmt.Errorf("connection %#x with %d paths: %w", c.qpn, n, err)
	}
	defer func() {
		if err != nil {
			c.e.pool.give(base, n)
		}
	}()
	c.params, c.base, c.hops = p, base, hops

	now := c.e.clk.now()
	c.policy = core.NewPolicy(core.PolicyConfig{
		Params: p, Peer: peerName(p), RetryTime: c.e.cfg.RetryTime, Keepalive: c.e.cfg.Keepalive,
		Rand: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())),
	})
	start := c.policy.Start(now)
	c.nextNs = start.NextNs

	up, err := c.e.router.attach(c)
	if err != nil {
		return fmt.Errorf("connection %#x: %w", c.qpn, err)
	}
	defer func() {
		if err != nil {
			c.e.router.detach(c)
		}
	}()
	w := c.initial(p, start, up)
	atomic.StoreUint32(&c.q.TxCum, c.psn)
	atomic.StoreUint32(&c.q.RxCum, p.Remote.InitialPSN)
	if err = c.e.reg.Req.Put(&c.slot, &loader.Reqs{}); err != nil {
		return fmt.Errorf("connection %#x: clear requests in slot %d: %w", c.qpn, c.slot, err)
	}
	if err = c.e.reg.Conn.Put(&c.slot, w); err != nil {
		return fmt.Errorf("connection %#x: write slot %d: %w", c.qpn, c.slot, err)
	}
	c.e.conns[c.slot].Store(c)
	if err = c.control(loader.Ctl{Op: loader.CtlState, Value: loader.ConnOpen}); err != nil {
		c.e.conns[c.slot].Store(nil)
		return err
	}
	c.started = true
	c.e.nudge()
	return nil
}

// initial is the connection as the kernel first sees it, not open yet. up is the mask of paths
// whose way to the peer is known.
func (c *Conn) initial(p core.ConnParams, start core.Actions, up uint32) *loader.Conn {
	w := &loader.Conn{
		Qpn: c.qpn, PeerQpn: p.Remote.QPN, RxToken: c.token, TxToken: p.Remote.Token, Pd: c.pd,
		PathBase: uint32(c.base), Payload: uint16(p.Payload), Npaths: uint8(len(p.Paths)),
		Tos:   trafficClass(c.e.cfg.DSCP),
		State: loader.ConnFree, PsnNext: c.psn, PsnCum: c.psn, PsnLimit: c.psn + psnLimit, Cut: uint32(p.Payload),
	}
	if p.Checksum {
		w.Checksum = 1
	}
	for i, path := range p.Paths {
		tx := &w.Tx[i]
		tx.Next, tx.Una, tx.First, tx.Heard, tx.Sport = c.psn, c.psn, c.psn, c.psn-1, path.Sport
		tx.Cwnd = 1
		tx.State = loader.PathSuspect // until a full-size packet has arrived
		tx.Egress = c.e.planes[path.Plane].ring
		if up>>i&1 == 0 {
			tx.State = loader.PathDown
		}
		w.Rx[i].Max = p.Remote.InitialPSN - 1
	}
	for _, s := range start.Sets {
		w.Tx[s.Path].Cwnd, w.Tx[s.Path].Pace, w.Tx[s.Path].Tolerance = s.Cwnd, s.Pace, s.Tolerance
		w.Tx[s.Path].PaceMax = 2 * s.Pace
	}
	w.Rxs.Cum = p.Remote.InitialPSN
	return w
}

// peerName is the peer's addresses, each plane's once.
func peerName(p core.ConnParams) string {
	var names []string
	for _, path := range p.Paths {
		if name := path.Remote.Unmap().String(); !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return strings.Join(names, ", ")
}

// control changes the connection's locked state.
func (c *Conn) control(cmd loader.Ctl) error {
	cmd.Slot, cmd.Qpn = c.slot, c.qpn
	return c.e.control(cmd)
}

// PostSend puts wr into the send queue as request msn and rings the bell. The caller has checked
// that slot msn % core.SQDepth is free. Not concurrently with itself.
func (c *Conn) PostSend(msn uint32, wr core.WorkRequest) {
	c.use.RLock()
	defer c.use.RUnlock()
	if c.q == nil {
		return
	}
	e := &c.q.Sq[msn%core.SQDepth]
	e.Laddr, e.Raddr = wr.LocalAddr, wr.RemoteAddr
	e.Lkey, e.Rkey, e.Len, e.Imm = wr.LKey, wr.RKey, wr.Length, wr.Imm
	e.Op, e.Flags, e.Stream = uint8(wr.Op), 0, 0
	atomic.SwapUint32(&c.q.SqTail, msn+1)
	c.e.bell.ring(c.slot)
}

// PostRecv lets the peer use one more receive: n is how many were posted so far.
func (c *Conn) PostRecv(n uint32) {
	c.use.RLock()
	defer c.use.RUnlock()
	if c.q != nil {
		atomic.SwapUint32(&c.q.RqTail, n)
	}
}

// sendComplete says whether the peer has acknowledged all of request msn.
func (c *Conn) sendComplete(msn uint32) bool {
	s := &c.q.Scq[msn%core.SQDepth]
	if atomic.LoadUint64(&s.Valid) != validWord(msn) {
		return false
	}
	return after(atomic.LoadUint32(&c.q.TxCum), atomic.LoadUint32(&s.LastPsn))
}

// SendDone says whether request msn is complete, and how. Requests are to be asked about in the
// order of their numbers: the first one that was refused has the status that says why, and its
// connection fails. Those behind it never complete; nor does any other that was not acknowledged
// before Fail.
func (c *Conn) SendDone(msn uint32) (core.Status, bool) {
	c.use.RLock()
	defer c.use.RUnlock()
	if c.q == nil {
		return core.StatusFlushed, false
	}
	if c.sendComplete(msn) {
		if !after(c.done.Load(), msn) {
			c.done.Store(msn + 1)
		}
		return core.StatusSuccess, true
	}
	if msn == c.done.Load() {
		if err := c.verdict(msn); err != nil {
			c.Fail(err)
			return err.Status, true
		}
	}
	return core.StatusSuccess, false
}

// verdict says why request msn, the first that is not complete, never will be; nil if it may.
func (c *Conn) verdict(msn uint32) *RequestError {
	if syn := atomic.LoadUint32(&c.q.NakSyndrome); syn != core.SynNone {
		if psn := atomic.LoadUint32(&c.q.NakPsn); atomic.LoadUint32(&c.q.TxCum) == psn {
			return &RequestError{QPN: c.qpn, Status: core.StatusOfSyndrome(syn), PSN: psn, Remote: true}
		}
	}
	if fault := atomic.LoadUint32(&c.q.Fault); fault != loader.FaultNone && atomic.LoadUint32(&c.q.FaultMsn) == msn {
		return &RequestError{QPN: c.qpn, Status: core.StatusOfFault(fault), MSN: msn}
	}
	return nil
}

// RecvDone says whether receive n is complete, and with what.
func (c *Conn) RecvDone(n uint32) (core.Received, bool) {
	c.use.RLock()
	defer c.use.RUnlock()
	if c.q == nil {
		return core.Received{Status: core.StatusFlushed}, false
	}
	if !c.recvComplete(n) {
		return core.Received{}, false
	}
	r := &c.q.Rcq[n%core.RQDepth]
	return core.Received{Imm: atomic.LoadUint32(&r.Imm), Length: atomic.LoadUint32(&r.Len)}, true
}

// ArmSend asks for one event when request msn completes. The caller looks again after it.
func (c *Conn) ArmSend(msn uint32) {
	c.use.RLock()
	defer c.use.RUnlock()
	if c.q != nil {
		atomic.StoreUint32(&c.q.WaitSend, msn)
		atomic.SwapUint32(&c.q.ArmSend, 1)
	}
}

// ArmRecv asks for one event when receive n completes. The caller looks again after it.
func (c *Conn) ArmRecv(n uint32) {
	c.use.RLock()
	defer c.use.RUnlock()
	if c.q != nil {
		atomic.StoreUint32(&c.q.WaitRecv, n)
		atomic.SwapUint32(&c.q.ArmRecv, 1)
	}
}

// Events delivers one value when an armed completion is there or the connection failed.
func (c *Conn) Events() <-chan struct{} { return c.events }

func (c *Conn) notify() {
	select {
	case c.events <- struct{}{}:
	default:
	}
}

// Drained says whether the peer has acknowledged everything posted so far.
func (c *Conn) Drained() bool {
	c.use.RLock()
	defer c.use.RUnlock()
	if c.q == nil {
		return false
	}
	tail := atomic.LoadUint32(&c.q.SqTail)
	return tail == c.done.Load() || c.sendComplete(tail-1)
}

// SentPSN is the psn after the last one sent.
func (c *Conn) SentPSN() uint32 {
	var w loader.Conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.started || c.closed || c.e.lookupConn(c.slot, &w) != nil {
		return c.psn
	}
	return w.PsnNext
}

// RecvPSN is the psn below which everything has arrived.
func (c *Conn) RecvPSN() uint32 {
	c.use.RLock()
	defer c.use.RUnlock()
	if c.q == nil {
		return 0
	}
	return atomic.LoadUint32(&c.q.RxCum)
}

// Err is why the connection failed, nil while it has not.
func (c *Conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Failed is closed when the connection fails.
func (c *Conn) Failed() <-chan struct{} { return c.failed }

// Fail ends the connection: nothing is sent or accepted any more. The first reason counts. Failed is
// closed a little later, when no packet that was being placed is left.
func (c *Conn) Fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil || c.closed {
		return
	}
	c.err = err
	if c.started {
		if cerr := c.control(loader.Ctl{Op: loader.CtlState, Value: loader.ConnError}); cerr != nil {
			c.e.log.Error("connection not stopped in the kernel", "qpn", c.qpn, "error", cerr)
		}
	}
	c.over.Store(true)
	c.e.fencing.Go(func() {
		if err := c.e.waitForReaders(); err != nil {
			c.e.log.Error("packets may still be placed", "qpn", c.qpn, "error", err)
		}
		close(c.failed)
		c.notify()
	})
}

// Close frees the slot, the paths and the queues, after no CPU uses them any more. What was
// posted and is not acknowledged yet is lost.
func (c *Conn) Close() error {
	c.tickMu.Lock()
	defer c.tickMu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil
	}
	c.closed = true
	e := c.e
	if c.started {
		e.conns[c.slot].Store(nil)
		e.router.detach(c)
		if err := c.control(loader.Ctl{Op: loader.CtlState, Value: loader.ConnFree}); err != nil {
			// A slot that the kernel may still use is never used again.
			return fmt.Errorf("connection %#x: not closed in the kernel: %w", c.qpn, err)
		}
	}
	if err := e.reg.QP.Delete(&c.slot); err != nil { // waits for readers
		return fmt.Errorf("connection %#x: delete its queues from mr_qp: %w", c.qpn, err)
	}
	var errs []error
	if c.started {
		if err := e.reg.Conn.Put(&c.slot, &loader.Conn{}); err != nil {
			errs = append(errs, fmt.Errorf("clear slot %d: %w", c.slot, err))
		}
		clear(e.pathWords[c.base : c.base+len(c.params.Paths)])
		e.pool.give(c.base, len(c.params.Paths))
		e.router.give(c.hops)
	}
	c.use.Lock()
	errs = append(errs, c.unmap())
	c.use.Unlock()
	c.over.Store(true)
	e.mu.Lock()
	delete(e.open, c)
	e.mu.Unlock()
	e.slots.give(c.slot)
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("connection %#x: close: %w", c.qpn, err)
	}
	return nil
}
