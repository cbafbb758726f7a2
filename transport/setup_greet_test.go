// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// ample are limits that no test meets by chance: each test narrows the one that it is about.
func ample() setupLimits {
	l := defaultLimits
	l.hello, l.take, l.start, l.ready = time.Hour, time.Hour, time.Hour, time.Hour
	return l
}

// limited is a listener on a device with these limits.
func limited(t *testing.T, limits setupLimits) (*fabric, *Listener) {
	t.Helper()
	f := newFabric(t)
	d, _ := newTestDevice(t, f)
	d.limits = limits
	return f, listen(t, d)
}

// caller is a TCP connection to l from 127.0.0.n, on which nothing has been said.
func callerFrom(t *testing.T, l *Listener, n byte) net.Conn {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, n)}}
	c, err := d.DialContext(testCtx(t), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	return c
}

// sayHello calls and says Hello, with the caller's number as private data.
func sayHello(t *testing.T, l *Listener, from byte, private string) net.Conn {
	t.Helper()
	c := callerFrom(t, l, from)
	if _, err := c.Write(mustAppend(t, setupMsg{Type: msgHello, Endpoint: testEndpoint(), Private: []byte(private)})); err != nil {
		t.Fatal(err)
	}
	return c
}

// wantHungUp waits until the listener has hung up on c without a word.
func wantHungUp(t *testing.T, c net.Conn) {
	t.Helper()
	if n, err := c.Read(make([]byte, 1)); n != 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("caller %v reads %d bytes (%v), want an end", c.LocalAddr(), n, err)
	}
}

// wantReject waits until c hears a Reject with reason.
func wantReject(t *testing.T, c net.Conn, reason string) {
	t.Helper()
	if m, err := readMsg(c); err != nil || m.Type != msgReject || !strings.Contains(m.Reason, reason) {
		t.Errorf("caller %v hears %v %q (%v), want a Reject with %q", c.LocalAddr(), m.Type, m.Reason, err, reason)
	}
}

func (g *greeting) len() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.list)
}

func (q *callers) len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.queue)
}

// settled waits until the listener has heard all who spoke and has n of them in its queue.
func settled(t *testing.T, l *Listener, n int) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d callers wait and nobody greets", n), func() bool {
		return l.callers.len() == n && l.greeting.len() == 0
	})
}

func TestDefaultSetUpBounds(t *testing.T) {
	l := defaultLimits
	if l.hello < time.Second || l.hello > 2*time.Second {
		t.Errorf("first message within %v, want 1 to 2 s", l.hello)
	}
	if l.ready > 2*time.Second || l.start >= l.ready {
		t.Errorf("the dialler starts within %v and is ready within %v, want less than that, which is at most 2 s", l.start, l.ready)
	}
	if l.greetingFrom >= l.greeting || l.waitingFrom >= l.waiting {
		t.Errorf("one source may have %d of %d and %d of %d places, want less than all", l.greetingFrom, l.greeting, l.waitingFrom, l.waiting)
	}
}

func TestSourceOfCallers(t *testing.T) {
	for _, tc := range []struct {
		name, a, b string
		same       bool
	}{
		{"one IPv4 address, two ports", "198.18.0.1:1", "198.18.0.1:2", true},
		{"two IPv4 addresses", "198.18.0.1:1", "198.18.0.2:1", false},
		{"IPv4 and the same mapped", "198.18.0.1:1", "[::ffff:198.18.0.1]:1", true},
		{"two IPv6 addresses of one /64", "[2001:2:0:1::1]:1", "[2001:2:0:1:ffff::2]:1", true},
		{"IPv6 addresses of two /64", "[2001:2:0:1::1]:1", "[2001:2:0:2::1]:1", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var from [2]string
			for i, s := range []string{tc.a, tc.b} {
				a, err := net.ResolveTCPAddr("tcp", s)
				if err != nil {
					t.Fatal(err)
				}
				from[i] = source(a).String()
			}
			if (from[0] == from[1]) != tc.same {
				t.Errorf("sources %s and %s, want the same: %v", from[0], from[1], tc.same)
			}
		})
	}
}

func TestSilentCallersDoNotShutThePort(t *testing.T) {
	f, l := limited(t, ample())
	go func() {
		for {
			in, err := l.Accept(testCtx(t))
			if err != nil {
				return
			}
			_ = in.Reject("seen")
		}
	}()
	for range 200 {
		callerFrom(t, l, 1)
	}
	d, _ := newTestDevice(t, f)
	var re *RejectedError
	if _, err := d.Dial(testCtx(t), l.Addr().String(), nil); !errors.As(err, &re) || re.Reason != "seen" {
		t.Errorf("Dial says %v, want the program's Reject", err)
	}
}

