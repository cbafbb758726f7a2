// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os/exec"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/fabric/lab"
	"github.com/metaroce/metaroce/transport"
	"github.com/metaroce/metaroce/transport/core"
	"github.com/metaroce/metaroce/wire"
)

// NumbersConfig says how the figures are measured.
type NumbersConfig struct {
	Lab     string        // prefix of the labs' names
	Pairs   int           // interleaved pairs that each median is of
	Stream  time.Duration // how long each rate is measured
	Idle    time.Duration // how long an idle connection is watched
	Ceiling *Ceiling      // nil: not there
	// ConnMemory is the map memory of a connection with 8 paths, in bytes, of a
	// device that is up.
	ConnMemory func() (int, error)
	Logger     *slog.Logger
	Progress   func(text string) // may be nil
}

// Number is one figure and what is wanted of it.
type Number struct {
	What     string
	Measured string
	Wanted   string
	OK       bool
	Missing  string // why there is none
	Spread   string // least to greatest of what the median is of
}

// Result is the verdict in a word.
func (n Number) Result() string {
	switch {
	case n.Missing != "":
		return "not measured"
	case n.OK:
		return "ok"
	}
	return "below"
}

// Targets.
const (
	wantCeiling1M   = 0.35
	wantCeiling16M  = 0.6
	wantTCP         = 1.2
	wantTCPPerCPU   = 2.5
	wantSwitch      = 0.5
	wantLatCeiling  = 2.5
	wantLatTCP      = 0.1
	wantPlanes      = 0.92
	wantLoss1       = 0.95
	wantLoss10      = 0.75
	wantRecovery    = 50 * time.Millisecond
	wantConnMemory  = 64 << 10
	wantIdleCPU     = 10 * time.Millisecond
	planesRate      = 2e9
	numberPlanes    = 4
	numbersWarmup   = 200 * time.Millisecond
	latencySize     = 64
	ceilingLatSpan  = 4096
	numberPullAfter = 400 * time.Millisecond
)

// measurements are values by pair, under the name of what was measured.
type measurements map[string][]float64

func (m measurements) add(name string, v float64) { m[name] = append(m[name], v) }

// ratios divides pair by pair: what ran beside each other is compared.
func (m measurements) ratios(a, b string) []float64 {
	var r []float64
	for i := range min(len(m[a]), len(m[b])) {
		if m[b][i] > 0 {
			r = append(r, m[a][i]/m[b][i])
		}
	}
	return r
}

// median of values, 0 of none. Of an even number it is the mean of the middle two.
func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(values))
	if n := len(s); n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[len(s)/2]
}

type meter struct {
	NumbersConfig
	m       measurements
	bbr     bool // the kernel has it
	iperf   bool
	numbers []Number
	notes   []string
}

// Numbers is what `make bench` prints.
type Numbers struct {
	Config  NumbersConfig
	At      time.Time
	Kernel  string
	CPUs    int
	Numbers []Number
	Notes   []string
	Medians []Median
}

// Median is one measured figure, for reading beside the ratios.
type Median struct {
	Name               string
	Least, Value, Most float64
}

// Measure measures everything. It makes labs and removes them.
func Measure(ctx context.Context, c NumbersConfig) (*Numbers, error) {
	if c.Pairs < 1 {
		return nil, fmt.Errorf("%d pairs, want at least 1", c.Pairs)
	}
	t := &meter{NumbersConfig: c, m: measurements{}}
	ccs, err := congestionControls()
	if err != nil {
		return nil, err
	}
	t.bbr = slices.Contains(ccs, "bbr")
	if _, err := exec.LookPath("iperf3"); err == nil {
		t.iperf = true
	}
	if !t.bbr {
		t.notes = append(t.notes, "this kernel has no bbr: TCP is cubic's figure")
	}
	for _, part := range []struct {
		name string
		f    func(context.Context) error
	}{
		{"one veth pair", t.direct},
		{"switch without a limit", t.throughSwitch},
		{"limited planes", t.limited},
		{"idle connection", t.idleConnection},
	} {
		if err := part.f(ctx); err != nil {
			return nil, fmt.Errorf("%s: %w", part.name, err)
		}
	}
	t.conclude()
	n := &Numbers{Config: c, At: time.Now(), Kernel: kernelRelease(), CPUs: runtime.NumCPU(), Numbers: t.numbers, Notes: t.notes}
	for _, name := range slices.Sorted(mapKeys(t.m)) {
		v := t.m[name]
		n.Medians = append(n.Medians, Median{Name: name, Least: slices.Min(v), Value: median(v), Most: slices.Max(v)})
	}
	return n, nil
}

