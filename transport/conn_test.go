// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/metaroce/metaroce/transport/core"
)

func TestWriteLandsAtItsAddressAndCompletes(t *testing.T) {
	x := newBench(t)
	src, dst := alloc(t, x.da, 4096), alloc(t, x.db, 4096)
	copy(src.Bytes()[100:], "hello")
	w := WriteRequest{WRID: 7, Local: src, LocalOffset: 100, Length: 5, RemoteAddr: dst.Addr() + 200, RKey: dst.RKey()}
	if err := x.a.PostWrite(w); err != nil {
		t.Fatal(err)
	}
	got := collect(t, x.a.SendCQ(), 1)[0]
	want := Completion{WRID: 7, Op: core.OpWrite, Length: 5, Conn: x.a}
	if got != want {
		t.Errorf("completion %+v, want %+v", got, want)
	}
	wantMem := make([]byte, 4096)
	copy(wantMem[200:], "hello")
	if !bytes.Equal(dst.Bytes(), wantMem) {
		t.Error("the peer's memory is not what was written")
	}
}

func TestWriteImmCompletesReceive(t *testing.T) {
	x := newBench(t)
	src, dst := alloc(t, x.da, 64), alloc(t, x.db, 64)
	if err := x.b.PostRecv(41); err != nil {
		t.Fatal(err)
	}
	w := WriteRequest{WRID: 1, Local: src, Length: 64, RemoteAddr: dst.Addr(), RKey: dst.RKey()}
	if err := x.a.PostWriteImm(w, 0xcafe); err != nil {
		t.Fatal(err)
	}
	got := collect(t, x.b.RecvCQ(), 1)[0]
	want := Completion{WRID: 41, Op: OpRecv, Length: 64, Imm: 0xcafe, Conn: x.b}
	if got != want {
		t.Errorf("completion %+v, want %+v", got, want)
	}
}

func TestWriteOfNothingNeedsNoMemory(t *testing.T) {
	x := newBench(t)
	if err := x.a.PostWrite(WriteRequest{WRID: 3}); err != nil {
		t.Fatal(err)
	}
	if got := collect(t, x.a.SendCQ(), 1)[0]; got.Status != core.StatusSuccess || got.Length != 0 {
		t.Errorf("completion %+v, want success with length 0", got)
	}
}

func TestPostRefusesBadRequests(t *testing.T) {
	x := newBench(t)
	m := alloc(t, x.da, 100)
	closed := alloc(t, x.da, 100)
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name string
		w    WriteRequest
		is   error
		want string
	}{
		{"4 GiB", WriteRequest{Local: m, Length: 1 << 32}, ErrTooLong, "4294967296 bytes"},
		{"one byte past the end", WriteRequest{Local: m, LocalOffset: 1, Length: 100}, ErrBounds, "100 bytes at 1"},
		{"offset past the end", WriteRequest{Local: m, LocalOffset: 101}, ErrBounds, "at 101"},
		{"offset that wraps", WriteRequest{Local: m, LocalOffset: 1<<64 - 1, Length: 2}, ErrBounds, "which has 100"},
		{"no memory", WriteRequest{Length: 1}, nil, "no local memory"},
		{"another device's memory", WriteRequest{Local: alloc(t, x.db, 100), Length: 1}, nil, "another device"},
		{"closed memory", WriteRequest{Local: closed, Length: 1}, ErrClosed, "closed"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := x.a.PostWrite(tc.w)
			if err == nil || !strings.Contains(err.Error(), tc.want) || (tc.is != nil && !errors.Is(err, tc.is)) {
				t.Errorf("error %v, want one that is %v with %q", err, tc.is, tc.want)
			}
		})
	}
	if n := x.a.SendCQ().Poll(make([]Completion, 1)); n != 0 {
		t.Error("a refused request has completed")
	}
}

