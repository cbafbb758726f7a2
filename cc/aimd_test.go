// SPDX-License-Identifier: Apache-2.0

package cc

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"
)

const ms = int64(1_000_000)

// seeds of every simulation; a failure names its seed.
var seeds = []uint64{1, 2}

// TestSteadyStateFillsPlanes: a connection of 8 paths over 4 planes of 2 Gbit/s
// uses nearly all of them and overflows no queue, with and without the help of
// the brake between ticks.
func TestSteadyStateFillsPlanes(t *testing.T) {
	for _, tc := range []struct {
		name    string
		conns   int
		jitter  int64
		brake   bool
		atLeast float64
	}{
		{"one connection, punctual ticks", 1, 0, true, 0.98},
		{"one connection, ticks 1 to 3 ms apart", 1, 2 * ms, true, 0.98},
		{"two connections", 2, 2 * ms, true, 0.98},
		{"one connection without the brake", 1, 2 * ms, false, 0.95},
		{"two connections without the brake", 2, 2 * ms, false, 0.95},
	} {
		for _, seed := range seeds {
			t.Run(fmt.Sprintf("%s/seed %d", tc.name, seed), func(t *testing.T) {
				s := newSim(seed, 4, 2*gbit)
				s.jitter, s.brake = tc.jitter, tc.brake
				for range tc.conns {
					s.connect(8, 0)
				}
				s.run(100 * ms)
				used, dropped := s.usage(400 * ms)
				if used < tc.atLeast {
					t.Errorf("used %.3f of the planes, want %.2f", used, tc.atLeast)
				}
				if dropped > 0.0001 {
					t.Errorf("dropped %.5f of the packets, want at most 0.0001", dropped)
				}
			})
		}
	}
}

func TestStartFillsPlanesWithoutAFlood(t *testing.T) {
	for _, seed := range seeds {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			s := newSim(seed, 4, 2*gbit)
			s.connect(8, 0)
			s.connect(8, 0)
			used, dropped := s.usage(100 * ms)
			if used < 0.9 {
				t.Errorf("first 100 ms used %.3f of the planes, want 0.9", used)
			}
			if dropped > 0.01 {
				t.Errorf("first 100 ms dropped %.4f of the packets, want at most 0.01", dropped)
			}
		})
	}
}

func TestLateConnectionGetsItsShare(t *testing.T) {
	for _, tc := range []struct {
		paths   int
		atLeast float64
	}{
		{8, 0.97},
		{4, 0.9}, // the brake takes less from slow paths: see docs/adr/0002
	} {
		for _, seed := range seeds {
			t.Run(fmt.Sprintf("8 and %d paths/seed %d", tc.paths, seed), func(t *testing.T) {
				s := newSim(seed, 4, 2*gbit)
				s.connect(8, 0)
				s.connect(tc.paths, 300*ms)
				s.run(600 * ms)
				shares := s.shares(200 * ms)
				if j := jain(shares); j < tc.atLeast {
					t.Errorf("300 ms after the second began they got %.0f B/s, Jain %.3f, want %.2f", shares, j, tc.atLeast)
				}
			})
		}
	}
}

// TestRandomLossDoesNotCut: losses without marks cost what they take, no more.
func TestRandomLossDoesNotCut(t *testing.T) {
	for _, tc := range []struct{ loss, atLeast float64 }{{0.01, 0.97}, {0.1, 0.9}} {
		for _, seed := range seeds {
			t.Run(fmt.Sprintf("loss %v/seed %d", tc.loss, seed), func(t *testing.T) {
				s := newSim(seed, 4, 2*gbit)
				s.connect(8, 0)
				s.run(100 * ms)
				clean := s.shares(200 * ms)[0]
				s.loss = tc.loss
				s.run(50 * ms)
				if lossy := s.shares(200 * ms)[0]; lossy < tc.atLeast*clean {
					t.Errorf("delivered %.3f of the loss-free rate, want %.2f", lossy/clean, tc.atLeast)
				}
			})
		}
	}
}

func TestLossyStartIsAsFast(t *testing.T) {
	s := newSim(5, 4, 2*gbit)
	s.loss = 0.1
	s.connect(8, 0)
	s.run(50 * ms)
	if used, _ := s.usage(100 * ms); used < 0.9 {
		t.Errorf("with 10 %% loss from the start used %.3f of the planes after 50 ms, want 0.9", used)
	}
}

func TestPlaneDownLeavesTheOthersFull(t *testing.T) {
	for _, seed := range seeds {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			s := newSim(seed, 4, 2*gbit)
			s.connect(8, 0)
			s.run(200 * ms)
			s.planes[2].down = true
			s.run(20 * ms)
			if used, _ := s.usage(30 * ms); used < 0.95 {
				t.Errorf("20 to 50 ms after a plane went down used %.3f of the rest, want 0.95", used)
			}
			s.planes[2].down = false
			s.run(50 * ms)
			if used, _ := s.usage(50 * ms); used < 0.95 {
				t.Errorf("50 to 100 ms after it came back used %.3f of all, want 0.95", used)
			}
		})
	}
}

