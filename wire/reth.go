// SPDX-License-Identifier: Apache-2.0

package wire

import "encoding/binary"

// RETHLen is the length of the RDMA extended transport header, in bytes.
const RETHLen = 16

// RETH has the shape of InfiniBand's (specification 1.7, section 9.3.3), but every packet of
// a message carries one, and the address is that of this packet's payload.
type RETH struct {
	Addr uint64 // of this packet's payload
	RKey uint32
	Len  uint32 // of the whole message, bytes
}

// Append adds the header to b.
func (h RETH) Append(b []byte) []byte {
	b = binary.BigEndian.AppendUint64(b, h.Addr)
	b = binary.BigEndian.AppendUint32(b, h.RKey)
	return binary.BigEndian.AppendUint32(b, h.Len)
}

// Decode reads the header from the front of b; ErrTruncated if b is too short for it.
func (h *RETH) Decode(b []byte) error {
	if len(b) < RETHLen {
		return short("RETH", len(b), RETHLen)
	}
	*h = RETH{
		Addr: binary.BigEndian.Uint64(b),
		RKey: binary.BigEndian.Uint32(b[8:]),
		Len:  binary.BigEndian.Uint32(b[12:]),
	}
	return nil
}
