// SPDX-License-Identifier: Apache-2.0

package wire_test

import (
	"bytes"
	"encoding/hex"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/metaroce/metaroce/wire"
)

// unhex reads hex with blanks, which the rows below use to show the fields.
func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Every header, laid out by hand: each field has bytes of its own, so that none can be
// mistaken for another.
func TestHeaders_haveTheirBytesWhereTheDocumentSays(t *testing.T) {
	tci := uint16(0x6064)
	v4 := wire.IPv4{
		IHL: 5, TOS: 0x6a, TotalLen: 0x1122, ID: 0x3344, Flags: 2, TTL: 64, Protocol: 17, Checksum: 0x69f5,
		Src: netip.MustParseAddr("198.18.0.1"), Dst: netip.MustParseAddr("198.18.0.2"),
	}
	v6 := wire.IPv6{
		TrafficClass: 0x6a, FlowLabel: 0x12345, PayloadLen: 0x0a0b, NextHeader: 17, HopLimit: 64,
		Src: netip.MustParseAddr("2001:db8::1"), Dst: netip.MustParseAddr("2001:db8::2"),
	}
	data := wire.Data{
		Path: 1, Gen: 2, Flags: 3, Token: 0x05060708, PSeq: 0x090a0b0c, PSN: 0x0d0e0f10, TS: 0x11121314,
		Stream: 0x1516, Backlog: 0x1718, MSN: 0x191a1b1c, Offset: 0x1d1e1f20,
	}
	ack := wire.ACK{
		Path: 1, Gen: 2, Flags: 1, Token: 0x05060708, PSeqMax: 0x090a0b0c, TS: 0x0d0e0f10,
		Vec:    wire.Vector{0x1112131415161718, 0x191a1b1c1d1e1f20, 0x2122232425262728, 0x292a2b2c2d2e2f30},
		Stream: 0x3132, Syndrome: 0x33, Resv1: 0x34, PSNCum: 0x35363738, PSNLimit: 0x393a3b3c,
		NakPSN: 0x3d3e3f40, Pkts: 0x41424344, CE: 0x45464748, Dups: 0x494a4b4c, RateHint: 0x4d4e4f50,
		HintEpoch: 0x5152, Resv2: 0x5354, Credit: 0x55565758,
	}
	tests := []struct {
		name   string
		hex    string
		append func() []byte
		decode func([]byte) (any, error)
		want   any
	}{
		{
			"Ethernet", "020000000002 020000000001 0800",
			func() []byte {
				return wire.Ethernet{Dst: wire.MAC{2, 5: 2}, Src: wire.MAC{2, 5: 1}, Type: 0x0800}.Append(nil)
			},
			func(b []byte) (any, error) { var h wire.Ethernet; err := h.Decode(b); return h, err },
			wire.Ethernet{Dst: wire.MAC{2, 5: 2}, Src: wire.MAC{2, 5: 1}, Type: 0x0800},
		},
		{
			"Ethernet with tag", "020000000002 020000000001 8100 6064 86dd",
			func() []byte {
				return wire.Ethernet{Dst: wire.MAC{2, 5: 2}, Src: wire.MAC{2, 5: 1}, VLAN: &tci, Type: 0x86dd}.Append(nil)
			},
			func(b []byte) (any, error) { var h wire.Ethernet; err := h.Decode(b); return h, err },
			wire.Ethernet{Dst: wire.MAC{2, 5: 2}, Src: wire.MAC{2, 5: 1}, VLAN: &tci, Type: 0x86dd},
		},
		{
			"IPv4", "45 6a 1122 3344 4000 40 11 69f5 c6120001 c6120002",
			func() []byte { return v4.Append(nil) },
			func(b []byte) (any, error) { var h wire.IPv4; err := h.Decode(b); return h, err },
			v4,
		},
		{
			"IPv6", "66a12345 0a0b 11 40 20010db8000000000000000000000001 20010db8000000000000000000000002",
			func() []byte { return v6.Append(nil) },
			func(b []byte) (any, error) { var h wire.IPv6; err := h.Decode(b); return h, err },
			v6,
		},
		{
			"UDP", "c001 12b7 0034 abcd",
			func() []byte { return wire.UDP{Sport: 0xc001, Dport: 4791, Length: 52, Checksum: 0xabcd}.Append(nil) },
			func(b []byte) (any, error) { var h wire.UDP; err := h.Decode(b); return h, err },
			wire.UDP{Sport: 0xc001, Dport: 4791, Length: 52, Checksum: 0xabcd},
		},
		{
			"BTH", "c0 40 ffff 80 123456 81 abcdef",
			func() []byte {
				return wire.BTH{Opcode: 0xc0, Flags: 0x40, PKey: 0xffff, Reserved: 0x80, QPN: 0x123456, AckReq: true, Resv7: 1, PSN: 0xabcdef}.Append(nil)
			},
			func(b []byte) (any, error) { var h wire.BTH; err := h.Decode(b); return h, err },
			wire.BTH{Opcode: 0xc0, Flags: 0x40, PKey: 0xffff, Reserved: 0x80, QPN: 0x123456, AckReq: true, Resv7: 1, PSN: 0xabcdef},
		},
		{
			"data header", "01 02 03 12 05060708 090a0b0c 0d0e0f10 11121314 1516 1718 191a1b1c 1d1e1f20",
			func() []byte { return data.Append(nil, 2) },
			func(b []byte) (any, error) {
				var h wire.Data
				version, ext, err := h.Decode(b)
				if err == nil && (version != 1 || ext != 2) {
					return h, errors.New("version or length field wrong")
				}
				return h, err
			},
			data,
		},
		{
			"RETH", "0102030405060708 090a0b0c 0d0e0f10",
			func() []byte {
				return wire.RETH{Addr: 0x0102030405060708, RKey: 0x090a0b0c, Len: 0x0d0e0f10}.Append(nil)
			},
			func(b []byte) (any, error) { var h wire.RETH; err := h.Decode(b); return h, err },
			wire.RETH{Addr: 0x0102030405060708, RKey: 0x090a0b0c, Len: 0x0d0e0f10},
		},
		{
			"immediate", "01020304 05060708",
			func() []byte { return wire.Imm{Imm: 0x01020304, Ordinal: 0x05060708}.Append(nil) },
			func(b []byte) (any, error) { var h wire.Imm; err := h.Decode(b); return h, err },
			wire.Imm{Imm: 0x01020304, Ordinal: 0x05060708},
		},
		{
			"ACK",
			"01 02 01 17 05060708 090a0b0c 0d0e0f10 1112131415161718 191a1b1c1d1e1f20 2122232425262728 292a2b2c2d2e2f30" +
				"3132 33 34 35363738 393a3b3c 3d3e3f40 41424344 45464748 494a4b4c 4d4e4f50 5152 5354 55565758",
			func() []byte { return ack.Append(nil) },
			func(b []byte) (any, error) { var h wire.ACK; err := h.Decode(b); return h, err },
			ack,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			want := unhex(t, tt.hex)
			if got := tt.append(); !bytes.Equal(got, want) {
				t.Errorf("Append\n got %x\nwant %x", got, want)
			}
			got, err := tt.decode(append(bytes.Clone(want), 0xee))
			if err != nil {
				t.Fatalf("Decode: %v", err)
			}
			if diff := cmp.Diff(tt.want, got, cmpPacket); diff != "" {
				t.Errorf("Decode (-want +got):\n%s", diff)
			}
			for n := range want {
				if _, err := tt.decode(want[:n:n]); !errors.Is(err, wire.ErrTruncated) {
					t.Errorf("Decode of %d bytes: error %v, want %v", n, err, wire.ErrTruncated)
				}
			}
		})
	}
}