func TestRateStepIsFollowed(t *testing.T) {
	for _, tc := range []struct {
		name       string
		rateBps    float64
		settle     int64
		mostDrops  float64
		usedInTime float64
	}{
		{"planes twice as fast", 4 * gbit, 80 * ms, 0, 0.9},
		{"planes at a quarter", gbit / 2, 60 * ms, 0.25, 0.9},
	} {
		for _, seed := range seeds {
			t.Run(fmt.Sprintf("%s/seed %d", tc.name, seed), func(t *testing.T) {
				s := newSim(seed, 4, 2*gbit)
				s.connect(8, 0)
				s.run(200 * ms)
				for _, pl := range s.planes {
					pl.rateBps = tc.rateBps
				}
				_, dropped := s.usage(tc.settle)
				if dropped > tc.mostDrops {
					t.Errorf("dropped %.3f while settling, want at most %.2f", dropped, tc.mostDrops)
				}
				used, dropped := s.usage(100 * ms)
				if used < tc.usedInTime || dropped > 0.0001 {
					t.Errorf("after %d ms used %.3f and dropped %.5f, want %.2f and at most 0.0001", tc.settle/ms, used, dropped, tc.usedInTime)
				}
			})
		}
	}
}

// TestUnlimitedNetworkIsNotPaced: where the CPU is the limit and no mark was seen,
// pacing is given up, and windows do not hold the sender back either.
func TestUnlimitedNetworkIsNotPaced(t *testing.T) {
	s := newSim(1, 1, 1000*gbit)
	s.planes[0].markBytes, s.planes[0].depthBytes = 1e12, 1e12
	c := s.connect(8, 0)
	s.run(20 * ms)
	if got := s.shares(50 * ms)[0]; got < 0.98*c.cpuBps {
		t.Errorf("delivered %.1f Gbit/s, want 0.98 of the CPU's %.1f", got/gbit, c.cpuBps/gbit)
	}
	for i, p := range c.paths {
		if p.rate != 0 {
			t.Errorf("path %d is paced at %.0f B/s, want not paced", i, p.rate)
		}
	}
}

func TestApplicationLimitDoesNotRaiseTheRate(t *testing.T) {
	s := newSim(1, 4, 2*gbit)
	c := s.connect(8, 0)
	c.appBps = 0.5 * gbit
	s.run(300 * ms)
	for i, p := range c.paths {
		if p.rate == 0 || p.rate > gbit {
			t.Errorf("path %d has rate %.0f B/s, want the initial %d: it never used more than a sixteenth", i, p.rate, gbit)
		}
	}
}

// feed ticks a controller with the same sample on every path.
func feed(c Controller, n int, nowNs *int64, ps PathSample) []PathRate {
	*nowNs += ms
	s := Sample{PacketBytes: simPacketBytes}
	for range n {
		s.Paths = append(s.Paths, ps)
	}
	return c.Tick(*nowNs, s)
}

// paced brings a controller of one path past slow start.
func paced(nowNs *int64) *AIMD {
	c := NewAIMD(AIMDConfig{})
	c.Start(1)
	full := PathSample{Usable: true, Pkts: 40, DeliveredBytes: 40 * simPacketBytes, SrttNs: 10_000}
	feed(c, 1, nowNs, full)
	full.CE = 4
	feed(c, 1, nowNs, full)
	return c
}

func TestWhatCuts(t *testing.T) {
	full := PathSample{Usable: true, Pkts: 40, DeliveredBytes: 40 * simPacketBytes, SrttNs: 10_000}
	with := func(change func(*PathSample)) PathSample {
		ps := full
		change(&ps)
		return ps
	}
	for _, tc := range []struct {
		name   string
		sample PathSample
		least  float64 // of the rate before
		most   float64
	}{
		{"an isolated gap does not", with(func(p *PathSample) { p.Lost = 1 }), 1, 1.1},
		{"a tenth lost does not", with(func(p *PathSample) { p.Lost = 4 }), 1, 1.1},
		{"most of a few lost does not", with(func(p *PathSample) { p.Pkts, p.Lost = 1, 5 }), 1, 1.1},
		{"most of many lost does, to half", with(func(p *PathSample) { p.Pkts, p.Lost = 10, 30 }), 0.49, 0.51},
		{"a timeout does, to half", with(func(p *PathSample) { p.Pkts, p.Timeouts = 0, 1 }), 0.49, 0.51},
		{"two timeouts in one period do once", with(func(p *PathSample) { p.Timeouts = 2 }), 0.49, 0.51},
		{"few marks do a little", with(func(p *PathSample) { p.CE = 2 }), 0.9, 0.999},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var now int64
			c := paced(&now)
			before := float64(feed(c, 1, &now, full)[0].RateBps)
			after := float64(feed(c, 1, &now, tc.sample)[0].RateBps)
			if r := after / before; r < tc.least || r > tc.most {
				t.Errorf("rate went from %.0f to %.0f B/s, factor %.3f, want %.3f to %.3f", before, after, r, tc.least, tc.most)
			}
		})
	}
}

