// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/metaroce/metaroce/transport/core"
)

func TestCloseTellsThePeerAndFreesBothEnds(t *testing.T) {
	x := newBench(t)
	if err := x.a.Close(testCtx(t)); err != nil {
		t.Fatal(err)
	}
	if err := over(t, x.a); err != ErrClosed {
		t.Errorf("closing end's Err is %v, want ErrClosed", err)
	}
	if err := over(t, x.b); !errors.Is(err, ErrPeerClosed) || !errors.Is(err, io.EOF) {
		t.Errorf("other end's Err is %v, want ErrPeerClosed, which is io.EOF", err)
	}
	eventually(t, "nothing is left in the engines", x.f.empty)
	for _, c := range []*Conn{x.a, x.b} {
		if err := c.Close(testCtx(t)); err != nil {
			t.Errorf("Close of what is over: %v", err)
		}
	}
	if err := x.a.PostRecv(1); !errors.Is(err, ErrClosed) {
		t.Errorf("PostRecv after Close: %v, want ErrClosed", err)
	}
	if err := x.b.PostRecv(1); !errors.Is(err, ErrPeerClosed) {
		t.Errorf("PostRecv after the peer's Close: %v, want ErrPeerClosed", err)
	}
}

func TestReceivesThatArrivedBeforeCloseCanBePolled(t *testing.T) {
	x := newBench(t)
	for i := range 3 {
		if err := x.b.PostRecv(uint64(i)); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 2 {
		if err := x.a.PostWriteImm(WriteRequest{WRID: uint64(i)}, uint32(100+i)); err != nil {
			t.Fatal(err)
		}
	}
	if err := x.a.Close(testCtx(t)); err != nil {
		t.Fatal(err)
	}
	over(t, x.b)
	got := collect(t, x.b.RecvCQ(), 3)
	want := []string{"0 receive: success", "1 receive: success", "2 receive: Work Request Flushed Error"}
	if d := cmp.Diff(want, summary(got)); d != "" {
		t.Errorf("completions differ (-want +got):\n%s", d)
	}
	if got[0].Imm != 100 || got[1].Imm != 101 {
		t.Errorf("immediates %d and %d, want 100 and 101", got[0].Imm, got[1].Imm)
	}
	if _, err := x.b.RecvCQ().Wait(testCtx(t), got); !errors.Is(err, ErrConnFailed) || !errors.Is(err, io.EOF) {
		t.Errorf("then Wait says %v, want ErrConnFailed and io.EOF", err)
	}
}

func TestCloseDeliversWhatWasPosted(t *testing.T) {
	x := newBench(t)
	src, dst := alloc(t, x.da, 8), alloc(t, x.db, 8)
	copy(src.Bytes(), "the data")
	x.f.hold()
	write(t, x.a, 0, src, dst, 8)
	closed := make(chan error, 1)
	go func() { closed <- x.a.Close(testCtx(t)) }()
	select {
	case err := <-closed:
		t.Fatalf("Close returned %v with a write under way", err)
	case <-time.After(20 * time.Millisecond):
	}
	x.f.release()
	if err := <-closed; err != nil {
		t.Error(err)
	}
	if d := cmp.Diff([]string{"0 write: success"}, summary(collect(t, x.a.SendCQ(), 1))); d != "" {
		t.Error(d)
	}
	if string(dst.Bytes()) != "the data" {
		t.Errorf("the peer has %q", dst.Bytes())
	}
}

func TestCloseWaitsForWhatThePeerPosted(t *testing.T) {
	x := newBench(t)
	src, dst := alloc(t, x.db, 8), alloc(t, x.da, 8)
	x.f.hold()
	write(t, x.b, 0, src, dst, 8)
	closed := make(chan error, 1)
	go func() { closed <- x.a.Close(testCtx(t)) }()
	eventually(t, "the peer knows of the close", func() bool { return errors.Is(x.b.PostRecv(1), ErrPeerClosed) })
	x.f.release()
	if err := <-closed; err != nil {
		t.Error(err)
	}
	if d := cmp.Diff([]string{"0 write: success"}, summary(collect(t, x.b.SendCQ(), 1))); d != "" {
		t.Error(d)
	}
}

func TestCloseGivesUpWhatCannotBeDelivered(t *testing.T) {
	x := newBench(t)
	if err := x.a.PostWriteImm(WriteRequest{WRID: 1}, 0); err != nil { // no receive is posted
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
	defer cancel()
	err := x.a.Close(ctx)
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "1 writes not delivered") {
		t.Errorf("Close says %v, want the context's error and how many", err)
	}
	if d := cmp.Diff([]string{"1 write with immediate: Work Request Flushed Error"}, summary(collect(t, x.a.SendCQ(), 1))); d != "" {
		t.Error(d)
	}
	var pf *PeerFailedError
	if err := over(t, x.b); !errors.As(err, &pf) || !strings.Contains(pf.Reason, "not delivered") {
		t.Errorf("the peer's Err is %v, want a PeerFailedError with the reason", err)
	}
	eventually(t, "nothing is left in the engines", x.f.empty)
}

func TestPeersUndeliverableWritesDoNotKeepCloseFromConfirming(t *testing.T) {
	x := newBench(t)
	if err := x.b.PostWriteImm(WriteRequest{WRID: 1}, 0); err != nil { // a posts no receive
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 400*time.Millisecond)
	defer cancel()
	err := x.a.Close(ctx)
	if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Close says %v, want nil, or its time over on a slow machine", err)
	}
	if d := cmp.Diff([]string{"1 write with immediate: Work Request Flushed Error"}, summary(collect(t, x.b.SendCQ(), 1))); d != "" {
		t.Error(d)
	}
	if err := over(t, x.b); !errors.Is(err, ErrPeerClosed) {
		t.Errorf("the other end's Err is %v, want ErrPeerClosed", err)
	}
}