func TestOldestSilentCallerGivesItsPlaceUp(t *testing.T) {
	for _, tc := range []struct {
		name              string
		greeting, perFrom int
		from              []byte // the last one is one too many
		loses             int
	}{
		{"of its source, which has its share", 9, 2, []byte{2, 3, 3, 3}, 1},
		{"of all, as there is no room", 3, 2, []byte{2, 3, 3, 4}, 0},
		{"of its source although others are older", 4, 2, []byte{2, 2, 3, 3, 3}, 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			limits := ample()
			limits.greeting, limits.greetingFrom = tc.greeting, tc.perFrom
			_, l := limited(t, limits)
			var calls []net.Conn
			for i, from := range tc.from {
				calls = append(calls, callerFrom(t, l, from))
				// The listener takes them in this order.
				want := min(i+1, len(tc.from)-1)
				eventually(t, "the caller is taken", func() bool { return l.greeting.len() == want })
			}
			wantHungUp(t, calls[tc.loses])
			for i, c := range calls {
				if i == tc.loses {
					continue
				}
				if _, err := c.Write([]byte("HTTP")); err != nil {
					t.Error(err)
				}
			}
			// The others are heard, each as what it is.
			settled(t, l, len(calls)-1)
		})
	}
}

// A caller whose words are on their way through the kernel is not silent.
func TestCallerThatHasSpokenKeepsItsPlace(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	var near, far [3]net.Conn
	for i := range near {
		if far[i], err = net.Dial("tcp", ln.Addr().String()); err != nil {
			t.Fatal(err)
		}
		defer far[i].Close()
		if near[i], err = ln.Accept(); err != nil {
			t.Fatal(err)
		}
		defer near[i].Close()
	}
	limits := ample()
	limits.greetingFrom = 2
	g := &greeting{limits: limits}
	spoke, silent := g.enter(near[0]), g.enter(near[1])
	if _, err := far[0].Write([]byte("M")); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the kernel has the word", func() bool { return unread(near[0]) })
	g.enter(near[2])
	if spoke.evicted || !silent.evicted {
		t.Errorf("the one that spoke is gone: %v, the silent one: %v; want false and true", spoke.evicted, silent.evicted)
	}
}

func TestCallerThatDoesNotFinishItsHelloIsHungUpOn(t *testing.T) {
	for _, tc := range []struct {
		name string
		say  func(net.Conn)
	}{
		{"silent", func(net.Conn) {}},
		{"byte by byte", func(c net.Conn) {
			hello := mustAppend(t, setupMsg{Type: msgHello, Endpoint: testEndpoint()})
			for i := 0; ; i = min(i+1, len(hello)-2) {
				if _, err := c.Write(hello[i : i+1]); err != nil {
					return
				}
				time.Sleep(5 * time.Millisecond)
			}
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			limits := ample()
			limits.hello = 50 * time.Millisecond
			_, l := limited(t, limits)
			c := callerFrom(t, l, 1)
			done := make(chan struct{})
			go func() {
				defer close(done)
				tc.say(c)
			}()
			_, err := c.Read(make([]byte, 1))
			if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("the caller reads on (%v), want an end", err)
			}
			c.Close()
			<-done
			settled(t, l, 0)
		})
	}
}

func TestCallersThatWaitForTheProgramHoldNoGreetingSlot(t *testing.T) {
	limits := ample()
	limits.greeting, limits.greetingFrom = 1, 1
	_, l := limited(t, limits)
	var want []string
	for i := range 5 {
		want = append(want, fmt.Sprint("caller ", i))
		sayHello(t, l, 1, want[i])
		settled(t, l, i+1)
	}
	var got []string
	for range want {
		in, err := l.Accept(testCtx(t))
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, string(in.PrivateData()))
		_ = in.Reject("done")
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("order of Accept (-want +got):\n%s", d)
	}
}

func TestCallersBeyondTheBoundAreTold(t *testing.T) {
	for _, tc := range []struct {
		name             string
		waiting, perFrom int
		from             []byte // the last one is one too many
		loses            int
		reason           string
	}{
		{"of one source", 9, 2, []byte{2, 3, 3, 3}, 3, "2 callers from 127.0.0.3/32 wait for the listener's program already, at most 2 may"},
		{"in all: the last of the source that has most", 3, 3, []byte{2, 3, 3, 4}, 2, "3 callers wait for the listener's program already, at most 3 may"},
		{"in all: itself, if it has most", 3, 3, []byte{2, 3, 3, 3}, 3, "3 callers wait for the listener's program already, at most 3 may"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			limits := ample()
			limits.waiting, limits.waitingFrom = tc.waiting, tc.perFrom
			_, l := limited(t, limits)
			var calls []net.Conn
			for i, from := range tc.from {
				calls = append(calls, sayHello(t, l, from, fmt.Sprint(i)))
				if i < len(tc.from)-1 {
					settled(t, l, i+1)
				}
			}
			wantReject(t, calls[tc.loses], tc.reason)
			settled(t, l, len(calls)-1)
			for i := range calls {
				if i == tc.loses {
					continue
				}
				in, err := l.Accept(testCtx(t))
				if err != nil {
					t.Fatal(err)
				}
				if got := string(in.PrivateData()); got != fmt.Sprint(i) {
					t.Errorf("Accept gives caller %s, want %d", got, i)
				}
				_ = in.Reject("done")
			}
		})
	}
}

