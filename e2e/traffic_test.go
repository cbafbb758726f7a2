// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/metaroce/metaroce/transport"
	"github.com/metaroce/metaroce/transport/core"
)

// message is one request: size bytes at from go to to.
type message struct {
	size, from, to uint64
	imm            bool
}

// guard is what lies between the targets of two messages, and before the first and behind the
// last, and must stay as it is.
const guard = 67

// layout places messages of the given sizes at random offsets, both those that are aligned to
// nothing and those that cross a block of 64 KiB, with a guard around each. Every third has an
// immediate. It returns how many bytes of memory the sources and the targets take.
func layout(seed uint64, sizes []uint64) (m []message, from, to uint64) {
	rnd := rand.New(rand.NewPCG(seed, 1))
	const block = 64 << 10
	for i, size := range sizes {
		from += rnd.Uint64N(5000)
		to += guard + rnd.Uint64N(5000)
		if i%4 == 1 {
			// The first packet crosses a block's end, at both ends of the wire by different bytes.
			from = (from+block)/block*block - 1 - rnd.Uint64N(900)
			to = (to+block+guard)/block*block - 1 - rnd.Uint64N(900)
		}
		m = append(m, message{size: size, from: from, to: to, imm: i%3 == 2})
		from += size
		to += size + guard
	}
	return m, from + 1, to + 1
}

// direction is one way of a connection's traffic: from host a to host b.
type direction struct {
	a, b     *host
	src, dst *transport.Conn
	messages []message
	from, to *transport.Memory
	want     []byte
}

// newDirection prepares messages of the given sizes, with contents that depend on seed.
func newDirection(t *testing.T, a, b *host, src, dst *transport.Conn, seed uint64, sizes []uint64) *direction {
	t.Helper()
	m, from, to := layout(seed, sizes)
	d := &direction{
		a: a, b: b, src: src, dst: dst, messages: m,
		from: a.alloc(t, from), to: b.alloc(t, to), want: make([]byte, to),
	}
	d.refill(seed)
	return d
}

// post queues message i, whose WRID is i.
func (d *direction) post(i int) error {
	m := d.messages[i]
	w := transport.WriteRequest{
		WRID: uint64(i), Local: d.from, LocalOffset: m.from, Length: m.size,
		RemoteAddr: d.to.Addr() + m.to, RKey: d.to.RKey(),
	}
	if m.imm {
		return d.src.PostWriteImm(w, uint32(i))
	}
	return d.src.PostWrite(w)
}

// send posts all messages, as many at once as the queue takes, and checks that each completes
// once, successfully and in its turn.
func (d *direction) send(ctx context.Context) error {
	posted := 0
	for done := 0; done < len(d.messages); done++ {
		for posted < len(d.messages) {
			err := d.post(posted)
			if errors.Is(err, transport.ErrQueueFull) {
				break
			}
			if err != nil {
				return fmt.Errorf("host %d: post message %d: %w", d.a.index, posted, err)
			}
			posted++
		}
		c, err := nextOf(ctx, d.src.SendCQ())
		if err != nil {
			return fmt.Errorf("host %d: message %d of %d: %w", d.a.index, done, len(d.messages), err)
		}
		op := core.OpWrite
		if d.messages[done].imm {
			op = core.OpWriteImm
		}
		want := transport.Completion{WRID: uint64(done), Op: op, Length: uint32(d.messages[done].size), Conn: d.src}
		if c != want {
			return fmt.Errorf("host %d: completion %+v, want %+v (connection: %v)", d.a.index, c, want, d.src.Err())
		}
	}
	return nil
}

