// SPDX-License-Identifier: Apache-2.0

package filecopy

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/metaroce/metaroce/transport"
	"github.com/metaroce/metaroce/transport/core"
)

// Progress is told how far a file is. Calls come often; Done == Total the last time.
type Progress struct {
	Name        string
	Done, Total int64 // bytes
}

// File is a file that was copied whole.
type File struct {
	Name    string
	Size    int64 // bytes
	Elapsed time.Duration
	Sum     [32]byte // SHA-256, the same at both ends
}

// channel is what both ends have: memory that the peer writes into slot by slot,
// memory that is sent from, and what the peer offers.
type channel struct {
	conn    *transport.Conn
	pd      *transport.PD
	in, out *transport.Memory
	slot    int // bytes of a slot of in
	outSlot int // bytes of a slot of out, and of the peer's in
	slots   int
	peer    struct {
		addr uint64
		rkey uint32
	}
	sent  uint32        // messages posted with a slot of their own
	heard uint32        // messages with a slot of their own that came
	idle  time.Duration // the longest that the peer may be silent
}

// errSilent says that a peer is connected and does nothing.
type errSilent struct{ idle time.Duration }

func (e errSilent) Error() string { return fmt.Sprintf("the other end did nothing for %v", e.idle) }

// message is what the peer said. Its bytes stay until the slot is answered.
type message struct {
	kind kind
	data []byte
}

// completionError prefers the connection's reason to the status.
func completionError(c transport.Completion) error {
	if c.Status == core.StatusSuccess {
		return nil
	}
	select {
	case <-c.Conn.Done():
		return c.Conn.Err()
	case <-time.After(time.Second):
		return fmt.Errorf("request: %v", c.Status)
	}
}

// buffer is the next outgoing slot. The caller knows that it is free.
func (c *channel) buffer() []byte {
	at := int(c.sent) % c.slots * c.outSlot
	return c.out.Bytes()[at : at+c.outSlot]
}

// say sends length bytes of buffer as the next message, with a slot of its own.
func (c *channel) say(k kind, length int) error {
	at := uint64(int(c.sent) % c.slots * c.outSlot)
	err := c.post(transport.WriteRequest{
		Local: c.out, LocalOffset: at, Length: uint64(length),
		RemoteAddr: c.peer.addr + at, RKey: c.peer.rkey,
	}, imm(k, c.sent))
	if err == nil {
		c.sent++
	}
	return err
}

func (c *channel) post(w transport.WriteRequest, immediate uint32) error {
	var comps [32]transport.Completion
	for _, done := range comps[:c.conn.SendCQ().Poll(comps[:])] {
		if err := completionError(done); err != nil {
			return err
		}
	}
	return c.conn.PostWriteImm(w, immediate)
}

// sayText is say with a text.
func (c *channel) sayText(k kind, text string) error {
	return c.say(k, copy(c.buffer(), text[:min(len(text), maxReason)]))
}

// note sends a message that is nothing but its kind.
func (c *channel) note(k kind) error {
	return c.post(transport.WriteRequest{RemoteAddr: c.peer.addr, RKey: c.peer.rkey}, imm(k, 0))
}

// listen posts what the peer may send before anything is answered.
func (c *channel) listen(receives int) error {
	for range receives {
		if err := c.conn.PostRecv(0); err != nil {
			return err
		}
	}
	return nil
}

// hear waits for the next message.
func (c *channel) hear(ctx context.Context) (message, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, c.idle, errSilent{c.idle})
	defer cancel()
	// Wait does not look at ctx while there is something to take, and there may be to the very end.
	if ctx.Err() != nil {
		return message{}, context.Cause(ctx)
	}
	var comps [1]transport.Completion
	if _, err := c.conn.RecvCQ().Wait(ctx, comps[:]); err != nil {
		return message{}, err
	}
	return c.take(comps[0])
}

// poll returns a message if there is one.
func (c *channel) poll() (m message, ok bool, err error) {
	var comps [1]transport.Completion
	if c.conn.RecvCQ().Poll(comps[:]) == 0 {
		return m, false, nil
	}
	m, err = c.take(comps[0])
	return m, true, err
}

func (c *channel) take(done transport.Completion) (message, error) {
	if err := completionError(done); err != nil {
		return message{}, err
	}
	// Of a connection that is ending nothing more is expected, but this counts; why
	// it ends shows at the next wait.
	_ = c.conn.PostRecv(0)
	k, number := splitImm(done.Imm)
	if k == kindWorking {
		return message{kind: k}, nil
	}
	if want := c.heard & numberMask; number != want {
		return message{}, fmt.Errorf("message number %d, want %d", number, want)
	}
	if int(done.Length) > c.slot {
		return message{}, fmt.Errorf("message of %d bytes, want at most %d", done.Length, c.slot)
	}
	at := int(c.heard) % c.slots * c.slot
	c.heard++
	return message{kind: k, data: c.in.Bytes()[at : at+int(done.Length)]}, nil
}

// close ends the connection in order within a bound, and gives the memory back.
func (c *channel) close(bound time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	var errs []error
	if c.conn != nil {
		if err := c.conn.Close(ctx); err != nil && !errors.Is(err, transport.ErrPeerClosed) {
			errs = append(errs, err)
		}
		c.drain()
	}
	for _, m := range []*transport.Memory{c.in, c.out} {
		if m != nil {
			errs = append(errs, m.Close())
		}
	}
	if c.pd != nil {
		errs = append(errs, c.pd.Close())
	}
	return errors.Join(errs...)
}

// drain polls what is left: memory is in use until then.
func (c *channel) drain() {
	var comps [32]transport.Completion
	for c.conn.SendCQ().Poll(comps[:]) > 0 {
	}
}

// closeTime bounds an orderly close.
const closeTime = 5 * time.Second