func TestChecksum_ofRFC1071sExample(t *testing.T) {
	// RFC 1071, section 3: 00 01 f2 03 f4 f5 f6 f7 add up to ddf2.
	if got := wire.Fold(wire.Sum(0, unhex(t, "0001f203f4f5f6f7"))); got != 0xddf2 {
		t.Errorf("%#04x, want 0xddf2", got)
	}
}

func TestChecksum_padsAnOddByte(t *testing.T) {
	if got := wire.Fold(wire.Sum(0, []byte{0x12, 0x34, 0x56})); got != 0x1234+0x5600 {
		t.Errorf("%#04x, want %#04x", got, 0x1234+0x5600)
	}
}

func TestUDPVerify_refusesNoChecksum(t *testing.T) {
	p := ack()
	p.NoChecksum = true
	f, err := p.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	if wire.UDPVerify(p.Src, p.Dst, f[34:]) {
		t.Error("a datagram without checksum has a right one")
	}
}

// ack is a small packet for the tests to spoil.
func ack() wire.Packet {
	return wire.Packet{
		Src: netip.MustParseAddr("198.18.0.1"), Dst: netip.MustParseAddr("198.18.0.2"),
		TOS: wire.DefaultTOS, TTL: wire.DefaultTTL, Sport: wire.SportMin, Dport: wire.UDPPort,
		BTH: wire.BTH{Opcode: wire.OpACK, PKey: wire.DefaultPKey},
	}
}

