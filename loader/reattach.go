// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// attachment is mr_rx on one interface.
type attachment struct {
	ifindex int
	detach  func() error
}

// attachRx attaches mr_rx to an interface, or to the parent of a VLAN interface, in the place of what was
// attached to one of that name before. Close detaches it.
func (o *Objects) attachRx(itf Interface) error {
	name, ifindex := itf.Lower()
	first := len(o.undo)
	if err := o.attach(o.Rx, itf); err != nil {
		return err
	}
	steps := slices.Clone(o.undo[first:])
	o.undo = o.undo[:first]
	now := &attachment{ifindex: ifindex, detach: func() error {
		var errs []error
		for i := len(steps) - 1; i >= 0; i-- {
			errs = append(errs, steps[i]())
		}
		return errors.Join(errs...)
	}}
	before := o.rxOn[name]
	if o.rxOn == nil {
		o.rxOn = map[string]*attachment{}
	}
	o.rxOn[name] = now
	if before != nil {
		// Its interface is gone, so that there is nothing left but the link's descriptor.
		if err := before.detach(); err != nil {
			o.log.Debug("detach from an interface that is gone", "interface", name, "error", err)
		}
		return nil
	}
	o.onClose(func() error { return o.rxOn[name].detach() })
	return nil
}

// Reattach attaches mr_rx to an interface of the device that went away and is there again under its name,
// in the calling thread's network namespace and in the same mode. It returns the interface as it is
// now, which is what the state file says from then on. Errors are Load's; after one nothing has changed.
// Not concurrently with itself, nor with Close.
func (o *Objects) Reattach(ctx context.Context, name string) (Interface, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	i := slices.IndexFunc(o.Interfaces, func(itf Interface) bool { return itf.Name == name })
	if i < 0 {
		return Interface{}, fmt.Errorf("interface %s is not the device's, want one of those that it was loaded with", name)
	}
	itf, l, err := o.lookAgain(o.Interfaces[i])
	if err != nil {
		return Interface{}, err
	}
	if err := ctx.Err(); err != nil {
		return Interface{}, fmt.Errorf("attach to interface %s again: %w", name, err)
	}
	lower, ifindex := itf.Lower()
	if on := o.rxOn[lower]; on == nil || on.ifindex != ifindex || !runs(l, o) {
		if err := checkForeign(itf, l); err != nil {
			return Interface{}, err
		}
		if err := o.attachRx(itf); err != nil {
			return Interface{}, err
		}
	}
	interfaces := slices.Clone(o.Interfaces)
	interfaces[i] = itf
	o.Interfaces = interfaces
	o.mu.Lock()
	o.owner.Interfaces = interfaces
	owner := o.owner
	o.mu.Unlock()
	if err := o.rewrite(owner); err != nil {
		// Only `metaroce status` is wrong then.
		o.log.Warn("state file not brought up to date", "interface", name, "error", err)
	}
	return itf, nil
}

// runs says whether our program is attached to a link.
func runs(l netlink.Link, o *Objects) bool {
	xdp := l.Attrs().Xdp
	info, err := o.Rx.Info()
	if err != nil || xdp == nil || !xdp.Attached {
		return false
	}
	id, ok := info.ID()
	return ok && uint32(id) == xdp.ProgId
}

// lookAgain describes an interface anew, and the link that the program is to be attached to.
func (o *Objects) lookAgain(was Interface) (Interface, netlink.Link, error) {
	inode, err := netnsInode()
	if err != nil {
		return Interface{}, nil, err
	}
	if inode != o.Netns {
		return Interface{}, nil, fmt.Errorf("interface %s: the thread's network namespace is %d, want the device's, %d", was.Name, inode, o.Netns)
	}
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return Interface{}, nil, fmt.Errorf("open netlink: %w", err)
	}
	defer nl.Close()
	scratch := &Objects{log: o.log}
	links, err := scratch.findInterfaces(nl, Options{
		Interfaces: []string{was.Name}, Generic: was.Mode == ModeGeneric, Logger: o.log,
	})
	if err != nil {
		return Interface{}, nil, err
	}
	itf := scratch.Interfaces[0]
	switch before, now := o.lowerOf(was), o.lowerOf(itf); {
	case (was.VLAN != nil) != (itf.VLAN != nil):
		return Interface{}, nil, fmt.Errorf("interface %s: it is now on %s, want it as it was, on %s", was.Name, now, before)
	case now != before:
		// The other parent is not ours.
		return Interface{}, nil, fmt.Errorf("interface %s: its parent is %s, want %s as before", was.Name, now, before)
	}
	return itf, links[0], nil
}

func (o *Objects) lowerOf(itf Interface) string {
	name, _ := itf.Lower()
	return name
}

// rewrite writes the state of all of the device's interfaces anew. The locks stay: they are those of the
// descriptors that claim opened.
func (o *Objects) rewrite(owner Owner) error {
	content, err := json.Marshal(owner)
	if err != nil {
		return fmt.Errorf("encode the state file: %w", err)
	}
	var errs []error
	for _, s := range o.slots() {
		f, err := os.OpenFile(statePath(deviceKey(o.Netns, s.name)), os.O_RDWR, 0)
		if err != nil {
			errs = append(errs, fmt.Errorf("open the state file: %w", err))
			continue
		}
		if err := errors.Join(overwrite(f, content), f.Close()); err != nil {
			errs = append(errs, fmt.Errorf("write the state of %s: %w", s.label, err))
		}
	}
	return errors.Join(errs...)
}
