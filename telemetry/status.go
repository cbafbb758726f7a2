// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	"github.com/metaroce/metaroce/cc"
	"github.com/metaroce/metaroce/loader"
)

// Status is a device as it is now.
type Status struct {
	Device      Device       `json:"device"`
	Connections []Connection `json:"connections"` // by slot
	Regions     []Region     `json:"regions"`     // by index
	Pump        Pump         `json:"pump"`
	Rings       []Ring       `json:"transmit_rings"`
	Counters    Counters     `json:"counters"`
}

// Device is what its process told when it loaded the device.
type Device struct {
	Name       string             `json:"name"` // <netns inode>-<first interface>
	Pins       string             `json:"pins"` // directory of the pinned maps
	PID        int                `json:"pid"`
	Alive      bool               `json:"alive"` // false: the process died, the next start cleans up
	Netns      uint64             `json:"netns"` // inode
	Mode       string             `json:"mode"`
	Port       uint16             `json:"port"`       // UDP
	Interfaces []loader.Interface `json:"interfaces"` // in plane order
	MaxConns   int                `json:"max_conns"`
	Since      time.Time          `json:"since"`
}

// Connection is one connection. Numbers are stream 0's.
type Connection struct {
	Slot     int    `json:"slot"`
	QPN      uint32 `json:"qpn"`
	PeerQPN  uint32 `json:"peer_qpn"`
	Local    string `json:"local"` // address of the first path
	Peer     string `json:"peer"`
	State    string `json:"state"`
	Payload  int    `json:"payload"` // bytes, at most, a packet
	Checksum bool   `json:"checksum"`
	DSCP     uint8  `json:"dscp"`

	PSNNext     uint32 `json:"psn_next"`
	PSNCum      uint32 `json:"psn_cum"`    // acknowledged below
	PSNLimit    uint32 `json:"psn_limit"`  // the peer lets us go so far
	RxPSNCum    uint32 `json:"rx_psn_cum"` // arrived below
	Requests    uint32 `json:"requests"`   // taken from the queue
	Credit      uint32 `json:"credit"`     // receives the peer has posted
	Ordinal     uint32 `json:"ordinal"`    // of these used
	NoCredit    bool   `json:"no_credit"`  // waits for a receive
	NAKPSN      uint32 `json:"nak_psn"`
	NAKSyndrome uint32 `json:"nak_syndrome"` // 0: none
	Fault       uint32 `json:"fault"`        // ibv_wc_status, 0: none

	Paths []Path `json:"paths"`
}

// Path is one path of a connection. Counts are over all generations unless they say otherwise.
type Path struct {
	Index         int    `json:"index"`
	Plane         int    `json:"plane"` // -1: an interface that is none of the device's
	Interface     string `json:"interface"`
	Ifindex       uint32 `json:"ifindex"`
	Local         string `json:"local"`
	Peer          string `json:"peer"`
	SourcePort    uint16 `json:"source_port"`
	Generation    uint8  `json:"generation"`
	State         string `json:"state"`
	Window        uint32 `json:"window"`      // packets
	InFlight      uint32 `json:"in_flight"`   // packets that are not resolved
	PaceNsPerKiB  uint32 `json:"pace_ns_kib"` // 0: not paced
	RateBps       uint64 `json:"rate_bps"`    // bits a second that the pace allows, 0: not paced
	Tolerance     uint8  `json:"tolerance"`   // packets of reordering that are no loss
	SRTTNs        uint32 `json:"srtt_ns"`
	MinRTTNs      uint32 `json:"min_rtt_ns"`
	Marks         uint32 `json:"marks"` // CE that the peer reported
	Lost          uint32 `json:"lost"`  // transmissions
	Sent          uint32 `json:"sent"`  // packets
	SentBytes     uint64 `json:"sent_bytes"`
	Retransmitted uint32 `json:"retransmitted"`
	Probes        uint32 `json:"probes"`
	Acks          uint32 `json:"acks"`

	RxPackets    uint32 `json:"rx_packets"` // this generation
	RxMarks      uint32 `json:"rx_marks"`   // this generation
	RxDuplicates uint32 `json:"rx_duplicates"`
	RxOutOfOrder uint32 `json:"rx_out_of_order"`
	RxSourcePort uint16 `json:"rx_source_port"`
}

