// SPDX-License-Identifier: Apache-2.0

package cc

import (
	"math/rand/v2"
)

// A deterministic model of the lab, packet by packet in steps of 10 us: planes
// with virtual queues that mark and drop but never delay, senders that pace,
// receivers that acknowledge every 8th packet and each mark, a brake on marks
// between the ticks, and a control tick with jitter. A round trip takes no time,
// which is close to the lab's 10 us.

const (
	simStepNs      = 10_000
	simPacketBytes = 3072 + 102
	simSrttNs      = 10_000
	gbit           = 125_000_000 // bytes a second
)

type simPlane struct {
	rateBps       float64
	markBytes     float64
	depthBytes    float64
	queue         float64
	down          bool
	passed, drops int
	bytes         float64
}

type simPath struct {
	conn, plane          int
	window               uint32
	rate, floor          float64 // bytes a second, as braked; the brake's bound
	credit               float64
	brakeNs              int64
	sent, arrived, ce    uint32 // at the peer
	since                int
	missing              bool
	ackSent              uint32 // as the last ACK that arrived told
	ackPkts, ackCE       uint32
	lost, timeouts       uint32
	lastAckNs            int64
	usable               bool
	seenPkts, seenCE     uint32 // at the last tick
	seenLost, seenExpire uint32
}

type simConn struct {
	ctl      Controller
	paths    []*simPath
	cpuBps   float64 // most it can send
	cpu      float64
	appBps   float64 // what the application offers; 0: all it can
	app      float64
	startNs  int64
	nextTick int64
	pausedNs int64
	rr       int
	goodput  float64 // bytes that arrived
	sent     int
}

type sim struct {
	rnd    *rand.Rand
	nowNs  int64
	planes []*simPlane
	conns  []*simConn
	loss   float64 // each direction
	jitter int64   // ticks are 1 ms to 1 ms + jitter apart
	brake  bool
	// catchUpNs is what a path that fell behind may send at once; the pump pauses
	// for up to pauseNs, a hundredth of the steps begins a pause.
	catchUpNs, pauseNs int64
}

func newSim(seed uint64, planes int, rateBps float64) *sim {
	s := &sim{rnd: rand.New(rand.NewPCG(seed, 1)), brake: true, jitter: 2_000_000, catchUpNs: 100_000}
	for range planes {
		s.planes = append(s.planes, &simPlane{rateBps: rateBps, markBytes: 64 << 10, depthBytes: 512 << 10})
	}
	return s
}

func (s *sim) connect(paths int, startNs int64) *simConn {
	c := &simConn{ctl: NewAIMD(AIMDConfig{}), cpuBps: 40 * gbit, startNs: startNs, nextTick: startNs}
	for i, r := range c.ctl.Start(paths) {
		p := &simPath{conn: len(s.conns), plane: i % len(s.planes), usable: true, lastAckNs: startNs}
		p.set(r)
		c.paths = append(c.paths, p)
	}
	s.conns = append(s.conns, c)
	return c
}

func (p *simPath) set(r PathRate) {
	p.window, p.rate = r.Window, float64(r.RateBps)
	p.floor = p.rate / 2
}

func (s *sim) run(ns int64) {
	for end := s.nowNs + ns; s.nowNs < end; s.nowNs += simStepNs {
		for _, pl := range s.planes {
			pl.queue = max(0, pl.queue-pl.rateBps*simStepNs/1e9)
		}
		for k := range s.conns {
			// Nobody is always first.
			c := s.conns[(int(s.nowNs/simStepNs)+k)%len(s.conns)]
			if s.nowNs < c.startNs {
				continue
			}
			s.emit(c)
			if s.nowNs >= c.nextTick {
				s.tick(c)
				c.nextTick = s.nowNs + 1_000_000
				if s.jitter > 0 {
					c.nextTick += s.rnd.Int64N(s.jitter)
				}
			}
		}
	}
}

func (s *sim) emit(c *simConn) {
	c.cpu = min(c.cpu+c.cpuBps*simStepNs/1e9, 64*simPacketBytes)
	if c.appBps > 0 {
		c.app += c.appBps * simStepNs / 1e9
	}
	for _, p := range c.paths {
		p.credit = min(p.credit+p.rate*simStepNs/1e9, max(simPacketBytes, p.rate*float64(s.catchUpNs)/1e9))
	}
	if s.pauseNs > 0 && s.rnd.IntN(100) == 0 {
		c.pausedNs = s.nowNs + s.rnd.Int64N(s.pauseNs)
	}
	if s.nowNs < c.pausedNs {
		return
	}
	for blocked := 0; blocked < len(c.paths) && c.cpu >= simPacketBytes; {
		if c.appBps > 0 && c.app < simPacketBytes {
			return
		}
		c.rr = (c.rr + 1) % len(c.paths)
		p := c.paths[c.rr]
		if !p.usable || p.rate > 0 && p.credit < simPacketBytes || p.sent-p.ackSent >= p.window {
			blocked++
			continue
		}
		blocked = 0
		c.cpu -= simPacketBytes
		c.app -= simPacketBytes
		if p.rate > 0 {
			p.credit -= simPacketBytes
		}
		s.send(c, p)
	}
}

