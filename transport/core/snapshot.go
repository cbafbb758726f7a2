// SPDX-License-Identifier: Apache-2.0

package core

// ConnState is the life of a connection. Values are those of enum mr_conn_state.
type ConnState uint32

// Connection states.
const (
	ConnFree  ConnState = 0
	ConnOpen  ConnState = 1
	ConnError ConnState = 2
)

// PathState says what a path may carry. Values are those of enum mr_path_state.
type PathState uint8

// Path states.
const (
	PathActive  PathState = 0
	PathSuspect PathState = 1 // probed only; its repairs go by other paths
	PathDown    PathState = 2 // not even probed: no route or carrier
)

// String gives the word that status output shows.
func (s PathState) String() string {
	switch s {
	case PathActive:
		return "active"
	case PathSuspect:
		return "suspect"
	case PathDown:
		return "down"
	}
	return "unknown"
}

// PathWindow is the most data packets in flight on a path (MR_PATH_WINDOW).
const PathWindow = 248

// Snapshot is one connection's sender state as the engine read it at one
// moment. Fields are named as in struct mr_conn.
type Snapshot struct {
	State            ConnState
	PsnNext, PsnCum  uint32
	MsnNext          uint32 // requests taken from the send queue so far (1 more while Busy than finished)
	SqTail           uint32 // requests posted so far, from the queue's page
	Busy             bool   // request MsnNext-1 has packets to send
	NoCredit         bool   // stalled for want of a receive
	Credit, Ordinal  uint32
	NakPsn           uint32
	NakSyndrome      uint32
	Fault, FaultPsn  uint32
	Repairs, ProbeOn uint32 // masks of paths: repairs queued; a probe of either size wanted and not sent yet
	Unasked          uint32 // mask of paths whose last packet did not ask for an ACK
	Paths            []PathSnapshot
}

// PathSnapshot is a path of a Snapshot. Fields are named as in struct mr_tx_path.
type PathSnapshot struct {
	Next, Una          uint32
	Cwnd, Pace         uint32 // packets; ns a KiB, 0 = not paced
	Gen                uint8
	State              PathState
	Tolerance          uint8
	Sport              uint16
	LastAckNs          int64 // monotonic; 0: never
	SrttNs, MinRttNs   uint32
	Acks               uint32 // all generations
	PeerPkts, PeerCe   uint32 // this generation
	PeerDups           uint32 // this generation
	Lost               uint32
	Heard              uint32 // highest pseq of this generation that an ACK showed arrived
	Proofs             uint32 // full-size packets that an ACK showed arrived while the path was not active
	RingDrops          uint32 // dropped so far by the transmit ring that the path leaves by, of all connections
	SentBytes          uint64
	Sent, Retx, Probes uint32 // data packets, repairs among them, probes
}

// outstanding says whether the path has something unresolved under way.
func (p *PathSnapshot) outstanding() bool { return p.Next != p.Una }

// waiting says whether the connection has anything left to do: unacknowledged
// packets or requests that are not sent yet.
func (s *Snapshot) waiting() bool {
	return s.PsnNext != s.PsnCum || s.Busy || s.MsnNext != s.SqTail
}

// anyActive says whether a path may carry data.
func (s *Snapshot) anyActive() bool {
	for i := range s.Paths {
		if s.Paths[i].State == PathActive {
			return true
		}
	}
	return false
}

// PathSet is MR_CTL_PATH: cwnd, pace and tolerance of a path.
type PathSet struct {
	Path      int
	Cwnd      uint32 // packets, 1 to 248
	Pace      uint32 // ns a KiB, 0 = not paced
	Tolerance uint8  // packets
}

// PathStateSet is MR_CTL_SUSPECT: a new state of a path. What it had unresolved
// becomes repairs.
type PathStateSet struct {
	Path  int
	State PathState
}

// PathReroll is MR_CTL_REROLL: a new source port and generation of a path.
type PathReroll struct {
	Path  int
	Sport uint16
}

// Actions is what the engine is to do, in the order of the fields: states,
// rerolls, timeouts, sets, the cut, and probes last. The slices are valid until the next
// Tick.
type Actions struct {
	States   []PathStateSet // MR_CTL_SUSPECT
	Rerolls  []PathReroll   // MR_CTL_REROLL
	Timeouts []int          // MR_CTL_TIMEOUT: paths
	Sets     []PathSet      // MR_CTL_PATH
	Cut      int            // MR_CTL_CUT: bytes of payload that messages are cut into from now on, 0 = as before
	TooLong  []int          // paths that turned out too narrow for full-size packets: for the log
	Probe    uint32         // MR_CTL_PROBE: mask of paths, 0 = none
	Full     uint32         // MR_CTL_PROBE: mask of paths to ask by a full-size probe, right behind the short one
	// Fail ends the connection; set once, nil otherwise. It is a *RetryExceededError.
	Fail error
	// NextNs is when the next Tick is due at the latest if nothing is posted
	// before; monotonic. When the application posts on a connection that had
	// nothing to do, Tick is due within about 1 ms.
	NextNs int64
}
