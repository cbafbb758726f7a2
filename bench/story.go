// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/metaroce/metaroce/fabric/lab"
	"github.com/metaroce/metaroce/transport"
	"github.com/metaroce/metaroce/transport/core"
)

// StoryConfig says how the demo is told.
type StoryConfig struct {
	Lab    string        // name of the lab, which is made and removed
	Planes int           // at least 2: one is pulled
	Rate   uint64        // bit/s of each plane
	Losses []float64     // shares of packets lost, in both directions
	Stream time.Duration // how long each goodput is measured; latencies a third of it
	Direct bool          // also without switch and limits
	// Counts says how many data packets this process has sent over metaroce and how
	// many of them were retransmissions.
	Counts func() (sent, again uint64, err error)
	Show   Show
	Logger *slog.Logger // of the devices; nil is slog's default
}

// Show is told what happens, as it happens. Any may be nil.
type Show struct {
	Step func(text string)                // what begins
	Live func(transport string, s Series) // every few ms while bytes move
	Row  func(Row)                        // a line of the table
	Pull func(Pull)                       // a plane was pulled
}

// Transports of a Story.
const (
	Ours = "metaroce"
	TCPs = "TCP"
)

// Row is one transport at one share of loss.
type Row struct {
	Transport   string
	Loss        float64
	GoodputBps  float64   // bit/s
	Latency     LatResult // of messageLat bytes
	Sent, Again uint64    // packets or segments; of these retransmissions
	Shares      []float64 // of each plane in the bytes
}

// AgainShare is the share of retransmissions in what was sent.
func (r Row) AgainShare() float64 {
	if r.Sent == 0 {
		return 0
	}
	return float64(r.Again) / float64(r.Sent)
}

// Pull is a transfer from which a plane was pulled, and to which it came back.
type Pull struct {
	Transport string
	Down, Up  time.Duration // in the series
	Series    Series
	BeforeBps float64       // bit/s
	DuringBps float64       // bit/s, once it was back
	Recovery  time.Duration // until 0.9 of what the other planes leave
	Recovered bool
	Error     string // of the application, "" if it noticed nothing
}

// Story is what the demo measured.
type Story struct {
	At       time.Time
	Planes   int
	RateBps  uint64
	MTU      int
	Payload  int
	Paths    int
	Checksum bool
	Rows     []Row
	Pulls    []Pull
	// Direct is without switch and limits, TCP with TSO on a pair without XDP.
	Direct []Row
}

const (
	messageBW   = 64 << 10 // bytes
	messageLat  = 4 << 10  // bytes
	answerLat   = 4        // bytes that TCP's receiver answers
	storyMemory = 1 << 20
	storyWarmup = 300 * time.Millisecond
	pullBefore  = 1000 * time.Millisecond
	pullDown    = 1500 * time.Millisecond
	pullAfter   = 1000 * time.Millisecond
)

// Tell runs the demo. The lab is removed whatever happens.
func Tell(ctx context.Context, c StoryConfig) (_ *Story, err error) {
	if c.Planes < 2 {
		return nil, fmt.Errorf("%d planes, want at least 2: one is pulled", c.Planes)
	}
	t := &teller{StoryConfig: c, story: &Story{At: time.Now(), Planes: c.Planes, RateBps: c.Rate}}
	if err := t.switched(ctx); err != nil {
		return nil, err
	}
	if c.Direct {
		if err := t.direct(ctx); err != nil {
			return nil, err
		}
	}
	return t.story, nil
}

type teller struct {
	StoryConfig
	story *Story
	lab   *lab.Lab
	rig   *Rig
	tcp   *TCP
}

func (t *teller) step(format string, args ...any) {
	if t.Show.Step != nil {
		t.Show.Step(fmt.Sprintf(format, args...))
	}
}

func (t *teller) live(name string) func(Series) {
	if t.Show.Live == nil {
		return nil
	}
	return func(s Series) { t.Show.Live(name, s) }
}

func (t *teller) row(r Row) Row {
	if t.Show.Row != nil {
		t.Show.Row(r)
	}
	return r
}

// up makes the lab and hands it to f, and removes it after.
func (t *teller) up(ctx context.Context, cfg lab.Config, f func() error) (err error) {
	cfg.Name = t.Lab
	if t.lab, err = lab.Up(ctx, cfg); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.lab.Down()) }()
	return f()
}

// withRig runs f with a connection over metaroce.
func (t *teller) withRig(ctx context.Context, f func() error) (err error) {
	if t.rig, err = NewRig(ctx, t.lab, transport.Config{Logger: t.Logger}, storyMemory); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.rig.Close()) }()
	return f()
}

func (t *teller) withTCP(ctx context.Context, planes int, f func() error) (err error) {
	if t.tcp, err = NewTCP(ctx, t.lab, planes, ""); err != nil {
		return err
	}
	defer func() { t.tcp.Close() }() // not always the same one
	return f()
}