func mapKeys(m measurements) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

func kernelRelease() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Release[:])
}

func (t *meter) say(format string, args ...any) {
	if t.Progress != nil {
		t.Progress(fmt.Sprintf(format, args...))
	}
}

// withLab runs f in a lab of its own.
func (t *meter) withLab(ctx context.Context, suffix string, cfg lab.Config, f func(*lab.Lab) error) (err error) {
	cfg.Name = t.Lab + "-" + suffix
	l, err := lab.Up(ctx, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Down()) }()
	return f(l)
}

// withRig runs f with a connection in a lab of its own.
func (t *meter) withRig(ctx context.Context, suffix string, cfg lab.Config, tc transport.Config, size uint64, f func(*Rig) error) error {
	return t.withLab(ctx, suffix, cfg, func(l *lab.Lab) (err error) {
		tc.Logger = t.Logger
		r, err := NewRig(ctx, l, tc, size)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, r.Close()) }()
		return f(r)
	})
}

// rate measures a rig in bit/s.
func (t *meter) rate(ctx context.Context, r *Rig, size uint64) (float64, error) {
	bw, err := r.BW(ctx, BWOptions{Size: size, Duration: t.Stream, Depth: depthFor(size), Warmup: numbersWarmup})
	return bw.Bps() * 8, err
}

// depthFor keeps at most 64 MiB under way: more is only latency.
func depthFor(size uint64) int { return int(max(4, min(core.SQDepth, (64<<20)/size))) }

const (
	mib1  = 1 << 20
	mib16 = 16 << 20
)

// direct measures on bare veth pairs: ours, the ceiling and TCP, interleaved.
func (t *meter) direct(ctx context.Context) error {
	direct := lab.Config{Direct: true}
	// At most four labs are up at once; idle ones cost nothing.
	return t.withRig(ctx, "d3072", direct, transport.Config{Payload: 3072}, mib16, func(big *Rig) error {
		return t.withRig(ctx, "d1024", direct, transport.Config{Payload: 1024}, mib1, func(small *Rig) error {
			return t.withRig(ctx, "dnosum", direct, transport.Config{Payload: 3072, ChecksumOff: true}, mib1, func(bare *Rig) error {
				return t.withLab(ctx, "twin", direct, func(twin *lab.Lab) error {
					for pair := range t.Pairs {
						t.say("direct, pair %d of %d", pair+1, t.Pairs)
						if err := t.directPair(ctx, big, small, bare, twin); err != nil {
							return err
						}
					}
					return nil
				})
			})
		})
	})
}