func TestQueueIsFullUntilCompletionsArePolled(t *testing.T) {
	x := newBench(t)
	src, dst := alloc(t, x.da, 8), alloc(t, x.db, 8)
	for i := range core.SQDepth {
		write(t, x.a, uint64(i), src, dst, 8)
		if err := x.a.PostRecv(uint64(i)); err != nil {
			t.Fatal(err)
		}
	}
	// All writes have been performed, but nobody has looked.
	w := WriteRequest{Local: src, Length: 8, RemoteAddr: dst.Addr(), RKey: dst.RKey()}
	if err := x.a.PostWrite(w); !errors.Is(err, ErrQueueFull) || !strings.Contains(err.Error(), "128") {
		t.Errorf("write: error %v, want ErrQueueFull that names 128", err)
	}
	if err := x.a.PostRecv(0); !errors.Is(err, ErrQueueFull) || !strings.Contains(err.Error(), "128") {
		t.Errorf("receive: error %v, want ErrQueueFull that names 128", err)
	}
	if n := x.a.SendCQ().Poll(make([]Completion, 1)); n != 1 {
		t.Fatalf("Poll gave %d completions, want 1", n)
	}
	if err := x.a.PostWrite(w); err != nil {
		t.Errorf("after a poll: %v", err)
	}
	if err := x.a.PostWrite(w); !errors.Is(err, ErrQueueFull) {
		t.Errorf("one more: error %v, want ErrQueueFull", err)
	}
}

func TestCompletionsComeInOrderAndOnce(t *testing.T) {
	x := newBench(t)
	src, dst := alloc(t, x.da, 8), alloc(t, x.db, 8)
	const total = 1000
	posted := make(chan error, 1)
	go func() {
		for i := 0; i < total; {
			err := x.a.PostWrite(WriteRequest{WRID: uint64(i), Local: src, Length: 8, RemoteAddr: dst.Addr(), RKey: dst.RKey()})
			switch {
			case err == nil:
				i++
			case errors.Is(err, ErrQueueFull):
				time.Sleep(50 * time.Microsecond)
			default:
				posted <- err
				return
			}
		}
		posted <- nil
	}()
	for i, c := range collect(t, x.a.SendCQ(), total) {
		if c.WRID != uint64(i) || c.Status != core.StatusSuccess {
			t.Fatalf("completion %d is %+v, want WRID %d", i, c, i)
		}
	}
	if err := <-posted; err != nil {
		t.Fatal(err)
	}
	if n := x.a.SendCQ().Poll(make([]Completion, 1)); n != 0 {
		t.Error("more completions than requests")
	}
}

