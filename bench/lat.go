// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/metaroce/metaroce/transport"
)

// errOver says that a connection ended while spin waited; the connection knows why.
var errOver = errors.New("connection over")

// LatOptions says how a latency is measured. One of Iterations and Duration is set.
type LatOptions struct {
	Size       uint64 // bytes a message
	Iterations int
	Duration   time.Duration
	Warmup     time.Duration // before measuring
	Sleep      bool          // wait for completions asleep instead of polling
}

// Latency collects times; the zero value is not ready, see NewLatency.
type Latency struct {
	hist     *hdrhistogram.Histogram
	n        int
	min, max int64
	mean, m2 float64 // Welford's, exact where buckets are not
}

// NewLatency makes an empty collection of times from 1 ns to 100 s, kept to 3
// digits; least, greatest, mean and deviation are exact.
func NewLatency() *Latency {
	return &Latency{hist: hdrhistogram.New(1, int64(100*time.Second), 3)}
}

// Record adds a time.
func (l *Latency) Record(ns int64) {
	ns = min(max(ns, 1), l.hist.HighestTrackableValue())
	_ = l.hist.RecordValue(ns) // in range
	if l.n == 0 || ns < l.min {
		l.min = ns
	}
	l.max = max(l.max, ns)
	l.n++
	d := float64(ns) - l.mean
	l.mean += d / float64(l.n)
	l.m2 += d * (float64(ns) - l.mean)
}

// Result sums up what was recorded.
func (l *Latency) Result(size uint64, elapsed time.Duration) LatResult {
	r := LatResult{Size: size, Iterations: l.n, Elapsed: elapsed}
	if l.n == 0 {
		return r
	}
	r.MinNs, r.MaxNs, r.AvgNs = float64(l.min), float64(l.max), l.mean
	r.StdevNs = math.Sqrt(l.m2 / float64(l.n))
	// A bucket's upper end may lie above every time that it holds.
	at := func(p float64) float64 { return min(float64(l.hist.ValueAtPercentile(p)), r.MaxNs) }
	r.P50Ns, r.P99Ns, r.P999Ns = at(50), at(99), at(99.9)
	return r
}

// LatResult is a latency as measured. Times are in ns.
type LatResult struct {
	Size       uint64        `json:"size"`
	Iterations int           `json:"iterations"`
	Elapsed    time.Duration `json:"elapsed"`
	MinNs      float64       `json:"min_ns"`
	MaxNs      float64       `json:"max_ns"`
	P50Ns      float64       `json:"p50_ns"`
	AvgNs      float64       `json:"avg_ns"`
	StdevNs    float64       `json:"stdev_ns"`
	P99Ns      float64       `json:"p99_ns"`
	P999Ns     float64       `json:"p999_ns"`
}

// Tps is iterations a second.
func (r LatResult) Tps() float64 {
	if r.Elapsed <= 0 {
		return 0
	}
	return float64(r.Iterations) / r.Elapsed.Seconds()
}

// measureLat runs one after warming up and records what it returns.
func measureLat(o LatOptions, one func() (int64, error)) (LatResult, error) {
	if (o.Iterations > 0) == (o.Duration > 0) {
		return LatResult{}, fmt.Errorf("%d iterations and duration %v, want one of them", o.Iterations, o.Duration)
	}
	for end := time.Now().Add(o.Warmup); time.Now().Before(end); {
		if _, err := one(); err != nil {
			return LatResult{}, err
		}
	}
	l := NewLatency()
	start := time.Now()
	for i := 0; ; i++ {
		if o.Duration > 0 && time.Since(start) >= o.Duration || o.Duration == 0 && i == o.Iterations {
			return l.Result(o.Size, time.Since(start)), nil
		}
		ns, err := one()
		if err != nil {
			return LatResult{}, err
		}
		l.Record(ns)
	}
}

// WriteLatCompletion measures from post to completion at this end, one message at
// a time. The target's writes complete in cq.
func WriteLatCompletion(ctx context.Context, cq *transport.CQ, t Target, o LatOptions) (LatResult, error) {
	var comps [1]transport.Completion
	poll := func() bool { return cq.Poll(comps[:]) > 0 }
	return measureLat(o, func() (int64, error) {
		start := time.Now()
		if err := t.Conn.PostWrite(t.request(0, o.Size)); err != nil {
			return 0, fmt.Errorf("post write: %w", err)
		}
		var err error
		if o.Sleep {
			_, err = cq.Wait(ctx, comps[:])
		} else {
			err = spin(ctx, nil, poll)
		}
		ns := time.Since(start).Nanoseconds()
		if err != nil {
			return 0, fmt.Errorf("wait for completion: %w", err)
		}
		return ns, completionError(comps[0])
	})
}

// pingPong is one end of a ping-pong of writes: each end writes into the other's
// memory and polls its own for what the other wrote.
type pingPong struct {
	cq      *transport.CQ // where target's writes complete
	target  Target
	out     []byte // the memory that target is written from
	in      []byte // the memory that the peer writes into
	size    uint64
	payload int // bytes a packet
	turn    byte
	comps   [8]transport.Completion
}

// stamps calls f with the index of the last byte of every packet. All of them are
// stamped and looked at, since packets arrive in any order.
func (p *pingPong) stamps(f func(i int) bool) bool {
	for i := p.payload; i < int(p.size); i += p.payload {
		if !f(i - 1) {
			return false
		}
	}
	return p.size == 0 || f(int(p.size)-1)
}

// next begins the next turn: its number goes into the stamps. It is never 0,
// which is what memory holds at first.
func (p *pingPong) next() { p.turn = p.turn%255 + 1 }

func (p *pingPong) arrived() bool {
	return p.stamps(func(i int) bool { return loadByte(p.in, i) == p.turn })
}

// send writes this turn's message and collects what has completed.
func (p *pingPong) send() error {
	p.stamps(func(i int) bool { p.out[i] = p.turn; return true })
	if err := p.target.Conn.PostWrite(p.target.request(0, p.size)); err != nil {
		return fmt.Errorf("post write: %w", err)
	}
	for _, c := range p.comps[:p.cq.Poll(p.comps[:])] {
		if err := completionError(c); err != nil {
			return err
		}
	}
	return nil
}

// connError prefers a connection's reason to the fact that it is over.
func connError(c *transport.Conn, err error) error {
	if errors.Is(err, errOver) {
		return c.Err()
	}
	return err
}

// lead measures half round trips: it sends, and waits for the answer.
func (p *pingPong) lead(ctx context.Context, o LatOptions) (LatResult, error) {
	return measureLat(o, func() (int64, error) {
		p.next()
		start := time.Now()
		if err := p.send(); err != nil {
			return 0, err
		}
		if err := spin(ctx, p.target.Conn.Done(), p.arrived); err != nil {
			return 0, fmt.Errorf("wait for the answer: %w", connError(p.target.Conn, err))
		}
		return time.Since(start).Nanoseconds() / 2, nil
	})
}

// follow answers until stop says so.
func (p *pingPong) follow(ctx context.Context, stop func() (bool, error)) error {
	p.next()
	for {
		var stopped bool
		var stopErr error
		looks := 0
		err := spin(ctx, p.target.Conn.Done(), func() bool {
			if p.arrived() {
				return true
			}
			if looks++; looks%64 == 0 {
				stopped, stopErr = stop()
			}
			return stopped || stopErr != nil
		})
		switch {
		case err != nil:
			return fmt.Errorf("wait for a message: %w", connError(p.target.Conn, err))
		case stopErr != nil || stopped:
			return stopErr
		}
		if err := p.send(); err != nil {
			return err
		}
		p.next()
	}
}
