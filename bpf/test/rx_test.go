// SPDX-License-Identifier: Apache-2.0

package bpftest

import (
	"bytes"
	"net/netip"
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/metaroce/metaroce/loader"
	"github.com/metaroce/metaroce/wire"
)

func TestRxPlacesPayloadAtItsAddress(t *testing.T) {
	for _, tc := range []struct {
		name string
		off  uint64
		len  int
	}{
		{"start of the region", 0, 64},
		{"odd offset and length", 777, 333},
		{"ends exactly at a block's end", 65536 - 1024, 1024},
		{"one byte before a block's end", 65535, 1},
		{"crosses a block by one byte", 65536 - 1023, 1024},
		{"crosses a block in the middle", 65536 - 500, 1024},
		{"within 4 KiB of a block's end", 65536 - 3000, 1001},
		{"last bytes of the region", regionLen - 1024, 1024},
		{"single byte at the region's end", regionLen - 1, 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			p := w.write(0, func(p *wire.Packet) {
				p.RETH.Addr = base + tc.off
				p.Payload = bytes.Repeat([]byte{0xa5, 1, 2, 3}, 256)[:tc.len]
			})
			if ret, _ := w.deliver(p); ret != xdpDrop {
				t.Fatalf("mr_rx returned %d, want XDP_DROP", ret)
			}
			want := make([]byte, regionLen)
			copy(want[tc.off:], p.Payload)
			if !bytes.Equal(w.mem[:regionLen], want) {
				t.Error("memory differs from the payload at its address and zero elsewhere")
			}
		})
	}
}

func TestRxInOrderAcknowledgesEveryEighth(t *testing.T) {
	w := newWorld(t)
	for i := range uint32(16) {
		ret, ack := w.deliver(w.write(i, nil))
		if want := i%8 == 7; (ack != nil) != want {
			t.Fatalf("packet %d: mr_rx returned %d, ACK %v, want ACK %v", i, ret, ack != nil, want)
		}
		if ack != nil && ack.ACK.PSNCum != w.psn0+i+1 {
			t.Errorf("packet %d: psn_cum %d, want %d", i, ack.ACK.PSNCum, w.psn0+i+1)
		}
	}
	if c := w.conn(); c.Rxs.Cum != w.psn0+16 || w.page.RxCum != w.psn0+16 {
		t.Errorf("cum %d, mirrored %d, want %d", c.Rxs.Cum, w.page.RxCum, w.psn0+16)
	}
}

func TestRxAckIsTheFrameTurnedRound(t *testing.T) {
	for _, tc := range []struct {
		name string
		opts []option
		f    func(*wire.Packet)
	}{
		{"IPv4", nil, nil},
		{"IPv6", []option{withV6()}, nil},
		{"IPv4 with VLAN tag", []option{withVLAN(3<<13 | 100)}, nil},
		{"IPv6 with VLAN tag", []option{withV6(), withVLAN(100)}, nil},
		{"priority tag on an untagged plane", nil, func(p *wire.Packet) { tci := uint16(5 << 13); p.VLAN = &tci }},
		{"zero-length data grows into its ACK", nil, func(p *wire.Packet) { p.Payload = nil; p.RETH.Len = 0 }},
		{"largest payload shrinks", nil, func(p *wire.Packet) { p.Payload = make([]byte, payload) }},
		{"congestion mark is cleared", nil, func(p *wire.Packet) { p.TOS |= 3 }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t, tc.opts...)
			w.page.RqTail = 17
			p := w.write(0, func(p *wire.Packet) {
				p.Data.Flags |= wire.FlagLast
				if tc.f != nil {
					tc.f(p)
				}
			})
			ret, got := w.deliver(p)
			if ret != xdpTX {
				t.Fatalf("mr_rx returned %d, want XDP_TX", ret)
			}
			a := wire.ACK{
				Token: txToken, PSeqMax: w.psn0, TS: p.Data.TS, PSNCum: w.psn0 + 1,
				PSNLimit: w.psn0 + 1 + 8128, Pkts: 1, Credit: 17,
			}
			for i := range a.Vec {
				a.Vec[i] = ^uint64(0)
			}
			if p.TOS&3 == 3 {
				a.CE = 1
			}
			want := p.Turn(peerQPN, 26<<2|wire.ECT0, a)
			if d := cmp.Diff(want, *got, cmp.Comparer(bytes.Equal), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); d != "" {
				t.Errorf("ACK differs (-want +got):\n%s", d)
			}
		})
	}
}

