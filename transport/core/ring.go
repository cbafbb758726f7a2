// SPDX-License-Identifier: Apache-2.0

package core

// ringPolicy tells what this host's own transmit ring dropped from what the network lost. A driver
// says how many frames it dropped and never which; all connections of the interface share the count.
type ringPolicy struct {
	begun    bool
	seen     uint32 // the ring's count at the last tick
	explains uint32 // losses that are still to show, at most: drops that no loss of ours was put down to
	fadeNs   int64  // clockNs when explains was halved last
}

// count takes the ring's count of drops. A loss shows a round trip after its drop or never, where it
// hit another connection, so what explains nothing within some 10 ms fades.
func (r *ringPolicy) count(clockNs int64, drops uint32) {
	if clockNs-r.fadeNs >= 10*tickNs {
		r.fadeNs = clockNs
		r.explains /= 2
	}
	if r.begun {
		r.explains += drops - r.seen
	}
	r.begun, r.seen = true, drops
}

// explain says how many of lost packets the ring's drops account for, and uses those up.
func (r *ringPolicy) explain(lost uint32) uint32 {
	n := min(lost, r.explains)
	r.explains -= n
	return n
}

// countRings takes what each plane's transmit ring has dropped.
func (p *Policy) countRings(s *Snapshot) {
	var done uint64 // planes that were counted in this tick
	for i := range s.Paths {
		plane := p.cfg.Params.Paths[i].Plane
		for len(p.rings) <= plane {
			p.rings = append(p.rings, ringPolicy{})
		}
		if bit := uint64(1) << (plane % 64); done&bit == 0 {
			done |= bit
			p.rings[plane].count(p.clockNs, s.Paths[i].RingDrops)
		}
	}
}

// naturalQuietNs is how long path i is silent because its packets leave seldom: many paths share a
// ring, or the pump, and the peer acknowledges every 8th packet. A path whose last packet asked for
// an ACK has no such excuse.
func (p *Policy) naturalQuietNs(i int, s *Snapshot) int64 {
	if s.Unasked>>i&1 == 0 {
		return 0
	}
	return min(ackEvery*p.paths[i].gapNs, maxQuietNs)
}

// gauge keeps the time between two packets of each path, smoothed over ticks that had any.
func (p *Policy) gauge(dtNs int64, s *Snapshot) {
	for i := range p.paths {
		pp := &p.paths[i]
		n := int64(s.Paths[i].Sent - pp.last.Sent)
		if n <= 0 || dtNs <= 0 {
			continue
		}
		if pp.gapNs == 0 {
			pp.gapNs = dtNs / n
		} else {
			pp.gapNs += (dtNs/n - pp.gapNs) / 4
		}
	}
}
