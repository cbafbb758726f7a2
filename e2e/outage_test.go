// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/metaroce/metaroce/fabric/lab"
	"github.com/metaroce/metaroce/loader"
	"github.com/metaroce/metaroce/transport"
)

// setPlaneMTU changes an interface of a lab's host until the end of the test.
func setPlaneMTU(t *testing.T, l *lab.Lab, host, plane, mtu int) {
	t.Helper()
	set := func(mtu int) (was int, err error) {
		err = l.Do(host, func() error {
			link, err := netlink.LinkByName(l.Interfaces(host)[plane])
			if err != nil {
				return err
			}
			was = link.Attrs().MTU
			return netlink.LinkSetMTU(link, mtu)
		})
		return was, err
	}
	was, err := set(mtu)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := set(was); err != nil {
			t.Error(err)
		}
	})
}

func TestPathThatDropsFullSizePacketsAndAnswersProbesIsLeftOut(t *testing.T) {
	for _, c := range fewer(1, []struct {
		name  string
		later bool // the MTU shrinks in mid-transfer
	}{
		{"from the beginning", false},
		{"in mid-transfer", true},
	}) {
		t.Run(c.name, func(t *testing.T) {
			l := newLab(t, lab.Config{Planes: 2})
			h := openPair(t, l, transport.Config{})
			if !c.later {
				setPlaneMTU(t, l, 1, 1, 1500)
			}
			conn := connect(t, h[0], h[1], outage(8))
			d := newDirection(t, h[0], h[1], conn[0], conn[1], 1, mixed(1, pick[uint64](16<<20, 200<<10)))
			traffic := keepBusy(t, d)
			traffic.waitFor(t, "a transfer", func() bool { return traffic.rounds() > 0 })
			if c.later {
				setPlaneMTU(t, l, 1, 1, 1500)
			}
			traffic.waitFor(t, "the narrow plane given up", func() bool {
				r := h[0].register(t, conn[0])
				for _, path := range onPlane(conn[0], 1) {
					if r.Tx[path].State != loader.PathSuspect {
						return false
					}
				}
				return true
			})
			n := traffic.rounds()
			traffic.waitFor(t, "transfers over the other plane", func() bool { return traffic.rounds() > n+2 })
			traffic.stop(t)
		})
	}
}

func TestMessagesAreCutToWhatFitsIfNoPathTakesMore(t *testing.T) {
	l := newLab(t, lab.Config{Planes: 1})
	h := openPair(t, l, transport.Config{})
	setPlaneMTU(t, l, 1, 0, 1500)
	conn := connect(t, h[0], h[1], learning)
	d := newDirection(t, h[0], h[1], conn[0], conn[1], 1, mixed(1, pick[uint64](4<<20, 100<<10)))
	exchange(t, d)
	if got := h[0].register(t, conn[0]).Cut; got != 1024 {
		t.Errorf("messages are cut into %d bytes, want 1024 with an MTU of 1500", got)
	}
}

func TestConnectionThatCannotSendFullSizePacketsAnyMoreFailsAndNamesTheMTU(t *testing.T) {
	l := newLab(t, lab.Config{Planes: 1})
	h := openPair(t, l, transport.Config{})
	conn := connect(t, h[0], h[1], outage(8))
	d := newDirection(t, h[0], h[1], conn[0], conn[1], 1, []uint64{1 << 20, 1 << 20})
	run(t, d)
	setPlaneMTU(t, l, 1, 0, 1500)
	for i := range 2 {
		if err := d.post(i); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-conn[0].Done():
	case <-time.After(patience):
		t.Fatal("the connection hangs")
	}
	if err := conn[0].Err(); err == nil || !strings.Contains(err.Error(), "IP packets of 3168 bytes do not get through") {
		t.Errorf("connection's error %v, want one that names the MTU", err)
	}
}

func TestTransferGoesOnSoonAfterAnOutageOfAllPaths(t *testing.T) {
	for _, c := range fewer(1, []struct {
		outage time.Duration
		paths  int
	}{
		{30 * time.Second, 8},
		{30 * time.Second, 1},
		{10 * time.Second, 8},
		{time.Second, 8},
		{300 * time.Millisecond, 8},
		{300 * time.Millisecond, 1},
	}) {
		t.Run(fmt.Sprintf("%v, paths %d", c.outage, c.paths), func(t *testing.T) {
			if c.outage > 10*time.Second {
				soak(t)
			}
			const planes = 2
			l := newLab(t, lab.Config{Planes: min(planes, c.paths)})
			h := openPair(t, l, transport.Config{Paths: c.paths, RetryTime: time.Minute})
			conn := connect(t, h[0], h[1], outage(uint64(c.paths)))
			d := newDirection(t, h[0], h[1], conn[0], conn[1], 1, mixed(1, pick[uint64](16<<20, 200<<10)))
			traffic := keepBusy(t, d)
			traffic.waitFor(t, "a transfer", func() bool { return traffic.rounds() > 0 })
			for plane := range min(planes, c.paths) {
				pullPlane(t, l, plane)
			}
			time.Sleep(c.outage) // what is tested: so long nothing gets through
			placed := h[1].counters(t).RcvdPkts
			for plane := range min(planes, c.paths) {
				if err := l.PlaneUp(plane); err != nil {
					t.Fatal(err)
				}
			}
			start := time.Now()
			traffic.waitFor(t, "data flowing again", func() bool { return h[1].counters(t).RcvdPkts > placed+300 })
			took := time.Since(start)
			n := traffic.rounds()
			traffic.waitFor(t, "transfers after the outage", func() bool { return traffic.rounds() > n+1 })
			traffic.stop(t)
			t.Logf("data flowed %v after the network did", took)
		})
	}
}
