// SPDX-License-Identifier: Apache-2.0

package core

import "fmt"

// Op is what a work request does. Values of those that are sent are those of enum mr_wr_op.
type Op uint8

// Operations of version 1.
const (
	OpWrite    Op = 0
	OpWriteImm Op = 1
	OpRecv     Op = 128 // of completions alone (IBV_WC_RECV)
)

// String gives the operation's name in words.
func (o Op) String() string {
	switch o {
	case OpWrite:
		return "write"
	case OpWriteImm:
		return "write with immediate"
	case OpRecv:
		return "receive"
	}
	return fmt.Sprintf("operation %d", uint8(o))
}

// WorkRequest is one send queue entry.
type WorkRequest struct {
	Op         Op
	LocalAddr  uint64
	LKey       uint32
	RemoteAddr uint64
	RKey       uint32
	Length     uint32 // bytes
	Imm        uint32
}

// Received is what a completed receive tells.
type Received struct {
	Imm    uint32
	Length uint32 // bytes of the message that carried it
	Status Status
}

// Status is how a request ended: ibv_wc_status.
type Status uint8

// Statuses (values of enum ibv_wc_status).
const (
	StatusSuccess       Status = 0
	StatusLocQPOp       Status = 2
	StatusLocProt       Status = 4
	StatusFlushed       Status = 5
	StatusRemInvReq     Status = 9
	StatusRemAccess     Status = 10
	StatusRemOp         Status = 11
	StatusRetryExceeded Status = 12
	StatusFatal         Status = 18
)

// String gives ibv_wc_status_str's words.
func (s Status) String() string {
	switch s {
	case StatusSuccess:
		return "success"
	case StatusLocQPOp:
		return "local QP operation error"
	case StatusLocProt:
		return "local protection error"
	case StatusFlushed:
		return "Work Request Flushed Error"
	case StatusRemInvReq:
		return "remote invalid request error"
	case StatusRemAccess:
		return "remote access error"
	case StatusRemOp:
		return "remote operation error"
	case StatusRetryExceeded:
		return "transport retry counter exceeded"
	case StatusFatal:
		return "fatal error"
	}
	return fmt.Sprintf("status %d", uint8(s))
}