// Region is a memory region in use.
type Region struct {
	Index      uint32   `json:"index"`
	Key        uint32   `json:"key"` // index << 8 | generation
	Generation uint8    `json:"generation"`
	PD         uint32   `json:"pd"`
	Base       uint64   `json:"base"`
	Size       uint64   `json:"size"` // bytes
	Access     []string `json:"access"`
}

// Pump is the device's sending thread.
type Pump struct {
	Sleeping bool   `json:"sleeping"`
	CPUs     string `json:"cpus"` // where its thread may run, as in /proc/PID/status; "" if unknown
	Pinned   bool   `json:"pinned"`
	Sent     uint64 `json:"sent"`  // runs that emitted a packet
	Idle     uint64 `json:"idle"`  // runs that found no connection ready
	Ready    uint32 `json:"ready"` // connections that wait for their turn
	// Transient is failed calls of the pump that were waited out: the kernel was short of memory.
	Transient uint32 `json:"transient"`
}

// Ring is an interface's transmit ring: what its driver took of our frames, and what is held back.
type Ring struct {
	Interface    string `json:"interface"`
	Ifindex      uint32 `json:"ifindex"`
	Seen         bool   `json:"seen"` // false: the kernel has no BTF, so nothing is counted
	Sent         uint64 `json:"tx_sent"`
	LocalDrop    uint64 `json:"tx_local_drop"`
	ACKSent      uint64 `json:"ack_sent"` // by XDP_TX, where the driver tells
	ACKLocalDrop uint64 `json:"ack_local_drop"`
	Limited      bool   `json:"limited"` // a drop was seen, or none can be
	Burst        uint32 `json:"burst"`   // frames that the ring may hold, if limited
	Held         uint64 `json:"held"`    // times that it held as many
}

// Source is where Collect reads a device's registers: a *loader.State.
type Source interface {
	MaxConns() int
	Conn(slot int) (*loader.Conn, error)
	Path(i int) (*loader.Path, error)
	Regions() ([]loader.Region, error)
	Pump() (*loader.Pump, error)
	Egresses() ([]loader.Egress, error)
	Counters() (loader.Counters, error)
}

// Collect reads a device through its maps. Each connection is a snapshot taken under its lock;
// different connections and the counters are read one after the other.
func Collect(s Source, d loader.Device) (*Status, error) {
	st := &Status{Device: newDevice(d), Connections: []Connection{}, Regions: []Region{}}
	for i := range s.MaxConns() {
		c, err := s.Conn(i)
		if err != nil {
			return nil, fmt.Errorf("device %s: %w", d.Name, err)
		}
		if c.State == loader.ConnFree {
			continue
		}
		conn, err := newConnection(s, d, i, c)
		if err != nil {
			return nil, fmt.Errorf("device %s: %w", d.Name, err)
		}
		st.Connections = append(st.Connections, conn)
	}
	regions, err := s.Regions()
	if err != nil {
		return nil, fmt.Errorf("device %s: %w", d.Name, err)
	}
	for _, r := range regions {
		st.Regions = append(st.Regions, Region{
			Index: r.Key >> 8, Key: r.Key, Generation: uint8(r.Key), PD: r.Pd,
			Base: r.Base, Size: r.Len, Access: accessNames(r.Access),
		})
	}
	p, err := s.Pump()
	if err != nil {
		return nil, fmt.Errorf("device %s: %w", d.Name, err)
	}
	st.Pump = Pump{Sleeping: p.Sleeping != 0, CPUs: d.Owner.PumpCPUs, Pinned: d.Owner.PumpCPU != nil, Sent: p.Sent, Idle: p.Idle, Ready: p.Tail - p.Head, Transient: p.Transient}
	rings, err := s.Egresses()
	if err != nil {
		return nil, fmt.Errorf("device %s: %w", d.Name, err)
	}
	st.Rings = newRings(d, rings)
	counters, err := s.Counters()
	if err != nil {
		return nil, fmt.Errorf("device %s: %w", d.Name, err)
	}
	st.Counters = NewCounters(counters)
	return st, nil
}

func newRings(d loader.Device, egresses []loader.Egress) []Ring {
	rings := []Ring{}
	for _, e := range egresses {
		r := Ring{
			Ifindex: e.Ifindex, Seen: e.Traced != 0, Sent: e.TxSent, LocalDrop: e.TxLocalDrop,
			ACKSent: e.AckSent, ACKLocalDrop: e.AckLocalDrop, Limited: e.Active != 0, Burst: e.Burst, Held: e.Held,
		}
		for _, itf := range d.Owner.Interfaces {
			if name, index := itf.Lower(); uint32(index) == e.Ifindex {
				r.Interface = name
			}
		}
		rings = append(rings, r)
	}
	return rings
}

