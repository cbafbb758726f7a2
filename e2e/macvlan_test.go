// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/fabric/lab"
	"github.com/metaroce/metaroce/transport"
)

func TestPlanesOnMacvlansOfOneInterfaceCarryEveryByte(t *testing.T) {
	l := newLab(t, lab.Config{Direct: true})
	for i := range 2 {
		linkOf(t, l, i, "p0", func(nl *netlink.Handle, parent netlink.Link) error {
			for k := range 2 {
				a := netlink.NewLinkAttrs()
				a.Name, a.ParentIndex = fmt.Sprintf("mv%d", k), parent.Attrs().Index
				err := nl.LinkAdd(&netlink.Macvlan{LinkAttrs: a, Mode: netlink.MACVLAN_MODE_BRIDGE})
				if errors.Is(err, unix.EOPNOTSUPP) {
					t.Skipf("this kernel makes no macvlan interfaces: %v", err)
				}
				if err != nil {
					return err
				}
				v, err := nl.LinkByName(a.Name)
				if err != nil {
					return err
				}
				addr, err := netlink.ParseAddr(fmt.Sprintf("198.18.%d.%d/24", 200+k, i+1))
				if err := errors.Join(err, nl.AddrAdd(v, addr), nl.LinkSetUp(v)); err != nil {
					return err
				}
			}
			return nil
		})
	}
	h := openPair(t, l, transport.Config{Interfaces: []string{"mv0", "mv1"}})
	c := connect(t, h[0], h[1], hardlyAny)
	exchange(t, bothWays(t, h, c, 3, mixed(3, pick[uint64](4<<20, 200<<10)))...)
	for i := range h {
		k := h[i].counters(t)
		if k.RcvdPkts == 0 || k.DropAddress != 0 {
			t.Errorf("host %d: %d packets placed, drop_address %d", i, k.RcvdPkts, k.DropAddress)
		}
	}
}
