// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"

	"github.com/metaroce/metaroce/transport/core"
)

// engine moves packets. transport/xdp is the first; one over UDP sockets comes later.
type engine interface {
	// Planes lists this host's interfaces in plane order, with the address that the engine uses on each.
	Planes() []core.PlaneAddr
	// MaxPayload is the largest payload, in bytes, that every plane's MTU takes: 1024, 2048 or 3072.
	MaxPayload() int
	// AllocRegion makes a mapped memory region of size bytes in protection domain pd.
	AllocRegion(size uint64, access core.Access, pd uint32) (region, error)
	// NewConn reserves a connection slot and its queues. Its QPN and token are known; it neither sends nor accepts yet.
	NewConn(pd uint32) (engineConn, error)
	Close() error
}

// region is memory that peers may write into.
type region interface {
	Bytes() []byte
	Addr() uint64 // what WRs and peers call the first byte
	Key() uint32  // lkey and rkey: index << 8 | generation
	Close() error // waits until no CPU reads the region any more
}

// engineConn is one connection's queues and controls. Methods may be called from any goroutine
// unless they say otherwise.
type engineConn interface {
	QPN() uint32
	Token() uint32
	InitialPSN() uint32
	// Start opens the connection: from now on packets are accepted. Routes and neighbours are
	// resolved within ctx; an error names the path, the address and the neighbour's state.
	Start(ctx context.Context, p core.ConnParams) error
	// PostSend copies wr into the send queue's slot msn % core.SQDepth and rings the bell. The
	// caller has checked that the slot is free. Not concurrently with itself.
	PostSend(msn uint32, wr core.WorkRequest)
	// PostRecv lets the peer use one more receive: n is how many were posted so far.
	PostRecv(n uint32)
	// SendDone says whether request msn is complete, and how. It is asked in the order of posting.
	// Once the connection has failed it may say of the others that they are flushed, or that the
	// first exceeded its retries.
	SendDone(msn uint32) (core.Status, bool)
	// RecvDone says whether receive n is complete, and with what; flushed once the connection has
	// failed.
	RecvDone(n uint32) (core.Received, bool)
	// ArmSend and ArmRecv ask for one Event when request msn / receive n completes. The caller
	// looks again after arming.
	ArmSend(msn uint32)
	ArmRecv(n uint32)
	// Events delivers one value when an armed completion is there or the connection failed.
	Events() <-chan struct{}
	// Drained says whether everything posted before has been acknowledged by the peer.
	Drained() bool
	// SentPSN is the psn after the last one sent; RecvPSN the psn below which all has arrived.
	SentPSN() uint32
	RecvPSN() uint32
	// Err is why the connection failed, nil while it has not. Failed is closed then, once no packet
	// is being placed any more.
	Err() error
	Failed() <-chan struct{}
	// Fail ends the connection for the given reason: nothing is sent or accepted any more.
	Fail(err error)
	// Close frees the slot, the paths and the queues, after no CPU uses them any more.
	Close() error
}
