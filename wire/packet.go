// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

// Packet is a whole frame, decoded. BTH.Opcode and Data.Flags say which headers it has:
// an ACK has ACK, everything else Data; a Write has RETH and, with FlagImm, Imm.
// Lengths, header checksums, version and length field are not here: Append makes them and
// Parse has checked them.
type Packet struct {
	SrcMAC, DstMAC MAC
	VLAN           *uint16    // tag control information; nil = untagged
	Src, Dst       netip.Addr // both IPv4 or both IPv6
	TOS            uint8      // DSCP<<2 | ECN, of IPv6 the traffic class
	TTL            uint8      // of IPv6 the hop limit
	ID             uint16     // IPv4
	IPFlags        uint8      // IPv4: 3 bits, IPv4DontFragment
	FlowLabel      uint32     // IPv6: 20 bits
	Sport, Dport   uint16
	NoChecksum     bool // the UDP checksum is 0, "none"
	BTH            BTH
	Data           Data
	RETH           RETH
	Imm            Imm
	ACK            ACK
	Payload        []byte // a probe's: its padding
}

// HeaderLen is the length in bytes of all that precedes the payload.
func (p *Packet) HeaderLen() int {
	return p.l4() + UDPLen + p.bodyLen()
}

// l4 is the offset of the UDP header.
func (p *Packet) l4() int {
	n := Ethernet{VLAN: p.VLAN}.Len() + IPv4Len
	if !p.Src.Is4() {
		n += IPv6Len - IPv4Len
	}
	return n
}

// bodyLen is the length of BTH and what follows it up to the payload.
func (p *Packet) bodyLen() int {
	return BTHLen + DataLen + 8*extOf(opcodes[p.BTH.Opcode], p.flags())
}

// flags is the flags byte of whichever header the packet has.
func (p *Packet) flags() uint8 {
	if p.BTH.Opcode == OpACK {
		return p.ACK.Flags
	}
	return p.Data.Flags
}

// check refuses what has no representation on the wire or may not be sent.
func (p *Packet) check() error {
	if !p.Src.IsValid() || !p.Dst.IsValid() || p.Src.Is4() != p.Dst.Is4() {
		return fmt.Errorf("addresses %v and %v, want two of one family", p.Src, p.Dst)
	}
	if p.IPFlags > 7 || p.IPFlags&IPv4MoreFragments != 0 {
		return fmt.Errorf("IPv4 flags %#x, want no fragment and 3 bits", p.IPFlags)
	}
	if p.FlowLabel>>20 != 0 {
		return fmt.Errorf("flow label %#x, want 20 bits", p.FlowLabel)
	}
	if p.BTH.QPN > PSNMask24 || p.BTH.PSN > PSNMask24 || p.BTH.Resv7 > 0x7f {
		return fmt.Errorf("BTH with QPN %#x, PSN %#x, reserved bits %#x: want 24, 24 and 7 bits", p.BTH.QPN, p.BTH.PSN, p.BTH.Resv7)
	}
	i, ok := p.BTH.Opcode.Info()
	if !ok {
		return fmt.Errorf("%v: %w", p.BTH.Opcode, ErrOpcode)
	}
	if err := checkFlags(p.BTH.Opcode, p.flags(), extOf(i, p.flags())); err != nil {
		return err
	}
	if len(p.Payload) > i.Most {
		if i.Most == 0 {
			return fmt.Errorf("%v with %d bytes of payload, want none: %w", p.BTH.Opcode, len(p.Payload), ErrHeader)
		}
		return fmt.Errorf("%v with %d bytes behind its headers, at most %d: %w", p.BTH.Opcode, len(p.Payload), i.Most, ErrPayload)
	}
	return nil
}

// Append adds the frame, without a frame check sequence, to b, with every length and
// checksum. It refuses what Parse would refuse; for malformed frames change the bytes of a
// good one and, if need be, call FixChecksums.
func (p *Packet) Append(b []byte) ([]byte, error) {
	if err := p.check(); err != nil {
		return b, fmt.Errorf("wire: append: %w", err)
	}
	udpLen := UDPLen + p.bodyLen() + len(p.Payload)
	eth := Ethernet{Dst: p.DstMAC, Src: p.SrcMAC, VLAN: p.VLAN, Type: EtherTypeIPv4}
	if p.Src.Is4() {
		b = eth.Append(b)
		b = IPv4{
			TOS: p.TOS, TotalLen: uint16(IPv4Len + udpLen), ID: p.ID, Flags: p.IPFlags,
			TTL: p.TTL, Protocol: ProtoUDP, Src: p.Src, Dst: p.Dst,
		}.Append(b)
	} else {
		eth.Type = EtherTypeIPv6
		b = eth.Append(b)
		b = IPv6{
			TrafficClass: p.TOS, FlowLabel: p.FlowLabel, PayloadLen: uint16(udpLen),
			NextHeader: ProtoUDP, HopLimit: p.TTL, Src: p.Src, Dst: p.Dst,
		}.Append(b)
	}
	l4 := len(b)
	b = UDP{Sport: p.Sport, Dport: p.Dport, Length: uint16(udpLen)}.Append(b)
	b = p.BTH.Append(b)
	if p.BTH.Opcode == OpACK {
		b = p.ACK.Append(b)
	} else {
		b = p.Data.Append(b, extOf(opcodes[p.BTH.Opcode], p.Data.Flags))
	}
	if p.BTH.Opcode == OpWrite {
		b = p.RETH.Append(b)
		if p.Data.Flags&FlagImm != 0 {
			b = p.Imm.Append(b)
		}
	}
	b = append(b, p.Payload...)
	if !p.NoChecksum {
		binary.BigEndian.PutUint16(b[l4+6:], UDPChecksum(p.Src, p.Dst, b[l4:]))
	}
	return b, nil
}

// Turn is the ACK that the receiver of p makes of it by turning the frame round
// (docs/wire.md, section 7): addresses swapped, ports not, a fresh TTL, all else of the outer
// headers as it came. tos is what the receiver was configured to send, its ECN field ECT(0);
// qpn is that of the data's sender. p must be a data packet or probe.
func (p *Packet) Turn(qpn uint32, tos uint8, a ACK) Packet {
	return Packet{
		SrcMAC: p.DstMAC, DstMAC: p.SrcMAC, VLAN: p.VLAN,
		Src: p.Dst, Dst: p.Src,
		TOS: tos&^ECNMask | ECT0, TTL: DefaultTTL,
		ID: p.ID, IPFlags: p.IPFlags, FlowLabel: p.FlowLabel,
		Sport: p.Sport, Dport: p.Dport, NoChecksum: p.NoChecksum,
		BTH: BTH{Opcode: OpACK, PKey: DefaultPKey, QPN: qpn, PSN: a.PSNCum & PSNMask24},
		ACK: a,
	}
}
