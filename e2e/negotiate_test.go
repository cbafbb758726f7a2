// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/metaroce/metaroce/fabric/lab"
	"github.com/metaroce/metaroce/transport"
)

// setMTU changes the MTU of a host's interfaces until the end of the test.
func setMTU(t *testing.T, l *lab.Lab, index, mtu int) {
	t.Helper()
	set := func(mtu int) {
		t.Helper()
		err := l.Do(index, func() error {
			for _, name := range l.Interfaces(index) {
				link, err := netlink.LinkByName(name)
				if err != nil {
					return err
				}
				if err := netlink.LinkSetMTU(link, mtu); err != nil {
					return fmt.Errorf("interface %s: MTU %d: %w", name, mtu, err)
				}
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
	set(mtu)
	t.Cleanup(func() { set(lab.DefaultMTU) })
}

func TestPeersThatDifferAgreeAndMoveData(t *testing.T) {
	l := newLab(t, lab.Config{Planes: 3})
	planes := func(n int) []string { return l.Interfaces(0)[:n] }
	for _, c := range fewer(1, []struct {
		name    string
		cfg     [2]transport.Config
		mtu     int // of host 1, 0: the lab's
		payload int
		paths   int
		planes  int
	}{
		{"payload 3072 and 1024", [2]transport.Config{{}, {Payload: 1024}}, 0, 1024, 8, 3},
		{"payload 2048 and 3072", [2]transport.Config{{Payload: 2048}, {Payload: 3072}}, 0, 2048, 8, 3},
		{"MTU 3400 and 1500", [2]transport.Config{}, 1500, 1024, 8, 3},
		{"MTU 3400 and 2300", [2]transport.Config{}, 2300, 2048, 8, 3},
		{"32 paths and 3", [2]transport.Config{{Paths: 32}, {Paths: 3}}, 0, 3072, 3, 3},
		{"1 path and 8", [2]transport.Config{{Paths: 1}, {}}, 0, 3072, 1, 1},
		{"3 planes and 1", [2]transport.Config{{}, {Interfaces: planes(1)}}, 0, 3072, 8, 1},
		{"2 planes and 3", [2]transport.Config{{Interfaces: planes(2)}, {}}, 0, 3072, 8, 2},
		{"all of it", [2]transport.Config{{Interfaces: planes(2), Paths: 5}, {Paths: 9, Payload: 2048}}, 2200, 2048, 5, 2},
	}) {
		t.Run(c.name, func(t *testing.T) {
			if c.mtu != 0 {
				setMTU(t, l, 1, c.mtu)
			}
			h := openHosts(t, l, c.cfg[0], c.cfg[1])
			conn := connect(t, h[0], h[1], hardlyAny)
			for i, c0 := range conn {
				used := map[int]bool{}
				for _, p := range c0.Info().Paths {
					used[p.Plane] = true
				}
				if got := c0.Info(); got.Payload != c.payload || len(got.Paths) != c.paths || len(used) != c.planes {
					t.Errorf("host %d: payload %d, %d paths on %d planes; want %d, %d on %d",
						i, got.Payload, len(got.Paths), len(used), c.payload, c.paths, c.planes)
				}
			}
			exchange(t, bothWays(t, h, conn, 1, mixed(1, pick[uint64](2<<20, 50<<10)))...)
		})
	}
}
