// SPDX-License-Identifier: Apache-2.0

package core

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/metaroce/metaroce/cc"
)

// flow is a connection that always has data, over planes with virtual queues, in
// steps of 10 us: what mr_tx and mr_rx do, as far as the policy can see it. Lost
// packets are repaired by sending their bytes again on whatever path comes next.
type flow struct {
	rnd    *rand.Rand
	p      *Policy
	s      Snapshot
	nowNs  int64
	loss   float64 // each direction
	planes []flowPlane
	paths  []flowPath
	rr     int
	full   uint32 // mask of paths that get a full-size probe

	delivered int // packets that arrived
	suspects  int
	rerolls   int
	fail      error
}

type flowPlane struct {
	down         bool
	rateBps      float64
	queue        float64
	drops, bytes int
}

type flowPath struct {
	plane    int
	credit   float64
	arrived  uint32 // by the peer in this generation, and the marks among them
	marks    uint32
	missed   uint32 // lost so far
	reported uint32 // of missed
	since    int
	gap      bool
	brakeNs  int64
}

const flowStepNs = 10 * us

func newFlow(seed uint64, paths int) *flow {
	f := &flow{rnd: rand.New(rand.NewPCG(seed, 2)), nowNs: 1000 * sec}
	for range 4 {
		f.planes = append(f.planes, flowPlane{rateBps: 250e6})
	}
	params := ConnParams{Payload: 3072}
	for i := range paths {
		params.Paths = append(params.Paths, PathParams{Plane: i % 4, Sport: uint16(50000 + i)})
		f.s.Paths = append(f.s.Paths, PathSnapshot{SrttNs: 10_000, MinRttNs: 10_000, Sport: uint16(50000 + i)})
		f.paths = append(f.paths, flowPath{plane: i % 4})
	}
	f.s.State, f.s.Busy = ConnOpen, true
	f.p = NewPolicy(PolicyConfig{Params: params, Peer: "198.18.0.2", Rand: testRand(seed)})
	f.apply(f.p.Start(f.nowNs))
	return f
}

func (f *flow) lost(plane int) bool {
	return f.planes[plane].down || f.rnd.Float64() < f.loss
}

// ack: the peer's whole picture of path i arrives.
func (f *flow) ack(i int) {
	fp, ps := &f.paths[i], &f.s.Paths[i]
	if f.lost(fp.plane) {
		return
	}
	ps.Acks++
	ps.LastAckNs = f.nowNs
	ps.Lost += fp.missed - fp.reported
	fp.reported = fp.missed
	ps.PeerPkts = fp.arrived
	if marked := fp.marks != ps.PeerCe; marked && ps.Pace != 0 && f.nowNs-fp.brakeNs >= 50*us {
		fp.brakeNs = f.nowNs
		ps.Pace += ps.Pace / 8
	}
	ps.PeerCe = fp.marks
	ps.Una, ps.Heard = ps.Next, ps.Next-1
	f.s.PsnCum = f.s.PsnNext
}

// send puts one packet on path i; ask: its ACK comes at once.
func (f *flow) send(i int, frame float64, ask bool) {
	fp, ps := &f.paths[i], &f.s.Paths[i]
	pl := &f.planes[fp.plane]
	ps.Next++
	if f.lost(fp.plane) {
		fp.missed++
		fp.gap = true
		return
	}
	if pl.queue+frame > 512<<10 {
		pl.drops++
		fp.missed++
		fp.gap = true
		return
	}
	marked := pl.queue > 64<<10
	pl.queue += frame
	pl.bytes += int(frame)
	fp.arrived++
	if marked {
		fp.marks++
	}
	if fp.since++; ask || marked || fp.gap || fp.since >= 8 {
		fp.since, fp.gap = 0, false
		f.ack(i)
	}
}

func (f *flow) run(ns int64) {
	frame := float64(f.p.packetBytes)
	for end := f.nowNs + ns; f.nowNs < end; f.nowNs += flowStepNs {
		for k := range f.planes {
			f.planes[k].queue = max(0, f.planes[k].queue-f.planes[k].rateBps*float64(flowStepNs)/1e9)
		}
		for i := range f.s.Paths {
			if f.s.ProbeOn>>i&1 != 0 {
				f.s.Paths[i].Probes++
				f.send(i, 100, true)
				if before := f.paths[i].arrived; f.full>>i&1 != 0 {
					f.send(i, frame, true)
					if f.paths[i].arrived != before && f.s.Paths[i].PeerPkts == f.paths[i].arrived && f.s.Paths[i].State == PathSuspect {
						f.s.Paths[i].Proofs++
					}
				}
			}
		}
		f.s.ProbeOn, f.full = 0, 0
		for k := range f.s.Paths {
			i := (f.rr + k) % len(f.s.Paths)
			ps, fp := &f.s.Paths[i], &f.paths[i]
			rate := float64(cc.RateBps(ps.Pace))
			fp.credit = min(fp.credit+rate*float64(flowStepNs)/1e9, max(frame, rate*100e-6))
			for ps.State == PathActive && fp.credit >= frame && ps.Next-ps.Una < ps.Cwnd {
				fp.credit -= frame
				ps.Sent++
				ps.SentBytes += uint64(frame)
				f.s.PsnNext++
				before := fp.arrived
				f.send(i, frame, ps.Next+1-ps.Una >= ps.Cwnd)
				f.delivered += int(fp.arrived - before)
			}
		}
		f.rr++
		if f.nowNs >= f.p.dueNs {
			f.apply(f.p.Tick(f.nowNs, &f.s, true))
		}
	}
}

