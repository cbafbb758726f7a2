// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"path/filepath"
	"unsafe"

	"github.com/cilium/ebpf"
)

// State reads a device's registers. It changes nothing.
type State struct {
	conn, path, region, pump, counter, egress *ebpf.Map
	owned                                     bool
}

// State reads the registers of this device. It ends with the device.
func (o *Objects) State() *State {
	return &State{conn: o.Conn, path: o.Path, region: o.Region, pump: o.Pump, counter: o.Counter, egress: o.EgressMap}
}

// OpenPinned opens the maps pinned in dir for reading, from any process that may.
func OpenPinned(dir string) (*State, error) {
	s := &State{owned: true}
	for name, m := range map[string]**ebpf.Map{
		metaroceMapMrConn: &s.conn, metaroceMapMrPath: &s.path, metaroceMapMrRegion: &s.region,
		metaroceMapMrPump: &s.pump, metaroceMapMrCounter: &s.counter, metaroceMapMrEgress: &s.egress,
	} {
		var err error
		*m, err = ebpf.LoadPinnedMap(filepath.Join(dir, name), &ebpf.LoadPinOptions{ReadOnly: true})
		if err != nil {
			return nil, errors.Join(fmt.Errorf("open map %s of %s: %w", name, dir, err), s.Close())
		}
	}
	for _, c := range []struct {
		m    *ebpf.Map
		name string
		size uintptr
	}{
		{s.conn, metaroceMapMrConn, unsafe.Sizeof(Conn{})},
		{s.path, metaroceMapMrPath, unsafe.Sizeof(Path{})},
		{s.region, metaroceMapMrRegion, unsafe.Sizeof(Region{})},
		{s.pump, metaroceMapMrPump, unsafe.Sizeof(Pump{})},
		{s.counter, metaroceMapMrCounter, unsafe.Sizeof(Counters{})},
		{s.egress, metaroceMapMrEgress, unsafe.Sizeof(Egress{})},
	} {
		// Pinned by a program of another version.
		if uintptr(c.m.ValueSize()) != c.size {
			return nil, errors.Join(fmt.Errorf("map %s of %s: values of %d bytes, want %d: another version of metaroce has the device",
				c.name, dir, c.m.ValueSize(), c.size), s.Close())
		}
	}
	return s, nil
}

// Close closes the maps that OpenPinned opened.
func (s *State) Close() error {
	if !s.owned {
		return nil
	}
	var errs []error
	for _, m := range []*ebpf.Map{s.conn, s.path, s.region, s.pump, s.counter, s.egress} {
		errs = append(errs, m.Close()) // Close takes nil
	}
	return errors.Join(errs...)
}

// Counters is the sum over all CPUs.
func (s *State) Counters() (Counters, error) {
	var perCPU []Counters
	if err := s.counter.Lookup(uint32(0), &perCPU); err != nil {
		return Counters{}, fmt.Errorf("read the counters: %w", err)
	}
	return SumCounters(perCPU), nil
}

// SumCounters adds up what the CPUs counted.
func SumCounters(perCPU []Counters) Counters {
	var sum Counters
	total := counterWords(&sum)
	for i := range perCPU {
		for k, v := range counterWords(&perCPU[i]) {
			total[k] += v
		}
	}
	return sum
}

// counterWords sees the counters as the array of 64-bit words that they are.
func counterWords(c *Counters) []uint64 {
	return unsafe.Slice((*uint64)(unsafe.Pointer(c)), unsafe.Sizeof(*c)/8)
}

// MaxConns is how many connection slots the device has.
func (s *State) MaxConns() int { return int(s.conn.MaxEntries()) }

// Conn is a snapshot of connection slot i, taken under the connection's lock.
func (s *State) Conn(i int) (*Conn, error) {
	var c Conn
	if err := s.conn.LookupWithFlags(uint32(i), unsafe.Pointer(&c), ebpf.LookupLock); err != nil {
		return nil, fmt.Errorf("read connection slot %d: %w", i, err)
	}
	return &c, nil
}

// Path is entry i of the path pool.
func (s *State) Path(i int) (*Path, error) {
	var p Path
	if err := s.path.Lookup(uint32(i), unsafe.Pointer(&p)); err != nil {
		return nil, fmt.Errorf("read path %d: %w", i, err)
	}
	return &p, nil
}

// Regions lists the memory regions that are in use.
func (s *State) Regions() ([]Region, error) {
	var used []Region
	for i := range s.region.MaxEntries() {
		var r Region
		if err := s.region.Lookup(i, unsafe.Pointer(&r)); err != nil {
			return nil, fmt.Errorf("read region %d: %w", i, err)
		}
		if r.Key != 0 {
			used = append(used, r)
		}
	}
	return used, nil
}

// Pump is the pump's registers.
func (s *State) Pump() (*Pump, error) {
	var p Pump
	if err := s.pump.Lookup(uint32(0), unsafe.Pointer(&p)); err != nil {
		return nil, fmt.Errorf("read the pump: %w", err)
	}
	return &p, nil
}

// Egresses lists the transmit rings, by index.
func (s *State) Egresses() ([]Egress, error) {
	var used []Egress
	for i := range s.egress.MaxEntries() {
		var e Egress
		if err := s.egress.Lookup(i, unsafe.Pointer(&e)); err != nil {
			return nil, fmt.Errorf("read egress %d: %w", i, err)
		}
		if e.Ifindex != 0 {
			used = append(used, e)
		}
	}
	return used, nil
}

func ctlBytes(c *Ctl) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(c)), unsafe.Sizeof(*c))
}
