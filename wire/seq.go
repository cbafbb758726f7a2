// SPDX-License-Identifier: Apache-2.0

package wire

// Less says whether sequence number a comes before b: serial arithmetic over 32 bits
// (RFC 1982). Numbers that are 2^31 apart are not ordered.
func Less(a, b uint32) bool { return int32(a-b) < 0 }

// LessEq is Less or equal.
func LessEq(a, b uint32) bool { return int32(a-b) <= 0 }

// Diff is a - b as a signed distance: negative when a comes before b.
func Diff(a, b uint32) int { return int(int32(a - b)) }

// GenDiff is a - b of two path generations, serial over 8 bits: positive when a is newer.
// -1 is the previous generation.
func GenDiff(a, b uint8) int { return int(int8(a - b)) }

// Expand24 is the number nearest to near whose low 24 bits are low: a full psn out of a BTH.
func Expand24(near, low uint32) uint32 {
	d := (low - near) << 8 // the distance modulo 2^24, at the top so that its sign shows
	return near + uint32(int32(d)>>8)
}