func TestConcurrentPostersAndPollersLoseNothing(t *testing.T) {
	x := newBench(t)
	src, dst := alloc(t, x.da, 8), alloc(t, x.db, 8)
	const workers, each = 4, 200
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for i := 0; i < each; {
				err := x.a.PostWrite(WriteRequest{WRID: uint64(w*each + i), Local: src, Length: 8, RemoteAddr: dst.Addr(), RKey: dst.RKey()})
				if err == nil {
					i++
				} else if !errors.Is(err, ErrQueueFull) {
					t.Error(err)
					return
				} else {
					time.Sleep(50 * time.Microsecond)
				}
			}
		})
	}
	ctx, cancel := context.WithCancel(testCtx(t))
	var mu sync.Mutex
	seen := map[uint64]int{}
	var pollers sync.WaitGroup
	for range 3 {
		pollers.Go(func() {
			into := make([]Completion, 5)
			for {
				n, err := x.a.SendCQ().Wait(ctx, into)
				if err != nil {
					return
				}
				mu.Lock()
				for _, c := range into[:n] {
					seen[c.WRID]++
				}
				if len(seen) == workers*each {
					cancel()
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	pollers.Wait()
	cancel()
	if len(seen) != workers*each {
		t.Errorf("%d requests completed, want %d", len(seen), workers*each)
	}
	for id, n := range seen {
		if n != 1 {
			t.Errorf("request %d completed %d times", id, n)
		}
	}
}

func TestRefusedRequestGetsItsStatusAndTheRestIsFlushed(t *testing.T) {
	for _, tc := range []struct {
		name         string
		polled, lazy bool
	}{
		{"engine finds it, nobody polls", false, false},
		{"engine finds it, somebody waits", true, false},
		{"who waits finds it", true, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			x := newBench(t)
			x.f.lazy = tc.lazy
			src, dst := alloc(t, x.da, 8), alloc(t, x.db, 8)
			if err := x.a.PostRecv(9); err != nil {
				t.Fatal(err)
			}
			x.f.hold()
			write(t, x.a, 0, src, dst, 8)
			bad := WriteRequest{WRID: 1, Local: src, Length: 8, RemoteAddr: dst.Addr(), RKey: 0xbad}
			if err := x.a.PostWrite(bad); err != nil {
				t.Fatal(err)
			}
			write(t, x.a, 2, src, dst, 8)
			write(t, x.a, 3, src, dst, 8)
			if !tc.polled {
				x.f.release()
				over(t, x.a)
			} else {
				time.AfterFunc(time.Millisecond, x.f.release)
			}
			got := summary(collect(t, x.a.SendCQ(), 4))
			want := []string{
				"0 write: success", "1 write: remote access error",
				"2 write: Work Request Flushed Error", "3 write: Work Request Flushed Error",
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("completions differ (-want +got):\n%s", d)
			}
			if d := cmp.Diff([]string{"9 receive: Work Request Flushed Error"}, summary(collect(t, x.a.RecvCQ(), 1))); d != "" {
				t.Errorf("receives differ (-want +got):\n%s", d)
			}
			var re *RequestError
			if err := over(t, x.a); !errors.As(err, &re) || re.WRID != 1 || re.Status != core.StatusRemAccess || !errors.Is(err, errRefused) {
				t.Errorf("Err is %v, want a RequestError of request 1 with the engine's words", err)
			}
			if _, err := x.a.SendCQ().Wait(testCtx(t), make([]Completion, 1)); !errors.Is(err, ErrConnFailed) || !errors.As(err, &re) {
				t.Errorf("Wait says %v, want ErrConnFailed and the reason", err)
			}
			if err := x.a.PostWrite(bad); !errors.As(err, &re) {
				t.Errorf("PostWrite says %v, want the reason", err)
			}
			var pf *PeerFailedError
			if err := over(t, x.b); !errors.As(err, &pf) || !strings.Contains(err.Error(), "remote access error") {
				t.Errorf("the peer's Err is %v, want a PeerFailedError with the reason", err)
			}
		})
	}
}

func TestRetryExceededMarksTheFirstIncompleteRequest(t *testing.T) {
	x := newBench(t)
	src, dst := alloc(t, x.da, 8), alloc(t, x.db, 8)
	write(t, x.a, 0, src, dst, 8)
	x.f.hold()
	write(t, x.a, 1, src, dst, 8)
	write(t, x.a, 2, src, dst, 8)
	x.f.conn(x.a.Info().QPN).Fail(fmt.Errorf("wrapped: %w", &core.RetryExceededError{Peer: "198.18.0.2"}))
	got := summary(collect(t, x.a.SendCQ(), 3))
	want := []string{"0 write: success", "1 write: transport retry counter exceeded", "2 write: Work Request Flushed Error"}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("completions differ (-want +got):\n%s", d)
	}
	var re *core.RetryExceededError
	if err := over(t, x.a); !errors.As(err, &re) {
		t.Errorf("Err is %v, want a RetryExceededError", err)
	}
}

func TestMemoryStaysWhileRequestsUseIt(t *testing.T) {
	x := newBench(t)
	src, dst := alloc(t, x.da, 8), alloc(t, x.db, 8)
	write(t, x.a, 0, src, dst, 8)
	write(t, x.a, 1, src, dst, 8)
	if err := src.Close(); !errors.Is(err, ErrMemoryInUse) || !strings.Contains(err.Error(), "2 outstanding") {
		t.Errorf("Close with 2 requests: %v, want ErrMemoryInUse that counts them", err)
	}
	collect(t, x.a.SendCQ(), 2)
	if err := src.Close(); err != nil {
		t.Errorf("Close after the completions: %v", err)
	}
	if err := src.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
}

func TestMemoryIsFreeWhenTheConnectionIsOver(t *testing.T) {
	x := newBench(t)
	src, dst := alloc(t, x.da, 8), alloc(t, x.db, 8)
	x.f.hold()
	write(t, x.a, 0, src, dst, 8)
	x.f.conn(x.a.Info().QPN).Fail(errors.New("broken"))
	over(t, x.a)
	if err := src.Close(); err != nil { // though nobody has polled
		t.Error(err)
	}
	if d := cmp.Diff([]string{"0 write: Work Request Flushed Error"}, summary(collect(t, x.a.SendCQ(), 1))); d != "" {
		t.Error(d)
	}
}

func TestStatusListsConnectionsAndMemory(t *testing.T) {
	x := newBench(t)
	alloc(t, x.da, 100)
	alloc(t, x.da, 28)
	s := x.da.Status()
	if s.Regions != 2 || s.Memory != 128 || s.Payload != 1024 || len(s.Planes) != 1 {
		t.Errorf("status %+v, want 2 regions of 128 bytes, payload 1024 and one plane", s)
	}
	if len(s.Conns) != 1 || s.Conns[0].QPN != x.a.Info().QPN {
		t.Errorf("connections %+v, want the one", s.Conns)
	}
}

func TestAllocMemoryRefusesBadRequests(t *testing.T) {
	d, _ := newTestDevice(t, newFabric(t))
	for _, tc := range []struct {
		name   string
		size   uint64
		access core.Access
		want   string
	}{
		{"nothing", 0, 0, "memory of 0 bytes"},
		{"over 1 GiB", 1<<30 + 1, 0, "memory of 1073741825 bytes"},
		{"unknown right", 1, 8, "access 0x8"},
		{"remote write without local", 1, core.RemoteWrite, "without local write"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if _, err := testPD(t, d).AllocMemory(tc.size, tc.access); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want one with %q", err, tc.want)
			}
		})
	}
}

