// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"
	"strings"

	"github.com/vishvananda/netlink"
)

// Below is the interface below a macvlan interface. The programs are attached there: it sees the
// frames for the macvlan's link address first, and the macvlan itself has no driver that could run XDP.
type Below struct {
	Name  string `json:"name"`
	Index int    `json:"ifindex"`
	MTU   int    `json:"mtu"` // bytes of an IP packet
}

// Kinds of interfaces that cannot be a plane, by the kernel's name, and why.
var unfit = map[string]struct{ is, want string }{
	"bond":      {"a bond, which takes no frames from XDP", "its members as planes, out of the bond and each with an address of its own"},
	"team":      {"a team, which takes no frames from XDP", "its ports as planes, out of the team and each with an address of its own"},
	"bridge":    {"a bridge, which takes no frames from XDP", "the port that leads to the peer, with an address of its own"},
	"ipvlan":    {"an ipvlan, which shares its parent's link address", "its parent"},
	"macvtap":   {"a macvtap, whose frames belong to a virtual machine", "its parent"},
	"ipvtap":    {"an ipvtap, whose frames belong to a virtual machine", "its parent"},
	"wireguard": {"a tunnel, which carries no Ethernet frames", "the interface that its packets leave by"},
	"vxlan":     {"a tunnel, which takes no frames from XDP", "the interface that its packets leave by"},
	"geneve":    {"a tunnel, which takes no frames from XDP", "the interface that its packets leave by"},
	"gre":       {"a tunnel, which carries no Ethernet frames", "the interface that its packets leave by"},
	"gretap":    {"a tunnel, which takes no frames from XDP", "the interface that its packets leave by"},
	"ipip":      {"a tunnel, which carries no Ethernet frames", "the interface that its packets leave by"},
	"sit":       {"a tunnel, which carries no Ethernet frames", "the interface that its packets leave by"},
}

// checkKind refuses interfaces that no program could send by, whatever the mode, and names what to
// give instead. related are the interfaces' members or ports, or the one below.
func checkKind(l netlink.Link, related func() []string) error {
	a := l.Attrs()
	kind, found := unfit[l.Type()]
	if tun, ok := l.(*netlink.Tuntap); ok && (tun.Mode == netlink.TUNTAP_MODE_TUN || len(a.HardwareAddr) == 0) {
		kind, found = unfit["wireguard"], true
	}
	if !found {
		return nil
	}
	names := ""
	if list := related(); len(list) > 0 {
		names = " (" + strings.Join(list, ", ") + ")"
	}
	return fmt.Errorf("interface %s is %s, want %s%s: %w", a.Name, kind.is, kind.want, names, ErrUnsupported)
}

// relatives names the interfaces that l has as members, or the one below it.
func relatives(nl *netlink.Handle, l netlink.Link) []string {
	links, err := nl.LinkList()
	if err != nil {
		return nil // only for a better error
	}
	a := l.Attrs()
	var names []string
	for _, other := range links {
		o := other.Attrs()
		if o.MasterIndex == a.Index && o.Index != a.Index || o.Index == a.ParentIndex && a.NetNsID < 0 {
			names = append(names, o.Name)
		}
	}
	return names
}

// belowMacvlan looks up the interface below a macvlan interface.
func belowMacvlan(nl *netlink.Handle, v *netlink.Macvlan) (netlink.Link, error) {
	if v.NetNsID >= 0 {
		return nil, fmt.Errorf("interface %s: its parent is in another network namespace (netnsid %d), want it in this one, or an SR-IOV VF or a veth here: %w",
			v.Name, v.NetNsID, ErrUnsupported)
	}
	parent, err := nl.LinkByIndex(v.ParentIndex)
	if err != nil {
		return nil, fmt.Errorf("interface %s: its parent, ifindex %d: %w", v.Name, v.ParentIndex, err)
	}
	if parent.Type() == "vlan" {
		return nil, fmt.Errorf("interface %s: its parent %s is a VLAN interface, want a macvlan of the interface itself, or the VLAN interface: %w",
			v.Name, parent.Attrs().Name, ErrUnsupported)
	}
	return parent, nil
}