func (f *flow) apply(a Actions) {
	for _, c := range a.States {
		ps := &f.s.Paths[c.Path]
		ps.State = c.State
		if c.State == PathSuspect {
			f.suspects++
			ps.Una = ps.Next
		}
	}
	for _, c := range a.Rerolls {
		f.rerolls++
		ps := &f.s.Paths[c.Path]
		ps.Gen++
		ps.Sport, ps.Una = c.Sport, ps.Next
		ps.PeerPkts, ps.PeerCe = 0, 0
		f.paths[c.Path].arrived, f.paths[c.Path].marks = 0, 0
	}
	for _, i := range a.Timeouts {
		f.s.Paths[i].Una = f.s.Paths[i].Next
	}
	for _, c := range a.Sets {
		ps := &f.s.Paths[c.Path]
		ps.Cwnd, ps.Pace, ps.Tolerance = c.Cwnd, c.Pace, c.Tolerance
	}
	f.s.ProbeOn |= a.Probe
	f.full |= a.Full
	if a.Fail != nil {
		f.fail = a.Fail
	}
}

// goodput runs for ns and gives the part of what the planes that are up could carry.
func (f *flow) goodput(ns int64) float64 {
	room := 0.0
	for i := range f.planes {
		if !f.planes[i].down {
			room += f.planes[i].rateBps * float64(ns) / 1e9
		}
	}
	before := f.delivered
	f.run(ns)
	return float64(f.delivered-before) * float64(f.p.packetBytes) / room
}

func TestFlowFillsLossyPlanes(t *testing.T) {
	for _, tc := range []struct {
		loss         float64
		atLeast      float64 // of the planes, repairs not counted
		mostSuspects int     // in half a second
	}{
		{0, 0.97, 0},
		{0.01, 0.95, 0},
		{0.1, 0.85, 2},
	} {
		for seed := range uint64(2) {
			t.Run(fmt.Sprintf("loss %v/seed %d", tc.loss, seed), func(t *testing.T) {
				f := newFlow(seed, 8)
				f.loss = tc.loss
				f.run(100 * ms)
				if got := f.goodput(500 * ms); got < tc.atLeast {
					t.Errorf("goodput %.3f of the planes, want %.2f", got, tc.atLeast)
				}
				if f.suspects > tc.mostSuspects || f.rerolls > 0 || f.fail != nil {
					t.Errorf("%d paths suspect, %d re-rolls, error %v; want at most %d suspect", f.suspects, f.rerolls, f.fail, tc.mostSuspects)
				}
			})
		}
	}
}

func TestFlowSurvivesALostPlane(t *testing.T) {
	for _, loss := range []float64{0, 0.1} {
		for seed := range uint64(2) {
			t.Run(fmt.Sprintf("loss %v/seed %d", loss, seed), func(t *testing.T) {
				f := newFlow(seed, 8)
				f.loss = loss
				f.run(100 * ms)
				f.planes[1].down = true
				f.run(20 * ms)
				for i := range f.s.Paths {
					if want := PathState(boolInt(i%4 == 1)); loss == 0 && f.s.Paths[i].State != want {
						t.Errorf("path %d is %v 20 ms after plane 1 went down, want %v", i, f.s.Paths[i].State, want)
					}
				}
				if got := f.goodput(30 * ms); got < 0.9*(1-loss) {
					t.Errorf("20 to 50 ms after: goodput %.3f of the rest, want %.2f", got, 0.9*(1-loss))
				}
				f.run(300 * ms)
				if f.fail != nil {
					t.Fatalf("failed with three planes up: %v", f.fail)
				}
				f.planes[1].down = false
				f.run(200 * ms)
				if got := f.goodput(200 * ms); got < 0.9*(1-loss) {
					t.Errorf("after it came back: goodput %.3f of all, want %.2f", got, 0.9*(1-loss))
				}
			})
		}
	}
}

func TestFlowOutlivesTheRetryTimeOnOnePlane(t *testing.T) {
	f := newFlow(1, 8)
	for i := range f.planes[1:] {
		f.planes[i+1].down = true
	}
	f.run(2500 * ms)
	if f.fail != nil {
		t.Errorf("failed with a plane up: %v", f.fail)
	}
}

func TestFlowFailsWhenAllPlanesAreGone(t *testing.T) {
	f := newFlow(1, 8)
	f.run(100 * ms)
	for i := range f.planes {
		f.planes[i].down = true
	}
	start := f.nowNs
	for f.fail == nil && f.nowNs-start < 4*sec {
		f.run(10 * ms)
	}
	if took := f.nowNs - start; took < 2*sec || took > 2300*ms {
		t.Errorf("failed after %v, want 2s and little more", time.Duration(took))
	}
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}
