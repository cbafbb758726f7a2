// SPDX-License-Identifier: Apache-2.0

package cc

import (
	"testing"
	"time"
)

// ringSample is a millisecond of one path that delivered bps, of whose packets the own ring dropped some.
func ringSample(bps uint64, ringLost, lost uint32) Sample {
	bytes := bps / 1000
	return Sample{PacketBytes: 3200, Paths: []PathSample{{
		Usable: true, Pkts: uint32(bytes / 3200), DeliveredBytes: bytes, RingLost: ringLost, Lost: lost, SrttNs: 10_000, MinRttNs: 10_000,
	}}}
}

func TestDropsOfTheOwnRingDoNotCutBelowWhatItLetsOut(t *testing.T) {
	const delivered = 500_000_000
	a := NewAIMD(AIMDConfig{InitialBps: 800_000_000})
	now := int64(time.Second)
	a.Start(1)
	a.Tick(now, ringSample(delivered, 0, 0))
	for range 50 {
		now += ms
		r := a.Tick(now, ringSample(delivered, 4000, 0))[0] // far more than what counts as heavy loss
		if r.RateBps != 0 && r.RateBps < delivered*99/100 {
			t.Fatalf("rate %d B/s, want no less than the %d that the ring lets out", r.RateBps, delivered)
		}
	}
}

func TestRateAboveWhatTheOwnRingLetsOutFallsToThat(t *testing.T) {
	const delivered = 500_000_000
	a := NewAIMD(AIMDConfig{InitialBps: 1_600_000_000})
	now := int64(time.Second)
	a.Start(1)
	a.Tick(now, ringSample(delivered, 0, 0))
	var rate uint64
	for range 20 {
		now += ms
		rate = a.Tick(now, ringSample(delivered, 100, 0))[0].RateBps
	}
	if rate < delivered*99/100 || rate > delivered*101/100 {
		t.Errorf("rate %d B/s, want the %d that the ring lets out", rate, delivered)
	}
}

func TestSlowStartGoesOnAfterADropOfTheOwnRing(t *testing.T) {
	const rate = 500_000_000
	a := NewAIMD(AIMDConfig{InitialBps: rate})
	now := int64(time.Second)
	a.Start(1)
	a.Tick(now, ringSample(rate, 0, 0))
	a.Tick(now+ms, ringSample(rate, 16, 0))
	if r := a.Tick(now+2*ms, ringSample(rate, 0, 0))[0]; r.RateBps < 2*rate*99/100 {
		t.Errorf("rate %d B/s in the first period without drops, want double, %d", r.RateBps, 2*rate)
	}
}
