// SPDX-License-Identifier: Apache-2.0

package cc

import (
	"math"
	"testing"

	"pgregory.net/rapid"
)

func TestPaceNsPerKiB(t *testing.T) {
	for _, tc := range []struct {
		name    string
		rateBps uint64
		want    uint32
	}{
		{"zero is not paced", 0, 0},
		{"2 Gbit/s is exact", 250_000_000, 4096},
		{"100 Gbit/s rounds to the nearest", 12_500_000_000, 82},
		{"faster than a nanosecond a KiB is not paced", 3_000_000_000_000, 0},
		{"slower than the field holds is the slowest", 1, math.MaxUint32},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := PaceNsPerKiB(tc.rateBps); got != tc.want {
				t.Errorf("PaceNsPerKiB(%d) = %d, want %d", tc.rateBps, got, tc.want)
			}
		})
	}
}

func TestPaceRoundTripStaysWithinRounding(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rate := rapid.Uint64Range(1000, 100_000_000_000).Draw(t, "rateBps")
		pace := PaceNsPerKiB(rate)
		back := RateBps(pace)
		// Half a nanosecond of `pace`, and rounding to a whole byte.
		limit := float64(rate)*0.5/float64(pace)*1.1 + 1
		if diff := math.Abs(float64(back) - float64(rate)); diff > limit {
			t.Fatalf("%d B/s -> %d ns/KiB -> %d B/s: off by %.0f, want at most %.0f", rate, pace, back, diff, limit)
		}
	})
	if got := RateBps(0); got != 0 {
		t.Errorf("RateBps(0) = %d, want 0", got)
	}
}
