// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

// IPv6Len is the length of the fixed IPv6 header, in bytes.
const IPv6Len = 40

// IPv6 is the fixed IPv6 header (RFC 8200, section 3).
type IPv6 struct {
	TrafficClass uint8  // DSCP 6, ECN 2 bits
	FlowLabel    uint32 // 20 bits
	PayloadLen   uint16 // bytes after the header
	NextHeader   uint8
	HopLimit     uint8
	Src, Dst     netip.Addr
}

// Append adds the header to b. Src and Dst must be IPv6.
func (h IPv6) Append(b []byte) []byte {
	b = binary.BigEndian.AppendUint32(b, 6<<28|uint32(h.TrafficClass)<<20|h.FlowLabel&0xfffff)
	b = binary.BigEndian.AppendUint16(b, h.PayloadLen)
	b = append(b, h.NextHeader, h.HopLimit)
	src, dst := h.Src.As16(), h.Dst.As16()
	b = append(b, src[:]...)
	return append(b, dst[:]...)
}

// Decode reads the header from the front of b. ErrTruncated if b is too short for it,
// ErrNotOurs if the version is not 6.
func (h *IPv6) Decode(b []byte) error {
	if len(b) < IPv6Len {
		return short("IPv6 header", len(b), IPv6Len)
	}
	if b[0]>>4 != 6 {
		return notOurs("IP version", uint(b[0]>>4), 6)
	}
	w := binary.BigEndian.Uint32(b)
	*h = IPv6{
		TrafficClass: uint8(w >> 20),
		FlowLabel:    w & 0xfffff,
		PayloadLen:   binary.BigEndian.Uint16(b[4:]),
		NextHeader:   b[6],
		HopLimit:     b[7],
		Src:          netip.AddrFrom16([16]byte(b[8:24])),
		Dst:          netip.AddrFrom16([16]byte(b[24:40])),
	}
	return nil
}

// notOurs is the error of a field that shows the frame to be another's.
func notOurs(item string, found, wanted uint) error {
	return fmt.Errorf("%s %#x, want %#x: %w", item, found, wanted, ErrNotOurs)
}
