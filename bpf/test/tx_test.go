// SPDX-License-Identifier: Apache-2.0

package bpftest

import (
	"bytes"
	"math/bits"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/loader"
	"github.com/metaroce/metaroce/wire"
)

func monotonicNs() uint64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic(err)
	}
	return uint64(ts.Nano())
}

// onePath leaves the connection with one path, so that the order of packets is plain.
func onePath(c *loader.Conn) { c.Npaths = 1; c.Active = 1 }

func TestTxSegmentsAMessage(t *testing.T) {
	for _, tc := range []struct {
		name string
		opts []option
		size uint32
		want []int
	}{
		{"nothing", nil, 0, []int{0}},
		{"one byte", nil, 1, []int{1}},
		{"one less than a payload", nil, payload - 1, []int{payload - 1}},
		{"a payload", nil, payload, []int{payload}},
		{"one more", nil, payload + 1, []int{payload, 1}},
		{"two and one", nil, 2*payload + 1, []int{payload, payload, 1}},
		{"IPv6", []option{withV6()}, payload + 1, []int{payload, 1}},
		{"without checksum", []option{noChecksum()}, payload + 1, []int{payload, 1}},
		{"IPv4 with VLAN tag", []option{withVLAN(5<<13 | 100)}, payload + 1, []int{payload, 1}},
		{"IPv6 with VLAN tag", []option{withVLAN(100), withV6()}, payload + 1, []int{payload, 1}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t, tc.opts...)
			for i := range w.mem {
				w.mem[i] = byte(i * 31 >> 3)
			}
			w.post(tc.size, func(e *loader.WQE) { e.Laddr = base + 65536 - 700 })
			var off int
			for i, n := range tc.want {
				p := w.emit()
				if p == nil {
					t.Fatalf("packet %d: nothing sent", i)
				}
				last := i == len(tc.want)-1
				if len(p.Payload) != n || p.Data.PSN != w.psn0+uint32(i) || int(p.Data.Offset) != off ||
					(p.Data.Flags&wire.FlagLast != 0) != last || p.RETH.Addr != 0x5000_0000+uint64(off) ||
					p.RETH.Len != tc.size || p.RETH.RKey != 0x4242 {
					t.Errorf("packet %d: %+v, want %d bytes at offset %d, last %v", i, p, n, off, last)
				}
				if !bytes.Equal(p.Payload, w.mem[65536-700+off:][:n]) {
					t.Errorf("packet %d: payload differs from memory", i)
				}
				if d := cmp.Diff(w.vlan, p.VLAN); d != "" {
					t.Errorf("packet %d: VLAN tag (-want +got):\n%s", i, d)
				}
				if p.BTH.QPN != peerQPN || p.Data.Token != txToken || p.Sport != 50000+uint16(p.Data.Path) || p.TOS != 26<<2|wire.ECT0 {
					t.Errorf("packet %d: header %+v", i, p)
				}
				off += n
			}
			if e := w.page.Scq[0]; e.Valid != 1<<32 || e.LastPsn != w.psn0+uint32(len(tc.want))-1 {
				t.Errorf("completion record %+v, want request 0's last psn %d", e, w.psn0+uint32(len(tc.want))-1)
			}
		})
	}
}

func TestTxSpraysOverPathsPacketByPacket(t *testing.T) {
	w := newWorld(t)
	w.post(8*payload, nil)
	for i := range 8 {
		if p := w.emit(); p == nil || p.Data.Path != uint8(i%paths) || p.Data.PSeq != w.psn0+uint32(i/paths) {
			t.Fatalf("packet %d: %+v, want path %d pseq %d", i, p, i%paths, w.psn0+uint32(i/paths))
		}
	}
}

func TestTxProbesPathsWhoseLastPacketDidNotAskWhenIdle(t *testing.T) {
	w := newWorld(t)
	w.post(3*payload, nil)
	var probed []uint8
	for _, p := range w.drain(20) {
		if p.BTH.Opcode == wire.OpProbe {
			probed = append(probed, p.Data.Path)
			if !p.BTH.AckReq {
				t.Error("a probe that does not ask")
			}
		}
	}
	// the last packet of the message (path 2) asked itself
	if d := cmp.Diff([]uint8{0, 1}, probed); d != "" {
		t.Errorf("probed paths (-want +got):\n%s", d)
	}
}

