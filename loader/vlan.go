// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"runtime"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ethFlagRxVLAN is ETH_FLAG_RXVLAN of include/uapi/linux/ethtool.h: received tags are taken off the
// frame before anybody sees it.
const ethFlagRxVLAN = 1 << 8

// ethFlagLRO is ETH_FLAG_LRO: received packets are merged by the hardware.
const ethFlagLRO = 1 << 15

// VLAN is the tag of a VLAN interface and the interface below it. A VLAN interface has no driver that
// could run XDP: the programs are attached to its parent, and frames leave there with their tag.
type VLAN struct {
	ID          uint16            `json:"id"` // VID, 12 bits
	Parent      string            `json:"parent"`
	ParentIndex int               `json:"parent_ifindex"`
	ParentMTU   int               `json:"parent_mtu"`           // bytes of an IP packet
	Egress      map[uint32]uint32 `json:"egress_qos,omitempty"` // kernel's packet priority to PCP
}

// Lower is the interface that the programs are attached to: this one, or the parent of a VLAN or
// macvlan interface.
func (i Interface) Lower() (name string, ifindex int) {
	switch {
	case i.VLAN != nil:
		return i.VLAN.Parent, i.VLAN.ParentIndex
	case i.Macvlan != nil:
		return i.Macvlan.Name, i.Macvlan.Index
	}
	return i.Name, i.Index
}

// Sends says whether a path's packets leave by this interface: with its tag, if it is a VLAN interface.
func (i Interface) Sends(p *Path) bool {
	_, index := i.Lower()
	if uint32(index) != p.Ifindex {
		return false
	}
	if i.Macvlan != nil && net.HardwareAddr(p.Tmpl[6:12]).String() != i.MAC {
		return false
	}
	tagged := binary.BigEndian.Uint16(p.Tmpl[12:]) == unix.ETH_P_8021Q
	if i.VLAN == nil || !tagged {
		return i.VLAN == nil && !tagged
	}
	return binary.BigEndian.Uint16(p.Tmpl[14:])&0xfff == i.VLAN.ID
}

func (i Interface) lowerMTU() int {
	switch {
	case i.VLAN != nil:
		return i.VLAN.ParentMTU
	case i.Macvlan != nil:
		return i.Macvlan.MTU
	}
	return i.MTU
}

// label names the interface whose XDP slot is taken, and for which other one.
func (i Interface) label() string {
	if lower, _ := i.Lower(); lower != i.Name {
		return fmt.Sprintf("interface %s (parent of %s)", lower, i.Name)
	}
	return "interface " + i.Name
}

// below looks up the interface below a VLAN interface.
func below(nl *netlink.Handle, v *netlink.Vlan) (netlink.Link, error) {
	if p := v.VlanProtocol; p != netlink.VLAN_PROTOCOL_8021Q && p != netlink.VLAN_PROTOCOL_UNKNOWN {
		return nil, fmt.Errorf("interface %s: VLAN protocol is %v, want 802.1Q: %w", v.Name, p, ErrUnsupported)
	}
	if v.NetNsID >= 0 {
		return nil, fmt.Errorf("interface %s: its parent is in another network namespace (netnsid %d), want it in this one: %w",
			v.Name, v.NetNsID, ErrUnsupported)
	}
	parent, err := nl.LinkByIndex(v.ParentIndex)
	if err != nil {
		return nil, fmt.Errorf("interface %s: its parent, ifindex %d: %w", v.Name, v.ParentIndex, err)
	}
	if parent.Type() == "macvlan" {
		return nil, fmt.Errorf("interface %s: its parent %s is a macvlan, want a VLAN of the interface itself: %w",
			v.Name, parent.Attrs().Name, ErrUnsupported)
	}
	if parent.Type() == v.Type() {
		return nil, fmt.Errorf("interface %s: its parent %s is a VLAN interface too (QinQ), want one tag: %w",
			v.Name, parent.Attrs().Name, ErrUnsupported)
	}
	return parent, nil
}

// checkTagsStay refuses a parent that takes tags off received frames: an ACK is the received frame
// turned round, and would leave without one. veth keeps the tags of frames that XDP sent.
func checkTagsStay(itf Interface) error {
	if itf.Driver == "veth" {
		return nil
	}
	strips, err := stripsTags(itf.VLAN.Parent)
	if err != nil {
		return fmt.Errorf("%s: ask for VLAN offload: %w", itf.label(), err)
	}
	if strips {
		return fmt.Errorf("%s: rx-vlan-offload is on, want it off (ethtool -K %s rxvlan off), since ACKs are received frames turned round: %w",
			itf.label(), itf.VLAN.Parent, ErrUnsupported)
	}
	return nil
}

// stripsTags asks for rx-vlan-offload. A driver that knows no flags strips nothing.
func stripsTags(name string) (bool, error) {
	if len(name) >= unix.IFNAMSIZ {
		return false, fmt.Errorf("interface name %q has %d bytes, want at most %d", name, len(name), unix.IFNAMSIZ-1)
	}
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false, fmt.Errorf("open a socket: %w", err)
	}
	defer func() { _ = unix.Close(s) }()
	flags, err := ethtoolValue(s, name, unix.ETHTOOL_GFLAGS, 0)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return false, nil
	}
	return flags&ethFlagRxVLAN != 0, err
}

// ethtoolValue runs an ethtool command that takes and gives one word (struct ethtool_value).
func ethtoolValue(socket int, name string, cmd, data uint32) (uint32, error) {
	value := struct{ cmd, data uint32 }{cmd, data}
	ifr := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte // struct ifreq is 40 bytes on 64-bit machines
	}{data: unsafe.Pointer(&value)}
	copy(ifr.name[:], name)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(socket), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&ifr)))
	runtime.KeepAlive(&value)
	if errno != 0 {
		return 0, errno
	}
	return value.data, nil
}
