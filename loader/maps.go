// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// NewQPage makes the queues of one connection: an inner map for mr_qp. The caller maps it with
// Mmap, puts it into QP and closes it.
func (o *Objects) NewQPage() (*ebpf.Map, error) {
	m, err := ebpf.NewMap(o.qpInner.Copy())
	if err != nil {
		return nil, fmt.Errorf("make a connection's queues (map of %d bytes): %w", o.qpInner.ValueSize, err)
	}
	return m, nil
}

// NewRegionMap makes a memory region of at least size bytes, in whole blocks of BlockBytes: an
// inner map for mr_mem. The caller maps it with Mmap, puts it into Mem and closes it.
func (o *Objects) NewRegionMap(size uint64) (*ebpf.Map, error) {
	blocks := (size + BlockBytes - 1) / BlockBytes
	if size == 0 || blocks > 1<<16 {
		return nil, fmt.Errorf("make a memory region: size is %d bytes, want 1 to %d", size, uint64(1<<16)*BlockBytes)
	}
	spec := o.memInner.Copy()
	spec.MaxEntries = uint32(blocks)
	m, err := ebpf.NewMap(spec)
	if err != nil {
		return nil, fmt.Errorf("make a memory region of %d bytes: %w", size, err)
	}
	return m, nil
}

// Mmap maps all entries of a mappable array into this process, read and write. It lasts until
// Munmap, also when m is closed.
func Mmap(m *ebpf.Map) ([]byte, error) {
	page := uint64(os.Getpagesize())
	size := (uint64(m.ValueSize()+7)&^7*uint64(m.MaxEntries()) + page - 1) &^ (page - 1)
	b, err := unix.Mmap(m.FD(), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes of %v: %w", size, m, err)
	}
	return b, nil
}

// Munmap ends a mapping that Mmap made.
func Munmap(b []byte) error {
	if err := unix.Munmap(b); err != nil {
		return fmt.Errorf("unmap %d bytes: %w", len(b), err)
	}
	return nil
}
