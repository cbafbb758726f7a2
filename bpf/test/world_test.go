// SPDX-License-Identifier: Apache-2.0

// Package bpftest runs the real programs, one packet in, one packet out, by BPF_PROG_RUN, and
// looks at the maps afterwards.
package bpftest

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"os"
	"reflect"
	"sync"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/loader"
	"github.com/metaroce/metaroce/wire"
)

// XDP return codes.
const (
	xdpAborted = iota
	xdpDrop
	xdpPass
	xdpTX
	xdpRedirect
)

// One device with one open connection, as both halves of the tests need it.
const (
	slot      = 3
	qpn       = 7<<8 | slot // generation 7 of slot 3
	peerQPN   = 0x00abcd
	rxToken   = 0x11223344
	txToken   = 0x55667788
	pd        = 9
	pathBase  = 16
	paths     = 4
	payload   = 1024
	regionIdx = 5
	rkey      = regionIdx<<8 | 0x21
	base      = 0x7f0000010000 // what the peer calls the region's first byte
	regionLen = 4 << 16
	outIf     = 77
	port      = 4791
)

var (
	local4 = netip.MustParseAddr("198.18.0.1")
	peer4  = netip.MustParseAddr("198.18.0.2")
	local6 = netip.MustParseAddr("fd00:198:18::1")
	peer6  = netip.MustParseAddr("fd00:198:18::2")
	myMAC  = wire.MAC{2, 0, 0, 0, 0, 1}
	hisMAC = wire.MAC{2, 0, 0, 0, 0, 2}
)

type world struct {
	testing.TB
	o    *loader.Objects
	page *loader.QPage
	mem  []byte
	pump *loader.Pump
	psn0 uint32 // of both directions, and of every path
	v6   bool
	vlan *uint16 // tag of what we send
}

type option func(*world, *loader.Conn)

func withPSN(psn uint32) option  { return func(w *world, _ *loader.Conn) { w.psn0 = psn } }
func withV6() option             { return func(w *world, _ *loader.Conn) { w.v6 = true } }
func withVLAN(tci uint16) option { return func(w *world, _ *loader.Conn) { w.vlan = &tci } }
func noChecksum() option         { return func(_ *world, c *loader.Conn) { c.Checksum = 0 } }
func withConn(f func(*loader.Conn)) option {
	return func(_ *world, c *loader.Conn) { f(c) }
}

// load verifies and loads once for all tests: it takes a second. newWorld sets all state anew.
var load = sync.OnceValues(func() (*loader.Objects, error) {
	return loader.LoadDetached(loader.Options{Port: port, MaxConns: 256, PathPool: 64, MaxRegions: 16})
})

func newWorld(t testing.TB, opts ...option) *world {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs")
	}
	o, err := load()
	if err != nil {
		t.Fatalf("load: %+v", err)
	}
	w := &world{TB: t, o: o, psn0: 1000}
	c := &loader.Conn{
		Qpn: qpn, PeerQpn: peerQPN, RxToken: rxToken, TxToken: txToken, Pd: pd, PathBase: pathBase,
		Payload: payload, Cut: payload, Npaths: paths, Checksum: 1, Tos: 26<<2 | wire.ECT0,
		State: loader.ConnOpen, Active: 1<<paths - 1,
	}
	for _, f := range opts {
		f(w, c)
	}
	c.PsnNext, c.PsnCum, c.PsnLimit = w.psn0, w.psn0, w.psn0+8128
	c.Rxs.Cum = w.psn0
	for i := range paths {
		c.Tx[i].Next, c.Tx[i].Una, c.Tx[i].First, c.Tx[i].Heard = w.psn0, w.psn0, w.psn0, w.psn0-1
		c.Tx[i].Cwnd, c.Tx[i].Sport = 32, uint16(50000+i)
		c.Rx[i].Max = w.psn0 - 1
		for k := range c.Rx[i].Vec {
			c.Rx[i].Vec[k] = ^uint64(0)
		}
	}
	w.put(o.Conn, slot, c)
	w.put(o.Req, slot, &loader.Reqs{})
	for i := range paths {
		w.put(o.Path, pathBase+i, w.path())
	}
	w.put(o.Region, regionIdx, &loader.Region{
		Key: rkey, Pd: pd, Access: loader.AccessRemoteWrite | loader.AccessLocalWrite, Base: base, Len: regionLen,
	})
	rm, err := o.NewRegionMap(regionLen)
	w.must(err)
	w.mem, err = loader.Mmap(rm)
	w.must(err)
	w.must(o.Mem.Put(uint32(regionIdx), rm))
	w.must(rm.Close())
	qm, err := o.NewQPage()
	w.must(err)
	qb, err := loader.Mmap(qm)
	w.must(err)
	w.must(o.QP.Put(uint32(slot), qm))
	w.must(qm.Close())
	w.page = (*loader.QPage)(unsafe.Pointer(&qb[0]))
	pb, err := loader.Mmap(o.Pump)
	w.must(err)
	w.pump = (*loader.Pump)(unsafe.Pointer(&pb[0]))
	clear(pb)
	t.Cleanup(func() {
		for _, b := range [][]byte{w.mem, qb, pb} {
			unix.Munmap(b)
		}
	})
	return w
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

