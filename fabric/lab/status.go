// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"math"
	"net/netip"
)

// Counters count packets of one plane since the lab is up.
type Counters struct {
	Packets      uint64 `json:"packets"`       // entered the switch
	Bytes        uint64 `json:"bytes"`         // of these, whole frames
	Flooded      uint64 `json:"flooded"`       // broadcast and multicast
	Unknown      uint64 `json:"unknown"`       // dropped: no such destination
	Down         uint64 `json:"down"`          // dropped: plane down
	Lost         uint64 `json:"lost"`          // dropped: random loss
	Scripted     uint64 `json:"scripted"`      // dropped: by a rule of the script
	QueueDropped uint64 `json:"queue_dropped"` // dropped: virtual queue full
	Marked       uint64 `json:"marked"`        // got CE
	Corrupted    uint64 `json:"corrupted"`
	Duplicated   uint64 `json:"duplicated"`
	Reordered    uint64 `json:"reordered"` // sent through the detour
}

func (c *Counters) add(d *labLabCount) {
	c.Packets += d.Packets
	c.Bytes += d.Bytes
	c.Flooded += d.Flooded
	c.Unknown += d.Unknown
	c.Down += d.Down
	c.Lost += d.Lost
	c.Scripted += d.Scripted
	c.QueueDropped += d.QueueDropped
	c.Marked += d.Marked
	c.Corrupted += d.Corrupted
	c.Duplicated += d.Duplicated
	c.Reordered += d.Reordered
}

// Queue is one virtual queue: what leaves the switch to a host by one spine.
type Queue struct {
	Host      int    `json:"host"`
	Spine     int    `json:"spine"`
	Packets   uint64 `json:"packets"`
	Bytes     uint64 `json:"bytes"`
	Marked    uint64 `json:"marked"`
	Dropped   uint64 `json:"dropped"`
	PeakBytes uint64 `json:"peak_bytes"` // the most it held
}

// PlaneStatus is one plane: its faults, probabilities from 0 to 1, and counters.
type PlaneStatus struct {
	Plane     int      `json:"plane"`
	Up        bool     `json:"up"`
	Loss      float64  `json:"loss"`
	Burst     float64  `json:"burst"`
	Duplicate float64  `json:"duplicate"`
	Corrupt   float64  `json:"corrupt"`
	Reorder   float64  `json:"reorder"`
	Seed      uint64   `json:"seed"`
	Counters  Counters `json:"counters"`
	Queues    []Queue  `json:"queues,omitempty"` // with a rate, or more than one spine
}

// RuleStatus is one rule of the script.
type RuleStatus struct {
	Rule   string `json:"rule"`
	Planes []int  `json:"planes"`
	Seen   uint64 `json:"seen"` // packets that it describes
	Hits   uint64 `json:"hits"` // of these, acted on
}

// HostStatus names a host's namespace and addresses.
type HostStatus struct {
	Name       string       `json:"name"`
	NetNS      string       `json:"netns"`
	Interfaces []string     `json:"interfaces"`
	Addresses  []netip.Addr `json:"addresses"`
}

// Status is a lab as `metaroce lab status --json` prints it.
type Status struct {
	Name       string        `json:"name"`
	Direct     bool          `json:"direct"`
	Spines     int           `json:"spines"`
	RateBps    uint64        `json:"rate_bps"`    // bit/s; 0: not limited
	ECNBytes   uint64        `json:"ecn_bytes"`   // 2^64-1: never
	QueueBytes uint64        `json:"queue_bytes"` //
	Seed       uint64        `json:"seed"`
	MTU        int           `json:"mtu"`
	Hosts      []HostStatus  `json:"hosts"`
	Planes     []PlaneStatus `json:"planes"`
	Rules      []RuleStatus  `json:"rules"`
}