func TestCloseTellsOfWritesLostToThePeersClose(t *testing.T) {
	x := newBench(t)
	if err := x.a.PostWriteImm(WriteRequest{WRID: 1}, 0); err != nil { // b posts no receive
		t.Fatal(err)
	}
	closed := make(chan error, 1)
	go func() { closed <- x.a.Close(testCtx(t)) }()
	eventually(t, "a is closing", func() bool { return errors.Is(x.a.PostRecv(1), ErrClosed) })
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	if err := x.b.Close(ctx); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("b's Close says %v, want nil, or its time over on a slow machine", err)
	}
	if err := <-closed; !errors.Is(err, ErrPeerClosed) || !strings.Contains(err.Error(), "1 writes not delivered") {
		t.Errorf("a's Close says %v, want that a write was not delivered", err)
	}
}

func TestBothEndsMayCloseAtOnce(t *testing.T) {
	f := newFabric(t)
	da, _ := newTestDevice(t, f)
	db, _ := newTestDevice(t, f)
	src, dst := alloc(t, da, 8), alloc(t, db, 8)
	for range 50 {
		a, b := connect(t, da, db)
		write(t, a, 0, src, dst, 8)
		var wg sync.WaitGroup
		for _, c := range []*Conn{a, b, a} {
			wg.Go(func() {
				if err := c.Close(testCtx(t)); err != nil {
					t.Errorf("Close: %v", err)
				}
			})
		}
		wg.Wait()
		for _, c := range []*Conn{a, b} {
			if err := over(t, c); err != ErrClosed && !errors.Is(err, ErrPeerClosed) {
				t.Errorf("Err is %v, want ErrClosed or ErrPeerClosed", err)
			}
		}
		collect(t, a.SendCQ(), 1)
	}
}

