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
	vlanLen  = 4
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

// egress is how packets leave: by which interface, and with which VLAN tag.
type egress struct {
	ifindex int
	tagged  bool
	tci     uint16 // IEEE 802.1Q tag control information, if tagged
}

// egressOf is how packets of an interface with that DSCP leave. A VLAN interface's leave by its parent,
// with the priority that its egress map gives for the kernel's packet priority of that DSCP, as
// rdma_cm chooses it (iboe_tos_to_sl); 0 if it gives none.
func egressOf(itf loader.Interface, dscp int) egress {
	_, index := itf.Lower()
	if itf.VLAN == nil {
		return egress{ifindex: index}
	}
	pcp := itf.VLAN.Egress[tosPriority(dscp)] & 7
	return egress{ifindex: index, tagged: true, tci: uint16(pcp)<<13 | itf.VLAN.ID&0xfff}
}

// tosPriority is the priority that Linux gives packets with that DSCP (rt_tos2priority): it looks at
// the three bits that RFC 1349 called the type of service.
func tosPriority(dscp int) uint32 {
	const bestEffort, bulk, interactive, interactiveBulk = 0, 2, 6, 4 // TC_PRIO_*
	return [4]uint32{bestEffort, bulk, interactive, interactiveBulk}[dscp>>1&3]
}

// fillTemplate writes how packets of one path look, all but its descriptors: Ethernet and IP
// headers with lengths and header checksum 0, and the sums that mr_tx starts from.
func fillTemplate(p *loader.Path, out egress, local, remote netip.Addr, src, dst net.HardwareAddr, dscp int) error {
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
	l3 := etherLen
	if out.tagged {
		binary.BigEndian.PutUint16(t[12:], unix.ETH_P_8021Q)
		binary.BigEndian.PutUint16(t[14:], out.tci)
		l3 += vlanLen
	}
	ip, etherType := t[l3:], t[l3-2:]
	p.L3Off = uint8(l3)
	if local.Is4() {
		binary.BigEndian.PutUint16(etherType, unix.ETH_P_IP)
		ip[0] = 0x45
		ip[1] = trafficClass(dscp)
		binary.BigEndian.PutUint16(ip[6:], 0x4000) // don't fragment
		ip[8], ip[9] = hopLimit, unix.IPPROTO_UDP
		copy(ip[12:], local.AsSlice())
		copy(ip[16:], remote.AsSlice())
		p.V6, p.L4Off = 0, uint8(l3+ipv4Len)
		p.L3Sum = wordSum(ip[:ipv4Len])
		p.PseudoSum = wordSum(ip[12:20])
	} else {
		binary.BigEndian.PutUint16(etherType, unix.ETH_P_IPV6)
		tc := trafficClass(dscp)
		ip[0], ip[1] = 0x60|tc>>4, tc<<4
		ip[6], ip[7] = unix.IPPROTO_UDP, hopLimit
		copy(ip[8:], local.AsSlice())
		copy(ip[24:], remote.AsSlice())
		p.V6, p.L4Off = 1, uint8(l3+ipv6Len)
		p.L3Sum = 0
		p.PseudoSum = wordSum(ip[8:40])
	}
	p.PseudoSum += wordSum([]byte{0, unix.IPPROTO_UDP})
	p.Local, p.Peer = addrWords(local), addrWords(remote)
	p.Ifindex = uint32(out.ifindex)
	p.Vlan = uint32(out.tci & 0xfff) // 0 without a tag
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