// Status reads the lab's state and counters.
func (l *Lab) Status() (*Status, error) {
	s := &Status{
		Name: l.cfg.Name, Direct: l.cfg.Direct, Spines: l.cfg.Spines, RateBps: l.cfg.Rate,
		ECNBytes: l.cfg.ECN, QueueBytes: l.cfg.Queue, Seed: l.cfg.Seed, MTU: l.cfg.MTU,
		Planes: []PlaneStatus{}, Rules: []RuleStatus{},
	}
	for host := range l.cfg.Hosts {
		h := HostStatus{Name: fmt.Sprintf("h%d", host), NetNS: l.namespace(host), Interfaces: l.Interfaces(host)}
		for plane := range l.cfg.Planes {
			h.Addresses = append(h.Addresses, l.Addr(host, plane))
		}
		s.Hosts = append(s.Hosts, h)
	}
	if l.sw == nil {
		for plane := range l.cfg.Planes {
			s.Planes = append(s.Planes, PlaneStatus{Plane: plane, Up: true})
		}
		return s, nil
	}
	for plane := range l.cfg.Planes {
		p, err := l.planeStatus(plane)
		if err != nil {
			return nil, fmt.Errorf("lab %s: plane %d: %w", l.cfg.Name, plane, err)
		}
		s.Planes = append(s.Planes, *p)
	}
	var err error
	if s.Rules, err = l.ruleStatus(); err != nil {
		return nil, fmt.Errorf("lab %s: %w", l.cfg.Name, err)
	}
	return s, nil
}

func (l *Lab) planeStatus(plane int) (*PlaneStatus, error) {
	var entry labLabPlane
	if err := l.sw.Planes.Lookup(uint32(plane), &entry); err != nil {
		return nil, err
	}
	p := &PlaneStatus{
		Plane: plane, Up: entry.Flags&labLabPlaneFlagLAB_P_DOWN == 0, Seed: entry.Seed,
		Loss: float64(entry.LossPpb) / 1e9, Burst: float64(entry.BurstMilli) / 1e3,
		Duplicate: probability(entry.Duplicate), Corrupt: probability(entry.Corrupt), Reorder: probability(entry.Reorder),
	}
	for host := range l.cfg.Hosts {
		id := uint32(plane*l.cfg.Hosts + host)
		var perCPU []labLabCount
		if err := l.sw.Counts.Lookup(id, &perCPU); err != nil {
			return nil, err
		}
		for i := range perCPU {
			p.Counters.add(&perCPU[i])
		}
		if entry.Flags&labLabPlaneFlagLAB_P_QUEUE == 0 {
			continue
		}
		for spine := range l.cfg.Spines {
			var q labLabQueue
			if err := l.sw.Queues.Lookup(id*uint32(l.cfg.Spines)+uint32(spine), &q); err != nil {
				return nil, err
			}
			queue := Queue{Host: host, Spine: spine, Packets: q.Packets, Bytes: q.Bytes, Marked: q.Marked, Dropped: q.Dropped}
			if entry.ByteCost != 0 {
				queue.PeakBytes = uint64(float64(q.PeakTicks) * (1 << 20) / float64(entry.ByteCost))
			}
			p.Queues = append(p.Queues, queue)
		}
	}
	return p, nil
}

// probability undoes threshold, to the nine digits that it keeps.
func probability(threshold uint64) float64 {
	return math.Round(float64(threshold)/(1<<32)*1e9) / 1e9
}

func (l *Lab) ruleStatus() ([]RuleStatus, error) {
	rules := []RuleStatus{}
	for i := range uint32(MaxRules) {
		var entry labLabRule
		if err := l.sw.Rules.Lookup(i, &entry); err != nil {
			return nil, fmt.Errorf("rule %d: %w", i, err)
		}
		if entry.Match == 0 {
			break
		}
		r := Rule{Action: Action(entry.Action), Match: Class(entry.Match), From: entry.From, To: entry.To}
		status := RuleStatus{Rule: r.String(), Planes: []int{}, Seen: entry.Seen, Hits: entry.Hits}
		for plane := range l.cfg.Planes {
			if entry.Planes>>plane&1 != 0 {
				status.Planes = append(status.Planes, plane)
			}
		}
		rules = append(rules, status)
	}
	return rules, nil
}
