// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/binary"
	"fmt"
)

// Lengths in bytes and Ethernet types.
const (
	EthernetLen   = 14
	VLANLen       = 4
	EtherTypeVLAN = 0x8100 // 802.1Q customer tag, the only one taken
	EtherTypeIPv4 = 0x0800
	EtherTypeIPv6 = 0x86dd
)

// MAC is an Ethernet address.
type MAC [6]byte

// String gives the usual colon form.
func (m MAC) String() string {
	return fmt.Sprintf("%02x:%02x:%02x:%02x:%02x:%02x", m[0], m[1], m[2], m[3], m[4], m[5])
}

// Ethernet is the link header with at most one 802.1Q tag.
type Ethernet struct {
	Dst, Src MAC
	VLAN     *uint16 // tag control information: priority 3, DEI 1, VLAN id 12 bits; nil = untagged
	Type     uint16  // of what follows the tag
}

// Len is the header's length in bytes.
func (h Ethernet) Len() int {
	if h.VLAN != nil {
		return EthernetLen + VLANLen
	}
	return EthernetLen
}

// Append adds the header to b.
func (h Ethernet) Append(b []byte) []byte {
	b = append(b, h.Dst[:]...)
	b = append(b, h.Src[:]...)
	if h.VLAN != nil {
		b = binary.BigEndian.AppendUint16(b, EtherTypeVLAN)
		b = binary.BigEndian.AppendUint16(b, *h.VLAN)
	}
	return binary.BigEndian.AppendUint16(b, h.Type)
}

// Decode reads the header from the front of b; ErrTruncated if b is too short for it.
func (h *Ethernet) Decode(b []byte) error {
	if len(b) < EthernetLen {
		return short("Ethernet header", len(b), EthernetLen)
	}
	*h = Ethernet{Dst: MAC(b[0:6]), Src: MAC(b[6:12]), Type: binary.BigEndian.Uint16(b[12:])}
	if h.Type != EtherTypeVLAN {
		return nil
	}
	if len(b) < EthernetLen+VLANLen {
		return short("802.1Q tag", len(b), EthernetLen+VLANLen)
	}
	tci := binary.BigEndian.Uint16(b[14:])
	h.VLAN, h.Type = &tci, binary.BigEndian.Uint16(b[16:])
	return nil
}

// short is the error of a header that does not fit.
func short(item string, found, wanted int) error {
	return fmt.Errorf("%s: %d bytes, want %d: %w", item, found, wanted, ErrTruncated)
}
