// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/metaroce/metaroce/transport/core"
)

// Setting up a connection, over TCP:
//
//	dialler                         listener
//	NewConn, Hello    ------------>
//	                                the program decides; NewConn, Start
//	                  <------------ Accept, or Reject
//	Start, Ready      ------------>
//
// Each end takes packets before the other can send any: the listener before
// Accept, the dialler before Ready. The TCP connection stays until the connection
// is over, see liveness.go.

// setupTime bounds a set-up whose context does not.
const setupTime = 10 * time.Second

// setupKeepalive keeps the set-up connection, which is idle while the connection
// lives, in the tables of firewalls and NATs on the way. They forget after a
// minute at the least. When nothing comes back for two minutes the connection
// times out, which is not the end of the peer: see hungUp.
var setupKeepalive = net.KeepAliveConfig{Enable: true, Idle: 30 * time.Second, Interval: 10 * time.Second, Count: 9}

// errHungUp says that the peer ended the set-up without a word.
var errHungUp = errors.New("hung up")

// telling bounds the writing of a message whose loss does no harm.
const telling = 200 * time.Millisecond

// setupConn speaks set-up messages over a stream: TCP, or TLS on it.
type setupConn struct {
	net.Conn
	peer string
	wmu  sync.Mutex
}

func newSetupConn(c net.Conn) *setupConn {
	return &setupConn{Conn: c, peer: c.RemoteAddr().String()}
}

// during runs f, whose I/O on s ends when ctx does.
func (s *setupConn) during(ctx context.Context, f func() error) error {
	past := func() { _ = s.SetDeadline(time.Unix(1, 0)) }
	stop := context.AfterFunc(ctx, past)
	err := f()
	if !stop() {
		// past may still run and spoil the deadline: s is of no use any more.
		return s.waitError(ctx)
	}
	return err
}

func (s *setupConn) waitError(ctx context.Context) error {
	err := context.Cause(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("%s does not answer: %w", s.peer, err)
	}
	return err
}

// write sends m. Writers may be several.
func (s *setupConn) write(m setupMsg) error {
	b, err := appendMsg(nil, m)
	if err != nil {
		return err
	}
	s.wmu.Lock()
	defer s.wmu.Unlock()
	if _, err := s.Write(b); err != nil {
		return fmt.Errorf("%v to %s: %w", m.Type, s.peer, err)
	}
	return nil
}

// read receives the next message of a set-up, which must be of a type in want.
func (s *setupConn) read(want ...msgType) (setupMsg, error) {
	m, err := readMsg(s)
	var ve *VersionError
	switch {
	case errors.As(err, &ve):
		ve.Peer = s.peer
		return m, ve
	case errors.Is(err, ErrNotMetaroce):
		return m, fmt.Errorf("%s: %w", s.peer, err)
	case err == io.EOF || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET):
		return m, fmt.Errorf("%s %w, want %v", s.peer, errHungUp, want[0])
	case err != nil:
		return m, fmt.Errorf("%s: %w", s.peer, err)
	}
	for _, t := range want {
		if m.Type == t {
			return m, nil
		}
	}
	if m.Type == msgReject {
		return m, &RejectedError{Peer: s.peer, Reason: m.Reason}
	}
	return m, fmt.Errorf("%s sent %v, want %v", s.peer, m.Type, want[0])
}

// reject says no, as well as it can, and closes. The peer may be in the middle
// of sending: what it sent is read first, or the kernel would reset the
// connection and the peer might not see the message.
func (s *setupConn) reject(reason string) error {
	_ = s.SetDeadline(time.Now().Add(telling))
	err := s.write(setupMsg{Type: msgReject, Reason: reason})
	if c, ok := s.Conn.(interface{ CloseWrite() error }); ok && err == nil {
		_ = c.CloseWrite()
		_, _ = io.CopyN(io.Discard, s, setupHeader+maxSetupBody)
	}
	_ = s.Close()
	return err
}

// pair makes of both ends' offers the connection's parameters.
func pair(local, remote core.Endpoint) (core.ConnParams, error) {
	return core.PairPaths(local, remote, rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())))
}

