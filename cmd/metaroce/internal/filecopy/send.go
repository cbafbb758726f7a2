// SPDX-License-Identifier: Apache-2.0

package filecopy

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/metaroce/metaroce/transport"
	"github.com/metaroce/metaroce/transport/core"
)

// Sender copies files to a receiver.
type Sender struct {
	channel
	Progress func(Progress) // may be nil
}

// RemoteError is why the receiver gave up, in its words.
type RemoteError struct{ Reason string }

func (e *RemoteError) Error() string { return "receiver: " + e.Reason }

// CheckFiles refuses what cannot be copied, before anything is.
func CheckFiles(paths []string) error {
	seen := map[string]string{}
	for _, path := range paths {
		info, err := os.Stat(path)
		if err != nil {
			return err
		}
		if !info.Mode().IsRegular() {
			return fmt.Errorf("%s is a %s, want a regular file", path, typeName(info.Mode()))
		}
		name := filepath.Base(path)
		if err := checkName(name); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if other, ok := seen[name]; ok {
			return fmt.Errorf("%s and %s have the same name, want different ones: both would become %s", other, path, name)
		}
		seen[name] = path
	}
	return nil
}

func typeName(m os.FileMode) string {
	switch m.Type() {
	case os.ModeDir:
		return "directory"
	case os.ModeNamedPipe:
		return "pipe"
	case os.ModeSocket:
		return "socket"
	}
	return "device"
}

// Dial connects to a receiver, to which dial makes a connection with the private
// data and the option that it is given. idle bounds every wait for the receiver.
func Dial(d *transport.Device, idle time.Duration, dial func(private []byte, opt transport.ConnOption) (*transport.Conn, error)) (_ *Sender, err error) {
	s := &Sender{channel: channel{idle: idle, slot: replyBytes}}
	defer func() {
		if err != nil {
			_ = s.close(closeTime)
		}
	}()
	if s.pd, err = d.AllocPD(); err != nil {
		return nil, err
	}
	if s.in, err = s.pd.AllocMemory(maxSlots*replyBytes, core.LocalWrite|core.RemoteWrite); err != nil {
		return nil, fmt.Errorf("memory for answers: %w", err)
	}
	if s.conn, err = dial(hello{addr: s.in.Addr(), rkey: s.in.RKey(), slots: maxSlots}.marshal(), transport.WithPD(s.pd)); err != nil {
		return nil, err
	}
	w, err := parseWelcome(s.conn.PeerPrivateData())
	if err != nil {
		return nil, err
	}
	s.slots, s.outSlot = int(w.slots), int(w.chunk)
	s.peer.addr, s.peer.rkey = w.addr, w.rkey
	if s.out, err = s.pd.AllocMemory(uint64(s.slots*s.outSlot), core.LocalWrite); err != nil {
		return nil, fmt.Errorf("memory for chunks: %w", err)
	}
	return s, s.listen(s.slots + extraReceives)
}

// Close ends the connection in order.
func (s *Sender) Close() error { return s.close(closeTime) }

// Send copies one file. After an error the sender is of no more use, and the
// receiver has nothing of this file.
func (s *Sender) Send(ctx context.Context, path string) (File, error) {
	f, err := s.send(ctx, path)
	if err == nil {
		return f, nil
	}
	var remote *RemoteError
	if !errors.As(err, &remote) {
		if ours := s.lastWords(); ours != nil {
			err = ours
		} else if s.conn.Err() == nil {
			s.abort(ctx, err)
		}
	}
	return f, fmt.Errorf("%s: %w", path, err)
}

// lastWords looks whether the receiver said why it went.
func (s *Sender) lastWords() error {
	for {
		m, ok, err := s.poll()
		if !ok || err != nil {
			return nil
		}
		if m.kind == kindFailed {
			return &RemoteError{printable(m.data)}
		}
	}
}

// abort tells the receiver why there is no more of the file.
func (s *Sender) abort(ctx context.Context, reason error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTime)
	defer cancel()
	if s.reserve(ctx) == nil {
		_ = s.sayText(kindAbort, reason.Error())
	}
}