func TestAppend_refuses(t *testing.T) {
	tests := []struct {
		name  string
		spoil func(*wire.Packet)
		want  error // nil: any
	}{
		{"no addresses", func(p *wire.Packet) { p.Src, p.Dst = netip.Addr{}, netip.Addr{} }, nil},
		{"two families", func(p *wire.Packet) { p.Dst = netip.MustParseAddr("2001:db8::1") }, nil},
		{"more fragments", func(p *wire.Packet) { p.IPFlags = wire.IPv4MoreFragments }, nil},
		{"flow label of 21 bits", func(p *wire.Packet) { p.FlowLabel = 1 << 20 }, nil},
		{"QPN of 25 bits", func(p *wire.Packet) { p.BTH.QPN = 1 << 24 }, nil},
		{"PSN of 25 bits", func(p *wire.Packet) { p.BTH.PSN = 1 << 24 }, nil},
		{"reserved opcode", func(p *wire.Packet) { p.BTH.Opcode = wire.OpSend }, wire.ErrOpcode},
		{"unknown opcode", func(p *wire.Packet) { p.BTH.Opcode = 0xff }, wire.ErrOpcode},
		{"RoCEv2 opcode", func(p *wire.Packet) { p.BTH.Opcode = 0x0a }, wire.ErrOpcode},
		{"reserved flag", func(p *wire.Packet) { p.ACK.Flags = wire.AckFlagINT }, wire.ErrHeader},
		{"ACK with payload", func(p *wire.Packet) { p.Payload = []byte{0} }, wire.ErrHeader},
		{"immediate not last", func(p *wire.Packet) { p.BTH.Opcode, p.Data.Flags = wire.OpWrite, wire.FlagImm }, wire.ErrHeader},
		{"payload too long", func(p *wire.Packet) {
			p.BTH.Opcode, p.Payload = wire.OpWrite, make([]byte, wire.MaxPayload+1)
		}, wire.ErrPayload},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := ack()
			if _, err := p.Append(nil); err != nil {
				t.Fatalf("before: %v", err)
			}
			tt.spoil(&p)
			_, err := p.Append(nil)
			if err == nil || tt.want != nil && !errors.Is(err, tt.want) {
				t.Errorf("error %v, want %v", err, tt.want)
			}
		})
	}
}

func TestFixChecksums_makesAChangedFrameGood(t *testing.T) {
	for _, addr := range []string{"198.18.0.1", "2001:db8::1"} {
		p := ack()
		p.Src, p.Dst = netip.MustParseAddr(addr), netip.MustParseAddr(addr)
		f, err := p.Append(nil)
		if err != nil {
			t.Fatal(err)
		}
		f[len(f)-1]++ // credit
		if p.Src.Is4() {
			f[14+8]-- // TTL
		}
		if _, err := wire.Parse(f, wire.UDPPort); !errors.Is(err, wire.ErrChecksum) {
			t.Fatalf("%s before: error %v, want %v", addr, err, wire.ErrChecksum)
		}
		if err := wire.FixChecksums(f, wire.UDPPort); err != nil {
			t.Fatal(err)
		}
		got, err := wire.Parse(f, wire.UDPPort)
		if err != nil {
			t.Fatalf("%s after: %v", addr, err)
		}
		if got.ACK.Credit != 1 {
			t.Errorf("%s: credit %d, want 1", addr, got.ACK.Credit)
		}
	}
}

func TestFixLengths_makesAPaddedFrameAgree(t *testing.T) {
	for _, addr := range []string{"198.18.0.1", "2001:db8::1"} {
		p := ack()
		p.Src, p.Dst = netip.MustParseAddr(addr), netip.MustParseAddr(addr)
		p.BTH.Opcode = wire.OpWrite
		f, err := p.Append(nil)
		if err != nil {
			t.Fatal(err)
		}
		f = append(f, 1, 2, 3)
		if err := wire.FixLengths(f, wire.UDPPort); err != nil {
			t.Fatal(err)
		}
		got, err := wire.Parse(f, wire.UDPPort)
		if err != nil {
			t.Fatalf("%s: %v", addr, err)
		}
		if !bytes.Equal(got.Payload, []byte{1, 2, 3}) {
			t.Errorf("%s: payload %x, want 010203", addr, got.Payload)
		}
	}
}

func TestParse_errorNamesFoundAndWanted(t *testing.T) {
	p := ack()
	f, err := p.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	f[42+12+3] = 0x27
	if err := wire.FixChecksums(f, wire.UDPPort); err != nil {
		t.Fatal(err)
	}
	_, err = wire.Parse(f, wire.UDPPort)
	if got, want := err.Error(), "wire: parse: version 2, want 1: version"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	var r wire.Refusal
	if !errors.As(err, &r) || r.Counter() != "drop_version" {
		t.Errorf("counter %q, want drop_version", r.Counter())
	}
}

func TestParse_refusesAWrongIPv4HeaderChecksum(t *testing.T) {
	p := ack()
	f, err := p.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	f[14+10] ^= 1
	if _, err := wire.Parse(f, wire.UDPPort); !errors.Is(err, wire.ErrChecksum) {
		t.Errorf("error %v, want %v", err, wire.ErrChecksum)
	}
}

func TestFixChecksums_refusesALengthBeyondTheFrame(t *testing.T) {
	p := ack()
	f, err := p.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := wire.FixChecksums(f[:len(f)-1], wire.UDPPort); !errors.Is(err, wire.ErrLength) {
		t.Errorf("error %v, want %v", err, wire.ErrLength)
	}
}
