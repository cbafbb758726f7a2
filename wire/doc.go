// SPDX-License-Identifier: Apache-2.0

// Package wire is the wire format, version 1: byte layouts, the opcode table,
// sequence arithmetic, checksums. docs/wire.md is the norm; bpf/mr_wire.h says the
// same in C, and the vectors in testdata/vectors, made by scripts/make_vectors.py,
// hold both to it.
//
// All multi-byte fields are big-endian. Decoders never look beyond the bytes that
// they are given and never keep them, except that Packet.Payload refers to the
// frame that Parse was given.
package wire

// Version is the wire version that this package speaks.
const Version = 1

// Defaults of the fields that both ends configure (docs/wire.md, sections 2 and 3).
const (
	UDPPort     = 4791                          // destination port of every packet, IANA's RoCEv2
	SportMin    = 49152                         // lowest source port of a path
	DefaultTTL  = 64                            // hops
	DefaultDSCP = 26                            // AF31, what RoCE QoS rules expect
	DefaultPKey = 0xffff                        // BTH
	MaxPayload  = 3072                          // bytes; every header and this fit one page of an XDP frame
	MaxPadding  = MaxPayload + RETHLen + ImmLen // of a probe, bytes: as long as the longest data packet
	MaxPaths    = 32                            // paths of one connection
	MaxMessage  = 1<<32 - 1                     // bytes
	PSNMask24   = 0x00ffffff                    // the part of a psn that the BTH has room for
)

// ECN codepoints (RFC 3168, section 5): the low two bits of the TOS or traffic class byte.
const (
	ECNMask = 3
	ECT0    = 2
	CE      = 3
)

// DefaultTOS is the TOS or traffic class byte of every packet unless configured otherwise.
const DefaultTOS = DefaultDSCP<<2 | ECT0
