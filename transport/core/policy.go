// SPDX-License-Identifier: Apache-2.0

package core

import (
	"math/rand/v2"
	"time"

	"github.com/metaroce/metaroce/cc"
)

// Timers of the policy. Ticks are about 1 ms apart while anything is under way.
const (
	tickNs          = int64(time.Millisecond)
	minQuietNs      = int64(200 * time.Microsecond) // finer than that Go's timers do not hold
	maxQuietNs      = int64(2 * time.Millisecond)
	minProbeNs      = int64(time.Millisecond) // first wait for a probe's answer
	maxProbeNs      = int64(100 * time.Millisecond)
	maxStopNs       = int64(100 * time.Millisecond) // more than that late: the program was stopped
	tolerancePeriod = int64(100 * time.Millisecond)
	blameNs         = int64(20 * time.Millisecond) // losses that a duplicate may explain

	probesToTimeout = 2 // unanswered probes that give up what is under way
	probesToSuspect = 3
	// firstFlightNs is how long the first data may be unanswered: of the way's rate and queues nothing is known yet,
	// and what all paths begin with fills a queue of 50 Mbit/s for 130 ms.
	firstFlightNs  = int64(200 * time.Millisecond)
	probesToReroll = 8    // further ones before the first re-roll, twice as many before each later one
	mostToReroll   = 512  // so that 64 generations outlast any outage that a retry time bridges
	pseqsToReroll  = 2048 // transmissions without an answer: half of what a receiver takes (wire.md section 6)
	rerollPause    = int64(time.Second)

	leastToNarrow = 6 // full-size probes that a path loses in a row, while what left behind them arrives
	// probesToNarrow is as many, over all paths. The receive buffers that virtio_net made for an MTU of 9000 before
	// it had a program cut such probes into pieces: a ring of 256, of which a probe uses up 3 and the short one 1.
	probesToNarrow = 96
	lossesToDoubt  = 32 // losses in a row on a path where no data arrives
	minHoldNs      = int64(time.Millisecond)
	maxHoldNs      = int64(500 * time.Millisecond)
	proveNs        = minQuietNs // between looks at a path that is to be proven soon
	maxTolerance   = 64
	toleranceStep  = 4
	ackEvery       = 8 // MR_ACK_EVERY
	etherBytes     = 14
	immBytes       = 8 // which the longest packet has besides
)

// PolicyConfig is what a Policy needs to know.
type PolicyConfig struct {
	Params ConnParams
	// Peer is how errors name the other end, for example its set-up address.
	Peer string
	// RetryTime without any answer fails the connection; default 2 s.
	RetryTime time.Duration
	// Keepalive is how often an idle connection asks whether its peer is there;
	// default 10 s.
	Keepalive time.Duration
	// Controller is the congestion control; default cc.AIMD.
	Controller cc.Controller
	// Rand draws source ports.
	Rand *rand.Rand
}

// Policy is one connection's timers, path states and congestion control as a
// state machine over snapshots. It is not safe for concurrent use.
type Policy struct {
	cfg         PolicyConfig
	packetBytes int
	cut         int // bytes of payload that messages are cut into
	paths       []pathPolicy
	rings       []ringPolicy // by plane
	sample      cc.Sample
	act         Actions
	started     bool
	failed      bool

	// clockNs counts the time that the program ran: a tick that comes later than
	// promised by more than maxStopNs adds only that much.
	clockNs         int64
	lastNs, dueNs   int64 // of the engine's clock: last Tick, and the next one as promised
	retryNs         int64 // time without an answer, or with data outstanding and no progress
	stuck           bool  // data was outstanding at the last tick
	cum             uint32
	counted         bool  // cum is known
	flown           bool  // data was acknowledged
	heardNs         int64 // clockNs when any path last heard the peer
	keepaliveNs     int64 // clockNs of the last keepalive probe
	keepaliveNow    bool
	turn            int // path that was asked last for credit or keepalive
	creditOn        bool
	credit          uint32
	creditWaitNs    int64
	creditDueNs     int64
	dups, lost      float64 // recent, fading
	giveUpNs        int64   // clockNs when a path's packets were last given up unseen
	fadeNs, decayNs int64
}