func TestCallerThatTheProgramDoesNotTakeIsTold(t *testing.T) {
	limits := ample()
	limits.take = 30 * time.Millisecond
	f, l := limited(t, limits)
	d, _ := newTestDevice(t, f)
	var re *RejectedError
	if _, err := d.Dial(testCtx(t), l.Addr().String(), nil); !errors.As(err, &re) || !strings.Contains(re.Reason, "did not take the call within 30ms") {
		t.Errorf("Dial says %v, want a RejectedError that says why", err)
	}
	settled(t, l, 0)
	eventually(t, "nothing is left in the engines", f.empty)
}

func TestErrorsOfCallersAreBounded(t *testing.T) {
	limits := ample()
	limits.bad = 2
	_, l := limited(t, limits)
	var last []string
	for i := range 5 {
		c := callerFrom(t, l, 1)
		if _, err := c.Write([]byte("GET / HTTP/1.1\r\n\r\n")); err != nil {
			t.Fatal(err)
		}
		settled(t, l, min(i+1, 2))
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal("the listener does not hang up on what is no peer")
		}
		if i >= 3 {
			last = append(last, c.LocalAddr().String())
		}
	}
	for _, addr := range last {
		var he *HandshakeError
		if _, err := l.Accept(testCtx(t)); !errors.As(err, &he) || he.Peer != addr || !errors.Is(err, ErrNotMetaroce) {
			t.Errorf("Accept says %v, want ErrNotMetaroce of %s", err, addr)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if in, err := l.Accept(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Accept gives %v and %v, want nobody", in, err)
	}
}

func TestAcceptDoesNotWaitLongForReady(t *testing.T) {
	limits := ample()
	limits.ready = 30 * time.Millisecond
	f, l := limited(t, limits)
	c := sayHello(t, l, 1, "")
	in, err := l.Accept(testCtx(t))
	if err != nil {
		t.Fatal(err)
	}
	_, err = in.Accept(context.Background(), nil)
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), c.LocalAddr().String()+" does not answer: no Ready within 30ms") {
		t.Errorf("Accept says %v, want who did not say Ready in time", err)
	}
	if !f.empty() {
		t.Error("a connection is left in the engine")
	}
}

func TestDiallerThatCannotStartInTimeSaysSo(t *testing.T) {
	f, l := limited(t, ample())
	d, e := newTestDevice(t, f)
	d.limits = ample()
	d.limits.start = 30 * time.Millisecond
	e.startWaits = true
	accepted := make(chan error, 1)
	go func() {
		in, err := l.Accept(testCtx(t))
		if err == nil {
			_, err = in.Accept(testCtx(t), nil)
		}
		accepted <- err
	}()
	if _, err := d.Dial(testCtx(t), l.Addr().String(), nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Dial says %v, want the end of its time", err)
	}
	if e.startTime > d.limits.start {
		t.Errorf("the engine may take %v, want at most %v", e.startTime, d.limits.start)
	}
	var re *RejectedError
	if err := <-accepted; !errors.As(err, &re) {
		t.Errorf("Accept says %v, want a RejectedError", err)
	}
	eventually(t, "nothing is left in the engines", f.empty)
}

func TestDialCallsAgainWhenHungUpOnWithoutAWord(t *testing.T) {
	for _, tc := range []struct {
		name   string
		deaf   int // calls that are not heard
		calls  int
		reason string
	}{
		{"heard the third time", 2, 3, "heard"},
		{"never heard", 100, dialAttempts, "hung up"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			calls, done := 0, make(chan struct{})
			go func() {
				defer close(done)
				for {
					c, err := ln.Accept()
					if err != nil {
						return
					}
					if calls++; calls > tc.deaf {
						_ = newSetupConn(c).reject("heard")
					}
					c.Close()
				}
			}()
			f := newFabric(t)
			d, _ := newTestDevice(t, f)
			_, err = d.Dial(testCtx(t), ln.Addr().String(), nil)
			if err == nil || !strings.Contains(err.Error(), tc.reason) {
				t.Errorf("Dial says %v, want one with %q", err, tc.reason)
			}
			ln.Close()
			<-done
			if calls != tc.calls {
				t.Errorf("%d calls, want %d", calls, tc.calls)
			}
			if !f.empty() {
				t.Error("a connection is left in the engine")
			}
		})
	}
}

func TestListenerCloseHangsUpOnCallersThatWait(t *testing.T) {
	_, l := limited(t, ample())
	c := sayHello(t, l, 1, "")
	settled(t, l, 1)
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	wantHungUp(t, c)
	if _, err := l.Accept(testCtx(t)); !errors.Is(err, ErrClosed) {
		t.Errorf("Accept says %v, want ErrClosed", err)
	}
}
