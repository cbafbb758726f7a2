// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/binary"
	"net/netip"
)

// Sum adds the bytes b, taken as big-endian 16-bit words and padded with a zero byte if
// their number is odd, to the running sum s (RFC 1071). Only the last piece of a longer
// text may have an odd length. Fold makes 16 bits of it.
func Sum(s uint64, b []byte) uint64 {
	for ; len(b) >= 4; b = b[4:] {
		s += uint64(binary.BigEndian.Uint32(b))
	}
	if len(b) >= 2 {
		s += uint64(binary.BigEndian.Uint16(b))
		b = b[2:]
	}
	if len(b) == 1 {
		s += uint64(b[0]) << 8
	}
	return s
}

// Fold brings a running sum down to 16 bits, in one's complement: the checksum is its
// complement, and a text that includes its own right checksum folds to 0xffff.
func Fold(s uint64) uint16 {
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return uint16(s)
}

// PseudoSum is the running sum of the pseudo header that an upper-layer checksum covers:
// RFC 768 for IPv4, RFC 8200 section 8.1 for IPv6. upperLen is in bytes.
func PseudoSum(src, dst netip.Addr, upperLen uint32, proto uint8) uint64 {
	s := Sum(0, src.AsSlice())
	s = Sum(s, dst.AsSlice())
	return s + uint64(upperLen) + uint64(proto)
}
