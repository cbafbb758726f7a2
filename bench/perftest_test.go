// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"encoding/json"
	"flag"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite the golden files in testdata")

// golden compares with a file of testdata.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), string(got)); d != "" {
		t.Errorf("%s differs (-want +got):\n%s", file, d)
	}
}

var (
	testLocal  = QPInfo{QPN: 0x100, RKey: 0x301, Addr: 0x7f0000001000, GID: net.IPv4(198, 18, 0, 1)}
	testRemote = QPInfo{QPN: 0x102, PSN: 0xabcdef, RKey: 0x302, Addr: 0x7f0000002000, GID: net.ParseIP("fd00:198:18::2")}
	testBW     = Report{BW: &BWResult{Size: 65536, Iterations: 5000, Elapsed: 400 * time.Millisecond, PeakBps: 1 << 30}}
	testSlow   = Report{BW: &BWResult{Size: 2, Iterations: 1000, Elapsed: time.Second}}
	testLat    = Report{Lat: &LatResult{
		Size: 2, Iterations: 1000, Elapsed: 12 * time.Millisecond, MinNs: 5000, MaxNs: 123456, P50Ns: 6000,
		AvgNs: 6123.4, StdevNs: 321, P99Ns: 7890, P999Ns: 99999,
	}}
)

func perfCases() map[string]struct {
	p Perftest
	r Report
} {
	bw := Params{Test: WriteBWTest, Size: 65536, Iterations: 5000, QPs: 1, Depth: 128, Warmup: DefaultWarmup}
	lat := Params{Test: WriteLatTest, Size: 2, Iterations: 1000, QPs: 1, Depth: 128, Warmup: DefaultWarmup}
	both, seconds, completion := bw, lat, lat
	both.Bidirectional = true
	seconds.Iterations, seconds.Duration = 0, 2*time.Second
	completion.Completion = true
	mk := func(p Params, gbits bool) Perftest {
		return Perftest{Params: p, Gbits: gbits, Devices: []string{"p0", "p1"}, Mtu: 3072, Paths: 8, Checksum: true}
	}
	return map[string]struct {
		p Perftest
		r Report
	}{
		"bw":             {mk(bw, false), testBW},
		"bw-gbits":       {mk(bw, true), testBW},
		"bw-gbits-slow":  {mk(bw, true), testSlow},
		"bw-both":        {mk(both, false), testBW},
		"lat":            {mk(lat, false), testLat},
		"lat-completion": {mk(completion, false), testLat},
		"lat-seconds":    {mk(seconds, false), testLat},
	}
}

func TestPerfPrintsWhatPerftestPrints(t *testing.T) {
	for name, c := range perfCases() {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			c.p.Out = &out
			c.p.Waiting()
			c.p.Preamble([]QPInfo{testLocal}, []QPInfo{testRemote})
			c.p.Row(c.r)
			c.p.End()
			golden(t, filepath.Join("perftest", name+".txt"), out.Bytes())
		})
	}
}

func TestPerfJSONHasPerftestsKeys(t *testing.T) {
	for name, c := range perfCases() {
		t.Run(name, func(t *testing.T) {
			b, err := c.p.JSON(c.r)
			if err != nil {
				t.Fatal(err)
			}
			if !json.Valid(b) {
				t.Errorf("not JSON: %s", b)
			}
			golden(t, filepath.Join("perftest", name+".json"), b)
		})
	}
}

// The lines that scripts look for, written out once more rather than taken from
// the code.
func TestPerfHeadersAreThoseThatScriptsLookFor(t *testing.T) {
	for _, tc := range []struct {
		name string
		p    Perftest
		want string
	}{
		{"MiB", Perftest{Params: Params{Test: WriteBWTest}}, " #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]"},
		{"Gb", Perftest{Params: Params{Test: WriteBWTest}, Gbits: true}, " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]"},
		{"latency", Perftest{Params: Params{Test: WriteLatTest}}, " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] "},
		{"latency over time", Perftest{Params: Params{Test: WriteLatTest, Duration: 1}}, " #bytes        #iterations       t_avg[usec]    tps average"},
	} {
		if got := tc.p.header(); got != tc.want {
			t.Errorf("%s: header %q, want %q", tc.name, got, tc.want)
		}
	}
	if len(rule) != 87 || strings.Trim(rule, "-") != "" {
		t.Errorf("rule %q, want 87 dashes", rule)
	}
}
