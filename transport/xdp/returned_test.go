// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/loader"
	"github.com/metaroce/metaroce/transport/core"
)

// deletePlane deletes a plane's veth pair, and waits until devices on both hosts have noticed.
func deletePlane(t *testing.T, hosts [2]*host, e [2]*Engine, plane int) {
	t.Helper()
	name := hosts[0].names[plane]
	l, err := hosts[0].nl.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := hosts[0].nl.LinkDel(l); err != nil {
		t.Fatal(err)
	}
	waitFor(t, name+" down on both hosts", func() bool { return !e[0].planes[plane].up.Load() && !e[1].planes[plane].up.Load() })
}

// makePlane makes a plane's veth pair anew, as newHosts did.
func makePlane(t *testing.T, hosts [2]*host, plane, mtu int) {
	t.Helper()
	makePlaneOf(t, hosts, plane, mtu, 1)
}

func makePlaneOf(t *testing.T, hosts [2]*host, plane, mtu, queues int) {
	t.Helper()
	name := hosts[0].names[plane]
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.NumTxQueues, attrs.NumRxQueues = name, mtu, queues, queues
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: name, PeerMTU: uint32(mtu), PeerNamespace: netlink.NsFd(hosts[1].ns)}
	if err := hosts[0].nl.LinkAdd(veth); err != nil {
		t.Fatal(err)
	}
	for i, h := range hosts {
		l, err := h.nl.LinkByName(name)
		if err != nil {
			t.Fatal(err)
		}
		a := &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(198, 18, byte(plane), byte(i+1)), Mask: net.CIDRMask(24, 32)}}
		if err := errors.Join(h.nl.AddrAdd(l, a), h.nl.LinkSetUp(l)); err != nil {
			t.Fatal(err)
		}
	}
}

func indexOf(e *Engine, plane int) int {
	e.router.mu.Lock()
	defer e.router.mu.Unlock()
	return e.planes[plane].ifindex
}

func TestInterfaceThatReturnsIsUsedAgain(t *testing.T) {
	for _, planes := range []int{1, 2} {
		t.Run(map[int]string{1: "the only one", 2: "one of two"}[planes], func(t *testing.T) {
			hosts := newHosts(t, planes)
			cfg := Config{RetryTime: time.Minute}
			e := [2]*Engine{openOn(t, hosts[0], cfg), openOn(t, hosts[1], cfg)}
			c := connect(t, e, 2*planes)
			const size = 300_000
			from, to := alloc(t, e[0], size), alloc(t, e[1], size)
			transfer := func(msn uint32) {
				fill(from.Bytes(), uint64(msn))
				c[0].PostSend(msn, write(from, to, size))
				wantStatus(t, c[0], msn, core.StatusSuccess)
				wantEqual(t, from, to)
			}
			transfer(0)
			parked := e[0].reg.Parked.Index
			for round := range uint32(2) {
				was := [2]int{indexOf(e[0], 0), indexOf(e[1], 0)}
				deletePlane(t, hosts, e, 0)
				makePlane(t, hosts, 0, 3400)
				for i := range e {
					waitFor(t, "the interface back", e[i].planes[0].up.Load)
					if now := indexOf(e[i], 0); now == was[i] {
						t.Fatalf("host %d: ifindex %d as before: the test is about another one", i, now)
					}
				}
				for k, s := range c[0].params.Paths {
					if s.Plane == 0 {
						waitFor(t, "path active", func() bool { return states(t, c[0])[k] == core.PathActive })
					}
				}
				transfer(round + 1)
			}
			for i := range e {
				l, err := hosts[i].nl.LinkByName("p0")
				if err != nil {
					t.Fatal(err)
				}
				itf := e[i].reg.Device().Owner.Interfaces[0]
				if itf.Index != l.Attrs().Index || itf.MAC != l.Attrs().HardwareAddr.String() {
					t.Errorf("host %d: the state says %+v, want ifindex %d", i, itf, l.Attrs().Index)
				}
				devices, err := loader.Find()
				if err != nil {
					t.Fatal(err)
				}
				for _, d := range devices {
					if d.Dir == e[i].reg.PinDir && (!d.Alive || d.Owner.Interfaces[0].Index != itf.Index) {
						t.Errorf("host %d: others see %+v, want it alive with ifindex %d", i, d, itf.Index)
					}
				}
			}
			if l, err := hosts[0].nl.LinkByIndex(parked); err != nil || l.Attrs().Xdp == nil || !l.Attrs().Xdp.Attached {
				t.Errorf("the parked interface %d is %v (%v), want it with mr_tx", parked, l, err)
			}
		})
	}
}

