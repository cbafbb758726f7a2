// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"errors"
	"fmt"
	"sync"

	"github.com/metaroce/metaroce/transport/core"
)

// Errors of posting, made once: a program may post until it meets them.
var (
	errSendFull = fmt.Errorf("send queue: %w: %d requests are outstanding, its depth is %d", ErrQueueFull, core.SQDepth, core.SQDepth)
	errRecvFull = fmt.Errorf("receive queue: %w: %d receives are outstanding, its depth is %d", ErrQueueFull, core.RQDepth, core.RQDepth)
)

// WriteRequest is an RDMA Write: Length bytes of Local from LocalOffset on go to
// RemoteAddr in the peer's region RKey. Local may be nil when Length is 0.
type WriteRequest struct {
	WRID        uint64 // comes back in the completion
	Local       *Memory
	LocalOffset uint64 // bytes
	Length      uint64 // bytes, less than 4 GiB
	RemoteAddr  uint64
	RKey        uint32
}

// Conn is a reliable connection. Requests are performed in the order of posting.
// Methods may be called from any goroutine.
type Conn struct {
	dev         *Device
	pd          *PD
	s           *setupConn
	ec          engineConn
	params      core.ConnParams
	peerPrivate []byte

	done  chan struct{} // closed when the connection is over
	freed chan struct{} // closed when nothing of it is left in the engine
	once  sync.Once     // finish

	mu      sync.Mutex
	send    queue
	recv    queue
	refuse  error         // why nothing can be posted any more
	over    bool          // ec must not be touched; all results are in the queues
	failure *RequestError // the request that failed, if any
	err     error         // why the connection is over
	lost    int           // writes that were flushed when it ended
	hand    handshake     // closing
}

// queue is a connection's send or receive queue. Everything but cq and state is
// under the connection's mu.
type queue struct {
	conn           *Conn
	cq             *CQ
	state          cqState // cq's
	posted, polled uint32  // at most SQDepth apart
	slots          [core.SQDepth]slot
}

// slot is a request from post to poll.
type slot struct {
	wrID   uint64
	op     core.Op
	mem    *Memory
	length uint32
	result core.Received // once the connection is over
}

// free lets go of the request's memory.
func (s *slot) free() {
	if s.mem != nil {
		s.mem.unhold()
		s.mem = nil
	}
}

// Both queues use the same array of slots.
const _ = uint(core.SQDepth-core.RQDepth) + uint(core.RQDepth-core.SQDepth)

// ConnOption changes a connection that is being set up.
type ConnOption func(*connOptions)

type connOptions struct {
	send, recv *CQ
	pd         *PD
}

// WithPD puts the connection into a protection domain: it uses the memory of that
// domain, and no other. Without it a connection gets a domain of its own, see
// Conn.PD.
func WithPD(p *PD) ConnOption { return func(o *connOptions) { o.pd = p } }

// WithSendCQ completes the connection's writes in q.
func WithSendCQ(q *CQ) ConnOption { return func(o *connOptions) { o.send = q } }

// WithRecvCQ completes the connection's receives in q, which may be that of
// WithSendCQ.
func WithRecvCQ(q *CQ) ConnOption { return func(o *connOptions) { o.recv = q } }

// connOptions applies opts and holds the connection's domain, until release or
// until a connection takes it over.
func (d *Device) connOptions(opts []ConnOption) (*connOptions, error) {
	o := &connOptions{}
	for _, opt := range opts {
		opt(o)
	}
	switch {
	case o.pd == nil:
		d.mu.Lock()
		o.pd = d.newPD(true)
		o.pd.conns++
		d.mu.Unlock()
	case o.pd.dev != d:
		return nil, fmt.Errorf("protection domain %d is of another device", o.pd.id)
	default:
		if err := o.pd.hold(&o.pd.conns); err != nil {
			return nil, err
		}
	}
	return o, nil
}

// release lets go of the domain, if no connection has taken it over.
func (o *connOptions) release() {
	if o.pd != nil {
		o.pd.drop(&o.pd.conns)
	}
}

// newConn makes a connection of a started ec. Its caller calls watch or finish.
func newConn(d *Device, s *setupConn, ec engineConn, params core.ConnParams, private []byte, o *connOptions) *Conn {
	c := &Conn{
		dev: d, pd: o.pd, s: s, ec: ec, params: params, peerPrivate: private,
		done: make(chan struct{}), freed: make(chan struct{}),
	}
	o.pd = nil // the connection's from here on
	if o.send == nil {
		o.send = newCQ(c)
	}
	if o.recv == nil {
		o.recv = newCQ(c)
	}
	c.send.conn, c.send.cq = c, o.send
	c.recv.conn, c.recv.cq = c, o.recv
	o.send.attach(&c.send)
	o.recv.attach(&c.recv)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.conns[c] = struct{}{}
	return c
}

// PD is the connection's protection domain: memory that it is to use comes from
// there.
func (c *Conn) PD() *PD { return c.pd }

