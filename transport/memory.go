// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"fmt"
	"math"
	"sync/atomic"
)

// Memory is a region that requests read from and, given the right, that peers
// write into. Methods may be called from any goroutine.
type Memory struct {
	dev  *Device
	pd   *PD
	reg  region
	size uint64
	addr uint64
	key  uint32

	refs atomic.Int64 // requests outstanding; negative once closed
}

// PD is the domain that the memory is in.
func (m *Memory) PD() *PD { return m.pd }

// Bytes is the memory itself. It must not be touched after Close: it is unmapped
// then.
func (m *Memory) Bytes() []byte { return m.reg.Bytes() }

// Addr is what a peer calls the first byte.
func (m *Memory) Addr() uint64 { return m.addr }

// LKey is the region's key in requests of this end.
func (m *Memory) LKey() uint32 { return m.key }

// RKey is the region's key in requests of peers. It is of use to them only with
// a remote right.
func (m *Memory) RKey() uint32 { return m.key }

// memClosed is what refs is near to once the memory is closed, whatever hold adds.
const memClosed = math.MinInt64 / 2

// hold keeps the memory from being closed while a request uses it.
func (m *Memory) hold() error {
	if m.refs.Add(1) <= 0 {
		m.refs.Add(-1)
		return fmt.Errorf("memory with key %#x: %w", m.key, ErrClosed)
	}
	return nil
}

func (m *Memory) unhold() { m.refs.Add(-1) }

// Close gives the memory back. Its key is invalid from then on: a peer that
// still writes gets a remote access error. While requests of this end use the
// memory, that is until their completions have been polled or their connection is
// over, Close returns ErrMemoryInUse and does nothing. A second Close returns nil.
func (m *Memory) Close() error {
	if !m.refs.CompareAndSwap(0, memClosed) {
		n := m.refs.Load()
		if n < 0 {
			return nil
		}
		return fmt.Errorf("memory with key %#x: %w by %d outstanding requests", m.key, ErrMemoryInUse, n)
	}
	if m.dev.begin() != nil {
		return nil // the device's Close releases it
	}
	defer m.dev.pending.Done()
	m.dev.mu.Lock()
	delete(m.dev.mems, m)
	m.dev.mu.Unlock()
	err := m.reg.Close()
	m.pd.drop(&m.pd.mems) // the domain's number may be another one's from here on
	return err
}

// release is the device's Close: no connection is left that could use the memory.
func (m *Memory) release() error {
	m.refs.Store(memClosed)
	return m.reg.Close()
}
