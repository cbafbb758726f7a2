// SPDX-License-Identifier: Apache-2.0

package bpftest

import (
	"bytes"
	"encoding/binary"
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/metaroce/metaroce/wire"
)

func TestRxPacketOfAnotherVLANIsDropped(t *testing.T) {
	tag := func(tci uint16) *uint16 { return &tci }
	for _, tc := range []struct {
		name string
		opts []option
		vlan *uint16
		drop bool
	}{
		{"its own", []option{withVLAN(100)}, tag(100), false},
		{"its own with another priority", []option{withVLAN(100)}, tag(7<<13 | 100), false},
		{"another", []option{withVLAN(100)}, tag(101), true},
		{"none where one is wanted", []option{withVLAN(100)}, nil, true},
		{"priority only where one is wanted", []option{withVLAN(100)}, tag(3 << 13), true},
		{"one where none is wanted", nil, tag(100), true},
		{"priority only where none is wanted", nil, tag(3 << 13), false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t, tc.opts...)
			before := w.conn()
			p := w.write(0, func(p *wire.Packet) { p.VLAN = tc.vlan })
			moved := w.counted(func() { w.deliver(p) })
			if !tc.drop {
				if moved["RcvdPkts"] != 1 || moved["DropVlan"] != 0 {
					t.Errorf("counters %v, want it placed", moved)
				}
				return
			}
			if d := cmp.Diff(map[string]uint64{"DropVlan": 1}, moved); d != "" {
				t.Errorf("counters (-want +got):\n%s", d)
			}
			if !reflect.DeepEqual(before, w.conn()) || !bytes.Equal(w.mem, make([]byte, len(w.mem))) {
				t.Error("the refused packet changed the connection or reached memory")
			}
		})
	}
}

func TestRxACKOfAnotherVLANIsDropped(t *testing.T) {
	w := newWorld(t, withVLAN(100))
	w.post(64, nil)
	if w.emit() == nil {
		t.Fatal("nothing was sent")
	}
	other := uint16(101)
	moved := w.counted(func() { w.deliver(w.ack(w.psn0, w.psn0+1, func(p *wire.Packet) { p.VLAN = &other })) })
	if d := cmp.Diff(map[string]uint64{"DropVlan": 1}, moved); d != "" {
		t.Errorf("counters (-want +got):\n%s", d)
	}
}

// A run of a program with frags puts what does not fit a page into fragments, as drivers do where
// the MTU exceeds a page.
func TestRxFrameInPiecesIsDroppedAndNeverMisplaced(t *testing.T) {
	large := func(w *world, change func(b []byte)) []byte {
		b := w.frame(w.write(0, func(p *wire.Packet) { p.Payload = make([]byte, 3072) }))
		b = append(b, bytes.Repeat([]byte{0xa5}, 8000-len(b))...)
		binary.BigEndian.PutUint16(b[wire.EthernetLen+2:], uint16(len(b)-wire.EthernetLen))
		binary.BigEndian.PutUint16(b[wire.EthernetLen+wire.IPv4Len+4:], uint16(len(b)-wire.EthernetLen-wire.IPv4Len))
		if change != nil {
			change(b)
		}
		return b
	}
	const opcode = wire.EthernetLen + wire.IPv4Len + wire.UDPLen
	for _, tc := range []struct {
		name   string
		change func(b []byte)
		ret    uint32
		count  map[string]uint64
	}{
		{"ours", nil, xdpDrop, map[string]uint64{"DropNonlinear": 1}},
		{"ours and longer than the frame", func(b []byte) {
			binary.BigEndian.PutUint16(b[wire.EthernetLen+2:], 8001)
			binary.BigEndian.PutUint16(b[wire.EthernetLen+wire.IPv4Len+4:], 8001-wire.IPv4Len)
		}, xdpDrop, map[string]uint64{"DropLength": 1}},
		{"RoCEv2 on our port", func(b []byte) { b[opcode] = 0x0a }, xdpPass, map[string]uint64{}},
		{"other UDP port", func(b []byte) { b[wire.EthernetLen+wire.IPv4Len+3]++ }, xdpPass, map[string]uint64{}},
		{"TCP", func(b []byte) { b[wire.EthernetLen+9] = 6 }, xdpPass, map[string]uint64{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			frame := large(w, tc.change)
			before := w.conn()
			var ret uint32
			var out []byte
			moved := w.counted(func() { ret, out = w.rx(frame) })
			if d := cmp.Diff(tc.count, moved); ret != tc.ret || d != "" {
				t.Errorf("mr_rx returned %d, want %d; counters (-want +got):\n%s", ret, tc.ret, d)
			}
			if ret == xdpPass && !bytes.Equal(out, frame) {
				t.Error("the frame that passes was changed")
			}
			if !reflect.DeepEqual(before, w.conn()) || !bytes.Equal(w.mem, make([]byte, len(w.mem))) {
				t.Error("the frame changed the connection or reached memory")
			}
		})
	}
}
