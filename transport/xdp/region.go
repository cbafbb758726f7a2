// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	crand "crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/metaroce/metaroce/loader"
	"github.com/metaroce/metaroce/transport/core"
)

// Region is memory that mr_rx writes into and mr_tx reads from: a mappable array of 64 KiB blocks.
type Region struct {
	e      *Engine
	index  uint32
	key    uint32
	size   uint64
	blocks *ebpf.Map
	mem    []byte
	once   sync.Once
	err    error
}

// AllocRegion makes a zeroed region of size bytes in protection domain pd. Sizes are 1 byte to
// core.MaxRegion; the kernel holds whole blocks of 64 KiB. A region's index is used again only
// after its predecessor's last reader is gone, and with another key.
func (e *Engine) AllocRegion(size uint64, access core.Access, pd uint32) (_ *Region, err error) {
	if size == 0 || size > core.MaxRegion {
		return nil, fmt.Errorf("memory region: size %d bytes, want 1 to %d", size, core.MaxRegion)
	}
	if access&^core.AllAccess != 0 {
		return nil, fmt.Errorf("memory region: access %#x, want bits of %#x only", access, core.AllAccess)
	}
	index, gen, err := e.regions.take()
	if err != nil {
		return nil, fmt.Errorf("memory region of %d bytes: %w", size, err)
	}
	r := &Region{e: e, index: index, key: index<<8 | gen, size: size}
	defer func() {
		if err != nil {
			if r.mem != nil {
				err = errors.Join(err, loader.Munmap(r.mem))
			}
			if r.blocks != nil {
				err = errors.Join(err, r.blocks.Close())
			}
			e.regions.give(index)
		}
	}()
	if r.blocks, err = e.reg.NewRegionMap(size); err != nil {
		return nil, err
	}
	if r.mem, err = loader.Mmap(r.blocks); err != nil {
		return nil, fmt.Errorf("memory region of %d bytes: %w", size, err)
	}
	if err = e.reg.Mem.Put(&index, r.blocks); err != nil {
		return nil, fmt.Errorf("memory region of %d bytes: index %d: %w", size, index, err)
	}
	w := loader.Region{Key: r.key, Pd: pd, Access: uint32(access), Base: r.Addr(), Len: size}
	if err = e.reg.Region.Put(&index, &w); err != nil {
		return nil, errors.Join(fmt.Errorf("memory region of %d bytes: index %d: %w", size, index, err), e.reg.Mem.Delete(&index))
	}
	e.mu.Lock()
	e.regionSet[r] = struct{}{}
	e.mu.Unlock()
	return r, nil
}

// Bytes is the region's memory. It must not be used after Close.
func (r *Region) Bytes() []byte { return r.mem[:r.size:r.size] }

// Addr is what work requests and peers call the first byte.
func (r *Region) Addr() uint64 { return uint64(uintptr(unsafe.Pointer(&r.mem[0]))) }

// Key is the region's lkey and rkey: index << 8 | generation.
func (r *Region) Key() uint32 { return r.key }

// Close takes the region away from the kernel, waits until no CPU uses it any more and unmaps it.
func (r *Region) Close() error {
	r.once.Do(func() { r.err = r.close() })
	return r.err
}

func (r *Region) close() error {
	r.e.mu.Lock()
	delete(r.e.regionSet, r)
	r.e.mu.Unlock()
	// A region whose entry could not be removed is never unmapped or used again: leaking it is
	// the lesser evil.
	if err := r.e.reg.Region.Put(&r.index, &loader.Region{}); err != nil {
		return fmt.Errorf("memory region %#x: clear entry: %w", r.key, err)
	}
	if err := r.e.reg.Mem.Delete(&r.index); err != nil { // waits for readers
		return fmt.Errorf("memory region %#x: delete blocks: %w", r.key, err)
	}
	err := errors.Join(loader.Munmap(r.mem), r.blocks.Close())
	r.mem = nil
	r.e.regions.give(r.index)
	if err != nil {
		return fmt.Errorf("memory region %#x: %w", r.key, err)
	}
	return nil
}

// indexes hands out table indexes with a generation, the longest unused first, so that a
// generation comes back as late as can be. The order and each index's first generation are random:
// what has been handed out before, here or in an earlier process, tells nobody what comes next.
type indexes struct {
	mu   sync.Mutex
	what string
	free []uint32
	gen  []uint32
	mask uint32 // of the generation
	min  uint32 // the first generation
}

func newIndexes(what string, first, n int, mask, minGen uint32) *indexes {
	x := &indexes{what: what, gen: make([]uint32, n), mask: mask, min: minGen}
	for i := first; i < n; i++ {
		x.free = append(x.free, uint32(i))
		x.gen[i] = minGen + random(mask-minGen+1)
	}
	for i := len(x.free) - 1; i > 0; i-- {
		j := random(uint32(i + 1))
		x.free[i], x.free[j] = x.free[j], x.free[i]
	}
	return x
}

// random is below n, which is not 0, and cannot be foretold.
func random(n uint32) uint32 {
	var b [8]byte
	crand.Read(b[:])                                            // never fails
	return uint32(binary.NativeEndian.Uint64(b[:]) % uint64(n)) // 2^64 is so much more than n that all are alike
}

func (x *indexes) take() (index, gen uint32, err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if len(x.free) == 0 {
		return 0, 0, fmt.Errorf("all %d %s are in use", len(x.gen), x.what)
	}
	index, x.free = x.free[0], x.free[1:]
	return index, x.gen[index], nil
}

func (x *indexes) give(index uint32) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.gen[index] = (x.gen[index] + 1) & x.mask; x.gen[index] < x.min {
		x.gen[index] = x.min
	}
	x.free = append(x.free, index)
}

// ranges hands out contiguous entries of the path pool, first fit.
type ranges struct {
	mu   sync.Mutex
	used []bool
}

func (p *ranges) take(n int) (base int, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	run, free := 0, 0
	for i, used := range p.used {
		if used {
			run = 0
			continue
		}
		free++
		if run++; run == n {
			for j := i - n + 1; j <= i; j++ {
				p.used[j] = true
			}
			return i - n + 1, nil
		}
	}
	return 0, fmt.Errorf("path pool: %d of %d entries are free, none %d in a row", free, len(p.used), n)
}

func (p *ranges) give(base, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := base; i < base+n; i++ {
		p.used[i] = false
	}
}
