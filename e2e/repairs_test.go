// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"testing"

	"github.com/metaroce/metaroce/fabric/lab"
	"github.com/metaroce/metaroce/loader"
)

// mostRepairs says how many repairs a device may send when it has sent so many packets. Every test that
// moves data states one: goodput hides waste, for what is sent twice without need arrives whole as well.
type mostRepairs func(sent uint64) uint64

// hardlyAny is for tests in which the network loses nothing. A path whose answers come late, because the
// machine did something else for milliseconds, is timed out, and sends some repairs before the late ACK cancels the
// others. The 128 are one for each path of 16 connections: mostly there is none, 29 were seen on an emulated
// machine whose host was busy.
func hardlyAny(sent uint64) uint64 { return sent/1000 + 128 }

// outage is for tests in which paths lose all or all that is long, which the switch does not count: what was
// under way on each, twice, and the probes that carry data.
func outage(paths uint64) mostRepairs {
	return func(sent uint64) uint64 { return hardlyAny(sent) + 2*256*paths + 400 }
}

// learning is for tests that fill the hosts' own transmit rings: until the first drop nothing is held back, and
// each connection's windows are open when it starts. Two rings of 256 frames may be lost until then.
func learning(sent uint64) uint64 { return sent/1000 + 512 }

// perCent is for tests in which a share of the packets is late enough to be taken for lost.
func perCent(share uint64) mostRepairs {
	return func(sent uint64) uint64 { return hardlyAny(sent) + sent*share/100 }
}

// whatIsLost is for tests with faults and slow links: one repair for each packet, of either direction, that
// the switches lose or damage from now on, and, where they let others overtake, one window of 8 paths until that
// is tolerated, and one for ten.
func whatIsLost(t *testing.T, l *lab.Lab) mostRepairs {
	t.Helper()
	lost := func() uint64 {
		c := switchCounters(t, l)
		return c.Lost + c.Scripted + c.QueueDropped + c.Corrupted + c.Reordered/10 + min(c.Reordered*4, 8*32)
	}
	before := lost()
	return func(sent uint64) uint64 { return hardlyAny(sent) + lost() - before }
}

// watch bounds the repairs of a host's device from now to the end of the test.
func (h *host) watch(t *testing.T, most mostRepairs) {
	t.Helper()
	if h.watchedBy == t {
		return // by its first connection
	}
	h.watchedBy = t
	watchRepairs(t, h.index, h.dir, most)
}

// wantWatched fails if a device has sent data in a test that does not bound its repairs.
func (h *host) wantWatched(t *testing.T) {
	t.Helper()
	if sent := h.counters(t).SentPkts; sent > 0 && h.watchedBy == nil {
		t.Errorf("host %d has sent %d packets, want a test that states the most repairs", h.index, sent)
	}
}

// watchProgram does the same for the device that a program has open on a lab's host.
func watchProgram(t *testing.T, l *lab.Lab, index int, most mostRepairs) {
	t.Helper()
	watchRepairs(t, index, pins(t, l, index), most)
}

// watchRepairs holds the maps, so that the counters can still be read when the device is closed, or its
// process killed.
func watchRepairs(t *testing.T, index int, dir string, most mostRepairs) {
	t.Helper()
	s, err := loader.OpenPinned(dir)
	if err != nil {
		t.Fatal(err)
	}
	before, err := s.Counters()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		defer s.Close()
		after, err := s.Counters()
		if err != nil {
			t.Error(err)
			return
		}
		found, sent := after.Retransmits-before.Retransmits, after.SentPkts-before.SentPkts
		want := most(sent)
		t.Logf("host %d: %d repairs of %d packets sent, may be %d; %d local drops, %d timeouts, %d duplicates received",
			index, found, sent, want, after.TxLocalDrop-before.TxLocalDrop, after.LocalAckTimeoutErr-before.LocalAckTimeoutErr,
			after.DuplicateRequest-before.DuplicateRequest)
		if found > want {
			t.Errorf("host %d: %d repairs of %d packets sent, want at most %d", index, found, sent, want)
		}
	})
}
