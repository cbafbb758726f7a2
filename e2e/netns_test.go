// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"runtime"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// newNetNS makes a network namespace without a name, so that it ends with the test or its process, and its
// interfaces with it.
func newNetNS(t *testing.T) (ns netns.NsHandle) {
	t.Helper()
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		var err error
		ns, err = netns.New()
		made <- err
	}()
	if err := <-made; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ns.Close() })
	return ns
}

// inside runs f in a network namespace.
func inside(ns netns.NsHandle, f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		err := netns.Set(ns)
		if err == nil {
			err = f()
		}
		done <- err
	}()
	return <-done
}

// passNatively gives interfaces a program that passes everything to the stack. veth takes redirected frames
// only where the other end polls, as it does with a program; the frames become the stack's packets there.
func passNatively(t *testing.T, ns netns.NsHandle, links ...netlink.Link) {
	t.Helper()
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "pass", Type: ebpf.XDP, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2 /* XDP_PASS */), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer prog.Close()
	err = inside(ns, func() error {
		for _, l := range links {
			x, err := link.AttachXDP(link.XDPOptions{Program: prog, Interface: l.Attrs().Index, Flags: link.XDPDriverMode})
			if err != nil {
				return fmt.Errorf("attach to %s: %w", l.Attrs().Name, err)
			}
			t.Cleanup(func() { _ = x.Close() })
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