// pathPolicy is what the policy remembers of a path.
type pathPolicy struct {
	last       PathSnapshot
	proof      proof
	doubt      doubt
	rerollAt   int   // unanswered probes at which the port is re-rolled next
	rerolledNs int64 // clockNs of the last re-roll
	quietNs    int64 // clockNs since when nothing was heard with data under way
	probing    bool  // a probe was ordered and is neither answered nor given up
	askedNs    int64 // clockNs when the last probe was ordered
	deadlineNs int64 // clockNs when it counts as unanswered
	unanswered int   // probes in a row
	timeouts   uint32
	gaveUp     int // 1: this tick's growth of lost is our own doing
	lostNs     int64
	tolerance  uint8
	gapNs      int64 // time between two packets, smoothed
	frameBytes float64
	sport      uint16
}

// NewPolicy makes the policy of one connection with cfg.Params.Paths.
func NewPolicy(cfg PolicyConfig) *Policy {
	if cfg.RetryTime <= 0 {
		cfg.RetryTime = 2 * time.Second
	}
	if cfg.Keepalive <= 0 {
		cfg.Keepalive = 10 * time.Second
	}
	if cfg.Controller == nil {
		cfg.Controller = cc.NewAIMD(cc.AIMDConfig{})
	}
	p := &Policy{cfg: cfg, paths: make([]pathPolicy, len(cfg.Params.Paths))}
	ipBytes := 20
	for i, path := range cfg.Params.Paths {
		if path.Remote.Is6() {
			ipBytes = 40
		}
		p.paths[i].sport = path.Sport
	}
	// Ethernet, IP, UDP, BTH, data header, RETH.
	p.packetBytes = etherBytes + ipBytes + 8 + 12 + 32 + 16 + cfg.Params.Payload
	p.sample = cc.Sample{PacketBytes: p.packetBytes, Paths: make([]cc.PathSample, len(p.paths))}
	for i := range p.paths {
		p.paths[i].rerollAt, p.paths[i].rerolledNs = probesToSuspect+probesToReroll, -rerollPause
	}
	p.cut = cfg.Params.Payload
	return p
}

// Start gives what the paths begin with. It is called once, before the
// connection opens.
func (p *Policy) Start(nowNs int64) Actions {
	p.started = true
	p.lastNs = nowNs
	p.reset()
	for i, r := range p.cfg.Controller.Start(len(p.paths)) {
		p.paths[i].frameBytes = float64(p.packetBytes)
		p.act.Sets = append(p.act.Sets, PathSet{Path: i, Cwnd: r.Window, Pace: cc.PaceNsPerKiB(r.RateBps)})
	}
	p.act.NextNs = nowNs + 1 // the paths are to be proven at once
	p.dueNs = p.act.NextNs
	return p.act
}

func (p *Policy) reset() {
	p.act = Actions{
		States: p.act.States[:0], Rerolls: p.act.Rerolls[:0],
		Timeouts: p.act.Timeouts[:0], Sets: p.act.Sets[:0], TooLong: p.act.TooLong[:0],
	}
}

// Tick decides what to do, given the connection's state at nowNs. pumpRan says
// whether the transmit pump has run since the last Tick: time in which it could
// not send does not count against the peer.
func (p *Policy) Tick(nowNs int64, s *Snapshot, pumpRan bool) Actions {
	if !p.started {
		p.Start(nowNs)
	}
	p.reset()
	if p.failed || s.State != ConnOpen {
		p.act.NextNs = nowNs + int64(p.cfg.Keepalive)
		p.lastNs, p.dueNs = nowNs, p.act.NextNs
		return p.act
	}
	dtNs := p.advance(nowNs)
	waiting := s.waiting()
	heard := false
	p.gauge(dtNs, s)
	for i := range p.paths {
		if s.ProbeOn>>i&1 == 0 {
			p.paths[i].proof.left(&s.Paths[i])
		}
		if p.hear(i, &s.Paths[i], nowNs, dtNs) {
			heard = true
		}
	}
	if heard {
		p.heardNs = p.clockNs
	}
	// A peer that may be gone is asked as often as one that has data to take.
	hurry := waiting || !s.anyActive()
	for i := range p.paths {
		p.watch(i, &s.Paths[i], s.ProbeOn>>i&1 != 0, hurry, p.naturalQuietNs(i, s))
		p.distrust(i, &s.Paths[i])
		p.keepWithinReach(i, &s.Paths[i])
	}
	p.narrow(s)
	p.askForCredit(s)
	p.askStalled(s)
	p.keepalive(s, waiting)
	p.retry(nowNs, dtNs, s, pumpRan, waiting, heard)
	p.reordering(s)
	p.control(nowNs, s)
	for i := range p.paths {
		p.paths[i].last = s.Paths[i]
	}
	p.flown = p.flown || p.counted && s.PsnCum != p.cum
	p.cum, p.counted = s.PsnCum, true
	p.act.NextNs = p.next(nowNs, s, waiting)
	p.dueNs = p.act.NextNs
	return p.act
}

