// SPDX-License-Identifier: Apache-2.0

// Package e2e moves real packets through the real programs: two or more hosts of a lab, each with
// a device, most often both in this process. What arrives is compared byte by byte.
package e2e

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/metaroce/metaroce/fabric/lab"
	"github.com/metaroce/metaroce/loader"
	"github.com/metaroce/metaroce/transport"
	"github.com/metaroce/metaroce/transport/core"
)

// patience bounds every wait. It is long: a slow machine is no failure.
const patience = 2 * time.Minute

// roleVariable names the role in which this test binary runs when a test started it as a program
// of its own, see startNode.
const roleVariable = "METAROCE_E2E_ROLE"

// roles are what this binary can be besides a test: by name, functions that get the arguments and
// return the exit code. Test files add theirs in init.
var roles = map[string]func(args []string) int{}

func TestMain(m *testing.M) {
	if name := os.Getenv(roleVariable); name != "" {
		role, ok := roles[name]
		if !ok {
			fmt.Fprintf(os.Stderr, "%s is %q, which is no role\n", roleVariable, name)
			os.Exit(2)
		}
		os.Exit(role(os.Args[1:]))
	}
	flag.Parse()
	if err := sweep(); err != nil {
		fmt.Fprintln(os.Stderr, "labs of earlier runs:", err)
	}
	os.Exit(m.Run())
}

const labPrefix = "e2e"

// sweep removes the labs of test processes that died without cleaning up.
func sweep() error {
	if os.Geteuid() != 0 {
		return nil
	}
	names, err := lab.Names()
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		number, ok := strings.CutPrefix(name, labPrefix)
		number, _, _ = strings.Cut(number, "-")
		pid, err := strconv.Atoi(number)
		if !ok || err != nil || !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		errs = append(errs, lab.Remove(ctx, name))
		cancel()
	}
	return errors.Join(errs...)
}

// short says that sizes should be small: on emulated machines everything is some 20 times slower.
func short() bool { return testing.Short() || os.Getenv("METAROCE_KERNEL") == "short" }

// soak leaves out what takes too long for every run: make soak sets the variable.
func soak(t *testing.T) {
	t.Helper()
	if os.Getenv("METAROCE_SOAK") == "" {
		t.Skip("METAROCE_SOAK is not set: takes too long")
	}
}

// pick is normal, or small if tests are to be short.
func pick[T any](normal, small T) T {
	if short() {
		return small
	}
	return normal
}

// fewer is all cases, or only the last ones if tests are to be short: each needs devices of its own,
// and the verifier takes tens of seconds on an emulated machine.
func fewer[T any](last int, cases []T) []T { return cases[pick(0, len(cases)-last):] }

var labNumber atomic.Uint32

// newLab makes a lab under a name of its own for the test.
func newLab(t *testing.T, cfg lab.Config) *lab.Lab {
	t.Helper()
	if uid := os.Geteuid(); uid != 0 {
		t.Skipf("running as uid %d: namespaces and XDP programs need root", uid)
	}
	cfg.Name = fmt.Sprintf("%s%d-%d", labPrefix, os.Getpid(), labNumber.Add(1))
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	l, err := lab.Up(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Down(); err != nil {
			t.Error(err)
		}
	})
	return l
}

// host is a lab's host with a device open in this process.
type host struct {
	lab   *lab.Lab
	index int
	dev   *transport.Device
	pd    *transport.PD // of its memory and connections, in tests that are not about domains
	dir   string        // of the device's pins

	watchedBy *testing.T // which states the most repairs
}

