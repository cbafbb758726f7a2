// SPDX-License-Identifier: Apache-2.0

package wire

import "encoding/binary"

// DataLen is the length in bytes of the header that every data packet and probe carries
// behind its BTH. The length field counts what follows these bytes and precedes the payload.
const DataLen = 32

// Bits of Data.Flags.
const (
	FlagRetx   = 0x01 // a retransmission
	FlagLast   = 0x02 // last packet of its message
	FlagImm    = 0x04 // an immediate header follows the RETH; only with FlagLast
	FlagINT    = 0x08 // an INT block follows (reserved)
	FlagMore   = 0x10 // the sender has more to send after this
	FlagCRC32C = 0x20 // a CRC32C trailer is present (reserved)
)

// Data is the header of data packets and probes. Version and length field are not in it:
// Append takes the length, Decode returns both.
type Data struct {
	Path, Gen uint8
	Flags     uint8
	Token     uint32
	PSeq      uint32 // of this transmission, on its path and generation
	PSN       uint32 // in its stream; of a probe, the one that the sender gives next
	TS        uint32 // sender's clock, ns
	Stream    uint16
	Backlog   uint16 // log2 of the bytes waiting, 0 = none or unknown
	MSN       uint32 // message number in the stream
	Offset    uint32 // of the payload in the message, bytes
}

// Append adds the header to b; ext is the length of what follows it before the payload, in
// units of 8 bytes, at most 15.
func (h Data) Append(b []byte, ext int) []byte {
	b = append(b, h.Path, h.Gen, h.Flags, verExt(ext))
	b = binary.BigEndian.AppendUint32(b, h.Token)
	b = binary.BigEndian.AppendUint32(b, h.PSeq)
	b = binary.BigEndian.AppendUint32(b, h.PSN)
	b = binary.BigEndian.AppendUint32(b, h.TS)
	b = binary.BigEndian.AppendUint16(b, h.Stream)
	b = binary.BigEndian.AppendUint16(b, h.Backlog)
	b = binary.BigEndian.AppendUint32(b, h.MSN)
	return binary.BigEndian.AppendUint32(b, h.Offset)
}

// Decode reads the header from the front of b and returns its version and length field;
// ErrTruncated if b is too short for it.
func (h *Data) Decode(b []byte) (version, ext int, err error) {
	if len(b) < DataLen {
		return 0, 0, short("data header", len(b), DataLen)
	}
	*h = Data{
		Path:    b[0],
		Gen:     b[1],
		Flags:   b[2],
		Token:   binary.BigEndian.Uint32(b[4:]),
		PSeq:    binary.BigEndian.Uint32(b[8:]),
		PSN:     binary.BigEndian.Uint32(b[12:]),
		TS:      binary.BigEndian.Uint32(b[16:]),
		Stream:  binary.BigEndian.Uint16(b[20:]),
		Backlog: binary.BigEndian.Uint16(b[22:]),
		MSN:     binary.BigEndian.Uint32(b[24:]),
		Offset:  binary.BigEndian.Uint32(b[28:]),
	}
	return int(b[3] >> 4), int(b[3] & 15), nil
}

// verExt is the byte that holds the version and the length in units of 8 bytes.
func verExt(ext int) byte { return Version<<4 | byte(ext&15) }
