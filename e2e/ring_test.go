// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/metaroce/metaroce/fabric/lab"
	"github.com/metaroce/metaroce/loader"
	"github.com/metaroce/metaroce/transport"
)

// egress is the host's only transmit ring.
func (h *host) egress(t *testing.T) (e loader.Egress) {
	t.Helper()
	h.state(t, func(s *loader.State) error {
		list, err := s.Egresses()
		if err == nil && len(list) != 1 {
			err = fmt.Errorf("host %d has %d transmit rings, want 1", h.index, len(list))
		}
		if err == nil {
			e = list[0]
		}
		return err
	})
	return e
}

// fillRings sends over n connections at once, from host 0 to host 1, several times the same memory,
// and returns how long the sending took.
func fillRings(t *testing.T, h [2]*host, n, rounds int, bytes uint64) (took time.Duration) {
	t.Helper()
	const message = 1 << 20
	var d []*direction
	for i := range n {
		c := connect(t, h[0], h[1], learning)
		sizes := slices.Repeat([]uint64{message - 1}, int(bytes)/n/message)
		d = append(d, newDirection(t, h[0], h[1], c[0], c[1], uint64(i), sizes))
	}
	for round := range rounds {
		for i, d := range d {
			d.refill(uint64(round*n + i))
		}
		began := time.Now()
		exchange(t, d...)
		took += time.Since(began)
	}
	return took
}

// driverCount sums a veth's statistic over its queues, as ethtool shows it.
func (h *host) driverCount(t *testing.T, name string) (n uint64) {
	t.Helper()
	if _, err := exec.LookPath("ethtool"); err != nil {
		t.Skipf("the driver's statistics: %v", err)
	}
	var out []byte
	err := h.lab.Do(h.index, func() (err error) {
		out, err = exec.Command("ethtool", "-S", h.lab.Interfaces(h.index)[0]).Output()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for line := range strings.Lines(string(out)) {
		key, value, ok := strings.Cut(strings.TrimSpace(line), ": ")
		if !ok || !strings.HasSuffix(key, name) {
			continue
		}
		v, err := strconv.ParseUint(value, 10, 64)
		if err != nil {
			t.Fatalf("statistic %q: %v", line, err)
		}
		n, found = n+v, true
	}
	if !found {
		t.Fatalf("ethtool -S shows no %s:\n%s", name, out)
	}
	return n
}

func TestRingCountersAgreeWithTheDriver(t *testing.T) {
	h := openPair(t, newLab(t, lab.Config{Direct: true, Threaded: true, Queues: 2}), transport.Config{RetryTime: time.Minute})
	fillRings(t, h, 4, 1, pick[uint64](256<<20, 32<<20))
	var sent, acked loader.Egress
	var took, dropped, ackDropped uint64
	// The last probes may be under way: both are read until nothing changed in between.
	waitFor(t, "equal counts", func() bool {
		sent, acked = h[0].egress(t), h[1].egress(t)
		took, dropped = h[0].driverCount(t, "_xdp_xmit"), h[0].driverCount(t, "_xdp_xmit_errors")
		ackDropped = h[1].driverCount(t, "_xdp_tx_errors")
		return sent.TxLocalDrop == dropped && acked.AckLocalDrop == ackDropped && sent.TxSent == took
	})
	if sent.TxSent == 0 || acked.AckSent == 0 {
		t.Errorf("%d frames and %d ACKs counted, want some of both", sent.TxSent, acked.AckSent)
	}
	if c := h[0].counters(t); c.TxLocalDrop != sent.TxLocalDrop {
		t.Errorf("counter tx_local_drop is %d, the ring's %d", c.TxLocalDrop, sent.TxLocalDrop)
	}
}

func TestWholeRingsLoseAThousandthLocallyAtMost(t *testing.T) {
	for _, c := range fewer(1, []struct{ queues, conns int }{{1, 1}, {1, 16}, {2, 1}, {2, 16}}) {
		t.Run(fmt.Sprintf("%d queues, %d connections", c.queues, c.conns), func(t *testing.T) {
			h := openPair(t, newLab(t, lab.Config{Direct: true, Threaded: true, Queues: c.queues}),
				transport.Config{RetryTime: time.Minute})
			rounds, bytes := pick(3, 1), pick[uint64](256<<20, 32<<20)
			took := fillRings(t, h, c.conns, rounds, bytes)
			sent, ring := h[0].counters(t), h[0].egress(t)
			t.Logf("%.2f Gbit/s; of %d packets %d local drops, %d repairs; %d probes, %d ACKs; held %d times, burst %d",
				float64(bytes)*float64(rounds)*8/float64(took), sent.SentPkts, sent.TxLocalDrop, sent.Retransmits,
				sent.SentProbes, sent.RcvdAcks, ring.Held, ring.Burst)
			if most := learning(sent.SentPkts); sent.TxLocalDrop > most {
				t.Errorf("of %d packets %d were dropped by the local driver, want at most %d", sent.SentPkts, sent.TxLocalDrop, most)
			}
		})
	}
}
