// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/metaroce/metaroce/transport/core"
)

// sharing is n connections whose receives complete in one queue.
type sharing struct {
	f        *fabric
	q        *CQ
	src, dst *Memory
	a, b     []*Conn // b's receives are q's
}

func share(t *testing.T, n int) *sharing {
	t.Helper()
	s := &sharing{f: newFabric(t)}
	da, _ := newTestDevice(t, s.f)
	db, _ := newTestDevice(t, s.f)
	s.q = db.NewCQ()
	s.src, s.dst = alloc(t, da, 8), alloc(t, db, 8)
	for range n {
		a, b := connectPD(t, da, db, []ConnOption{WithPD(testPD(t, da))}, []ConnOption{WithPD(testPD(t, db)), WithRecvCQ(s.q)})
		s.a, s.b = append(s.a, a), append(s.b, b)
	}
	return s
}

func (s *sharing) postRecv(t *testing.T, i int, id uint64) {
	t.Helper()
	if err := s.b[i].PostRecv(id); err != nil {
		t.Fatal(err)
	}
}

func (s *sharing) send(t *testing.T, i int, imm uint32) {
	t.Helper()
	w := WriteRequest{Local: s.src, Length: 8, RemoteAddr: s.dst.Addr(), RKey: s.dst.RKey()}
	if err := s.a[i].PostWriteImm(w, imm); err != nil {
		t.Fatal(err)
	}
}

// armed waits until a Wait on the queue has found nothing.
func (s *sharing) armed(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	if n, err := s.q.Wait(ctx, make([]Completion, 1)); n != 0 || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("Wait gives %d and %v, want nothing", n, err)
	}
}

func (f *fabric) looked() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.looks
}

func TestWaitOnASharedQueueCostsWhatIsReady(t *testing.T) {
	const conns, rounds = 50, 20
	s := share(t, conns)
	for i := range conns {
		s.postRecv(t, i, uint64(i))
	}
	s.armed(t)
	before := s.f.looked()
	for r := range rounds {
		s.send(t, 7, uint32(r))
		if got := collect(t, s.q, 1)[0]; got.Conn != s.b[7] || got.Imm != uint32(r) {
			t.Fatalf("completion %+v, want number %d of connection 7", got, r)
		}
		s.postRecv(t, 7, 7)
	}
	// The event lists both queues of the one connection; each is looked at, armed and looked at again.
	if looks := s.f.looked() - before; looks > 20*rounds {
		t.Errorf("%d looks at engines for %d completions of one of %d connections, want at most %d", looks, rounds, conns, 20*rounds)
	}
}

func TestPollOnASharedQueueSoonCostsWhatIsReady(t *testing.T) {
	const conns = 50
	s := share(t, conns)
	for i := range conns {
		s.postRecv(t, i, uint64(i))
	}
	into := make([]Completion, 1)
	for range patience + 1 {
		if s.q.Poll(into) != 0 {
			t.Fatal("a completion from nowhere")
		}
	}
	before := s.f.looked()
	for range 1000 {
		if s.q.Poll(into) != 0 {
			t.Fatal("a completion from nowhere")
		}
	}
	if looks := s.f.looked() - before; looks != 0 {
		t.Errorf("%d looks at engines in 1000 polls of a queue that has been empty for long, want none", looks)
	}
	for i := range conns {
		s.send(t, i, uint32(i))
	}
	got := map[*Conn]bool{}
	eventually(t, "each connection's completion is polled", func() bool {
		if s.q.Poll(into) == 1 {
			if got[into[0].Conn] {
				t.Errorf("a second completion %+v", into[0])
			}
			got[into[0].Conn] = true
		}
		return len(got) == conns
	})
}

