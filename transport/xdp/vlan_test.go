// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/loader"
	"github.com/metaroce/metaroce/transport/core"
	"github.com/metaroce/metaroce/wire"
)

// addVLANs puts VLAN interfaces on plane 0 of both hosts and has devices use those instead. Host i
// has 198.18.(100+n).(i+1) and fd12:(100+n)::(i+1) on the n-th.
func addVLANs(t *testing.T, hosts [2]*host, ids ...int) {
	t.Helper()
	for i, h := range hosts {
		parent, err := h.nl.LinkByName(h.names[0])
		if err != nil {
			t.Fatal(err)
		}
		h.names = nil
		for n, id := range ids {
			a := netlink.NewLinkAttrs()
			a.Name, a.ParentIndex = fmt.Sprintf("%s.%d", parent.Attrs().Name, id), parent.Attrs().Index
			v := &netlink.Vlan{
				LinkAttrs: a, VlanId: id, VlanProtocol: netlink.VLAN_PROTOCOL_8021Q, EgressQosMap: map[uint32]uint32{2: 5},
			}
			err := h.nl.LinkAdd(v)
			if errors.Is(err, unix.EOPNOTSUPP) {
				t.Skipf("this kernel makes no VLAN interfaces (8021q): %v", err)
			}
			if err != nil {
				t.Fatalf("add %s: %v", a.Name, err)
			}
			l, err := h.nl.LinkByName(a.Name)
			if err != nil {
				t.Fatal(err)
			}
			for _, addr := range []*netlink.Addr{
				{IPNet: &net.IPNet{IP: net.IPv4(198, 18, byte(100+n), byte(i+1)), Mask: net.CIDRMask(24, 32)}},
				{IPNet: &net.IPNet{IP: net.ParseIP(fmt.Sprintf("fd12:%d::%d", 100+n, i+1)), Mask: net.CIDRMask(64, 128)}, Flags: unix.IFA_F_NODAD},
			} {
				if err := h.nl.AddrAdd(l, addr); err != nil {
					t.Fatalf("add %v to %s: %v", addr, a.Name, err)
				}
			}
			if err := h.nl.LinkSetUp(l); err != nil {
				t.Fatal(err)
			}
			waitFor(t, "carrier on "+a.Name, func() bool {
				l, err := h.nl.LinkByName(a.Name)
				return err == nil && carrier(l.Attrs())
			})
			h.names = append(h.names, a.Name)
		}
	}
}

func TestWritesGoOverVLANInterfaces(t *testing.T) {
	for _, c := range []struct {
		name string
		ids  []int
		cfg  Config
	}{
		{"IPv6", []int{100}, Config{PreferIPv6: true}},
		{"two VLANs of one parent as two planes", []int{100, 4094}, Config{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			hosts := newHosts(t, 1)
			addVLANs(t, hosts, c.ids...)
			cfg := c.cfg
			cfg.DSCP = 26
			e := [2]*Engine{openOn(t, hosts[0], cfg), openOn(t, hosts[1], cfg)}
			conns := connect(t, e, 4)
			for i, conn := range conns {
				for k := range conn.params.Paths {
					w := &e[i].pathWords[conn.base+k]
					var eth wire.Ethernet
					want := uint16(5<<13 | c.ids[conn.params.Paths[k].Plane])
					if err := eth.Decode(w.Tmpl[:]); err != nil || eth.VLAN == nil || *eth.VLAN != want {
						t.Errorf("path %d begins with % x (%v), want tag %#x", k, w.Tmpl[:18], err, want)
					}
				}
			}
			const size = 300_000
			from, to := alloc(t, e[0], size), alloc(t, e[1], size)
			fill(from.Bytes(), 1)
			conns[0].PostSend(0, write(from, to, size))
			if s := waitSend(t, conns[0], 0); s != core.StatusSuccess {
				t.Fatalf("write ended with %v", s)
			}
			if !bytes.Equal(from.Bytes(), to.Bytes()) {
				t.Error("the peer's memory differs from what was written")
			}
		})
	}
}

