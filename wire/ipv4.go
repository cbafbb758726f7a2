// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/binary"
	"net/netip"
)

// IPv4Len is the length of an IPv4 header without options, in bytes.
const IPv4Len = 20

// ProtoUDP is UDP's IP protocol number.
const ProtoUDP = 17

// Bits of IPv4.Flags (RFC 791, section 3.1).
const (
	IPv4DontFragment   = 2
	IPv4MoreFragments  = 1
	ipv4FragmentOffset = 0x1fff
)

// IPv4 is an IPv4 header (RFC 791, section 3.1) without options.
type IPv4 struct {
	IHL      uint8  // words of 4 bytes; Append takes 0 as 5
	TOS      uint8  // DSCP 6, ECN 2 bits
	TotalLen uint16 // bytes, header included
	ID       uint16
	Flags    uint8  // 3 bits
	Offset   uint16 // fragment offset in units of 8 bytes, 13 bits
	TTL      uint8
	Protocol uint8
	Checksum uint16 // as found; Append computes it
	Src, Dst netip.Addr
}

// Append adds the header and its checksum to b. Src and Dst must be IPv4.
func (h IPv4) Append(b []byte) []byte {
	at := len(b)
	b = append(b, 4<<4|5, h.TOS)
	b = binary.BigEndian.AppendUint16(b, h.TotalLen)
	b = binary.BigEndian.AppendUint16(b, h.ID)
	b = binary.BigEndian.AppendUint16(b, uint16(h.Flags)<<13|h.Offset&ipv4FragmentOffset)
	b = append(b, h.TTL, h.Protocol, 0, 0)
	src, dst := h.Src.As4(), h.Dst.As4()
	b = append(b, src[:]...)
	b = append(b, dst[:]...)
	binary.BigEndian.PutUint16(b[at+10:], Fold(Sum(0, b[at:]))^0xffff)
	return b
}

// Decode reads the first 20 bytes of the header from the front of b. ErrTruncated if there
// are not as many, ErrNotOurs if the version is not 4.
func (h *IPv4) Decode(b []byte) error {
	if len(b) < IPv4Len {
		return short("IPv4 header", len(b), IPv4Len)
	}
	if b[0]>>4 != 4 {
		return notOurs("IP version", uint(b[0]>>4), 4)
	}
	frag := binary.BigEndian.Uint16(b[6:])
	*h = IPv4{
		IHL:      b[0] & 15,
		TOS:      b[1],
		TotalLen: binary.BigEndian.Uint16(b[2:]),
		ID:       binary.BigEndian.Uint16(b[4:]),
		Flags:    uint8(frag >> 13),
		Offset:   frag & ipv4FragmentOffset,
		TTL:      b[8],
		Protocol: b[9],
		Checksum: binary.BigEndian.Uint16(b[10:]),
		Src:      netip.AddrFrom4([4]byte(b[12:16])),
		Dst:      netip.AddrFrom4([4]byte(b[16:20])),
	}
	return nil
}