func TestTxStopsAtTheWindowAndAsksWithThePacketThatClosesIt(t *testing.T) {
	w := newWorld(t, withConn(onePath))
	w.change(func(c *loader.Conn) { c.Tx[0].Cwnd = 5 })
	w.post(20*payload, nil)
	got := w.drain(20)
	if len(got) != 5 {
		t.Fatalf("%d packets left, want 5", len(got))
	}
	for i, p := range got {
		if p.BTH.AckReq != (i == 4) {
			t.Errorf("packet %d asks: %v", i, p.BTH.AckReq)
		}
	}
}

func TestTxNeverExceeds248InFlight(t *testing.T) {
	w := newWorld(t, withConn(onePath))
	w.change(func(c *loader.Conn) { c.Tx[0].Cwnd = 1 << 20 })
	w.post(200*payload, nil)
	w.post(200*payload, nil)
	if got := w.drain(600); len(got) != 248 {
		t.Errorf("%d packets left, want 248", len(got))
	}
	c := w.conn()
	if n := c.Tx[0].Next - c.Tx[0].Una; n > 248 {
		t.Errorf("%d in flight, want at most 248", n)
	}
}

func TestTxStopsAtThePSNLimit(t *testing.T) {
	w := newWorld(t)
	w.change(func(c *loader.Conn) { c.PsnLimit = w.psn0 + 3 })
	w.post(10*payload, nil)
	var data []*wire.Packet
	for _, p := range w.drain(20) {
		if p.BTH.Opcode == wire.OpWrite {
			data = append(data, p)
		}
	}
	if len(data) != 3 || !data[2].BTH.AckReq {
		t.Errorf("%d packets, want 3, the last one asking", len(data))
	}
}

func TestTxRepairsExactlyWhatAnAckLacksAheadOfNewData(t *testing.T) {
	w := newWorld(t, withConn(onePath))
	w.post(10*payload, nil)
	for range 6 {
		w.emit()
	}
	// pseq 0..5 sent; 5 arrived, 1 and 3 did not
	if ret, _ := w.deliver(w.ack(w.psn0+5, w.psn0+1, func(p *wire.Packet) { missing(p, 2, 4) })); ret != xdpDrop {
		t.Fatalf("ACK: mr_rx returned %d", ret)
	}
	for i, want := range []uint32{1, 3} {
		p := w.emit()
		if p == nil || p.Data.PSN != w.psn0+want || p.Data.PSeq != w.psn0+6+uint32(i) || p.Data.Flags&wire.FlagRetx == 0 || !p.BTH.AckReq {
			t.Fatalf("repair %d: %+v, want psn %d under the fresh pseq %d, asking", i, p, w.psn0+want, w.psn0+6+uint32(i))
		}
	}
	if p := w.emit(); p == nil || p.Data.PSN != w.psn0+6 || p.Data.Flags&wire.FlagRetx != 0 {
		t.Errorf("after the repairs: %+v, want new data", p)
	}
}

func TestTxLostRepairIsAnotherGap(t *testing.T) {
	w := newWorld(t, withConn(onePath))
	w.post(payload*4, nil)
	for range 4 {
		w.emit()
	}
	w.deliver(w.ack(w.psn0+3, w.psn0, func(p *wire.Packet) { missing(p, 3) }))
	if p := w.emit(); p == nil || p.Data.PSN != w.psn0 {
		t.Fatalf("first repair %+v", p)
	}
	w.post(payload, nil)
	w.emit() // pseq 5
	w.deliver(w.ack(w.psn0+5, w.psn0, func(p *wire.Packet) { missing(p, 1) }))
	if p := w.emit(); p == nil || p.Data.PSN != w.psn0 || p.Data.PSeq != w.psn0+6 {
		t.Errorf("second repair %+v, want psn %d again", p, w.psn0)
	}
}

func TestTxRepairBelowCumIsSkipped(t *testing.T) {
	w := newWorld(t, withConn(onePath))
	w.post(payload*4, nil)
	for range 4 {
		w.emit()
	}
	// pseq 1 is missing, but psn_cum says that all has arrived (by another way)
	w.deliver(w.ack(w.psn0+3, w.psn0+4, func(p *wire.Packet) { missing(p, 2) }))
	for _, p := range w.drain(10) {
		if p.BTH.Opcode != wire.OpProbe {
			t.Errorf("sent %+v, want nothing but probes", p)
		}
	}
}

