// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"context"
	"errors"
	"fmt"
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

// attachRx attaches mr_rx to an interface, or to the one below it. Close detaches it, or what is there in
// its place by then.
func (o *Objects) attachRx(itf Interface) error {
	name, ifindex := itf.Lower()
	detach, err := o.attach(o.Rx, itf)
	if err != nil {
		return err
	}
	o.rxOn[name] = attachment{ifindex, detach}
	o.onClose(func() error { return o.rxOn[name].detach() })
	return nil
}

// Reattach attaches mr_rx to an interface of the device that went away and is there again under its name,
// in the calling thread's network namespace and in the same mode. Before it attaches, it asks fits whether
// the device can use its interfaces as they are now, of which number i is new. It returns the interface as
// it is now, which is what the state file says from then on. Errors are Load's and those of fits; after
// one nothing has changed. Not concurrently with itself, nor with Close.
func (o *Objects) Reattach(ctx context.Context, name string, fits func(interfaces []Interface, i int) error) (Interface, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	i := slices.IndexFunc(o.Interfaces, func(itf Interface) bool { return itf.Name == name })
	if i < 0 {
		return Interface{}, fmt.Errorf("interface %s is not the device's, want one of those that it was loaded with", name)
	}
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return Interface{}, fmt.Errorf("open netlink: %w", err)
	}
	defer nl.Close()
	itf, l, err := o.findAgain(nl, o.Interfaces[i])
	if err != nil {
		return Interface{}, err
	}
	interfaces := slices.Clone(o.Interfaces)
	interfaces[i] = itf
	if err := fits(interfaces, i); err != nil {
		return Interface{}, err
	}
	if err := ctx.Err(); err != nil {
		return Interface{}, fmt.Errorf("attach to interface %s again: %w", name, err)
	}
	if err := o.attachAgain(nl, itf, l); err != nil {
		return Interface{}, err
	}
	o.Interfaces = interfaces
	o.mu.Lock()
	o.owner.Interfaces = interfaces
	o.mu.Unlock()
	if err := o.writeState(); err != nil {
		// Only `metaroce status` is wrong then.
		o.log.Warn("state file not brought up to date", "interface", name, "error", err)
	}
	return itf, nil
}

// findAgain describes an interface anew, and the link that the program is to be attached to.
func (o *Objects) findAgain(nl *netlink.Handle, was Interface) (Interface, netlink.Link, error) {
	inode, err := netnsInode()
	if err != nil {
		return Interface{}, nil, err
	}
	if inode != o.Netns {
		return Interface{}, nil, fmt.Errorf("interface %s: the thread's network namespace is %d, want the device's, %d", was.Name, inode, o.Netns)
	}
	itf, l, err := findInterface(nl, was.Name)
	if err != nil {
		return Interface{}, nil, err
	}
	itf.Mode = was.Mode
	// Another interface below it is not ours, and a path's template has room for its tag or has none.
	before, _ := was.Lower()
	now, _ := itf.Lower()
	if now != before || (was.VLAN != nil) != (itf.VLAN != nil) {
		return Interface{}, nil, fmt.Errorf("interface %s: its packets leave by %s (VLAN %v), want it as it was, by %s (VLAN %v)",
			was.Name, now, itf.VLAN != nil, before, was.VLAN != nil)
	}
	return itf, l, nil
}

// attachAgain attaches mr_rx in the place of what was attached to an interface of that name, unless it
// was done already for another interface above it.
func (o *Objects) attachAgain(nl *netlink.Handle, itf Interface, l netlink.Link) error {
	name, ifindex := itf.Lower()
	was := o.rxOn[name]
	if was.ifindex == ifindex && o.runsOn(l) {
		return o.checkSends(nl, itf)
	}
	if err := checkForeign(itf, l); err != nil {
		return err
	}
	detach, err := o.attach(o.Rx, itf)
	if err != nil {
		return err
	}
	if err := o.checkSends(nl, itf); err != nil {
		return errors.Join(err, detach())
	}
	o.rxOn[name] = attachment{ifindex, detach}
	if err := o.moveEgress(was.ifindex, ifindex); err != nil {
		// The program is attached and sends: only what the ring drops is not seen.
		o.log.Warn("what its transmit ring drops is not seen any more", "interface", name, "error", err)
	}
	// The former interface is gone, so that there is nothing left but the link's descriptor.
	if err := was.detach(); err != nil {
		o.log.Debug("detach from an interface that is gone", "interface", name, "error", err)
	}
	return nil
}

// runsOn says whether our program is attached to a link.
func (o *Objects) runsOn(l netlink.Link) bool {
	xdp := l.Attrs().Xdp
	info, err := o.Rx.Info()
	if err != nil || xdp == nil || !xdp.Attached {
		return false
	}
	id, ok := info.ID()
	return ok && uint32(id) == xdp.ProgId
}
