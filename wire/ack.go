// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/binary"
	"fmt"
)

// ACKLen is the length of the ACK behind its BTH, in bytes; extACK what its length field
// says of it, which leaves out the first 32 bytes as everywhere.
const (
	ACKLen = 88
	extACK = (ACKLen - DataLen) / 8
)

// Bits of ACK.Flags.
const (
	AckFlagProbe = 0x01 // answers a probe
	AckFlagINT   = 0x08 // an echoed INT block follows (reserved)
)

// Syndrome says why the receiver refuses the packet ACK.NakPSN. Values are the AETH's
// (InfiniBand specification 1.7, section 9.7.5.2.8), 0 is "nothing refused".
type Syndrome uint8

// Syndromes of version 1.
const (
	SynNone            Syndrome = 0
	SynInvalidRequest  Syndrome = 0x61
	SynRemoteAccess    Syndrome = 0x62
	SynRemoteOperation Syndrome = 0x63
)

// String names the syndrome.
func (s Syndrome) String() string {
	switch s {
	case SynNone:
		return "none"
	case SynInvalidRequest:
		return "invalid request"
	case SynRemoteAccess:
		return "remote access error"
	case SynRemoteOperation:
		return "remote operation error"
	}
	return fmt.Sprintf("syndrome %#x", uint8(s))
}

// ACK is the receiver's whole picture of one path and one stream.
type ACK struct {
	Path, Gen uint8 // of the packet that it answers; the receiver's newest generation of that path
	Flags     uint8
	Token     uint32 // of the end that the ACK goes to
	PSeqMax   uint32 // highest pseq arrived on this path and generation
	TS        uint32 // echo of the packet that it answers
	Vec       Vector // bit i: pseq PSeqMax - i arrived
	Stream    uint16
	Syndrome  Syndrome
	Resv1     uint8  // sent as 0, not looked at
	PSNCum    uint32 // all below arrived
	PSNLimit  uint32 // the sender's psn stays below
	NakPSN    uint32 // lowest refused psn, if Syndrome is not 0
	Pkts      uint32 // arrived on this path and generation
	CE        uint32 // of these, marked
	Dups      uint32 // of these, duplicates
	RateHint  uint32 // Mbit/s that the receiver gives this sender, 0 = no hint (reserved)
	HintEpoch uint16 // (reserved)
	Resv2     uint16 // sent as 0, not looked at
	Credit    uint32 // receives posted so far: ordinals below are valid
}

// Append adds the ACK to b.
func (h ACK) Append(b []byte) []byte {
	b = append(b, h.Path, h.Gen, h.Flags, verExt(extACK))
	b = binary.BigEndian.AppendUint32(b, h.Token)
	b = binary.BigEndian.AppendUint32(b, h.PSeqMax)
	b = binary.BigEndian.AppendUint32(b, h.TS)
	for _, w := range h.Vec {
		b = binary.BigEndian.AppendUint64(b, w)
	}
	b = binary.BigEndian.AppendUint16(b, h.Stream)
	b = append(b, byte(h.Syndrome), h.Resv1)
	b = binary.BigEndian.AppendUint32(b, h.PSNCum)
	b = binary.BigEndian.AppendUint32(b, h.PSNLimit)
	b = binary.BigEndian.AppendUint32(b, h.NakPSN)
	b = binary.BigEndian.AppendUint32(b, h.Pkts)
	b = binary.BigEndian.AppendUint32(b, h.CE)
	b = binary.BigEndian.AppendUint32(b, h.Dups)
	b = binary.BigEndian.AppendUint32(b, h.RateHint)
	b = binary.BigEndian.AppendUint16(b, h.HintEpoch)
	b = binary.BigEndian.AppendUint16(b, h.Resv2)
	return binary.BigEndian.AppendUint32(b, h.Credit)
}

// Decode reads an ACK from the front of b. ErrTruncated if b is too short for it, ErrVersion
// if it is of another version, ErrHeader if its length or flags are not those of version 1.
func (h *ACK) Decode(b []byte) error {
	if len(b) < ACKLen {
		return short("ACK", len(b), ACKLen)
	}
	if version := b[3] >> 4; version != Version {
		return fmt.Errorf("version %d, want %d: %w", version, Version, ErrVersion)
	}
	if err := checkFlags(OpACK, b[2], int(b[3]&15)); err != nil {
		return err
	}
	*h = ACK{
		Path:      b[0],
		Gen:       b[1],
		Flags:     b[2],
		Token:     binary.BigEndian.Uint32(b[4:]),
		PSeqMax:   binary.BigEndian.Uint32(b[8:]),
		TS:        binary.BigEndian.Uint32(b[12:]),
		Stream:    binary.BigEndian.Uint16(b[48:]),
		Syndrome:  Syndrome(b[50]),
		Resv1:     b[51],
		PSNCum:    binary.BigEndian.Uint32(b[52:]),
		PSNLimit:  binary.BigEndian.Uint32(b[56:]),
		NakPSN:    binary.BigEndian.Uint32(b[60:]),
		Pkts:      binary.BigEndian.Uint32(b[64:]),
		CE:        binary.BigEndian.Uint32(b[68:]),
		Dups:      binary.BigEndian.Uint32(b[72:]),
		RateHint:  binary.BigEndian.Uint32(b[76:]),
		HintEpoch: binary.BigEndian.Uint16(b[80:]),
		Resv2:     binary.BigEndian.Uint16(b[82:]),
		Credit:    binary.BigEndian.Uint32(b[84:]),
	}
	for i := range h.Vec {
		h.Vec[i] = binary.BigEndian.Uint64(b[16+8*i:])
	}
	return nil
}
