// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"fmt"
	"runtime"

	"github.com/vishvananda/netns"
)

// netNS is the network namespace that a device lives in. Sockets stay in the
// namespace they were made in, so only making them needs it.
type netNS struct{ handle netns.NsHandle }

// currentNetNS is the calling thread's namespace.
func currentNetNS() (netNS, error) {
	h, err := netns.Get()
	if err != nil {
		return netNS{}, fmt.Errorf("network namespace of this thread: %w", err)
	}
	return netNS{handle: h}, nil
}

// do runs f on an OS thread that is in the namespace.
func (n netNS) do(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		before, err := netns.Get()
		if err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("network namespace of this thread: %w", err)
			return
		}
		defer before.Close()
		if before.Equal(n.handle) {
			defer runtime.UnlockOSThread()
			done <- f()
			return
		}
		if err := netns.Set(n.handle); err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("enter network namespace %v: %w", n.handle, err)
			return
		}
		err = f()
		// A thread that cannot go back stays locked: it ends with this goroutine.
		if netns.Set(before) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

func (n netNS) close() {
	if n.handle.IsOpen() {
		_ = n.handle.Close()
	}
}