func TestRxReorderedAcrossPathsPlacesAllAndMovesCumOnce(t *testing.T) {
	w := newWorld(t)
	// psn 3, 1, 2, 0 on paths 3, 1, 2, 0: each path sees its own first pseq, in order
	for i, n := range []uint32{3, 1, 2, 0} {
		p := w.write(n, func(p *wire.Packet) { p.Data.Path = uint8(n); p.Data.PSeq = w.psn0 })
		moved := w.counted(func() { w.deliver(p) })
		if moved["OutOfSequence"] != 0 {
			t.Errorf("psn %d counted as out of its path's order", n)
		}
		want := w.psn0
		if i == 3 {
			want += 4
		}
		if c := w.conn().Rxs.Cum; c != want {
			t.Errorf("after psn %d: cum %d, want %d", n, c, want)
		}
	}
}

func TestRxGapIsAcknowledgedAtOnceWithItsVector(t *testing.T) {
	w := newWorld(t)
	w.deliver(w.write(0, nil))
	_, a := w.deliver(w.write(3, nil)) // 1 and 2 are missing
	if a == nil {
		t.Fatal("no ACK on a gap")
	}
	if a.ACK.PSeqMax != w.psn0+3 || a.ACK.Vec[0]&0xf != 0b1001 || a.ACK.PSNCum != w.psn0+1 {
		t.Errorf("pseq_max %d vector %04b psn_cum %d, want %d, 1001, %d",
			a.ACK.PSeqMax, a.ACK.Vec[0]&0xf, a.ACK.PSNCum, w.psn0+3, w.psn0+1)
	}
}

func TestRxDuplicateIsPlacedOnceAndAcknowledgedAgain(t *testing.T) {
	for _, n := range []uint32{0, 2} { // below cum; beyond a gap
		w := newWorld(t)
		w.deliver(w.write(n, nil))
		copy(w.mem, make([]byte, regionLen)) // a second placement would show
		moved := w.counted(func() {
			_, a := w.deliver(w.write(n, func(p *wire.Packet) { p.Data.PSeq += 5; p.Data.Flags |= wire.FlagRetx }))
			if a == nil {
				t.Fatal("a duplicate got no ACK")
			}
			if a.ACK.Dups != 1 {
				t.Errorf("dups %d, want 1", a.ACK.Dups)
			}
		})
		if moved["DuplicateRequest"] != 1 || moved["RcvdPkts"] != 0 {
			t.Errorf("counters %v, want one duplicate_request and nothing placed", moved)
		}
		if !bytes.Equal(w.mem, make([]byte, len(w.mem))) {
			t.Error("the duplicate was placed again")
		}
	}
}

func TestRxDuplicateOfClaimedPacketIsDroppedWithoutAck(t *testing.T) {
	w := newWorld(t)
	w.change(func(c *loader.Conn) { c.Rxs.Claimed[w.psn0/64%128] |= 1 << (w.psn0 % 64) })
	moved := w.counted(func() {
		if ret, _ := w.deliver(w.write(0, func(p *wire.Packet) { p.BTH.AckReq = true })); ret != xdpDrop {
			t.Errorf("mr_rx returned %d, want XDP_DROP", ret)
		}
	})
	if d := cmp.Diff(map[string]uint64{"DuplicateBusy": 1}, moved); d != "" {
		t.Errorf("counters (-want +got):\n%s", d)
	}
}

