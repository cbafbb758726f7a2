// SPDX-License-Identifier: Apache-2.0

package cc

import (
	"cmp"
	"time"
)

// AIMDConfig holds what can be tuned. The zero value of a field means its default.
type AIMDConfig struct {
	InitialBps   uint64        // a path's first rate, bytes a second; default 125e6 (1 Gbit/s)
	MinBps       uint64        // a path's least rate, bytes a second; default 1e6
	IncreaseBps  uint64        // additive increase of the whole connection, bytes a second a millisecond; default 8e6
	Gain         float64       // weight of the newest mark fraction; default 1/8
	Period       time.Duration // rates change at most this often; default 500 us
	HeavyLoss    float64       // loss fraction of a period that cuts the rate; default 0.5
	HeavyMinPkts uint32        // packets that a period must have for that; default 16
}

func (c *AIMDConfig) fill() {
	c.InitialBps = cmp.Or(c.InitialBps, 125_000_000)
	c.MinBps = cmp.Or(c.MinBps, 1_000_000)
	c.IncreaseBps = cmp.Or(c.IncreaseBps, 8_000_000)
	c.Gain = cmp.Or(c.Gain, 1.0/8)
	c.Period = cmp.Or(c.Period, 500*time.Microsecond)
	c.HeavyLoss = cmp.Or(c.HeavyLoss, 0.5)
	c.HeavyMinPkts = cmp.Or(c.HeavyMinPkts, 16)
}

const (
	// slackPackets is what a window allows beyond the bandwidth-delay product:
	// the peer acknowledges every 8th packet, and a sender's burst must fit.
	slackPackets = 32
	// timeoutPackets is the window right after a timeout.
	timeoutPackets = 4
	// limitedPeriods is how many periods in a row a path must leave most of its
	// rate unused before pacing is given up as useless.
	limitedPeriods = 4
	// quietBoostNs is how long a path must have been without a mark before its
	// additive increase starts to double, once each further boostStepNs.
	quietBoostNs = 20e6
	boostStepNs  = 5e6
	maxBoost     = 16
	// A queue that has grown past its mark takes time to drain even when the rate
	// is right again. While marks come without a pause the rate is cut once an
	// episode; meanwhile only a part of it, drain, is used.
	episodeNs = 4e6
	drain     = 0.8
	// overflowLoss is the loss fraction of a marked period that means a full queue.
	overflowLoss = 0.2
)

// AIMD is additive increase and multiplicative decrease by rate: DCTCP
// (SIGCOMM 2010, section 3.3; RFC 8257) with the rate in the place of the
// window, coupled over the connection's paths so that N paths are together as
// greedy as one (the aim of RFC 6356). See docs/adr for why it is the rate.
type AIMD struct {
	cfg    AIMDConfig
	paths  []aimdPath
	out    []PathRate
	lastNs int64
	begun  bool
}

type aimdPath struct {
	rate      float64 // bytes a second; kept while unpaced
	alpha     float64 // smoothed fraction of marked packets
	delivered float64 // smoothed, bytes a second
	slowStart bool
	unpaced   bool
	marked    bool // a mark was ever seen
	usable    bool
	limited   int     // periods in a row that used less than half of the rate
	calmNs    float64 // time since the last mark or cut
	episodeNs float64 // how long marks have come without a pause since the last cut
	drain     float64 // part of the rate that is used until the next period
	silenced  bool    // timed out and nothing delivered since

	// since the last change
	sinceNs                  float64
	pkts, ce, lost, timeouts uint32
	ringLost                 uint32
	bytes                    uint64
}

var _ Controller = (*AIMD)(nil)

// NewAIMD makes a controller of one connection.
func NewAIMD(cfg AIMDConfig) *AIMD {
	cfg.fill()
	return &AIMD{cfg: cfg}
}

// Name is "aimd".
func (a *AIMD) Name() string { return "aimd" }