// open opens a device on all planes unless cfg names interfaces. It is closed at the end of the test.
func (h *host) open(t *testing.T, cfg transport.Config) error {
	if cfg.Interfaces == nil {
		cfg.Interfaces = h.lab.Interfaces(h.index)
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.NewTextHandler(testLog{t}, &slog.HandlerOptions{Level: slog.LevelWarn}))
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	err := h.lab.Do(h.index, func() (err error) {
		if h.dev, err = transport.Open(ctx, cfg); err == nil {
			h.pd, err = h.dev.AllocPD()
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("host %d: %w", h.index, err)
	}
	t.Cleanup(func() {
		if err := h.dev.Close(); err != nil {
			t.Errorf("close the device of host %d: %v", h.index, err)
		}
	})
	return nil
}

// openPair opens devices with the same configuration on hosts 0 and 1.
func openPair(t *testing.T, l *lab.Lab, cfg transport.Config) [2]*host {
	t.Helper()
	return openHosts(t, l, cfg, cfg)
}

// openHosts opens devices on hosts 0 and 1, at the same time: the kernel's verifier takes long. If
// tests are to be short, one after the other: attaching a program rewrites kernel code that the other
// device's pump may be running just then, and an emulated machine with several CPUs can die of that
// (QEMU executes an int3 that is no longer there).
func openHosts(t *testing.T, l *lab.Lab, cfg0, cfg1 transport.Config) [2]*host {
	t.Helper()
	h := [2]*host{{lab: l, index: 0}, {lab: l, index: 1}}
	opened := make(chan error, 1)
	second := func() { opened <- h[1].open(t, cfg1) }
	if !short() {
		go second()
	}
	err := h[0].open(t, cfg0)
	if short() {
		second()
	}
	if err := errors.Join(err, <-opened); err != nil {
		t.Fatal(err)
	}
	for i := range h {
		h[i].dir = pins(t, l, i)
		t.Cleanup(func() { h[i].wantWatched(t) })
	}
	return h
}

// testLog gives a program's log to the test, which shows it when it fails.
type testLog struct{ t *testing.T }

func (l testLog) Write(b []byte) (int, error) {
	l.t.Logf("%s", bytes.TrimSuffix(b, []byte("\n")))
	return len(b), nil
}

// pins finds the directory with the pins of the device on a lab's host, in whatever process.
func pins(t *testing.T, l *lab.Lab, index int) string {
	t.Helper()
	d, ok := findDevice(t, l, index)
	if !ok {
		t.Fatalf("no device is pinned for host %d", index)
	}
	return d.Dir
}

// findDevice finds the pins of a lab's host.
func findDevice(t *testing.T, l *lab.Lab, index int) (loader.Device, bool) {
	t.Helper()
	var st syscall.Stat_t
	if err := syscall.Stat(l.NetNS(index), &st); err != nil {
		t.Fatal(err)
	}
	devices, err := loader.Find()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range devices {
		if strings.HasPrefix(d.Name, fmt.Sprintf("%d-", st.Ino)) {
			return d, true
		}
	}
	return loader.Device{}, false
}

// state calls f with the device's registers, read through the pins as `metaroce status` does.
func (h *host) state(t *testing.T, f func(*loader.State) error) {
	t.Helper()
	s, err := loader.OpenPinned(h.dir)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := f(s); err != nil {
		t.Fatal(err)
	}
}

// counters are the device's.
func (h *host) counters(t *testing.T) (c loader.Counters) {
	t.Helper()
	h.state(t, func(s *loader.State) (err error) {
		c, err = s.Counters()
		return err
	})
	return c
}

// register is one of the host's connections as the kernel has it.
func (h *host) register(t *testing.T, c *transport.Conn) (r loader.Conn) {
	t.Helper()
	qpn := c.Info().QPN
	h.state(t, func(s *loader.State) error {
		for i := range s.MaxConns() {
			c, err := s.Conn(i)
			if err != nil {
				return err
			}
			if c.State != loader.ConnFree && c.Qpn == qpn {
				r = *c
				return nil
			}
		}
		return fmt.Errorf("host %d: no connection with QPN %#x", h.index, qpn)
	})
	return r
}

// alloc makes memory with all rights. It is freed with the device, or by the end of the test if
// nothing uses it then.
func (h *host) alloc(t *testing.T, size uint64) *transport.Memory {
	t.Helper()
	m, err := h.pd.AllocMemory(size, core.LocalWrite|core.RemoteWrite)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil && !t.Failed() {
			t.Error(err)
		}
	})
	return m
}