func TestRxSequenceWraps(t *testing.T) {
	w := newWorld(t, withPSN(0xFFFFFFF0))
	moved := w.counted(func() {
		for i := range uint32(64) {
			w.deliver(w.write(i, nil))
		}
	})
	if c := w.conn(); c.Rxs.Cum != 0x30 || c.Rx[0].Max != 0x2f {
		t.Errorf("cum %#x, max %#x, want 0x30 and 0x2f", c.Rxs.Cum, c.Rx[0].Max)
	}
	if moved["OutOfSequence"] != 0 || moved["RcvdPkts"] != 64 {
		t.Errorf("counters %v, want 64 placed and a clean wrap", moved)
	}
}

func TestRxBeyondTheWindowIsDroppedUnmarked(t *testing.T) {
	w := newWorld(t)
	for _, n := range []uint32{8127, 8128} {
		moved := w.counted(func() {
			w.deliver(w.write(n, func(p *wire.Packet) { p.Data.PSeq = w.psn0; p.RETH.Addr = base }))
		})
		if n == 8127 && moved["RcvdPkts"] != 1 {
			t.Errorf("last psn of the window: %v, want it placed", moved)
		}
		if d := cmp.Diff(map[string]uint64{"DropWindow": 1}, moved); n == 8128 && d != "" {
			t.Errorf("first psn beyond (-want +got):\n%s", d)
		}
	}
}

func TestRxRefusals(t *testing.T) {
	for _, tc := range []struct {
		name, counter string
		f             func(*wire.Packet)
	}{
		{"unknown QP", "DropUnknownQp", func(p *wire.Packet) { p.BTH.QPN++ }},
		{"older QPN of the same slot", "DropUnknownQp", func(p *wire.Packet) { p.BTH.QPN -= 256 }},
		{"wrong token", "DropToken", func(p *wire.Packet) { p.Data.Token ^= 1 }},
		{"path beyond the agreed", "DropPath", func(p *wire.Packet) { p.Data.Path = paths }},
		{"path beyond any", "DropPath", func(p *wire.Packet) { p.Data.Path = 255 }},
		{"wrong source address", "DropAddress", func(p *wire.Packet) { p.Src = p.Src.Next() }},
		{"not for our address", "DropAddress", func(p *wire.Packet) { p.Dst = p.Dst.Prev().Prev() }},
		{"other family", "DropAddress", func(p *wire.Packet) { p.Src, p.Dst = peer6, local6 }},
		{"no checksum though agreed", "DropChecksum", func(p *wire.Packet) { p.NoChecksum = true }},
		{"longer than the agreed payload", "DropPayload", func(p *wire.Packet) { p.Payload = make([]byte, payload+1) }},
		{"stream that is not there", "DropStream", func(p *wire.Packet) { p.Data.Stream = 1 }},
		{"generation older than the previous", "DropGeneration", func(p *wire.Packet) { p.Data.Gen = 0xfe }},
		{"generation 65 ahead", "DropGeneration", func(p *wire.Packet) { p.Data.Gen = 65 }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			before := w.conn()
			moved := w.counted(func() {
				if ret, _ := w.deliver(w.write(0, func(p *wire.Packet) { p.BTH.AckReq = true; tc.f(p) })); ret != xdpDrop {
					t.Errorf("mr_rx returned %d, want XDP_DROP", ret)
				}
			})
			if d := cmp.Diff(map[string]uint64{tc.counter: 1}, moved); d != "" {
				t.Errorf("counters (-want +got):\n%s", d)
			}
			if !reflect.DeepEqual(before, w.conn()) {
				t.Error("the refused packet changed the connection")
			}
			if !bytes.Equal(w.mem, make([]byte, len(w.mem))) {
				t.Error("the refused packet reached memory")
			}
		})
	}
}

