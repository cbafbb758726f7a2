// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// parkedAlias starts the alias of a parked interface; the device's key and its owner follow.
const parkedAlias = "metaroce device "

// parkedName is derived from the first interface: at most 3 + 10 + 1 characters.
func parkedName(ifindex int) string { return "mrp" + strconv.Itoa(ifindex) + "a" }

// park makes a veth pair that stays down and attaches mr_tx to it. A run of live frames costs
// about 500 us when its program is not in the kernel's XDP dispatcher, which takes programs that
// are attached natively somewhere.
func (o *Objects) park(nl *netlink.Handle) error {
	name := o.owner.Parked
	peer := name[:len(name)-1] + "b"
	// Nobody else derives these names while we hold the first interface: what is there was left
	// by a crash before it could be marked.
	if old, err := nl.LinkByName(name); err == nil && old.Type() == "veth" {
		if err := nl.LinkDel(old); err != nil {
			return fmt.Errorf("remove parked interface %s of a crashed process: %w", name, err)
		}
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	if err := nl.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: peer}); err != nil {
		return fmt.Errorf("make parked veth pair %s, %s: %w", name, peer, err)
	}
	l, err := nl.LinkByName(name)
	if err != nil {
		return fmt.Errorf("look at parked interface %s: %w", name, err)
	}
	o.onClose(func() error {
		if err := nl.LinkDel(l); err != nil && !isGone(err) {
			return fmt.Errorf("remove parked interface %s: %w", name, err)
		}
		return nil
	})
	alias := parkedAlias + o.owner.Device + " pid " + strconv.Itoa(o.owner.PID)
	if err := nl.LinkSetAlias(l, alias); err != nil {
		return fmt.Errorf("mark parked interface %s: %w", name, err)
	}
	o.Parked = Interface{
		Name: name, Index: l.Attrs().Index, MTU: l.Attrs().MTU, MAC: l.Attrs().HardwareAddr.String(),
		Driver: "veth", Mode: ModeNative,
	}
	detach, err := o.attach(o.Tx, o.Parked)
	if err != nil {
		return err
	}
	o.onClose(detach)
	return nil
}

func isGone(err error) bool {
	_, notFound := errors.AsType[netlink.LinkNotFoundError](err)
	return notFound || errors.Is(err, unix.ENODEV)
}
