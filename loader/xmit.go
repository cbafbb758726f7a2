// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"encoding/binary"
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// The generic netlink family "netdev", include/uapi/linux/netdev.h, Linux 6.3 and later.
const (
	netdevCmdDevGet       = 1
	netdevAttrIfindex     = 1
	netdevAttrXDPFeatures = 3
	xdpFeatureNdoXmit     = 4 // NETDEV_XDP_ACT_NDO_XMIT: takes redirected frames
)

// checkSends looks, now that the program is there, whether what mr_tx redirects to an interface leaves.
// In native mode a driver that takes no redirected frames is an error. In generic mode it is a
// warning: the device receives and acknowledges there.
func (o *Objects) checkSends(h *netlink.Handle, itf Interface) error {
	name, index := itf.Lower()
	features, err := xdpFeatures(index)
	if err != nil {
		o.log.Debug("cannot ask for XDP features", "interface", name, "error", err)
	}
	takes := features&xdpFeatureNdoXmit != 0
	switch {
	case itf.Driver == "veth":
		return o.checkVeth(h, itf, takes)
	case err != nil || takes:
		return nil
	case itf.Mode == ModeNative:
		return fmt.Errorf("%s: driver %s takes no redirected frames (XDP features %#x without ndo-xmit), so that nothing could be sent, want a driver that does: %w",
			itf.label(), itf.Driver, features, ErrUnsupported)
	}
	o.log.Warn("the driver takes no redirected frames: this interface can receive but not send",
		"interface", name, "driver", itf.Driver, "xdp_features", fmt.Sprintf("%#x", features))
	return nil
}

// checkVeth compares the two ends of a veth pair. One end takes redirected frames from the other if it
// polls: with a program in native mode, or with GRO on. A pair whose other end has no program yet is
// not judged: it may get one.
func (o *Objects) checkVeth(h *netlink.Handle, itf Interface, takes bool) error {
	name, _ := itf.Lower()
	l, err := h.LinkByName(name)
	if err != nil {
		return fmt.Errorf("%s: %w", itf.label(), err)
	}
	peer, err := vethPeer(h, l)
	if err != nil {
		o.log.Debug("cannot look at the other end of a veth pair", "interface", name, "error", err)
		return nil
	}
	theirs := xdpMode(peer.Attrs())
	if theirs == "" {
		o.log.Info("what is sent arrives once the veth pair's other end has XDP too", "interface", name, "peer", peer.Attrs().Name)
		return nil
	}
	sends := theirs == ModeNative || takes
	receives := itf.Mode == ModeNative || hasGRO(name)
	if sends && receives {
		return nil
	}
	return fmt.Errorf("%s: XDP is in %s mode here and in %s mode at the veth pair's other end (%s, ifindex %d%s), where nothing would pass; want native at both ends: %w",
		itf.label(), itf.Mode, theirs, peer.Attrs().Name, peer.Attrs().Index, whereOf(l), ErrUnsupported)
}

func whereOf(l netlink.Link) string {
	if id := l.Attrs().NetNsID; id >= 0 {
		return fmt.Sprintf(", network namespace id %d", id)
	}
	return ""
}

// vethPeer looks at a veth's other end, in whatever network namespace it is.
func vethPeer(h *netlink.Handle, l netlink.Link) (netlink.Link, error) {
	a := l.Attrs()
	if a.NetNsID < 0 {
		return h.LinkByIndex(a.ParentIndex)
	}
	req := nl.NewNetlinkRequest(unix.RTM_GETLINK, unix.NLM_F_ACK)
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index = int32(a.ParentIndex)
	req.AddData(msg)
	req.AddData(nl.NewRtAttr(unix.IFLA_TARGET_NETNSID, nl.Uint32Attr(uint32(a.NetNsID))))
	msgs, err := req.Execute(unix.NETLINK_ROUTE, 0)
	if err != nil {
		return nil, fmt.Errorf("ifindex %d in network namespace id %d: %w", a.ParentIndex, a.NetNsID, err)
	}
	if len(msgs) != 1 {
		return nil, fmt.Errorf("ifindex %d in network namespace id %d: %d answers, want 1", a.ParentIndex, a.NetNsID, len(msgs))
	}
	return netlink.LinkDeserialize(nil, msgs[0])
}

// xdpMode is in which mode an interface has an XDP program, "" if it has none.
func xdpMode(a *netlink.LinkAttrs) string {
	if a.Xdp == nil || !a.Xdp.Attached {
		return ""
	}
	switch a.Xdp.AttachMode {
	case nl.XDP_ATTACHED_DRV:
		return ModeNative
	case nl.XDP_ATTACHED_SKB:
		return ModeGeneric
	case nl.XDP_ATTACHED_HW:
		return "offloaded"
	}
	return "several" // XDP_ATTACHED_MULTI
}

// hasGRO says whether an interface has generic receive offload on.
func hasGRO(name string) bool {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer func() { _ = unix.Close(s) }()
	on, err := ethtoolValue(s, name, unix.ETHTOOL_GGRO, 0)
	return err == nil && on != 0
}

// xdpFeatures asks the kernel what XDP can do on an interface of the thread's network namespace.
func xdpFeatures(ifindex int) (uint64, error) {
	family, err := netlink.GenlFamilyGet("netdev")
	if err != nil {
		return 0, fmt.Errorf("generic netlink family netdev (Linux 6.3): %w", err)
	}
	req := nl.NewNetlinkRequest(int(family.ID), 0)
	// Not nl.Genlmsg: it sends what lies behind it in memory as the header's reserved bytes, which
	// this family wants to be 0.
	req.AddRawData(append([]byte{netdevCmdDevGet, uint8(family.Version), 0, 0},
		nl.NewRtAttr(netdevAttrIfindex, nl.Uint32Attr(uint32(ifindex))).Serialize()...))
	msgs, err := req.Execute(unix.NETLINK_GENERIC, 0)
	if err != nil {
		return 0, fmt.Errorf("XDP features of ifindex %d: %w", ifindex, err)
	}
	for _, m := range msgs {
		if len(m) < nl.SizeofGenlmsg {
			continue
		}
		attrs, err := nl.ParseRouteAttr(m[nl.SizeofGenlmsg:])
		if err != nil {
			return 0, fmt.Errorf("XDP features of ifindex %d: %w", ifindex, err)
		}
		for _, a := range attrs {
			if a.Attr.Type == netdevAttrXDPFeatures && len(a.Value) >= 8 {
				return binary.NativeEndian.Uint64(a.Value), nil
			}
		}
	}
	return 0, fmt.Errorf("XDP features of ifindex %d: the kernel's answer has none", ifindex)
}
