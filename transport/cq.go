// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/metaroce/metaroce/transport/core"
)

// OpRecv is the Op of a completed receive.
const OpRecv = core.OpRecv

// Completion says how a request ended. Each request that was posted has exactly
// one, and those of a queue come in the order of posting.
type Completion struct {
	WRID   uint64
	Op     core.Op     // core.OpWrite, core.OpWriteImm or OpRecv
	Status core.Status // of what follows, only WRID, Op and Conn count without success
	Length uint32      // bytes of the message
	Imm    uint32      // OpRecv: the immediate that came with it
	Conn   *Conn
}

// CQ is where requests complete: those of one connection's send or receive queue
// by default, or of several that were given the same CQ. Methods may be called
// from any goroutine.
type CQ struct {
	own *Conn // the connection that made it for itself

	mu     sync.Mutex // one consumer at a time: that keeps the order
	queues []*queue
	next   int // queue to look at first, for fairness

	notify  chan struct{}
	waiters atomic.Int32
}

// NewCQ makes a completion queue for any number of connections, see WithSendCQ
// and WithRecvCQ.
func (d *Device) NewCQ() *CQ { return newCQ(nil) }

func newCQ(own *Conn) *CQ { return &CQ{own: own, notify: make(chan struct{}, 1)} }

func (q *CQ) attach(qu *queue) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.queues = append(q.queues, qu)
}

// Poll moves completions into into, as many as there are and fit, and returns
// how many. It never blocks.
func (q *CQ) Poll(into []Completion) int {
	n, _ := q.poll(into)
	return n
}

// poll also says that nothing can come any more.
func (q *CQ) poll(into []Completion) (n int, over bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i := 0; i < len(q.queues) && n < len(into); {
		k := (q.next + i) % len(q.queues)
		got, ended := q.queues[k].take(into[n:])
		n += got
		if !ended {
			i++
			continue
		}
		q.queues = append(q.queues[:k], q.queues[k+1:]...)
		if q.next > k {
			q.next--
		}
	}
	q.next++
	if q.next >= len(q.queues) {
		q.next = 0
	}
	return n, q.own != nil && len(q.queues) == 0
}

// Wait is Poll, but blocks until there is a completion. Its errors are that of
// ctx and, when the only connection that the queue is for is over and all its
// completions have been taken, ErrConnFailed wrapping Conn.Err.
func (q *CQ) Wait(ctx context.Context, into []Completion) (int, error) {
	if len(into) == 0 {
		return 0, errors.New("wait for completions: no room for any, want at least 1")
	}
	if n := q.Poll(into); n > 0 {
		return n, nil
	}
	q.waiters.Add(1)
	defer func() {
		// There may be more for other waiters, and this one has had their wake-up.
		if q.waiters.Add(-1) > 0 {
			q.wake()
		}
	}()
	for {
		// Arm first, then look: what completes in between is seen, what completes
		// after wakes.
		q.arm()
		n, over := q.poll(into)
		switch {
		case n > 0:
			return n, nil
		case over:
			return 0, fmt.Errorf("%w: %w", ErrConnFailed, q.own.Err())
		}
		select {
		case <-q.notify:
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
}

func (q *CQ) arm() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, qu := range q.queues {
		qu.arm()
	}
}

// wake makes one waiter look again.
func (q *CQ) wake() {
	select {
	case q.notify <- struct{}{}:
	default: // a wake-up is under way already
	}
}
