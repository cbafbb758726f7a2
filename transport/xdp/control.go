// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"sync/atomic"
	"time"

	"github.com/metaroce/metaroce/loader"
	"github.com/metaroce/metaroce/transport/core"
)

// tickNs is how often the control loop looks at connections while anything may be under way.
const tickNs = int64(time.Millisecond)

// controlLoop applies the policy: every millisecond while the pump is awake, else when a
// connection's policy says so. With nothing to do it blocks.
func (e *Engine) controlLoop() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-e.stop:
			return
		case <-e.poke:
		case <-timer.C:
		}
		now := e.clk.now()
		next, any := int64(never), false
		for i := range e.conns {
			if c := e.conns[i].Load(); c != nil {
				any = true
				next = min(next, c.tick(now), now+lookNs)
			}
		}
		if any && e.pump.awake.Load() {
			// The pump may be sending what was posted without anybody's telling.
			next = min(next, now+tickNs)
		}
		if next == never {
			timer.Stop()
		} else {
			timer.Reset(time.Duration(max(next-e.clk.now(), 0)))
		}
	}
}

// tick asks the policy, if it is due or something was posted, and applies its answer. It returns
// when the next tick is due.
func (c *Conn) tick(now int64) (next int64) {
	if !c.tickMu.TryLock() {
		return now + tickNs // it is being started or closed: others are not to wait for that
	}
	defer c.tickMu.Unlock()
	if c.over.Load() || c.q == nil {
		return never
	}
	c.catchUp()
	tail := atomic.LoadUint32(&c.q.SqTail)
	if forced := c.force.Swap(false); !forced && now < c.nextNs && tail == c.snap.SqTail {
		return c.nextNs
	}
	if err := c.look(tail); err != nil {
		c.Fail(err)
		return never
	}
	calls := c.e.pump.calls.Load()
	act := c.policy.Tick(now, &c.snap, calls != c.calls)
	c.calls = calls
	if err := c.apply(act); err != nil {
		c.Fail(err)
		return never
	}
	if err := c.ended(); err != nil {
		c.Fail(err)
		return never
	}
	c.nextNs = act.NextNs
	return c.nextNs
}

// look reads the connection from the kernel into snap.
func (c *Conn) look(tail uint32) error {
	w := &c.words
	if err := c.e.lookupConn(c.slot, w); err != nil {
		return err
	}
	fillSnapshot(&c.snap, w, tail, len(c.params.Paths))
	for i := range c.snap.Paths {
		c.snap.Paths[i].RingDrops = c.e.ringDrops(w.Tx[i].Egress)
	}
	return nil
}

func fillSnapshot(s *core.Snapshot, w *loader.Conn, tail uint32, paths int) {
	*s = core.Snapshot{
		State: core.ConnState(w.State), PsnNext: w.PsnNext, PsnCum: w.PsnCum, MsnNext: w.MsnNext, SqTail: tail,
		Busy: w.Busy != 0, NoCredit: w.NoCredit != 0, Credit: w.Credit, Ordinal: w.Ordinal,
		NakPsn: w.NakPsn, NakSyndrome: w.NakSyndrome, Fault: w.Fault, FaultPsn: w.FaultPsn, Repairs: w.Repairs, ProbeOn: w.Probe | w.ProbeFull | w.Held, Unasked: w.Unasked,
		Paths: s.Paths[:0],
	}
	for i := range w.Tx[:paths] {
		t := &w.Tx[i]
		s.Paths = append(s.Paths, core.PathSnapshot{
			Next: t.Next, Una: t.Una, Cwnd: t.Cwnd, Pace: t.Pace, Gen: t.Gen, State: core.PathState(t.State),
			Tolerance: t.Tolerance, Sport: t.Sport, LastAckNs: int64(t.LastAckNs),
			SrttNs: t.SrttNs, MinRttNs: t.MinRttNs, Acks: t.Acks, PeerPkts: t.PeerPkts, PeerCe: t.PeerCe,
			PeerDups: t.PeerDups, Lost: t.Lost, Heard: t.Heard, Proofs: t.Proofs, SentBytes: t.SentBytes, Sent: t.Sent, Retx: t.Retx, Probes: t.Probes,
		})
	}
}

