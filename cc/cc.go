// SPDX-License-Identifier: Apache-2.0

// Package cc is congestion control: numbers and times in, windows and rates
// out. It has no clock, no goroutine and no I/O; all times are nanoseconds of
// one monotonic clock, all rates are bytes of Ethernet frames a second.
//
// The sender's control loop calls a Controller about once a millisecond with
// what each path of one connection delivered since the last call. Algorithms
// differ in what they read from a PathSample: aimd reads marks, losses and
// delivered bytes; one by delay reads the round-trip times, one by in-band
// telemetry reads INT, one that follows the receiver reads HintBps.
package cc

import "math"

// Bounds of what a Controller may return.
const (
	// MinWindow and MaxWindow bound PathRate.Window, in packets. The upper bound
	// leaves room for probes in the 256 bits of an ACK's vector.
	MinWindow = 1
	MaxWindow = 248
)

// Controller computes windows and rates of one connection's paths. It is not
// safe for concurrent use.
type Controller interface {
	// Name is the algorithm's name as users write it.
	Name() string
	// Start gives the windows and rates that n paths begin with.
	Start(n int) []PathRate
	// Tick takes what happened since the last Tick, ended at nowNs, and returns
	// one entry a path. The slice is valid until the next call. The number of
	// paths is the same in every call, that of Start.
	Tick(nowNs int64, s Sample) []PathRate
}

// Sample is what one connection's paths did between two Ticks.
type Sample struct {
	// PacketBytes is the frame size of a full data packet, for windows.
	PacketBytes int
	// HintBps is the share of its inbound bandwidth that the receiver gives this
	// sender over all paths, bytes a second; 0: no hint.
	HintBps uint64
	Paths   []PathSample
}

// PathSample is what one path did between two Ticks. Counts are differences
// against the Tick before.
type PathSample struct {
	// Plane groups paths that leave by the same interface.
	Plane int
	// Usable is false while the path carries no data: suspect or down.
	Usable bool
	// Pkts and CE are data packets that the peer reports as arrived, and how many
	// of those carried a congestion mark.
	Pkts, CE uint32
	// Lost is transmissions found missing; Timeouts how often the path went
	// silent so long that all it had under way was given up.
	Lost, Timeouts uint32
	// RingLost is further transmissions, which the host's own full transmit ring dropped. They
	// say nothing about the network. The engine holds back what the ring does not take, so no
	// rate need fall for them; but none should stay above what the ring lets out.
	RingLost uint32
	// DeliveredBytes is frame bytes of Pkts.
	DeliveredBytes uint64
	// InFlight is packets sent and not yet resolved, now.
	InFlight uint32
	// SrttNs and MinRttNs are the smoothed and the least round-trip time; 0: not
	// measured yet.
	SrttNs, MinRttNs uint32
	// INT is the newest in-band telemetry of the path, nil where the fabric has none.
	INT *INT
}

// INT is the telemetry of a path's hops, nearest to the sender first (HPCC,
// SIGCOMM 2019, section 4.1).
type INT struct {
	Hops []Hop
}

// Hop is one switch port on the way.
type Hop struct {
	QueueBytes uint32
	TxBytes    uint64 // sent by the port so far
	TimeNs     int64  // the switch's clock
	RateBps    uint64 // the port's capacity, bytes a second
}

// PathRate is what a path may do until the next Tick.
type PathRate struct {
	// Window is packets in flight, MinWindow to MaxWindow.
	Window uint32
	// RateBps is frame bytes a second; 0: not paced.
	RateBps uint64
}

// PaceNsPerKiB turns a rate in bytes a second into the unit of the path's map
// entry: nanoseconds a KiB (1024 bytes). It rounds to the nearest nanosecond,
// which is an error of at most 0.5 ns a KiB: 0.01 % at 2 Gbit/s, 0.6 % at
// 100 Gbit/s. 0 (not paced) stays 0; so does what is too fast to express, above
// 2 TB/s. Rates below 239 B/s give the slowest pace there is.
func PaceNsPerKiB(rateBps uint64) uint32 {
	if rateBps == 0 {
		return 0
	}
	ns := math.Round(1024e9 / float64(rateBps))
	return uint32(min(ns, math.MaxUint32))
}

// RateBps is the inverse of PaceNsPerKiB: bytes a second, rounded to the
// nearest; 0 for 0.
func RateBps(paceNsPerKiB uint32) uint64 {
	if paceNsPerKiB == 0 {
		return 0
	}
	return uint64(math.Round(1024e9 / float64(paceNsPerKiB)))
}
