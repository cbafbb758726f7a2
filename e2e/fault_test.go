// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/metaroce/metaroce/fabric/lab"
	"github.com/metaroce/metaroce/transport"
	"github.com/metaroce/metaroce/transport/core"
)

// mixed draws sizes from all magnitudes up to a MiB, until they sum up to total.
func mixed(seed, total uint64) (sizes []uint64) {
	rnd := rand.New(rand.NewPCG(seed, 2))
	sizes = edges(3072)
	for sum := uint64(0); sum < total; {
		size := rnd.Uint64N(1<<rnd.Uint64N(21) + 1)
		sizes = append(sizes, size)
		sum += size
	}
	return sizes
}

// setFault sets faults on a lab until the end of the test. Connections are set up before and
// closed after: TCP meets the faults too, and takes seconds to get over them.
func setFault(t *testing.T, l *lab.Lab, f lab.FaultConfig) {
	t.Helper()
	if err := l.Fault(f); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Fault(lab.FaultConfig{}); err != nil {
			t.Error(err)
		}
	})
}

// switchCounters are the lab's, summed over its planes.
func switchCounters(t *testing.T, l *lab.Lab) (sum lab.Counters) {
	t.Helper()
	st, err := l.Status()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range st.Planes {
		sum.Lost += p.Counters.Lost
		sum.Scripted += p.Counters.Scripted
		sum.QueueDropped += p.Counters.QueueDropped
		sum.Corrupted += p.Counters.Corrupted
		sum.Duplicated += p.Counters.Duplicated
		sum.Reordered += p.Counters.Reordered
	}
	return sum
}

// wantHits fails unless every rule of the lab's script has hit as often as it should.
func wantHits(t *testing.T, l *lab.Lab, want ...uint64) {
	t.Helper()
	st, err := l.Status()
	if err != nil {
		t.Fatal(err)
	}
	if len(st.Rules) != len(want) {
		t.Fatalf("the lab has %d rules, want %d", len(st.Rules), len(want))
	}
	for i, r := range st.Rules {
		if r.Hits != want[i] {
			t.Errorf("%s: hit %d of %d packets, want %d hits", r.Rule, r.Hits, r.Seen, want[i])
		}
	}
}

func everyByteArrivesOnceOverAFaultyNetwork(t *testing.T, h [2]*host) {
	l := h[0].lab
	lost := func(c lab.Counters) uint64 { return c.Lost }
	corrupted := func(c lab.Counters) uint64 { return c.Corrupted }
	duplicated := func(c lab.Counters) uint64 { return c.Duplicated }
	reordered := func(c lab.Counters) uint64 { return c.Reordered }
	for _, c := range []struct {
		name  string
		fault lab.FaultConfig
		met   []func(lab.Counters) uint64
	}{
		{"loss of 0.1 %", lab.FaultConfig{Loss: 0.001}, []func(lab.Counters) uint64{lost}},
		{"loss of 1 %", lab.FaultConfig{Loss: 0.01}, []func(lab.Counters) uint64{lost}},
		{"loss of 10 %", lab.FaultConfig{Loss: 0.1}, []func(lab.Counters) uint64{lost}},
		{"bursts of 20 lost packets", lab.FaultConfig{Loss: 0.05, Burst: 20}, []func(lab.Counters) uint64{lost}},
		{"bursts of 100 lost packets", lab.FaultConfig{Loss: 0.05, Burst: 100}, []func(lab.Counters) uint64{lost}},
		{"duplication", lab.FaultConfig{Duplicate: 0.1}, []func(lab.Counters) uint64{duplicated}},
		{"corruption", lab.FaultConfig{Corrupt: 0.05}, []func(lab.Counters) uint64{corrupted}},
		{"reordering", lab.FaultConfig{Reorder: 0.05}, []func(lab.Counters) uint64{reordered}},
		{
			"all together",
			lab.FaultConfig{Loss: 0.02, Burst: 3, Duplicate: 0.02, Corrupt: 0.02, Reorder: 0.02},
			[]func(lab.Counters) uint64{lost, duplicated, corrupted, reordered},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			conn := connect(t, h[0], h[1], whatIsLost(t, l))
			setFault(t, l, c.fault)
			before := switchCounters(t, l)
			met := func() bool {
				after := switchCounters(t, l)
				for _, counter := range c.met {
					if counter(after) == counter(before) {
						return false
					}
				}
				return true
			}
			for round := uint64(0); ; round++ {
				exchange(t, bothWays(t, h, conn, round, mixed(round, pick[uint64](24<<20, 200<<10)))...)
				if met() || t.Failed() {
					break
				}
				if round == 100 {
					t.Fatal("100 exchanges met no fault")
				}
			}
		})
	}
}

