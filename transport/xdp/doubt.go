// SPDX-License-Identifier: Apache-2.0

package xdp

import "github.com/metaroce/metaroce/transport/core"

// doubtUnanswered has the neighbours of suspect paths asked anew whose last short probe is not answered.
// probe is the mask of paths that get another one. Full-size probes do not count: where short ones get
// through, the link address is right.
func (c *Conn) doubtUnanswered(probe uint32) {
	for i := range c.snap.Paths {
		p, bit := &c.snap.Paths[i], uint32(1)<<i
		switch {
		case p.State != core.PathSuspect:
			c.asked &^= bit
		case probe&bit == 0:
		case c.asked&bit != 0 && c.askedAcks[i] == p.Acks:
			c.e.router.doubt(c.hops[i])
		default:
			c.asked |= bit
			c.askedAcks[i] = p.Acks
		}
	}
}