func TestPumpIsPinnedWhenAnInterfaceReturnsWithSeveralQueues(t *testing.T) {
	if testing.Short() {
		t.Skip("short: does not depend on the kernel")
	}
	if runtime.NumCPU() < 2 {
		t.Skip("needs 2 CPUs")
	}
	hosts := newHosts(t, 1)
	e := [2]*Engine{openOn(t, hosts[0], Config{RetryTime: time.Minute}), openOn(t, hosts[1], Config{RetryTime: time.Minute})}
	cpus := func(e *Engine) int {
		var set unix.CPUSet
		if err := unix.SchedGetaffinity(int(e.pump.tid.Load()), &set); err != nil {
			t.Fatal(err)
		}
		return set.Count()
	}
	if n := cpus(e[0]); n < 2 {
		t.Fatalf("the pump runs on %d CPU before, want more: the test is about the change", n)
	}
	deletePlane(t, hosts, e, 0)
	makePlaneOf(t, hosts, 0, 3400, 2)
	for i := range e {
		waitFor(t, "the interface back", e[i].planes[0].up.Load)
		owner := e[i].reg.Device().Owner
		if n := cpus(e[i]); n != 1 || owner.PumpCPU == nil || owner.Interfaces[0].Channels != 2 {
			t.Errorf("host %d: the pump may run on %d CPUs, the state says %+v, want 1 and so in the state", i, n, owner)
		}
	}
}

// countingLog counts the lines that contain something.
type countingLog struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *countingLog) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *countingLog) count(what string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range strings.Split(l.text.String(), "\n") {
		if strings.Contains(line, what) {
			n++
		}
	}
	return n
}

