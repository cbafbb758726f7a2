// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/metaroce/metaroce/transport"
	"github.com/metaroce/metaroce/transport/core"
)

// Target is where a workload writes: from Local at LocalOffset to RemoteAddr in
// the peer's region RKey.
type Target struct {
	Conn        *transport.Conn
	Local       *transport.Memory
	LocalOffset uint64
	RemoteAddr  uint64
	RKey        uint32
}

func (t *Target) request(wrID, size uint64) transport.WriteRequest {
	return transport.WriteRequest{
		WRID: wrID, Local: t.Local, LocalOffset: t.LocalOffset, Length: size,
		RemoteAddr: t.RemoteAddr, RKey: t.RKey,
	}
}

// BWOptions says how WriteBW measures. One of Iterations and Duration is set.
type BWOptions struct {
	Size       uint64        // bytes a message
	Iterations int           // messages on each target
	Duration   time.Duration // or how long
	Depth      int           // messages outstanding on each target, 1 to core.SQDepth
	Warmup     time.Duration // before measuring, at least one message
	Poll       bool          // poll for completions instead of sleeping
	// Completed, if set, counts the bytes whose writes are complete, warm-up
	// included, for whoever watches.
	Completed *atomic.Uint64
}

// BWResult is what WriteBW measured.
type BWResult struct {
	Size       uint64        `json:"size"`       // bytes a message
	Iterations int           `json:"iterations"` // messages, of all targets
	Elapsed    time.Duration `json:"elapsed"`    // first post to last completion
	// PeakBps is the best rate between any post and any later completion, in bytes
	// a second; 0 when it was not recorded: with Duration, or more than 20 000
	// messages.
	PeakBps float64 `json:"peak_bps"`
}

// Bps is the mean rate in bytes a second.
func (r BWResult) Bps() float64 { return r.MsgRate() * float64(r.Size) }

// MsgRate is messages a second.
func (r BWResult) MsgRate() float64 {
	if r.Elapsed <= 0 {
		return 0
	}
	return float64(r.Iterations) / r.Elapsed.Seconds()
}

// maxPeakIterations is up to where perftest looks for the peak.
const maxPeakIterations = 20000

// WriteBW writes to all targets, which complete in cq, and keeps Depth messages
// outstanding on each. It ends with ctx, and when a connection fails with its
// reason.
func WriteBW(ctx context.Context, cq *transport.CQ, targets []Target, o BWOptions) (BWResult, error) {
	switch {
	case len(targets) == 0:
		return BWResult{}, errors.New("no target, want at least 1")
	case o.Depth < 1 || o.Depth > core.SQDepth:
		return BWResult{}, fmt.Errorf("depth %d, want 1 to %d", o.Depth, core.SQDepth)
	case (o.Iterations > 0) == (o.Duration > 0):
		return BWResult{}, fmt.Errorf("%d iterations and duration %v, want one of them", o.Iterations, o.Duration)
	}
	w := bwRun{ctx: ctx, cq: cq, targets: targets, o: o, out: make([]int, len(targets)), sent: make([]int, len(targets))}
	if _, err := w.run(1<<62, o.Warmup, false); err != nil {
		return BWResult{}, err
	}
	if o.Duration > 0 {
		return w.run(1<<62, o.Duration, false)
	}
	return w.run(o.Iterations, 0, o.Iterations*len(targets) <= maxPeakIterations)
}

type bwRun struct {
	ctx     context.Context
	cq      *transport.CQ
	targets []Target
	o       BWOptions
	out     []int // outstanding, by target
	sent    []int // posted in this run, by target
	posted  [][]int64
	done    []int // completed, by target; only with peak
	comps   [core.SQDepth]transport.Completion
}

