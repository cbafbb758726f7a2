// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"syscall"
	"time"

	"github.com/metaroce/metaroce/transport"
	"github.com/metaroce/metaroce/transport/core"
)

// A perf run is the client's: it says what is measured when it dials, writes into
// the server's landing area, and tells the server what came out. Between two
// messages sizes both ends agree by writes with immediate on the first queue pair.
//
//	client                          server
//	start i           ------------>
//	                  <------------ ready i
//	writes            <-----------> (bidirectional, ping-pong)
//	report            ------------>
//	                  <------------ report (bidirectional)
//
// The client closes when it has done all sizes.

// control is what an immediate says: the top byte; the rest is its argument.
type control uint32

const (
	ctlStart  control = 1 << 24
	ctlReady  control = 2 << 24
	ctlReport control = 3 << 24 // argument: length of the report in the control page

	ctlOp  = 0xff << 24
	ctlArg = 1<<24 - 1
)

const (
	controlBytes = 4096
	ctlReceives  = 8

	// qpTime bounds how long the queue pairs of a run may take to come.
	qpTime = 10 * time.Second
	// runTime bounds one message size of a run, on top of its duration.
	runTime = 10 * time.Minute
)

// Report is what one end measured; one of the two is set.
type Report struct {
	BW  *BWResult  `json:"bw,omitempty"`
	Lat *LatResult `json:"lat,omitempty"`
}

// QPInfo is one end of a queue pair, for showing.
type QPInfo struct {
	QPN  uint32
	PSN  uint32
	RKey uint32
	Addr uint64 // of the landing area
	GID  net.IP // address on the first path
}

// Session is one end of a perf run.
type Session struct {
	Params  Params // the client's
	Payload int    // bytes a packet, as agreed

	poll    bool
	cq      *transport.CQ
	pd      *transport.PD // of all queue pairs
	send    *transport.Memory
	landing *transport.Memory // nil where the peer does not write
	control *transport.Memory
	conns   []*transport.Conn
	peers   []welcome // what each queue pair may write into
}

// Options is what one end of a perf run decides for itself.
type Options struct {
	Poll bool          // poll for completions instead of sleeping
	Wait time.Duration // for the other end to be there
	// Check, at the server, may refuse what the client wants.
	Check func(Params) error
}

// Serve waits for a client at l and sets its run up. It returns an error as soon
// as a client comes whose run is refused.
func Serve(ctx context.Context, d *transport.Device, l *transport.Listener, o Options) (_ *Session, err error) {
	waitCtx, cancel := context.WithTimeout(ctx, o.Wait)
	defer cancel()
	in, err := nextCaller(waitCtx, l)
	if err != nil {
		if waitCtx.Err() != nil && ctx.Err() == nil {
			return nil, fmt.Errorf("no client within %v at %v", o.Wait, l.Addr())
		}
		return nil, err
	}
	first, err := parseHello(in.PrivateData())
	if err == nil && o.Check != nil {
		err = o.Check(first.Params)
	}
	if err == nil && first.Index != 0 {
		err = fmt.Errorf("queue pair %d comes first, want 0", first.Index)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("client %v: %w", in.RemoteAddr(), err), in.Reject(err.Error()))
	}
	s := &Session{Params: first.Params, poll: o.Poll, cq: d.NewCQ()}
	defer func() {
		if err != nil {
			s.abandon()
		}
	}()
	if err := s.allocate(d, true); err != nil {
		return nil, errors.Join(err, in.Reject(err.Error()))
	}
	qpCtx, cancel := context.WithTimeout(ctx, qpTime)
	defer cancel()
	for i := 0; ; {
		h := first
		if i > 0 {
			h, err = parseHello(in.PrivateData())
		}
		switch {
		case err != nil:
		case h.Session != first.Session:
			// Somebody else; this run goes on.
			_ = in.Reject("busy with another client")
		case h.Index != i || h.Params != first.Params:
			err = fmt.Errorf("queue pair %d of another kind, want %d", h.Index, i)
		default:
			err = s.accept(qpCtx, in, h)
			i++
		}
		if err != nil {
			return nil, fmt.Errorf("client %v: queue pair %d: %w", in.RemoteAddr(), i, err)
		}
		if i == s.Params.QPs {
			return s, nil
		}
		if in, err = nextCaller(qpCtx, l); err != nil {
			return nil, fmt.Errorf("queue pair %d of %d: %w", i, s.Params.QPs, err)
		}
	}
}