// switched tells what happens on limited planes behind the switch.
func (t *teller) switched(ctx context.Context) error {
	t.step("lab: 2 hosts, %d planes of %s, an XDP switch", t.Planes, lab.FormatRate(t.Rate))
	return t.up(ctx, lab.Config{Planes: t.Planes, Rate: t.Rate}, func() error {
		t.story.MTU = t.lab.Config().MTU
		if err := EnableTCPECN(t.lab); err != nil {
			return err
		}
		return t.withRig(ctx, func() error {
			info := t.rig.Conn.Info()
			t.story.Payload, t.story.Paths, t.story.Checksum = info.Payload, len(info.Paths), info.Checksum
			for _, loss := range t.Losses {
				if err := t.atLoss(ctx, loss); err != nil {
					return err
				}
			}
			if err := t.lab.SetRandom(lab.FaultConfig{}); err != nil {
				return err
			}
			return t.pulls(ctx)
		})
	})
}

// atLoss measures both transports at one share of loss.
func (t *teller) atLoss(ctx context.Context, loss float64) error {
	t.step("%s loss in both directions, on every plane", percent(loss))
	if err := t.lab.SetRandom(lab.FaultConfig{Loss: loss}); err != nil {
		return err
	}
	ours, err := t.measureOurs(ctx, loss)
	if err != nil {
		return fmt.Errorf("%s at %s loss: %w", Ours, percent(loss), err)
	}
	t.story.Rows = append(t.story.Rows, t.row(ours))
	return t.withTCP(ctx, t.Planes, func() error {
		theirs, err := t.measureTCP(ctx, loss)
		if err != nil {
			return fmt.Errorf("%s at %s loss: %w", TCPs, percent(loss), err)
		}
		t.story.Rows = append(t.story.Rows, t.row(theirs))
		return nil
	})
}

// percent writes a share as people do.
func percent(share float64) string { return fmt.Sprintf("%.4g %%", 100*share) }

// planeBytes reads how much each plane has carried.
func (t *teller) planeBytes() ([]uint64, error) {
	s, err := t.lab.Status()
	if err != nil {
		return nil, err
	}
	bytes := make([]uint64, len(s.Planes))
	for i, p := range s.Planes {
		bytes[i] = p.Counters.Bytes
	}
	return bytes, nil
}

// shares runs f and says how the planes shared what it moved.
func (t *teller) shares(f func() error) ([]float64, error) {
	before, err := t.planeBytes()
	if err != nil {
		return nil, err
	}
	if err := f(); err != nil {
		return nil, err
	}
	after, err := t.planeBytes()
	if err != nil {
		return nil, err
	}
	total := 0.0
	shares := make([]float64, len(after))
	for i := range after {
		shares[i] = float64(after[i] - before[i])
		total += shares[i]
	}
	for i := range shares {
		shares[i] /= max(total, 1)
	}
	return shares, nil
}

// during watches a count while f runs.
func (t *teller) during(name string, count func() uint64, f func() error) (Series, error) {
	stop, done := make(chan struct{}), make(chan Series)
	go func() { done <- Watch(count, stop, t.live(name)) }()
	err := f()
	close(stop)
	return <-done, err
}

func (t *teller) measureOurs(ctx context.Context, loss float64) (r Row, err error) {
	r = Row{Transport: Ours, Loss: loss}
	sent, again, err := t.Counts()
	if err != nil {
		return r, err
	}
	r.Shares, err = t.shares(func() error {
		var done atomic.Uint64
		_, err := t.during(Ours, done.Load, func() error {
			bw, err := t.rig.BW(ctx, BWOptions{
				Size: messageBW, Duration: t.Stream, Depth: core.SQDepth, Warmup: storyWarmup, Completed: &done,
			})
			r.GoodputBps = bw.Bps() * 8
			return err
		})
		return err
	})
	if err != nil {
		return r, err
	}
	sentNow, againNow, err := t.Counts()
	if err != nil {
		return r, err
	}
	r.Sent, r.Again = sentNow-sent, againNow-again
	r.Latency, err = t.rig.Latency(ctx, LatOptions{Size: messageLat, Duration: t.Stream / 3, Warmup: storyWarmup / 3})
	return r, err
}

func (t *teller) measureTCP(ctx context.Context, loss float64) (r Row, err error) {
	r = Row{Transport: TCPs, Loss: loss}
	// First, while the connections are fresh and nothing is queued.
	if r.Latency, err = t.tcp.PingPong(ctx, LatOptions{Size: messageLat, Duration: t.Stream / 3, Warmup: storyWarmup / 3}, answerLat); err != nil {
		return r, err
	}
	if err := t.reconnectTCP(ctx); err != nil {
		return r, err
	}
	r.Shares, err = t.shares(func() error {
		series, err := t.during(TCPs, t.tcp.Received, func() error { return t.tcp.Stream(ctx, storyWarmup+t.Stream) })
		r.GoodputBps = series.Rate(storyWarmup, storyWarmup+t.Stream)
		return err
	})
	if err == nil {
		r.Sent, r.Again, err = t.tcp.Segments()
	}
	return r, errors.Join(err, ctx.Err())
}

