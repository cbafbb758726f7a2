// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

// Layout says where the parts of a frame begin, in bytes from its start.
type Layout struct {
	L3, L4 int // IP and UDP header
	BTH    int
	Header int // data header or ACK
	UDPLen int // what the UDP header says, itself included

	src, dst netip.Addr
	eth      Ethernet
	v4       IPv4
	v6       IPv6
	udp      UDP
	ipLen    int // IP payload, as the IP header says
	version  int // of IP
}

// Locate finds the parts of a frame that is UDP to the given destination port, in IPv4
// without options or IPv6 without extension headers, not a fragment, with at most one
// 802.1Q tag. Anything else is ErrNotOurs, also a frame that ends before its UDP header does.
// It compares no lengths.
func Locate(frame []byte, port uint16) (Layout, error) {
	l, err := locate(frame, port)
	if err != nil {
		return l, fmt.Errorf("wire: %w", err)
	}
	return l, nil
}

func locate(frame []byte, port uint16) (l Layout, err error) {
	// What ends too early here cannot be known to be ours.
	if l.eth.Decode(frame) != nil {
		return l, notOurs("Ethernet header: bytes", uint(len(frame)), EthernetLen)
	}
	l.L3 = l.eth.Len()
	ip := frame[l.L3:]
	switch l.eth.Type {
	case EtherTypeIPv4:
		if len(ip) < IPv4Len {
			return l, notOurs("IPv4 header: bytes", uint(len(ip)), IPv4Len)
		}
		if err := l.v4.Decode(ip); err != nil {
			return l, err
		}
		switch h := l.v4; {
		case h.IHL != IPv4Len/4:
			return l, notOurs("IPv4 header length in words", uint(h.IHL), IPv4Len/4)
		case h.Protocol != ProtoUDP:
			return l, notOurs("IPv4 protocol", uint(h.Protocol), ProtoUDP)
		case h.Offset != 0 || h.Flags&IPv4MoreFragments != 0:
			return l, notOurs("IPv4 fragment offset", uint(h.Offset), 0)
		}
		l.version, l.src, l.dst = 4, l.v4.Src, l.v4.Dst
		l.L4, l.ipLen = l.L3+IPv4Len, int(l.v4.TotalLen)-IPv4Len
	case EtherTypeIPv6:
		if len(ip) < IPv6Len {
			return l, notOurs("IPv6 header: bytes", uint(len(ip)), IPv6Len)
		}
		if err := l.v6.Decode(ip); err != nil {
			return l, err
		}
		if l.v6.NextHeader != ProtoUDP {
			return l, notOurs("IPv6 next header", uint(l.v6.NextHeader), ProtoUDP)
		}
		l.version, l.src, l.dst = 6, l.v6.Src, l.v6.Dst
		l.L4, l.ipLen = l.L3+IPv6Len, int(l.v6.PayloadLen)
	default:
		return l, notOurs("Ethernet type", uint(l.eth.Type), EtherTypeIPv4)
	}
	if l.udp.Decode(frame[l.L4:]) != nil {
		return l, notOurs("UDP header: bytes", uint(len(frame)-l.L4), UDPLen)
	}
	if l.udp.Dport != port {
		return l, notOurs("UDP destination port", uint(l.udp.Dport), uint(port))
	}
	l.BTH = l.L4 + UDPLen
	l.Header = l.BTH + BTHLen
	l.UDPLen = int(l.udp.Length)
	return l, nil
}

// Parse decodes a frame, without frame check sequence, that came in where port is our UDP
// port. The error wraps the Refusal. ErrNotOurs is for frames that pass to the stack; all
// others name the first check that failed, in the order of docs/wire.md, section 9, as far as a
// frame alone can show it. It is stricter than a receiver has to be: it also verifies the IPv4
// header checksum, and the UDP checksum whenever there is one; a checksum of 0 is taken and
// reported in NoChecksum. Payload refers to frame.
func Parse(frame []byte, port uint16) (Packet, error) {
	p, err := parse(frame, port)
	if err != nil {
		return Packet{}, fmt.Errorf("wire: parse: %w", err)
	}
	return p, nil
}

