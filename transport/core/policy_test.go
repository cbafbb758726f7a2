// SPDX-License-Identifier: Apache-2.0

package core

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/metaroce/metaroce/cc"
)

const (
	us  = int64(time.Microsecond)
	ms  = int64(time.Millisecond)
	sec = int64(time.Second)
)

// rig is a policy with an engine that does what it is told: a path that is up
// answers each probe, and with it everything that was under way on the path.
type rig struct {
	t      testing.TB
	p      *Policy
	s      Snapshot
	nowNs  int64
	up     []bool
	pump   bool   // sends what is ordered, and runs
	full   uint32 // mask of paths: the probe that is ordered has a full-size one behind it
	narrow bool   // full-size packets do not get through
	stuck  bool   // what answers are probes: psn_cum stands still
	probes []int
	ticks  int
	seen   Actions // everything since the last forget
	fails  int
}

func newRig(t testing.TB, paths int) *rig {
	r := &rig{t: t, pump: true, nowNs: 1000 * sec, probes: make([]int, paths)}
	params := ConnParams{Payload: 3072, Remote: Endpoint{QPN: 0x17}}
	for i := range paths {
		k := i % 4
		params.Paths = append(params.Paths, PathParams{
			Plane: k, Local: planes("198.18.0.1", "198.18.1.1", "198.18.2.1", "198.18.3.1")[k].Addr,
			Remote: planes("198.18.0.2", "198.18.1.2", "198.18.2.2", "198.18.3.2")[k].Addr, Sport: uint16(50000 + i),
		})
		r.s.Paths = append(r.s.Paths, PathSnapshot{SrttNs: 20_000, MinRttNs: 10_000, Sport: uint16(50000 + i)})
		r.up = append(r.up, true)
	}
	r.s.State = ConnOpen
	r.s.PsnNext, r.s.PsnCum = 100, 100
	r.p = NewPolicy(PolicyConfig{Params: params, Peer: "192.0.2.9:18515", Rand: testRand(1)})
	r.p.flown = true
	r.apply(r.p.Start(r.nowNs))
	r.forget()
	return r
}

func (r *rig) forget() {
	r.seen = Actions{}
	clear(r.probes)
	r.ticks = 0
}

// send puts n packets under way on path i.
func (r *rig) send(i int, n uint32) {
	r.s.Paths[i].Next += n
	r.s.PsnNext += n
}

// answer lets an ACK of all that was sent arrive on path i.
func (r *rig) answer(i int) {
	ps := &r.s.Paths[i]
	ps.Acks++
	ps.LastAckNs = r.nowNs
	ps.Una, ps.Heard = ps.Next, ps.Next-1
	if !r.stuck {
		r.s.PsnCum = r.s.PsnNext
	}
}

// tick lets ns pass and calls the policy once.
func (r *rig) tick(ns int64) Actions {
	r.nowNs += ns
	if r.pump {
		for i := range r.s.Paths {
			if r.s.ProbeOn>>i&1 == 0 {
				continue
			}
			r.s.Paths[i].Next++
			r.s.Paths[i].Probes++
			if r.up[i] {
				r.answer(i)
			}
			if r.full>>i&1 == 0 {
				continue
			}
			r.s.Paths[i].Next++
			if r.up[i] && !r.narrow {
				r.answer(i)
				r.s.Paths[i].Proofs++
			}
		}
		r.s.ProbeOn, r.full = 0, 0
	}
	r.ticks++
	a := r.p.Tick(r.nowNs, &r.s, r.pump)
	r.apply(a)
	return a
}

func (r *rig) apply(a Actions) {
	for _, c := range a.States {
		r.s.Paths[c.Path].State = c.State
		if c.State != PathActive {
			r.s.Paths[c.Path].Una = r.s.Paths[c.Path].Next
		}
	}
	for _, c := range a.Rerolls {
		ps := &r.s.Paths[c.Path]
		ps.Sport, ps.Una = c.Sport, ps.Next
		ps.Gen++
		ps.PeerPkts, ps.PeerCe, ps.PeerDups = 0, 0, 0
	}
	for _, i := range a.Timeouts {
		r.s.Paths[i].Una = r.s.Paths[i].Next
	}
	for _, c := range a.Sets {
		ps := &r.s.Paths[c.Path]
		ps.Cwnd, ps.Pace, ps.Tolerance = c.Cwnd, c.Pace, c.Tolerance
	}
	for i := range r.s.Paths {
		r.probes[i] += int(a.Probe >> i & 1)
	}
	r.s.ProbeOn |= a.Probe
	r.full |= a.Full
	if a.Fail != nil {
		r.fails++
		r.seen.Fail = a.Fail
	}
	r.seen.States = append(r.seen.States, a.States...)
	r.seen.Rerolls = append(r.seen.Rerolls, a.Rerolls...)
	r.seen.Timeouts = append(r.seen.Timeouts, a.Timeouts...)
	r.seen.Sets = append(r.seen.Sets, a.Sets...)
	r.seen.Probe |= a.Probe
	if a.NextNs <= r.nowNs {
		r.t.Fatalf("next tick is due %d ns ago", r.nowNs-a.NextNs)
	}
}

// runFor ticks as the engine does: when the policy says so, every ms at most.
func (r *rig) runFor(ns int64) {
	for end := r.nowNs + ns; r.nowNs < end; {
		r.tick(max(min(r.p.dueNs-r.nowNs, end-r.nowNs), us))
	}
}