// Dial sets a connection up with the listener at the TCP address addr,
// host:port. private, at most 196 bytes, is for the peer's program.
//
// It ends after 10 s if ctx does not sooner. A listener that hangs up without a
// word may be overrun by callers: Dial tries again, four times in all. Errors:
// *RejectedError, *VersionError, ErrNotMetaroce, those of the TCP connection, and
// what keeps this end from starting, such as a path without a route.
func (d *Device) Dial(ctx context.Context, addr string, private []byte, opts ...ConnOption) (*Conn, error) {
	if len(private) > core.MaxPrivate {
		return nil, fmt.Errorf("private data of %d bytes, at most %d fit", len(private), core.MaxPrivate)
	}
	if err := d.begin(); err != nil {
		return nil, err
	}
	defer d.pending.Done()
	o, err := d.connOptions(opts)
	if err != nil {
		return nil, err
	}
	defer o.release()
	ctx, cancel := d.bound(ctx)
	defer cancel()
	for attempt := 1; ; attempt++ {
		c, err := d.dialOnce(ctx, addr, private, o)
		if err == nil {
			c.watch()
			return c, nil
		}
		var unheard *unheardError
		if !errors.As(err, &unheard) || attempt == dialAttempts {
			return nil, err
		}
		pause := dialPause/2 + rand.N(dialPause)
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, err
		}
	}
}

// How often Dial calls a listener that hangs up without a word, and how long it
// waits in between, on average.
const (
	dialAttempts = 4
	dialPause    = 100 * time.Millisecond
)

// unheardError says that the listener hung up without a word.
type unheardError struct{ err error }

func (e *unheardError) Error() string { return e.err.Error() }
func (e *unheardError) Unwrap() error { return e.err }

// dialOnce is one attempt of Dial. What takes time is done before the TCP
// connection is made, so that Hello follows at once: the listener does not wait
// long for it.
func (d *Device) dialOnce(ctx context.Context, addr string, private []byte, o *connOptions) (c *Conn, err error) {
	ec, err := d.eng.NewConn(o.pd.id)
	if err != nil {
		return nil, fmt.Errorf("connection with %s: %w", addr, err)
	}
	tcp, err := d.dialTCP(ctx, addr)
	if err != nil {
		return nil, errors.Join(err, ec.Close())
	}
	s := newSetupConn(tcp)
	err = s.during(ctx, func() error {
		c, err = d.dial(ctx, s, ec, private, o)
		if err != nil {
			return errors.Join(err, ec.Close())
		}
		return nil
	})
	if err != nil {
		if c != nil { // ctx ended when all was done
			c.finish(err)
		}
		_ = s.Close()
		return nil, err
	}
	return c, nil
}

func (d *Device) dial(ctx context.Context, s *setupConn, ec engineConn, private []byte, o *connOptions) (*Conn, error) {
	local := d.endpoint(ec)
	var m setupMsg
	err := s.write(setupMsg{Type: msgHello, Endpoint: local, Private: private})
	if err == nil {
		m, err = s.read(msgAccept)
	}
	switch {
	case err == nil:
	case errors.Is(err, errHungUp), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return nil, &unheardError{err}
	default:
		return nil, err
	}
	// The listener does not wait long for Ready.
	startCtx, cancel := context.WithTimeout(ctx, d.limits.start)
	defer cancel()
	params, err := d.start(startCtx, s, ec, local, m.Endpoint)
	if err != nil {
		_ = s.reject(err.Error())
		return nil, err
	}
	if err := s.write(setupMsg{Type: msgReady}); err != nil {
		return nil, err
	}
	return newConn(d, s, ec, params, m.Private, o), nil
}

func (d *Device) start(ctx context.Context, s *setupConn, ec engineConn, local, remote core.Endpoint) (core.ConnParams, error) {
	params, err := pair(local, remote)
	if err == nil {
		err = ec.Start(ctx, params)
	}
	if err != nil {
		return params, fmt.Errorf("connection with %s: %w", s.peer, err)
	}
	return params, nil
}

// dialTCP connects to addr in the device's network namespace, trying each
// address of a name in turn. Names are looked up as the calling program does,
// since the resolver does not stay on its thread.
func (d *Device) dialTCP(ctx context.Context, addr string) (net.Conn, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, fmt.Errorf("peer %q: %w, want host:port", addr, err)
	}
	ips := []netip.Addr{}
	if ip, err := netip.ParseAddr(host); err == nil {
		ips = append(ips, ip)
	} else if ips, err = net.DefaultResolver.LookupNetIP(ctx, "ip", host); err != nil {
		return nil, fmt.Errorf("peer %s: %w", addr, err)
	}
	for i, ip := range ips {
		ip = ip.Unmap()
		// One address that swallows everything must not take all the time.
		one, cancel := ctx, context.CancelFunc(func() {})
		if end, ok := ctx.Deadline(); ok {
			one, cancel = context.WithTimeout(ctx, time.Until(end)/time.Duration(len(ips)-i))
		}
		var c net.Conn
		err = d.ns.do(func() (err error) {
			dialer := net.Dialer{KeepAliveConfig: setupKeepalive}
			// What ends the connection, and keepalive, are known of plain TCP only.
			dialer.SetMultipathTCP(false)
			c, err = dialer.DialContext(one, "tcp", net.JoinHostPort(ip.String(), port))
			return err
		})
		cancel()
		if err == nil {
			return c, nil
		}
		if ctx.Err() != nil {
			break
		}
	}
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		err = fmt.Errorf("peer %s: nothing listens there: %w", addr, syscall.ECONNREFUSED)
	case errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded):
		err = fmt.Errorf("peer %s does not answer: %w", addr, context.DeadlineExceeded)
	case ctx.Err() != nil:
		err = fmt.Errorf("peer %s: %w", addr, context.Cause(ctx))
	default:
		err = fmt.Errorf("peer %s: %w", addr, rootError(err))
	}
	return nil, err
}

