// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/metaroce/metaroce/fabric/lab"
	"github.com/metaroce/metaroce/transport"
	"github.com/metaroce/metaroce/transport/core"
)

// Rig is a lab with a device on each of its hosts 0 and 1, and one connection
// between them, over which host 0 writes into host 1's memory.
type Rig struct {
	Lab            *lab.Lab
	Client, Server *transport.Device
	Conn           *transport.Conn // host 0's end
	CQ             *transport.CQ   // where its writes complete
	Target         Target          // host 1's memory

	peer *transport.Conn
	ln   *transport.Listener
	mems []*transport.Memory
}

// NewRig makes the devices, memory of size bytes at both ends and the connection.
// cfg needs no interfaces: all of the lab's are used. Its spin time is the client's:
// the server sends nothing. The lab stays the caller's.
func NewRig(ctx context.Context, l *lab.Lab, cfg transport.Config, size uint64) (_ *Rig, err error) {
	r := &Rig{Lab: l}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.Close())
		}
	}()
	for host, d := range []**transport.Device{&r.Client, &r.Server} {
		cfg.Interfaces = l.Interfaces(host)
		if host == 1 {
			cfg.Spin = 0 // default
		}
		if err := l.Do(host, func() error {
			var err error
			*d, err = transport.Open(ctx, cfg)
			return err
		}); err != nil {
			return nil, fmt.Errorf("host %d: %w", host, err)
		}
	}
	return r, r.connect(ctx, size)
}

func (r *Rig) connect(ctx context.Context, size uint64) error {
	var err error
	if r.ln, err = r.Server.Listen(ctx, r.Lab.Addr(1, 0).String()+":0"); err != nil {
		return err
	}
	accepted := make(chan error, 1)
	go func() {
		in, err := r.ln.Accept(ctx)
		if err == nil {
			r.peer, err = in.Accept(ctx, nil)
		}
		accepted <- err
	}()
	r.CQ = r.Client.NewCQ()
	r.Conn, err = r.Client.Dial(ctx, r.ln.Addr().String(), nil, transport.WithSendCQ(r.CQ))
	if err != nil {
		_ = r.ln.Close() // ends the Accept
	}
	if err := errors.Join(err, <-accepted); err != nil {
		return err
	}
	alloc := func(pd *transport.PD, access core.Access) (*transport.Memory, error) {
		m, err := pd.AllocMemory(size, access)
		if err == nil {
			r.mems = append(r.mems, m)
		}
		return m, err
	}
	local, err := alloc(r.Conn.PD(), core.LocalWrite)
	if err != nil {
		return err
	}
	remote, err := alloc(r.peer.PD(), core.LocalWrite|core.RemoteWrite)
	if err != nil {
		return err
	}
	r.Target = Target{Conn: r.Conn, Local: local, RemoteAddr: remote.Addr(), RKey: remote.RKey()}
	return nil
}

// Close gives everything back but the lab.
func (r *Rig) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), closeTime)
	defer cancel()
	if r.Conn != nil {
		// Whether it closed in order is no result of a measurement.
		_ = r.Conn.Close(ctx)
		r.drain()
	}
	if r.peer != nil {
		_ = r.peer.Close(ctx)
	}
	var errs []error
	for _, m := range r.mems {
		errs = append(errs, m.Close())
	}
	for _, d := range []*transport.Device{r.Client, r.Server} {
		if d != nil {
			errs = append(errs, d.Close())
		}
	}
	return errors.Join(errs...)
}

// drain collects what is left of writes: memory is in use until then.
func (r *Rig) drain() {
	var comps [core.SQDepth]transport.Completion
	for r.CQ.Poll(comps[:]) > 0 {
	}
}

// BW measures the rig's bandwidth.
func (r *Rig) BW(ctx context.Context, o BWOptions) (BWResult, error) {
	return WriteBW(ctx, r.CQ, []Target{r.Target}, o)
}

// Latency measures from post to completion.
func (r *Rig) Latency(ctx context.Context, o LatOptions) (LatResult, error) {
	return WriteLatCompletion(ctx, r.CQ, r.Target, o)
}

// Point is how much was done by a time.
type Point struct {
	At    time.Duration // since the series began
	Bytes uint64
}

// Series are points in the order of time.
type Series []Point

// Rate is the mean rate between two times in bit/s. What the series does not
// cover counts as nothing.
func (s Series) Rate(from, to time.Duration) float64 {
	if to <= from {
		return 0
	}
	return float64(s.at(to)-s.at(from)) * 8 / (to - from).Seconds()
}

// at is the amount done by a time.
func (s Series) at(t time.Duration) uint64 {
	done := uint64(0)
	for _, p := range s {
		if p.At > t {
			break
		}
		done = p.Bytes
	}
	return done
}

// Rates gives the rate of every step in bit/s.
func (s Series) Rates(step time.Duration) []float64 {
	if len(s) == 0 {
		return nil
	}
	var rates []float64
	for t := step; t <= s[len(s)-1].At; t += step {
		rates = append(rates, s.Rate(t-step, t))
	}
	return rates
}

// Windows of Recovery.
const (
	recoveryWindow = 10 * time.Millisecond
	recoverySteady = 50 * time.Millisecond
)

// Recovery is how long after the time down the rate is back: the end of the first
// 10 ms in which it is at least want, in bit/s, and is so for the 50 ms that
// follow, too. ok is false if it does not come back.
func (s Series) Recovery(down time.Duration, want float64) (d time.Duration, ok bool) {
	if len(s) == 0 {
		return 0, false
	}
	for _, p := range s {
		end := p.At
		if end < down+recoveryWindow || end+recoverySteady > s[len(s)-1].At {
			continue
		}
		if s.Rate(end-recoveryWindow, end) >= want && s.Rate(end, end+recoverySteady) >= want {
			return end - down, true
		}
	}
	return 0, false
}

// sampleEvery is how often Watch looks.
const sampleEvery = 5 * time.Millisecond

// Watch samples a count of bytes until stop is closed, and tells each point to
// live, which may be nil.
func Watch(count func() uint64, stop <-chan struct{}, live func(Series)) Series {
	start, first := time.Now(), count()
	series := Series{{}}
	tick := time.NewTicker(sampleEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-stop:
			return series
		}
		series = append(series, Point{At: time.Since(start), Bytes: count() - first})
		if live != nil {
			live(series)
		}
	}
}