// runUntil ticks each ms until done, at most for ns, and says how long it took.
func (r *rig) runUntil(ns int64, done func() bool) int64 {
	start := r.nowNs
	for !done() {
		if r.nowNs-start > ns {
			r.t.Fatalf("not within %v", time.Duration(ns))
		}
		r.tick(ms)
	}
	return r.nowNs - start
}

func TestIdleConnectionCostsNothing(t *testing.T) {
	r := newRig(t, 8)
	r.runFor(105 * sec)
	asked := 0
	for _, n := range r.probes {
		asked += n
	}
	if asked != 10 {
		t.Errorf("%d probes in 105 s, want the 10 keepalives", asked)
	}
	if r.ticks > 40 {
		t.Errorf("%d ticks in 105 s, want at most 4 a keepalive", r.ticks)
	}
	if len(r.seen.States)+len(r.seen.Timeouts)+len(r.seen.Rerolls) != 0 || r.fails != 0 {
		t.Errorf("an idle connection did %+v", r.seen)
	}
}

func TestKeepaliveGoesRoundThePaths(t *testing.T) {
	r := newRig(t, 4)
	r.runFor(45 * sec)
	for i, n := range r.probes {
		if n != 1 {
			t.Errorf("path %d was asked %d times in 4 keepalives over 4 paths, want 1", i, n)
		}
	}
}

func TestIdleConnectionNoticesADeadPeer(t *testing.T) {
	r := newRig(t, 8)
	r.runFor(15 * sec)
	clear(r.up)
	start := r.nowNs
	for r.fails == 0 && r.nowNs-start < 20*sec {
		r.tick(max(r.p.dueNs-r.nowNs, us))
	}
	if took := r.nowNs - start; r.fails != 1 || took < 7*sec || took > 7300*ms {
		t.Errorf("%d failures after %v, want one 2 s after the keepalive that was due after 5 s", r.fails, time.Duration(took))
	}
	for i, n := range r.probes {
		if n < 15 {
			t.Errorf("path %d was asked %d times before, want one each 100 ms", i, n)
		}
	}
}

func TestIdleConnectionOutlivesADeadPlane(t *testing.T) {
	r := newRig(t, 8)
	r.up[0], r.up[4] = false, false
	r.runFor(600 * sec)
	if r.fails != 0 {
		t.Fatalf("failed with three planes up: %v", r.seen.Fail)
	}
	r.forget()
	r.runFor(100 * sec)
	if r.ticks > 300 {
		t.Errorf("%d ticks in 100 s with a dead plane, want few", r.ticks)
	}
}

func TestQuietPathIsProbed(t *testing.T) {
	for _, tc := range []struct {
		name   string
		pace   uint32
		srttNs uint32
		before int64 // not probed yet
		after  int64 // probed
	}{
		{"fast path: 200 us", 0, 20_000, 190 * us, 210 * us},
		{"long path: two round trips", 0, 3_000_000, 5900 * us, 6100 * us},
		{"paced path: 8 packets take their time", 40960, 20_000, 1100 * us, 1300 * us},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, 1)
			r.tick(ms)
			r.s.Paths[0].SrttNs, r.s.Paths[0].Pace = tc.srttNs, tc.pace
			r.up[0] = false
			r.send(0, 4)
			r.s.Paths[0].Acks++
			r.s.Paths[0].LastAckNs = r.nowNs + us
			r.tick(us)
			r.s.Paths[0].Pace = tc.pace
			if a := r.tick(tc.before); a.Probe != 0 {
				t.Errorf("probed after %v", time.Duration(tc.before))
			}
			r.s.Paths[0].Pace = tc.pace
			if a := r.tick(tc.after - tc.before); a.Probe != 1 {
				t.Errorf("not probed after %v", time.Duration(tc.after))
			}
		})
	}
}

func TestPathThatHearsIsNotProbed(t *testing.T) {
	r := newRig(t, 2)
	for range 100 {
		for i := range r.s.Paths {
			r.send(i, 16)
			r.s.Paths[i].Una = r.s.Paths[i].Next - 4
			r.s.Paths[i].Acks++
			r.s.Paths[i].LastAckNs = r.nowNs + ms - 50*us
		}
		r.s.PsnCum = r.s.PsnNext - 8
		if a := r.tick(ms); a.Probe != 0 {
			t.Fatalf("probed %#b although an ACK came 50 us ago", a.Probe)
		}
	}
}

func TestOneLostProbeRetiresNothing(t *testing.T) {
	r := newRig(t, 4)
	r.send(0, 4)
	r.up[0] = false
	r.runUntil(10*ms, func() bool { return r.probes[0] == 2 })
	r.up[0] = true
	r.runFor(200 * ms)
	if len(r.seen.States) != 0 || len(r.seen.Timeouts) != 0 {
		t.Errorf("a lost probe led to %+v", r.seen)
	}
}

