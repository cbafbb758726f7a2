// SPDX-License-Identifier: Apache-2.0

package core

// Syndromes of a refusal: the NAK codes of the AETH (InfiniBand spec 9.7.5.2.8).
const (
	SynNone            = 0
	SynInvalidRequest  = 0x61
	SynRemoteAccess    = 0x62
	SynRemoteOperation = 0x63
)

// StatusOfSyndrome tells how the request that a peer refused ends. A syndrome
// that this version does not know ends it as a remote operation error.
func StatusOfSyndrome(syndrome uint32) Status {
	switch syndrome {
	case SynNone:
		return StatusSuccess
	case SynInvalidRequest:
		return StatusRemInvReq
	case SynRemoteAccess:
		return StatusRemAccess
	}
	return StatusRemOp
}

// StatusOfFault tells how the request that mr_tx stopped at ends. The values of
// enum mr_fault are statuses; one that is not known is a fatal error.
func StatusOfFault(fault uint32) Status {
	switch s := Status(min(fault, 0xff)); s {
	case StatusSuccess, StatusLocProt, StatusLocQPOp:
		return s
	}
	return StatusFatal
}
