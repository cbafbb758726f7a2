// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"runtime"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// spinsBeforeYield is how often spin looks before it lets others have the CPU:
	// with as many pumps and pollers as CPUs, who is waited for might not run.
	spinsBeforeYield = 2000
	spinsPerCheck    = 64 // looks between two looks at the context
)

// spin calls ready until it says true, ctx ends or over is closed. It does not
// sleep.
func spin(ctx context.Context, over <-chan struct{}, ready func() bool) error {
	for i := 1; ; i++ {
		if ready() {
			return nil
		}
		if i%spinsPerCheck == 0 {
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-over:
				// What came just before counts.
				if ready() {
					return nil
				}
				return errOver
			default:
			}
		}
		if i%spinsBeforeYield == 0 {
			schedYield()
			runtime.Gosched()
		}
	}
}

// schedYield is sched_yield(2). It fails never.
func schedYield() { _, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }

// loadByte reads b[i] as another program or the kernel writes it. b starts at a
// multiple of four, as mapped memory does, and ends at one.
func loadByte(b []byte, i int) byte {
	word := atomic.LoadUint32((*uint32)(unsafe.Pointer(&b[i&^3])))
	return byte(word >> (8 * (i & 3)))
}