func packetsThatAScriptHitsAreMadeGood(t *testing.T, h [2]*host) {
	l := h[0].lab
	for _, c := range []struct {
		name, script string
		sizes        []uint64
		hits         []uint64
	}{
		{"the only ACK is lost", "drop ack 1", []uint64{100}, []uint64{1}},
		{"one of many ACKs is lost", "drop ack 5", []uint64{1 << 20}, []uint64{1}},
		{"every packet of a message is lost", "drop data 1-3", []uint64{3 * 3072}, []uint64{3}},
		{"the only packet is lost", "drop data 1", []uint64{100}, []uint64{1}},
		{"the last packet is lost", "drop data last", []uint64{100000}, []uint64{1}},
		{"the last packet is lost, and its repair", "drop data last 1-2", []uint64{100000}, []uint64{2}},
		{"the packet with the immediate is lost", "drop data imm", []uint64{1, 2, 10000}, []uint64{1}},
		{"a packet and its repair are lost", "drop data 5; drop data retx", []uint64{1 << 20}, []uint64{1, 1}},
		{"the only ACK is lost, and the first probe", "drop ack 1; drop probe", []uint64{100}, []uint64{1, 1}},
		{"the only packet comes twice", "duplicate data 1", []uint64{0}, []uint64{1}},
		{"the only packet is damaged", "corrupt data 1", []uint64{3072}, []uint64{1}},
		{"an ACK comes late", "reorder ack 3", []uint64{1 << 20}, []uint64{1}},
		{"an ACK comes twice", "duplicate ack 1", []uint64{1 << 20}, []uint64{1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			conn := connect(t, h[0], h[1], whatIsLost(t, l))
			d := newDirection(t, h[0], h[1], conn[0], conn[1], 5, c.sizes)
			setFault(t, l, lab.FaultConfig{Script: c.script})
			exchange(t, d)
			wantHits(t, l, c.hits...)
		})
	}
}

func lostNAKIsRepeated(t *testing.T, h [2]*host) {
	l := h[0].lab
	for _, c := range []struct{ name, script string }{
		{"the first", "drop nak 1"},
		{"the first five", "drop nak 1-5"},
	} {
		t.Run(c.name, func(t *testing.T) {
			conn := connect(t, h[0], h[1], whatIsLost(t, l))
			from, to := h[0].alloc(t, 10000), h[1].alloc(t, 10000)
			noise(from.Bytes(), 1)
			setFault(t, l, lab.FaultConfig{Script: c.script})
			good := transport.WriteRequest{WRID: 1, Local: from, Length: 10000, RemoteAddr: to.Addr(), RKey: to.RKey()}
			bad := good
			bad.WRID, bad.RKey = 2, bad.RKey^0xff
			for _, w := range []transport.WriteRequest{good, bad, good} {
				if err := conn[0].PostWrite(w); err != nil {
					t.Fatal(err)
				}
			}
			for _, want := range []transport.Completion{
				{WRID: 1, Status: core.StatusSuccess, Length: 10000},
				{WRID: 2, Status: core.StatusRemAccess},
				{WRID: 1, Status: core.StatusFlushed},
			} {
				got := next(t, conn[0].SendCQ())
				if got.WRID != want.WRID || got.Status != want.Status {
					t.Errorf("request %d ended with %v, want request %d to end with %v", got.WRID, got.Status, want.WRID, want.Status)
				}
			}
			wantEqual(t, "what was written before", to.Bytes(), from.Bytes())
			<-conn[0].Done()
			re, ok := errors.AsType[*transport.RequestError](conn[0].Err())
			if !ok || re.Status != core.StatusRemAccess || re.WRID != 2 {
				t.Errorf("connection's error %v, want that of request 2", conn[0].Err())
			}
			<-conn[1].Done()
			if _, ok := errors.AsType[*transport.PeerFailedError](conn[1].Err()); !ok {
				t.Errorf("the other end's error %v, want that its peer failed", conn[1].Err())
			}
			st, err := l.Status()
			if err != nil {
				t.Fatal(err)
			}
			if st.Rules[0].Hits == 0 {
				t.Errorf("no NAK was lost: %+v", st.Rules)
			}
			wantNoMore(t, conn[0].SendCQ())
		})
	}
}