// advance moves the policy's clock and returns by how much.
func (p *Policy) advance(nowNs int64) int64 {
	most := max(p.dueNs-p.lastNs, 0) + maxStopNs
	dtNs := min(max(nowNs-p.lastNs, 0), most)
	p.clockNs += dtNs
	p.lastNs = nowNs
	return dtNs
}

// hear notes what came in on path i and says whether anything did.
func (p *Policy) hear(i int, s *PathSnapshot, nowNs, dtNs int64) bool {
	pp := &p.paths[i]
	if s.Acks == pp.last.Acks {
		if s.State == PathDown || !s.outstanding() && !pp.probing {
			pp.quietNs = p.clockNs
		}
		return false
	}
	pp.quietNs = p.clockNs - min(max(nowNs-s.LastAckNs, 0), dtNs)
	pp.proof.answered(s, &pp.last)
	pp.probing, pp.unanswered = false, 0
	pp.rerollAt = probesToSuspect + probesToReroll
	return true
}

// watch runs the probe timer of path i. pending: the engine has not sent the
// probe that was ordered yet. naturalNs: see naturalQuietNs.
func (p *Policy) watch(i int, s *PathSnapshot, pending, hurry bool, naturalNs int64) {
	pp := &p.paths[i]
	switch {
	case s.State == PathDown:
		pp.probing, pp.unanswered = false, 0
	case s.State == PathSuspect && pp.proof.proven:
		if p.clockNs >= pp.doubt.holdNs {
			p.act.States = append(p.act.States, PathStateSet{Path: i, State: PathActive})
			pp.proof = proof{reached: true}
			pp.probing = false
		}
	case pp.probing && pending:
		// Not the peer's fault: it has not been asked yet.
		pp.deadlineNs = p.clockNs + p.probeWait(i, s, hurry)
		if s.State == PathSuspect {
			p.act.Probe |= 1 << i // it may be held for a repair that is needed no more
		}
	case pp.probing:
		// A wait that was chosen while nothing was to be sent may be long.
		pp.deadlineNs = min(pp.deadlineNs, p.clockNs+p.probeWait(i, s, hurry))
		if p.clockNs >= pp.deadlineNs {
			p.unanswered(i, s, hurry)
		}
	case s.State == PathSuspect && p.dueToAsk(pp, s, hurry):
		p.probe(i, s, hurry)
	case s.State == PathActive && s.outstanding() && p.clockNs-pp.quietNs >= quietLimit(p.packetBytes, s, naturalNs):
		p.probe(i, s, hurry)
	}
}

// unanswered counts a probe that got no answer in time, draws the consequences
// and sends the next one.
func (p *Policy) unanswered(i int, s *PathSnapshot, hurry bool) {
	pp := &p.paths[i]
	pp.probing = false
	pp.unanswered++
	patient := !p.flown && s.outstanding() && p.clockNs-pp.quietNs < firstFlightNs
	switch {
	case s.State == PathActive && patient:
	case s.State == PathActive && pp.unanswered >= probesToSuspect:
		p.suspect(i)
	case s.State == PathActive && pp.unanswered == probesToTimeout && s.outstanding():
		p.act.Timeouts = append(p.act.Timeouts, i)
		pp.gaveUp, p.giveUpNs = 2, p.clockNs
	case s.State == PathSuspect && pp.unanswered >= pp.rerollAt:
		pp.rerollAt += min(pp.rerollAt-probesToSuspect, mostToReroll)
		p.reroll(i)
	}
	p.probe(i, s, hurry)
}