// reconnectTCP makes new connections: those of a ping-pong have ended in mid-message.
func (t *teller) reconnectTCP(ctx context.Context) error {
	n := len(t.tcp.clients)
	t.tcp.Close()
	fresh, err := NewTCP(ctx, t.lab, n, "")
	if err != nil {
		return err
	}
	t.tcp = fresh
	return nil
}

// pulls pulls a plane in mid-transfer, for each transport.
func (t *teller) pulls(ctx context.Context) error {
	plane := t.Planes - 1
	total := pullBefore + pullDown + pullAfter
	t.step("plane %d is pulled in mid-transfer, and plugged in again after %v", plane, pullDown)
	var done atomic.Uint64
	ours, err := t.pull(ctx, Ours, plane, done.Load, func(ctx context.Context) error {
		_, err := t.rig.BW(ctx, BWOptions{Size: messageBW, Duration: total, Depth: core.SQDepth, Completed: &done})
		return err
	})
	if err != nil {
		return err
	}
	t.story.Pulls = append(t.story.Pulls, ours)
	return t.withTCP(ctx, t.Planes, func() error {
		theirs, err := t.pull(ctx, TCPs, plane, t.tcp.Received, func(ctx context.Context) error {
			return t.tcp.Stream(ctx, total)
		})
		t.story.Pulls = append(t.story.Pulls, theirs)
		return err
	})
}

// pull runs one transfer from which a plane is pulled.
func (t *teller) pull(ctx context.Context, name string, plane int, count func() uint64, run func(context.Context) error) (Pull, error) {
	p := Pull{Transport: name}
	start := time.Now()
	// The lab outlives the transfer: the plane is up when this returns.
	pulled := make(chan error, 1)
	go func() {
		err := sleep(ctx, pullBefore)
		if err == nil {
			err = t.lab.PlaneDown(plane)
			p.Down = time.Since(start)
			err = errors.Join(err, sleep(ctx, pullDown))
		}
		err = errors.Join(err, t.lab.PlaneUp(plane))
		p.Up = time.Since(start)
		pulled <- err
	}()
	series, err := t.during(name, count, func() error { return run(ctx) })
	if pullErr := <-pulled; pullErr != nil {
		return p, pullErr
	}
	if ctx.Err() != nil {
		return p, context.Cause(ctx)
	}
	if err != nil {
		p.Error = err.Error() // it is a result
	}
	p.Series = series
	p.BeforeBps = series.Rate(pullBefore/2, p.Down)
	p.DuringBps = series.Rate(p.Down+pullDown/2, p.Up)
	remaining := p.BeforeBps * float64(t.Planes-1) / float64(t.Planes)
	p.Recovery, p.Recovered = series.Recovery(p.Down, 0.9*remaining)
	p.Recovered = p.Recovered && p.Recovery < p.Up-p.Down
	if t.Show.Pull != nil {
		t.Show.Pull(p)
	}
	return p, nil
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// direct compares both without switch and limits. TCP gets a pair of its own,
// without XDP, which leaves it its offloads.
func (t *teller) direct(ctx context.Context) error {
	t.step("one veth pair, no switch, no limit: TCP on a pair of its own without XDP, TSO on")
	cfg := lab.Config{Direct: true}
	if err := t.up(ctx, cfg, func() error {
		return t.withRig(ctx, func() error {
			r, err := t.measureDirect(ctx)
			t.story.Direct = append(t.story.Direct, r)
			return err
		})
	}); err != nil {
		return err
	}
	return t.up(ctx, cfg, func() error {
		return t.withTCP(ctx, 1, func() error {
			r, err := t.measureDirectTCP(ctx)
			t.story.Direct = append(t.story.Direct, r)
			return err
		})
	})
}

func (t *teller) measureDirect(ctx context.Context) (Row, error) {
	r := Row{Transport: Ours}
	var done atomic.Uint64
	_, err := t.during(Ours, done.Load, func() error {
		bw, err := t.rig.BW(ctx, BWOptions{
			Size: messageBW, Duration: t.Stream, Depth: core.SQDepth, Warmup: storyWarmup, Completed: &done,
		})
		r.GoodputBps = bw.Bps() * 8
		return err
	})
	if err != nil {
		return r, err
	}
	r.Latency, err = t.rig.Latency(ctx, LatOptions{Size: messageLat, Duration: t.Stream / 3, Warmup: storyWarmup / 3})
	return t.row(r), err
}

func (t *teller) measureDirectTCP(ctx context.Context) (r Row, err error) {
	r = Row{Transport: TCPs}
	if r.Latency, err = t.tcp.PingPong(ctx, LatOptions{Size: messageLat, Duration: t.Stream / 3, Warmup: storyWarmup / 3}, answerLat); err != nil {
		return r, err
	}
	if err := t.reconnectTCP(ctx); err != nil {
		return r, err
	}
	series, err := t.during(TCPs, t.tcp.Received, func() error { return t.tcp.Stream(ctx, storyWarmup+t.Stream) })
	r.GoodputBps = series.Rate(storyWarmup, storyWarmup+t.Stream)
	return t.row(r), errors.Join(err, ctx.Err())
}
