// SPDX-License-Identifier: Apache-2.0

package wire_test

import (
	"os"
	"regexp"
	"strconv"
	"testing"

	"github.com/metaroce/metaroce/wire"
)

// What bpf/mr_wire.h and this package both name has one value.
func TestConstants_agreeWithTheCHeader(t *testing.T) {
	src, err := os.ReadFile("../bpf/mr_wire.h")
	if err != nil {
		t.Fatal(err)
	}
	inC := map[string]uint64{}
	for _, m := range regexp.MustCompile(`(?m)^(?:#define )?\s*(MR_[A-Z0-9_]+)(?: =)? (0x[0-9a-fA-F]+|\d+)u?\b`).FindAllStringSubmatch(string(src), -1) {
		if inC[m[1]], err = strconv.ParseUint(m[2], 0, 64); err != nil {
			t.Fatal(err)
		}
	}
	write, _ := wire.OpWrite.Info()
	probe, _ := wire.OpProbe.Info()
	ack, _ := wire.OpACK.Info()
	for name, got := range map[string]uint64{
		"MR_WIRE_VERSION":         wire.Version,
		"MR_UDP_PORT":             wire.UDPPort,
		"MR_PSN24":                wire.PSNMask24,
		"MR_PKEY_DEFAULT":         wire.DefaultPKey,
		"MR_OP_FIRST":             uint64(wire.OpFirst),
		"MR_OP_WRITE":             uint64(wire.OpWrite),
		"MR_OP_SEND":              uint64(wire.OpSend),
		"MR_OP_READ_REQUEST":      uint64(wire.OpReadRequest),
		"MR_OP_READ_RESPONSE":     uint64(wire.OpReadResponse),
		"MR_OP_ATOMIC_REQUEST":    uint64(wire.OpAtomicRequest),
		"MR_OP_ATOMIC_RESPONSE":   uint64(wire.OpAtomicResponse),
		"MR_OP_ACK":               uint64(wire.OpACK),
		"MR_OP_PROBE":             uint64(wire.OpProbe),
		"MR_F_RETX":               wire.FlagRetx,
		"MR_F_LAST":               wire.FlagLast,
		"MR_F_IMM":                wire.FlagImm,
		"MR_F_INT":                wire.FlagINT,
		"MR_F_MORE":               wire.FlagMore,
		"MR_F_CRC32C":             wire.FlagCRC32C,
		"MR_AF_PROBE":             wire.AckFlagProbe,
		"MR_AF_INT":               wire.AckFlagINT,
		"MR_SYN_NONE":             uint64(wire.SynNone),
		"MR_SYN_INVALID_REQUEST":  uint64(wire.SynInvalidRequest),
		"MR_SYN_REMOTE_ACCESS":    uint64(wire.SynRemoteAccess),
		"MR_SYN_REMOTE_OPERATION": uint64(wire.SynRemoteOperation),
		"MR_EXT_PROBE":            uint64(probe.Ext),
		"MR_EXT_WRITE":            uint64(write.Ext),
		"MR_EXT_WRITE_IMM":        uint64(write.Ext + wire.ImmLen/8),
		"MR_EXT_ACK":              uint64(ack.Ext),
	} {
		want, ok := inC[name]
		if !ok {
			t.Errorf("%s: not found in bpf/mr_wire.h", name)
		} else if got != want {
			t.Errorf("%s: %#x here, %#x in C", name, got, want)
		}
		delete(inC, name)
	}
	for name, value := range inC {
		t.Errorf("%s = %#x in bpf/mr_wire.h has no counterpart here", name, value)
	}
}

func TestOpcodes_onlyThreeAreTakenInThisVersion(t *testing.T) {
	for o := range 256 {
		op := wire.Opcode(o)
		want := op == wire.OpWrite || op == wire.OpACK || op == wire.OpProbe
		if _, ok := op.Info(); ok != want {
			t.Errorf("%v (%#x): taken %v, want %v", op, o, ok, want)
		}
	}
}