// suspect takes path i out of use until a full-size packet has arrived on it.
func (p *Policy) suspect(i int) {
	pp := &p.paths[i]
	p.act.States = append(p.act.States, PathStateSet{Path: i, State: PathSuspect})
	pp.proof = proof{reached: pp.proof.reached}
	pp.timeouts++
	pp.gaveUp, p.giveUpNs = 2, p.clockNs
	p.keepaliveNow = true
}

// reroll gives path i another source port, and with it perhaps another way through the network.
func (p *Policy) reroll(i int) {
	pp := &p.paths[i]
	pp.sport = drawSport(p.cfg.Rand, p.sportTaken)
	p.act.Rerolls = append(p.act.Rerolls, PathReroll{Path: i, Sport: pp.sport})
	pp.rerolledNs, p.giveUpNs = p.clockNs, p.clockNs
}

// keepWithinReach begins a new generation before a path's transmissions are further ahead of what
// the peer has shown to know than a receiver takes.
func (p *Policy) keepWithinReach(i int, s *PathSnapshot) {
	if s.Next-s.Heard >= pseqsToReroll && p.clockNs-p.paths[i].rerolledNs >= rerollPause {
		p.reroll(i)
	}
}

func (p *Policy) sportTaken(port uint16) bool {
	for i := range p.paths {
		if p.paths[i].sport == port {
			return true
		}
	}
	return false
}

// probe orders a probe on path i unless one is under way.
func (p *Policy) probe(i int, s *PathSnapshot, hurry bool) {
	pp := &p.paths[i]
	if pp.probing || s.State == PathDown {
		return
	}
	pp.probing = true
	pp.askedNs = p.clockNs
	pp.deadlineNs = p.clockNs + p.probeWait(i, s, hurry)
	p.act.Probe |= 1 << i
	if s.State == PathSuspect && pp.proof.reached {
		p.act.Full |= 1 << i
		pp.proof.asked, pp.proof.ordered = true, true
	}
}

// probeWait is how long a probe's answer may take: it doubles with each
// unanswered one, up to 100 ms, and on an idle connection up to the keepalive's
// period, so that a dead plane costs nothing there.
func (p *Policy) probeWait(i int, s *PathSnapshot, hurry bool) int64 {
	most := maxProbeNs
	if !hurry && s.State == PathSuspect {
		most = int64(p.cfg.Keepalive)
	}
	wait := max(minProbeNs, 4*int64(s.SrttNs))
	return min(wait<<min(p.paths[i].unanswered, 20), most)
}

// quietLimit is how long a path with data under way may be silent: two round
// trips, and the time in which the packets get out that the peer collects for one
// ACK: as pacing lets them, or as they were seen to, naturalNs.
func quietLimit(packetBytes int, s *PathSnapshot, naturalNs int64) int64 {
	pacedNs := int64(ackEvery*packetBytes) * int64(s.Pace) / 1024
	return max(2*int64(s.SrttNs), minQuietNs+min(max(pacedNs, naturalNs), maxQuietNs))
}

// pick gives the next active path in turn, or -1. A path that is being asked
// already is as good as one that is to be asked.
func (p *Policy) pick(s *Snapshot) int {
	for k := range p.paths {
		if i := (p.turn + 1 + k) % len(p.paths); s.Paths[i].State == PathActive {
			p.turn = i
			return i
		}
	}
	return -1
}

// askForCredit probes while the sender waits for a receive: every 1 ms, doubling
// to 100 ms, so that it learns of a later post.
func (p *Policy) askForCredit(s *Snapshot) {
	if !s.NoCredit {
		p.creditOn = false
		return
	}
	if !p.creditOn || s.Credit != p.credit {
		p.creditOn, p.credit = true, s.Credit
		p.creditWaitNs = tickNs
		p.creditDueNs = p.clockNs + p.creditWaitNs
		return
	}
	if p.clockNs < p.creditDueNs {
		return
	}
	if i := p.pick(s); i >= 0 {
		p.probe(i, &s.Paths[i], true)
	}
	p.creditWaitNs = min(2*p.creditWaitNs, maxProbeNs)
	p.creditDueNs = p.clockNs + p.creditWaitNs
}

