// SPDX-License-Identifier: Apache-2.0

package wire

import "encoding/binary"

// BTHLen is the length of the base transport header, in bytes.
const BTHLen = 12

// BTH is InfiniBand's base transport header (InfiniBand specification 1.7, section 9.2).
type BTH struct {
	Opcode   Opcode
	Flags    uint8 // SE, M, Pad, TVer: sent as 0, not looked at
	PKey     uint16
	Reserved uint8  // FECN, BECN, 6 reserved bits: sent as 0, not looked at
	QPN      uint32 // of the receiving end, 24 bits
	AckReq   bool   // A: acknowledge this packet at once
	Resv7    uint8  // 7 bits: sent as 0, not looked at
	PSN      uint32 // low 24 bits of the psn; in an ACK of its psn_cum
}

// Append adds the header to b.
func (h BTH) Append(b []byte) []byte {
	b = append(b, byte(h.Opcode), h.Flags)
	b = binary.BigEndian.AppendUint16(b, h.PKey)
	b = binary.BigEndian.AppendUint32(b, uint32(h.Reserved)<<24|h.QPN&PSNMask24)
	w := uint32(h.Resv7&0x7f)<<24 | h.PSN&PSNMask24
	if h.AckReq {
		w |= 1 << 31
	}
	return binary.BigEndian.AppendUint32(b, w)
}

// Decode reads the header from the front of b; ErrTruncated if b is too short for it.
func (h *BTH) Decode(b []byte) error {
	if len(b) < BTHLen {
		return short("BTH", len(b), BTHLen)
	}
	q, a := binary.BigEndian.Uint32(b[4:]), binary.BigEndian.Uint32(b[8:])
	*h = BTH{
		Opcode:   Opcode(b[0]),
		Flags:    b[1],
		PKey:     binary.BigEndian.Uint16(b[2:]),
		Reserved: uint8(q >> 24),
		QPN:      q & PSNMask24,
		AckReq:   a>>31 == 1,
		Resv7:    uint8(a>>24) & 0x7f,
		PSN:      a & PSNMask24,
	}
	return nil
}
