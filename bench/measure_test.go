// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"
	"time"
)

// slowPeak is the definition: perftest's two loops.
func slowPeak(posted, completed []int64) float64 {
	best := 0.0
	for i := range posted {
		for j := i; j < len(completed); j++ {
			best = max(best, float64(j-i+1)/float64(max(completed[j]-posted[i], 1))*1e9)
		}
	}
	return best
}

func TestPeakIsThatOfAllPairs(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 1))
		n := 1 + r.IntN(60)
		posted, completed := make([]int64, n), make([]int64, n)
		now := int64(0)
		for i := range posted {
			now += r.Int64N(1000)
			posted[i] = now
		}
		now = 0
		for i := range completed {
			now = max(now+r.Int64N(1500), posted[i]+1)
			completed[i] = now
		}
		got, want := peakRate(posted, completed), slowPeak(posted, completed)
		if math.Abs(got-want) > want*1e-5 {
			t.Errorf("seed %d: peak of %d messages is %v, want %v", seed, n, got, want)
		}
	}
}

func TestPeakOfNothingIsZero(t *testing.T) {
	if got := peakRate(nil, nil); got != 0 {
		t.Errorf("peak %v, want 0", got)
	}
}

func TestLatencySumsUpWhatWasRecorded(t *testing.T) {
	l := NewLatency()
	for ns := int64(1); ns <= 1000; ns++ {
		l.Record(ns * 1000)
	}
	r := l.Result(64, time.Second)
	near := func(what string, got, want, off float64) {
		if math.Abs(got-want) > off {
			t.Errorf("%s is %v, want %v within %v", what, got, want, off)
		}
	}
	near("least", r.MinNs, 1000, 0)
	near("greatest", r.MaxNs, 1e6, 0)
	near("mean", r.AvgNs, 500500, 0.5)
	near("deviation", r.StdevNs, 288675, 1)
	near("median", r.P50Ns, 500000, 1000)
	near("99th percentile", r.P99Ns, 990000, 2000)
	near("99.9th percentile", r.P999Ns, 999000, 2000)
	if r.Iterations != 1000 || r.Size != 64 || r.Tps() != 1000 {
		t.Errorf("%+v, want 1000 of 64 bytes in a second", r)
	}
}

func TestLatencyBeyondTheHistogramIsItsGreatest(t *testing.T) {
	l := NewLatency()
	l.Record(math.MaxInt64)
	if r := l.Result(1, time.Second); r.P50Ns < float64(100*time.Second) || r.Iterations != 1 {
		t.Errorf("%+v, want one of at least 100 s", r)
	}
}

func TestPingPongStampsEveryPacket(t *testing.T) {
	for _, tc := range []struct {
		size    uint64
		payload int
		want    []int
	}{
		{1, 1024, []int{0}},
		{1024, 1024, []int{1023}},
		{1025, 1024, []int{1023, 1024}},
		{3000, 1024, []int{1023, 2047, 2999}},
	} {
		p := &pingPong{size: tc.size, payload: tc.payload}
		var got []int
		p.stamps(func(i int) bool { got = append(got, i); return true })
		if len(got) != len(tc.want) {
			t.Errorf("size %d: stamps %v, want %v", tc.size, got, tc.want)
			continue
		}
		for i := range got {
			if got[i] != tc.want[i] {
				t.Errorf("size %d: stamps %v, want %v", tc.size, got, tc.want)
			}
		}
	}
}

func TestPingPongTurnsAreNeverWhatMemoryHeldBefore(t *testing.T) {
	p := &pingPong{}
	last := byte(0)
	for range 1000 {
		p.next()
		if p.turn == 0 || p.turn == last {
			t.Fatalf("turn %d after %d, want another one that is not 0", p.turn, last)
		}
		last = p.turn
	}
}

func TestLoadByteReadsEachByteOfAWord(t *testing.T) {
	b := []byte{1, 2, 3, 4, 5, 6, 7, 8}
	for i, want := range b {
		if got := loadByte(b, i); got != want {
			t.Errorf("byte %d is %d, want %d", i, got, want)
		}
	}
}

func TestSpinEndsWithItsContextAndItsConnection(t *testing.T) {
	never := func() bool { return false }
	ctx, cancel := context.WithCancelCause(t.Context())
	reason := errors.New("told to")
	cancel(reason)
	if err := spin(ctx, nil, never); !errors.Is(err, reason) {
		t.Errorf("error %v, want the context's", err)
	}
	over := make(chan struct{})
	close(over)
	if err := spin(t.Context(), over, never); !errors.Is(err, errOver) {
		t.Errorf("error %v, want %v", err, errOver)
	}
}

// steps is a series with a rate, in bytes a 5 ms step, for each number of steps.
func steps(parts ...[2]int) Series {
	s := Series{{}}
	for _, p := range parts {
		for range p[0] {
			last := s[len(s)-1]
			s = append(s, Point{At: last.At + sampleEvery, Bytes: last.Bytes + uint64(p[1])})
		}
	}
	return s
}