// askStalled probes when packets are unacknowledged and no active path has
// anything under way that would bring an ACK.
func (p *Policy) askStalled(s *Snapshot) {
	if s.PsnNext == s.PsnCum || p.clockNs-p.heardNs < 2*tickNs {
		return
	}
	for i := range s.Paths {
		if s.Paths[i].State == PathActive && (s.Paths[i].outstanding() || p.paths[i].probing) {
			return
		}
	}
	if i := p.pick(s); i >= 0 {
		p.probe(i, &s.Paths[i], true)
	}
}

// keepalive asks an idle peer whether it is there. If the path that was asked
// turns out to be dead, the next one is asked at once.
func (p *Policy) keepalive(s *Snapshot, waiting bool) {
	now := p.keepaliveNow
	p.keepaliveNow = false
	if waiting || !now && p.clockNs-max(p.heardNs, p.keepaliveNs) < int64(p.cfg.Keepalive) {
		return
	}
	p.keepaliveNs = p.clockNs
	for _, c := range p.act.States {
		// Counts as suspect already for the choice.
		if c.State == PathSuspect && s.Paths[c.Path].State == PathActive {
			p.turn = c.Path
		}
	}
	if i := p.pick(s); i >= 0 {
		p.probe(i, &s.Paths[i], false)
	}
}

// retry fails the connection when data is outstanding and psn_cum has stood still for the retry
// time, whatever else the peer answers; and when a peer that nothing is outstanding with has been
// asked and has said nothing for that long. The wait for credit is the latter.
func (p *Policy) retry(nowNs, dtNs int64, s *Snapshot, pumpRan, waiting, heard bool) {
	// What was posted and cannot leave because no path may carry it is outstanding, too.
	stuck := s.PsnNext != s.PsnCum || waiting && !s.NoCredit && !s.anyActive()
	begins := stuck && !p.stuck // this tick may come long after the last one, and the data just now
	p.stuck = stuck
	if begins || s.PsnCum != p.cum || heard && !stuck {
		p.retryNs = 0
		return
	}
	asked, active, up := false, s.anyActive(), false
	for i := range s.Paths {
		up = up || s.Paths[i].State != PathDown
	}
	for i := range s.Paths {
		// On an idle connection a dead plane says nothing about the peer as long as
		// other paths are there to be asked.
		if p.paths[i].unanswered > 0 && (waiting || !active || s.Paths[i].State == PathActive) {
			asked = true
		}
	}
	if !stuck && !asked && (up || !waiting) || !pumpRan && s.ProbeOn != 0 {
		return
	}
	p.retryNs += dtNs
	if p.retryNs < int64(p.cfg.RetryTime) {
		return
	}
	p.failed = true
	p.act.Fail = p.retryExceeded(nowNs, s)
}

// reordering adapts the tolerances: a duplicate at the peer soon after a path
// reported a loss means that the packet was late and not lost.
func (p *Policy) reordering(s *Snapshot) {
	var dups, lost uint32
	for i := range s.Paths {
		ps, pp := &s.Paths[i], &p.paths[i]
		dups += sinceGen(ps, &pp.last, ps.PeerDups, pp.last.PeerDups)
		if n := ps.Lost - pp.last.Lost; n > 0 && pp.gaveUp != 1 {
			lost += n
			pp.lostNs = p.clockNs
		}
	}
	if p.clockNs-p.fadeNs >= 10*tickNs {
		p.fadeNs = p.clockNs
		p.dups, p.lost = p.dups/2, p.lost/2
	}
	p.dups += float64(dups)
	p.lost += float64(lost)
	// Few duplicates among many losses come from ACKs that were lost, and those
	// after a path was given up are no surprise.
	grow := dups > 0 && 4*p.dups >= p.lost && (p.giveUpNs == 0 || p.clockNs-p.giveUpNs > blameNs)
	decay := p.clockNs-p.decayNs >= tolerancePeriod
	if grow || decay {
		p.decayNs = p.clockNs
	}
	for i := range p.paths {
		pp := &p.paths[i]
		switch {
		case grow && pp.lostNs > 0 && p.clockNs-pp.lostNs <= blameNs:
			pp.tolerance = min(pp.tolerance+toleranceStep, maxTolerance)
		case decay && pp.tolerance > 0:
			pp.tolerance -= max(1, pp.tolerance/8)
		}
	}
}

