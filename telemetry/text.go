// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"bytes"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
)

// WriteText prints the status as tables: the device, its connections with their paths, its regions
// and its counters that are not zero (all of them if all is set).
func (s *Status) WriteText(w io.Writer, all bool) error {
	var b bytes.Buffer
	d := &s.Device
	owner := fmt.Sprintf("pid %d", d.PID)
	if !d.Alive {
		owner = fmt.Sprintf("its process (pid %d) is gone, the next start cleans up", d.PID)
	}
	fmt.Fprintf(&b, "device %s: %s, UDP port %d, %s XDP, %d of %d connections, pump %s\n",
		d.Name, owner, d.Port, d.Mode, len(s.Connections), d.MaxConns, pumpState(s.Pump))
	fmt.Fprintf(&b, "pins %s\n", d.Pins)
	for i, itf := range d.Interfaces {
		fmt.Fprintf(&b, "plane %d: %s, ifindex %d, MTU %d, driver %s, %s\n", i, itf.Name, itf.Index, itf.MTU, itf.Driver, itf.MAC)
	}
	for _, r := range s.Rings {
		fmt.Fprintf(&b, "transmit ring of %s: %s\n", r.Interface, r.describe())
	}
	if len(s.Connections) > 0 {
		b.WriteByte('\n')
		s.writeConnections(&b)
	}
	if len(s.Regions) > 0 {
		b.WriteByte('\n')
		t := table(&b)
		row(t, "Key", "Size", "Base", "PD", "Access")
		for _, r := range s.Regions {
			row(t, hex(uint64(r.Key)), strconv.FormatUint(r.Size, 10), hex(r.Base), strconv.FormatUint(uint64(r.PD), 10), strings.Join(r.Access, ","))
		}
		_ = t.Flush()
	}
	b.WriteByte('\n')
	t := table(&b)
	row(t, "Counter", "Value")
	for _, c := range s.Counters {
		if all || c.Value != 0 {
			row(t, c.Name, strconv.FormatUint(c.Value, 10))
		}
	}
	_ = t.Flush()
	_, err := w.Write(b.Bytes())
	return err
}

// describe says what the driver took and dropped, or that nobody knows.
func (r Ring) describe() string {
	limit := "no limit"
	if r.Limited {
		limit = fmt.Sprintf("at most %d frames, held %d times", r.Burst, r.Held)
	}
	if !r.Seen {
		return "local drops are not seen (the kernel has no BTF, or refused the tracing programs), " + limit
	}
	return fmt.Sprintf("%d sent, %d local drops, %d ACKs sent, %d ACK local drops, %s",
		r.Sent, r.LocalDrop, r.ACKSent, r.ACKLocalDrop, limit)
}

func (s *Status) writeConnections(b *bytes.Buffer) {
	t := table(b)
	row(t, "QPN", "PeerQPN", "State", "Local", "Peer", "Payload", "Checksum", "PSN", "Acked", "Limit", "Received", "Credit", "Used")
	for i := range s.Connections {
		c := &s.Connections[i]
		state := c.State
		if c.NoCredit {
			state += ",no-credit"
		}
		if c.NAKSyndrome != 0 {
			state += fmt.Sprintf(",nak-%#x", c.NAKSyndrome)
		}
		if c.Fault != 0 {
			state += fmt.Sprintf(",fault-%d", c.Fault)
		}
		sum := "on"
		if !c.Checksum {
			sum = "off"
		}
		row(t, hex(uint64(c.QPN)), hex(uint64(c.PeerQPN)), state, c.Local, c.Peer, strconv.Itoa(c.Payload), sum,
			dec(c.PSNNext), dec(c.PSNCum), dec(c.PSNLimit), dec(c.RxPSNCum), dec(c.Credit), dec(c.Ordinal))
	}
	_ = t.Flush()
	b.WriteByte('\n')
	t = table(b)
	row(t, "QPN", "Path", "Plane", "Interface", "Peer", "Port", "Gen", "State", "Window", "Flight", "Rate", "SRTT", "MinRTT",
		"Sent", "Retrans", "Lost", "Marks", "Probes", "Received", "Dups")
	for i := range s.Connections {
		c := &s.Connections[i]
		for _, p := range c.Paths {
			row(t, hex(uint64(c.QPN)), strconv.Itoa(p.Index), strconv.Itoa(p.Plane), p.Interface, p.Peer,
				strconv.Itoa(int(p.SourcePort)), strconv.Itoa(int(p.Generation)), p.State, dec(p.Window), dec(p.InFlight),
				rate(p.RateBps), duration(p.SRTTNs), duration(p.MinRTTNs), dec(p.Sent), dec(p.Retransmitted), dec(p.Lost),
				dec(p.Marks), dec(p.Probes), dec(p.RxPackets), dec(p.RxDuplicates))
		}
	}
	_ = t.Flush()
}

func table(w io.Writer) *tabwriter.Writer { return tabwriter.NewWriter(w, 0, 0, 2, ' ', 0) }

// row writes one line; a cell that is empty would shift the columns of people who use awk.
func row(t *tabwriter.Writer, cells ...string) {
	for i, c := range cells {
		if c == "" {
			cells[i] = "-"
		}
	}
	_, _ = fmt.Fprintln(t, strings.Join(cells, "\t"))
}

func pumpState(p Pump) string {
	state := "awake"
	if p.Sleeping {
		state = "asleep"
	}
	switch {
	case p.Pinned:
		state += " on CPU " + p.CPUs
	case p.CPUs != "":
		state += " on any of CPUs " + p.CPUs
	}
	return state
}

func hex(v uint64) string { return "0x" + strconv.FormatUint(v, 16) }
func dec(v uint32) string { return strconv.FormatUint(uint64(v), 10) }

func rate(bps uint64) string {
	switch {
	case bps == 0:
		return "-"
	case bps >= 1e9:
		return strconv.FormatFloat(float64(bps)/1e9, 'f', 2, 64) + "Gbit/s"
	}
	return strconv.FormatFloat(float64(bps)/1e6, 'f', 2, 64) + "Mbit/s"
}

func duration(ns uint32) string {
	if ns == 0 {
		return "-"
	}
	return strconv.FormatFloat(float64(ns)/float64(time.Microsecond), 'f', 1, 64) + "us"
}
