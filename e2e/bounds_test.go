// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/fabric/lab"
	"github.com/metaroce/metaroce/loader"
	"github.com/metaroce/metaroce/transport"
	"github.com/metaroce/metaroce/wire"
)

// inject sends a packet of a connection's path 0 from host a to host b, past a's device. What the packet
// needs besides its BTH opcode and headers is filled in.
func inject(t *testing.T, a, b *host, to *transport.Conn, p wire.Packet) {
	t.Helper()
	l := a.lab
	from := plane0Of(t, l, a.index).Attrs()
	copy(p.SrcMAC[:], from.HardwareAddr)
	copy(p.DstMAC[:], plane0Of(t, l, b.index).Attrs().HardwareAddr)
	p.Src, p.Dst, p.TOS, p.TTL = l.Addr(a.index, 0), l.Addr(b.index, 0), wire.ECT0, wire.DefaultTTL
	p.Sport, p.Dport = 51000, lab.DefaultPort
	p.BTH.QPN, p.BTH.PKey = to.Info().QPN, wire.DefaultPKey
	frame, err := p.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	err = l.Do(a.index, func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: from.Index})
	})
	if err != nil {
		t.Fatal(err)
	}
}

// strayData is a packet that the end with registers r has had already, but for what f changes. It is of a
// message without bytes, so that it needs no key.
func strayData(r loader.Conn, f func(*wire.Packet)) wire.Packet {
	p := wire.Packet{
		BTH: wire.BTH{Opcode: wire.OpWrite},
		Data: wire.Data{
			Gen: r.Rx[0].Gen, Flags: wire.FlagLast, Token: r.RxToken, PSeq: r.Rx[0].Max + 1, PSN: r.Rxs.Cum - 1,
		},
	}
	f(&p)
	return p
}

// strayProbe is the same as a probe.
func strayProbe(r loader.Conn, f func(*wire.Packet)) wire.Packet {
	return strayData(r, func(p *wire.Packet) {
		p.BTH.Opcode, p.Data.Flags = wire.OpProbe, 0
		f(p)
	})
}

// strayACK tells the end with registers r what it knows already, but for what f changes.
func strayACK(r loader.Conn, f func(*wire.Packet)) wire.Packet {
	p := wire.Packet{
		BTH: wire.BTH{Opcode: wire.OpACK},
		ACK: wire.ACK{
			Gen: r.Tx[0].Gen, Token: r.RxToken, PSeqMax: r.Tx[0].Heard, PSNCum: r.PsnCum, PSNLimit: r.PsnLimit, Credit: r.Credit,
		},
	}
	for i := range p.ACK.Vec {
		p.ACK.Vec[i] = ^uint64(0)
	}
	f(&p)
	return p
}

func numbersBeyondTheirBoundsAreNotBelieved(t *testing.T, h [2]*host) {
	conn := connect(t, h[0], h[1], hardlyAny)
	traffic := keepBusy(t, newDirection(t, h[0], h[1], conn[0], conn[1], 1, mixed(1, pick[uint64](4<<20, 100<<10))))
	traffic.waitFor(t, "a transfer", func() bool { return traffic.rounds() > 0 })
	refusedData := func(c loader.Counters) uint64 { return c.DropGeneration }
	ahead := func(c loader.Counters) uint64 { return c.PseqAhead }
	refusedACK := func(c loader.Counters) uint64 { return c.DropAckInvalid }
	farGen := func(p *wire.Packet) { p.Data.Gen += 65 }
	farPseq := func(p *wire.Packet) { p.Data.PSeq += 1 << 30 }
	// Whatever the traffic does meanwhile, these hold only if the number was believed.
	genBelieved := func(r loader.Conn) bool { return r.Rx[0].Gen >= 65 }
	pseqBelieved := func(r loader.Conn) bool { return r.Rx[0].Max-conn[0].Info().PSN > 1<<29 }
	for _, c := range []struct {
		name     string
		to       int // host
		stray    func(loader.Conn, func(*wire.Packet)) wire.Packet
		spoil    func(*wire.Packet)
		counter  func(loader.Counters) uint64
		believed func(loader.Conn) bool
	}{
		{"generation of a data packet", 1, strayData, farGen, refusedData, genBelieved},
		{"generation of a probe", 1, strayProbe, farGen, refusedData, genBelieved},
		{"pseq of a data packet", 1, strayData, farPseq, ahead, pseqBelieved},
		{"pseq of a probe", 1, strayProbe, farPseq, ahead, pseqBelieved},
		{"psn_limit", 0, strayACK, func(p *wire.Packet) { p.ACK.PSNLimit += 1 << 20 }, refusedACK, func(r loader.Conn) bool {
			return int32(r.PsnLimit-r.PsnCum) > 8192
		}},
		{"credit", 0, strayACK, func(p *wire.Packet) { p.ACK.Credit += 1 << 20 }, refusedACK, func(r loader.Conn) bool {
			return int32(r.Credit-r.Ordinal) > 128
		}},
	} {
		ok := t.Run(c.name, func(t *testing.T) {
			before := c.counter(h[c.to].counters(t))
			inject(t, h[1-c.to], h[c.to], conn[c.to], c.stray(h[c.to].register(t, conn[c.to]), c.spoil))
			traffic.waitFor(t, "the packet counted", func() bool {
				if r := h[c.to].register(t, conn[c.to]); c.believed(r) {
					t.Fatalf("the number was believed: psn_cum %d, limit %d, credit %d, path 0 %+v, %+v", r.PsnCum, r.PsnLimit, r.Credit, r.Tx[0], r.Rx[0])
				}
				return c.counter(h[c.to].counters(t)) == before+1
			})
			acks := h[0].register(t, conn[0]).Tx[0].Acks
			traffic.waitFor(t, "data on the same path", func() bool {
				tx := h[0].register(t, conn[0]).Tx[0]
				return tx.State == loader.PathActive && tx.Acks > acks+10
			})
			n := traffic.rounds()
			traffic.waitFor(t, "transfers", func() bool { return traffic.rounds() > n+1 })
			if got := c.counter(h[c.to].counters(t)); got != before+1 {
				t.Errorf("%d packets counted, want the one", got-before)
			}
		})
		if !ok {
			return // a path that is wrecked says nothing about the next case
		}
	}
	traffic.stop(t)
}