func TestRateIsThatOfTheInterval(t *testing.T) {
	s := steps([2]int{100, 1000}, [2]int{100, 0})
	for _, tc := range []struct {
		from, to time.Duration
		want     float64
	}{
		{0, 500 * time.Millisecond, 1000 * 200 * 8},
		{0, time.Second, 1000 * 100 * 8},
		{500 * time.Millisecond, time.Second, 0},
		{time.Second, time.Second, 0},
	} {
		if got := s.Rate(tc.from, tc.to); math.Abs(got-tc.want) > 1 {
			t.Errorf("rate from %v to %v is %v, want %v", tc.from, tc.to, got, tc.want)
		}
	}
	if got := len(s.Rates(100 * time.Millisecond)); got != 10 {
		t.Errorf("%d steps of 100 ms in a second, want 10", got)
	}
}

func TestRecoveryIsWhenTheRateIsBackToStay(t *testing.T) {
	const full, rest = 4000, 3000 // bytes a step
	down := 500 * time.Millisecond
	want := 0.9 * rest * 8 * 200.0
	for _, tc := range []struct {
		name string
		s    Series
		d    time.Duration
		ok   bool
	}{
		{"at once", steps([2]int{100, full}, [2]int{100, rest}), 10 * time.Millisecond, true},
		{"after 40 ms of nothing", steps([2]int{100, full}, [2]int{8, 0}, [2]int{100, rest}), 50 * time.Millisecond, true},
		{"a burst is no recovery", steps([2]int{100, full}, [2]int{4, 0}, [2]int{2, full}, [2]int{10, 0}, [2]int{100, rest}), 90 * time.Millisecond, true},
		{"never", steps([2]int{100, full}, [2]int{100, rest / 2}), 0, false},
		{"nothing measured", nil, 0, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d, ok := tc.s.Recovery(down, want)
			if ok != tc.ok || d != tc.d {
				t.Errorf("%v, %v, want %v, %v", d, ok, tc.d, tc.ok)
			}
		})
	}
}

func TestWatchSamplesUntilItIsStopped(t *testing.T) {
	stop := make(chan struct{})
	var n uint64
	s := Watch(func() uint64 { n += 10; return n }, stop, func(s Series) {
		if len(s) == 4 {
			close(stop)
		}
	})
	for i := range 4 {
		if want := uint64(10 * i); s[i].Bytes != want {
			t.Errorf("sample %d has %d bytes, want %d", i, s[i].Bytes, want)
		}
	}
}

