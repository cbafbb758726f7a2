// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/loader"
)

const (
	etherLen = 14
	ipv4Len  = 20
	ipv6Len  = 40
	hopLimit = 64
	ect0     = 2 // RFC 3168: every packet may be marked

	// ackLen is an ACK from its UDP header on; dataLen the largest data packet without payload.
	udpLen  = 8
	bthLen  = 12
	dataLen = udpLen + bthLen + 32 + 16 + 8
)

// trafficClass is the IP header's byte of a DSCP (RFC 2474) with ECT(0).
func trafficClass(dscp int) uint8 { return uint8(dscp<<2 | ect0) }

// fillTemplate writes how packets of one path look, all but its descriptors: Ethernet and IP
// headers with lengths and header checksum 0, and the sums that mr_tx starts from.
func fillTemplate(p *loader.Path, ifindex int, local, remote netip.Addr, src, dst net.HardwareAddr, dscp int) error {
	local, remote = local.Unmap(), remote.Unmap()
	switch {
	case !local.IsValid() || !remote.IsValid() || local.Is4() != remote.Is4():
		return fmt.Errorf("path from %v to %v: want two addresses of one family", local, remote)
	case len(src) != 6 || len(dst) != 6:
		return fmt.Errorf("path from %v to %v: link addresses %v and %v, want 6 bytes each", local, remote, src, dst)
	}
	t := p.Tmpl[:]
	clear(t)
	copy(t, dst)
	copy(t[6:], src)
	ip := t[etherLen:]
	p.L3Off = etherLen
	if local.Is4() {
		binary.BigEndian.PutUint16(t[12:], unix.ETH_P_IP)
		ip[0] = 0x45
		ip[1] = trafficClass(dscp)
		binary.BigEndian.PutUint16(ip[6:], 0x4000) // don't fragment
		ip[8], ip[9] = hopLimit, unix.IPPROTO_UDP
		copy(ip[12:], local.AsSlice())
		copy(ip[16:], remote.AsSlice())
		p.V6, p.L4Off = 0, etherLen+ipv4Len
		p.L3Sum = wordSum(ip[:ipv4Len])
		p.PseudoSum = wordSum(ip[12:20])
	} else {
		binary.BigEndian.PutUint16(t[12:], unix.ETH_P_IPV6)
		tc := trafficClass(dscp)
		ip[0], ip[1] = 0x60|tc>>4, tc<<4
		ip[6], ip[7] = unix.IPPROTO_UDP, hopLimit
		copy(ip[8:], local.AsSlice())
		copy(ip[24:], remote.AsSlice())
		p.V6, p.L4Off = 1, etherLen+ipv6Len
		p.L3Sum = 0
		p.PseudoSum = wordSum(ip[8:40])
	}
	p.PseudoSum += wordSum([]byte{0, unix.IPPROTO_UDP})
	p.Local, p.Peer = addrWords(local), addrWords(remote)
	p.Ifindex = uint32(ifindex)
	return nil
}

// wordSum adds b's 16-bit words as they are loaded from a packet, in host byte order, without
// folding: one's complement sums do not depend on byte order (RFC 1071, 2(B)). len(b) is even.
func wordSum(b []byte) (sum uint32) {
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(binary.NativeEndian.Uint16(b))
	}
	return sum
}

// addrWords is an address as mr_path holds it: 16 bytes in network order, IPv4 as ::ffff:a.b.c.d.
func addrWords(a netip.Addr) (w [4]uint32) {
	b := a.As16()
	for i := range w {
		w[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return w
}

// headerLen is what a full data packet has before its payload, from the IP header on.
func headerLen(a netip.Addr) int {
	if a.Unmap().Is4() {
		return ipv4Len + dataLen
	}
	return ipv6Len + dataLen
}
