// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/loader"
)

// failing is a pump whose kernel fails n times with err before each success.
func failing(t *testing.T, n int, err error) *pump {
	t.Helper()
	clk, cerr := newClock()
	if cerr != nil {
		t.Fatal(cerr)
	}
	p := &pump{words: &loader.Pump{}, clk: clk, log: slog.New(slog.DiscardHandler), patience: time.Minute}
	left := n
	p.runs = func(uint32, uint32) error {
		if left > 0 {
			left--
			return err
		}
		left = n
		atomic.AddUint64(&p.words.Sent, 3)
		return nil
	}
	return p
}

func TestPumpGoesOnAfterFailuresThatPass(t *testing.T) {
	for _, errno := range []unix.Errno{unix.ENOMEM, unix.EAGAIN, unix.ENOBUFS} {
		t.Run(errno.Error(), func(t *testing.T) {
			p := failing(t, 3, errno)
			for range 3 {
				if sent, err := p.call(64, 1); sent != 0 || err != nil {
					t.Fatalf("a call that %v ended returns %d, %v, want 0 and no error", errno, sent, err)
				}
			}
			if n := p.calls.Load(); n != 0 {
				t.Errorf("%d calls counted, want 0: time without a call does not count against the peer", n)
			}
			if sent, err := p.call(64, 1); sent != 3 || err != nil {
				t.Errorf("the next call returns %d, %v, want 3 sent", sent, err)
			}
			if p.words.Transient != 3 || p.backoff != (backoff{}) {
				t.Errorf("%d failures counted, backoff %+v, want 3 and a fresh one", p.words.Transient, p.backoff)
			}
		})
	}
}

func TestInterruptedCallHasRunSome(t *testing.T) {
	p := failing(t, 1, unix.EINTR)
	if _, err := p.call(64, 1); err != nil || p.calls.Load() != 1 || p.words.Transient != 0 {
		t.Errorf("error %v, %d calls, %d failures, want none, 1 and 0", err, p.calls.Load(), p.words.Transient)
	}
}

func TestPumpFailsAtOnceWhereWaitingDoesNotHelp(t *testing.T) {
	p := failing(t, 1, unix.EINVAL)
	if _, err := p.call(64, 1); !errors.Is(err, unix.EINVAL) {
		t.Errorf("error %v, want EINVAL", err)
	}
}

func TestPumpFailsNamingTheErrorWhenItLastsForTheRetryTime(t *testing.T) {
	p := failing(t, 1<<30, unix.ENOMEM)
	p.patience = 20 * time.Millisecond
	var err error
	for range 100 {
		if _, err = p.call(64, 1); err != nil {
			break
		}
	}
	if !errors.Is(err, unix.ENOMEM) || !strings.Contains(err.Error(), "retry time of 20ms") {
		t.Errorf("error %v, want ENOMEM and the retry time of 20ms named", err)
	}
}

func TestBackoffDoublesUpToItsBound(t *testing.T) {
	var b backoff
	for i, want := range []time.Duration{1, 2, 4, 8, 16, 32, 50, 50} {
		if got, err := b.next(int64(i)+1, time.Second, unix.ENOMEM); got != want*time.Millisecond || err != nil {
			t.Errorf("wait %d is %v (%v), want %v", i, got, err, want*time.Millisecond)
		}
	}
}
