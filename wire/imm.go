// SPDX-License-Identifier: Apache-2.0

package wire

import "encoding/binary"

// ImmLen is the length of the immediate header, in bytes.
const ImmLen = 8

// Imm is the immediate header, on the last packet of a message with an immediate.
type Imm struct {
	Imm     uint32 // the sender's value
	Ordinal uint32 // of the receive that it completes; the first one posted is 0
}

// Append adds the header to b.
func (h Imm) Append(b []byte) []byte {
	b = binary.BigEndian.AppendUint32(b, h.Imm)
	return binary.BigEndian.AppendUint32(b, h.Ordinal)
}

// Decode reads the header from the front of b; ErrTruncated if b is too short for it.
func (h *Imm) Decode(b []byte) error {
	if len(b) < ImmLen {
		return short("immediate header", len(b), ImmLen)
	}
	*h = Imm{Imm: binary.BigEndian.Uint32(b), Ordinal: binary.BigEndian.Uint32(b[4:])}
	return nil
}