func (s *Sender) send(ctx context.Context, path string) (File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return File{}, errors.Unwrap(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return File{}, err
	}
	if !info.Mode().IsRegular() {
		return File{}, fmt.Errorf("is a %s, want a regular file", typeName(info.Mode()))
	}
	start := time.Now()
	h := fileHeader{
		Size: info.Size(), Mode: uint32(info.Mode().Perm()), ModTime: info.ModTime(), Name: filepath.Base(path),
	}
	if err := s.reserve(ctx); err != nil {
		return File{}, err
	}
	if err := s.say(kindOpen, copy(s.buffer(), h.marshal())); err != nil {
		return File{}, err
	}
	sum, err := s.sendData(ctx, f, h)
	if err != nil {
		return File{}, err
	}
	if err := s.reserve(ctx); err != nil {
		return File{}, err
	}
	if err := s.say(kindEnd, copy(s.buffer(), sum[:])); err != nil {
		return File{}, err
	}
	if err := s.awaitDone(ctx, sum); err != nil {
		return File{}, err
	}
	return File{Name: h.Name, Size: h.Size, Elapsed: time.Since(start), Sum: sum}, nil
}

// sendData sends the file's bytes and returns their hash.
func (s *Sender) sendData(ctx context.Context, f io.Reader, h fileHeader) (sum [sha256.Size]byte, err error) {
	hash := sha256.New()
	for done := int64(0); ; {
		s.report(h, done)
		if done == h.Size {
			break
		}
		if err := s.reserve(ctx); err != nil {
			return sum, err
		}
		chunk := s.buffer()
		chunk = chunk[:min(int64(len(chunk)), h.Size-done)]
		if n, err := io.ReadFull(f, chunk); err != nil {
			if err == io.EOF || errors.Is(err, io.ErrUnexpectedEOF) {
				return sum, fmt.Errorf("has become shorter: %d bytes, want %d", done+int64(n), h.Size)
			}
			return sum, err
		}
		hash.Write(chunk)
		if err := s.say(kindData, len(chunk)); err != nil {
			return sum, err
		}
		done += int64(len(chunk))
	}
	var more [1]byte
	if n, _ := f.Read(more[:]); n > 0 {
		return sum, fmt.Errorf("has become longer than %d bytes", h.Size)
	}
	hash.Sum(sum[:0])
	return sum, nil
}

func (s *Sender) report(h fileHeader, done int64) {
	if s.Progress != nil {
		s.Progress(Progress{Name: h.Name, Done: done, Total: h.Size})
	}
}

// reserve waits until the next slot is free at both ends.
func (s *Sender) reserve(ctx context.Context) error {
	for s.sent-s.heard >= uint32(s.slots) {
		m, err := s.hear(ctx)
		if err != nil {
			return err
		}
		if err := s.answered(m, kindCredit); err != nil {
			return err
		}
	}
	return nil
}

// answered checks an answer, which must be want unless it says that there is
// nothing to be said yet.
func (s *Sender) answered(m message, want kind) error {
	switch m.kind {
	case want, kindWorking:
		return nil
	case kindFailed:
		return &RemoteError{printable(m.data)}
	}
	return fmt.Errorf("the receiver answers %d, want %d", m.kind, want)
}

// awaitDone waits for the receiver's hash.
func (s *Sender) awaitDone(ctx context.Context, sum [sha256.Size]byte) error {
	for {
		want := kindCredit
		if s.sent-s.heard == 1 {
			want = kindDone
		}
		m, err := s.hear(ctx)
		if err != nil {
			return err
		}
		if err := s.answered(m, want); err != nil {
			return err
		}
		if m.kind != kindDone {
			continue
		}
		theirs, err := parseSum(m.data)
		if err != nil {
			return err
		}
		if theirs != sum {
			return fmt.Errorf("SHA-256 at the receiver %x, want %x", theirs, sum)
		}
		return nil
	}
}
