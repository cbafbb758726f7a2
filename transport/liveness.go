// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"syscall"
	"time"
)

// The set-up connection tells, after set-up, whether the peer's program lives,
// and carries the closing handshake:
//
//	closing end                     other end
//	no more posts; all posted
//	is acknowledged: Close(psn)  ->
//	                                all below psn has arrived; no more posts;
//	                                all posted is acknowledged, or given up
//	                             <- CloseAck(psn)
//
// Both may close at once: then each answers the other's Close. The end of the TCP
// connection without it means that the peer's program is gone. A TCP timeout does
// not mean that: the plane of the TCP connection may be down and others up.

// handshake is how far closing has come. Under Conn.mu.
type handshake struct {
	sent      bool // our Close
	got       bool // the peer's
	gotPSN    uint32
	answering bool // we are about to send, or have sent, CloseAck
	answered  bool
	acked     bool // the peer's CloseAck has come
	mute      bool // the TCP connection has timed out: nobody can be told
}

// watch starts the two goroutines of a connection. Both end with it.
func (c *Conn) watch() {
	go c.listen()
	go func() {
		for {
			select {
			case <-c.ec.Events():
				c.send.cq.mark(&c.send)
				c.recv.cq.mark(&c.recv)
			case <-c.ec.Failed():
				err := c.ec.Err()
				if err == nil {
					err = errors.New("the engine gave the connection up")
				}
				c.finish(err)
				return
			case <-c.done:
				return
			}
		}
	}()
}

// listen reads the set-up connection until it or the connection is over.
func (c *Conn) listen() {
	for {
		m, err := readMsg(c.s)
		if err != nil {
			c.hungUp(err)
			return
		}
		switch m.Type {
		case msgClose:
			c.mu.Lock()
			again := c.hand.got
			c.hand.got, c.hand.gotPSN = true, m.LastPSN
			if c.refuse == nil {
				c.refuse = ErrPeerClosed
			}
			c.mu.Unlock()
			if again {
				c.finish(fmt.Errorf("%s sent %v twice", c.s.peer, m.Type))
				return
			}
			go c.answerClose(m)
		case msgCloseAck:
			c.mu.Lock()
			asked := c.hand.sent
			c.hand.acked = asked
			c.mu.Unlock()
			if !asked {
				c.finish(fmt.Errorf("%s sent %v, want %v first", c.s.peer, m.Type, msgClose))
				return
			}
		case msgAbort:
			c.finish(&PeerFailedError{Peer: c.s.peer, Reason: m.Reason})
			return
		default:
			c.finish(fmt.Errorf("%s sent %v, want %v", c.s.peer, m.Type, msgClose))
			return
		}
	}
}

// hungUp judges the end of the set-up connection.
func (c *Conn) hungUp(err error) {
	select {
	case <-c.done:
		return // this end closed it
	default:
	}
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF),
		errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		c.mu.Lock()
		hand := c.hand
		complete := hand.got && !c.over && reached(c.ec.RecvPSN(), hand.gotPSN)
		c.mu.Unlock()
		switch {
		case hand.acked: // our Close is about to finish
		case complete:
			c.finish(ErrPeerClosed) // it did not wait for our answer
		default:
			c.finish(fmt.Errorf("%s: %w", c.s.peer, ErrPeerDied))
		}
	case errors.Is(err, syscall.ETIMEDOUT), errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.EHOSTDOWN),
		errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.ENETDOWN):
		c.mu.Lock()
		c.hand.mute = true
		c.mu.Unlock()
		c.dev.log.Warn("set-up connection timed out, going on without it", "peer", c.s.peer, "error", err)
	default:
		c.finish(fmt.Errorf("set-up connection with %s: %w", c.s.peer, err))
	}
}

// reached says that psn a is at or after b.
func reached(a, b uint32) bool { return int32(a-b) >= 0 }

// psnWindow is how far a sender's next psn can be beyond what has arrived
// (docs/wire.md, section 6).
const psnWindow = 8192

// closesAt says whether a peer can have sent all below psn last.
func (c *Conn) closesAt(last uint32) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over {
		return nil
	}
	if recv := c.ec.RecvPSN(); last-recv > psnWindow {
		return fmt.Errorf("%s closes at psn %d, want %d to %d", c.s.peer, last, recv, recv+psnWindow)
	}
	return nil
}

// answerClose is this end's part when the peer closes.
func (c *Conn) answerClose(m setupMsg) {
	if err := c.closesAt(m.LastPSN); err != nil {
		c.finish(err)
		return
	}
	// The answer must be there before the peer stops waiting for it.
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(m.WaitMs)*time.Millisecond*3/4)
	defer cancel()
	if err := c.until(ctx, func() bool { return reached(c.ec.RecvPSN(), m.LastPSN) }); err != nil {
		if !errors.Is(err, errOver) {
			c.finish(fmt.Errorf("%s closed, but not all that it sent has arrived: %w", c.s.peer, ErrPeerDied))
		}
		return
	}
	if err := c.until(ctx, c.ec.Drained); errors.Is(err, errOver) {
		return
	}
	c.mu.Lock()
	if c.over {
		c.mu.Unlock()
		return
	}
	c.hand.answering = true
	crossing := c.hand.sent
	answer := setupMsg{Type: msgCloseAck, LastPSN: c.ec.SentPSN()}
	if !c.ec.Drained() {
		answer.Flushed = c.unacknowledged()
	}
	c.mu.Unlock()
	c.tell(answer)
	if !crossing {
		c.finish(ErrPeerClosed)
		return
	}
	c.mu.Lock()
	c.hand.answered = true
	c.mu.Unlock()
}