// bounded is a context that ends with the test, after patience at the latest.
func bounded(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// waitFor waits until cond holds.
func waitFor(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within %v", what, patience)
		}
	}
}

// setupPort is where listen listens.
const setupPort = "18515"

// listen makes h's device listen at its address on plane 0.
func (h *host) listen(t *testing.T) *transport.Listener {
	t.Helper()
	l, err := h.dev.Listen(bounded(t), h.setupAddr())
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func (h *host) setupAddr() string {
	return net.JoinHostPort(h.lab.Addr(h.index, 0).String(), setupPort)
}

// connect sets up a connection, from host a to host b, and returns both ends in this order. They
// are closed at the end of the test, in order if they still live then. Until then neither host may
// send more repairs than most, on all connections.
func connect(t *testing.T, a, b *host, most mostRepairs) [2]*transport.Conn {
	t.Helper()
	a.watch(t, most)
	b.watch(t, most)
	l := b.listen(t)
	defer l.Close()
	var c [2]*transport.Conn
	accepted := make(chan error, 1)
	ctx := bounded(t)
	go func() {
		in, err := l.Accept(ctx)
		if err == nil {
			c[1], err = in.Accept(ctx, nil, transport.WithPD(b.pd))
		}
		accepted <- err
	}()
	var err error
	c[0], err = a.dev.Dial(ctx, b.setupAddr(), nil, transport.WithPD(a.pd))
	if err := errors.Join(err, <-accepted); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { disconnect(t, c[0], c[1]) })
	return c
}

// disconnect closes both ends in order.
func disconnect(t *testing.T, c ...*transport.Conn) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	closed := make(chan error, len(c))
	for _, c := range c {
		go func() { closed <- c.Close(ctx) }()
	}
	for range c {
		if err := <-closed; err != nil && !t.Failed() {
			t.Error(err)
		}
	}
}

// noise fills b with what seed says.
func noise(b []byte, seed uint64) {
	var key [32]byte
	copy(key[:], fmt.Sprintf("%d", seed))
	_, _ = rand.NewChaCha8(key).Read(b)
}

// next waits for the next completion of a queue.
func next(t *testing.T, q *transport.CQ) transport.Completion {
	t.Helper()
	c, err := nextOf(bounded(t), q)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func nextOf(ctx context.Context, q *transport.CQ) (transport.Completion, error) {
	var c [1]transport.Completion
	if _, err := q.Wait(ctx, c[:]); err != nil {
		return c[0], err
	}
	return c[0], nil
}

// wantNoMore fails if one of the queues has a completion: each request has one and no second.
func wantNoMore(t *testing.T, queues ...*transport.CQ) {
	t.Helper()
	for _, q := range queues {
		if err := noMore(q); err != nil {
			t.Error(err)
		}
	}
}

func noMore(q *transport.CQ) error {
	var c [1]transport.Completion
	if q.Poll(c[:]) != 0 {
		return fmt.Errorf("one completion too many: %+v", c[0])
	}
	return nil
}

// wantEqual compares memory with what it should hold and names the first byte that differs.
func wantEqual(t *testing.T, what string, got, want []byte) {
	t.Helper()
	if err := differ(what, got, want); err != nil {
		t.Error(err)
	}
}

func differ(what string, got, want []byte) error {
	if bytes.Equal(got, want) {
		return nil
	}
	if len(got) != len(want) {
		return fmt.Errorf("%s: %d bytes, want %d", what, len(got), len(want))
	}
	first, n := -1, 0
	for i := range got {
		if got[i] != want[i] {
			if n++; first < 0 {
				first = i
			}
		}
	}
	return fmt.Errorf("%s: %d of %d bytes differ, the first at %d: %#x, want %#x", what, n, len(got), first, got[first], want[first])
}
