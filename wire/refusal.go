// SPDX-License-Identifier: Apache-2.0

package wire

// Refusal is why a frame is not taken. It is an error; test with errors.Is or errors.As.
type Refusal string

// Reasons that a frame alone can give, in the order in which they are looked for
// (docs/wire.md, section 9).
const (
	// ErrNotOurs: nothing wrong, but another's. It passes to the stack.
	ErrNotOurs   Refusal = "not ours"
	ErrLength    Refusal = "length"
	ErrTruncated Refusal = "truncated"
	ErrOpcode    Refusal = "opcode"
	ErrChecksum  Refusal = "checksum"
	ErrVersion   Refusal = "version"
	ErrHeader    Refusal = "header"
	ErrPayload   Refusal = "payload"
)

// Error implements error.
func (r Refusal) Error() string { return string(r) }

// Counter is the field of struct mr_counters that counts this refusal, "" for ErrNotOurs.
func (r Refusal) Counter() string {
	if r == ErrNotOurs {
		return ""
	}
	return "drop_" + string(r)
}