func TestCloseIsBoundedWhenThePeerIsStopped(t *testing.T) {
	x := newBench(t)
	x.b.mu.Lock() // it cannot act on anything, as after SIGSTOP
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
	defer cancel()
	err := x.a.Close(ctx)
	x.b.mu.Unlock()
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "did not confirm") {
		t.Errorf("Close says %v, want that the peer did not confirm", err)
	}
	if err := over(t, x.a); err != ErrClosed {
		t.Errorf("Err is %v, want ErrClosed", err)
	}
	// It had everything, and hears of the close when it goes on.
	if err := over(t, x.b); !errors.Is(err, ErrPeerClosed) {
		t.Errorf("the other end's Err is %v, want ErrPeerClosed", err)
	}
}

func TestDeadPeerIsNoticedWithinASecond(t *testing.T) {
	for _, tc := range []struct {
		name   string
		linger int
	}{
		{"FIN, as after kill", -1},
		{"RST, as after kill with data unread", 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			x := newBench(t)
			x.f.hold()
			src, dst := alloc(t, x.da, 8), alloc(t, x.db, 8)
			write(t, x.a, 0, src, dst, 8)
			if err := x.a.PostRecv(1); err != nil {
				t.Fatal(err)
			}
			tcp := x.b.s.Conn.(*net.TCPConn)
			if err := tcp.SetLinger(tc.linger); err != nil {
				t.Fatal(err)
			}
			start := time.Now()
			tcp.Close()
			err := over(t, x.a)
			took := time.Since(start)
			if !errors.Is(err, ErrPeerDied) || !strings.Contains(err.Error(), tcp.LocalAddr().String()) {
				t.Errorf("Err is %v, want ErrPeerDied that names the peer", err)
			}
			t.Logf("noticed after %v", took)
			if took > 10*time.Second { // nothing in it takes time; ten for a slow machine
				t.Errorf("noticed after %v, want 1s", took)
			}
			if d := cmp.Diff([]string{"0 write: Work Request Flushed Error"}, summary(collect(t, x.a.SendCQ(), 1))); d != "" {
				t.Error(d)
			}
			if d := cmp.Diff([]string{"1 receive: Work Request Flushed Error"}, summary(collect(t, x.a.RecvCQ(), 1))); d != "" {
				t.Error(d)
			}
			over(t, x.b)
			eventually(t, "no connection is left", func() bool {
				x.f.mu.Lock()
				defer x.f.mu.Unlock()
				return len(x.f.conns) == 0
			})
		})
	}
}

func TestTCPTimeoutIsNotDeath(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.ETIMEDOUT, syscall.EHOSTUNREACH, syscall.ENETUNREACH} {
		t.Run(errno.Error(), func(t *testing.T) {
			x := newBench(t)
			x.a.hungUp(&net.OpError{Op: "read", Net: "tcp", Err: os.NewSyscallError("read", errno)})
			src, dst := alloc(t, x.da, 8), alloc(t, x.db, 8)
			write(t, x.a, 0, src, dst, 8)
			if got := collect(t, x.a.SendCQ(), 1)[0]; got.Status != core.StatusSuccess {
				t.Errorf("write after it: %v", got.Status)
			}
			if err := x.a.Err(); err != nil {
				t.Errorf("Err is %v, want none", err)
			}
			if err := x.a.Close(testCtx(t)); err != nil {
				t.Errorf("Close: %v", err)
			}
		})
	}
}

func TestNonsenseOnTheSetUpConnectionEndsIt(t *testing.T) {
	for _, tc := range []struct{ name, send, want string }{
		{"no message", "no message at all", "not a metaroce peer"},
		{"message out of place", string(frame(setupVersion, msgReady, "{}")), "sent Ready"},
		{"answer without question", string(frame(setupVersion, msgCloseAck, `{"last_psn":1}`)), "sent CloseAck"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			x := newBench(t)
			if _, err := x.b.s.Write([]byte(tc.send)); err != nil {
				t.Fatal(err)
			}
			if err := over(t, x.a); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("Err is %v, want one with %q", err, tc.want)
			}
			var pf *PeerFailedError
			if err := over(t, x.b); !errors.As(err, &pf) {
				t.Errorf("the peer's Err is %v, want a PeerFailedError", err)
			}
		})
	}
}