func TestTxOneRepairPassesClosedWindowsPerAck(t *testing.T) {
	w := newWorld(t, withConn(onePath))
	w.post(payload*20, nil)
	for range 8 {
		w.emit()
	}
	w.change(func(c *loader.Conn) { c.Tx[0].Cwnd = 1 }) // control shut it meanwhile
	w.deliver(w.ack(w.psn0+4, w.psn0, func(p *wire.Packet) { missing(p, 4, 3, 2) }))
	if got := w.drain(10); len(got) != 1 || got[0].Data.PSN != w.psn0 {
		t.Fatalf("%d packets left after one ACK, want one repair", len(got))
	}
	w.deliver(w.ack(w.psn0+5, w.psn0, func(p *wire.Packet) { missing(p, 5, 4, 3) }))
	w.ready()
	if got := w.drain(10); len(got) != 1 || got[0].Data.PSN != w.psn0+1 {
		t.Fatalf("%d packets left after the second ACK, want one repair", len(got))
	}
}

func TestTxOlderAckChangesNothing(t *testing.T) {
	w := newWorld(t, withConn(onePath))
	w.post(payload*8, nil)
	for range 8 {
		w.emit()
	}
	w.deliver(w.ack(w.psn0+7, w.psn0+8, nil))
	w.deliver(w.ack(w.psn0+3, w.psn0+2, func(p *wire.Packet) { missing(p, 1, 2) }))
	c := w.conn()
	if c.PsnCum != w.psn0+8 || c.Tx[0].Una != w.psn0+8 || c.Repairs != 0 {
		t.Errorf("cum %d una %d repairs %b, want the newer ACK's", c.PsnCum, c.Tx[0].Una, c.Repairs)
	}
	if w.page.TxCum != w.psn0+8 {
		t.Errorf("mirrored cum %d ran backwards", w.page.TxCum)
	}
}

func TestTxInvalidAcksAreRefused(t *testing.T) {
	for _, tc := range []struct {
		name string
		f    func(w *world, p *wire.Packet)
	}{
		{"acknowledges a pseq never sent", func(w *world, p *wire.Packet) { p.ACK.PSeqMax = w.psn0 + 4 }},
		{"acknowledges a psn never sent", func(w *world, p *wire.Packet) { p.ACK.PSNCum = w.psn0 + 5 }},
		{"of a generation that does not exist yet", func(_ *world, p *wire.Packet) { p.ACK.Gen = 1 }},
		{"psn_limit beyond its window", func(_ *world, p *wire.Packet) { p.ACK.PSNLimit = p.ACK.PSNCum + 8193 }},
		{"credit beyond its window", func(_ *world, p *wire.Packet) { p.ACK.Credit = 129 }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t, withConn(onePath))
			w.post(payload*4, nil)
			for range 4 {
				w.emit()
			}
			moved := w.counted(func() { w.deliver(w.ack(w.psn0+3, w.psn0+4, func(p *wire.Packet) { tc.f(w, p) })) })
			if d := cmp.Diff(map[string]uint64{"DropAckInvalid": 1}, moved); d != "" {
				t.Errorf("counters (-want +got):\n%s", d)
			}
			if c := w.conn(); c.PsnCum != w.psn0 || c.Tx[0].Una != w.psn0 {
				t.Error("the refused ACK moved state")
			}
		})
	}
}