func (t *meter) directPair(ctx context.Context, big, small, bare *Rig, twin *lab.Lab) error {
	idle, err := idleShare(500 * time.Millisecond)
	if err != nil {
		return err
	}
	var done atomic.Uint64
	cpu, err := cpuOf(idle, func() error {
		bw, err := big.BW(ctx, BWOptions{
			Size: mib1, Duration: t.Stream, Depth: depthFor(mib1), Warmup: numbersWarmup, Completed: &done,
		})
		t.m.add("write-bw 1 MiB, payload 3072, bit/s", bw.Bps()*8)
		return err
	})
	if err != nil {
		return err
	}
	t.m.add("write-bw 1 MiB, payload 3072, bytes a CPU second", float64(done.Load())/cpu.Seconds())
	if err := t.ceiling(ctx, 3072, mib1); err != nil {
		return err
	}
	rate, err := t.rate(ctx, bare, mib1)
	if err != nil {
		return err
	}
	t.m.add("write-bw 1 MiB, payload 3072, checksum off, bit/s", rate)
	if err := t.tcp(ctx, twin, idle); err != nil {
		return err
	}
	for _, run := range []struct {
		name    string
		rig     *Rig
		payload int
		size    int
	}{
		{"write-bw 1 MiB, payload 1024, bit/s", small, 1024, mib1},
		{"write-bw 16 MiB, payload 3072, bit/s", big, 3072, mib16},
	} {
		rate, err := t.rate(ctx, run.rig, uint64(run.size))
		if err != nil {
			return err
		}
		t.m.add(run.name, rate)
		if err := t.ceiling(ctx, run.payload, run.size); err != nil {
			return err
		}
	}
	return t.latencies(ctx, twin)
}

func ceilingName(payload, span int) string {
	return fmt.Sprintf("ceiling, payload %d, span %d MiB, bit/s", payload, span>>20)
}

func (t *meter) ceiling(ctx context.Context, payload, span int) error {
	if t.Ceiling == nil {
		return nil
	}
	r, err := t.Ceiling.Run(ctx, payload, span, t.Stream)
	if err == nil {
		t.m.add(ceilingName(payload, span), r.GbitPerS*1e9)
	}
	return err
}

// tcp measures TCP with its offloads, on a pair without XDP: the better of cubic
// and bbr at each.
func (t *meter) tcp(ctx context.Context, twin *lab.Lab, idle float64) error {
	if !t.iperf {
		return nil
	}
	controls := []string{"cubic"}
	if t.bbr {
		controls = append(controls, "bbr")
	}
	best, bestPerCPU := 0.0, 0.0
	for _, cc := range controls {
		var bps float64
		var received uint64
		cpu, err := cpuOf(idle, func() error {
			var err error
			bps, received, err = iperf(ctx, twin, cc, t.Stream)
			return err
		})
		if err != nil {
			return err
		}
		t.m.add("TCP "+cc+", TSO, bit/s", bps)
		best, bestPerCPU = max(best, bps), max(bestPerCPU, float64(received)/cpu.Seconds())
	}
	t.m.add("TCP, TSO, the better, bit/s", best)
	t.m.add("TCP, TSO, the better, bytes a CPU second", bestPerCPU)
	return nil
}

// latencies measures 64 B: ours spinning, the ceiling's and TCP's round trip.
// The spinning rig is up for this alone: its pump takes a CPU for itself.
func (t *meter) latencies(ctx context.Context, twin *lab.Lab) error {
	o := LatOptions{Size: latencySize, Duration: t.Stream, Warmup: numbersWarmup}
	spin := transport.Config{Payload: 3072, Spin: time.Hour}
	if err := t.withRig(ctx, "spin", lab.Config{Direct: true}, spin, 1<<16, func(r *Rig) error {
		lat, err := r.Latency(ctx, o)
		t.m.add("write-lat --completion 64 B, p50, ns", lat.P50Ns)
		return err
	}); err != nil {
		return err
	}
	if t.Ceiling != nil {
		r, err := t.Ceiling.Run(ctx, latencySize, ceilingLatSpan, t.Stream)
		if err != nil {
			return err
		}
		t.m.add("ceiling round trip 64 B, p50, ns", r.RTT50Ns)
	}
	tcp, err := NewTCP(ctx, twin, 1, "")
	if err != nil {
		return err
	}
	lat, err := tcp.PingPong(ctx, o, latencySize)
	t.m.add("TCP ping-pong 64 B, p50, ns", lat.P50Ns)
	return err
}