func TestDeadPathBecomesSuspectSoon(t *testing.T) {
	for _, tickNs := range []int64{ms / 2, ms, 3 * ms} {
		t.Run(time.Duration(tickNs).String(), func(t *testing.T) {
			r := newRig(t, 8)
			r.send(3, 20)
			r.up[3] = false
			start := r.nowNs
			for r.s.Paths[3].State != PathSuspect && r.nowNs-start < sec {
				r.tick(tickNs)
				for i := range r.s.Paths {
					if i != 3 {
						r.answer(i)
					}
				}
				r.s.PsnCum = r.s.PsnNext - 20
			}
			if took := r.nowNs - start; took > 20*ms {
				t.Errorf("suspect after %v, want at most 20ms", time.Duration(took))
			}
			if r.probes[3] != 4 {
				t.Errorf("%d probes, want three unanswered and one more", r.probes[3])
			}
			if len(r.seen.Timeouts) != 1 || r.seen.Timeouts[0] != 3 {
				t.Errorf("timeouts %v, want one of path 3 before", r.seen.Timeouts)
			}
		})
	}
}

func TestSuspectPathComesBackWhenAProbeReturns(t *testing.T) {
	r := newRig(t, 4)
	r.send(2, 20)
	r.up[2] = false
	r.runUntil(30*ms, func() bool { return r.s.Paths[2].State == PathSuspect })
	keep := func() bool {
		// Other paths have work, so that the connection is not idle.
		r.s.PsnNext++
		r.s.PsnCum++
		r.s.Paths[0].Acks++
		r.s.Paths[0].LastAckNs = r.nowNs
		return false
	}
	for start := r.nowNs; r.nowNs-start < sec; {
		keep()
		r.tick(ms)
	}
	r.up[2] = true
	took := r.runUntil(150*ms, func() bool { return keep() || r.s.Paths[2].State == PathActive })
	if took > 105*ms {
		t.Errorf("back after %v, want at most 105ms", time.Duration(took))
	}
	if r.fails != 0 {
		t.Errorf("failed: %v", r.seen.Fail)
	}
	if r.s.ProbeOn>>2&1 != 0 {
		t.Error("probed again although it just answered")
	}
}

// TestWorkHurriesIdleProbes: a path that was asked rarely while the connection was
// idle is asked often again once there is something to send.
func TestWorkHurriesIdleProbes(t *testing.T) {
	r := newRig(t, 4)
	r.up[0] = false
	r.runFor(200 * sec)
	if r.s.Paths[0].State != PathSuspect {
		t.Fatalf("path 0 is %v, want suspect", r.s.Paths[0].State)
	}
	r.up[0] = true
	took := r.runUntil(sec, func() bool {
		r.s.PsnNext++
		r.s.Paths[1].Acks++
		return r.s.Paths[0].State == PathActive
	})
	if took > 105*ms {
		t.Errorf("back after %v, want at most 105ms", time.Duration(took))
	}
}

func TestDownPathForgetsItsProbes(t *testing.T) {
	r := newRig(t, 2)
	r.send(0, 4)
	r.up[0] = false
	r.runUntil(10*ms, func() bool { return r.probes[0] == 3 })
	r.s.Paths[0].State = PathDown
	r.runFor(100 * ms)
	r.s.Paths[0].State = PathActive
	r.send(0, 4)
	r.forget()
	for range 3 {
		r.tick(ms)
	}
	if len(r.seen.States)+len(r.seen.Timeouts) != 0 {
		t.Errorf("blamed for probes before it was down: %+v", r.seen)
	}
	if r.probes[0] != 2 {
		t.Errorf("%d probes in its first 3 ms, want 2: the back-off begins anew", r.probes[0])
	}
}

func TestSuspectPathIsProbedWithBackOff(t *testing.T) {
	r := newRig(t, 4)
	r.send(2, 20)
	r.up[2] = false
	r.runUntil(30*ms, func() bool { return r.s.Paths[2].State == PathSuspect })
	r.forget()
	for start := r.nowNs; r.nowNs-start < 10*sec; {
		r.s.PsnNext++
		r.s.PsnCum++
		r.s.Paths[0].Acks++
		r.tick(ms)
	}
	if n := r.probes[2]; n < 95 || n > 115 {
		t.Errorf("%d probes in 10 s, want about one every 100 ms", n)
	}
}

func TestPersistentFailureRerollsThePort(t *testing.T) {
	r := newRig(t, 4)
	r.send(2, 20)
	r.up[2] = false
	ports := map[uint16]bool{50000: true, 50001: true, 50002: true, 50003: true}
	for len(r.seen.Rerolls) < 5 {
		r.s.PsnNext++
		r.s.PsnCum++
		r.s.Paths[0].Acks++
		if r.tick(ms); r.nowNs > 1020*sec {
			t.Fatalf("%d re-rolls in 20 s, want 5", len(r.seen.Rerolls))
		}
	}
	for _, c := range r.seen.Rerolls {
		if c.Path != 2 || c.Sport < MinSport || ports[c.Sport] {
			t.Errorf("re-roll of path %d to %d, want path 2 and a fresh port", c.Path, c.Sport)
		}
		ports[c.Sport] = true
	}
	// At 8, 16, 32, 64 and 128 unanswered ones: an outage of hours stays within 64 generations.
	if n := r.probes[2]; n < probesToSuspect+16*probesToReroll || n > probesToSuspect+16*probesToReroll+1 {
		t.Errorf("5 re-rolls after %d probes, want them after twice as many each time", n)
	}
}

