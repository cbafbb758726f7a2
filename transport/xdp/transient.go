// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Waits after a failure that may pass: doubling, so that a machine short of memory is left alone.
const (
	minBackoff = time.Millisecond
	maxBackoff = 50 * time.Millisecond
)

// isTransient says whether a run of mr_tx may succeed a little later: a page could not be allocated,
// or the kernel was short of something else for a moment.
func isTransient(err error) bool {
	return errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ENOBUFS)
}

// backoff waits transient failures out. Its zero value has seen none.
type backoff struct {
	sinceNs int64 // first failure in a row; 0: none
	wait    time.Duration
}

// succeed ends a row of failures.
func (b *backoff) succeed() { *b = backoff{} }

// next is how long to wait before the next attempt. It is err, with how long it has been so, once
// that has lasted for the patience.
func (b *backoff) next(nowNs int64, patience time.Duration, err error) (time.Duration, error) {
	if b.sinceNs == 0 {
		b.sinceNs = nowNs
	}
	if lasted := time.Duration(nowNs - b.sinceNs); lasted >= patience {
		return 0, fmt.Errorf("for %v, want success within the retry time of %v: %w", lasted.Round(time.Millisecond), patience, err)
	}
	b.wait = min(max(2*b.wait, minBackoff), maxBackoff)
	return b.wait, nil
}

// waitOut counts a failure of mr_tx's call and waits before the next attempt, or returns err if it
// is none that passes.
func (p *pump) waitOut(err error) error {
	if !isTransient(err) {
		return err
	}
	if p.backoff.sinceNs == 0 {
		p.log.Warn("pump: mr_tx could not run, trying again", "error", err, "patience", p.patience)
	}
	atomic.AddUint32(&p.words.Transient, 1)
	wait, err := p.backoff.next(p.clk.now(), p.patience, err)
	if err != nil {
		return err
	}
	// Not on p.epoll: the bell would cut the wait short, and close needs no more than maxBackoff.
	time.Sleep(wait)
	return nil
}