func TestRxNAKs(t *testing.T) {
	for _, tc := range []struct {
		name, counter string
		syndrome      wire.Syndrome
		f             func(*wire.Packet)
	}{
		{"no such region", "NakRkey", wire.SynRemoteAccess, func(p *wire.Packet) { p.RETH.RKey = 6<<8 | 1 }},
		{"index beyond the table", "NakRkey", wire.SynRemoteAccess, func(p *wire.Packet) { p.RETH.RKey = 0xffffff01 }},
		{"old generation of the key", "NakRkey", wire.SynRemoteAccess, func(p *wire.Packet) { p.RETH.RKey-- }},
		{"below the region", "NakBounds", wire.SynRemoteAccess, func(p *wire.Packet) { p.RETH.Addr = base - 1 }},
		{"one byte beyond the region", "NakBounds", wire.SynRemoteAccess, func(p *wire.Packet) { p.RETH.Addr = base + regionLen - 63 }},
		{"wrong key on a write that claims to be empty", "NakRkey", wire.SynRemoteAccess, func(p *wire.Packet) { p.RETH.RKey++; p.RETH.Len = 0 }},
		{"bounds of a write that claims to be empty", "NakBounds", wire.SynRemoteAccess, func(p *wire.Packet) { p.RETH.Addr--; p.RETH.Len = 0 }},
		{"address wraps", "NakBounds", wire.SynRemoteAccess, func(p *wire.Packet) { p.RETH.Addr = ^uint64(0) - 10 }},
		{"receive that was not posted", "NakNoReceive", wire.SynInvalidRequest, func(p *wire.Packet) {
			p.Data.Flags |= wire.FlagImm | wire.FlagLast
			p.Imm = wire.Imm{Imm: 1, Ordinal: 4}
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			w.page.RqTail = 4
			moved := w.counted(func() {
				_, a := w.deliver(w.write(0, tc.f))
				if a == nil {
					t.Fatal("no NAK")
				}
				if a.ACK.Syndrome != tc.syndrome || a.ACK.NakPSN != w.psn0 || a.ACK.PSNCum != w.psn0 {
					t.Errorf("syndrome %v nak_psn %d psn_cum %d, want %v, %d, %d", a.ACK.Syndrome, a.ACK.NakPSN, a.ACK.PSNCum, tc.syndrome, w.psn0, w.psn0)
				}
			})
			if moved[tc.counter] != 1 || moved["RcvdPkts"] != 0 {
				t.Errorf("counters %v, want one %s and nothing placed", moved, tc.counter)
			}
		})
	}
	for _, tc := range []struct {
		name, counter string
		f             func(*loader.Region)
	}{
		{"no right to write", "NakAccess", func(r *loader.Region) { r.Access = loader.AccessRemoteRead }},
		{"other protection domain", "NakPd", func(r *loader.Region) { r.Pd++ }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			r := &loader.Region{Key: rkey, Pd: pd, Access: loader.AccessRemoteWrite, Base: base, Len: regionLen}
			tc.f(r)
			w.put(w.o.Region, regionIdx, r)
			moved := w.counted(func() {
				if _, a := w.deliver(w.write(0, nil)); a == nil || a.ACK.Syndrome != wire.SynRemoteAccess {
					t.Errorf("answer %v, want a remote access NAK", a)
				}
			})
			if moved[tc.counter] != 1 {
				t.Errorf("counters %v, want one %s", moved, tc.counter)
			}
		})
	}
}

func TestRxLowestRefusalIsRepeatedInEveryAck(t *testing.T) {
	w := newWorld(t)
	w.deliver(w.write(5, func(p *wire.Packet) { p.RETH.RKey++ }))
	w.deliver(w.write(3, func(p *wire.Packet) { p.RETH.RKey++ }))
	_, a := w.deliver(w.write(0, func(p *wire.Packet) { p.BTH.AckReq = true }))
	if a == nil || a.ACK.Syndrome != wire.SynRemoteAccess || a.ACK.NakPSN != w.psn0+3 {
		t.Errorf("answer to a good packet: %+v, want the refusal of psn %d repeated", a, w.psn0+3)
	}
}

