// SPDX-License-Identifier: Apache-2.0

package core

import (
	"math"
	"slices"
)

// proof is how far it is shown that a suspect path carries data. Short packets prove nothing: they
// pass where full-size ones are dropped, because an MTU on the way is too small or a queue full. So a
// path is first asked by a short probe, which its address must answer before anything larger goes
// there, then by a full-size one; when that has arrived, or a full-size data packet, it is proven.
type proof struct {
	reached bool // something was answered, so that the address is the peer's
	asked   bool // a full-size probe was ordered
	ordered bool // one has not left yet
	sent    bool // one has left, before pseq `behind` of generation gen
	behind  uint32
	gen     uint8
	rounds  int  // in a row: the full-size probe was lost, and what left behind it arrived
	narrow  bool // too many of these: full-size packets do not fit
	proven  bool
}

// left notes that the full-size probe that was ordered has left.
func (f *proof) left(s *PathSnapshot) {
	if f.ordered && !f.sent {
		f.sent, f.behind, f.gen = true, s.Next, s.Gen
	}
	f.ordered = false
}

// answered takes an ACK on the path. A full-size probe is lost once something arrived that left behind it:
// while nothing has, it may stand in a slow queue.
func (f *proof) answered(now, last *PathSnapshot) {
	switch {
	case now.Proofs != last.Proofs:
		*f = proof{proven: true}
	case now.Gen != f.gen:
		f.sent = false
	case now.State == PathSuspect && f.sent && int32(now.Heard-f.behind) >= 0:
		f.sent = false
		f.rounds++
	}
	f.reached = true
}

// doubt counts the losses of an active path on which no data arrives, although its probes may be
// answered. A path that goes on like this is held back longer each time.
type doubt struct {
	lost   uint32 // in a row
	pkts   uint32 // arrived meanwhile, probes included
	probes uint32 // sent meanwhile
	times  int    // in a row that the path was given up for this
	holdNs int64  // clockNs before which it is not used again
}

// distrust makes a path suspect that loses everything but probes.
func (p *Policy) distrust(i int, s *PathSnapshot) {
	pp := &p.paths[i]
	d := &pp.doubt
	if s.State != PathActive {
		d.lost, d.pkts, d.probes = 0, 0, 0
		return
	}
	d.pkts += sinceGen(s, &pp.last, s.PeerPkts, pp.last.PeerPkts)
	d.probes += s.Probes - pp.last.Probes
	// At least one of them was data. Two probes may have been under way before.
	if d.pkts > d.probes+2 {
		*d = doubt{}
		return
	}
	if pp.gaveUp != 1 { // not our own doing
		d.lost += s.Lost - pp.last.Lost
	}
	if d.lost < lossesToDoubt || slices.ContainsFunc(p.act.States, func(c PathStateSet) bool { return c.Path == i }) {
		return
	}
	d.holdNs = p.clockNs + min(minHoldNs<<min(d.times, 20), maxHoldNs)
	d.times++
	p.suspect(i)
}

// narrow says of paths that full-size packets do not fit. If that is all that are there, and no
// request has been begun, messages are cut into smaller packets.
func (p *Policy) narrow(s *Snapshot) {
	reached, narrow := 0, 0
	for i := range p.paths {
		f := &p.paths[i].proof
		if s.Paths[i].State == PathDown || !f.reached {
			continue
		}
		reached++
		if s.Paths[i].State == PathActive {
			continue
		}
		if !f.narrow && f.rounds >= p.roundsToNarrow() {
			f.narrow = true
			p.act.TooLong = append(p.act.TooLong, i)
		}
		if f.narrow {
			narrow++
		}
	}
	if reached == 0 || narrow < reached || s.MsnNext != 0 {
		return
	}
	for _, payload := range Payloads {
		if payload >= p.cut {
			continue
		}
		p.packetBytes -= p.cut - payload
		p.cut = payload
		p.act.Cut = payload
		for i := range p.paths {
			p.paths[i].proof = proof{reached: p.paths[i].proof.reached}
		}
		return
	}
}

// roundsToNarrow is how many full-size probes a path loses in a row before it is too narrow: fewer where
// other paths lose them, too.
func (p *Policy) roundsToNarrow() int { return max(leastToNarrow, probesToNarrow/len(p.paths)) }

// dueToProve is when a suspect path is to be looked at again, on the policy's clock: soon while it
// answers, for the next step may follow.
func (p *Policy) dueToProve(pp *pathPolicy, hurry bool) int64 {
	switch {
	case pp.proof.proven:
		return max(pp.doubt.holdNs, p.clockNs)
	case pp.proof.narrow && !pp.probing:
		return max(pp.askedNs+p.narrowPause(hurry), p.clockNs)
	case pp.unanswered == 0:
		return p.clockNs + proveNs
	}
	return math.MaxInt64 // the probe's deadline counts
}

// dueToAsk says whether a suspect path that is not being asked should be: at once at first and after
// the first answer, then once a round trip.
func (p *Policy) dueToAsk(pp *pathPolicy, s *PathSnapshot, hurry bool) bool {
	pause := max(minProbeNs, int64(s.SrttNs))
	if pp.proof.narrow {
		pause = p.narrowPause(hurry)
	}
	return !pp.proof.asked || p.clockNs-pp.askedNs >= pause
}

// narrowPause is how long a path that is too narrow is left alone.
func (p *Policy) narrowPause(hurry bool) int64 {
	if hurry {
		return maxProbeNs
	}
	return int64(p.cfg.Keepalive)
}

// tooLong lists the paths that short packets pass and full-size ones do not.
func (p *Policy) tooLong() (paths []int) {
	for i := range p.paths {
		if p.paths[i].proof.narrow {
			paths = append(paths, i)
		}
	}
	return paths
}