// unacknowledged counts the writes that are not complete. Under c.mu.
func (c *Conn) unacknowledged() uint32 {
	for i := c.send.polled; i != c.send.posted; i++ {
		if _, ok := c.ec.SendDone(i); !ok {
			return c.send.posted - i
		}
	}
	return 0
}

// tell writes m as well as it can.
func (c *Conn) tell(m setupMsg) {
	_ = c.s.SetWriteDeadline(time.Now().Add(telling))
	if err := c.s.write(m); err != nil {
		c.dev.log.Debug("set-up connection", "error", err)
	}
}

// told says of the reason for an end that the peer knows of it already.
func told(err error) bool {
	var failed *PeerFailedError
	return err == ErrClosed || errors.Is(err, ErrPeerClosed) || errors.Is(err, ErrPeerDied) || errors.As(err, &failed)
}

// errOver says that the connection is over.
var errOver = errors.New("connection over")

// until waits for cond, which is called under c.mu while the connection is not
// over. Its errors are errOver and the cause of ctx.
func (c *Conn) until(ctx context.Context, cond func() bool) error {
	pause := 50 * time.Microsecond
	timer := time.NewTimer(pause)
	defer timer.Stop()
	for {
		c.mu.Lock()
		over := c.over
		ok := !over && cond()
		c.mu.Unlock()
		switch {
		case over:
			return errOver
		case ok:
			return nil
		}
		select {
		case <-timer.C:
			pause = min(2*pause, 2*time.Millisecond)
			timer.Reset(pause)
		case <-c.done:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Close ends the connection in order: nothing can be posted any more, all that
// was posted is delivered, the peer is told and confirms. It takes at most 5 s,
// or until the end of ctx if that has a deadline. Receives, and writes that could
// not be delivered, complete as flushed; completions can still be polled.
//
// Whatever it returns, the connection is over then and its resources are free. An
// error says that writes were not delivered, or that the peer did not confirm.
// Closing a connection that is over already returns nil.
func (c *Conn) Close(ctx context.Context) error {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, closeTime)
		defer cancel()
	}
	c.mu.Lock()
	if c.over {
		c.mu.Unlock()
		<-c.freed
		return nil
	}
	if c.refuse == nil {
		c.refuse = ErrClosed
	}
	c.mu.Unlock()

	if err := c.until(ctx, c.ec.Drained); err != nil {
		if errors.Is(err, errOver) {
			return c.endError()
		}
		c.mu.Lock()
		n := uint32(0)
		if !c.over {
			n = c.unacknowledged()
		}
		c.mu.Unlock()
		err = fmt.Errorf("%w with %d writes not delivered: %w", ErrClosed, n, err)
		c.finish(err)
		return fmt.Errorf("connection with %s: %w", c.s.peer, err)
	}

	c.mu.Lock()
	ours := !c.hand.answering && !c.hand.sent && !c.hand.mute && !c.over
	mute := c.hand.mute
	var closing setupMsg
	if ours {
		c.hand.sent = true
		left, _ := ctx.Deadline()
		closing = setupMsg{
			Type: msgClose, LastPSN: c.ec.SentPSN(),
			WaitMs: uint32(min(max(time.Until(left).Milliseconds(), 0), maxWaitMs)),
		}
	}
	c.mu.Unlock()
	if mute {
		c.finish(ErrClosed)
		return nil
	}
	if ours {
		c.tell(closing)
	}
	// Another Close, or the answer to the peer's, ends it otherwise.
	err := c.until(ctx, func() bool {
		h := c.hand
		return ours && (h.acked && (!h.got || h.answered) || h.mute)
	})
	switch {
	case err == nil:
		c.finish(ErrClosed)
		return nil
	case errors.Is(err, errOver):
		return c.endError()
	}
	c.finish(ErrClosed)
	return fmt.Errorf("connection with %s: closed, but the peer did not confirm: %w", c.s.peer, err)
}

// endError is why a connection ended while it was being closed, nil if that was
// in order.
func (c *Conn) endError() error {
	<-c.freed
	c.mu.Lock()
	err, lost := c.err, c.lost
	c.mu.Unlock()
	switch {
	case err != ErrClosed && !errors.Is(err, ErrPeerClosed):
		return fmt.Errorf("connection with %s: %w", c.s.peer, err)
	case lost > 0:
		return fmt.Errorf("connection with %s: %d writes not delivered: %w", c.s.peer, lost, err)
	}
	return nil
}