// receive posts receives and checks that each completes once, with the immediates in order of
// posting, and that everything posted before the message that carried it is there by then.
func (d *direction) receive(ctx context.Context) error {
	var imms []int
	for i, m := range d.messages {
		if m.imm {
			imms = append(imms, i)
		}
	}
	posted, checked := 0, 0
	for k, i := range imms {
		for posted < len(imms) && posted-k < core.RQDepth {
			if err := d.dst.PostRecv(uint64(posted)); err != nil {
				return fmt.Errorf("host %d: post receive %d: %w", d.b.index, posted, err)
			}
			posted++
		}
		c, err := nextOf(ctx, d.dst.RecvCQ())
		if err != nil {
			return fmt.Errorf("host %d: receive %d of %d: %w", d.b.index, k, len(imms), err)
		}
		want := transport.Completion{
			WRID: uint64(k), Op: transport.OpRecv, Length: uint32(d.messages[i].size), Imm: uint32(i), Conn: d.dst,
		}
		if c != want {
			return fmt.Errorf("host %d: received %+v, want %+v (connection: %v)", d.b.index, c, want, d.dst.Err())
		}
		for ; checked <= i; checked++ {
			m := d.messages[checked]
			err := differ(fmt.Sprintf("host %d: message %d when receive %d completed", d.b.index, checked, k),
				d.to.Bytes()[m.to:m.to+m.size], d.want[m.to:m.to+m.size])
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// bytes is the sum of all messages.
func (d *direction) bytes() (n uint64) {
	for _, m := range d.messages {
		n += m.size
	}
	return n
}

// exchange performs directions at the same time and checks completions, memory, and by the
// counters that each packet was placed once. Nothing else may use the hosts meanwhile.
func exchange(t *testing.T, directions ...*direction) {
	t.Helper()
	placed := map[*host]uint64{}
	for _, d := range directions {
		placed[d.b] = d.b.counters(t).RcvdBytes
	}
	run(t, directions...)
	for _, d := range directions {
		placed[d.b] += d.bytes()
	}
	for h, want := range placed {
		if got := h.counters(t).RcvdBytes; got != want {
			t.Errorf("host %d placed %d bytes more than the messages have, want each placed once", h.index, int64(got-want))
		}
	}
}

// run is exchange without the counters.
func run(t *testing.T, directions ...*direction) {
	t.Helper()
	if err := transfer(bounded(t), directions...); err != nil {
		t.Fatal(err)
	}
}

// transfer performs directions at the same time and checks completions and memory.
func transfer(ctx context.Context, directions ...*direction) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 2*len(directions))
	for _, d := range directions {
		go func() { done <- d.send(ctx) }()
		go func() { done <- d.receive(ctx) }()
	}
	var errs []error
	for range cap(done) {
		if err := <-done; err != nil {
			errs = append(errs, err)
			cancel()
		}
	}
	if errs != nil {
		return errors.Join(errs...)
	}
	for _, d := range directions {
		errs = append(errs, differ(fmt.Sprintf("memory of host %d, guards included", d.b.index), d.to.Bytes(), d.want),
			noMore(d.src.SendCQ()), noMore(d.dst.RecvCQ()))
	}
	return errors.Join(errs...)
}

// refill gives a direction whose transfer is over new contents, so that it can be performed again.
func (d *direction) refill(seed uint64) {
	noise(d.from.Bytes(), seed)
	noise(d.want, seed+1)
	copy(d.to.Bytes(), d.want)
	for _, m := range d.messages {
		copy(d.want[m.to:m.to+m.size], d.from.Bytes()[m.from:m.from+m.size])
	}
}

// busy performs directions again and again, until stop, beside what the test does.
type busy struct {
	end  chan struct{}
	over chan struct{}
	once sync.Once
	err  error
	n    atomic.Int64
}

func keepBusy(t *testing.T, directions ...*direction) *busy {
	t.Helper()
	b := &busy{end: make(chan struct{}), over: make(chan struct{})}
	ctx := t.Context()
	go func() {
		defer close(b.over)
		for seed := uint64(1000); ; seed += 10 {
			if b.err = transfer(ctx, directions...); b.err != nil {
				return
			}
			b.n.Add(1)
			select {
			case <-b.end:
				return
			default:
			}
			for i, d := range directions {
				d.refill(seed + 2*uint64(i))
			}
		}
	}()
	t.Cleanup(func() { b.once.Do(func() { close(b.end) }); <-b.over })
	return b
}

// rounds is how often the directions have been performed.
func (b *busy) rounds() int64 { return b.n.Load() }

// waitFor waits until cond holds, or fails with what stopped the traffic.
func (b *busy) waitFor(t *testing.T, what string, cond func() bool) {
	t.Helper()
	waitFor(t, what, func() bool {
		select {
		case <-b.over:
			t.Fatalf("waiting for %s: %v", what, b.err)
		default:
		}
		return cond()
	})
}

// stop ends the traffic after the round under way and fails if anything went wrong.
func (b *busy) stop(t *testing.T) {
	t.Helper()
	b.once.Do(func() { close(b.end) })
	select {
	case <-b.over:
	case <-time.After(patience):
		t.Fatalf("the last transfer does not end within %v", patience)
	}
	if b.err != nil {
		t.Fatal(b.err)
	}
}

// bothWays prepares the same sizes for both directions of a connection.
func bothWays(t *testing.T, h [2]*host, c [2]*transport.Conn, seed uint64, sizes []uint64) []*direction {
	t.Helper()
	return []*direction{
		newDirection(t, h[0], h[1], c[0], c[1], seed, sizes),
		newDirection(t, h[1], h[0], c[1], c[0], seed+100, sizes),
	}
}