func TestBusyTimeLeavesIdleAndIowaitOut(t *testing.T) {
	got, err := parseBusy("cpu  1 2 3 1000 2000 4 5 6 7 8\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
	if want := 21 * tick; err != nil || got != want {
		t.Errorf("busy %v, error %v, want %v", got, err, want)
	}
	for _, bad := range []string{"", "cpu", "intr 1 2 3 4 5 6 7 8", "cpu 1 2 x 4 5 6 7 8"} {
		if _, err := parseBusy(bad); err == nil {
			t.Errorf("%q: no error", bad)
		}
	}
}

func TestIperfsReportGivesTheReceiversRate(t *testing.T) {
	bps, n, err := parseIperf([]byte(`{"end":{"sum_sent":{"bits_per_second":9},"sum_received":{"bits_per_second":8e9,"bytes":1000000000}}}`))
	if err != nil || bps != 8e9 || n != 1e9 {
		t.Errorf("%v bit/s, %d bytes, error %v", bps, n, err)
	}
	for in, want := range map[string]string{
		`{"error":"unable to connect"}`: "unable to connect",
		`{"end":{}}`:                    "no bytes",
		`nonsense`:                      "report",
	} {
		if _, _, err := parseIperf([]byte(in)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want one with %q", in, err, want)
		}
	}
}

func TestMedianIsTheMiddle(t *testing.T) {
	for _, tc := range []struct {
		values []float64
		want   float64
	}{{nil, 0}, {[]float64{3}, 3}, {[]float64{9, 1, 2}, 2}, {[]float64{1, 2, 3, 100}, 2.5}} {
		if got := median(tc.values); got != tc.want {
			t.Errorf("median of %v is %v, want %v", tc.values, got, tc.want)
		}
	}
}

func TestRatiosComparePairByPair(t *testing.T) {
	m := measurements{"a": {2, 4, 6}, "b": {1, 4, 3}}
	got := m.ratios("a", "b")
	if len(got) != 3 || got[0] != 2 || got[1] != 1 || got[2] != 2 {
		t.Errorf("ratios %v, want 2, 1, 2", got)
	}
}

func TestNumbersAreJudged(t *testing.T) {
	meter := &meter{m: measurements{
		"write-bw 1 MiB, payload 3072, bit/s":             {34e9, 36e9, 40e9},
		ceilingName(3072, mib1):                           {100e9, 100e9, 100e9},
		"write-bw 16 MiB, payload 3072, bit/s":            {10e9, 10e9, 10e9},
		ceilingName(3072, mib16):                          {20e9, 20e9, 20e9},
		"through the switch, 4 planes, bit/s":             {6e9, 5e9, 4e9},
		"direct, beside it, bit/s":                        {10e9, 10e9, 10e9},
		"write-lat --completion 64 B, p50, ns":            {2000, 2500, 3000},
		"ceiling round trip 64 B, p50, ns":                {1000, 1000, 1000},
		"TCP ping-pong 64 B, p50, ns":                     {20000, 20000, 20000},
		"4 planes of 2 Gbit/s, bit/s":                     {7e9, 7e9, 7e9},
		"what headers leave of 4 x 2 Gbit/s, bit/s":       {7.5e9, 7.5e9, 7.5e9},
		"the same at 1 % loss, bit/s":                     {6.9e9, 6.9e9, 6.9e9},
		"the same at 10 % loss, bit/s":                    {5e9, 5e9, 5e9},
		"plane down, until 0.9 of the remaining rate, ns": {10e6, 20e6, 500e6},
		"map memory of a connection with 8 paths, bytes":  {65536},
		"idle connection, both ends, ns of CPU in 10 s":   {11e6},
	}}
	meter.conclude()
	n := &Numbers{
		Config: NumbersConfig{Pairs: 3, Stream: time.Second}, At: time.Unix(0, 0), Kernel: "6.1.0", CPUs: 2,
		Numbers: meter.numbers, Notes: []string{"a note"},
		Medians: []Median{{"write-bw, bit/s", 1e9, 2e9, 3e9}, {"latency, p50, ns", 1000, 2000, 3000}},
	}
	var out bytes.Buffer
	if err := n.WriteMarkdown(&out); err != nil {
		t.Fatal(err)
	}
	golden(t, "numbers.md", out.Bytes())
}

func testStory() *Story {
	lat := LatResult{Size: messageLat, Iterations: 10, P50Ns: 12e3, P99Ns: 3.4e6}
	shares := []float64{0.25, 0.25, 0.26, 0.24}
	return &Story{
		At: time.Unix(1e9, 0), Planes: 4, RateBps: 2e9, MTU: 3400, Payload: 3072, Paths: 8, Checksum: true,
		Rows: []Row{
			{Transport: Ours, Loss: 0, GoodputBps: 7.31e9, Latency: lat, Sent: 1000, Shares: shares},
			{Transport: TCPs, Loss: 0, GoodputBps: 6.5e9, Latency: lat, Sent: 1000, Again: 3, Shares: shares},
			{Transport: Ours, Loss: 0.1, GoodputBps: 5.5e9, Latency: lat, Sent: 1000, Again: 100, Shares: shares},
			{Transport: TCPs, Loss: 0.1, Latency: LatResult{}},
		},
		Pulls: []Pull{
			{Transport: Ours, Down: 500 * time.Millisecond, Up: time.Second, Series: steps([2]int{100, 4000}, [2]int{100, 3000}), Recovered: true, Recovery: 12 * time.Millisecond},
			{Transport: TCPs, Series: nil, Error: `broken <pipe> & "more"`},
		},
		Direct: []Row{{Transport: Ours, GoodputBps: 9.9e9, Latency: lat}, {Transport: TCPs, GoodputBps: 8.8e9, Latency: lat}},
	}
}

func report(t *testing.T, s *Story) string {
	t.Helper()
	var out strings.Builder
	if err := WriteReport(&out, s); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func TestReportNeedsNothingFromAnywhere(t *testing.T) {
	page := report(t, testStory())
	for _, what := range []string{`(?i)https?:`, `(?i)[a-z]+://`, `(?i)\bsrc\s*=`, `(?i)\bhref\s*=`, `(?i)@import`, `(?i)url\(`, `(?i)<script`, `(?i)<link`} {
		if found := regexp.MustCompile(what).FindString(page); found != "" {
			t.Errorf("the report has %q, want nothing that loads something", found)
		}
	}
}

func TestReportSaysWhatWasMeasured(t *testing.T) {
	page := report(t, testStory())
	for _, want := range []string{
		"7.31", "6.50", "5.50", "12.0", "3400", "after 12 ms", "plane down", "no TSO", "TSO on", "10 % loss", "plane 3: 24.0 %",
		"broken &lt;pipe&gt; &amp;",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the report lacks %q", want)
		}
	}
}

func TestReportsPlotsAreWellFormed(t *testing.T) {
	for name, s := range map[string]*Story{"full": testStory(), "empty": {}} {
		page := report(t, s)
		if strings.Contains(page, "NaN") || strings.Contains(page, "Inf") {
			t.Errorf("%s: the report has a number that is none", name)
		}
		plots := regexp.MustCompile(`(?s)<svg.*?</svg>`).FindAllString(page, -1)
		if want := 3 + len(s.Pulls); len(plots) != want {
			t.Errorf("%s: %d plots, want %d", name, len(plots), want)
		}
		for _, svg := range plots {
			d := xml.NewDecoder(strings.NewReader(svg))
			for {
				if _, err := d.Token(); err == io.EOF {
					break
				} else if err != nil {
					t.Fatalf("%s: %v in %s", name, err, svg)
				}
			}
		}
	}
}