func TestRxLateDuplicateOfADeregisteredRegionIsNoRefusal(t *testing.T) {
	w := newWorld(t)
	w.deliver(w.write(0, nil))
	w.put(w.o.Region, regionIdx, &loader.Region{})
	if _, a := w.deliver(w.write(0, func(p *wire.Packet) { p.Data.PSeq++ })); a == nil || a.ACK.Syndrome != 0 {
		t.Errorf("answer %+v, want an ACK without syndrome", a)
	}
}

func TestRxCorruptionOfAnyByteIsDropped(t *testing.T) {
	w := newWorld(t)
	good := w.frame(w.write(0, func(p *wire.Packet) { p.BTH.AckReq = true }))
	for at := wire.EthernetLen + wire.IPv4Len + wire.UDPLen; at < len(good); at++ {
		b := bytes.Clone(good)
		b[at] = ^b[at]
		if ret, _ := w.rx(b); ret != xdpDrop && (ret != xdpPass || b[wire.EthernetLen+wire.IPv4Len+wire.UDPLen] >= 0xC0) {
			t.Fatalf("byte %d turned over: mr_rx returned %d, want XDP_DROP", at, ret)
		}
	}
	if !bytes.Equal(w.mem, make([]byte, len(w.mem))) {
		t.Error("a corrupted packet reached memory")
	}
}

func TestRxCorruptionOfAnyBitIsDropped(t *testing.T) {
	w := newWorld(t)
	good := w.frame(w.write(0, func(p *wire.Packet) { p.BTH.AckReq = true }))
	before := w.conn()
	for bit := (wire.EthernetLen + wire.IPv4Len + wire.UDPLen) * 8; bit < len(good)*8; bit++ {
		b := bytes.Clone(good)
		b[bit/8] ^= 1 << (bit % 8)
		ret, _ := w.rx(b)
		// an opcode below the manufacturer's range is RoCEv2's and the stack's
		if op := b[wire.EthernetLen+wire.IPv4Len+wire.UDPLen]; ret != xdpDrop && (ret != xdpPass || op >= 0xC0) {
			t.Fatalf("bit %d flipped: mr_rx returned %d, want XDP_DROP", bit, ret)
		}
	}
	if !reflect.DeepEqual(before, w.conn()) {
		t.Error("corrupted packets changed the connection")
	}
	if !bytes.Equal(w.mem, make([]byte, len(w.mem))) {
		t.Error("a corrupted packet reached memory")
	}
}

func TestRxTruncatedAtEveryByte(t *testing.T) {
	for _, tc := range []struct {
		name string
		opts []option
		l4   int
	}{{"IPv4", nil, 34}, {"IPv6", []option{withV6()}, 54}} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t, tc.opts...)
			good := w.frame(w.write(0, nil))
			for n := 14; n < len(good); n++ {
				want := uint32(xdpPass)
				if n >= tc.l4+8 {
					want = xdpDrop
				}
				moved := w.counted(func() {
					if ret, _ := w.rx(good[:n]); ret != want {
						t.Fatalf("cut to %d bytes: mr_rx returned %d, want %d", n, ret, want)
					}
				})
				if want == xdpDrop && moved["DropLength"]+moved["DropTruncated"] != 1 {
					t.Fatalf("cut to %d bytes: counters %v, want one drop_length or drop_truncated", n, moved)
				}
				if want == xdpPass && len(moved) != 0 {
					t.Fatalf("cut to %d bytes: counters %v, want none", n, moved)
				}
			}
		})
	}
}