// rootError strips net.OpError, whose text repeats addresses.
func rootError(err error) error {
	var op *net.OpError
	if errors.As(err, &op) {
		return op.Err
	}
	return err
}

// Listener takes connections from peers.
type Listener struct {
	dev    *Device
	tcp    net.Listener
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	once   sync.Once
	wg     sync.WaitGroup

	greeting greeting
	callers  callers
}

// Listen waits for peers at the TCP address addr, host:port, where the host may
// be empty and port 0 is any free one. ctx bounds the call, not the listener.
func (d *Device) Listen(ctx context.Context, addr string) (*Listener, error) {
	if err := d.begin(); err != nil {
		return nil, err
	}
	defer d.pending.Done()
	var tcp net.Listener
	err := d.ns.do(func() (err error) {
		lc := net.ListenConfig{KeepAliveConfig: setupKeepalive}
		// Plain TCP, as in dialTCP; Go would take Multipath TCP.
		lc.SetMultipathTCP(false)
		tcp, err = lc.Listen(ctx, "tcp", addr)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listen at %s: %w", addr, rootError(err))
	}
	l := &Listener{dev: d, tcp: tcp, greeting: greeting{limits: d.limits}}
	l.callers = callers{limits: d.limits, wg: &l.wg, ready: make(chan struct{}, 1)}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	d.mu.Lock()
	d.listeners[l] = struct{}{}
	d.mu.Unlock()
	l.wg.Add(1)
	go l.run()
	return l, nil
}

// Addr is the TCP address.
func (l *Listener) Addr() net.Addr { return l.tcp.Addr() }

// Close ends listening. Callers that have not been accepted or rejected are
// hung up on, save an Incoming that Accept has returned. A second Close returns
// nil.
func (l *Listener) Close() error {
	var err error
	l.once.Do(func() {
		l.cancel()
		err = l.tcp.Close()
		l.callers.close()
		l.dev.mu.Lock()
		delete(l.dev.listeners, l)
		l.dev.mu.Unlock()
	})
	l.wg.Wait()
	return err
}

// run accepts TCP connections; each says its Hello in its own time.
func (l *Listener) run() {
	defer l.wg.Done()
	for {
		tcp, err := l.tcp.Accept()
		if err != nil {
			select {
			case <-l.ctx.Done():
				return
			case <-time.After(100 * time.Millisecond): // out of descriptors, most likely
				l.dev.log.Warn("accept", "addr", l.tcp.Addr().String(), "error", err)
			}
			continue
		}
		g := l.greeting.enter(tcp)
		l.wg.Go(func() {
			defer l.greeting.leave(g)
			l.greet(g, newSetupConn(tcp))
		})
	}
}

// greet reads the Hello and queues the caller for Accept.
func (l *Listener) greet(g *greeter, s *setupConn) {
	ctx, cancel := context.WithTimeout(l.ctx, l.dev.limits.hello)
	defer cancel()
	c := &caller{from: g.from}
	m, err := s.hello(ctx)
	// From here on the caller keeps its connection, though it may lose its place.
	if mine := l.greeting.hold(g, nil); !mine {
		l.dev.log.Debug("set-up: silent while others came", "peer", s.peer)
		return
	}
	switch {
	case err == nil:
		c.in = &Incoming{dev: l.dev, s: s, hello: m}
	case errors.Is(err, errHungUp) || ctx.Err() != nil:
		// Connected and went away, as health checks do, or never said a word.
		l.dev.log.Debug("set-up", "error", err)
		_ = s.Close()
		return
	default:
		c.err = &HandshakeError{Peer: s.peer, Err: err}
		_ = s.Close()
	}
	if dropped, reason := l.callers.put(c); dropped != nil && dropped.in != nil {
		l.dev.log.Warn("set-up: caller rejected", "peer", dropped.in.s.peer, "reason", reason)
		// This takes a moment. The place is kept for it, and if it is lost the
		// rejected one hangs up.
		if !l.greeting.hold(g, dropped.in.s) {
			_ = dropped.in.s.Close()
			return
		}
		_ = dropped.in.Reject(reason)
	}
}

// hello reads the caller's Hello. A caller of another version is told ours: it
// is in the header of whatever we say.
func (s *setupConn) hello(ctx context.Context) (m setupMsg, err error) {
	err = s.during(ctx, func() (err error) {
		m, err = s.read(msgHello)
		return err
	})
	var ve *VersionError
	if errors.As(err, &ve) {
		_ = s.reject(fmt.Sprintf("peer speaks version %d, this is version %d", ve.Theirs, ve.Ours))
	}
	return m, err
}

// Accept waits for the next caller. An error that is a *HandshakeError concerns
// one caller, such as a peer of another version or something that is no metaroce
// peer, and the listener goes on; others are the end of ctx, or ErrClosed.
func (l *Listener) Accept(ctx context.Context) (*Incoming, error) {
	select {
	case <-l.ctx.Done():
		return nil, fmt.Errorf("listener at %v: %w", l.tcp.Addr(), ErrClosed)
	default:
	}
	for {
		if c := l.callers.next(); c != nil {
			return c.in, c.err
		}
		select {
		case <-l.callers.ready:
		case <-l.ctx.Done():
			return nil, fmt.Errorf("listener at %v: %w", l.tcp.Addr(), ErrClosed)
		case <-ctx.Done():
			return nil, fmt.Errorf("listener at %v: %w", l.tcp.Addr(), context.Cause(ctx))
		}
	}
}

// Incoming is a peer that wants a connection. One of Accept and Reject must be
// called, once. The peer waits 10 s for it.
type Incoming struct {
	dev   *Device
	s     *setupConn
	hello setupMsg
}

// PrivateData is what the peer gave to Dial.
func (in *Incoming) PrivateData() []byte { return in.hello.Private }

// RemoteAddr is the peer's TCP address.
func (in *Incoming) RemoteAddr() net.Addr { return in.s.RemoteAddr() }

// Reject tells the peer's program no, and why, in at most 1024 bytes. An error
// means that the peer may not have heard it.
func (in *Incoming) Reject(reason string) error { return in.s.reject(reason) }

// Accept sets the connection up. private, at most 196 bytes, is for the peer's
// program. It ends after 10 s if ctx does not sooner, and 2 s after the peer has
// been told if that does not get ready; after an error the peer is gone.
func (in *Incoming) Accept(ctx context.Context, private []byte, opts ...ConnOption) (*Conn, error) {
	d, s := in.dev, in.s
	if len(private) > core.MaxPrivate {
		err := fmt.Errorf("private data of %d bytes, at most %d fit", len(private), core.MaxPrivate)
		_ = s.reject("the listener's program failed")
		return nil, err
	}
	if err := d.begin(); err != nil {
		_ = s.Close()
		return nil, err
	}
	defer d.pending.Done()
	o, err := d.connOptions(opts)
	if err != nil {
		_ = s.reject("the listener's program failed")
		return nil, err
	}
	defer o.release()
	ctx, cancel := d.bound(ctx)
	defer cancel()
	var c *Conn
	err = s.during(ctx, func() error {
		ec, err := d.eng.NewConn(o.pd.id)
		if err != nil {
			err = fmt.Errorf("connection with %s: %w", s.peer, err)
			_ = s.reject(err.Error())
			return err
		}
		c, err = d.accept(ctx, s, ec, in.hello, private, o)
		if err != nil {
			return errors.Join(err, ec.Close())
		}
		return nil
	})
	if err != nil {
		if c != nil {
			c.finish(err)
		}
		_ = s.Close()
		return nil, err
	}
	c.watch()
	return c, nil
}

func (d *Device) accept(ctx context.Context, s *setupConn, ec engineConn, hello setupMsg, private []byte, o *connOptions) (*Conn, error) {
	local := d.endpoint(ec)
	params, err := d.start(ctx, s, ec, local, hello.Endpoint)
	if err != nil {
		_ = s.reject(err.Error())
		return nil, err
	}
	if err := s.write(setupMsg{Type: msgAccept, Endpoint: local, Private: private}); err != nil {
		return nil, err
	}
	late := fmt.Errorf("no %v within %v: %w", msgReady, d.limits.ready, context.DeadlineExceeded)
	readyCtx, cancel := context.WithTimeoutCause(ctx, d.limits.ready, late)
	defer cancel()
	err = s.during(readyCtx, func() error {
		_, err := s.read(msgReady)
		return err
	})
	if err != nil {
		return nil, err
	}
	return newConn(d, s, ec, params, hello.Private, o), nil
}