// throughSwitch compares four planes behind the switch, without a limit, with one
// veth pair.
func (t *meter) throughSwitch(ctx context.Context) error {
	return t.withRig(ctx, "sw", lab.Config{Planes: numberPlanes}, transport.Config{}, mib1, func(switched *Rig) error {
		return t.withRig(ctx, "dir", lab.Config{Direct: true}, transport.Config{}, mib1, func(direct *Rig) error {
			for pair := range t.Pairs {
				t.say("switch, pair %d of %d", pair+1, t.Pairs)
				for _, run := range []struct {
					name string
					rig  *Rig
				}{{"through the switch, 4 planes, bit/s", switched}, {"direct, beside it, bit/s", direct}} {
					rate, err := t.rate(ctx, run.rig, mib1)
					if err != nil {
						return err
					}
					t.m.add(run.name, rate)
				}
			}
			return nil
		})
	})
}

// idleConnection watches one connection, with no other device in this process.
func (t *meter) idleConnection(ctx context.Context) error {
	return t.withRig(ctx, "idle", lab.Config{Direct: true}, transport.Config{}, mib1, func(r *Rig) error {
		if _, err := t.rate(ctx, r, mib1); err != nil {
			return err
		}
		return t.idle(ctx, r)
	})
}

// idle watches a connection that has nothing to do. Both ends are in this process.
func (t *meter) idle(ctx context.Context, r *Rig) error {
	t.say("idle connection, %v", t.Idle)
	bytes, err := t.ConnMemory()
	if err != nil {
		return err
	}
	t.m.add("map memory of a connection with 8 paths, bytes", float64(bytes))
	if err := r.Conn.Err(); err != nil {
		return err
	}
	// what earlier parts left is not the connection's
	debug.FreeOSMemory()
	if err := sleep(ctx, time.Second); err != nil {
		return err
	}
	before, err := ownCPU()
	if err != nil {
		return err
	}
	if err := sleep(ctx, t.Idle); err != nil {
		return err
	}
	after, err := ownCPU()
	if err != nil {
		return err
	}
	t.m.add("idle connection, both ends, ns of CPU in 10 s", float64(after-before)*float64(10*time.Second)/float64(t.Idle))
	return nil
}

// ownCPU is the CPU time of this process, kernel and user.
func ownCPU() (time.Duration, error) {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0, fmt.Errorf("getrusage: %w", err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()), nil
}

const limitedSize = 256 << 10

// limited measures on four planes of 2 Gbit/s: without loss, with it, and with a
// plane pulled.
func (t *meter) limited(ctx context.Context) error {
	cfg := lab.Config{Planes: numberPlanes, Rate: planesRate}
	return t.withRig(ctx, "lim", cfg, transport.Config{}, mib1, func(r *Rig) error {
		overhead := wire.EthernetLen + wire.IPv4Len + wire.UDPLen + wire.BTHLen + wire.DataLen + wire.RETHLen
		payload := float64(r.Conn.Info().Payload)
		for pair := range t.Pairs {
			t.m.add("what headers leave of 4 x 2 Gbit/s, bit/s", numberPlanes*planesRate*payload/(payload+float64(overhead)))
			t.say("limited planes, pair %d of %d", pair+1, t.Pairs)
			for _, run := range []struct {
				name string
				loss float64
			}{
				{"4 planes of 2 Gbit/s, bit/s", 0},
				{"the same at 1 % loss, bit/s", 0.01},
				{"the same at 10 % loss, bit/s", 0.1},
			} {
				if err := r.Lab.SetRandom(lab.FaultConfig{Loss: run.loss, Seed: uint64(pair + 1)}); err != nil {
					return err
				}
				rate, err := t.rate(ctx, r, limitedSize)
				if err != nil {
					return fmt.Errorf("%s: %w", run.name, err)
				}
				t.m.add(run.name, rate)
			}
			if err := r.Lab.SetRandom(lab.FaultConfig{}); err != nil {
				return err
			}
			if err := t.pullOnce(ctx, r); err != nil {
				return err
			}
		}
		return nil
	})
}

