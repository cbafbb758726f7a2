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
//
// A CQ looks at the *listed* queues alone, so that a wait costs what happens and
// not how many connections there are. A queue is listed by mark: when its engine's
// event fires, when the first request is posted to it, and when its connection is
// over. It stays listed while completions are found. One that was found empty is
// armed, looked at once more, and left alone until the event.
type CQ struct {
	own *Conn // the connection that made it for itself

	mu       sync.Mutex // one consumer at a time: that keeps the order
	attached int        // queues that may still complete something
	hot      []*queue   // listed, and known to the consumer
	spare    []*queue

	marks  sync.Mutex // after mu and any Conn.mu
	marked []*queue   // listed since the last look
	fresh  atomic.Bool

	notify  chan struct{}
	waiters atomic.Int32
}

// cqState is what a CQ keeps of a queue.
type cqState struct {
	listed atomic.Bool
	gone   bool // nothing can complete any more. Under CQ.mu, like misses
	misses int  // looks in a row that found nothing
}

// patience is how many times in a row Poll looks at an empty queue before it arms
// it and leaves it alone: an event costs more than many looks.
const patience = 1024

// NewCQ makes a completion queue for any number of connections, see WithSendCQ
// and WithRecvCQ.
func (d *Device) NewCQ() *CQ { return newCQ(nil) }

func newCQ(own *Conn) *CQ { return &CQ{own: own, notify: make(chan struct{}, 1)} }

func (q *CQ) attach(*queue) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.attached++
}

// mark lists a queue and wakes who waits. It is called after what it is about has
// been published.
func (q *CQ) mark(qu *queue) {
	if !qu.state.listed.Load() && qu.state.listed.CompareAndSwap(false, true) {
		q.marks.Lock()
		q.marked = append(q.marked, qu)
		q.marks.Unlock()
		q.fresh.Store(true)
	}
	if q.waiters.Load() > 0 {
		q.wake()
	}
}

// collect moves what was marked to the consumer's list. Under mu.
func (q *CQ) collect() {
	if !q.fresh.Load() {
		return
	}
	q.fresh.Store(false) // before the look: what is marked after it is seen next time
	q.marks.Lock()
	defer q.marks.Unlock()
	q.hot = append(q.hot, q.marked...)
	clear(q.marked)
	q.marked = q.marked[:0]
}

// Poll moves completions into into, as many as there are and fit, and returns
// how many. It never blocks.
func (q *CQ) Poll(into []Completion) int {
	n, _ := q.poll(into, false)
	return n
}

// poll also says that nothing can come any more. If it is the last look before
// sleeping and finds nothing, every queue is armed or empty afterwards.
func (q *CQ) poll(into []Completion, last bool) (n int, over bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.collect()
	kept, i := 0, 0
	for ; i < len(q.hot) && n < len(into); i++ {
		qu := q.hot[i]
		got, stays := q.visit(qu, into[n:], last)
		n += got
		if stays {
			q.hot[kept] = qu
			kept++
		}
	}
	if rest := q.hot[i:]; len(rest) > 0 {
		// No room for these: they are first next time.
		q.spare = append(append(q.spare[:0], rest...), q.hot[:kept]...)
		clear(q.hot)
		q.hot, q.spare = q.spare, q.hot[:0]
	} else {
		clear(q.hot[kept:])
		q.hot = q.hot[:kept]
	}
	return n, q.own != nil && q.attached == 0
}

// visit takes a listed queue's completions, and says whether it stays on the
// consumer's list. Under mu.
func (q *CQ) visit(qu *queue, into []Completion, last bool) (n int, stays bool) {
	s := &qu.state
	if s.gone {
		return 0, false // listed a last time when its connection was over
	}
	n, ended := qu.take(into)
	if n == 0 && !ended {
		if s.misses++; !last && (s.misses < patience || q.attached == 1) {
			return 0, true
		}
		// First off the list, then armed, then looked at: what completes before the
		// look is found by it, what completes after fires the event, which lists.
		s.listed.Store(false)
		qu.arm()
		if n, ended = qu.take(into); n == 0 && !ended {
			return 0, false
		}
		stays = s.listed.CompareAndSwap(false, true)
	} else {
		stays = true
	}
	s.misses = 0
	if ended {
		s.gone, stays = true, false
		q.attached--
	}
	return n, stays
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
		n, over := q.poll(into, true)
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

// wake makes one waiter look again.
func (q *CQ) wake() {
	select {
	case q.notify <- struct{}{}:
	default: // a wake-up is under way already
	}
}
