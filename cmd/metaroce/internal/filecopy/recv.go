// SPDX-License-Identifier: Apache-2.0

package filecopy

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io/fs"
	"time"

	"github.com/metaroce/metaroce/transport"
	"github.com/metaroce/metaroce/transport/core"
)

// Receiver takes files from one sender.
type Receiver struct {
	channel
	dir      string
	Progress func(Progress) // may be nil
	Received func(File)     // may be nil
}

// Accept takes a sender's connection. idle bounds every wait for the sender.
func Accept(ctx context.Context, d *transport.Device, in *transport.Incoming, dir string, idle time.Duration) (_ *Receiver, err error) {
	h, err := parseHello(in.PrivateData())
	if err != nil {
		return nil, errors.Join(err, in.Reject(err.Error()))
	}
	slots := min(ringSlots, int(h.slots))
	r := &Receiver{dir: dir, channel: channel{idle: idle, slots: slots, slot: chunkBytes, outSlot: replyBytes}}
	r.peer.addr, r.peer.rkey = h.addr, h.rkey
	defer func() {
		if err != nil {
			_ = r.close(closeTime)
		}
	}()
	if r.pd, err = d.AllocPD(); err == nil {
		r.in, err = r.pd.AllocMemory(uint64(slots*chunkBytes), core.LocalWrite|core.RemoteWrite)
	}
	if err == nil {
		r.out, err = r.pd.AllocMemory(uint64(slots*replyBytes), core.LocalWrite)
	}
	if err != nil {
		err = fmt.Errorf("memory for chunks: %w", err)
		return nil, errors.Join(err, in.Reject(err.Error()))
	}
	w := welcome{addr: r.in.Addr(), rkey: r.in.RKey(), chunk: chunkBytes, slots: uint16(slots)}
	if r.conn, err = in.Accept(ctx, w.marshal(), transport.WithPD(r.pd)); err != nil {
		return nil, err
	}
	return r, r.listen(slots)
}

// Close ends the connection in order.
func (r *Receiver) Close() error { return r.close(closeTime) }

// Serve takes files until the sender closes, which is no error between files.
// After an error nothing is left of the file that was under way, and the sender
// has been told why if it could be.
func (r *Receiver) Serve(ctx context.Context) error {
	err := r.serve(ctx)
	if err == nil || r.conn.Err() != nil {
		return err
	}
	r.fail(ctx, err)
	return err
}

// fail tells the sender why, and waits, bounded, until it has closed.
func (r *Receiver) fail(ctx context.Context, reason error) {
	var sender *senderError
	if !errors.As(reason, &sender) {
		text := reason.Error()
		if ctx.Err() != nil {
			text = "interrupted"
		}
		// It may come without a message that it answers. The sender then has one more
		// answer than slots, but only this one and those that end a file have bytes.
		_ = r.sayText(kindFailed, text)
	}
	select {
	case <-r.conn.Done():
	case <-time.After(min(closeTime, r.idle)):
	}
}

// senderError is why the sender gave up, in its words.
type senderError struct{ reason string }

func (e *senderError) Error() string { return "sender: " + e.reason }

func (r *Receiver) serve(ctx context.Context) error {
	for {
		m, err := r.hear(ctx)
		switch {
		case errors.Is(err, transport.ErrPeerClosed):
			return nil
		case err != nil:
			return err
		case m.kind != kindOpen:
			return fmt.Errorf("the sender says %d, want %d to begin a file", m.kind, kindOpen)
		}
		h, err := parseFileHeader(m.data)
		if err != nil {
			return err
		}
		if err := r.receive(ctx, h); err != nil {
			return fmt.Errorf("file %q: %w", h.Name, err)
		}
	}
}

// receive takes the rest of a file whose header has come.
func (r *Receiver) receive(ctx context.Context, h fileHeader) error {
	start := time.Now()
	t, err := newTempFile(r.dir)
	if err != nil {
		return err
	}
	sum, err := r.fill(ctx, t, h)
	if errors.Is(err, transport.ErrPeerClosed) {
		err = r.lastWords()
	}
	if err != nil {
		return errors.Join(plain(err), t.discard())
	}
	if err := r.finish(func() error { return t.publish(h.Name, h.Mode, h.ModTime) }); err != nil {
		return plain(err)
	}
	if err := r.say(kindDone, copy(r.buffer(), sum[:])); err != nil {
		// The file is there, complete and compared.
		return err
	}
	if r.Received != nil {
		r.Received(File{Name: h.Name, Size: h.Size, Elapsed: time.Since(start), Sum: sum})
	}
	return nil
}

// lastWords is why the sender closed in mid-file.
func (r *Receiver) lastWords() error {
	for {
		m, ok, err := r.poll()
		if !ok || err != nil {
			return errors.New("the sender closed in mid-file")
		}
		if m.kind == kindAbort {
			return &senderError{printable(m.data)}
		}
	}
}

// plain takes the temporary file's path out of an error: it is of no interest.
func plain(err error) error {
	var path *fs.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	return err
}

// workingEvery is how often the sender hears that the file is still being
// finished.
const workingEvery = 5 * time.Second

// finish runs what may take long, and tells the sender that it does.
func (r *Receiver) finish(what func() error) error {
	done := make(chan error, 1)
	go func() { done <- what() }()
	tick := time.NewTicker(min(workingEvery, r.idle/3))
	defer tick.Stop()
	var noteErr error
	for {
		select {
		case err := <-done:
			return err
		case <-tick.C:
			if noteErr == nil {
				noteErr = r.note(kindWorking)
			}
		}
	}
}

// fill writes the file's bytes and compares their hash with the sender's.
func (r *Receiver) fill(ctx context.Context, t *tempFile, h fileHeader) (sum [sha256.Size]byte, err error) {
	if err := r.finish(func() error { return t.reserve(h.Size) }); err != nil {
		return sum, err
	}
	if err := r.say(kindCredit, 0); err != nil {
		return sum, err
	}
	digest := sha256.New()
	for done := int64(0); ; {
		if r.Progress != nil {
			r.Progress(Progress{Name: h.Name, Done: done, Total: h.Size})
		}
		m, err := r.hear(ctx)
		if err != nil {
			return sum, err
		}
		switch m.kind {
		case kindData:
			if done += int64(len(m.data)); done > h.Size {
				return sum, fmt.Errorf("%d bytes came, want %d", done, h.Size)
			}
			if err := r.store(t, digest, m.data); err != nil {
				return sum, err
			}
			if err := r.say(kindCredit, 0); err != nil {
				return sum, err
			}
		case kindEnd:
			if done != h.Size {
				return sum, fmt.Errorf("%d bytes came, want %d", done, h.Size)
			}
			digest.Sum(sum[:0])
			return sum, compare(sum, m.data)
		case kindAbort:
			return sum, &senderError{printable(m.data)}
		default:
			return sum, fmt.Errorf("the sender says %d in mid-file", m.kind)
		}
	}
}

func (r *Receiver) store(t *tempFile, digest hash.Hash, data []byte) error {
	// The sender may still write here: what is hashed is what was stored only
	// if it does not, and then the hashes differ and the file is refused.
	if _, err := t.Write(data); err != nil {
		return err
	}
	digest.Write(data)
	return nil
}

func compare(sum [sha256.Size]byte, b []byte) error {
	theirs, err := parseSum(b)
	if err != nil {
		return err
	}
	if theirs != sum {
		return fmt.Errorf("SHA-256 is %x, want the sender's %x", sum, theirs)
	}
	return nil
}
