// SPDX-License-Identifier: Apache-2.0

package core

import (
	"fmt"
	"math"
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
	TooLong     []int // paths that short packets pass and full-size ones do not
	PacketBytes int   // of a full-size packet, from the IP header on
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
		fmt.Fprintf(&b, ": last heard on path %d", e.LastPath)
		if e.LastPath < len(e.Paths) {
			fmt.Fprintf(&b, " (%v)", e.Paths[e.LastPath].Remote)
		}
		fmt.Fprintf(&b, " %v ago, acknowledging all below psn %d", e.LastAgo.Round(time.Millisecond), e.PsnCum)
	}
	fmt.Fprintf(&b, "; %d packets outstanding", e.Outstanding)
	e.writePaths(&b)
	if len(e.TooLong) > 0 {
		fmt.Fprintf(&b, "; IP packets of %d bytes do not get through on path %s although short ones do: want an MTU of at least that all the way",
			e.PacketBytes, strings.Trim(fmt.Sprint(e.TooLong), "[]"))
	}
	return b.String()
}

// writePaths tells of the paths, those that go the same way together.
func (e *RetryExceededError) writePaths(b *strings.Builder) {
	type way struct {
		local, remote netip.Addr
		state         PathState
	}
	var order []way
	numbers := map[way][]int{}
	for i, p := range e.Paths {
		w := way{p.Local, p.Remote, p.State}
		if numbers[w] == nil {
			order = append(order, w)
		}
		numbers[w] = append(numbers[w], i)
	}
	for _, w := range order {
		least, most := math.MaxInt, 0
		for _, i := range numbers[w] {
			least, most = min(least, e.Paths[i].Unanswered), max(most, e.Paths[i].Unanswered)
		}
		unanswered := fmt.Sprint(most)
		if least < most {
			unanswered = fmt.Sprintf("%d to %d", least, most)
		}
		noun := "path"
		if len(numbers[w]) > 1 {
			noun = "paths"
		}
		fmt.Fprintf(b, "; %s %s from %v to %v %v, probes unanswered: %s",
			noun, strings.Trim(fmt.Sprint(numbers[w]), "[]"), w.local, w.remote, w.state, unanswered)
	}
}

func (p *Policy) retryExceeded(nowNs int64, s *Snapshot) *RetryExceededError {
	e := &RetryExceededError{
		Peer: p.cfg.Peer, QPN: p.cfg.Params.Remote.QPN, RetryTime: p.cfg.RetryTime,
		Outstanding: s.PsnNext - s.PsnCum, PsnCum: s.PsnCum, LastPath: -1,
		TooLong: p.tooLong(), PacketBytes: p.packetBytes - etherBytes + immBytes,
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
