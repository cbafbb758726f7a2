// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const (
	// neighProtocol (NDA_PROTOCOL, Linux 5.0) marks the neighbours that the kernel manages for us, so
	// that those of a process that was killed can be told from an administrator's. iproute2 shows it
	// as "proto 77"; no routing daemon of its rt_protos has the number.
	neighProtocol = 77
	// protocolKernel takes the mark away; 0 would leave it.
	protocolKernel = unix.RTPROT_KERNEL
)

// neighbours changes the kernel's neighbour tables, with the attributes that the netlink package
// does not know.
type neighbours struct {
	sockets map[int]*nl.SocketHandle
}

func (n *neighbours) request(msgType, flags int, msg *netlink.Ndmsg) *nl.NetlinkRequest {
	req := nl.NewNetlinkRequest(msgType, flags)
	req.Sockets = n.sockets
	req.AddData(msg)
	return req
}

// about is a request about one neighbour.
func (n *neighbours) about(msgType, flags, ifindex int, a netip.Addr, state uint16, ndFlags uint8) *nl.NetlinkRequest {
	family := unix.AF_INET
	if a.Is6() {
		family = unix.AF_INET6
	}
	req := n.request(msgType, flags, &netlink.Ndmsg{Family: uint8(family), Index: uint32(ifindex), State: state, Flags: ndFlags})
	req.AddData(nl.NewRtAttr(netlink.NDA_DST, a.AsSlice()))
	return req
}

const writeFlags = unix.NLM_F_CREATE | unix.NLM_F_REPLACE | unix.NLM_F_ACK

// manage makes the kernel resolve a neighbour and keep its link address fresh (NTF_EXT_MANAGED,
// Linux 5.16); or, if not on, resolve it once more and then treat it as any other. mark says whether it
// becomes, or was, ours.
func (n *neighbours) manage(ifindex int, a netip.Addr, on, mark bool) error {
	protocol := uint8(protocolKernel)
	req := n.about(unix.RTM_NEWNEIGH, writeFlags, ifindex, a, unix.NUD_NONE, netlink.NTF_USE)
	if on {
		protocol = neighProtocol
		req.AddData(nl.NewRtAttr(netlink.NDA_FLAGS_EXT, nl.Uint32Attr(netlink.NTF_EXT_MANAGED)))
	}
	if mark {
		req.AddData(nl.NewRtAttr(netlink.NDA_PROTOCOL, nl.Uint8Attr(protocol)))
	}
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// forget takes a neighbour's link address away. When it is asked for next, the kernel asks everybody
// on the link, and not only the one whom it believed to be the neighbour.
func (n *neighbours) forget(ifindex int, a netip.Addr) error {
	_, err := n.about(unix.RTM_NEWNEIGH, writeFlags, ifindex, a, unix.NUD_FAILED, 0).Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// entry is a neighbour as the kernel has it.
type entry struct {
	netlink.Neigh
	protocol uint8
}

func (e *entry) managed() bool { return e.FlagsExt&netlink.NTF_EXT_MANAGED != 0 }

func (e *entry) ours() bool { return e.managed() && e.protocol == neighProtocol }

// fixed says that somebody else keeps it: an administrator, or a routing daemon (EVPN).
func (e *entry) fixed() bool {
	return e.State&(unix.NUD_PERMANENT|unix.NUD_NOARP) != 0 || e.Flags&netlink.NTF_EXT_LEARNED != 0
}

// get asks for one neighbour (Linux 5.0), whatever the size of the table. One that is not there has
// state NUD_NONE.
func (n *neighbours) get(ifindex int, a netip.Addr) (e entry, err error) {
	req := n.about(unix.RTM_GETNEIGH, 0, ifindex, a, 0, 0)
	msgs, err := req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWNEIGH)
	if errors.Is(err, unix.ENOENT) {
		return e, nil
	}
	if err != nil {
		return e, fmt.Errorf("ask the kernel for neighbour %v: %w", a, err)
	}
	if len(msgs) != 1 || len(msgs[0]) < unix.SizeofNdMsg {
		return e, fmt.Errorf("ask the kernel for neighbour %v: %d answers, want 1", a, len(msgs))
	}
	if e, err = parseEntry(msgs[0]); err != nil {
		return e, fmt.Errorf("ask the kernel for neighbour %v: %w", a, err)
	}
	return e, nil
}

// parseEntry reads an RTM_NEWNEIGH message of at least its header's length.
func parseEntry(msg []byte) (e entry, err error) {
	found, err := netlink.NeighDeserialize(msg)
	if err != nil {
		return e, err
	}
	e.Neigh = *found
	for attr, value := range attributes(msg[unix.SizeofNdMsg:]) {
		if attr == netlink.NDA_PROTOCOL && len(value) == 1 {
			e.protocol = value[0]
		}
	}
	return e, nil
}

// marked lists the neighbours of an interface that the kernel manages and that bear our mark.
func (n *neighbours) marked(ifindex int) ([]netip.Addr, error) {
	req := n.request(unix.RTM_GETNEIGH, unix.NLM_F_DUMP, &netlink.Ndmsg{Family: unix.AF_UNSPEC, Index: uint32(ifindex)})
	msgs, err := req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWNEIGH)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil, fmt.Errorf("list neighbours: %w", err)
	}
	var out []netip.Addr
	for _, m := range msgs {
		if len(m) < unix.SizeofNdMsg {
			continue
		}
		e, err := parseEntry(m)
		if err != nil {
			return nil, fmt.Errorf("list neighbours: %w", err)
		}
		if a, ok := netip.AddrFromSlice(e.IP); ok && e.LinkIndex == ifindex && e.ours() {
			out = append(out, a.Unmap())
		}
	}
	return out, nil
}

// forgetNeighbours lets those neighbours of an interface go that a process left managed which had it
// before us and was killed. We have the interface now, so nobody else uses them.
func (r *router) forgetNeighbours(p *plane) error {
	left, err := r.neighbours.marked(p.ifindex)
	if err != nil {
		return fmt.Errorf("interface %s: %w", p.name, err)
	}
	for _, a := range left {
		if err := r.neighbours.manage(p.ifindex, a, false, true); err != nil {
			return fmt.Errorf("interface %s: let neighbour %v of a crashed process go: %w", p.name, a, err)
		}
		r.log.Info("let a crashed process's neighbour go", "interface", p.name, "neighbour", a)
	}
	return nil
}