// nextCaller waits for a caller that speaks the set-up protocol.
func nextCaller(ctx context.Context, l *transport.Listener) (*transport.Incoming, error) {
	for {
		in, err := l.Accept(ctx)
		var bad *transport.HandshakeError
		if errors.As(err, &bad) {
			var version *transport.VersionError
			if errors.As(err, &version) {
				return nil, err
			}
			continue // a stranger
		}
		return in, err
	}
}

func (s *Session) accept(ctx context.Context, in *transport.Incoming, h hello) error {
	c, err := in.Accept(ctx, welcome{Landing: s.landingOf(h.Index), Control: s.controlWindow()}.marshal(), transport.WithSendCQ(s.cq), transport.WithPD(s.pd))
	if err != nil {
		return err
	}
	return s.add(c, welcome{Landing: h.Landing, Control: h.Control})
}

// Connect dials a server at addr and sets a run up. While nobody listens there it
// tries again, for o.Wait.
func Connect(ctx context.Context, d *transport.Device, addr string, p Params, o Options) (_ *Session, err error) {
	if err := p.Validate(); err != nil {
		return nil, err
	}
	s := &Session{Params: p, poll: o.Poll, cq: d.NewCQ()}
	defer func() {
		if err != nil {
			s.abandon()
		}
	}()
	if err := s.allocate(d, p.pingPong() || p.Bidirectional); err != nil {
		return nil, err
	}
	h := hello{Session: rand.Uint64(), Control: s.controlWindow(), Params: p}
	for ; h.Index < p.QPs; h.Index++ {
		h.Landing = s.landingOf(h.Index)
		wait := o.Wait
		if h.Index > 0 {
			wait = 0
		}
		c, err := DialRetry(ctx, d, addr, h.marshal(), wait, transport.WithSendCQ(s.cq), transport.WithPD(s.pd))
		if err != nil {
			return nil, err
		}
		w, err := parseWelcome(c.PeerPrivateData())
		if err == nil {
			err = s.add(c, w)
		} else {
			s.conns = append(s.conns, c) // to be closed
		}
		if err != nil {
			return nil, fmt.Errorf("server %s: %w", addr, err)
		}
	}
	return s, nil
}

// retryEvery is how long DialRetry waits between two attempts.
const retryEvery = 100 * time.Millisecond

// leastAttempt is what an attempt of DialRetry may take although the time is up:
// a peer that is there answers within it.
const leastAttempt = 2 * time.Second