func TestPathIsUsedOnlyAfterAFullSizePacketArrived(t *testing.T) {
	r := newRig(t, 1)
	r.s.Paths[0].State = PathSuspect
	r.narrow = true
	if a := r.tick(us); a.Probe != 1 || a.Full != 0 {
		t.Fatalf("first asked by probes %b and %b, want the short one alone: the address is not proven", a.Probe, a.Full)
	}
	if a := r.tick(us); a.Probe != 1 || a.Full != 1 || len(a.States) != 0 {
		t.Fatalf("after the answer: probes %b and %b, states %v, want both probes", a.Probe, a.Full, a.States)
	}
	r.runFor(3 * ms)
	if r.s.Paths[0].State != PathSuspect {
		t.Fatal("short probes alone made the path active")
	}
	r.narrow = false
	r.runUntil(50*ms, func() bool { return r.s.Paths[0].State == PathActive })
}

func TestMessagesAreCutSmallerIfFullSizePacketsFitNoPath(t *testing.T) {
	for _, tc := range []struct {
		name  string
		begun bool
		cuts  int
	}{
		{"before the first request", false, 2},
		{"a request has been begun", true, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, 2)
			r.s.Paths[0].State, r.s.Paths[1].State = PathSuspect, PathSuspect
			r.narrow = true
			if tc.begun {
				r.s.MsnNext, r.s.SqTail = 1, 1
			}
			var cuts []int
			for range 500 {
				if a := r.tick(ms); a.Cut != 0 {
					cuts = append(cuts, a.Cut)
				}
			}
			if len(cuts) != tc.cuts || tc.cuts == 2 && (cuts[0] != 2048 || cuts[1] != 1024) {
				t.Errorf("cut to %v, want %d cuts", cuts, tc.cuts)
			}
			if len(r.p.tooLong()) != 2 {
				t.Errorf("paths %v are too narrow, want both", r.p.tooLong())
			}
		})
	}
}

func TestLateACKsOfDataDoNotSayThatFullSizeProbesAreLost(t *testing.T) {
	r := newRig(t, probesToNarrow/leastToNarrow)
	r.tick(ms)
	r.up[0] = false // what leaves now stands in a slow queue, behind the data
	r.send(0, 64)
	ps := &r.s.Paths[0]
	heard := ps.Heard
	r.runUntil(sec, func() bool { return ps.State == PathSuspect })
	for range 64 {
		heard++
		ps.Heard = heard
		ps.Acks++
		ps.LastAckNs = r.nowNs
		r.tick(10 * ms)
	}
	if len(r.p.tooLong()) > 0 || r.p.cut != 3072 {
		t.Errorf("paths %v are too narrow, cut %d; want none and 3072", r.p.tooLong(), r.p.cut)
	}
}

func TestFullSizeProbesLostInOldReceiveBuffersAreNotTakenForAnMTU(t *testing.T) {
	for _, paths := range []int{1, 2, 8, 32} {
		t.Run(fmt.Sprintf("%d paths", paths), func(t *testing.T) {
			r := newRig(t, paths)
			for i := range paths {
				r.s.Paths[i].State = PathSuspect
			}
			buffers := 256
			for range 2000 {
				for i := range paths {
					if r.s.ProbeOn>>i&1 != 0 {
						buffers -= 1 + 3*int(r.full>>i&1)
					}
				}
				r.narrow = buffers > 0
				r.tick(ms)
			}
			if n := len(r.p.tooLong()); n > 0 || r.p.cut != 3072 {
				t.Errorf("%d paths too narrow, cut %d, want none and 3072", n, r.p.cut)
			}
		})
	}
}

func TestFirstFlightMayTakeLongerThanProbesSay(t *testing.T) {
	r := newRig(t, 2)
	r.p.flown = false
	r.tick(ms)
	for i := range r.up {
		r.up[i] = false
		r.send(i, 32)
	}
	for range 150 {
		r.tick(ms)
	}
	if len(r.seen.States) > 0 || len(r.seen.Timeouts) > 0 {
		t.Fatalf("states %v, timeouts %v while the first data may stand in a queue", r.seen.States, r.seen.Timeouts)
	}
	for range 200 {
		r.tick(ms)
	}
	if len(r.seen.States) != 2 {
		t.Errorf("states %v after 350 ms of silence, want two suspect paths", r.seen.States)
	}
}

func TestFailureNamesTheMTUWhenOnlyShortPacketsGetThrough(t *testing.T) {
	r := newRig(t, 1)
	r.s.Paths[0].State = PathSuspect
	r.s.MsnNext, r.s.SqTail = 1, 1
	r.s.PsnNext++
	r.narrow, r.stuck = true, true
	for range 2500 {
		r.tick(ms)
	}
	if r.fails != 1 || !strings.Contains(r.seen.Fail.Error(), "IP packets of 3168 bytes do not get through on path 0") {
		t.Errorf("%d failures, %v, want one that names the MTU", r.fails, r.seen.Fail)
	}
}

func TestPathThatLosesAllButProbesIsGivenUp(t *testing.T) {
	r := newRig(t, 2)
	r.tick(ms)
	for i := range 10 {
		r.s.Paths[0].Next += 10
		r.s.Paths[0].Lost += 10
		r.s.Paths[0].Probes++
		r.s.Paths[0].PeerPkts++
		r.s.PsnNext++
		r.answer(0)
		r.tick(ms)
		if r.s.Paths[0].State == PathSuspect {
			if i > 4 {
				t.Errorf("given up after %d losses, want soon after %d", 10*(i+1), lossesToDoubt)
			}
			return
		}
	}
	t.Error("still active after 100 losses without any data")
}