// sinceGen is the growth of a counter that starts anew with each generation.
func sinceGen(now, last *PathSnapshot, count, before uint32) uint32 {
	if now.Gen != last.Gen {
		return count
	}
	return count - before
}

// control runs congestion control and orders what differs from the map.
func (p *Policy) control(nowNs int64, s *Snapshot) {
	p.countRings(s)
	for i := range s.Paths {
		ps, pp := &s.Paths[i], &p.paths[i]
		if n := ps.Sent - pp.last.Sent; n > 0 {
			pp.frameBytes = float64(ps.SentBytes-pp.last.SentBytes) / float64(n)
		}
		pkts := sinceGen(ps, &pp.last, ps.PeerPkts, pp.last.PeerPkts)
		lost := ps.Lost - pp.last.Lost
		if pp.gaveUp == 1 {
			lost = 0
		}
		pp.gaveUp = max(pp.gaveUp-1, 0)
		local := p.rings[p.cfg.Params.Paths[i].Plane].explain(lost)
		p.sample.Paths[i] = cc.PathSample{
			Plane:          p.cfg.Params.Paths[i].Plane,
			Usable:         ps.State == PathActive,
			Pkts:           pkts,
			CE:             sinceGen(ps, &pp.last, ps.PeerCe, pp.last.PeerCe),
			Lost:           lost - local,
			RingLost:       local,
			Timeouts:       pp.timeouts,
			DeliveredBytes: uint64(float64(pkts) * pp.frameBytes),
			InFlight:       ps.Next - ps.Una,
			SrttNs:         ps.SrttNs,
			MinRttNs:       ps.MinRttNs,
		}
		pp.timeouts = 0
	}
	for i, r := range p.cfg.Controller.Tick(nowNs, p.sample) {
		ps := &s.Paths[i]
		set := PathSet{
			Path: i, Cwnd: min(max(r.Window, cc.MinWindow), PathWindow),
			Pace: cc.PaceNsPerKiB(r.RateBps), Tolerance: p.paths[i].tolerance,
		}
		if ps.State == PathActive && differs(&set, ps) {
			p.act.Sets = append(p.act.Sets, set)
		}
	}
}

// differs says whether a set is worth a call into the kernel: a pace off by less
// than a 64th or a window by less than an eighth waits for the next tick.
func differs(set *PathSet, ps *PathSnapshot) bool {
	return set.Tolerance != ps.Tolerance ||
		(set.Pace == 0) != (ps.Pace == 0) ||
		apart(set.Pace, ps.Pace) > set.Pace/64 ||
		apart(set.Cwnd, ps.Cwnd) > set.Cwnd/8
}

func apart(a, b uint32) uint32 {
	return max(a, b) - min(a, b)
}

// next is when the next Tick is due, on the engine's clock.
func (p *Policy) next(nowNs int64, s *Snapshot, waiting bool) int64 {
	dueNs := max(p.heardNs, p.keepaliveNs) + int64(p.cfg.Keepalive)
	if waiting {
		dueNs = p.clockNs + maxProbeNs
	}
	active := s.anyActive()
	for i := range p.paths {
		pp, ps := &p.paths[i], &s.Paths[i]
		if ps.State == PathActive && ps.outstanding() && !pp.probing {
			dueNs = min(dueNs, p.clockNs+tickNs)
		}
		if pp.probing {
			dueNs = min(dueNs, pp.deadlineNs)
		}
		if ps.State == PathSuspect {
			dueNs = min(dueNs, p.dueToProve(pp, waiting || !active))
		}
	}
	switch {
	case p.creditOn:
		dueNs = min(dueNs, p.creditDueNs)
		if s.PsnNext != s.PsnCum && active {
			dueNs = min(dueNs, p.clockNs+tickNs)
		}
	case waiting && active, len(p.act.States) > 0:
		dueNs = min(dueNs, p.clockNs+tickNs)
	}
	return nowNs + max(dueNs-p.clockNs, minQuietNs)
}