func TestWaitReturnsWithTheContext(t *testing.T) {
	x := newBench(t)
	x.f.hold()
	src, dst := alloc(t, x.da, 8), alloc(t, x.db, 8)
	write(t, x.a, 0, src, dst, 8)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	if n, err := x.a.SendCQ().Wait(ctx, make([]Completion, 1)); n != 0 || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Wait gave %d and %v, want 0 and the context's error", n, err)
	}
	x.f.release()
	collect(t, x.a.SendCQ(), 1)
}

func TestWaitSeesRequestsPostedAfterItBegan(t *testing.T) {
	x := newBench(t)
	src, dst := alloc(t, x.da, 8), alloc(t, x.db, 8)
	got := make(chan []Completion, 1)
	go func() {
		into := make([]Completion, 1)
		n, _ := x.a.SendCQ().Wait(testCtx(t), into)
		got <- into[:n]
	}()
	eventually(t, "somebody waits", func() bool { return x.a.SendCQ().waiters.Load() == 1 })
	x.f.hold()
	write(t, x.a, 5, src, dst, 8)
	time.Sleep(time.Millisecond) // the waiter arms, most likely
	x.f.release()
	if d := cmp.Diff([]string{"5 write: success"}, summary(<-got)); d != "" {
		t.Error(d)
	}
}

func TestBlockedWaitReturnsWhenTheConnectionFails(t *testing.T) {
	x := newBench(t)
	got := make(chan error, 1)
	go func() {
		_, err := x.a.RecvCQ().Wait(testCtx(t), make([]Completion, 1))
		got <- err
	}()
	eventually(t, "somebody waits", func() bool { return x.a.RecvCQ().waiters.Load() == 1 })
	broken := errors.New("broken")
	x.f.conn(x.a.Info().QPN).Fail(broken)
	if err := <-got; !errors.Is(err, ErrConnFailed) || !errors.Is(err, broken) {
		t.Errorf("Wait says %v, want ErrConnFailed and the reason", err)
	}
}

func TestWaitRefusesNoRoom(t *testing.T) {
	x := newBench(t)
	if _, err := x.a.SendCQ().Wait(testCtx(t), nil); err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v, want one about the room", err)
	}
}

func TestOneCQServesSeveralConnections(t *testing.T) {
	f := newFabric(t)
	da, _ := newTestDevice(t, f)
	db, _ := newTestDevice(t, f)
	q := da.NewCQ()
	src, dst := alloc(t, da, 8), alloc(t, db, 8)
	a1, _ := connect(t, da, db, WithSendCQ(q), WithRecvCQ(q))
	a2, _ := connect(t, da, db, WithSendCQ(q), WithRecvCQ(q))
	if err := a2.PostRecv(30); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		write(t, a1, uint64(i), src, dst, 8)
		write(t, a2, uint64(10+i), src, dst, 8)
	}
	if err := a2.Close(testCtx(t)); err != nil {
		t.Fatal(err)
	}
	next := map[*Conn]uint64{a1: 0, a2: 10}
	for _, c := range collect(t, q, 7) {
		if c.Op == OpRecv {
			if c.WRID != 30 || c.Status != core.StatusFlushed {
				t.Errorf("receive %+v, want number 30 flushed", c)
			}
			continue
		}
		if c.WRID != next[c.Conn] {
			t.Errorf("completion %d, want %d", c.WRID, next[c.Conn])
		}
		next[c.Conn]++
	}
	// The other connection goes on, and so does the queue.
	write(t, a1, 3, src, dst, 8)
	if got := collect(t, q, 1)[0]; got.WRID != 3 || got.Conn != a1 {
		t.Errorf("completion %+v, want request 3", got)
	}
}
