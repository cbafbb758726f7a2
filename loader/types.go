// SPDX-License-Identifier: Apache-2.0

package loader

// Layouts of the device's registers, as bpf/mr_types.h defines them. That file also says who
// writes which part, and under which lock.
type (
	// Conn is the value of map mr_conn: one connection. Only mr_ctl may change what stands
	// below its lock once the connection is open.
	Conn = metaroceMrConn
	// TxPath is the sender's half of a path, in Conn.Tx.
	TxPath = metaroceMrTxPath
	// RxPath is the receiver's half of a path, in Conn.Rx.
	RxPath = metaroceMrRxPath
	// RxStream is the receiver's half of a stream, Conn.Rxs.
	RxStream = metaroceMrRxStream
	// Path is the value of map mr_path: header template and descriptors of one path.
	Path = metaroceMrPath
	// Desc is one transmission in Path.Desc.
	Desc = metaroceMrDesc
	// Reqs is the value of map mr_req: the requests in flight of one connection.
	Reqs = metaroceMrReqs
	// QPage is the one entry of an inner map of mr_qp: the queues mapped into an application.
	QPage = metaroceMrQpage
	// WQE is a send queue entry, in QPage.Sq.
	WQE = metaroceMrWqe
	// SCQE is a send completion, in QPage.Scq.
	SCQE = metaroceMrScqe
	// RCQE is a receive completion, in QPage.Rcq.
	RCQE = metaroceMrRcqe
	// Region is the value of map mr_region.
	Region = metaroceMrRegion
	// Pump is the one entry of map mr_pump: a pump's ready ring.
	Pump = metaroceMrPump
	// Egress is the value of map mr_egress: one transmit ring, see bpf/mr_egress.h.
	Egress = metaroceMrEgress
	// Event is a record of the ring buffer mr_event.
	Event = metaroceMrEventRecord
	// Ctl is the frame that a run of mr_ctl gets.
	Ctl = metaroceMrCtlFrame
	// Counters is the per-CPU entry of map mr_counter.
	Counters = metaroceMrCounters
)

// Bounds of the layouts, those of bpf/mr_types.h.
const (
	MaxConns   = len(Pump{}.Ready)
	MaxPaths   = len(Conn{}.Tx)
	SQDepth    = len(QPage{}.Sq)
	RQDepth    = len(QPage{}.Rcq)
	BlockBytes = 65536 // a block of a memory region: an entry of an inner map of mr_mem
)

// Values of Conn.State.
const (
	ConnFree  = uint32(metaroceMrConnStateMR_CONN_FREE)
	ConnOpen  = uint32(metaroceMrConnStateMR_CONN_OPEN)
	ConnError = uint32(metaroceMrConnStateMR_CONN_ERROR)
)

// Values of TxPath.State.
const (
	PathActive  = uint8(metaroceMrPathStateMR_PATH_ACTIVE)
	PathSuspect = uint8(metaroceMrPathStateMR_PATH_SUSPECT)
	PathDown    = uint8(metaroceMrPathStateMR_PATH_DOWN)
)

// Bits of Region.Access.
const (
	AccessLocalWrite  = uint32(metaroceMrAccessMR_ACCESS_LOCAL_WRITE)
	AccessRemoteWrite = uint32(metaroceMrAccessMR_ACCESS_REMOTE_WRITE)
	AccessRemoteRead  = uint32(metaroceMrAccessMR_ACCESS_REMOTE_READ)
)

// Values of Conn.Fault and QPage.Fault.
const (
	FaultNone    = uint32(metaroceMrFaultMR_FAULT_NONE)
	FaultLocProt = uint32(metaroceMrFaultMR_FAULT_LOC_PROT)
	FaultLocQPOp = uint32(metaroceMrFaultMR_FAULT_LOC_QP_OP)
)

// Values of Ctl.Op.
const (
	CtlState   = uint32(metaroceMrCtlOpMR_CTL_STATE)
	CtlPath    = uint32(metaroceMrCtlOpMR_CTL_PATH)
	CtlProbe   = uint32(metaroceMrCtlOpMR_CTL_PROBE)
	CtlSuspect = uint32(metaroceMrCtlOpMR_CTL_SUSPECT)
	CtlReroll  = uint32(metaroceMrCtlOpMR_CTL_REROLL)
	CtlTimeout = uint32(metaroceMrCtlOpMR_CTL_TIMEOUT)
	CtlKick    = uint32(metaroceMrCtlOpMR_CTL_KICK)
	CtlCut     = uint32(metaroceMrCtlOpMR_CTL_CUT)
)

// What a run of mr_ctl returns.
const (
	CtlOK     = uint32(metaroceMrCtlResultMR_CTL_OK)
	CtlNoConn = uint32(metaroceMrCtlResultMR_CTL_NO_CONN)
	CtlBad    = uint32(metaroceMrCtlResultMR_CTL_BAD)
	CtlLimit  = uint32(metaroceMrCtlResultMR_CTL_LIMIT)
)
