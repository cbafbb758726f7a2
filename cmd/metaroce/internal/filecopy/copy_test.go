// SPDX-License-Identifier: Apache-2.0

package filecopy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/fabric/lab"
	"github.com/metaroce/metaroce/telemetry"
	"github.com/metaroce/metaroce/transport"
)

// patience bounds waiting in tests.
const patience = 2 * time.Minute

var labs atomic.Int32

// rig is two hosts with a device each.
type rig struct {
	t              *testing.T
	lab            *lab.Lab
	sender, recver *transport.Device
	ln             *transport.Listener
	src, dst       string
	lossPerCent    uint64 // at most, of packets
}

func newRig(t *testing.T) *rig {
	t.Helper()
	if uid := os.Geteuid(); uid != 0 {
		t.Skipf("running as uid %d, needs root: network namespaces and BPF", uid)
	}
	l, err := lab.Up(t.Context(), lab.Config{Name: fmt.Sprintf("cpt%d-%d", os.Getpid(), labs.Add(1)), Planes: 2})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Down(); err != nil {
			t.Error(err)
		}
	})
	r := &rig{t: t, lab: l, src: t.TempDir(), dst: t.TempDir()}
	for host, d := range []**transport.Device{&r.sender, &r.recver} {
		if err := l.Do(host, func() error {
			var err error
			*d, err = transport.Open(t.Context(), transport.Config{
				Interfaces: l.Interfaces(host), Logger: slog.New(slog.DiscardHandler),
			})
			return err
		}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := (*d).Close(); err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(r.wantRepairs)
	if r.ln, err = r.recver.Listen(t.Context(), l.Addr(1, 0).String()+":0"); err != nil {
		t.Fatal(err)
	}
	return r
}

// wantRepairs fails if the devices have repaired more than was lost, and a thousandth of what they sent. The 8
// are what paths that are timed out too hastily send before a late ACK comes.
func (r *rig) wantRepairs() {
	r.t.Helper()
	sent, repairs, err := telemetry.OwnPackets()
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Logf("%d repairs of %d packets sent", repairs, sent)
	if most := sent*r.lossPerCent/100 + sent/1000 + 8; repairs > most {
		r.t.Errorf("%d repairs of %d packets sent, want at most %d", repairs, sent, most)
	}
}

// file makes a source file of random bytes.
func (r *rig) file(name string, size int) string {
	r.t.Helper()
	b := make([]byte, size)
	rnd := rand.NewChaCha8([32]byte{byte(size), byte(size >> 8)})
	_, _ = rnd.Read(b) // never fails
	path := filepath.Join(r.src, name)
	if err := os.WriteFile(path, b, 0o644); err != nil {
		r.t.Fatal(err)
	}
	return path
}

// serve takes one sender's files; its error comes through the channel.
func (r *rig) serve(ctx context.Context, idle time.Duration, change func(*Receiver)) <-chan error {
	served := make(chan error, 1)
	go func() {
		served <- func() error {
			in, err := r.ln.Accept(ctx)
			if err != nil {
				return err
			}
			s, err := Accept(ctx, r.recver, in, r.dst, idle)
			if err != nil {
				return err
			}
			if change != nil {
				change(s)
			}
			return errors.Join(s.Serve(ctx), s.Close())
		}()
	}()
	return served
}

func (r *rig) dial(idle time.Duration) *Sender {
	r.t.Helper()
	s, err := Dial(r.sender, idle, func(private []byte, opt transport.ConnOption) (*transport.Conn, error) {
		return r.sender.Dial(r.t.Context(), r.ln.Addr().String(), private, opt)
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return s
}

func (r *rig) wait(what string, errs <-chan error) error {
	r.t.Helper()
	select {
	case err := <-errs:
		return err
	case <-time.After(patience):
		r.t.Fatalf("%s has not ended within %v", what, patience)
		return nil
	}
}

// wantNothing looks for what a failed copy left behind.
func (r *rig) wantNothing() {
	r.t.Helper()
	if got := entries(r.t, r.dst); len(got) != 0 {
		r.t.Errorf("the receiver's directory has %q, want nothing", got)
	}
	for end, d := range map[string]*transport.Device{"sender": r.sender, "receiver": r.recver} {
		if n := d.Status().Regions; n != 0 {
			r.t.Errorf("%s still has %d memory regions, want none", end, n)
		}
	}
}

func TestFilesArriveByteForByte(t *testing.T) {
	r := newRig(t)
	received := 0
	served := r.serve(t.Context(), patience, func(s *Receiver) { s.Received = func(File) { received++ } })
	s := r.dial(patience)
	sizes := []int{0, 1, 4095, chunkBytes - 1, chunkBytes, chunkBytes + 1, ringSlots*chunkBytes + 3, 5*ringSlots*chunkBytes + 17}
	for _, size := range sizes {
		name := fmt.Sprintf("%d bytes", size)
		path := r.file(name, size)
		var last Progress
		s.Progress = func(p Progress) { last = p }
		f, err := s.Send(t.Context(), path)
		if err != nil {
			t.Fatal(err)
		}
		if last.Done != int64(size) || last.Total != int64(size) || f.Size != int64(size) {
			t.Errorf("%s: progress ends at %+v, file %+v", name, last, f)
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		// It is there as soon as the sender knows.
		if got, err := os.ReadFile(filepath.Join(r.dst, name)); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %d bytes that are equal: %v, error %v", name, len(got), bytes.Equal(got, want), err)
		}
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := r.wait("the receiver", served); err != nil {
		t.Error(err)
	}
	if received != len(sizes) {
		t.Errorf("the receiver tells of %d files, want %d", received, len(sizes))
	}
}

func TestFilesArriveThroughLoss(t *testing.T) {
	r := newRig(t)
	r.lossPerCent = 2 * (5 + 2) // chance may have it that more is hit than the share says
	if err := r.lab.SetRandom(lab.FaultConfig{Loss: 0.05, Duplicate: 0.02, Corrupt: 0.02, Seed: 7}); err != nil {
		t.Fatal(err)
	}
	served := r.serve(t.Context(), patience, nil)
	s := r.dial(patience)
	path := r.file("x", 3<<20)
	if _, err := s.Send(t.Context(), path); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := r.wait("the receiver", served); err != nil {
		t.Error(err)
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(r.dst, "x")); err != nil || !bytes.Equal(got, want) {
		t.Errorf("file differs, error %v", err)
	}
}

func TestFullDiskIsToldToTheSender(t *testing.T) {
	r := newRig(t)
	if err := unix.Mount("none", r.dst, "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("cannot mount a small file system: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(r.dst, 0); err != nil {
			t.Error(err)
		}
	})
	served := r.serve(t.Context(), patience, nil)
	s := r.dial(patience)
	_, err := s.Send(t.Context(), r.file("x", 4<<20))
	var remote *RemoteError
	if !errors.As(err, &remote) || !strings.Contains(err.Error(), `file "x": no space left on device`) {
		t.Errorf("sender: error %v, want the receiver's that the disk is full", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := r.wait("the receiver", served); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("receiver: error %v, want %v", err, unix.ENOSPC)
	}
	r.wantNothing()
}

func TestReceiverThatIsInterruptedSaysSo(t *testing.T) {
	r := newRig(t)
	ctx, cancel := context.WithCancel(t.Context())
	served := r.serve(ctx, patience, func(s *Receiver) {
		s.Progress = func(p Progress) {
			if p.Done > 0 {
				cancel()
			}
		}
	})
	s := r.dial(patience)
	_, err := s.Send(t.Context(), r.file("x", 64<<20))
	if err == nil || !strings.Contains(err.Error(), "receiver: interrupted") {
		t.Errorf("sender: error %v, want that the receiver was interrupted", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := r.wait("the receiver", served); !errors.Is(err, context.Canceled) {
		t.Errorf("receiver: error %v, want %v", err, context.Canceled)
	}
	r.wantNothing()
}

func TestSenderThatGivesUpSaysWhy(t *testing.T) {
	r := newRig(t)
	served := r.serve(t.Context(), patience, nil)
	s := r.dial(patience)
	path := r.file("x", 64<<20)
	s.Progress = func(p Progress) {
		if p.Done > 0 {
			if err := os.Truncate(path, p.Done); err != nil {
				t.Error(err)
			}
		}
	}
	if _, err := s.Send(t.Context(), path); err == nil || !strings.Contains(err.Error(), "has become shorter") {
		t.Errorf("sender: error %v, want that the file has become shorter", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := r.wait("the receiver", served); err == nil || !strings.Contains(err.Error(), "sender: has become shorter") {
		t.Errorf("receiver: error %v, want the sender's words", err)
	}
	r.wantNothing()
}

func TestSilentPeerIsNotWaitedForForEver(t *testing.T) {
	r := newRig(t)
	idle := 100 * time.Millisecond
	served := r.serve(t.Context(), idle, nil)
	s := r.dial(patience)
	// Nothing is sent.
	if err := r.wait("the receiver", served); err == nil || !strings.Contains(err.Error(), "did nothing for 100ms") {
		t.Errorf("receiver: error %v, want that the sender did nothing", err)
	}
	if _, err := s.Send(t.Context(), r.file("x", 1)); err == nil || !strings.Contains(err.Error(), "did nothing for 100ms") {
		t.Errorf("sender: error %v, want the receiver's reason", err)
	}
	if err := s.Close(); err != nil && !errors.Is(err, transport.ErrPeerDied) {
		t.Error(err)
	}
	r.wantNothing()
}

func TestBytesThatChangeUnderWayAreRefused(t *testing.T) {
	r := newRig(t)
	served := r.serve(t.Context(), patience, nil)
	s := r.dial(patience)
	h := fileHeader{Size: 4, Mode: 0o644, ModTime: time.Now(), Name: "x"}
	for _, m := range []struct {
		kind kind
		data []byte
	}{{kindOpen, h.marshal()}, {kindData, []byte("abcd")}, {kindEnd, make([]byte, 32)}} {
		if err := s.say(m.kind, copy(s.buffer(), m.data)); err != nil {
			t.Fatal(err)
		}
	}
	err := s.awaitDone(t.Context(), [32]byte{})
	if err == nil || !strings.Contains(err.Error(), "SHA-256 is 88d4266fd4e6338d13b845fcf289579d") {
		t.Errorf("sender: error %v, want the receiver's that the hashes differ", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := r.wait("the receiver", served); err == nil || !strings.Contains(err.Error(), "want the sender's 0000") {
		t.Errorf("receiver: error %v, want that the hashes differ", err)
	}
	r.wantNothing()
}

func TestSenderThatBreaksTheProtocolIsRefused(t *testing.T) {
	header := fileHeader{Size: 4, Mode: 0o644, ModTime: time.Now(), Name: "x"}.marshal()
	escape := fileHeader{Size: 4, Mode: 0o644, ModTime: time.Now(), Name: "../x"}.marshal()
	r := newRig(t)
	for _, tc := range []struct {
		name string
		says []message
		want string
	}{
		{"data first", []message{{kindData, []byte("x")}}, "to begin a file"},
		{"name with a slash", []message{{kindOpen, escape}}, "has a slash"},
		{"more bytes than promised", []message{{kindOpen, header}, {kindData, []byte("abcde")}}, "5 bytes came, want 4"},
		{"fewer bytes than promised", []message{{kindOpen, header}, {kindEnd, make([]byte, 32)}}, "0 bytes came, want 4"},
		{"a second file in the first", []message{{kindOpen, header}, {kindOpen, header}}, "in mid-file"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			served := r.serve(t.Context(), patience, nil)
			s := r.dial(patience)
			for _, m := range tc.says {
				if err := s.say(m.kind, copy(s.buffer(), m.data)); err != nil {
					t.Fatal(err)
				}
			}
			var err error
			for err == nil {
				var m message
				if m, err = s.hear(t.Context()); err == nil && m.kind == kindFailed {
					err = &RemoteError{printable(m.data)}
				}
			}
			if !strings.Contains(err.Error(), tc.want) {
				t.Errorf("sender: error %v, want one with %q", err, tc.want)
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			if err := r.wait("the receiver", served); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("receiver: error %v, want one with %q", err, tc.want)
			}
			r.wantNothing()
		})
	}
}