// Start begins with the initial rate and 32 packets on each of n paths.
func (a *AIMD) Start(n int) []PathRate {
	a.paths = make([]aimdPath, n)
	a.out = make([]PathRate, n)
	for i := range a.paths {
		a.paths[i] = aimdPath{rate: float64(a.cfg.InitialBps), drain: 1, slowStart: true, usable: true}
		a.out[i] = PathRate{Window: slackPackets, RateBps: a.cfg.InitialBps}
	}
	return a.out
}

// Tick implements Controller.
func (a *AIMD) Tick(nowNs int64, s Sample) []PathRate {
	if len(a.paths) != len(s.Paths) {
		a.Start(len(s.Paths))
	}
	dtNs := float64(nowNs - a.lastNs)
	if !a.begun || dtNs < 0 {
		dtNs = 0
	}
	a.begun, a.lastNs = true, nowNs

	active := 0
	for i := range s.Paths {
		if s.Paths[i].Usable {
			active++
		}
	}
	for i := range a.paths {
		p, ps := &a.paths[i], &s.Paths[i]
		p.add(dtNs, ps)
		a.follow(p, ps.Usable)
		period := max(float64(a.cfg.Period), float64(ps.SrttNs))
		if p.sinceNs >= period && p.usable {
			a.update(p, active)
		}
		a.out[i] = p.result(ps, s.PacketBytes)
	}
	return a.out
}

// add collects a sample until the next change of the rate.
func (p *aimdPath) add(dtNs float64, ps *PathSample) {
	p.sinceNs += dtNs
	p.pkts += ps.Pkts
	p.ce += ps.CE
	p.lost += ps.Lost
	p.timeouts += ps.Timeouts
	p.ringLost += ps.RingLost
	p.bytes += ps.DeliveredBytes
}

func (p *aimdPath) clear() {
	p.sinceNs, p.pkts, p.ce, p.lost, p.timeouts, p.ringLost, p.bytes = 0, 0, 0, 0, 0, 0, 0
}

// follow restarts a path that comes back: at half of what it had, or, where no
// mark was ever seen, by slow start.
func (a *AIMD) follow(p *aimdPath, usable bool) {
	if usable == p.usable {
		return
	}
	p.usable = usable
	if !usable {
		if p.unpaced {
			p.rate = p.delivered
		}
		if !p.silenced { // else its timeout has cut it already
			a.cut(p, 0.5)
		}
		return
	}
	p.clear()
	p.unpaced, p.silenced, p.limited, p.delivered = false, false, 0, 0
	if p.marked {
		// What it had may be free again: let the increase grow at once.
		p.calmNs = quietBoostNs
		return
	}
	p.slowStart = true
	p.rate = min(p.rate, float64(a.cfg.InitialBps))
}