func TestVLANInterfaceFollowsTheCarrierOfItsParent(t *testing.T) {
	hosts := newHosts(t, 1)
	addVLANs(t, hosts, 100)
	e := [2]*Engine{openOn(t, hosts[0], Config{RetryTime: time.Minute}), openOn(t, hosts[1], Config{RetryTime: time.Minute})}
	c := connect(t, e, 2)
	parent, err := hosts[1].nl.LinkByName("p0")
	if err != nil {
		t.Fatal(err)
	}
	if err := hosts[1].nl.LinkSetDown(parent); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "carrier lost on both VLAN interfaces", func() bool { return !e[0].planes[0].up.Load() && !e[1].planes[0].up.Load() })
	const size = 5000
	from, to := alloc(t, e[0], size), alloc(t, e[1], size)
	fill(from.Bytes(), 2)
	c[0].PostSend(0, write(from, to, size))
	if err := hosts[1].nl.LinkSetUp(parent); err != nil {
		t.Fatal(err)
	}
	if s := waitSend(t, c[0], 0); s != core.StatusSuccess {
		t.Errorf("write ended with %v", s)
	}
	if !bytes.Equal(from.Bytes(), to.Bytes()) {
		t.Error("the peer's memory differs from what was written")
	}
}

// tagWatch is an XDP program that notes the bytes from the Ethernet type on of every frame with a
// tag and lets none of them through. Kernel-made frames have theirs beside the frame, not in it.
func tagWatch(t *testing.T) (*ebpf.Program, *ebpf.Map) {
	t.Helper()
	seen, err := ebpf.NewMap(&ebpf.MapSpec{Name: "seen", Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { seen.Close() })
	tpid := int32(binary.NativeEndian.Uint16([]byte{0x81, 0x00}))
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "tag_watch", Type: ebpf.XDP, License: "GPL",
		Instructions: asm.Instructions{
			asm.LoadMem(asm.R6, asm.R1, 0, asm.Word), // data
			asm.LoadMem(asm.R3, asm.R1, 4, asm.Word), // data_end
			asm.Mov.Reg(asm.R4, asm.R6),
			asm.Add.Imm(asm.R4, 20),
			asm.JGT.Reg(asm.R4, asm.R3, "pass"),
			asm.LoadMem(asm.R5, asm.R6, 12, asm.Half),
			asm.JNE.Imm(asm.R5, tpid, "pass"),
			asm.StoreImm(asm.RFP, -4, 0, asm.Word),
			asm.LoadMapPtr(asm.R1, seen.FD()),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, -4),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "pass"),
			asm.LoadMem(asm.R5, asm.R6, 12, asm.Word),
			asm.StoreMem(asm.R0, 0, asm.R5, asm.Word),
			asm.LoadMem(asm.R5, asm.R6, 16, asm.Word),
			asm.StoreMem(asm.R0, 4, asm.R5, asm.Word),
			asm.Mov.Imm(asm.R0, 1), // XDP_DROP
			asm.Return(),
			asm.Mov.Imm(asm.R0, 2).WithSymbol("pass"), // XDP_PASS
			asm.Return(),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p, seen
}

func TestFramesOfAVLANInterfaceArriveWithTheirTag(t *testing.T) {
	hosts := newHosts(t, 1)
	addVLANs(t, hosts, 100)
	prog, seen := tagWatch(t)
	err := hosts[1].in(func() error {
		parent, err := hosts[1].nl.LinkByName("p0")
		if err != nil {
			return err
		}
		l, err := link.AttachXDP(link.XDPOptions{Program: prog, Interface: parent.Attrs().Index, Flags: link.XDPDriverMode})
		if err == nil {
			t.Cleanup(func() { l.Close() })
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	e := openOn(t, hosts[0], Config{DSCP: 26})
	c, err := e.NewConn(testPD)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	here := endpoint(e, c, 1)
	there := here
	there.QPN, there.Planes = 77, []core.PlaneAddr{{Addr: here.Planes[0].Addr.Next(), MTU: here.Planes[0].MTU}}
	p, err := core.PairPaths(here, there, rand.New(rand.NewPCG(1, 2)))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := c.Start(ctx, p); err != nil {
		t.Fatal(err)
	}
	from := alloc(t, e, loader.BlockBytes)
	c.PostSend(0, core.WorkRequest{Op: core.OpWrite, LocalAddr: from.Addr(), LKey: from.Key(), Length: 100})
	// TPID, priority 5 and VID 100, IPv4 with its traffic class
	want := []byte{0x81, 0x00, 5 << 5, 100, 0x08, 0x00, 0x45, 26<<2 | 2}
	var got []byte
	waitFor(t, "a frame with a tag", func() bool {
		got, err = seen.LookupBytes(uint32(0))
		return err == nil && !bytes.Equal(got, make([]byte, 8))
	})
	if !bytes.Equal(got, want) {
		t.Errorf("frame goes on after its link addresses with % x, want % x", got, want)
	}
}