// pullOnce pulls a plane in mid-transfer.
func (t *meter) pullOnce(ctx context.Context, r *Rig) error {
	var done atomic.Uint64
	tell := &teller{lab: r.Lab, StoryConfig: StoryConfig{Planes: numberPlanes}}
	total := pullBefore + pullDown + numberPullAfter
	p, err := tell.pull(ctx, Ours, numberPlanes-1, done.Load, func(ctx context.Context) error {
		_, err := r.BW(ctx, BWOptions{Size: messageBW, Duration: total, Depth: core.SQDepth, Completed: &done})
		return err
	})
	switch {
	case err != nil:
		return err
	case p.Error != "":
		return fmt.Errorf("plane pulled: the application saw %s", p.Error)
	case !p.Recovered:
		// As bad as can be seen.
		p.Recovery = p.Up - p.Down
	}
	t.m.add("plane down, until 0.9 of the remaining rate, ns", float64(p.Recovery))
	return nil
}

// judged is how a figure is written and what is wanted of it.
type judged struct {
	format  string  // of the number
	unit    string  // what follows it
	divisor float64 // from measured to written, 0 is 1
	want    float64 // as measured
	most    bool    // want is the most, not the least
}

func (j judged) write(v float64) string {
	return fmt.Sprintf(j.format, v/max(j.divisor, 1))
}

func (j judged) wanted() string {
	if j.most {
		return "at most " + j.write(j.want) + j.unit
	}
	return "at least " + j.write(j.want) + j.unit
}

// judge adds the median of values, which are missing for a reason if there
// are none.
func (t *meter) judge(what string, values []float64, missing string, j judged) {
	n := Number{What: what, Wanted: j.wanted()}
	if len(values) == 0 {
		n.Missing = missing
	} else {
		v := median(values)
		n.Measured = j.write(v) + j.unit
		n.OK = v >= j.want && !j.most || v <= j.want && j.most
		n.Spread = j.write(slices.Min(values)) + " to " + j.write(slices.Max(values))
	}
	t.numbers = append(t.numbers, n)
}