// apply carries the policy's actions out, in the order that it wants.
func (c *Conn) apply(act core.Actions) error {
	for _, s := range act.States {
		if c.wayUp.Load()>>s.Path&1 == 0 {
			continue // went down after the snapshot
		}
		if err := c.control(loader.Ctl{Op: loader.CtlSuspect, Path: uint32(s.Path), Value: uint32(s.State)}); err != nil {
			return err
		}
		if s.State == core.PathSuspect {
			c.e.router.doubt(c.hops[s.Path])
		}
		c.e.log.Info("path", "qpn", c.qpn, "path", s.Path, "state", s.State)
	}
	c.doubtUnanswered(act.Probe)
	for _, r := range act.Rerolls {
		if err := c.control(loader.Ctl{Op: loader.CtlReroll, Path: uint32(r.Path), Value: uint32(r.Sport)}); err != nil {
			return err
		}
		c.e.log.Info("path re-rolled", "qpn", c.qpn, "path", r.Path, "port", r.Sport)
	}
	for _, path := range act.Timeouts {
		if err := c.control(loader.Ctl{Op: loader.CtlTimeout, Path: uint32(path)}); err != nil {
			return err
		}
	}
	for _, s := range act.Sets {
		cmd := loader.Ctl{Op: loader.CtlPath, Path: uint32(s.Path), Cwnd: s.Cwnd, Pace: s.Pace, Tolerance: uint32(s.Tolerance)}
		if err := c.control(cmd); err != nil {
			return err
		}
	}
	if act.Cut != 0 {
		if err := c.control(loader.Ctl{Op: loader.CtlCut, Value: uint32(act.Cut)}); err != nil {
			return err
		}
		c.e.log.Warn("full-size packets get through on no path: smaller ones from now on", "qpn", c.qpn, "payload", act.Cut)
	}
	if len(act.TooLong) > 0 {
		c.e.log.Warn("paths left out: short packets get through, full-size ones do not; the MTU on the way is too small",
			"qpn", c.qpn, "paths", act.TooLong)
	}
	if act.Probe|act.Full != 0 {
		if err := c.control(loader.Ctl{Op: loader.CtlProbe, Value: act.Probe, Full: act.Full}); err != nil {
			return err
		}
	}
	return act.Fail
}

// ended says why the connection can go on no more, by the last snapshot: a request was refused,
// by the peer or by mr_tx, and all that was sent before it is acknowledged.
func (c *Conn) ended() error {
	s := &c.snap
	switch {
	case s.NakSyndrome != core.SynNone && s.PsnCum == s.NakPsn:
		return &RequestError{QPN: c.qpn, Status: core.StatusOfSyndrome(s.NakSyndrome), PSN: s.NakPsn, Remote: true}
	case s.Fault != loader.FaultNone && s.PsnCum == s.FaultPsn:
		return &RequestError{QPN: c.qpn, Status: core.StatusOfFault(s.Fault), MSN: atomic.LoadUint32(&c.q.FaultMsn)}
	}
	return nil
}

// wayChanged gives a path the state that follows from its way: without one it is down, with one it is
// suspect until a probe comes back.
func (c *Conn) wayChanged(path int) {
	c.tickMu.Lock() // so that Start has finished, and no tick sets a state that it chose before
	defer c.tickMu.Unlock()
	if c.e.conns[c.slot].Load() != c || c.over.Load() {
		return
	}
	state := core.PathDown
	if c.wayUp.Load()>>path&1 != 0 {
		state = core.PathSuspect
	}
	c.setPathState(path, state)
}

// setPathState tells kernel and policy what netlink said about the way of a path.
func (c *Conn) setPathState(path int, state core.PathState) {
	err := c.control(loader.Ctl{Op: loader.CtlSuspect, Path: uint32(path), Value: uint32(state)})
	if err != nil {
		c.e.log.Warn("path state not changed", "qpn", c.qpn, "path", path, "state", state, "error", err)
		return
	}
	c.e.log.Info("path", "qpn", c.qpn, "path", path, "state", state)
	c.force.Store(true)
	c.e.nudge()
}