// update changes the rate once, by what was collected.
func (a *AIMD) update(p *aimdPath, active int) {
	defer p.clear()
	deliveredBps := float64(p.bytes) / p.sinceNs * 1e9
	if p.delivered == 0 {
		p.delivered = deliveredBps
	} else {
		p.delivered += (deliveredBps - p.delivered) / 4
	}
	used := max(deliveredBps, p.delivered) > p.rate/2
	total := p.pkts + p.lost
	heavy := total >= a.cfg.HeavyMinPkts && float64(p.lost) > a.cfg.HeavyLoss*float64(total)
	if p.timeouts > 0 {
		p.silenced = true
	} else if p.pkts > 0 {
		p.silenced = false
	}
	fraction := 0.0
	if p.ce > 0 {
		fraction = 1
		if p.pkts > p.ce {
			fraction = float64(p.ce) / float64(p.pkts)
		}
	}
	if p.pkts > 0 && !p.slowStart {
		p.alpha += a.cfg.Gain * (fraction - p.alpha)
	}

	p.drain = 1
	switch {
	case p.timeouts > 0 || heavy:
		if p.unpaced {
			p.rate = max(p.delivered, deliveredBps)
		}
		p.unpaced, p.limited = false, 0
		p.slowStart = p.slowStart && !heavy
		a.cut(p, 0.5)
	case p.ce > 0 && p.slowStart:
		// The rate doubled in one period at most: more than half was too much.
		keep := 1 - max(0.2, fraction/2)
		target := min(p.rate, deliveredBps) * keep
		if p.unpaced {
			target = max(deliveredBps, p.delivered) * keep
		} else {
			target = max(target, 0.4*p.rate)
		}
		p.rate = max(target, float64(a.cfg.MinBps))
		p.slowStart, p.unpaced, p.marked = false, false, true
		p.alpha = fraction
		p.calmNs, p.limited = 0, 0
	case p.ce > 0:
		p.marked, p.unpaced, p.limited = true, false, 0
		if fraction > 0.5 && float64(p.lost) > overflowLoss*float64(total) {
			// The queue overflows: what arrives is what there is.
			p.rate = max(min(p.rate, 0.9*deliveredBps), float64(a.cfg.MinBps))
			p.calmNs, p.episodeNs = 0, 0
			break
		}
		if p.calmNs > 0 || p.episodeNs >= episodeNs {
			a.cut(p, 1-p.alpha/2)
			p.episodeNs = 0
		}
		p.episodeNs += p.sinceNs
		if fraction > 0.5 {
			p.drain = drain
		}
	default:
		p.calmNs += p.sinceNs
		if p.ringLost > 0 {
			a.yieldToRing(p, deliveredBps)
			break
		}
		a.increase(p, used, active)
	}
}

// yieldToRing brings the rate of a path whose packets found the transmit ring full to what the ring
// lets out. That is no congestion: there is no cut, and slow start goes on with the next period. It
// halves at most, as a path that was asked for little delivers little.
func (a *AIMD) yieldToRing(p *aimdPath, deliveredBps float64) {
	if p.unpaced {
		return // there is no rate to lower; the ring's own limit holds
	}
	p.rate = max(min(p.rate, max(p.delivered, deliveredBps)), p.rate/2, float64(a.cfg.MinBps))
}

// cut lowers the rate to keep of what it was.
func (a *AIMD) cut(p *aimdPath, keep float64) {
	p.rate = max(p.rate*keep, float64(a.cfg.MinBps))
	p.calmNs = 0
}

// increase raises the rate after a period without congestion, if it was used.
func (a *AIMD) increase(p *aimdPath, used bool, active int) {
	if p.unpaced {
		return
	}
	if !used {
		// The application or the CPU is the limit. Where pacing never mattered it
		// only costs time: give it up until the first mark.
		if p.pkts > 0 {
			p.limited++
		}
		if !p.marked && p.limited >= limitedPeriods && p.rate >= 2*float64(a.cfg.InitialBps) {
			p.unpaced = true
		}
		return
	}
	p.limited = 0
	if p.slowStart {
		p.rate *= 2
		return
	}
	boost := 1.0
	for t := quietBoostNs; t < p.calmNs && boost < maxBoost; t += boostStepNs {
		boost *= 2
	}
	step := max(float64(a.cfg.IncreaseBps)/float64(max(active, 1)), p.rate/128) * p.sinceNs / 1e6 * boost
	p.rate += min(step, p.rate/4)
}

// result turns the state into a window and a rate. The window only bounds what
// is under way: twice what the rate needs for a round trip, and slack.
func (p *aimdPath) result(ps *PathSample, packetBytes int) PathRate {
	rate := p.rate
	out := PathRate{RateBps: uint64(p.rate * p.drain)}
	if p.unpaced {
		// Twice as generous: a window-limited path delivers a window a round trip.
		rate, out.RateBps = 2*p.delivered, 0
	}
	slack := slackPackets
	if p.silenced {
		slack = timeoutPackets
	}
	need := 2 * rate * float64(ps.SrttNs) / 1e9 / float64(max(packetBytes, 1))
	out.Window = uint32(min(max(float64(slack)+need, MinWindow), MaxWindow))
	return out
}
