// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/binary"
	"net/netip"
)

// UDPLen is the length of a UDP header, in bytes.
const UDPLen = 8

// UDP is a UDP header (RFC 768).
type UDP struct {
	Sport    uint16 // the path's entropy
	Dport    uint16
	Length   uint16 // bytes, header included
	Checksum uint16 // 0 = none
}

// Append adds the header to b.
func (h UDP) Append(b []byte) []byte {
	b = binary.BigEndian.AppendUint16(b, h.Sport)
	b = binary.BigEndian.AppendUint16(b, h.Dport)
	b = binary.BigEndian.AppendUint16(b, h.Length)
	return binary.BigEndian.AppendUint16(b, h.Checksum)
}

// Decode reads the header from the front of b; ErrTruncated if b is too short for it.
func (h *UDP) Decode(b []byte) error {
	if len(b) < UDPLen {
		return short("UDP header", len(b), UDPLen)
	}
	*h = UDP{
		Sport:    binary.BigEndian.Uint16(b),
		Dport:    binary.BigEndian.Uint16(b[2:]),
		Length:   binary.BigEndian.Uint16(b[4:]),
		Checksum: binary.BigEndian.Uint16(b[6:]),
	}
	return nil
}

// UDPChecksum is what belongs into the checksum field of the UDP datagram d (header and
// payload; whatever its checksum field holds now does not matter). A sum of 0 becomes
// 0xffff, because 0 on the wire means "no checksum" (RFC 768; RFC 8200, section 8.1).
// d must have a whole UDP header.
func UDPChecksum(src, dst netip.Addr, d []byte) uint16 {
	s := PseudoSum(src, dst, uint32(len(d)), ProtoUDP)
	s = Sum(s, d[:6])
	s = Sum(s, d[UDPLen:])
	if c := Fold(s) ^ 0xffff; c != 0 {
		return c
	}
	return 0xffff
}

// UDPVerify says whether the checksum field of the UDP datagram d is right. A field of 0,
// "no checksum", is not: whether that may be is the connection's agreement.
func UDPVerify(src, dst netip.Addr, d []byte) bool {
	if len(d) < UDPLen || d[6]|d[7] == 0 {
		return false
	}
	return Fold(Sum(PseudoSum(src, dst, uint32(len(d)), ProtoUDP), d)) == 0xffff
}