func TestTxReorderingToleranceHoldsYoungGapsBack(t *testing.T) {
	w := newWorld(t, withConn(onePath))
	w.change(func(c *loader.Conn) { c.Tx[0].Tolerance = 3 })
	w.post(payload*16, nil)
	for range 8 {
		w.emit()
	}
	w.deliver(w.ack(w.psn0+7, w.psn0, func(p *wire.Packet) { missing(p, 1, 6) }))
	c := w.conn()
	if n := bits.OnesCount64(c.Tx[0].Repair[0] | c.Tx[0].Repair[1] | c.Tx[0].Repair[2] | c.Tx[0].Repair[3]); n != 1 {
		t.Errorf("%d repairs queued, want only the old gap", n)
	}
	if c.Tx[0].Una != w.psn0+5 {
		t.Errorf("una %d, want %d: the young ones are unresolved", c.Tx[0].Una, w.psn0+5)
	}
	// the answer to a probe shows it missing still: lost
	w.deliver(w.ack(w.psn0+7, w.psn0, func(p *wire.Packet) { missing(p, 1, 6); p.ACK.Flags = wire.AckFlagProbe }))
	if c = w.conn(); c.Tx[0].Una != w.psn0+8 || c.Tx[0].Lost != 2 {
		t.Errorf("una %d lost %d, want all resolved and 2 lost", c.Tx[0].Una, c.Tx[0].Lost)
	}
}

func TestTxSequenceWraps(t *testing.T) {
	w := newWorld(t, withPSN(0xFFFFFFF0), withConn(onePath))
	w.change(func(c *loader.Conn) { c.Tx[0].Cwnd = 200 })
	w.post(payload*32, nil)
	for i := range uint32(32) {
		if p := w.emit(); p == nil || p.Data.PSN != w.psn0+i || p.Data.PSeq != w.psn0+i || p.BTH.PSN != (w.psn0+i)&0xffffff {
			t.Fatalf("packet %d: %+v", i, p)
		}
	}
	w.deliver(w.ack(w.psn0+31, w.psn0+10, func(p *wire.Packet) { missing(p, 21, 3) }))
	for _, want := range []uint32{10, 28} {
		if p := w.emit(); p == nil || p.Data.PSN != w.psn0+want {
			t.Fatalf("repair %+v, want psn %#x", p, w.psn0+want)
		}
	}
}

func TestTxQueuedRepairIsNeverOverwritten(t *testing.T) {
	w := newWorld(t, withConn(onePath))
	w.change(func(c *loader.Conn) { c.Tx[0].Cwnd = 248 })
	w.post(payload*190, nil)
	w.post(payload*190, nil)
	want := map[uint32]bool{}
	for range 248 {
		w.emit()
	}
	// everything but the last is lost, and what is repaired is lost again and again
	for i := range uint32(247) {
		want[w.psn0+i] = true
	}
	w.deliver(w.ack(w.psn0+247, w.psn0, func(p *wire.Packet) { p.ACK.Vec = wire.Vector{1} }))
	for range 300 {
		p := w.emit()
		if p == nil {
			break
		}
		if p.Data.Flags&wire.FlagRetx != 0 {
			delete(want, p.Data.PSN)
		}
	}
	if len(want) != 0 {
		t.Errorf("%d of 247 repairs never left", len(want))
	}
}

func TestTxSuspectPathsRepairsGoByOthers(t *testing.T) {
	w := newWorld(t)
	w.post(payload*8, nil)
	for range 8 {
		w.emit()
	}
	w.control(loader.Ctl{Op: loader.CtlSuspect, Path: 2, Value: uint32(loader.PathSuspect)})
	got := map[uint32]bool{}
	for _, p := range w.drain(20) {
		if p.BTH.Opcode == wire.OpWrite {
			if p.Data.Path == 2 {
				t.Errorf("psn %d left on the suspect path", p.Data.PSN)
			}
			got[p.Data.PSN-w.psn0] = true
		}
	}
	if d := cmp.Diff(map[uint32]bool{2: true, 6: true}, got); d != "" {
		t.Errorf("repaired psn (-want +got):\n%s", d)
	}
}

func TestTxMoreThan256RepairsOverSeveralPaths(t *testing.T) {
	w := newWorld(t)
	w.change(func(c *loader.Conn) {
		for i := range paths {
			c.Tx[i].Cwnd = 200
		}
	})
	for range 4 {
		w.post(payload*150, nil)
	}
	for range 600 {
		w.emit()
	}
	want := map[uint32]bool{}
	for i := range uint32(600) {
		want[w.psn0+i] = true
	}
	for path := range paths {
		w.control(loader.Ctl{Op: loader.CtlTimeout, Path: uint32(path)})
	}
	for range 2000 {
		if p := w.emit(); p != nil && p.Data.Flags&wire.FlagRetx != 0 {
			if !want[p.Data.PSN] {
				t.Errorf("psn %d repaired twice", p.Data.PSN-w.psn0)
			}
			delete(want, p.Data.PSN)
		}
	}
	if len(want) != 0 {
		t.Errorf("%d of 600 repairs never left", len(want))
	}
}