// DialRetry is Device.Dial, but tries again for the time wait while nobody
// listens at addr, and gives up a peer that does not answer within that time. A
// wait of 0 is a single attempt with Dial's own bound.
func DialRetry(ctx context.Context, d *transport.Device, addr string, private []byte, wait time.Duration, opts ...transport.ConnOption) (*transport.Conn, error) {
	for end := time.Now().Add(wait); ; {
		bound := max(time.Until(end), leastAttempt)
		if wait == 0 {
			bound = time.Minute // Dial's own is less
		}
		attempt, cancel := context.WithTimeout(ctx, bound)
		c, err := d.Dial(attempt, addr, private, opts...)
		cancel()
		switch {
		case err == nil:
			return c, nil
		case !errors.Is(err, syscall.ECONNREFUSED):
			return nil, err
		case !time.Now().Before(end):
			if wait > 0 {
				return nil, fmt.Errorf("nobody listened within %v: %w", wait, err)
			}
			return nil, err
		}
		select {
		case <-time.After(retryEvery):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

func (s *Session) allocate(d *transport.Device, landing bool) (err error) {
	if s.pd, err = d.AllocPD(); err != nil {
		return err
	}
	if s.control, err = s.pd.AllocMemory(2*controlBytes, core.LocalWrite|core.RemoteWrite); err != nil {
		return fmt.Errorf("control page: %w", err)
	}
	if s.send, err = s.pd.AllocMemory(s.Params.stride(), core.LocalWrite); err != nil {
		return fmt.Errorf("send buffer: %w", err)
	}
	if landing {
		if s.landing, err = s.pd.AllocMemory(uint64(s.Params.QPs)*s.Params.stride(), core.LocalWrite|core.RemoteWrite); err != nil {
			return fmt.Errorf("landing area: %w", err)
		}
	}
	return nil
}

func (s *Session) controlWindow() window {
	return window{Addr: s.control.Addr(), RKey: s.control.RKey()}
}

func (s *Session) landingOf(qp int) window {
	if s.landing == nil {
		return window{}
	}
	return window{Addr: s.landing.Addr() + uint64(qp)*s.Params.stride(), RKey: s.landing.RKey()}
}

func (s *Session) add(c *transport.Conn, peer welcome) error {
	s.conns, s.peers = append(s.conns, c), append(s.peers, peer)
	s.Payload = c.Info().Payload
	if len(s.conns) > 1 {
		return nil
	}
	for range ctlReceives {
		if err := c.PostRecv(0); err != nil {
			return err
		}
	}
	return nil
}

func (s *Session) target(qp int) Target {
	return Target{Conn: s.conns[qp], Local: s.send, RemoteAddr: s.peers[qp].Landing.Addr, RKey: s.peers[qp].Landing.RKey}
}

// tell sends a control message with a report, if any, and waits until it is there.
func (s *Session) tell(ctx context.Context, op control, arg int, report []byte) error {
	w := transport.WriteRequest{WRID: uint64(op), RemoteAddr: s.peers[0].Control.Addr, RKey: s.peers[0].Control.RKey}
	if report != nil {
		// The first half is the peer's to write.
		copy(s.control.Bytes()[controlBytes:], report)
		w.Local, w.LocalOffset, w.Length = s.control, controlBytes, uint64(len(report))
	}
	if err := s.conns[0].PostWriteImm(w, uint32(op)|uint32(arg)); err != nil {
		return err
	}
	var comps [16]transport.Completion
	for {
		n, err := s.cq.Wait(ctx, comps[:])
		if err != nil {
			return fmt.Errorf("wait for the peer: %w", err)
		}
		for _, c := range comps[:n] {
			if err := completionError(c); err != nil {
				return err
			}
			if c.Op == core.OpWriteImm {
				return nil
			}
		}
	}
}

// hear waits for a control message and returns its argument.
func (s *Session) hear(ctx context.Context, want control) (int, error) {
	var comps [1]transport.Completion
	if _, err := s.conns[0].RecvCQ().Wait(ctx, comps[:]); err != nil {
		return 0, err
	}
	return s.heard(comps[0], want)
}

func (s *Session) heard(c transport.Completion, want control) (int, error) {
	if err := completionError(c); err != nil {
		return 0, err
	}
	if op := control(c.Imm & ctlOp); op != want {
		return 0, fmt.Errorf("control message %#x, want %#x", uint32(op)>>24, uint32(want)>>24)
	}
	// With a peer that has closed since there is nothing more to be received; that
	// shows at the next wait.
	_ = s.conns[0].PostRecv(0)
	return int(c.Imm & ctlArg), nil
}

func (s *Session) sendReport(ctx context.Context, r Report) error {
	b, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("report: %w", err)
	}
	return s.tell(ctx, ctlReport, len(b), b)
}

func (s *Session) readReport(length int) (Report, error) {
	var r Report
	if length > controlBytes {
		return r, fmt.Errorf("report of %d bytes, want at most %d", length, controlBytes)
	}
	if err := json.Unmarshal(s.control.Bytes()[:length], &r); err != nil {
		return r, fmt.Errorf("report: %w", err)
	}
	return r, nil
}

func (s *Session) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	limit := runTime + s.Params.Duration + s.Params.Warmup
	return context.WithTimeoutCause(ctx, limit, fmt.Errorf("the run did not end within %v", limit))
}

// Run measures message size i of Params.Sizes, at the client. In a bidirectional
// run the result is both ends' together.
func (s *Session) Run(ctx context.Context, i int) (Report, error) {
	ctx, cancel := s.bounded(ctx)
	defer cancel()
	r, err := s.run(ctx, i)
	if err != nil {
		return r, fmt.Errorf("size %d: %w", s.Params.Sizes()[i], s.reason(err))
	}
	return r, nil
}

func (s *Session) run(ctx context.Context, i int) (r Report, err error) {
	size := s.Params.Sizes()[i]
	s.clearLanding()
	if err := s.tell(ctx, ctlStart, i, nil); err != nil {
		return r, err
	}
	if got, err := s.hear(ctx, ctlReady); err != nil || got != i {
		return r, errors.Join(err, mismatch("size number", got, i))
	}
	switch {
	case s.Params.Test == WriteBWTest:
		r.BW, err = s.measureBW(ctx, size)
	default:
		r.Lat, err = s.measureLat(ctx, size)
	}
	if err != nil {
		return r, err
	}
	if err := s.sendReport(ctx, r); err != nil {
		return r, err
	}
	if !s.Params.Bidirectional {
		return r, nil
	}
	n, err := s.hear(ctx, ctlReport)
	if err != nil {
		return r, err
	}
	theirs, err := s.readReport(n)
	if err != nil {
		return r, err
	}
	if theirs.BW == nil {
		return r, errors.New("the server's report has no bandwidth")
	}
	sum := addBW(*r.BW, *theirs.BW)
	return Report{BW: &sum}, nil
}

func mismatch(what string, got, want int) error {
	if got == want {
		return nil
	}
	return fmt.Errorf("%s %d, want %d", what, got, want)
}

// addBW puts both directions together, as perftest does: the sum of the rates.
func addBW(a, b BWResult) BWResult {
	sum := a
	if b.Elapsed > 0 && a.Elapsed > 0 {
		sum.Iterations = a.Iterations + int(float64(b.Iterations)*a.Elapsed.Seconds()/b.Elapsed.Seconds())
	}
	sum.PeakBps = a.PeakBps + b.PeakBps
	return sum
}

func (s *Session) measureBW(ctx context.Context, size uint64) (*BWResult, error) {
	targets := make([]Target, len(s.conns))
	for i := range targets {
		targets[i] = s.target(i)
	}
	r, err := WriteBW(ctx, s.cq, targets, BWOptions{
		Size: size, Iterations: s.Params.Iterations, Duration: s.Params.Duration,
		Depth: s.Params.Depth, Warmup: s.Params.Warmup, Poll: s.poll,
	})
	return &r, err
}

func (s *Session) measureLat(ctx context.Context, size uint64) (*LatResult, error) {
	o := LatOptions{Size: size, Iterations: s.Params.Iterations, Duration: s.Params.Duration, Warmup: s.Params.Warmup}
	if s.Params.Completion {
		r, err := WriteLatCompletion(ctx, s.cq, s.target(0), o)
		return &r, err
	}
	r, err := s.pingPong(size).lead(ctx, o)
	return &r, err
}

func (s *Session) pingPong(size uint64) *pingPong {
	return &pingPong{
		cq: s.cq, target: s.target(0), out: s.send.Bytes(), in: s.landing.Bytes(),
		size: size, payload: s.Payload,
	}
}

// clearLanding removes what earlier sizes left, which a ping-pong might take for
// an answer.
func (s *Session) clearLanding() {
	if s.landing != nil && s.Params.pingPong() {
		clear(s.landing.Bytes())
	}
}

// Answer is the server's part: it serves one message size after the other and
// calls each with what the client reported, in a bidirectional run with both
// ends' together. It returns nil when the client has closed in order.
func (s *Session) Answer(ctx context.Context, each func(Report)) error {
	for {
		r, err := s.answer(ctx)
		switch {
		case errors.Is(err, transport.ErrPeerClosed):
			return nil
		case err != nil:
			return s.reason(err)
		}
		each(r)
	}
}

func (s *Session) answer(ctx context.Context) (r Report, err error) {
	ctx, cancel := s.bounded(ctx)
	defer cancel()
	i, err := s.hear(ctx, ctlStart)
	if err != nil {
		return r, err
	}
	sizes := s.Params.Sizes()
	if i >= len(sizes) {
		return r, fmt.Errorf("size number %d, want less than %d", i, len(sizes))
	}
	s.clearLanding()
	if err := s.tell(ctx, ctlReady, i, nil); err != nil {
		return r, err
	}
	var length int
	switch {
	case s.Params.Bidirectional:
		if r.BW, err = s.measureBW(ctx, sizes[i]); err != nil {
			return r, err
		}
		length, err = s.hear(ctx, ctlReport)
	case s.Params.pingPong():
		length, err = s.followUntilReport(ctx, sizes[i])
	default:
		length, err = s.hear(ctx, ctlReport)
	}
	if err != nil {
		return r, unclosed(err)
	}
	theirs, err := s.readReport(length)
	if err != nil || !s.Params.Bidirectional {
		return theirs, err
	}
	if theirs.BW == nil {
		return r, errors.New("the client's report has no bandwidth")
	}
	if err := s.sendReport(ctx, r); err != nil {
		return r, err
	}
	sum := addBW(*r.BW, *theirs.BW)
	return Report{BW: &sum}, nil
}

func (s *Session) followUntilReport(ctx context.Context, size uint64) (length int, err error) {
	var comps [1]transport.Completion
	heard := false
	err = s.pingPong(size).follow(ctx, func() (bool, error) {
		if s.conns[0].RecvCQ().Poll(comps[:]) == 0 {
			return false, nil
		}
		heard = true
		var err error
		length, err = s.heard(comps[0], ctlReport)
		return true, err
	})
	if err == nil && !heard {
		err = errOver
	}
	return length, err
}

// unclosed makes an early end of the client, even in order, an error.
func unclosed(err error) error {
	if errors.Is(err, transport.ErrPeerClosed) {
		return errors.New("the client closed in mid-run")
	}
	return err
}

// reason prefers a connection's reason to what it led to.
func (s *Session) reason(err error) error {
	for _, c := range s.conns {
		if cause := c.Err(); cause != nil && !errors.Is(err, cause) {
			return fmt.Errorf("%w: %w", err, cause)
		}
	}
	return err
}

// psnMask keeps what a BTH has of a psn, and what perftest shows.
const psnMask = 1<<24 - 1

// Local and Remote describe queue pair i.
func (s *Session) Local(i int) QPInfo {
	info := s.conns[i].Info()
	w := s.landingOf(i)
	return QPInfo{QPN: info.QPN, PSN: info.PSN & psnMask, RKey: w.RKey, Addr: w.Addr, GID: net.IP(info.Paths[0].Local.AsSlice())}
}

// Remote is the peer's end of queue pair i.
func (s *Session) Remote(i int) QPInfo {
	info := s.conns[i].Info()
	w := s.peers[i].Landing
	return QPInfo{QPN: info.PeerQPN, PSN: info.PeerPSN & psnMask, RKey: w.RKey, Addr: w.Addr, GID: net.IP(info.Paths[0].Remote.AsSlice())}
}

// Conns gives the queue pairs.
func (s *Session) Conns() []*transport.Conn { return s.conns }

// closeTime bounds Close.
const closeTime = 5 * time.Second

// Close closes the queue pairs in order, and gives the memory back.
func (s *Session) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), closeTime)
	defer cancel()
	var errs []error
	for _, c := range s.conns {
		if err := c.Close(ctx); err != nil && !errors.Is(err, transport.ErrPeerClosed) {
			errs = append(errs, err)
		}
	}
	for _, m := range []*transport.Memory{s.send, s.landing, s.control} {
		if m != nil {
			errs = append(errs, m.Close())
		}
	}
	if s.pd != nil {
		errs = append(errs, s.pd.Close())
	}
	return errors.Join(errs...)
}

// abandon closes what there is after a failure that has been reported already.
func (s *Session) abandon() { _ = s.Close() }
