// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"encoding/binary"
	"fmt"
	"log/slog"

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

// warnIfCannotSend tells when a driver without native XDP takes no redirected frames either: the
// device receives and acknowledges there, but what mr_tx sends is lost. veth decides that anew
// whenever a program comes or goes at its peer, so that asking it means nothing.
func warnIfCannotSend(log *slog.Logger, itf Interface) {
	if itf.Driver == "veth" {
		return
	}
	name, index := itf.Lower()
	features, err := xdpFeatures(index)
	if err != nil {
		log.Debug("cannot ask for XDP features", "interface", name, "error", err)
		return
	}
	if features&xdpFeatureNdoXmit == 0 {
		log.Warn("the driver takes no redirected frames: this interface can receive but not send",
			"interface", name, "driver", itf.Driver, "xdp_features", fmt.Sprintf("%#x", features))
	}
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