func TestTxRerollStartsANewGeneration(t *testing.T) {
	w := newWorld(t, withConn(onePath))
	w.post(payload*4, nil)
	for range 4 {
		w.emit()
	}
	w.control(loader.Ctl{Op: loader.CtlReroll, Path: 0, Value: 60123})
	p := w.emit()
	if p == nil || p.Data.Gen != 1 || p.Sport != 60123 || p.Data.PSN != w.psn0 || p.Data.Flags&wire.FlagRetx == 0 {
		t.Fatalf("first packet of the new generation: %+v, want psn %d again from port 60123", p, w.psn0)
	}
	// a late ACK of the old generation counts for psn only
	moved := w.counted(func() { w.deliver(w.ack(w.psn0+3, w.psn0+2, func(p *wire.Packet) { missing(p, 0) })) })
	c := w.conn()
	if c.PsnCum != w.psn0+2 || c.Tx[0].Una != w.psn0+4 || moved["StaleAck"] != 1 {
		t.Errorf("cum %d una %d counters %v, want psn_cum %d and the path untouched", c.PsnCum, c.Tx[0].Una, moved, w.psn0+2)
	}
}

func TestTxNAKStopsNewDataAndRepairsWhatIsBelow(t *testing.T) {
	w := newWorld(t, withConn(onePath))
	w.post(payload*10, nil)
	for range 6 {
		w.emit()
	}
	w.deliver(w.ack(w.psn0+5, w.psn0+1, func(p *wire.Packet) {
		missing(p, 4, 2)
		p.ACK.Syndrome, p.ACK.NakPSN = wire.SynRemoteAccess, w.psn0+3
	}))
	var psns []uint32
	for _, p := range w.drain(20) {
		if p.BTH.Opcode == wire.OpWrite {
			psns = append(psns, p.Data.PSN-w.psn0)
		}
	}
	if d := cmp.Diff([]uint32{1}, psns); d != "" {
		t.Errorf("sent after the NAK of psn 3 (-want +got):\n%s", d)
	}
	if w.page.NakPsn != w.psn0+3 || w.page.NakSyndrome != uint32(wire.SynRemoteAccess) {
		t.Errorf("mirrored NAK %d %#x", w.page.NakPsn, w.page.NakSyndrome)
	}
}

func TestTxImmediateWaitsForCredit(t *testing.T) {
	w := newWorld(t, withConn(onePath))
	w.post(10, func(e *loader.WQE) { e.Op = 1; e.Imm = 0xbeef })
	if p := w.emit(); p != nil {
		t.Fatalf("sent %+v without credit", p)
	}
	if c := w.conn(); c.NoCredit != 1 {
		t.Error("control does not see that credit is missing")
	}
	w.change(func(c *loader.Conn) { c.Tx[0].Next++; c.PsnNext++ }) // something to acknowledge
	w.deliver(w.ack(w.psn0, w.psn0+1, func(p *wire.Packet) { p.ACK.Credit = 1 }))
	p := w.emit()
	if p == nil || p.Data.Flags&wire.FlagImm == 0 || p.Imm.Imm != 0xbeef || p.Imm.Ordinal != 0 {
		t.Errorf("after credit came: %+v, want the immediate with ordinal 0", p)
	}
}

func TestTxRequestIsCopiedBeforeItsFirstPacketLeaves(t *testing.T) {
	w := newWorld(t, withConn(onePath))
	w.post(payload*2, nil)
	w.emit()
	w.page.Sq[0] = loader.WQE{Raddr: 1, Rkey: 2, Len: 3, Lkey: 4}
	if p := w.emit(); p == nil || p.RETH.RKey != 0x4242 || p.RETH.Addr != 0x5000_0000+payload || p.RETH.Len != payload*2 {
		t.Errorf("second packet %+v follows what the application wrote later", p)
	}
}