func (s *sim) send(c *simConn, p *simPath) {
	c.sent++
	p.sent++
	pl := s.planes[p.plane]
	if pl.down || s.rnd.Float64() < s.loss {
		p.missing = true
		if p.sent-p.ackSent >= p.window {
			s.ack(p) // the packet that closes a window asks; were it lost, a probe would
		}
		return
	}
	if pl.queue+simPacketBytes > pl.depthBytes {
		pl.drops++
		p.missing = true
		return
	}
	marked := pl.queue > pl.markBytes
	pl.queue += simPacketBytes
	pl.passed++
	pl.bytes += simPacketBytes
	c.goodput += simPacketBytes
	p.arrived++
	if marked {
		p.ce++
	}
	p.since++
	if marked || p.missing || p.since >= 8 || p.sent-p.ackSent >= p.window {
		p.missing, p.since = false, 0
		s.ack(p)
	}
}

func (s *sim) ack(p *simPath) {
	if s.planes[p.plane].down || s.rnd.Float64() < s.loss {
		return
	}
	p.ackSent = p.sent
	p.lost = p.sent - p.arrived
	p.lastAckNs = s.nowNs
	marked := p.ce != p.ackCE
	p.ackPkts, p.ackCE = p.arrived, p.ce
	if s.brake && marked && s.nowNs-p.brakeNs >= 50_000 {
		p.brakeNs = s.nowNs
		if slower := p.rate * 8 / 9; slower >= p.floor {
			p.rate = slower
		}
	}
}

func (s *sim) tick(c *simConn) {
	sample := Sample{PacketBytes: simPacketBytes}
	for _, p := range c.paths {
		// The rest of the policy in brief: quiet for 8 ms is suspect; a probe
		// brings it back.
		switch {
		case p.usable && p.sent != p.ackSent && s.nowNs-p.lastAckNs > 8_000_000:
			p.timeouts++
			p.usable = false
		case !p.usable && !s.planes[p.plane].down:
			p.usable = true
			p.ackSent, p.lastAckNs = p.sent, s.nowNs
			p.arrived = p.sent - p.lost
		case p.sent == p.ackSent:
			p.lastAckNs = s.nowNs
		case p.usable && s.nowNs-p.lastAckNs > 1_000_000:
			s.ack(p) // a probe
		}
		sample.Paths = append(sample.Paths, PathSample{
			Plane: p.plane, Usable: p.usable,
			Pkts: p.ackPkts - p.seenPkts, CE: p.ackCE - p.seenCE,
			Lost: p.lost - p.seenLost, Timeouts: p.timeouts - p.seenExpire,
			DeliveredBytes: uint64(p.ackPkts-p.seenPkts) * simPacketBytes,
			InFlight:       p.sent - p.ackSent,
			SrttNs:         simSrttNs, MinRttNs: simSrttNs,
		})
		p.seenPkts, p.seenCE, p.seenLost, p.seenExpire = p.ackPkts, p.ackCE, p.lost, p.timeouts
	}
	for i, r := range c.ctl.Tick(s.nowNs, sample) {
		c.paths[i].set(r)
	}
}

// usage runs for ns and returns what part of the planes that are up was used, and
// what part of their packets was dropped.
func (s *sim) usage(ns int64) (used, dropped float64) {
	var room float64
	passed, drops := 0, 0
	for _, pl := range s.planes {
		if !pl.down {
			room += pl.rateBps * float64(ns) / 1e9
		}
		pl.bytes = 0
		passed -= pl.passed
		drops -= pl.drops
	}
	s.run(ns)
	var bytes float64
	for _, pl := range s.planes {
		bytes += pl.bytes
		passed += pl.passed
		drops += pl.drops
	}
	return bytes / room, float64(drops) / float64(max(passed+drops, 1))
}

// shares runs for ns and returns what each connection delivered, bytes a second.
func (s *sim) shares(ns int64) []float64 {
	for _, c := range s.conns {
		c.goodput = 0
	}
	s.run(ns)
	var out []float64
	for _, c := range s.conns {
		out = append(out, c.goodput/float64(ns)*1e9)
	}
	return out
}

// jain is Jain's index of fairness: 1 when all are equal, 1/n when one has all.
func jain(x []float64) float64 {
	var sum, squares float64
	for _, v := range x {
		sum += v
		squares += v * v
	}
	return sum * sum / (float64(len(x)) * squares)
}