func TestLossOfNineOfTenIsNoReasonToGiveAPathUp(t *testing.T) {
	r := newRig(t, 2)
	r.tick(ms)
	for range 100 {
		r.s.Paths[0].Next += 10
		r.s.Paths[0].Lost += 9
		r.s.Paths[0].PeerPkts++
		r.s.PsnNext++
		r.answer(0)
		if r.tick(ms); r.s.Paths[0].State != PathActive {
			t.Fatal("given up although data arrives")
		}
	}
}

func TestRetryTimeRunsWhileAcksComeAndPsnCumStandsStill(t *testing.T) {
	for _, tc := range []struct {
		name   string
		credit bool
		fails  int
	}{
		{"data outstanding", false, 1},
		{"waiting for credit", true, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, 1)
			r.s.SqTail, r.s.NoCredit = 1, tc.credit
			if !tc.credit {
				r.s.PsnNext++
			}
			cum := r.s.PsnCum
			for range 2500 {
				r.s.Paths[0].Acks++
				r.s.Paths[0].LastAckNs = r.nowNs
				r.s.PsnCum = cum
				r.tick(ms)
				r.s.PsnCum = cum
			}
			if r.fails != tc.fails {
				t.Errorf("%d failures in 2.5 s, want %d: %v", r.fails, tc.fails, r.seen.Fail)
			}
		})
	}
}

func TestIdleTimeDoesNotCountAgainstDataPostedAfterIt(t *testing.T) {
	r := newRig(t, 2)
	r.tick(ms)
	r.nowNs += 5 * sec
	r.s.PsnNext++ // sent just now
	r.s.SqTail, r.s.MsnNext = 1, 1
	if r.tick(ms); r.fails != 0 {
		t.Errorf("failed right after the first packet left: %v", r.seen.Fail)
	}
}

func TestPathFarAheadOfItsAnswersBeginsAGeneration(t *testing.T) {
	r := newRig(t, 2)
	r.tick(ms)
	r.s.Paths[0].Next = r.s.Paths[0].Heard + pseqsToReroll
	if a := r.tick(ms); len(a.Rerolls) != 1 || a.Rerolls[0].Path != 0 {
		t.Errorf("re-rolls %v, want one of path 0", a.Rerolls)
	}
}

func TestAllPathsSuspectAreAllProbed(t *testing.T) {
	r := newRig(t, 4)
	clear(r.up)
	for i := range 4 {
		r.send(i, 10)
	}
	r.runUntil(100*ms, func() bool {
		for i := range r.s.Paths {
			if r.s.Paths[i].State != PathSuspect {
				return false
			}
		}
		return true
	})
	r.forget()
	r.runFor(500 * ms)
	for i, n := range r.probes {
		if n < 5 {
			t.Errorf("path %d was probed %d times in 500 ms, want at least 5", i, n)
		}
	}
}

func TestRetryTimeFailsTheConnectionOnce(t *testing.T) {
	r := newRig(t, 4)
	for i := range 4 {
		r.send(i, 10)
		r.s.Paths[i].LastAckNs = r.nowNs - int64(i+1)*ms
	}
	clear(r.up)
	took := r.runUntil(3*sec, func() bool { return r.fails > 0 })
	if took < 2*sec || took > 2200*ms {
		t.Errorf("failed after %v, want the retry time of 2s and little more", time.Duration(took))
	}
	var e *RetryExceededError
	if !errors.As(r.seen.Fail, &e) {
		t.Fatalf("failed with %T, want *RetryExceededError", r.seen.Fail)
	}
	if e.Outstanding != 40 || e.LastPath != 0 || len(e.Paths) != 4 || e.PsnCum != 100 {
		t.Errorf("error %+v, want 40 outstanding, path 0 last heard, 4 paths, psn 100", e)
	}
	for _, want := range []string{"192.0.2.9:18515", "0x17", "2s", "path 0", "psn 100", "198.18.3.1", "198.18.3.2", "suspect"} {
		if !strings.Contains(e.Error(), want) {
			t.Errorf("error %q does not say %q", e, want)
		}
	}
	r.runFor(30 * sec)
	if r.fails != 1 {
		t.Errorf("failed %d times", r.fails)
	}
}

func TestRetryExceededTellsOfPathsThatGoTheSameWayTogether(t *testing.T) {
	a := func(s string) netip.Addr { return netip.MustParseAddr(s) }
	e := &RetryExceededError{
		Peer: "198.18.0.2, 198.18.1.2", QPN: 0x101, RetryTime: 2 * time.Second, Outstanding: 7, PsnCum: 100,
		LastPath: 1, LastAgo: 2013 * time.Millisecond,
	}
	for i := range 5 {
		p := PathReport{Local: a("198.18.0.1"), Remote: a("198.18.0.2"), Sport: uint16(50000 + i), State: PathSuspect, Unanswered: 4 + i%3}
		if i%2 == 1 {
			p.Local, p.Remote, p.State, p.Unanswered = a("198.18.1.1"), a("198.18.1.2"), []PathState{PathActive, PathDown}[i/3], 0
		}
		e.Paths = append(e.Paths, p)
	}
	want := "peer 198.18.0.2, 198.18.1.2 (qpn 0x101) gave no answer for 2s: last heard on path 1 (198.18.1.2) 2.013s ago, " +
		"acknowledging all below psn 100; 7 packets outstanding; " +
		"paths 0 2 4 from 198.18.0.1 to 198.18.0.2 suspect, probes unanswered: 4 to 6; " +
		"path 1 from 198.18.1.1 to 198.18.1.2 active, probes unanswered: 0; " +
		"path 3 from 198.18.1.1 to 198.18.1.2 down, probes unanswered: 0"
	if e.Error() != want {
		t.Errorf("message is\n%s\nwant\n%s", e, want)
	}
}