func TestTxRefusesWhatTheApplicationMayNotSend(t *testing.T) {
	for _, tc := range []struct {
		name  string
		fault uint32
		f     func(*loader.WQE)
	}{
		{"lkey of no region", loader.FaultLocProt, func(e *loader.WQE) { e.Lkey = 99 << 8 }},
		{"old generation of the lkey", loader.FaultLocProt, func(e *loader.WQE) { e.Lkey++ }},
		{"starts before the region", loader.FaultLocProt, func(e *loader.WQE) { e.Laddr = base - 1 }},
		{"ends beyond the region", loader.FaultLocProt, func(e *loader.WQE) { e.Laddr = base + regionLen - 9 }},
		{"unknown operation", loader.FaultLocQPOp, func(e *loader.WQE) { e.Op = 200 }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t, withConn(onePath))
			w.post(10, tc.f)
			if p := w.emit(); p != nil {
				t.Fatalf("sent %+v", p)
			}
			if w.page.Fault != tc.fault || w.page.FaultMsn != 0 || w.conn().Fault != tc.fault {
				t.Errorf("fault %d at request %d, want %d at 0", w.page.Fault, w.page.FaultMsn, tc.fault)
			}
		})
	}
}

func TestTxPacing(t *testing.T) {
	w := newWorld(t, withConn(onePath))
	w.change(func(c *loader.Conn) { c.Tx[0].Pace = 1 << 30; c.Tx[0].Cwnd = 100 }) // a second a KiB
	w.post(payload*8, nil)
	if p := w.emit(); p == nil {
		t.Fatal("the first packet had to wait")
	}
	if p := w.emit(); p != nil {
		t.Fatal("the second packet did not wait")
	}
	if w.pump.Head == w.pump.Tail {
		t.Error("a paced connection left the ready ring")
	}
	if d := time.Duration(w.pump.PacedNs - monotonicNs()); d < 500*time.Millisecond || d > 3*time.Second {
		t.Errorf("paced for %v, want about a second", d)
	}
}

func TestTxBrakeOnAMark(t *testing.T) {
	w := newWorld(t, withConn(onePath))
	w.post(payload*8, nil)
	for range 8 {
		w.emit()
	}
	w.control(loader.Ctl{Op: loader.CtlPath, Cwnd: 64, Pace: 800})
	w.change(func(c *loader.Conn) { c.Tx[0].SrttNs = 1 << 30 }) // both marks within a round trip
	w.deliver(w.ack(w.psn0+1, w.psn0+2, func(p *wire.Packet) { p.ACK.CE = 1 }))
	w.deliver(w.ack(w.psn0+2, w.psn0+3, func(p *wire.Packet) { p.ACK.CE = 3 })) // within the same round trip
	c := w.conn()
	if c.Tx[0].Pace != 900 || c.Tx[0].Cwnd != 56 || c.Tx[0].Ce != 3 {
		t.Errorf("pace %d cwnd %d marks %d, want one brake to 900 and 56, 3 marks", c.Tx[0].Pace, c.Tx[0].Cwnd, c.Tx[0].Ce)
	}
}

func TestTxReadyConnectionsTakeTurns(t *testing.T) {
	w := newWorld(t, withConn(onePath))
	w.change(func(c *loader.Conn) { c.Tx[0].Cwnd = 200 })
	w.post(payload*100, nil)
	w.pump.Ring[w.pump.Tail%uint32(len(w.pump.Ring))] = 200 + 1 // a connection that is not there
	w.pump.Ready[200] = 1
	w.pump.Tail++
	for range 40 {
		w.emit()
	}
	if w.pump.Ready[200] != 0 || w.pump.Tail-w.pump.Head != 1 {
		t.Errorf("ring %d..%d, want the second connection to have had its turn", w.pump.Head, w.pump.Tail)
	}
}

func TestTxNonsenseInTheReadyRingIsCountedAndSkipped(t *testing.T) {
	w := newWorld(t, withConn(onePath))
	w.pump.Ring[0] = 0xffff0000
	w.pump.Tail = 1
	moved := w.counted(func() { w.emit() })
	if moved["BadReady"] != 1 || w.pump.Head != 1 {
		t.Errorf("counters %v head %d", moved, w.pump.Head)
	}
}