// conclude makes the table of what was measured.
func (t *meter) conclude() {
	noCeiling, noIperf := "the ceiling's source is not there", "iperf3 is not installed"
	const (
		bw     = "write-bw 1 MiB, payload 3072, bit/s"
		perCPU = "write-bw 1 MiB, payload 3072, bytes a CPU second"
		lat    = "write-lat --completion 64 B, p50, ns"
		planes = "4 planes of 2 Gbit/s, bit/s"
		left   = "what headers leave of 4 x 2 Gbit/s, bit/s"
	)
	least := func(want float64, unit string) judged { return judged{format: "%.2f", unit: unit, want: want} }
	most := func(want float64, unit string) judged {
		return judged{format: "%.2f", unit: unit, want: want, most: true}
	}
	for _, r := range []struct {
		what, a, b, missing string
		j                   judged
	}{
		{"write-bw 1 MiB, payload 3072, direct", bw, ceilingName(3072, mib1), noCeiling, least(wantCeiling1M, " of the ceiling")},
		{"write-bw 1 MiB, payload 1024, direct", "write-bw 1 MiB, payload 1024, bit/s", ceilingName(1024, mib1), noCeiling, least(wantCeiling1M, " of the ceiling")},
		{"write-bw 16 MiB, payload 3072, direct", "write-bw 16 MiB, payload 3072, bit/s", ceilingName(3072, mib16), noCeiling, least(wantCeiling16M, " of the ceiling")},
		{"write-bw 1 MiB, throughput", bw, "TCP, TSO, the better, bit/s", noIperf, least(wantTCP, " x TCP's")},
		{"write-bw 1 MiB, bytes a CPU second", perCPU, "TCP, TSO, the better, bytes a CPU second", noIperf, least(wantTCPPerCPU, " x TCP's")},
		{"write-bw through the switch, 4 planes, no rate limit", "through the switch, 4 planes, bit/s", "direct, beside it, bit/s", "", least(wantSwitch, " of direct")},
		{"write-lat --completion 64 B, spinning, p50", lat, "ceiling round trip 64 B, p50, ns", noCeiling, most(wantLatCeiling, " x the ceiling's round trip")},
		{"the same", lat, "TCP ping-pong 64 B, p50, ns", "", most(wantLatTCP, " x a TCP ping-pong's")},
		{"4 planes of 2 Gbit/s, 1 connection: goodput", planes, left, "", judged{format: "%.3f", unit: " of what headers leave", want: wantPlanes}},
		{"the same at 1 % loss in both directions", "the same at 1 % loss, bit/s", planes, "", least(wantLoss1, " of loss-free")},
		{"the same at 10 % loss in both directions", "the same at 10 % loss, bit/s", planes, "", least(wantLoss10, " of loss-free")},
	} {
		t.judge(r.what, t.m.ratios(r.a, r.b), r.missing, r.j)
	}
	for _, v := range []struct {
		what, name string
		j          judged
	}{
		{
			"one of 4 planes down: back to 0.9 of the remaining rate, no error", "plane down, until 0.9 of the remaining rate, ns",
			judged{format: "%.0f", unit: " ms", divisor: 1e6, want: float64(wantRecovery), most: true},
		},
		{
			"map memory of a connection with 8 paths", "map memory of a connection with 8 paths, bytes",
			judged{format: "%.1f", unit: " KiB", divisor: 1024, want: wantConnMemory, most: true},
		},
		{
			"idle connection, both ends", "idle connection, both ends, ns of CPU in 10 s",
			judged{format: "%.1f", unit: " ms of CPU in 10 s", divisor: 1e6, want: float64(wantIdleCPU), most: true},
		},
	} {
		t.judge(v.what, t.m[v.name], "", v.j)
	}
}

// WriteMarkdown prints the figures as docs/performance.md has them.
func (n *Numbers) WriteMarkdown(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "Linux %s, %d CPUs, %s; medians of %d interleaved pairs, %v each.\n\n", n.Kernel, n.CPUs,
		n.At.UTC().Format("2006-01-02"), n.Config.Pairs, n.Config.Stream)
	fmt.Fprintf(&b, "| what | measured | least to greatest | wanted | result |\n|---|---|---|---|---|\n")
	for _, v := range n.Numbers {
		measured := v.Measured
		if v.Missing != "" {
			measured = v.Missing
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", v.What, measured, v.Spread, v.Wanted, v.Result())
	}
	fmt.Fprintf(&b, "\n| measured | least | median | greatest |\n|---|---|---|---|\n")
	for _, m := range n.Medians {
		name, unit := m.Name, 1.0
		switch {
		case strings.HasSuffix(name, ", bit/s"):
			name, unit = strings.TrimSuffix(name, "bit/s")+"Gbit/s", 1e9
		case strings.HasSuffix(name, "bytes a CPU second"):
			name, unit = strings.TrimSuffix(name, "bytes a CPU second")+"GB a CPU second", 1e9
		case strings.Contains(name, ", ns"):
			name, unit = strings.Replace(name, ", ns", ", us", 1), 1e3
		case strings.HasSuffix(name, ", bytes"):
			name, unit = strings.TrimSuffix(name, "bytes")+"KiB", 1024
		}
		fmt.Fprintf(&b, "| %s | %.4g | %.4g | %.4g |\n", name, m.Least/unit, m.Value/unit, m.Most/unit)
	}
	if len(n.Notes) > 0 {
		b.WriteString("\n")
	}
	for _, note := range n.Notes {
		fmt.Fprintf(&b, "- %s\n", note)
	}
	_, err := io.WriteString(w, b.String())
	return err
}
