// SPDX-License-Identifier: Apache-2.0

package wire

import "fmt"

// Opcode is a BTH opcode. Ours are in the range that InfiniBand leaves to manufacturers,
// 0xC0-0xFF (InfiniBand specification 1.7, section 9.2.1).
type Opcode uint8

// Opcodes. Those called reserved are refused in version 1.
const (
	OpFirst          Opcode = 0xC0
	OpWrite          Opcode = 0xC0
	OpSend           Opcode = 0xC1 // reserved
	OpReadRequest    Opcode = 0xC2 // reserved
	OpReadResponse   Opcode = 0xC3 // reserved
	OpAtomicRequest  Opcode = 0xC4 // reserved
	OpAtomicResponse Opcode = 0xC5 // reserved
	OpACK            Opcode = 0xD0
	OpProbe          Opcode = 0xD1
)

// OpInfo is a row of the opcode table.
type OpInfo struct {
	Name     string
	Reserved bool  // known by name, refused in this version
	Request  bool  // takes a psn, is placed, acknowledged and repaired
	Most     int   // bytes behind the headers: payload, or a probe's padding
	Ext      int   // units of 8 bytes between the first 32 and the payload, flags apart
	Flags    uint8 // allowed; everything else is refused
}

var opcodes = [256]OpInfo{
	OpWrite: {
		Name: "WRITE", Request: true, Most: MaxPayload, Ext: RETHLen / 8,
		Flags: FlagRetx | FlagLast | FlagImm | FlagMore,
	},
	OpSend:           {Name: "SEND", Reserved: true, Request: true, Most: MaxPayload},
	OpReadRequest:    {Name: "READ_REQUEST", Reserved: true, Request: true},
	OpReadResponse:   {Name: "READ_RESPONSE", Reserved: true, Request: true, Most: MaxPayload},
	OpAtomicRequest:  {Name: "ATOMIC_REQUEST", Reserved: true, Request: true},
	OpAtomicResponse: {Name: "ATOMIC_RESPONSE", Reserved: true, Request: true},
	OpACK:            {Name: "ACK", Ext: extACK, Flags: AckFlagProbe},
	OpProbe:          {Name: "PROBE", Most: MaxPadding, Flags: FlagMore},
}

// Info is the opcode's row of the table; false if the opcode is unknown or reserved, in
// which case only Name and Reserved mean anything.
func (o Opcode) Info() (OpInfo, bool) {
	i := opcodes[o]
	return i, i.Name != "" && !i.Reserved
}

// String gives the opcode's name.
func (o Opcode) String() string {
	if n := opcodes[o].Name; n != "" {
		return n
	}
	return fmt.Sprintf("opcode %#02x", uint8(o))
}

// extOf is what the length field of a packet with this opcode and these flags has to say.
func extOf(i OpInfo, flags uint8) int {
	if i.Request && flags&FlagImm != 0 {
		return i.Ext + ImmLen/8
	}
	return i.Ext
}

// checkFlags compares flags and length field with the opcode table.
func checkFlags(o Opcode, flags uint8, ext int) error {
	i := opcodes[o]
	if bad := flags &^ i.Flags; bad != 0 {
		return fmt.Errorf("%v: flags %#02x, allowed %#02x: %w", o, flags, i.Flags, ErrHeader)
	}
	if i.Request && flags&(FlagImm|FlagLast) == FlagImm {
		return fmt.Errorf("%v: flags %#02x: immediate, want it on the last packet only: %w", o, flags, ErrHeader)
	}
	if want := extOf(i, flags); ext != want {
		return fmt.Errorf("%v with flags %#02x: length field %d, want %d units of 8 bytes: %w", o, flags, ext, want, ErrHeader)
	}
	return nil
}