func TestCloseWithDataMissingIsNotInOrder(t *testing.T) {
	x := newBench(t)
	x.b.tell(setupMsg{Type: msgClose, LastPSN: fakePSN + 5, WaitMs: 20})
	if err := over(t, x.a); !errors.Is(err, ErrPeerDied) || errors.Is(err, ErrPeerClosed) {
		t.Errorf("Err is %v, want ErrPeerDied", err)
	}
}

// What a peer closes at must be a psn that it can have reached.
func TestCloseAtAnImpossiblePSNEndsTheConnection(t *testing.T) {
	for _, tc := range []struct {
		name     string
		distance uint32 // from what has arrived
		want     string // "" if it can be
	}{
		{"before what has arrived", 1<<32 - 1, "closes at psn 4294967279, want 4294967280 to 8176"},
		{"as far as a window reaches", psnWindow, ""},
		{"beyond the window", psnWindow + 1, "closes at psn 8177, want 4294967280 to 8176"},
		{"half of all psns away", 1 << 31, "closes at psn"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			x := newBench(t)
			psn := uint32(fakePSN)
			x.b.tell(setupMsg{Type: msgClose, LastPSN: psn + tc.distance, WaitMs: 20})
			err := over(t, x.a)
			if tc.want == "" { // it does not arrive, that is all
				if !errors.Is(err, ErrPeerDied) || strings.Contains(err.Error(), "closes at") {
					t.Errorf("Err is %v, want ErrPeerDied", err)
				}
				return
			}
			if !strings.Contains(err.Error(), tc.want) {
				t.Errorf("Err is %v, want one with %q", err, tc.want)
			}
			var pf *PeerFailedError
			if err := over(t, x.b); !errors.As(err, &pf) {
				t.Errorf("the peer's Err is %v, want a PeerFailedError", err)
			}
		})
	}
}

