// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"net"
	"testing"
	"time"

	"github.com/metaroce/metaroce/fabric/lab"
	"github.com/metaroce/metaroce/transport"
	"github.com/metaroce/metaroce/transport/core"
)

// client connects host 0 to host 1, whose end has these options. The connection ends with its device.
func client(t *testing.T, h [2]*host, l *transport.Listener, opts ...transport.ConnOption) [2]*transport.Conn {
	t.Helper()
	ctx := bounded(t)
	var c [2]*transport.Conn
	accepted := make(chan error, 1)
	go func() {
		in, err := l.Accept(ctx)
		if err == nil {
			c[1], err = in.Accept(ctx, nil, opts...)
		}
		accepted <- err
	}()
	var err error
	c[0], err = h[0].dev.Dial(ctx, h[1].setupAddr(), nil)
	if err := errors.Join(err, <-accepted); err != nil {
		t.Fatal(err)
	}
	return c
}

// allocIn makes memory in a domain, which is freed with the device.
func allocIn(t *testing.T, p *transport.PD, size uint64, seed uint64) *transport.Memory {
	t.Helper()
	m, err := p.AllocMemory(size, core.LocalWrite|core.RemoteWrite)
	if err != nil {
		t.Fatal(err)
	}
	noise(m.Bytes(), seed)
	return m
}

// Two peers of one process. Each may write to the memory of its own connection and to what the
// process shares with it on purpose; the key of the other's memory gets it a NAK and nothing else.
func TestPeerWithAnothersKeyGetsANAK(t *testing.T) {
	const size = 10_000
	h := openPair(t, newLab(t, lab.Config{Planes: 1}), transport.Config{})
	h[0].watch(t, hardlyAny)
	l := h[1].listen(t)
	defer l.Close()
	shared := allocIn(t, h[1].pd, size, 1)

	one, two := client(t, h, l), client(t, h, l)
	inOne := client(t, h, l, transport.WithPD(h[1].pd))
	own := allocIn(t, one[1].PD(), size, 2)
	for _, c := range []struct {
		name string
		conn *transport.Conn
		to   *transport.Memory
		want core.Status
	}{
		{"own memory", one[0], own, core.StatusSuccess},
		{"shared memory, in its domain", inOne[0], shared, core.StatusSuccess},
		// These end their connections.
		{"memory of another connection", two[0], own, core.StatusRemAccess},
		{"memory of another connection, from the shared domain", inOne[0], own, core.StatusRemAccess},
		{"shared memory, outside of its domain", one[0], shared, core.StatusRemAccess},
	} {
		t.Run(c.name, func(t *testing.T) {
			from := allocIn(t, c.conn.PD(), size, 3)
			want := append([]byte(nil), from.Bytes()...)
			if c.want != core.StatusSuccess {
				want = append(want[:0], c.to.Bytes()...)
			}
			before := h[1].counters(t)
			w := transport.WriteRequest{Local: from, Length: size, RemoteAddr: c.to.Addr(), RKey: c.to.RKey()}
			if err := c.conn.PostWrite(w); err != nil {
				t.Fatal(err)
			}
			if got := next(t, c.conn.SendCQ()); got.Status != c.want {
				t.Fatalf("the write ends with %v, want %v", got.Status, c.want)
			}
			if c.want != core.StatusSuccess {
				waitFor(t, "the connection is over", func() bool { return c.conn.Err() != nil })
			}
			wantEqual(t, "the memory", c.to.Bytes(), want)
			after := h[1].counters(t)
			if naks := after.NakPd - before.NakPd; (naks > 0) != (c.want != core.StatusSuccess) {
				t.Errorf("nak_pd rose by %d", naks)
			}
			if n := after.NakRkey - before.NakRkey + after.NakAccess - before.NakAccess + after.NakBounds - before.NakBounds; n != 0 {
				t.Errorf("%d refusals for another reason", n)
			}
		})
	}
}

// What callers hold of a listener is bounded for each source, so that one that is silent on any number
// of connections neither shuts the port to others nor to itself.
func TestSilentCallersKeepNobodyFromConnecting(t *testing.T) {
	h := openPair(t, newLab(t, lab.Config{Planes: 1}), transport.Config{})
	h[0].watch(t, hardlyAny)
	l := h[1].listen(t)
	defer l.Close()
	stop := make(chan struct{})
	flood := make(chan error, 1)
	go func() {
		flood <- h[0].lab.Do(0, func() error {
			var silent []net.Conn
			defer func() {
				for _, c := range silent {
					c.Close()
				}
			}()
			for {
				select {
				case <-stop:
					return nil
				case <-time.After(time.Millisecond):
				}
				c, err := net.DialTimeout("tcp", h[1].setupAddr(), patience)
				if err != nil {
					return err
				}
				if silent = append(silent, c); len(silent) > 500 {
					silent[0].Close()
					silent = silent[1:]
				}
			}
		})
	}()
	for i := range uint64(pick(10, 2)) {
		c := client(t, h, l)
		from, to := allocIn(t, c[0].PD(), 5000, i), allocIn(t, c[1].PD(), 5000, 77)
		w := transport.WriteRequest{Local: from, Length: 5000, RemoteAddr: to.Addr(), RKey: to.RKey()}
		if err := c[0].PostWrite(w); err != nil {
			t.Fatal(err)
		}
		if got := next(t, c[0].SendCQ()); got.Status != core.StatusSuccess {
			t.Errorf("the write ends with %v", got.Status)
		}
		wantEqual(t, "the memory", to.Bytes(), from.Bytes())
	}
	close(stop)
	if err := <-flood; err != nil {
		t.Error(err)
	}
}
