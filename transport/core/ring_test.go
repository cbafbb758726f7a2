// SPDX-License-Identifier: Apache-2.0

package core

import (
	"testing"
)

// ringRig is a policy of two paths over one transmit ring, one tick old; tell gives what congestion
// control was told of path 0 in a tick.
func ringRig(t *testing.T) (r *rig, tell func() (lost, ringLost uint32)) {
	t.Helper()
	r = newRig(t, 2)
	for i := range r.p.cfg.Params.Paths {
		r.p.cfg.Params.Paths[i].Plane = 0
		r.s.Paths[i].RingDrops = 1000 // of other connections, long ago
	}
	rec := &recorder{}
	r.p.cfg.Controller = rec
	r.tick(ms)
	return r, func() (uint32, uint32) {
		r.tick(ms)
		s := rec.samples[len(rec.samples)-2]
		return s.Lost, s.RingLost
	}
}

func TestWhatTheOwnRingDroppedIsNoLossOfTheNetwork(t *testing.T) {
	for _, tc := range []struct {
		name              string
		drops, lost, wait uint32
		network, ring     uint32
	}{
		{"all explained", 20, 12, 0, 0, 12},
		{"more lost than dropped", 20, 50, 0, 30, 20},
		{"old drops of other connections explain nothing", 0, 5, 0, 5, 0},
		{"a drop explains a loss that shows 5 ms later", 20, 12, 5, 0, 12},
		{"but not one that shows 200 ms later", 20, 12, 200, 12, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r, tell := ringRig(t)
			for i := range r.s.Paths {
				r.s.Paths[i].RingDrops += tc.drops
			}
			for range tc.wait {
				r.tick(ms)
			}
			r.s.Paths[0].Lost += tc.lost
			if network, ring := tell(); network != tc.network || ring != tc.ring {
				t.Errorf("told %d lost and %d of the ring, want %d and %d", network, ring, tc.network, tc.ring)
			}
		})
	}
}

func TestADropExplainsOneLossOnly(t *testing.T) {
	r, tell := ringRig(t)
	for i := range r.s.Paths {
		r.s.Paths[i].RingDrops += 8
	}
	r.s.Paths[0].Lost += 8
	tell()
	r.s.Paths[0].Lost += 8
	if network, ring := tell(); network != 8 || ring != 0 {
		t.Errorf("told %d lost and %d of the ring, want 8 and 0: those drops explained others", network, ring)
	}
}

// TestPathOfASharedRingIsNotProbedTooEarly: 128 paths on one ring of 500 000 packets a second send one
// in 250 us each, and the peer acknowledges every 8th.
func TestPathOfASharedRingIsNotProbedTooEarly(t *testing.T) {
	for _, tc := range []struct {
		name    string
		unasked uint32
		probe   uint32
	}{
		{"no ACK is due yet", 1, 0},
		{"the last packet asked for its ACK", 0, 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, 1)
			for range 20 {
				r.send(0, 4)
				r.s.Paths[0].Sent += 4
				r.answer(0)
				r.tick(ms)
			}
			r.send(0, 4)
			r.s.Paths[0].Sent += 4
			r.s.Unasked = tc.unasked
			if a := r.tick(ms); a.Probe != tc.probe {
				t.Errorf("after 2 ms of silence probes %#b, want %#b", a.Probe, tc.probe)
			}
			if r.tick(ms + ms/2); r.probes[0] == 0 && r.s.ProbeOn == 0 && r.s.Paths[0].Probes == 0 {
				t.Error("not probed after 3.5 ms of silence")
			}
		})
	}
}