func TestNothingEverHeardIsSaid(t *testing.T) {
	r := newRig(t, 1)
	r.send(0, 1)
	r.up[0] = false
	r.runUntil(3*sec, func() bool { return r.fails > 0 })
	if !strings.Contains(r.seen.Fail.Error(), "nothing was ever heard") {
		t.Errorf("error %q does not say that nothing was heard", r.seen.Fail)
	}
}

func TestAllPathsDownFailsAtTheRetryTime(t *testing.T) {
	r := newRig(t, 4)
	for i := range 4 {
		r.send(i, 10)
		r.s.Paths[i].State = PathDown
	}
	took := r.runUntil(3*sec, func() bool { return r.fails > 0 })
	if took < 2*sec || took > 2200*ms {
		t.Errorf("failed after %v, want 2s", time.Duration(took))
	}
	if r.seen.Probe != 0 {
		t.Errorf("probed %#b although all paths are down", r.seen.Probe)
	}
}

func TestPostWithAllPathsSuspectFailsToo(t *testing.T) {
	r := newRig(t, 2)
	clear(r.up)
	r.s.Paths[0].State, r.s.Paths[1].State = PathSuspect, PathSuspect
	r.s.SqTail++
	if took := r.runUntil(3*sec, func() bool { return r.fails > 0 }); took < 2*sec {
		t.Errorf("failed after %v, want 2s", time.Duration(took))
	}
}

// TestStoppedTimeDoesNotCount: a program that was stopped for a minute has no
// right to blame its peer.
func TestStoppedTimeDoesNotCount(t *testing.T) {
	r := newRig(t, 4)
	for i := range 4 {
		r.send(i, 10)
	}
	clear(r.up)
	for r.nowNs < 1001*sec {
		r.tick(ms)
	}
	r.tick(60 * sec)
	took := r.runUntil(3*sec, func() bool { return r.fails > 0 })
	if took < 700*ms || took > 1100*ms {
		t.Errorf("failed %v after a stop in the middle, want the second that was left", time.Duration(took))
	}
}

func TestPumpThatCannotSendDoesNotCount(t *testing.T) {
	r := newRig(t, 2)
	r.send(0, 10)
	clear(r.up)
	r.pump = false
	r.runFor(10 * sec)
	if r.fails != 0 || len(r.seen.States) != 0 {
		t.Errorf("blamed the peer although nothing was sent: %+v", r.seen)
	}
}

func TestPumpThatStopsAfterSilenceDoesNotCount(t *testing.T) {
	r := newRig(t, 2)
	r.send(0, 10)
	clear(r.up)
	for range 500 {
		r.tick(ms)
	}
	r.pump = false
	for range 5000 {
		r.tick(ms)
	}
	if r.fails != 0 {
		t.Errorf("failed after half a second of silence and a pump that did not run: %v", r.seen.Fail)
	}
}

func TestLateSentProbeGetsItsFullTime(t *testing.T) {
	r := newRig(t, 2)
	r.send(0, 10)
	r.up[0] = false
	r.pump = false
	for range 50 {
		r.tick(ms)
	}
	if r.probes[0] != 1 {
		t.Fatalf("%d probes ordered while the pump does not send, want 1", r.probes[0])
	}
	r.pump = true
	if r.tick(ms / 2); r.probes[0] != 1 {
		t.Error("counted as unanswered half a millisecond after it left")
	}
}

// TestSleepingPumpCounts: between probes the pump has nothing to do and sleeps.
func TestSleepingPumpCounts(t *testing.T) {
	r := newRig(t, 2)
	r.send(0, 10)
	clear(r.up)
	start := r.nowNs
	for r.fails == 0 && r.nowNs-start < 3*sec {
		ran := r.s.ProbeOn != 0
		r.nowNs += ms
		r.s.ProbeOn = 0
		r.apply(r.p.Tick(r.nowNs, &r.s, ran))
	}
	if r.fails != 1 {
		t.Error("no failure in 3 s although probes went out")
	}
}

func TestAnsweredProbesKeepTheConnection(t *testing.T) {
	r := newRig(t, 2)
	r.s.SqTail++
	r.s.NoCredit = true
	r.runFor(20 * sec)
	if r.fails != 0 {
		t.Fatalf("failed while waiting for credit of a peer that answers: %v", r.seen.Fail)
	}
}