func TestControlRefusesAConnectionThatIsNotThere(t *testing.T) {
	w := newWorld(t)
	for _, c := range []loader.Ctl{{Op: loader.CtlKick, Slot: slot, Qpn: qpn + 256}, {Op: loader.CtlKick, Slot: 1 << 20, Qpn: qpn}} {
		if ret, err := w.o.RunControl(c); err != nil || ret != loader.CtlNoConn {
			t.Errorf("%+v: %d, %v, want %d", c, ret, err, loader.CtlNoConn)
		}
	}
	if ret, _ := w.o.RunControl(loader.Ctl{Op: 99, Slot: slot, Qpn: qpn}); ret != loader.CtlBad {
		t.Errorf("unknown command: %d, want %d", ret, loader.CtlBad)
	}
}

func TestControlDoesNotRerollFarBeyondWhatThePeerHasHeard(t *testing.T) {
	w := newWorld(t, withConn(onePath))
	for i := range 200 {
		ret, err := w.o.RunControl(loader.Ctl{Op: loader.CtlReroll, Slot: slot, Qpn: qpn, Value: uint32(50000 + i)})
		w.must(err)
		if want := map[bool]uint32{true: loader.CtlOK, false: loader.CtlLimit}[i < 64]; ret != want {
			t.Fatalf("re-roll %d: mr_ctl returned %d, want %d", i, ret, want)
		}
	}
	if g := w.conn().Tx[0].Gen; g != 64 {
		t.Errorf("generation %d, want it to stop at 64", g)
	}
}

func TestTxDeadPathNeverStandsInTheWayOfTheOthers(t *testing.T) {
	w := newWorld(t)
	w.control(loader.Ctl{Op: loader.CtlSuspect, Path: 0, Value: uint32(loader.PathSuspect)})
	// probed for a long time without an answer, re-rolled until no more is allowed
	for i := range 64*8 + 300 {
		if i%8 == 7 {
			_, err := w.o.RunControl(loader.Ctl{Op: loader.CtlReroll, Slot: slot, Qpn: qpn, Path: 0, Value: uint32(50000 + i)})
			w.must(err)
		}
		w.control(loader.Ctl{Op: loader.CtlProbe, Value: 1})
		if len(w.drain(40)) == 0 {
			t.Fatalf("probe %d did not leave", i)
		}
	}
	w.post(64, nil)
	if got := w.drain(20); len(got) == 0 || got[0].BTH.Opcode != wire.OpWrite {
		t.Errorf("a write on three healthy paths did not leave")
	}
}

func TestTxProbesBeyondTheRingAreDroppedNotWaitedFor(t *testing.T) {
	w := newWorld(t)
	w.control(loader.Ctl{Op: loader.CtlSuspect, Path: 0, Value: uint32(loader.PathSuspect)})
	for range 300 {
		w.control(loader.Ctl{Op: loader.CtlProbe, Value: 1})
		w.drain(10)
	}
	w.post(64, nil)
	if got := w.drain(20); len(got) == 0 || got[0].Data.Path == 0 {
		t.Errorf("a write on three healthy paths did not leave: %v", got)
	}
	if c := w.conn(); c.Probe != 0 || c.Tx[0].Next-c.Tx[0].Una > 255 {
		t.Errorf("probe %b, %d in flight on the dead path", c.Probe, c.Tx[0].Next-c.Tx[0].Una)
	}
}

func TestTxNothingIsCommittedOnAPathThatControlTookAwayMeanwhile(t *testing.T) {
	w := newWorld(t, withConn(onePath))
	w.change(func(c *loader.Conn) { c.Tx[0].Cwnd = 240 })
	var stop atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		tmpl := make([]byte, 14+40+8+12+32+16+8+payload+8)
		for !stop.Load() {
			// EINTR: it ran some
			_, _ = w.o.Tx.Run(&ebpf.RunOptions{Data: tmpl, Repeat: 4096})
		}
	}()
	w.page.Sq[0] = loader.WQE{Laddr: base, Raddr: 0x5000_0000, Lkey: rkey, Rkey: 0x4242, Len: 4 << 16}
	atomic.AddUint32(&w.page.SqTail, 1)
	for i := range 3000 {
		w.control(loader.Ctl{Op: loader.CtlSuspect, Path: 0, Value: uint32(loader.PathActive)})
		for range 20000 + 40*(i%300) {
			_ = atomic.LoadUint32(&w.page.SqTail)
		}
		w.control(loader.Ctl{Op: loader.CtlSuspect, Path: 0, Value: uint32(loader.PathDown)})
		for range 5000 {
			_ = atomic.LoadUint32(&w.page.SqTail)
		}
		if c := w.conn(); c.Tx[0].Next != c.Tx[0].Una {
			t.Errorf("round %d: a packet is under way on a path that is down: nobody would repair it", i)
			break
		}
	}
	stop.Store(true)
	<-done
}

