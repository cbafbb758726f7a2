// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/metaroce/metaroce/fabric/lab"
	"github.com/metaroce/metaroce/telemetry"
	"github.com/metaroce/metaroce/transport"
)

// patience bounds waiting in tests; a slow machine needs it, a quick one does not.
const patience = 2 * time.Minute

// quiet logs nothing.
var quiet = slog.New(slog.DiscardHandler)

var labs atomic.Int32

func labName() string { return fmt.Sprintf("bt%d-%d", os.Getpid(), labs.Add(1)) }

func needRoot(t *testing.T) {
	t.Helper()
	if uid := os.Geteuid(); uid != 0 {
		t.Skipf("running as uid %d, needs root: network namespaces and BPF", uid)
	}
}

func newLab(t *testing.T, cfg lab.Config) *lab.Lab {
	t.Helper()
	needRoot(t)
	cfg.Name = labName()
	l, err := lab.Up(t.Context(), cfg)
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

// device opens a device on a host, with all of its interfaces.
func device(t *testing.T, l *lab.Lab, host int) *transport.Device {
	t.Helper()
	var d *transport.Device
	if err := l.Do(host, func() error {
		var err error
		d, err = transport.Open(t.Context(), transport.Config{Interfaces: l.Interfaces(host), Logger: quiet})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// wantFewRepairs fails if the devices of this process have repaired more than a thousandth of what they sent.
// Nothing is lost here: the 8 are what paths that are timed out too hastily send before a late ACK comes.
func wantFewRepairs(t *testing.T) {
	t.Helper()
	sent, repairs, err := telemetry.OwnPackets()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d repairs of %d packets sent", repairs, sent)
	if most := sent/1000 + 8; repairs > most {
		t.Errorf("%d repairs of %d packets sent, want at most %d", repairs, sent, most)
	}
}

// runPerf runs client and server and returns what each has reported.
func runPerf(t *testing.T, client, server *transport.Device, l *lab.Lab, p Params) (ours, theirs []Report) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	ln, err := server.Listen(ctx, l.Addr(1, 0).String()+":0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	served := make(chan error, 1)
	go func() {
		s, err := Serve(ctx, server, ln, Options{Wait: patience})
		if err == nil {
			err = errors.Join(s.Answer(ctx, func(r Report) { theirs = append(theirs, r) }), s.Close())
		}
		served <- err
	}()
	s, err := Connect(ctx, client, ln.Addr().String(), p, Options{Wait: patience})
	if err != nil {
		t.Fatal(err)
	}
	for i := range p.Sizes() {
		r, err := s.Run(ctx, i)
		if err != nil {
			t.Fatal(err)
		}
		ours = append(ours, r)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
	wantFewRepairs(t)
	return ours, theirs
}

func TestPerfMeasuresAtBothEnds(t *testing.T) {
	l := newLab(t, lab.Config{Planes: 2})
	client, server := device(t, l, 0), device(t, l, 1)
	const warmup = time.Millisecond
	for _, tc := range []struct {
		name string
		p    Params
	}{
		{"bandwidth", Params{Test: WriteBWTest, Size: 65536, Iterations: 50, QPs: 1, Depth: 16, Warmup: warmup}},
		{"one byte", Params{Test: WriteBWTest, Size: 1, Iterations: 50, QPs: 1, Depth: 1}},
		{"for a time", Params{Test: WriteBWTest, Size: 4096, Duration: 50 * time.Millisecond, QPs: 1, Depth: 128, Warmup: warmup}},
		{"three queue pairs", Params{Test: WriteBWTest, Size: 5000, Iterations: 30, QPs: 3, Depth: 8, Warmup: warmup}},
		{"both directions", Params{Test: WriteBWTest, Size: 65536, Iterations: 30, QPs: 2, Depth: 8, Bidirectional: true, Warmup: warmup}},
		{"ping-pong", Params{Test: WriteLatTest, Size: 2, Iterations: 50, QPs: 1, Depth: 1, Warmup: warmup}},
		{"ping-pong of many packets", Params{Test: WriteLatTest, Size: 100000, Iterations: 20, QPs: 1, Depth: 1, Warmup: warmup}},
		{"ping-pong for a time", Params{Test: WriteLatTest, Size: 64, Duration: 50 * time.Millisecond, QPs: 1, Depth: 1}},
		{"completion", Params{Test: WriteLatTest, Size: 64, Iterations: 50, QPs: 1, Depth: 1, Completion: true, Warmup: warmup}},
		{"all sizes", Params{Test: WriteBWTest, AllSizes: true, Iterations: 2, QPs: 1, Depth: 2}},
		{"ping-pong of all sizes", Params{Test: WriteLatTest, AllSizes: true, Iterations: 2, QPs: 1, Depth: 1}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ours, theirs := runPerf(t, client, server, l, tc.p)
			if len(ours) != len(tc.p.Sizes()) || len(theirs) != len(ours) {
				t.Fatalf("%d and %d reports, want %d of each end", len(ours), len(theirs), len(tc.p.Sizes()))
			}
			for i, r := range ours {
				checkReport(t, r, tc.p, tc.p.Sizes()[i])
				checkReport(t, theirs[i], tc.p, tc.p.Sizes()[i])
			}
		})
	}
}

func checkReport(t *testing.T, r Report, p Params, size uint64) {
	t.Helper()
	if p.Test == WriteLatTest {
		l := r.Lat
		if l == nil || l.Size != size || l.Iterations == 0 || p.Iterations > 0 && l.Iterations != p.Iterations {
			t.Fatalf("latency %+v, want %d times %d bytes", l, p.Iterations, size)
		}
		if !(0 < l.MinNs && l.MinNs <= l.P50Ns && l.P50Ns <= l.P99Ns && l.P99Ns <= l.P999Ns && l.P999Ns <= l.MaxNs) {
			t.Errorf("latency %+v is not in order", l)
		}
		return
	}
	bw := r.BW
	if bw == nil || bw.Size != size || bw.Bps() <= 0 {
		t.Fatalf("bandwidth %+v, want one of %d bytes", bw, size)
	}
	if want := p.Iterations * p.QPs; p.Iterations > 0 && !p.Bidirectional && bw.Iterations != want {
		t.Errorf("%d iterations, want %d", bw.Iterations, want)
	}
	if p.Iterations > 0 && !p.Bidirectional && bw.PeakBps < bw.Bps()*0.999 {
		t.Errorf("peak %v is below the mean %v", bw.PeakBps, bw.Bps())
	}
}

func TestPerfServerRefusesAClientAndSaysWhy(t *testing.T) {
	l := newLab(t, lab.Config{Direct: true})
	client, server := device(t, l, 0), device(t, l, 1)
	ln, err := server.Listen(t.Context(), l.Addr(1, 0).String()+":0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() {
		_, err := Serve(t.Context(), server, ln, Options{Wait: patience, Check: func(Params) error { return errors.New("not today") }})
		served <- err
	}()
	p := Params{Test: WriteBWTest, Size: 1, Iterations: 1, QPs: 1, Depth: 1}
	_, err = Connect(t.Context(), client, ln.Addr().String(), p, Options{Wait: patience})
	for end, err := range map[string]error{"client": err, "server": <-served} {
		if err == nil || !strings.Contains(err.Error(), "not today") {
			t.Errorf("%s: error %v, want one with the reason", end, err)
		}
	}
	if n := client.Status().Regions; n != 0 {
		t.Errorf("the refused client still has %d regions, want none", n)
	}
}

func TestPerfWaitsForTheOtherEndNoLongerThanToldTo(t *testing.T) {
	l := newLab(t, lab.Config{Direct: true})
	d := device(t, l, 0)
	wait := 50 * time.Millisecond
	p := Params{Test: WriteBWTest, Size: 1, Iterations: 1, QPs: 1, Depth: 1}
	_, err := Connect(t.Context(), d, l.Addr(1, 0).String()+":1", p, Options{Wait: wait})
	if err == nil || !strings.Contains(err.Error(), "nobody listened within 50ms") {
		t.Errorf("client: error %v, want that nobody listened", err)
	}
	ln, err := d.Listen(t.Context(), l.Addr(0, 0).String()+":0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if _, err = Serve(t.Context(), d, ln, Options{Wait: wait}); err == nil || !strings.Contains(err.Error(), "no client within 50ms") {
		t.Errorf("server: error %v, want that no client came", err)
	}
}

// childVariable makes this test binary a perf client that runs until it is killed.
const childVariable = "METAROCE_BENCH_CHILD"

func TestMain(m *testing.M) {
	if target := os.Getenv(childVariable); target != "" {
		if err := perfChild(target); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// perfChild is one end of a perf run. target is the server's address; without a
// port it is the server itself.
func perfChild(target string) error {
	ctx := context.Background()
	d, err := transport.Open(ctx, transport.Config{Interfaces: []string{"p0"}, Logger: quiet})
	if err != nil {
		return err
	}
	if server, ok := strings.CutPrefix(target, "serve "); ok {
		ln, err := d.Listen(ctx, server)
		if err != nil {
			return err
		}
		s, err := Serve(ctx, d, ln, Options{Wait: patience})
		if err != nil {
			return err
		}
		return s.Answer(ctx, func(Report) {})
	}
	s, err := Connect(ctx, d, target, endless, Options{Wait: patience})
	if err != nil {
		return err
	}
	_, err = s.Run(ctx, 0)
	return err
}

// endless is a run that ends only when somebody is killed.
var endless = Params{Test: WriteBWTest, Size: 65536, Duration: time.Hour, QPs: 1, Depth: 16}

// child starts this binary on a host.
func child(t *testing.T, l *lab.Lab, host int, target string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childVariable+"="+target)
	cmd.Stderr = os.Stderr
	if err := l.Start(host, cmd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd
}

func TestPerfServerEndsWhenItsClientIsKilled(t *testing.T) {
	l := newLab(t, lab.Config{Direct: true})
	server := device(t, l, 1)
	ln, err := server.Listen(t.Context(), l.Addr(1, 0).String()+":0")
	if err != nil {
		t.Fatal(err)
	}
	cmd := child(t, l, 0, ln.Addr().String())
	s, err := Serve(t.Context(), server, ln, Options{Wait: patience})
	if err != nil {
		t.Fatal(err)
	}
	answered := make(chan error, 1)
	go func() { answered <- s.Answer(t.Context(), func(Report) {}) }()
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-answered:
		if !errors.Is(err, transport.ErrPeerDied) {
			t.Errorf("error %v, want that the peer's program is gone", err)
		}
	case <-time.After(patience):
		t.Error("the server waits for a client that is gone")
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

func TestPerfClientEndsWhenItsServerIsKilled(t *testing.T) {
	l := newLab(t, lab.Config{Direct: true})
	client := device(t, l, 0)
	const port = ":18515"
	addr := l.Addr(1, 0).String() + port
	cmd := child(t, l, 1, "serve "+addr)
	s, err := Connect(t.Context(), client, addr, endless, Options{Wait: patience})
	if err != nil {
		t.Fatal(err)
	}
	ran := make(chan error, 1)
	go func() {
		_, err := s.Run(t.Context(), 0)
		ran <- err
	}()
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ran:
		if !errors.Is(err, transport.ErrPeerDied) {
			t.Errorf("error %v, want that the peer's program is gone", err)
		}
	case <-time.After(patience):
		t.Error("the client writes to a server that is gone")
	}
	if err := s.Close(); err != nil && !errors.Is(err, transport.ErrPeerDied) {
		t.Error(err)
	}
}

func TestStoryTellsEverythingAndLeavesNothing(t *testing.T) {
	needRoot(t)
	name := labName()
	rows, pulls := 0, 0
	story, err := Tell(t.Context(), StoryConfig{
		Lab: name, Planes: 2, Rate: 2e8, Losses: []float64{0, 0.01}, Stream: 100 * time.Millisecond, Direct: true,
		Counts: func() (uint64, uint64, error) { return uint64(10 * (rows + 1)), uint64(rows), nil },
		Show:   Show{Row: func(Row) { rows++ }, Pull: func(Pull) { pulls++ }}, Logger: quiet,
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(story.Rows) != 4 || len(story.Direct) != 2 || rows != 6 {
		t.Errorf("%d rows, %d direct ones, %d shown, want 4, 2 and 6", len(story.Rows), len(story.Direct), rows)
	}
	for _, r := range append(story.Rows, story.Direct...) {
		// TCP may wait for a timer as long as that.
		if r.GoodputBps <= 0 && r.Transport == Ours || r.Latency.P50Ns <= 0 {
			t.Errorf("%+v, want a goodput and a latency", r)
		}
	}
	if len(story.Pulls) != 2 || pulls != 2 {
		t.Fatalf("%d pulls, %d shown, want 2", len(story.Pulls), pulls)
	}
	if p := story.Pulls[0]; p.Error != "" || p.Series.Rate(p.Down, p.Up) <= 0 {
		t.Errorf("pulled plane: error %q and %v bit/s, want none and some", p.Error, p.Series.Rate(p.Down, p.Up))
	}
	checkGone(t, name)
}

func TestStoryCleansUpWhenItIsInterrupted(t *testing.T) {
	needRoot(t)
	name := labName()
	ctx, cancel := context.WithCancel(t.Context())
	_, err := Tell(ctx, StoryConfig{
		Lab: name, Planes: 2, Rate: 2e8, Losses: []float64{0}, Stream: time.Hour,
		Counts: func() (uint64, uint64, error) { return 0, 0, nil },
		Show:   Show{Live: func(string, Series) { cancel() }}, Logger: quiet,
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want that it was cancelled", err)
	}
	checkGone(t, name)
}

// checkGone looks for what is left of a lab.
func checkGone(t *testing.T, name string) {
	t.Helper()
	names, err := lab.Names()
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range names {
		if strings.HasPrefix(n, name) {
			t.Errorf("lab %s is still there", n)
		}
	}
}

func TestNumbersAreMeasuredInOneRun(t *testing.T) {
	needRoot(t)
	name := labName()
	n, err := Measure(t.Context(), NumbersConfig{
		Lab: name, Pairs: 1, Stream: 50 * time.Millisecond, Idle: 10 * time.Millisecond,
		ConnMemory: func() (int, error) { return 1000, nil }, Logger: quiet,
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(n.Numbers) != 14 {
		t.Errorf("%d figures, want 14", len(n.Numbers))
	}
	_, noIperf := exec.LookPath("iperf3")
	for _, v := range n.Numbers {
		wantMissing := strings.Contains(v.Wanted, "ceiling") || noIperf != nil && strings.Contains(v.Wanted, "x TCP's")
		if (v.Missing != "") != wantMissing {
			t.Errorf("%s: missing %q, measured %q", v.What, v.Missing, v.Measured)
		}
	}
	checkGone(t, name)
}