func TestWaitingForCreditProbesWithBackOff(t *testing.T) {
	r := newRig(t, 2)
	r.s.SqTail++
	r.s.NoCredit = true
	var gaps []int64
	last := int64(0)
	for r.nowNs < 1002*sec {
		if a := r.tick(ms); a.Probe != 0 {
			if last != 0 {
				gaps = append(gaps, (r.nowNs-last)/ms)
			}
			last = r.nowNs
		}
	}
	want := []int64{2, 4, 8, 16, 32, 64, 100, 100}
	for i, w := range want {
		if i >= len(gaps) || gaps[i] != w {
			t.Fatalf("gaps between probes %v ms, want %v", gaps, want)
		}
	}
	r.s.Credit++ // and used up at once
	r.runUntil(5*ms, func() bool { return r.p.act.Probe != 0 })
	r.s.NoCredit = false
	r.s.MsnNext = r.s.SqTail
	r.tick(ms)
	r.forget()
	r.runFor(sec)
	if r.seen.Probe != 0 {
		t.Error("goes on probing with credit")
	}
}

func TestCreditWaitOfADeadPeerFails(t *testing.T) {
	r := newRig(t, 2)
	r.s.SqTail++
	r.s.NoCredit = true
	clear(r.up)
	took := r.runUntil(4*sec, func() bool { return r.fails > 0 })
	if took < 2*sec || took > 2300*ms {
		t.Errorf("failed after %v, want 2s", time.Duration(took))
	}
}

func TestMissingAckWithNothingUnderWayIsAskedFor(t *testing.T) {
	r := newRig(t, 2)
	r.s.PsnNext += 5
	r.runUntil(10*ms, func() bool { return r.s.PsnCum == r.s.PsnNext })
}

func TestBrakeIsOverwritten(t *testing.T) {
	r := newRig(t, 1)
	r.tick(ms)
	pace := r.s.Paths[0].Pace
	r.s.Paths[0].Pace *= 2
	r.s.Paths[0].Cwnd /= 2
	r.tick(ms)
	if got := r.s.Paths[0]; got.Pace != pace || got.Cwnd < 32 {
		t.Errorf("pace %d, window %d after a brake, want %d and at least 32", got.Pace, got.Cwnd, pace)
	}
	r.forget()
	r.tick(ms)
	if len(r.seen.Sets) != 0 {
		t.Errorf("sets %v although nothing differs", r.seen.Sets)
	}
}

func TestDuplicatesAfterLossesRaiseTheTolerance(t *testing.T) {
	for _, tc := range []struct {
		name       string
		lost, dups uint32 // a tick
		raised     bool
	}{
		{"each loss was a late packet", 2, 2, true},
		{"losses alone", 2, 0, false},
		{"few duplicates among many losses", 40, 1, false},
		{"duplicates without losses are the network's", 0, 2, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, 2)
			for range 100 {
				r.s.Paths[1].Lost += tc.lost
				r.s.Paths[1].PeerDups += tc.dups
				r.s.Paths[1].Acks++
				r.s.Paths[1].LastAckNs = r.nowNs
				r.s.PsnNext++
				r.tick(ms)
			}
			want := uint8(0)
			if tc.raised {
				want = maxTolerance
			}
			if got := r.s.Paths[1].Tolerance; got != want {
				t.Errorf("tolerance %d, want %d", got, want)
			}
			if got := r.s.Paths[0].Tolerance; got != 0 {
				t.Errorf("tolerance of the other path %d, want 0", got)
			}
			for range 5000 {
				r.s.Paths[1].Acks++
				r.s.PsnNext++
				r.s.PsnCum++
				r.tick(ms)
			}
			if got := r.s.Paths[1].Tolerance; got != 0 {
				t.Errorf("tolerance %d after 5 s of calm, want 0", got)
			}
		})
	}
}

// recorder keeps what congestion control was told.
type recorder struct{ samples []cc.PathSample }

func (c *recorder) Name() string { return "recorder" }

func (c *recorder) Start(n int) []cc.PathRate { return make([]cc.PathRate, n) }

func (c *recorder) Tick(_ int64, s cc.Sample) []cc.PathRate {
	c.samples = append(c.samples, s.Paths...)
	return make([]cc.PathRate, len(s.Paths))
}

func TestCongestionControlSeesDifferences(t *testing.T) {
	rec := &recorder{}
	p := NewPolicy(PolicyConfig{Params: ConnParams{Payload: 1024, Paths: make([]PathParams, 1)}, Controller: rec, Rand: testRand(1)})
	p.Start(0)
	s := Snapshot{State: ConnOpen, Paths: make([]PathSnapshot, 1)}
	ps := &s.Paths[0]
	step := func(change func()) cc.PathSample {
		change()
		p.Tick(p.lastNs+ms, &s, true)
		return rec.samples[len(rec.samples)-1]
	}
	got := step(func() {
		ps.PeerPkts, ps.PeerCe, ps.Lost, ps.Sent, ps.SentBytes = 10, 2, 1, 20, 20*1126
	})
	if got.Pkts != 10 || got.CE != 2 || got.Lost != 1 || got.DeliveredBytes != 10*1126 {
		t.Errorf("first tick told %+v, want 10 packets of 1126 bytes, 2 marks, 1 lost", got)
	}
	got = step(func() { ps.PeerPkts = 15 })
	if got.Pkts != 5 || got.CE != 0 || got.Lost != 0 {
		t.Errorf("second tick told %+v, want 5 packets", got)
	}
	got = step(func() { ps.Gen, ps.PeerPkts, ps.PeerCe = 1, 3, 1 })
	if got.Pkts != 3 || got.CE != 1 {
		t.Errorf("after a re-roll told %+v, want 3 packets, 1 mark", got)
	}
	got = step(func() { ps.State = PathSuspect })
	if got.Usable {
		t.Error("a suspect path counts as usable")
	}
}

