// SPDX-License-Identifier: Apache-2.0

package core

import (
	"fmt"
	"net/netip"
	"strings"
	"time"
)

// RetryExceededError says that a peer gave no answer for the retry time. The
// requests that were under way end with StatusRetryExceeded.
type RetryExceededError struct {
	Peer        string
	QPN         uint32        // the peer's
	RetryTime   time.Duration // that passed without an answer
	Outstanding uint32        // packets not acknowledged
	PsnCum      uint32        // all below are acknowledged
	LastPath    int           // path that the peer was last heard on; -1: never
	LastAgo     time.Duration // how long ago that was
	Paths       []PathReport
}

// PathReport is a path's part in a RetryExceededError.
type PathReport struct {
	Local, Remote netip.Addr
	Sport         uint16
	State         PathState
	Unanswered    int // probes in a row
}

func (e *RetryExceededError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "peer %s (qpn %#x) gave no answer for %v", e.Peer, e.QPN, e.RetryTime)
	if e.LastPath < 0 {
		b.WriteString(": nothing was ever heard of it")
	} else {
		fmt.Fprintf(&b, ": last heard on path %d %v ago, acknowledging all below psn %d",
			e.LastPath, e.LastAgo.Round(time.Millisecond), e.PsnCum)
	}
	fmt.Fprintf(&b, "; %d packets outstanding; paths", e.Outstanding)
	for i, p := range e.Paths {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, " %d %v:%d>%v %v, %d probes unanswered", i, p.Local, p.Sport, p.Remote, p.State, p.Unanswered)
	}
	return b.String()
}

func (p *Policy) retryExceeded(nowNs int64, s *Snapshot) *RetryExceededError {
	e := &RetryExceededError{
		Peer: p.cfg.Peer, QPN: p.cfg.Params.Remote.QPN, RetryTime: p.cfg.RetryTime,
		Outstanding: s.PsnNext - s.PsnCum, PsnCum: s.PsnCum, LastPath: -1,
	}
	var lastNs int64
	for i := range s.Paths {
		ps, params := &s.Paths[i], &p.cfg.Params.Paths[i]
		if ps.LastAckNs > lastNs {
			lastNs, e.LastPath = ps.LastAckNs, i
			e.LastAgo = time.Duration(max(nowNs-ps.LastAckNs, 0))
		}
		e.Paths = append(e.Paths, PathReport{
			Local: params.Local, Remote: params.Remote, Sport: ps.Sport,
			State: ps.State, Unanswered: p.paths[i].unanswered,
		})
	}
	return e
}