// PeerPrivateData is what the peer's program gave to Dial or Accept.
func (c *Conn) PeerPrivateData() []byte { return c.peerPrivate }

// SendCQ is where writes complete.
func (c *Conn) SendCQ() *CQ { return c.send.cq }

// RecvCQ is where receives complete.
func (c *Conn) RecvCQ() *CQ { return c.recv.cq }

// Done is closed when the connection is over, for whatever reason; Err says it.
// Completions can still be polled.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Err is nil until Done is closed, then why: ErrClosed, ErrPeerClosed,
// ErrPeerDied, *PeerFailedError, *RequestError, *core.RetryExceededError and
// others, wrapped.
func (c *Conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// ConnInfo describes a connection as it was set up.
type ConnInfo struct {
	QPN, PeerQPN uint32
	PSN, PeerPSN uint32 // of the first packet that this end and the peer sends
	Payload      int    // bytes a packet
	Checksum     bool   // UDP checksums are made and verified
	Paths        []core.PathParams
	Peer         string // TCP address of the set-up connection
}

// Info describes the connection.
func (c *Conn) Info() ConnInfo {
	return ConnInfo{
		QPN: c.params.Local.QPN, PeerQPN: c.params.Remote.QPN,
		PSN: c.params.Local.InitialPSN, PeerPSN: c.params.Remote.InitialPSN, Payload: c.params.Payload,
		Checksum: c.params.Checksum, Paths: append([]core.PathParams(nil), c.params.Paths...), Peer: c.s.peer,
	}
}

// PostWrite queues a write. It completes in SendCQ once the peer has all of it
// in its memory; until then the bytes must not change.
//
// Errors, which leave the connection as it was: ErrQueueFull while 128 requests
// are outstanding, which is until their completions have been polled; ErrTooLong;
// ErrBounds; ErrClosed for closed memory; and why the connection is over. What
// the peer refuses shows in the completion.
func (c *Conn) PostWrite(w WriteRequest) error { return c.post(core.OpWrite, w, 0) }

// PostWriteImm is PostWrite, and completes one of the peer's receives, which gets
// imm, once all before it has arrived. While the peer has posted no receive, this
// request waits, and those behind it.
func (c *Conn) PostWriteImm(w WriteRequest, imm uint32) error {
	return c.post(core.OpWriteImm, w, imm)
}

func (c *Conn) post(op core.Op, w WriteRequest, imm uint32) error {
	wr := core.WorkRequest{Op: op, RemoteAddr: w.RemoteAddr, RKey: w.RKey, Length: uint32(w.Length), Imm: imm}
	m := w.Local
	switch {
	case w.Length > core.MaxMessage:
		return fmt.Errorf("%s of %d bytes: %w, at most %d", op, w.Length, ErrTooLong, core.MaxMessage)
	case m == nil && w.Length > 0:
		return fmt.Errorf("%s of %d bytes: no local memory", op, w.Length)
	case m == nil:
	case m.dev != c.dev:
		return fmt.Errorf("%s: local memory with key %#x is of another device", op, m.key)
	case m.pd != c.pd:
		return fmt.Errorf("%s: local memory with key %#x is of protection domain %d, want the connection's, %d", op, m.key, m.pd.id, c.pd.id)
	case w.LocalOffset > m.size || w.Length > m.size-w.LocalOffset:
		return fmt.Errorf("%s of %d bytes at %d: %w, which has %d", op, w.Length, w.LocalOffset, ErrBounds, m.size)
	default:
		wr.LocalAddr, wr.LKey = m.addr+w.LocalOffset, m.key
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	q := &c.send
	switch {
	case c.refuse != nil:
		return c.refused()
	case q.posted-q.polled >= core.SQDepth:
		return errSendFull
	}
	if m != nil {
		if err := m.hold(); err != nil {
			return fmt.Errorf("%s: %w", op, err)
		}
	}
	q.slots[q.posted%core.SQDepth] = slot{wrID: w.WRID, op: op, mem: m, length: wr.Length}
	c.ec.PostSend(q.posted, wr)
	q.push()
	return nil
}

// PostRecv allows the peer one more PostWriteImm, which completes in RecvCQ with
// its immediate. Errors: ErrQueueFull while 128 receives are outstanding, and why
// the connection is over.
func (c *Conn) PostRecv(wrID uint64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	q := &c.recv
	switch {
	case c.refuse != nil:
		return c.refused()
	case q.posted-q.polled >= core.RQDepth:
		return errRecvFull
	}
	q.slots[q.posted%core.RQDepth] = slot{wrID: wrID, op: OpRecv}
	c.ec.PostRecv(q.posted + 1)
	q.push()
	return nil
}

func (c *Conn) refused() error {
	return fmt.Errorf("connection with %s: %w", c.s.peer, c.refuse)
}

// push counts the request that was just posted. A consumer cannot arm an empty
// queue and leaves it alone, so the first request lists it.
func (q *queue) push() {
	q.posted++
	if q.posted-q.polled == 1 {
		q.cq.mark(q)
	}
}

// take moves completions into into. ended says that there will be no more.
func (q *queue) take(into []Completion) (n int, ended bool) {
	c := q.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	for ; n < len(into) && q.polled != q.posted; n++ {
		s := &q.slots[q.polled%core.SQDepth]
		r := s.result
		if !c.over {
			var ok bool
			if r, ok = q.done(q.polled); !ok {
				break
			}
		}
		into[n] = Completion{WRID: s.wrID, Op: s.op, Status: r.Status, Length: r.Length, Imm: r.Imm, Conn: c}
		s.free()
		q.polled++
	}
	return n, c.over && q.polled == q.posted
}

// done asks the engine for request i. After a request that failed, and after
// the engine has given the connection up, finish gives the results.
func (q *queue) done(i uint32) (core.Received, bool) {
	c := q.conn
	if q == &c.recv {
		r, ok := c.ec.RecvDone(i)
		return r, ok && r.Status != core.StatusFlushed
	}
	if c.failure != nil {
		return core.Received{}, false
	}
	status, ok := c.ec.SendDone(i)
	if !ok || ended(status) {
		return core.Received{}, false
	}
	s := &q.slots[i%core.SQDepth]
	if status != core.StatusSuccess {
		c.failure = &RequestError{WRID: s.wrID, Op: s.op, Status: status}
		if c.refuse == nil {
			c.refuse = c.failure
		}
		go c.finish(c.failure)
	}
	return core.Received{Status: status, Length: s.length}, true
}

// ended says of a status that it tells of the end of the connection and not of
// the request.
func ended(s core.Status) bool {
	return s == core.StatusFlushed || s == core.StatusRetryExceeded
}

// arm asks for an event when the oldest request is complete.
func (q *queue) arm() {
	c := q.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.over || q.polled == q.posted:
	case q == &c.recv:
		c.ec.ArmRecv(q.polled)
	default:
		c.ec.ArmSend(q.polled)
	}
}

// finish ends the connection: the first time for the reason err, later times do
// nothing but wait. Every request that is outstanding gets its result, and
// nothing of the connection is left in the engine afterwards.
func (c *Conn) finish(err error) {
	c.once.Do(func() {
		c.ec.Fail(err)
		<-c.ec.Failed() // nothing completes or arrives from here on
		c.mu.Lock()
		c.settle(err)
		if f := c.failure; f != nil {
			reason := c.ec.Err() // the first that the engine was told or found
			if reason == error(f) {
				reason = nil
			}
			err = &RequestError{WRID: f.WRID, Op: f.Op, Status: f.Status, Err: reason}
		}
		c.err, c.refuse, c.over = err, err, true
		c.mu.Unlock()
		close(c.done)
		c.send.cq.mark(&c.send)
		c.recv.cq.mark(&c.recv)
		if !told(err) {
			c.tell(setupMsg{Type: msgAbort, Reason: err.Error()})
		}
		_ = c.s.Close()
		if err := c.ec.Close(); err != nil {
			c.dev.log.Error("free connection", "qpn", c.params.Local.QPN, "error", err)
		}
		c.dev.mu.Lock()
		delete(c.dev.conns, c)
		c.dev.mu.Unlock()
		c.pd.drop(&c.pd.conns)
		close(c.freed)
	})
	<-c.freed
}

// settle gives every outstanding request its result: what the engine says until
// the first that is not complete. That one is where a retry time was exceeded,
// the others are flushed.
func (c *Conn) settle(err error) {
	first := core.StatusFlushed
	if c.failure == nil {
		var re *core.RetryExceededError
		if errors.As(err, &re) {
			first = core.StatusRetryExceeded
		}
	}
	flushing := c.failure != nil
	for i := c.send.polled; i != c.send.posted; i++ {
		s := &c.send.slots[i%core.SQDepth]
		s.free()
		s.result = core.Received{Status: core.StatusFlushed}
		if !flushing {
			status, ok := c.ec.SendDone(i)
			switch {
			case !ok:
				s.result.Status, flushing = first, true
			case status == core.StatusSuccess:
				s.result = core.Received{Length: s.length}
			default:
				s.result.Status, flushing = status, true
				if !ended(status) {
					c.failure = &RequestError{WRID: s.wrID, Op: s.op, Status: status}
				}
			}
		}
		if s.result.Status != core.StatusSuccess {
			c.lost++
		}
	}
	flushing = false
	for i := c.recv.polled; i != c.recv.posted; i++ {
		s := &c.recv.slots[i%core.RQDepth]
		s.result = core.Received{Status: core.StatusFlushed}
		if flushing {
			continue
		}
		if r, ok := c.ec.RecvDone(i); ok {
			s.result = r
		} else {
			flushing = true
		}
	}
}
