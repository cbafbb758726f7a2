// SPDX-License-Identifier: Apache-2.0

package core

import "github.com/metaroce/metaroce/wire"

// SynNone is the syndrome of a connection of which nothing was refused, as the maps hold it.
const SynNone = uint32(wire.SynNone)

// StatusOfSyndrome tells how the request that a peer refused ends. A syndrome
// that this version does not know ends it as a remote operation error.
func StatusOfSyndrome(syndrome uint32) Status {
	switch syndrome {
	case SynNone:
		return StatusSuccess
	case uint32(wire.SynInvalidRequest):
		return StatusRemInvReq
	case uint32(wire.SynRemoteAccess):
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