func parse(frame []byte, port uint16) (p Packet, err error) {
	l, err := locate(frame, port)
	if err != nil {
		return p, err
	}
	if l.UDPLen != l.ipLen || l.UDPLen > len(frame)-l.L4 {
		return p, fmt.Errorf("UDP length %d, want IP's %d and at most the frame's %d: %w", l.UDPLen, l.ipLen, len(frame)-l.L4, ErrLength)
	}
	if l.UDPLen < UDPLen+BTHLen {
		return p, short("UDP datagram", l.UDPLen, UDPLen+BTHLen)
	}
	frame = frame[:l.L4+l.UDPLen] // what follows is the link's padding
	if err := p.BTH.Decode(frame[l.BTH:]); err != nil {
		return p, err
	}
	if p.BTH.Opcode < OpFirst {
		return p, notOurs("BTH opcode", uint(p.BTH.Opcode), uint(OpFirst))
	}
	i, ok := p.BTH.Opcode.Info()
	if !ok {
		return p, fmt.Errorf("%v: %w", p.BTH.Opcode, ErrOpcode)
	}
	if found, wanted := len(frame)-l.Header, DataLen+8*i.Ext; found < wanted {
		return p, short("headers behind the BTH", found, wanted)
	}
	if l.version == 4 && Fold(Sum(0, frame[l.L3:l.L4])) != 0xffff {
		return p, fmt.Errorf("IPv4 header checksum %#04x: %w", l.v4.Checksum, ErrChecksum)
	}
	if l.udp.Checksum != 0 && !UDPVerify(l.src, l.dst, frame[l.L4:]) {
		return p, fmt.Errorf("UDP checksum %#04x, want %#04x: %w", l.udp.Checksum, UDPChecksum(l.src, l.dst, frame[l.L4:]), ErrChecksum)
	}
	// Data header and ACK agree in where the flags, the version and the length field are.
	version, ext, err := p.Data.Decode(frame[l.Header:])
	if err != nil {
		return p, err
	}
	if version != Version {
		return p, fmt.Errorf("version %d, want %d: %w", version, Version, ErrVersion)
	}
	body := l.Header + DataLen + 8*extOf(i, p.Data.Flags) // where the payload begins
	if len(frame) < body {
		return p, short("headers behind the BTH", len(frame)-l.Header, body-l.Header)
	}
	if err := checkFlags(p.BTH.Opcode, p.Data.Flags, ext); err != nil {
		return p, err
	}
	p.Payload = frame[body:]
	if len(p.Payload) > i.Most {
		if i.Most == 0 {
			return p, fmt.Errorf("%v with %d bytes of payload, want none: %w", p.BTH.Opcode, len(p.Payload), ErrHeader)
		}
		return p, fmt.Errorf("%v with %d bytes behind its headers, at most %d: %w", p.BTH.Opcode, len(p.Payload), i.Most, ErrPayload)
	}
	if err := p.parseOp(frame[l.Header:]); err != nil {
		return p, err
	}
	p.outer(&l)
	return p, nil
}

// parseOp decodes what depends on the operation; b begins at the data header or ACK.
func (p *Packet) parseOp(b []byte) error {
	if p.BTH.Opcode == OpACK {
		p.Data = Data{}
		return p.ACK.Decode(b)
	}
	if p.BTH.Opcode != OpWrite {
		return nil
	}
	if err := p.RETH.Decode(b[DataLen:]); err != nil {
		return err
	}
	if p.Data.Flags&FlagImm != 0 {
		return p.Imm.Decode(b[DataLen+RETHLen:])
	}
	return nil
}

// outer takes over what Locate found.
func (p *Packet) outer(l *Layout) {
	p.SrcMAC, p.DstMAC, p.VLAN = l.eth.Src, l.eth.Dst, l.eth.VLAN
	p.Src, p.Dst = l.src, l.dst
	p.Sport, p.Dport, p.NoChecksum = l.udp.Sport, l.udp.Dport, l.udp.Checksum == 0
	if l.version == 4 {
		p.TOS, p.TTL, p.ID, p.IPFlags = l.v4.TOS, l.v4.TTL, l.v4.ID, l.v4.Flags
		return
	}
	p.TOS, p.TTL, p.FlowLabel = l.v6.TrafficClass, l.v6.HopLimit, l.v6.FlowLabel
}

// FixLengths makes IP and UDP length say what the frame's length says, and then does what
// FixChecksums does. It is for whoever cuts or pads a frame on purpose.
func FixLengths(frame []byte, port uint16) error {
	l, err := Locate(frame, port)
	if err != nil {
		return err
	}
	n := len(frame) - l.L4
	if n+IPv4Len > 0xffff {
		return fmt.Errorf("wire: frame of %d bytes: %w", len(frame), ErrLength)
	}
	binary.BigEndian.PutUint16(frame[l.L4+4:], uint16(n))
	if l.version == 4 {
		binary.BigEndian.PutUint16(frame[l.L3+2:], uint16(n+IPv4Len))
	} else {
		binary.BigEndian.PutUint16(frame[l.L3+4:], uint16(n))
	}
	return FixChecksums(frame, port)
}

// FixChecksums writes the right IPv4 header and UDP checksum into a frame whose bytes have
// been changed, whatever else may be wrong with it. A UDP checksum of 0 becomes a real one.
// Errors as Locate's, and ErrLength if the UDP length is not one that the frame can hold.
func FixChecksums(frame []byte, port uint16) error {
	l, err := Locate(frame, port)
	if err != nil {
		return err
	}
	if l.UDPLen < UDPLen || l.UDPLen > len(frame)-l.L4 {
		return fmt.Errorf("wire: UDP length %d, want %d to %d: %w", l.UDPLen, UDPLen, len(frame)-l.L4, ErrLength)
	}
	if l.version == 4 {
		ip := frame[l.L3:l.L4]
		ip[10], ip[11] = 0, 0
		binary.BigEndian.PutUint16(ip[10:], Fold(Sum(0, ip))^0xffff)
	}
	binary.BigEndian.PutUint16(frame[l.L4+6:], UDPChecksum(l.src, l.dst, frame[l.L4:l.L4+l.UDPLen]))
	return nil
}
