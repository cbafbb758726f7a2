// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/metaroce/metaroce/fabric/lab"
	"github.com/metaroce/metaroce/loader"
	"github.com/metaroce/metaroce/transport"
	"github.com/metaroce/metaroce/transport/core"
)

// slow is a rate at which what close tests post takes some tenths of a second.
const slow = 100e6 // bit/s a plane

// post has c write all of from to the start of to, in n requests.
func post(t *testing.T, c *transport.Conn, from, to *transport.Memory, n int) {
	t.Helper()
	part := uint64(len(from.Bytes()) / n)
	for i := range uint64(n) {
		err := c.PostWrite(transport.WriteRequest{
			WRID: i, Local: from, LocalOffset: i * part, Length: part, RemoteAddr: to.Addr() + i*part, RKey: to.RKey(),
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// statuses takes the n completions that a queue has and counts them by status.
func statuses(t *testing.T, q *transport.CQ, n int) map[core.Status]int {
	t.Helper()
	count := map[core.Status]int{}
	comps := make([]transport.Completion, n+1)
	if got := q.Poll(comps); got != n {
		t.Errorf("%d completions, want %d", got, n)
	} else {
		for _, c := range comps[:got] {
			count[c.Status]++
		}
	}
	return count
}

func TestCloseDeliversWhatIsUnderWay(t *testing.T) {
	const size, writes = 4 << 20, 64
	l := newLab(t, lab.Config{Planes: 2, Rate: slow})
	h := openPair(t, l, transport.Config{})
	for _, c := range []struct {
		name    string
		closers []int // ends that close, at the same time
		writers []int
	}{
		{"the sender closes", []int{0}, []int{0}},
		{"both close, one sends", []int{0, 1}, []int{0}},
		{"both send and close", []int{0, 1}, []int{0, 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			conn := connect(t, h[0], h[1], whatIsLost(t, l))
			var from, to [2]*transport.Memory
			for _, i := range c.writers {
				from[i], to[i] = h[i].alloc(t, size), h[1-i].alloc(t, size)
				noise(from[i].Bytes(), uint64(i))
			}
			for _, i := range c.writers {
				post(t, conn[i], from[i], to[i], writes)
			}
			if r := h[0].register(t, conn[0]); r.MsnNext == writes && r.PsnCum == r.PsnNext {
				t.Fatal("all has arrived before anything was closed")
			}
			closed := make(chan error, 2)
			for _, i := range c.closers {
				go func() { closed <- conn[i].Close(bounded(t)) }()
			}
			for range c.closers {
				if err := <-closed; err != nil {
					t.Error(err)
				}
			}
			for i, end := range conn {
				select {
				case <-end.Done():
				case <-time.After(patience):
					t.Fatalf("end %d lives on", i)
				}
				if err := end.Err(); !errors.Is(err, transport.ErrClosed) && !errors.Is(err, transport.ErrPeerClosed) {
					t.Errorf("end %d ended with %v, want an orderly close", i, err)
				}
			}
			for _, i := range c.writers {
				if got := statuses(t, conn[i].SendCQ(), writes); got[core.StatusSuccess] != writes {
					t.Errorf("writes of end %d ended with %v, want %d successes", i, got, writes)
				}
				wantEqual(t, fmt.Sprintf("what end %d wrote", i), to[i].Bytes(), from[i].Bytes())
			}
		})
	}
}

func TestCloseOfTheReceivingEndFlushesWhatThePeerStillSends(t *testing.T) {
	anyKernel(t)
	const size, writes = 4 << 20, 64
	l := newLab(t, lab.Config{Planes: 2, Rate: slow})
	h := openPair(t, l, transport.Config{})
	conn := connect(t, h[0], h[1], whatIsLost(t, l))
	from, to := h[0].alloc(t, size), h[1].alloc(t, size)
	noise(from.Bytes(), 1)
	post(t, conn[0], from, to, writes)
	if err := conn[1].Close(bounded(t)); err != nil {
		t.Error(err)
	}
	select {
	case <-conn[0].Done():
	case <-time.After(patience):
		t.Fatal("the sender's end lives on")
	}
	if err := conn[0].Err(); !errors.Is(err, transport.ErrPeerClosed) {
		t.Errorf("the sender's end ended with %v, want %v", err, transport.ErrPeerClosed)
	}
	got := statuses(t, conn[0].SendCQ(), writes)
	if n := got[core.StatusSuccess] + got[core.StatusFlushed]; n != writes {
		t.Errorf("writes ended with %v, want successes and flushes only", got)
	}
	// What is reported as delivered was.
	n := got[core.StatusSuccess] * size / writes
	wantEqual(t, "what was acknowledged", to.Bytes()[:n], from.Bytes()[:n])
}

func TestCloseEndsInTimeWhenThePeerDoesNotAnswer(t *testing.T) {
	anyKernel(t)
	const wait = 300 * time.Millisecond
	l := newLab(t, lab.Config{Planes: 2})
	h := openPair(t, l, transport.Config{RetryTime: time.Minute})
	for _, c := range []struct {
		name   string
		writes int
		want   string
		peer   string // kind of end that the peer learns of when it can be reached again
	}{
		{"idle", 0, "the peer did not confirm", kindPeer},
		{"writes outstanding", 3, "3 writes not delivered", kindFailed},
	} {
		t.Run(c.name, func(t *testing.T) {
			conn := connect(t, h[0], h[1], outage(8))
			from, to := h[0].alloc(t, 3<<10), h[1].alloc(t, 3<<10)
			down(t, l)
			defer up(t, l)
			if c.writes > 0 {
				post(t, conn[0], from, to, c.writes)
			}
			ctx, cancel := context.WithTimeout(context.Background(), wait)
			defer cancel()
			start := time.Now()
			err := conn[0].Close(ctx)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("closing says %v, want %q", err, c.want)
			}
			// Far less than the 5 s that Close has without a deadline.
			if took := time.Since(start); took > wait+3*time.Second {
				t.Errorf("closing took %v, its context allowed %v", took, wait)
			}
			select {
			case <-conn[0].Done():
			default:
				t.Error("the connection lives on")
			}
			if got := statuses(t, conn[0].SendCQ(), c.writes); got[core.StatusFlushed] != c.writes {
				t.Errorf("writes ended with %v, want all %d flushed", got, c.writes)
			}
			up(t, l)
			select {
			case <-conn[1].Done():
			case <-time.After(patience):
				t.Fatal("the peer has heard nothing though the planes are up again")
			}
			if got := kindOf(conn[1].Err()); got != c.peer {
				t.Errorf("the peer's end ended with %v (%s), want %s", conn[1].Err(), got, c.peer)
			}
		})
	}
}

// down and up change all planes of a lab.
func down(t *testing.T, l *lab.Lab) { t.Helper(); each(t, l, l.PlaneDown) }

func up(t *testing.T, l *lab.Lab) { t.Helper(); each(t, l, l.PlaneUp) }

func each(t *testing.T, l *lab.Lab, do func(int) error) {
	t.Helper()
	for plane := range l.Config().Planes {
		if err := do(plane); err != nil {
			t.Fatal(err)
		}
	}
}

func TestIdleConnectionNoticesThatThePeersMachineIsGone(t *testing.T) {
	anyKernel(t)
	const keepalive, retry = 300 * time.Millisecond, 200 * time.Millisecond
	l := newLab(t, lab.Config{Planes: 2})
	h := openPair(t, l, transport.Config{Keepalive: keepalive, RetryTime: retry})
	conn := connect(t, h[0], h[1], hardlyAny)
	// It lives while the peer answers.
	select {
	case <-conn[0].Done():
		t.Fatalf("idle connection ended: %v", conn[0].Err())
	case <-time.After(2 * (keepalive + retry)):
	}
	start := time.Now()
	down(t, l)
	for i, c := range conn {
		select {
		case <-c.Done():
		case <-time.After(patience):
			t.Fatalf("end %d has noticed nothing", i)
		}
		var re *core.RetryExceededError
		if err := c.Err(); !errors.As(err, &re) {
			t.Errorf("end %d ended with %v, want a retry time exceeded", i, err)
		} else if re.LastPath < 0 || re.Peer == "" {
			t.Errorf("end %d: %v: names neither peer nor last word", i, err)
		}
	}
	// The default keepalive alone would take 10 s.
	if took := time.Since(start); took > 8*time.Second {
		t.Errorf("noticed after %v, want keepalive %v and retry time %v to bound it", took, keepalive, retry)
	}
}

func TestConnectionLivesOnWithoutThePlaneOfItsSetUp(t *testing.T) {
	anyKernel(t)
	const size, writes, retry = 1 << 20, 16, 300 * time.Millisecond
	l := newLab(t, lab.Config{Planes: 3})
	h := openPair(t, l, transport.Config{RetryTime: retry, Keepalive: retry})
	conn := connect(t, h[0], h[1], outage(3))
	from, to := h[0].alloc(t, size), h[1].alloc(t, size)
	if err := l.PlaneDown(0); err != nil {
		t.Fatal(err)
	}
	for round, end := 0, time.Now().Add(4*retry); round == 0 || time.Now().Before(end); round++ {
		noise(from.Bytes(), uint64(round))
		post(t, conn[0], from, to, writes)
		for range writes {
			if c := next(t, conn[0].SendCQ()); c.Status != core.StatusSuccess {
				t.Fatalf("round %d: write %d: %v: %v", round, c.WRID, c.Status, conn[0].Err())
			}
		}
		wantEqual(t, "memory written to", to.Bytes(), from.Bytes())
		time.Sleep(retry / 4)
	}
	for i, c := range conn {
		if err := c.Err(); err != nil {
			t.Errorf("end %d: %v", i, err)
		}
	}
	// The closing handshake needs it.
	if err := l.PlaneUp(0); err != nil {
		t.Fatal(err)
	}
	disconnect(t, conn[0], conn[1])
}

// holding is what this process and its devices hold.
type holding struct {
	descriptors, queues, conns, paths int
	resident                          int64 // bytes
}

func (h holding) String() string {
	return fmt.Sprintf("%d descriptors, %d queue pages, %d connections, %d paths, %d KiB resident",
		h.descriptors, h.queues, h.conns, h.paths, h.resident>>10)
}

func heldBy(t *testing.T, hosts [2]*host) (h holding) {
	t.Helper()
	runtime.GC()
	debug.FreeOSMemory()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	h.descriptors = len(entries)
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Fatal(err)
	}
	pages, err := strconv.ParseInt(strings.Fields(string(b))[1], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	h.resident = pages * int64(os.Getpagesize())
	for _, host := range hosts {
		h.conns += len(host.dev.Status().Conns)
		h.queues += entriesOf(t, host.dir+"/mr_qp", func(v uint32) bool { return v != 0 })
		h.paths += entriesOf(t, host.dir+"/mr_path", func(v loader.Path) bool { return v != loader.Path{} })
	}
	return h
}

// entriesOf counts the entries of a pinned array that are in use.
func entriesOf[V any](t *testing.T, pin string, used func(V) bool) (n int) {
	t.Helper()
	m, err := ebpf.LoadPinnedMap(pin, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for i := range m.MaxEntries() {
		var v V
		err := m.Lookup(&i, &v)
		switch {
		case errors.Is(err, ebpf.ErrKeyNotExist):
		case err != nil:
			t.Fatalf("%s: entry %d: %v", pin, i, err)
		case used(v):
			n++
		}
	}
	return n
}

// workers is how many connections come and go at the same time.
const workers = 16

// comeAndGo sets up rounds connections, writes three packets over each and closes it, several at
// once. A slot that is used again must not remember its last user.
func comeAndGo(t *testing.T, h [2]*host, from, to *transport.Memory, rounds int) {
	t.Helper()
	size := uint64(len(from.Bytes()) / workers)
	ctx := bounded(t)
	l := h[1].listen(t)
	defer l.Close()
	var left atomic.Int64
	left.Store(int64(rounds))
	errs := make(chan error, 2*workers)
	for i := range uint64(workers) {
		go func() {
			for n := left.Add(-1); n >= 0; n = left.Add(-1) {
				c, err := h[0].dev.Dial(ctx, h[1].setupAddr(), nil, transport.WithPD(h[0].pd))
				if err == nil {
					ours, theirs := from.Bytes()[i*size:][:size], to.Bytes()[i*size:][:size]
					noise(ours, uint64(n))
					w := transport.WriteRequest{Local: from, LocalOffset: i * size, Length: size, RemoteAddr: to.Addr() + i*size, RKey: to.RKey()}
					err = writeOnce(ctx, c, w)
					if err == nil {
						err = differ("what was written", theirs, ours)
					}
					err = errors.Join(err, c.Close(ctx))
				}
				if err != nil {
					errs <- err
					return
				}
			}
			errs <- nil
		}()
	}
	accepts := make(chan struct{}, rounds)
	for range rounds {
		accepts <- struct{}{}
	}
	close(accepts)
	for range workers {
		go func() {
			for range accepts {
				in, err := l.Accept(ctx)
				if err != nil {
					errs <- err
					return
				}
				c, err := in.Accept(ctx, nil, transport.WithPD(h[1].pd))
				if err != nil {
					errs <- err
					return
				}
				<-c.Done()
				if err := c.Err(); !errors.Is(err, transport.ErrPeerClosed) {
					errs <- err
					return
				}
				if err := c.Close(ctx); err != nil { // waits until it is freed
					errs <- err
					return
				}
			}
			errs <- nil
		}()
	}
	for range 2 * workers {
		if err := <-errs; err != nil {
			t.Fatal(err)
		}
	}
}

// writeOnce writes and waits for the completion.
func writeOnce(ctx context.Context, c *transport.Conn, w transport.WriteRequest) error {
	if err := c.PostWrite(w); err != nil {
		return err
	}
	comp, err := nextOf(ctx, c.SendCQ())
	if err == nil && comp.Status != core.StatusSuccess {
		err = fmt.Errorf("write: %v: %w", comp.Status, c.Err())
	}
	return err
}

func TestThousandsOfConnectionsLeaveNothingBehind(t *testing.T) {
	rounds := pick(2000, 100)
	// Small tables: each entry is looked at.
	h := openPair(t, newLab(t, lab.Config{Direct: true}), transport.Config{MaxConns: 2 * workers, PathPool: 16 * workers})
	for i := range h {
		h[i].watch(t, hardlyAny)
	}
	from, to := h[0].alloc(t, workers*3*3072), h[1].alloc(t, workers*3*3072)
	comeAndGo(t, h, from, to, 2*workers) // pools and goroutines' stacks have their size from here on
	before := heldBy(t, h)
	start := time.Now()
	comeAndGo(t, h, from, to, rounds)
	took := time.Since(start)
	after := heldBy(t, h)
	t.Logf("%d connects and closes in %v: %v before, %v after", rounds, took, before, after)
	// The two ends of a connection that was kept would be some 50 KiB, and several times that
	// with the race detector, which also makes the noise larger.
	slack := max(8<<20, before.resident/5)
	if grown := after.resident - before.resident; grown > slack {
		t.Errorf("resident memory grew by %d bytes with %d connections, want at most %d", grown, rounds, slack)
	}
	after.resident = before.resident
	if after != before {
		t.Errorf("left: %v, before: %v", after, before)
	}
}
