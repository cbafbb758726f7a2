// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

func TestOpenLetsTheNeighboursOfAKilledProcessGoAndNobodyElses(t *testing.T) {
	hosts := newHosts(t, 1)
	h := hosts[0]
	l, err := h.nl.LinkByName(h.names[0])
	if err != nil {
		t.Fatal(err)
	}
	index := l.Attrs().Index
	socket, err := nl.GetNetlinkSocketAt(h.ns, netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	theirs := neighbours{sockets: map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: socket}}}
	for _, a := range []string{"198.18.0.2", "fd12:0::2"} {
		if err := theirs.manage(index, netip.MustParseAddr(a), true, true); err != nil {
			t.Fatal(err)
		}
	}
	err = h.nl.NeighSet(&netlink.Neigh{
		LinkIndex: index, IP: net.ParseIP("198.18.0.3"), State: unix.NUD_NONE, Flags: netlink.NTF_USE, FlagsExt: netlink.NTF_EXT_MANAGED,
	})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := theirs.marked(index); err != nil || len(got) != 2 {
		t.Fatalf("marked are %v (%v), want two", got, err)
	}

	openOn(t, h, Config{})
	if got, err := theirs.marked(index); err != nil || len(got) != 0 {
		t.Errorf("still marked: %v (%v)", got, err)
	}
	var managed []string
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		list, err := h.nl.NeighList(index, family)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range list {
			if n.FlagsExt&netlink.NTF_EXT_MANAGED != 0 {
				managed = append(managed, n.IP.String())
			}
		}
	}
	if len(managed) != 1 || managed[0] != "198.18.0.3" {
		t.Errorf("managed are %v, want only 198.18.0.3, which an administrator manages", managed)
	}
}
