// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"fmt"
	"hash/crc32"
)

// ICRCLen is the length of RoCEv2's invariant CRC at the end of a packet, in bytes.
const ICRCLen = 4

// ICRC computes RoCEv2's invariant CRC (InfiniBand specification 1.7, section 7.8 and annex
// A17) of ip, an IPv4 or IPv6 packet from its IP header up to, and without, the ICRC itself.
// The lengths in its headers must already count the ICRC. The four bytes go to the wire
// least significant first.
//
// It is a CRC-32 over eight bytes of ones in place of the absent LRH and over the packet,
// with ones in place of what the fabric may change: TOS, TTL and header checksum, or
// traffic class, flow label and hop limit; the UDP checksum; byte 4 of the BTH.
//
// ErrTruncated if the headers are not whole, ErrNotOurs if they are not IP and UDP.
func ICRC(ip []byte) (uint32, error) {
	if len(ip) == 0 {
		return 0, short("IP header", 0, IPv4Len)
	}
	var head [8 + IPv6Len + UDPLen + BTHLen]byte
	var n int
	var mask []int
	var proto byte
	switch {
	case ip[0] == 4<<4|5:
		n, mask = IPv4Len, []int{1, 8, 10, 11}
	case ip[0]>>4 == 6:
		n, mask = IPv6Len, []int{1, 2, 3, 7}
	default:
		return 0, fmt.Errorf("first byte %#02x, want IPv4 without options or IPv6: %w", ip[0], ErrNotOurs)
	}
	l4 := n
	n += UDPLen + BTHLen
	if len(ip) < n {
		return 0, short("IP, UDP and BTH headers", len(ip), n)
	}
	if l4 == IPv4Len {
		proto = ip[9]
	} else {
		proto = ip[6]
	}
	if proto != ProtoUDP {
		return 0, notOurs("IP protocol", uint(proto), ProtoUDP)
	}
	for i := range 8 {
		head[i] = 0xff
	}
	h := head[8:]
	copy(h, ip[:n])
	for _, i := range mask {
		h[i] = 0xff
	}
	if l4 == IPv6Len {
		h[0] |= 0x0f // the traffic class begins in the first byte
	}
	h[l4+6], h[l4+7] = 0xff, 0xff
	h[l4+UDPLen+4] = 0xff
	c := crc32.ChecksumIEEE(head[:8+n])
	return crc32.Update(c, crc32.IEEETable, ip[n:]), nil
}