// TestInterfaceThatCannotBeUsedIsTriedAgainAndSaidOnce has it return in a state that is refused first.
func TestInterfaceThatCannotBeUsedIsTriedAgainAndSaidOnce(t *testing.T) {
	if testing.Short() {
		t.Skip("short: does not depend on the kernel")
	}
	pass, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "foreign", Type: ebpf.XDP, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2 /* XDP_PASS */), asm.Return()},
	})
	if err != nil {
		t.Skipf("needs root: %v", err)
	}
	defer pass.Close()
	for _, c := range []struct {
		name string
		mtu  int
		said string
		mend func(t *testing.T, h *host, l netlink.Link, foreign link.Link)
	}{
		{"foreign program", 3400, "foreign", func(t *testing.T, _ *host, _ netlink.Link, foreign link.Link) {
			if err := foreign.Close(); err != nil {
				t.Fatal(err)
			}
		}},
		{"other end of the veth pair in generic mode", 3400, "generic mode", func(t *testing.T, _ *host, _ netlink.Link, foreign link.Link) {
			if err := foreign.Close(); err != nil {
				t.Fatal(err)
			}
		}},
		{"MTU too small", 1400, "MTU is 1400", func(t *testing.T, h *host, l netlink.Link, _ link.Link) {
			if err := h.nl.LinkSetMTU(l, 3400); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			hosts := newHosts(t, 1)
			var log countingLog
			var e *Engine
			cfg := Config{Interfaces: hosts[0].names, RetryTime: time.Minute, Logger: slog.New(slog.NewTextHandler(&log, nil))}
			err := hosts[0].in(func() (err error) {
				e, err = Open(context.Background(), cfg)
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := e.Close(); err != nil {
					t.Error(err)
				}
			})
			deletePlane(t, hosts, [2]*Engine{e, e}, 0)

			// Everything is done to the new interface before it bears the name.
			hosts[0].names = []string{"new0"}
			makePlane(t, hosts, 0, c.mtu)
			l, err := hosts[0].nl.LinkByName("new0")
			if err != nil {
				t.Fatal(err)
			}
			var foreign link.Link
			if c.said == "foreign" {
				err := hosts[0].in(func() (err error) {
					foreign, err = link.AttachXDP(link.XDPOptions{Program: pass, Interface: l.Attrs().Index, Flags: link.XDPDriverMode})
					return err
				})
				if err != nil {
					t.Fatal(err)
				}
			}
			if c.said == "generic mode" {
				err := hosts[1].in(func() (err error) {
					far, err := hosts[1].nl.LinkByName("new0")
					if err == nil {
						foreign, err = link.AttachXDP(link.XDPOptions{Program: pass, Interface: far.Attrs().Index, Flags: link.XDPGenericMode})
					}
					return err
				})
				if err != nil {
					t.Fatal(err)
				}
			}
			if err := errors.Join(hosts[0].nl.LinkSetDown(l), hosts[0].nl.LinkSetName(l, "p0"), hosts[0].nl.LinkSetUp(l)); err != nil {
				t.Fatal(err)
			}
			waitFor(t, "the refusal said", func() bool { return log.count("cannot be used") > 0 })
			tried := func() time.Duration {
				e.router.dirty.mu.Lock()
				defer e.router.dirty.mu.Unlock()
				return time.Until(e.router.dirty.later[e.planes[0]])
			}
			waitFor(t, "three tries", func() bool { return tried() > 3*minRetryTime })
			if n := log.count("cannot be used"); n != 1 || log.count(c.said) != 1 {
				t.Errorf("said %d times: %s\nwant once, with %q", n, log.text.String(), c.said)
			}
			if e.planes[0].up.Load() {
				t.Error("the plane is up although its interface was refused")
			}
			if c.said == "MTU is 1400" { // in generic mode it takes an attached program to find out
				l, err := hosts[0].nl.LinkByName("p0")
				if err != nil || l.Attrs().Xdp != nil && l.Attrs().Xdp.Attached {
					t.Errorf("XDP of the refused interface is %+v (%v), want none", l.Attrs().Xdp, err)
				}
			}
			c.mend(t, hosts[0], l, foreign)
			waitFor(t, "the interface in use", e.planes[0].up.Load)
		})
	}
}

func TestVLANInterfaceReturnsWithItsParent(t *testing.T) {
	hosts := newHosts(t, 1)
	addVLANs(t, hosts, 100, 200)
	cfg := Config{RetryTime: time.Minute}
	e := [2]*Engine{openOn(t, hosts[0], cfg), openOn(t, hosts[1], cfg)}
	c := connect(t, e, 4)
	for i := range hosts {
		hosts[i].names = []string{"p0"}
	}
	deletePlane(t, hosts, e, 0) // and the VLAN interfaces with it
	makePlane(t, hosts, 0, 3400)
	addVLANs(t, hosts, 100, 200)
	for k := range 2 {
		for i := range e {
			waitFor(t, "VLAN interface back", e[i].planes[k].up.Load)
		}
	}
	waitFor(t, "all paths active", func() bool {
		for _, s := range states(t, c[0]) {
			if s != core.PathActive {
				return false
			}
		}
		return true
	})
	const size = 300_000
	from, to := alloc(t, e[0], size), alloc(t, e[1], size)
	fill(from.Bytes(), 1)
	c[0].PostSend(0, write(from, to, size))
	wantStatus(t, c[0], 0, core.StatusSuccess)
	wantEqual(t, from, to)
}