// run posts up to limit messages on each target, for a time if that is not 0,
// and waits for the last completion. With a time, what completes later does not
// count.
func (w *bwRun) run(limit int, d time.Duration, peak bool) (BWResult, error) {
	r := BWResult{Size: w.o.Size}
	clear(w.sent)
	w.posted, w.done = nil, nil
	if peak {
		w.posted = make([][]int64, len(w.targets))
		w.done = make([]int, len(w.targets))
	}
	type span struct{ posted, completed int64 }
	var spans []span
	start := time.Now()
	since := func() int64 { return time.Since(start).Nanoseconds() }
	posting := true
	for {
		outstanding := 0
		for i := range w.targets {
			for posting && w.out[i] < w.o.Depth && w.sent[i] < limit {
				if peak {
					w.posted[i] = append(w.posted[i], since())
				}
				if err := w.targets[i].Conn.PostWrite(w.targets[i].request(uint64(i), w.o.Size)); err != nil {
					return r, fmt.Errorf("post write: %w", err)
				}
				w.out[i]++
				w.sent[i]++
			}
			outstanding += w.out[i]
		}
		if outstanding == 0 {
			break
		}
		n, err := w.wait()
		if err != nil {
			return r, err
		}
		nowNs := since()
		for _, c := range w.comps[:n] {
			if err := completionError(c); err != nil {
				return r, err
			}
			i := int(c.WRID)
			w.out[i]--
			if peak {
				spans = append(spans, span{w.posted[i][w.done[i]], nowNs})
				w.done[i]++
			}
		}
		if w.o.Completed != nil {
			w.o.Completed.Add(uint64(n) * w.o.Size)
		}
		if d == 0 || posting {
			r.Iterations += n
			r.Elapsed = time.Duration(nowNs)
		}
		if d > 0 && nowNs >= d.Nanoseconds() {
			posting = false
		}
		if d == 0 && limit == 1<<62 { // no warm-up but the one message
			posting = false
		}
	}
	if peak {
		// In the order of completion, which for several targets is not that of posts.
		posted, completed := make([]int64, len(spans)), make([]int64, len(spans))
		for i, s := range spans {
			posted[i], completed[i] = s.posted, s.completed
		}
		r.PeakBps = peakRate(posted, completed) * float64(w.o.Size)
	}
	return r, nil
}

func (w *bwRun) wait() (int, error) {
	if !w.o.Poll {
		n, err := w.cq.Wait(w.ctx, w.comps[:])
		if err != nil {
			return 0, fmt.Errorf("wait for completions: %w", err)
		}
		return n, nil
	}
	n := 0
	err := spin(w.ctx, nil, func() bool {
		n = w.cq.Poll(w.comps[:])
		return n > 0
	})
	return n, err
}

// completionError says why the request of c failed, nil if it did not: the
// connection's reason rather than the status, once it is known.
func completionError(c transport.Completion) error {
	if c.Status == core.StatusSuccess {
		return nil
	}
	// The connection of a failed request is ending.
	select {
	case <-c.Conn.Done():
		return c.Conn.Err()
	case <-time.After(time.Second):
		return fmt.Errorf("request %d: %v", c.WRID, c.Status)
	}
}

// peakRate is the highest of (j-i+1) / (completed[j]-posted[i]) for i <= j, in
// messages a second, of times in ns. It is perftest's peak, found without trying
// all pairs: each round asks for the pair that is farthest above the best rate
// so far (Dinkelbach's algorithm), and there is none soon.
func peakRate(posted, completed []int64) float64 {
	best := 0.0 // messages a ns
	for range 100 {
		top, rate := 1e-6, best
		// value(i, j) = (j-i+1) - best*(completed[j]-posted[i]), greatest over i for
		// every j.
		from, at := 0.0, -1
		for j := range completed {
			if v := best*float64(posted[j]) - float64(j); at < 0 || v > from {
				from, at = v, j
			}
			elapsed := float64(max(completed[j]-posted[at], 1))
			if v := from + float64(j+1) - best*float64(completed[j]); v > top {
				top, rate = v, float64(j-at+1)/elapsed
			}
		}
		if rate <= best {
			break
		}
		best = rate
	}
	return best * 1e9
}