func TestCloseSaysNoLongerWaitThanThePeerBelieves(t *testing.T) {
	d, _ := newTestDevice(t, newFabric(t))
	closes := make(chan string, 1)
	addr := rawServer(t, func(c net.Conn) {
		s := newSetupConn(c)
		_, _ = readMsg(c)
		_ = s.write(setupMsg{Type: msgAccept, Endpoint: testEndpoint()})
		_, _ = readMsg(c)
		b := make([]byte, 1024)
		n, _ := c.Read(b) // as it is: readMsg would make the wait shorter
		closes <- string(b[:n])
		_ = s.write(setupMsg{Type: msgCloseAck, LastPSN: fakePSN})
	})
	c, err := d.Dial(testCtx(t), addr, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	if err := c.Close(ctx); err != nil {
		t.Error(err)
	}
	if got := <-closes; !strings.Contains(got, `"wait_ms":60000}`) {
		t.Errorf("Close is %q, want a wait of 60 s", got)
	}
}

func TestSetUpConnectionIsKeptAliveFromBothEnds(t *testing.T) {
	x := newBench(t)
	for _, c := range []*Conn{x.a, x.b} {
		raw, err := c.s.Conn.(syscall.Conn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range []struct {
			name                string
			level, option, want int
		}{
			{"keepalive", syscall.SOL_SOCKET, syscall.SO_KEEPALIVE, 1},
			{"first probe after s", syscall.IPPROTO_TCP, syscall.TCP_KEEPIDLE, 30},
			{"next probes after s", syscall.IPPROTO_TCP, syscall.TCP_KEEPINTVL, 10},
			{"probes", syscall.IPPROTO_TCP, syscall.TCP_KEEPCNT, 9},
		} {
			got := 0
			if cerr := raw.Control(func(fd uintptr) { got, err = syscall.GetsockoptInt(int(fd), o.level, o.option) }); cerr != nil || err != nil {
				t.Fatal(cerr, err)
			}
			if got != o.want {
				t.Errorf("%s of the connection with %s: %d, want %d", o.name, c.s.peer, got, o.want)
			}
		}
	}
}

func TestDeviceCloseEndsAllThatItHas(t *testing.T) {
	f := newFabric(t)
	da, _ := newTestDevice(t, f)
	db, _ := newTestDevice(t, f)
	l := listen(t, da)
	m := alloc(t, da, 8)
	dst := alloc(t, db, 8)
	var ends []*Conn
	for range 5 {
		a, b := connect(t, da, db)
		write(t, a, 0, m, dst, 8)
		ends = append(ends, a, b)
	}
	if err := da.Close(); err != nil {
		t.Fatal(err)
	}
	for _, c := range ends {
		if err := over(t, c); err != ErrClosed && !errors.Is(err, ErrPeerClosed) {
			t.Errorf("Err is %v, want an end in order", err)
		}
	}
	if _, err := l.Accept(testCtx(t)); !errors.Is(err, ErrClosed) {
		t.Errorf("Accept says %v, want ErrClosed", err)
	}
	if _, err := da.Dial(testCtx(t), l.Addr().String(), nil); !errors.Is(err, ErrClosed) {
		t.Errorf("Dial says %v, want ErrClosed", err)
	}
	if _, err := da.Listen(testCtx(t), "127.0.0.1:0"); !errors.Is(err, ErrClosed) {
		t.Errorf("Listen says %v, want ErrClosed", err)
	}
	if _, err := m.PD().AllocMemory(1, 0); !errors.Is(err, ErrClosed) {
		t.Errorf("AllocMemory says %v, want ErrClosed", err)
	}
	if _, err := da.AllocPD(); !errors.Is(err, ErrClosed) {
		t.Errorf("AllocPD says %v, want ErrClosed", err)
	}
	if err := da.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
	if err := dst.Close(); err != nil {
		t.Error(err)
	}
	eventually(t, "nothing is left in the engines", f.empty)
}

func TestConnectionsLeaveNothingBehind(t *testing.T) {
	f := newFabric(t)
	da, _ := newTestDevice(t, f)
	db, _ := newTestDevice(t, f)
	fds := func() int {
		names, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(names)
	}
	warm, _ := connect(t, da, db)
	if err := warm.Close(testCtx(t)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "nothing is left in the engines", f.empty)
	goroutines, files := runtime.NumGoroutine(), fds()
	for i := range 100 {
		a, b := connect(t, da, db)
		if i%2 == 0 {
			a, b = b, a
		}
		if err := a.Close(testCtx(t)); err != nil {
			t.Fatal(err)
		}
		over(t, b)
	}
	eventually(t, "nothing is left in the engines", f.empty)
	eventually(t, "goroutines and descriptors are back", func() bool {
		return runtime.NumGoroutine() <= goroutines && fds() <= files
	})
}

func TestConfigRefusesWhatCannotBe(t *testing.T) {
	dscp := uint8(64)
	for _, tc := range []struct {
		name string
		cfg  Config
		want string
	}{
		{"no interface", Config{}, "0 interfaces"},
		{"nine interfaces", Config{Interfaces: strings.Split("a b c d e f g h i", " ")}, "9 interfaces"},
		{"an interface twice", Config{Interfaces: []string{"a", "b", "a"}}, "interface a"},
		{"33 paths", Config{Interfaces: []string{"a"}, Paths: 33}, "paths 33"},
		{"odd payload", Config{Interfaces: []string{"a"}, Payload: 1000}, "payload 1000"},
		{"DSCP of 7 bits", Config{Interfaces: []string{"a"}, DSCP: &dscp}, "DSCP 64"},
		{"negative retry time", Config{Interfaces: []string{"a"}, RetryTime: -1}, "retry time"},
		{"negative table", Config{Interfaces: []string{"a"}, MaxConns: -1}, "table sizes"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if _, err := tc.cfg.withDefaults(); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want one with %q", err, tc.want)
			}
		})
	}
}
