// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/loader"
)

// psnLimit is MR_PSN_LIMIT of bpf/mr_types.h: how far a stream's psn may be ahead of what has
// arrived before the first ACK says so.
const psnLimit = 8192 - 64

// validWord is MR_VALID: what a completion slot holds once record n stands in it.
func validWord(n uint32) uint64 { return 1<<32 | uint64(n) }

// after says whether a comes after b in serial arithmetic (RFC 1982).
func after(a, b uint32) bool { return int32(a-b) > 0 }

// mapOne maps a mappable array and views its first value as a T. The view ends when mem is unmapped.
func mapOne[T any](m *ebpf.Map) (words *T, mem []byte, err error) {
	if want := uint32(unsafe.Sizeof(*words)); m.ValueSize() != want {
		return nil, nil, fmt.Errorf("%v: values have %d bytes, want %d", m, m.ValueSize(), want)
	}
	if mem, err = loader.Mmap(m); err != nil {
		return nil, nil, err
	}
	return (*T)(unsafe.Pointer(&mem[0])), mem, nil
}

// clock reads CLOCK_MONOTONIC in ns, which is what bpf_ktime_get_ns reads, without a system call.
type clock struct {
	base  int64
	start time.Time
}

func newClock() (clock, error) {
	var ts unix.Timespec
	c := clock{start: time.Now()}
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return c, fmt.Errorf("read CLOCK_MONOTONIC: %w", err)
	}
	c.base = ts.Nano()
	return c, nil
}

func (c clock) now() int64 { return c.base + int64(time.Since(c.start)) }

// errNoConn: the slot holds another connection by now, or none.
var errNoConn = errors.New("no such connection in the kernel")

// control runs mr_ctl once: the only way to change what stands under a connection's lock.
func (e *Engine) control(c loader.Ctl) error {
	ret, err := e.reg.RunControl(c)
	if err != nil {
		return fmt.Errorf("connection %#x: %w", c.Qpn, err)
	}
	switch ret {
	case loader.CtlOK:
		return nil
	case loader.CtlLimit:
		// Re-rolled as far ahead of the peer as it may be: the policy tries again later.
		return nil
	case loader.CtlNoConn:
		return fmt.Errorf("connection %#x in slot %d: %w", c.Qpn, c.Slot, errNoConn)
	}
	return fmt.Errorf("connection %#x: mr_ctl operation %d (path %d, value %d) returned %d, want %d",
		c.Qpn, c.Op, c.Path, c.Value, ret, loader.CtlOK)
}

// lookupConn reads a connection's registers under its lock.
func (e *Engine) lookupConn(slot uint32, into *loader.Conn) error {
	if err := e.reg.Conn.LookupWithFlags(&slot, into, ebpf.LookupLock); err != nil {
		return fmt.Errorf("read connection in slot %d: %w", slot, err)
	}
	return nil
}

// bell is how user space tells the pump that a connection has work: the ready ring of struct mr_pump.
type bell struct {
	words *loader.Pump
	wake  func() // called when the pump was asleep
}

// ring marks slot ready and wakes the pump if it sleeps. What the connection has to send must
// have been published before. The order (ready, ring, sleeping) is the one that bpf/mr_types.h
// lays down: the exchange of ready is a full barrier, so that either the pump sees the work when
// it looks again after publishing `sleeping`, or `sleeping` is seen here.
func (b bell) ring(slot uint32) {
	w := b.words
	if atomic.SwapUint32(&w.Ready[slot%uint32(loader.MaxConns)], 1) == 0 {
		t := atomic.AddUint32(&w.Tail, 1) - 1
		atomic.SwapUint32(&w.Ring[t%uint32(len(w.Ring))], slot+1)
	}
	if atomic.LoadUint32(&w.Sleeping) == 1 && atomic.SwapUint32(&w.Sleeping, 0) == 1 {
		b.wake()
	}
}