// TestOwnTimeoutIsNotLoss: what the policy itself gave up says nothing about
// congestion beyond the timeout.
func TestOwnTimeoutIsNotLoss(t *testing.T) {
	rec := &recorder{}
	r := newRig(t, 1)
	r.p.cfg.Controller = rec
	r.send(0, 30)
	r.up[0] = false
	for len(r.seen.Timeouts) == 0 {
		r.tick(ms)
	}
	r.s.Paths[0].Lost += 30
	r.tick(ms)
	if got := rec.samples[len(rec.samples)-1]; got.Lost != 0 {
		t.Errorf("told %d lost after a timeout, want 0", got.Lost)
	}
	r.s.Paths[0].Lost += 3
	r.tick(ms)
	if got := rec.samples[len(rec.samples)-1]; got.Lost != 3 {
		t.Errorf("told %d lost later, want 3", got.Lost)
	}
}

// TestPolicyInvariants: whatever the snapshots say, down paths are left alone,
// windows stay in bounds, ports are fresh, failure comes once and the next tick
// lies ahead. rapid prints the seed of a failure.
func TestPolicyInvariants(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 8).Draw(t, "paths")
		params := ConnParams{Payload: 2048}
		s := Snapshot{State: ConnOpen}
		for i := range n {
			params.Paths = append(params.Paths, PathParams{Plane: i % 2, Sport: uint16(MinSport + i)})
			s.Paths = append(s.Paths, PathSnapshot{Sport: uint16(MinSport + i)})
		}
		p := NewPolicy(PolicyConfig{Params: params, Rand: testRand(rapid.Uint64().Draw(t, "seed"))})
		now := rapid.Int64Range(0, 1<<60).Draw(t, "start")
		p.Start(now)
		fails := 0
		for range rapid.IntRange(1, 60).Draw(t, "ticks") {
			now += rapid.SampledFrom([]int64{0, 100 * us, ms, 3 * ms, 150 * ms, 10 * sec}).Draw(t, "dt")
			s.PsnNext += rapid.Uint32Range(0, 100).Draw(t, "sent")
			if rapid.Bool().Draw(t, "acked") {
				s.PsnCum = s.PsnNext
			}
			s.NoCredit = rapid.Bool().Draw(t, "no credit")
			s.ProbeOn = rapid.Uint32Range(0, 1<<n-1).Draw(t, "pending")
			for i := range s.Paths {
				ps := &s.Paths[i]
				ps.Next += rapid.Uint32Range(0, 20).Draw(t, "next")
				if rapid.Bool().Draw(t, "resolved") {
					ps.Una = ps.Next
				}
				if rapid.IntRange(0, 3).Draw(t, "heard") == 0 {
					ps.Acks++
					ps.LastAckNs = now
				}
				if rapid.IntRange(0, 9).Draw(t, "state changes") == 0 {
					ps.State = PathState(rapid.IntRange(0, 2).Draw(t, "state"))
				}
				ps.PeerPkts += rapid.Uint32Range(0, 50).Draw(t, "pkts")
				ps.PeerCe += rapid.Uint32Range(0, 10).Draw(t, "ce")
				ps.PeerDups += rapid.Uint32Range(0, 3).Draw(t, "dups")
				ps.Lost += rapid.Uint32Range(0, 30).Draw(t, "lost")
				ps.SrttNs = rapid.Uint32Range(0, 100_000_000).Draw(t, "srtt")
			}
			a := p.Tick(now, &s, rapid.Bool().Draw(t, "pump ran"))
			if a.NextNs <= now {
				t.Fatalf("next tick at %d is not after %d", a.NextNs, now)
			}
			if a.Probe>>n != 0 {
				t.Fatalf("probes %#b of %d paths", a.Probe, n)
			}
			for i := range s.Paths {
				if a.Probe>>i&1 != 0 && s.Paths[i].State == PathDown {
					t.Fatalf("probes path %d, which is down", i)
				}
			}
			for _, c := range a.Sets {
				if c.Cwnd < 1 || c.Cwnd > PathWindow || c.Tolerance > maxTolerance {
					t.Fatalf("sets %+v", c)
				}
			}
			for _, c := range a.States {
				if s.Paths[c.Path].State == PathDown {
					t.Fatalf("changes the state of path %d, which is down", c.Path)
				}
				s.Paths[c.Path].State = c.State
			}
			for _, c := range a.Rerolls {
				for i := range s.Paths {
					if s.Paths[i].Sport == c.Sport {
						t.Fatalf("re-rolls path %d to port %d of path %d", c.Path, c.Sport, i)
					}
				}
				if c.Sport < MinSport {
					t.Fatalf("port %d", c.Sport)
				}
				s.Paths[c.Path].Sport = c.Sport
				s.Paths[c.Path].Gen++
			}
			if a.Fail != nil {
				fails++
			}
			if fails > 0 && (a.Probe != 0 || len(a.Sets) != 0) && a.Fail == nil {
				t.Fatal("acts after the failure")
			}
		}
		if fails > 1 {
			t.Fatalf("failed %d times", fails)
		}
	})
}
