// SPDX-License-Identifier: Apache-2.0

// Package core is the protocol's policy as pure functions and small state
// machines: no sockets, no clock, no goroutines. Time is always an argument.
package core

import (
	"net/netip"

	"github.com/metaroce/metaroce/wire"
)

// Access says who may do what with a memory region. Values are those of
// ibv_access_flags where it has them.
type Access uint32

// Access rights.
const (
	LocalWrite  Access = 1
	RemoteWrite Access = 2
	RemoteRead  Access = 4
	AllAccess          = LocalWrite | RemoteWrite | RemoteRead
)

// Bounds of version 1.
const (
	MaxPaths          = 32
	MaxPlanes         = 8
	MaxPrivate        = 196       // bytes of private data at set-up, as rdma_cm gives
	MaxRegion  uint64 = 1 << 30   // bytes a region
	MaxMessage uint64 = 1<<32 - 1 // bytes a message
	SQDepth           = 128       // requests outstanding on a connection
	RQDepth           = 128       // receives outstanding on a connection
	MinSport          = wire.SportMin
)

// PlaneAddr is one end's address on one plane.
type PlaneAddr struct {
	Addr netip.Addr
	MTU  int // bytes of IP packet
}

// Endpoint is what one end tells the other at set-up.
type Endpoint struct {
	QPN        uint32 // 24 bits
	Token      uint32 // packets to this end carry it
	Payload    int    // bytes, the most this end takes
	Paths      int    // the most this end wants
	Checksum   bool   // UDP checksum wanted; off only if both ends say off
	InitialPSN uint32 // of the packets this end sends (psn and each path's pseq)
	Planes     []PlaneAddr
}

// ConnParams is what both ends agreed on, from one end's view.
type ConnParams struct {
	Local, Remote Endpoint
	Payload       int
	Checksum      bool
	Paths         []PathParams
}

// PathParams is one path: a pair of addresses and the entropy that the network hashes.
type PathParams struct {
	Plane         int // index into Local.Planes
	Local, Remote netip.Addr
	Sport         uint16
}