func TestTxAsksWhenAllWindowsShutBehindPacketsThatDidNot(t *testing.T) {
	w := newWorld(t, withConn(onePath))
	w.post(40*payload, nil)
	for range 6 {
		w.emit()
	}
	w.control(loader.Ctl{Op: loader.CtlPath, Path: 0, Cwnd: 4})
	if got := w.drain(20); len(got) != 1 || got[0].BTH.Opcode != wire.OpProbe {
		t.Errorf("sent %v, want one probe: 6 packets bring no ACK by themselves", got)
	}
}

func TestTxNeverReadsARegionThatTookTheIndexOfAnother(t *testing.T) {
	w := newWorld(t, withConn(onePath))
	w.post(4*payload, nil)
	for range 4 {
		w.emit()
	}
	w.put(w.o.Region, regionIdx, &loader.Region{Key: rkey + 1, Pd: pd + 1, Base: base, Len: regionLen})
	w.deliver(w.ack(w.psn0+3, w.psn0, func(p *wire.Packet) { missing(p, 3) }))
	if got := w.drain(20); len(got) != 0 {
		t.Errorf("a repair left with another protection domain's bytes: %v", got)
	}
	if c := w.conn(); c.Fault != loader.FaultLocProt || c.FaultPsn != w.psn0 || w.page.Fault != loader.FaultLocProt {
		t.Errorf("fault %d at psn %d, mirrored %d, want %d at %d", c.Fault, c.FaultPsn, w.page.Fault, loader.FaultLocProt, w.psn0)
	}
}

func TestTxIdleProbeDoesNotDefeatTheReorderingTolerance(t *testing.T) {
	w := newWorld(t, withConn(onePath))
	w.post(payload*40, nil)
	for range 4 {
		w.emit()
	}
	w.control(loader.Ctl{Op: loader.CtlPath, Path: 0, Cwnd: 2, Tolerance: 5})
	if got := w.drain(20); len(got) != 1 || got[0].BTH.Opcode != wire.OpProbe {
		t.Fatalf("sent %d packets, want a probe", len(got))
	}
	w.deliver(w.ack(w.psn0+4, w.psn0+2, func(p *wire.Packet) { missing(p, 2); p.ACK.Flags = wire.AckFlagProbe }))
	if c := w.conn(); c.Tx[0].Lost != 0 {
		t.Error("the probe that left right behind the data declared a young gap lost")
	}
	w.control(loader.Ctl{Op: loader.CtlProbe, Value: 1})
	if p := w.emit(); p == nil || p.Data.PSeq != w.psn0+5 {
		t.Fatalf("sent %+v, want control's probe", p)
	}
	w.deliver(w.ack(w.psn0+5, w.psn0+2, func(p *wire.Packet) { missing(p, 3); p.ACK.Flags = wire.AckFlagProbe }))
	if c := w.conn(); c.Tx[0].Lost != 1 {
		t.Error("control's probe did not settle the gap")
	}
}

func TestTxLateAckCancelsRepairsOfAHastyTimeout(t *testing.T) {
	w := newWorld(t, withConn(onePath))
	w.post(payload*20, nil)
	for range 8 {
		w.emit()
	}
	w.control(loader.Ctl{Op: loader.CtlTimeout, Path: 0})
	w.deliver(w.ack(w.psn0+7, w.psn0+2, func(p *wire.Packet) { missing(p, 5) }))
	p := w.emit()
	if p == nil || p.Data.PSN != w.psn0+2 || p.Data.Flags&wire.FlagRetx == 0 {
		t.Fatalf("sent %+v, want the repair of the one that is missing", p)
	}
	for p = w.emit(); p == nil; p = w.emit() {
	}
	if p.Data.PSN != w.psn0+8 {
		t.Errorf("sent psn %d, want new data: the rest has arrived", p.Data.PSN-w.psn0)
	}
}