func TestRxForeignPacketsPassUntouched(t *testing.T) {
	w := newWorld(t)
	good := w.frame(w.write(0, nil))
	edit := func(f func(b []byte)) []byte { b := bytes.Clone(good); f(b); return b }
	for name, b := range map[string][]byte{
		"ARP":                edit(func(b []byte) { b[12], b[13] = 8, 6 }),
		"TCP":                edit(func(b []byte) { b[23] = 6 }),
		"other UDP port":     edit(func(b []byte) { b[37]++ }),
		"first fragment":     edit(func(b []byte) { b[20] |= 0x20 }),
		"later fragment":     edit(func(b []byte) { b[21] = 9 }),
		"IPv4 options":       edit(func(b []byte) { b[14] = 0x46 }),
		"RoCEv2 on our port": edit(func(b []byte) { b[42] = 0x0a }),
		"bare Ethernet":      good[:14],
	} {
		t.Run(name, func(t *testing.T) {
			moved := w.counted(func() {
				ret, out := w.rx(b)
				if ret != xdpPass || !bytes.Equal(out, b) {
					t.Errorf("mr_rx returned %d, same frame %v, want XDP_PASS and the same", ret, bytes.Equal(out, b))
				}
			})
			if len(moved) != 0 {
				t.Errorf("counters %v, want none", moved)
			}
		})
	}
}

func TestRxGenerations(t *testing.T) {
	w := newWorld(t)
	w.deliver(w.write(0, nil))
	// a newer generation starts a vector of its own at whatever pseq comes first
	_, a := w.deliver(w.write(1, func(p *wire.Packet) { p.Data.Gen = 1; p.Data.PSeq = 0x9000; p.BTH.AckReq = true }))
	if a == nil || a.ACK.Gen != 1 || a.ACK.PSeqMax != 0x9000 || a.ACK.Pkts != 1 {
		t.Fatalf("answer %+v, want generation 1's own vector from %#x", a, 0x9000)
	}
	// late data of the previous one is placed by psn and leaves the vector alone
	moved := w.counted(func() {
		_, a = w.deliver(w.write(2, func(p *wire.Packet) { p.BTH.AckReq = true }))
	})
	if a == nil || a.ACK.Gen != 1 || a.ACK.PSeqMax != 0x9000 || a.ACK.PSNCum != w.psn0+3 {
		t.Errorf("answer %+v, want generation 1's vector and psn_cum %d", a, w.psn0+3)
	}
	if moved["PrevGeneration"] != 1 || moved["RcvdPkts"] != 1 {
		t.Errorf("counters %v, want it placed and counted as prev_generation", moved)
	}
	w.deliver(w.write(3, func(p *wire.Packet) { p.Data.Gen = 2; p.Data.PSeq = 1 }))
	moved = w.counted(func() { w.deliver(w.write(4, nil)) }) // generation 0 now
	if d := cmp.Diff(map[string]uint64{"DropGeneration": 1}, moved); d != "" {
		t.Errorf("two generations late (-want +got):\n%s", d)
	}
}

func TestRxFirstPacketOfAGenerationLostIsShownAsMissing(t *testing.T) {
	w := newWorld(t)
	// pseq 0x9000 opened generation 1 and was lost; 0x9001 comes first
	_, a := w.deliver(w.write(1, func(p *wire.Packet) { p.Data.Gen = 1; p.Data.PSeq = 0x9001 }))
	if a == nil {
		t.Fatal("the first packet of a generation was not acknowledged at once")
	}
	if a.ACK.Vec.Bit(1) {
		t.Error("the lost first packet is reported as arrived: it would never be repaired")
	}
}

func TestRxProbeIsAnsweredAndTakesNoPSN(t *testing.T) {
	w := newWorld(t)
	_, a := w.deliver(w.write(0, func(p *wire.Packet) {
		p.BTH.Opcode, p.RETH, p.Payload = wire.OpProbe, wire.RETH{}, nil
	}))
	if a == nil || a.ACK.Flags != wire.AckFlagProbe || a.ACK.PSeqMax != w.psn0 || a.ACK.PSNCum != w.psn0 {
		t.Errorf("answer %+v, want a probe's ACK with pseq_max %d and psn_cum %d", a, w.psn0, w.psn0)
	}
}

