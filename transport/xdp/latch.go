// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"sync/atomic"
	"time"

	"github.com/metaroce/metaroce/transport/core"
)

// What is complete must stay complete, and be heard of, although nobody asks for long and an event
// was lost. The control loop sees to both whenever it passes a connection.

// lookNs is how often the control loop passes at least, while there are connections. It bounds how long
// a lost event leaves a consumer asleep. A receive that is not polled must be latched before the psn has
// gone on by 2^31, which takes minutes at the least.
const lookNs = int64(time.Second)

// catchUp latches receives and wakes a consumer whose event was lost. Under tickMu.
func (c *Conn) catchUp() {
	c.latchReceives()
	if c.unheard() {
		c.notify()
	}
}

// latchReceives notes which receives are complete. Psns compare serially, so that a record whose psn
// is 2^31 behind would no longer look complete: any number of Writes may come between the receive's
// completion and its poll. Send records need no latch: what can be under way behind one that is not
// polled is core.SQDepth requests of at most 4 GiB, which is less than 2^30 packets.
func (c *Conn) latchReceives() {
	n := c.latched.Load()
	tail := atomic.LoadUint32(&c.q.RqTail)
	// A receive is posted into a free slot only: all before the last core.RQDepth have been polled, and
	// the records of those that went by between two looks are gone.
	if first := tail - core.RQDepth; after(first, n) {
		n = first
	}
	for i := 0; i < core.RQDepth && n != tail && c.recvArrived(n); i++ {
		n++
	}
	c.latched.Store(n)
}

// recvArrived says whether receive n, completed less than 2^31 psns ago, is complete.
func (c *Conn) recvArrived(n uint32) bool {
	r := &c.q.Rcq[n%core.RQDepth]
	return atomic.LoadUint64(&r.Valid) == validWord(n) && after(atomic.LoadUint32(&c.q.RxCum), atomic.LoadUint32(&r.Psn))
}

// recvComplete says whether receive n is complete.
func (c *Conn) recvComplete(n uint32) bool { return after(c.latched.Load(), n) || c.recvArrived(n) }

// unheard says whether what a consumer waits for is there and its event is not: mr_notify could not
// write it, and no later packet tried again. It takes the arming with it, as the event does.
func (c *Conn) unheard() bool {
	send := atomic.LoadUint32(&c.q.ArmSend) != 0 &&
		c.sendDecided(atomic.LoadUint32(&c.q.WaitSend)) && atomic.SwapUint32(&c.q.ArmSend, 0) != 0
	recv := atomic.LoadUint32(&c.q.ArmRecv) != 0 && c.recvComplete(atomic.LoadUint32(&c.q.WaitRecv)) &&
		atomic.SwapUint32(&c.q.ArmRecv, 0) != 0
	return send || recv
}

// sendDecided says whether request msn is complete or refused.
func (c *Conn) sendDecided(msn uint32) bool { return c.sendComplete(msn) || c.verdict(msn) != nil }