func TestPersistentMarksCutDeeperThanFew(t *testing.T) {
	cut := func(ce uint32) float64 {
		var now int64
		c := paced(&now)
		before := c.paths[0].rate
		for range 30 {
			ps := PathSample{Usable: true, Pkts: 40, CE: ce, DeliveredBytes: 40 * simPacketBytes, SrttNs: 10_000}
			feed(c, 1, &now, ps)
		}
		return c.paths[0].rate / before
	}
	few, all := cut(2), cut(40)
	if all > few/2 {
		t.Errorf("all marked leaves %.3f of the rate, one in 20 leaves %.3f: want at most half of that", all, few)
	}
}

func TestOneRoundTripOneCut(t *testing.T) {
	var now int64
	c := paced(&now)
	before := c.paths[0].rate
	// A round trip of 5 ms: five ticks are one period.
	for range 5 {
		ps := PathSample{Usable: true, Pkts: 40, Timeouts: 1, DeliveredBytes: 40 * simPacketBytes, SrttNs: 5_000_000}
		feed(c, 1, &now, ps)
	}
	if got := c.paths[0].rate / before; got < 0.49 || got > 0.51 {
		t.Errorf("timeouts in all ticks of one round trip left %.3f of the rate, want 0.5", got)
	}
}

func TestIncreaseIsSharedByPaths(t *testing.T) {
	grow := func(n int) float64 {
		var now int64
		c := NewAIMD(AIMDConfig{})
		c.Start(n)
		ps := PathSample{Usable: true, Pkts: 40, DeliveredBytes: 40 * simPacketBytes, SrttNs: 10_000}
		feed(c, n, &now, ps)
		ps.CE = 4
		feed(c, n, &now, ps)
		before := c.paths[0].rate
		ps.CE = 0
		feed(c, n, &now, ps)
		return (c.paths[0].rate - before) * float64(n)
	}
	if one, eight := grow(1), grow(8); eight > 1.2*one || eight < 0.8*one {
		t.Errorf("8 paths together grow by %.0f B/s a tick, one path alone by %.0f, want about the same", eight, one)
	}
}

func TestComingBackTakesHalfTheOldRate(t *testing.T) {
	var now int64
	c := paced(&now)
	full := PathSample{Usable: true, Pkts: 40, DeliveredBytes: 40 * simPacketBytes, SrttNs: 10_000}
	before := float64(feed(c, 1, &now, full)[0].RateBps)
	feed(c, 1, &now, PathSample{Usable: true, Timeouts: 1, SrttNs: 10_000})
	for range 50 {
		feed(c, 1, &now, PathSample{SrttNs: 10_000})
	}
	got := float64(feed(c, 1, &now, PathSample{Usable: true, SrttNs: 10_000})[0].RateBps)
	if r := got / before; r < 0.49 || r > 0.51 {
		t.Errorf("came back with %.3f of the old rate, want 0.5", r)
	}
}

func TestResultsStayInBounds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 32).Draw(t, "paths")
		c := NewAIMD(AIMDConfig{})
		check := func(out []PathRate) {
			if len(out) != n {
				t.Fatalf("%d results for %d paths", len(out), n)
			}
			for i, r := range out {
				if r.Window < MinWindow || r.Window > MaxWindow {
					t.Fatalf("path %d: window %d, want %d to %d", i, r.Window, MinWindow, MaxWindow)
				}
				// Unpaced, or between the drained least rate and what is absurd.
				if r.RateBps != 0 && (r.RateBps < 500_000 || r.RateBps > 1e16) {
					t.Fatalf("path %d: rate %d B/s out of bounds", i, r.RateBps)
				}
			}
		}
		check(c.Start(n))
		now := int64(0)
		for range rapid.IntRange(1, 40).Draw(t, "ticks") {
			now += rapid.Int64Range(0, 20*ms).Draw(t, "dtNs")
			s := Sample{PacketBytes: rapid.IntRange(0, 4000).Draw(t, "packet")}
			for range n {
				pkts := rapid.Uint32Range(0, 5000).Draw(t, "pkts")
				s.Paths = append(s.Paths, PathSample{
					Usable:         rapid.Bool().Draw(t, "usable"),
					Pkts:           pkts,
					CE:             rapid.Uint32Range(0, 6000).Draw(t, "ce"),
					Lost:           rapid.Uint32Range(0, 300).Draw(t, "lost"),
					Timeouts:       rapid.Uint32Range(0, 2).Draw(t, "timeouts"),
					DeliveredBytes: uint64(pkts) * simPacketBytes,
					SrttNs:         rapid.Uint32().Draw(t, "srtt"),
				})
			}
			check(c.Tick(now, s))
		}
	})
}