func (w *world) put(m *ebpf.Map, i int, v any) {
	w.Helper()
	w.must(m.Put(uint32(i), v))
}

func (w *world) addrs() (local, peer netip.Addr) {
	if w.v6 {
		return local6, peer6
	}
	return local4, peer4
}

func words(a netip.Addr) (out [4]uint32) {
	b := a.As16()
	for i := range out {
		out[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return out
}

func sum16(b []byte) (s uint32) {
	for i := 0; i+1 < len(b); i += 2 {
		s += uint32(binary.NativeEndian.Uint16(b[i:]))
	}
	return s
}

// path is how our packets to the peer look: what the engine writes into mr_path.
func (w *world) path() *loader.Path {
	local, peer := w.addrs()
	l3 := wire.Ethernet{VLAN: w.vlan}.Len()
	p := &loader.Path{Peer: words(peer), Local: words(local), Ifindex: outIf, L3Off: uint8(l3)}
	var b []byte
	if w.v6 {
		b = wire.Ethernet{Dst: hisMAC, Src: myMAC, VLAN: w.vlan, Type: wire.EtherTypeIPv6}.Append(b)
		b = wire.IPv6{TrafficClass: 26<<2 | wire.ECT0, NextHeader: wire.ProtoUDP, HopLimit: 64, Src: local, Dst: peer}.Append(b)
		p.V6 = 1
	} else {
		b = wire.Ethernet{Dst: hisMAC, Src: myMAC, VLAN: w.vlan, Type: wire.EtherTypeIPv4}.Append(b)
		b = wire.IPv4{TOS: 26<<2 | wire.ECT0, Flags: wire.IPv4DontFragment, TTL: 64, Protocol: wire.ProtoUDP, Src: local, Dst: peer}.Append(b)
		b[l3+10], b[l3+11] = 0, 0
		p.L3Sum = sum16(b[l3:])
	}
	p.L4Off = uint8(len(b))
	if w.vlan != nil {
		p.Vlan = uint32(*w.vlan & 0xfff)
	}
	copy(p.Tmpl[:], b)
	la, pa := local.AsSlice(), peer.AsSlice()
	p.PseudoSum = sum16(la) + sum16(pa) + uint32(17)<<8
	return p
}

// conn reads the connection; change writes it back.
func (w *world) conn() *loader.Conn {
	w.Helper()
	var c loader.Conn
	w.must(w.o.Conn.LookupWithFlags(uint32(slot), &c, ebpf.LookupLock))
	return &c
}

func (w *world) change(f func(*loader.Conn)) {
	w.Helper()
	c := w.conn()
	f(c)
	w.put(w.o.Conn, slot, c)
}

func (w *world) counters() loader.Counters {
	w.Helper()
	c, err := w.o.State().Counters()
	w.must(err)
	return c
}

// counted runs f and returns the counters that it moved, by field name.
func (w *world) counted(f func()) map[string]uint64 {
	w.Helper()
	before := reflect.ValueOf(w.counters())
	f()
	after := reflect.ValueOf(w.counters())
	moved := map[string]uint64{}
	for i := range after.NumField() {
		if after.Type().Field(i).Type.Kind() != reflect.Uint64 {
			continue
		}
		if d := after.Field(i).Uint() - before.Field(i).Uint(); d != 0 {
			moved[after.Type().Field(i).Name] = d
		}
	}
	return moved
}

func (w *world) run(p *ebpf.Program, frame []byte) (uint32, []byte) {
	w.Helper()
	out := make([]byte, 16384) // a frame with fragments has more than a page
	opts := &ebpf.RunOptions{Data: frame, DataOut: out}
	ret, err := p.Run(opts)
	for errors.Is(err, unix.EINTR) {
		ret, err = p.Run(opts)
	}
	w.must(err)
	return ret, opts.DataOut
}

func (w *world) rx(frame []byte) (uint32, []byte) {
	w.Helper()
	return w.run(w.o.Rx, frame)
}

// write is a Write packet from the peer that is in order and right in all things; f spoils it.
func (w *world) write(n uint32, f func(*wire.Packet)) *wire.Packet {
	local, peer := w.addrs()
	p := &wire.Packet{
		SrcMAC: hisMAC, DstMAC: myMAC, VLAN: w.vlan, Src: peer, Dst: local, TOS: 26<<2 | wire.ECT0, TTL: 63,
		Sport: 51000, Dport: port,
		BTH:  wire.BTH{Opcode: wire.OpWrite, PKey: wire.DefaultPKey, QPN: qpn, PSN: (w.psn0 + n) & wire.PSNMask24},
		Data: wire.Data{Token: rxToken, PSeq: w.psn0 + n, PSN: w.psn0 + n, TS: 0x01020304},
		RETH: wire.RETH{Addr: base + uint64(n)*64, RKey: rkey, Len: 1 << 20},
	}
	p.Payload = make([]byte, 64)
	for i := range p.Payload {
		p.Payload[i] = byte(n) + byte(i)*7 + 1
	}
	if f != nil {
		f(p)
	}
	return p
}

func (w *world) frame(p *wire.Packet) []byte {
	w.Helper()
	b, err := p.Append(nil)
	w.must(err)
	return b
}

// deliver runs a packet through mr_rx and decodes the ACK that comes back, if one does.
func (w *world) deliver(p *wire.Packet) (uint32, *wire.Packet) {
	w.Helper()
	ret, out := w.rx(w.frame(p))
	if ret != xdpTX {
		return ret, nil
	}
	a, err := wire.Parse(out, port)
	if err != nil {
		w.Fatalf("the ACK does not parse: %v\n% x", err, out)
	}
	return ret, &a
}

// ack is an ACK of the peer for path 0 up to pseq max, everything below it arrived.
func (w *world) ack(max, cum uint32, f func(*wire.Packet)) *wire.Packet {
	local, peer := w.addrs()
	p := &wire.Packet{
		SrcMAC: hisMAC, DstMAC: myMAC, VLAN: w.vlan, Src: peer, Dst: local, TOS: 26<<2 | wire.ECT0, TTL: 64,
		Sport: 50000, Dport: port,
		BTH: wire.BTH{Opcode: wire.OpACK, PKey: wire.DefaultPKey, QPN: qpn, PSN: cum & wire.PSNMask24},
		ACK: wire.ACK{Token: rxToken, PSeqMax: max, PSNCum: cum, PSNLimit: cum + 8128},
	}
	for i := range p.ACK.Vec {
		p.ACK.Vec[i] = ^uint64(0)
	}
	if f != nil {
		f(p)
	}
	return p
}

// post puts a Write into the send queue, as the library does.
func (w *world) post(length uint32, f func(*loader.WQE)) {
	e := &w.page.Sq[w.page.SqTail%128]
	*e = loader.WQE{Laddr: base, Raddr: 0x5000_0000, Lkey: rkey, Rkey: 0x4242, Len: length}
	if f != nil {
		f(e)
	}
	w.page.SqTail++
	w.ready()
}

// ready puts the connection into the ready ring, unless it is there.
func (w *world) ready() {
	if w.pump.Ready[slot] != 0 {
		return
	}
	w.pump.Ready[slot] = 1
	w.pump.Ring[w.pump.Tail%uint32(len(w.pump.Ring))] = slot + 1
	w.pump.Tail++
}

// emit runs mr_tx once and decodes what it sent, nil if nothing.
func (w *world) emit() *wire.Packet {
	w.Helper()
	tmpl := make([]byte, 14+4+40+8+12+32+16+8+payload+8)
	for i := range tmpl {
		tmpl[i] = 0xee // pages come back as others left them
	}
	ret, out := w.run(w.o.Tx, tmpl)
	if ret != xdpRedirect {
		return nil
	}
	p, err := wire.Parse(out, port)
	if err != nil {
		w.Fatalf("what mr_tx sent does not parse: %v\n% x", err, out)
	}
	p.Payload = append([]byte(nil), p.Payload...)
	return &p
}

// drain runs mr_tx until it has nothing to send, at most limit times.
func (w *world) drain(limit int) (out []*wire.Packet) {
	w.Helper()
	for range limit {
		if p := w.emit(); p != nil {
			out = append(out, p)
		} else if w.pump.Head == w.pump.Tail {
			return out
		}
	}
	return out
}

func (w *world) control(c loader.Ctl) {
	w.Helper()
	c.Slot, c.Qpn = slot, qpn
	ret, err := w.o.RunControl(c)
	w.must(err)
	if ret != 1 {
		w.Fatalf("mr_ctl op %d returned %d, want 1", c.Op, ret)
	}
}

// missing clears bit i (pseq max - i) of an ACK's vector.
func missing(p *wire.Packet, bits ...int) {
	for _, i := range bits {
		p.ACK.Vec[i/64] &^= 1 << (i % 64)
	}
}