// What completes while a queue is being armed fires no event.
func TestCompletionsThatComeJustBeforeArmingAreFound(t *testing.T) {
	s := share(t, 2)
	for n := range uint64(3) {
		s.postRecv(t, 0, n)
	}
	c := s.f.conn(s.b[0].Info().QPN)
	s.f.mu.Lock()
	c.onArm = func(n uint32) {
		for i := range uint32(3) {
			c.recvs[n+i] = core.Received{}
		}
	}
	s.f.mu.Unlock()
	for n := range uint64(3) {
		if got := collect(t, s.q, 1)[0]; got.WRID != n {
			t.Errorf("completion %+v, want number %d", got, n)
		}
	}
}

func TestReadyConnectionsOfASharedQueueTakeTurns(t *testing.T) {
	const conns, each = 3, 9
	s := share(t, conns)
	for i := range s.b {
		for n := range uint64(each) {
			s.postRecv(t, i, n)
			s.send(t, i, uint32(n)) // is there at once
		}
	}
	next := map[*Conn]uint64{}
	for k := range conns * each {
		c := collect(t, s.q, 1)[0] // room for one only
		if c.WRID != next[c.Conn] {
			t.Fatalf("completion %+v, want number %d", c, next[c.Conn])
		}
		next[c.Conn]++
		if k == conns*2-1 && len(next) != conns {
			t.Errorf("the first %d completions are of %d connections, %d are ready", k+1, len(next), conns)
		}
	}
}

func TestSharedQueueLosesNothingUnderPollersAndWaiters(t *testing.T) {
	const conns, each = 8, 500
	s := share(t, conns)
	var got atomic.Int64
	done := make(chan struct{})
	var count [conns]atomic.Int64
	index := map[*Conn]int{}
	for i, b := range s.b {
		index[b] = i
	}
	seen := func(cs []Completion) {
		for _, c := range cs {
			i := index[c.Conn]
			if n := count[i].Add(1); n > each {
				t.Errorf("completion %d of connection %d, want %d", n, i, each)
			}
			if got.Add(1) == conns*each {
				close(done)
			}
		}
	}
	ctx, cancel := context.WithCancel(testCtx(t))
	var consumers, producers sync.WaitGroup
	for k := range 4 {
		consumers.Go(func() {
			into := make([]Completion, k+1)
			for ctx.Err() == nil {
				if k%2 == 0 {
					n := s.q.Poll(into)
					if seen(into[:n]); n == 0 {
						runtime.Gosched()
					}
					continue
				}
				n, _ := s.q.Wait(ctx, into)
				seen(into[:n])
			}
		})
	}
	for i := range conns {
		producers.Go(func() {
			own := make([]Completion, 8)
			for posted := 0; posted < each && ctx.Err() == nil; {
				if s.b[i].PostRecv(uint64(posted)) != nil {
					time.Sleep(50 * time.Microsecond) // full until it is polled
					continue
				}
				w := WriteRequest{Local: s.src, Length: 8, RemoteAddr: s.dst.Addr(), RKey: s.dst.RKey()}
				for s.a[i].PostWriteImm(w, 0) != nil && ctx.Err() == nil {
					s.a[i].SendCQ().Poll(own)
				}
				posted++
			}
		})
	}
	select {
	case <-done:
	case <-ctx.Done():
		t.Errorf("%d completions of %d", got.Load(), conns*each)
	}
	producers.Wait()
	cancel()
	consumers.Wait()
}

func TestSharedQueueForgetsConnectionsThatAreOver(t *testing.T) {
	s := share(t, 3)
	for i := range s.b {
		s.postRecv(t, i, uint64(i))
	}
	s.armed(t)
	if err := s.b[1].Close(testCtx(t)); err != nil {
		t.Fatal(err)
	}
	if got := collect(t, s.q, 1)[0]; got.Conn != s.b[1] || got.WRID != 1 {
		t.Errorf("completion %+v, want the flushed receive of connection 1", got)
	}
	s.armed(t)
	s.q.mu.Lock()
	defer s.q.mu.Unlock()
	if s.q.attached != 2 || len(s.q.hot) != 0 {
		t.Errorf("%d connections attached, %d listed; want 2 and 0", s.q.attached, len(s.q.hot))
	}
}