func TestRxImmediateGoesToTheReceiveItNames(t *testing.T) {
	w := newWorld(t)
	w.page.RqTail = 200
	// psn 1 overtakes psn 0: its record is there, but cum has not passed it
	w.deliver(w.write(1, func(p *wire.Packet) {
		p.Data.Flags |= wire.FlagLast | wire.FlagImm
		p.Imm = wire.Imm{Imm: 0xcafe, Ordinal: 150}
	}))
	e := &w.page.Rcq[150%128]
	if e.Valid != 1<<32|150 || e.Imm != 0xcafe || e.Psn != w.psn0+1 || e.Len != 1<<20 {
		t.Fatalf("record %+v, want receive 150 with imm 0xcafe", e)
	}
	if w.page.RxCum == w.psn0+2 {
		t.Error("cum passed a psn that is missing")
	}
	w.deliver(w.write(0, nil))
	if w.page.RxCum != w.psn0+2 {
		t.Errorf("mirrored cum %d, want %d", w.page.RxCum, w.psn0+2)
	}
}

func TestRxOldOrdinalDoesNotOverwriteAReceiveThatWaits(t *testing.T) {
	w := newWorld(t)
	imm := func(n, ordinal uint32) *wire.Packet {
		return w.write(n, func(p *wire.Packet) {
			p.Data.Flags |= wire.FlagImm | wire.FlagLast
			p.Imm.Ordinal = ordinal
		})
	}
	w.page.RqTail = 256
	w.deliver(imm(0, 130))
	before := w.page.Rcq[2]
	if _, a := w.deliver(imm(1, 2)); a == nil || a.ACK.Syndrome != wire.SynInvalidRequest {
		t.Errorf("answer %+v, want a NAK: receive 2 was used long ago", a)
	}
	if w.page.Rcq[2] != before {
		t.Error("the record of receive 130 was overwritten")
	}
}

func TestRxDuplicateOfThePreviousGenerationCountsNotForTheCurrent(t *testing.T) {
	w := newWorld(t)
	w.deliver(w.write(0, nil))
	w.deliver(w.write(1, func(p *wire.Packet) { p.Data.Gen = 1; p.Data.PSeq = 5 }))
	if _, a := w.deliver(w.write(0, nil)); a == nil || a.ACK.Dups != 0 || a.ACK.Pkts != 1 {
		t.Errorf("answer %+v, want the new generation's counts", a)
	}
}

func TestRxEventThatFindsNoRoomIsCountedAndStaysArmed(t *testing.T) {
	w := newWorld(t)
	var lost uint64
	for i := uint32(0); i < 40000 && lost == 0; i++ {
		w.page.RqTail, w.page.WaitRecv, w.page.ArmRecv = i+1, i, 1
		lost = w.counted(func() {
			w.deliver(w.write(i, func(p *wire.Packet) {
				p.Payload, p.RETH.Len = nil, 0
				p.Data.Flags |= wire.FlagImm | wire.FlagLast
				p.Imm.Ordinal = i
			}))
		})["EventsLost"]
	}
	if lost != 1 || w.page.ArmRecv != 1 {
		t.Errorf("events_lost %d, armed %d, want 1 and still armed", lost, w.page.ArmRecv)
	}
}

func TestRxChecksumOffTakesPacketsWithout(t *testing.T) {
	w := newWorld(t, noChecksum())
	_, a := w.deliver(w.write(0, func(p *wire.Packet) { p.NoChecksum = true; p.BTH.AckReq = true }))
	if a == nil || !a.NoChecksum {
		t.Errorf("answer %+v, want an ACK without a checksum", a)
	}
}

func TestRxClosedConnectionAcceptsNothing(t *testing.T) {
	w := newWorld(t)
	w.control(loader.Ctl{Op: uint32(loader.CtlState), Value: loader.ConnError})
	moved := w.counted(func() { w.deliver(w.write(0, nil)) })
	if d := cmp.Diff(map[string]uint64{"DropClosed": 1}, moved); d != "" {
		t.Errorf("counters (-want +got):\n%s", d)
	}
}