func newDevice(d loader.Device) Device {
	dev := Device{
		Name: d.Name, Pins: d.Dir, PID: d.Owner.PID, Alive: d.Alive, Netns: d.Owner.Netns,
		Port: d.Owner.Port, Interfaces: d.Owner.Interfaces, MaxConns: d.Owner.MaxConns, Since: d.Owner.Since,
	}
	if dev.Interfaces == nil {
		dev.Interfaces = []loader.Interface{}
	} else {
		dev.Mode = dev.Interfaces[0].Mode
	}
	return dev
}

func newConnection(s Source, d loader.Device, slot int, c *loader.Conn) (Connection, error) {
	conn := Connection{
		Slot: slot, QPN: c.Qpn, PeerQPN: c.PeerQpn, State: connState(c.State),
		Payload: int(c.Payload), Checksum: c.Checksum != 0, DSCP: c.Tos >> 2,
		PSNNext: c.PsnNext, PSNCum: c.PsnCum, PSNLimit: c.PsnLimit, RxPSNCum: c.Rxs.Cum,
		Requests: c.MsnNext, Credit: c.Credit, Ordinal: c.Ordinal, NoCredit: c.NoCredit != 0,
		NAKPSN: c.NakPsn, NAKSyndrome: c.NakSyndrome, Fault: c.Fault,
		Paths: []Path{},
	}
	for i := range min(int(c.Npaths), loader.MaxPaths) {
		p, err := s.Path(int(c.PathBase) + i)
		if err != nil {
			return conn, fmt.Errorf("connection %#x: %w", c.Qpn, err)
		}
		conn.Paths = append(conn.Paths, newPath(d, i, p, &c.Tx[i], &c.Rx[i]))
	}
	if len(conn.Paths) > 0 {
		conn.Local, conn.Peer = conn.Paths[0].Local, conn.Paths[0].Peer
	}
	return conn, nil
}

func newPath(d loader.Device, index int, p *loader.Path, tx *loader.TxPath, rx *loader.RxPath) Path {
	path := Path{
		Index: index, Plane: -1, Ifindex: p.Ifindex, Local: address(p.Local), Peer: address(p.Peer),
		SourcePort: tx.Sport, Generation: tx.Gen, State: pathState(tx.State),
		Window: tx.Cwnd, InFlight: tx.Next - tx.Una, PaceNsPerKiB: tx.Pace, RateBps: 8 * cc.RateBps(tx.Pace),
		Tolerance: tx.Tolerance, SRTTNs: tx.SrttNs, MinRTTNs: tx.MinRttNs,
		Marks: tx.Ce, Lost: tx.Lost, Sent: tx.Sent, SentBytes: tx.SentBytes, Retransmitted: tx.Retx,
		Probes: tx.Probes, Acks: tx.Acks,
		RxPackets: rx.Pkts, RxMarks: rx.Ce, RxDuplicates: rx.Dups, RxOutOfOrder: rx.Ooo, RxSourcePort: rx.Sport,
	}
	for plane, itf := range d.Owner.Interfaces {
		if itf.Sends(p) {
			path.Plane, path.Interface = plane, itf.Name
		}
	}
	return path
}

// address reads four words that hold 16 bytes in network order.
func address(words [4]uint32) string {
	var b [16]byte
	for i, w := range words {
		binary.NativeEndian.PutUint32(b[4*i:], w)
	}
	return netip.AddrFrom16(b).Unmap().String()
}

func connState(s uint32) string {
	switch s {
	case loader.ConnFree:
		return "free"
	case loader.ConnOpen:
		return "open"
	case loader.ConnError:
		return "error"
	}
	return fmt.Sprintf("state %d", s)
}

func pathState(s uint8) string {
	switch s {
	case loader.PathActive:
		return "active"
	case loader.PathSuspect:
		return "suspect"
	case loader.PathDown:
		return "down"
	}
	return fmt.Sprintf("state %d", s)
}

func accessNames(access uint32) []string {
	names := []string{}
	for _, a := range []struct {
		bit  uint32
		name string
	}{
		{loader.AccessLocalWrite, "local-write"},
		{loader.AccessRemoteWrite, "remote-write"},
		{loader.AccessRemoteRead, "remote-read"},
	} {
		if access&a.bit != 0 {
			names = append(names, a.name)
		}
	}
	return names
}
