// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func addVLAN(t *testing.T, nl *netlink.Handle, parent string, id int, change func(*netlink.Vlan)) string {
	t.Helper()
	l, err := nl.LinkByName(parent)
	if err != nil {
		t.Fatal(err)
	}
	a := netlink.NewLinkAttrs()
	a.Name, a.ParentIndex = parent+"."+strconv.Itoa(id), l.Attrs().Index
	v := &netlink.Vlan{LinkAttrs: a, VlanId: id, VlanProtocol: netlink.VLAN_PROTOCOL_8021Q}
	if change != nil {
		change(v)
	}
	err = nl.LinkAdd(v)
	if errors.Is(err, unix.EOPNOTSUPP) {
		t.Skipf("this kernel makes no VLAN interfaces (8021q): %v", err)
	}
	if err != nil {
		t.Fatalf("add VLAN interface %s: %v", a.Name, err)
	}
	return a.Name
}

func TestVLANInterfaceIsServedByAProgramOnItsParent(t *testing.T) {
	nl := inNetns(t)
	name := addVLAN(t, nl, planeA, 100, func(v *netlink.Vlan) { v.EgressQosMap = map[uint32]uint32{2: 3} })
	parent, err := nl.LinkByName(planeA)
	if err != nil {
		t.Fatal(err)
	}
	o := mustLoad(t, Options{Interfaces: []string{name}})
	if x := xdpOf(t, nl, planeA); x == nil || x.AttachMode != 1 {
		t.Errorf("%s: XDP is %+v, want native (1)", planeA, x)
	}
	if x := xdpOf(t, nl, name); x != nil && x.Attached {
		t.Errorf("%s: XDP is %+v, want none: its parent has it", name, x)
	}
	itf := o.Interfaces[0]
	if v := itf.VLAN; v == nil || v.ID != 100 || v.Parent != planeA || v.ParentIndex != parent.Attrs().Index || v.Egress[2] != 3 {
		t.Fatalf("VLAN is %+v, want 100 of %s with its egress map", v, planeA)
	}
	if lower, index := itf.Lower(); lower != planeA || index != parent.Attrs().Index {
		t.Errorf("programs go to %s (%d), want %s (%d)", lower, index, planeA, parent.Attrs().Index)
	}
	if itf.Name != name || itf.Driver != "veth" || itf.Index == parent.Attrs().Index {
		t.Errorf("interface is %+v, want %s with its own ifindex and its parent's driver", itf, name)
	}
	if want := filepath.Join(pinRoot, deviceKey(o.Netns, name)); o.PinDir != want {
		t.Errorf("pins are in %s, want %s", o.PinDir, want)
	}
	if err := o.Close(); err != nil {
		t.Fatal(err)
	}
	wantNothingLeft(t, nl)
}

func TestVLANInterfaceHasTheSmallerMTUOfItsOwnAndItsParents(t *testing.T) {
	nl := inNetns(t)
	setMTU(t, nl, 3000, planeA, peerA)
	name := addVLAN(t, nl, planeA, 100, nil)
	setMTU(t, nl, 2000, name)
	if o := mustLoad(t, Options{Interfaces: []string{name}}); o.Interfaces[0].MTU != 2000 {
		t.Errorf("MTU is %d, want 2000, the VLAN interface's", o.Interfaces[0].MTU)
	} else if err := o.Close(); err != nil {
		t.Fatal(err)
	}
	setMTU(t, nl, 9000, planeA, peerA)
	setMTU(t, nl, 9000, name)
	if o := mustLoad(t, Options{Interfaces: []string{name}}); o.Interfaces[0].MTU != 9000 {
		t.Errorf("MTU is %d, want 9000", o.Interfaces[0].MTU)
	}
}

func TestTwoVLANsOfOneParentShareItsProgram(t *testing.T) {
	nl := inNetns(t)
	names := []string{addVLAN(t, nl, planeA, 100, nil), addVLAN(t, nl, planeA, 200, nil)}
	o := mustLoad(t, Options{Interfaces: names})
	if x := xdpOf(t, nl, planeA); x == nil || !x.Attached {
		t.Fatalf("%s: XDP is %+v, want one", planeA, x)
	}
	if err := o.Close(); err != nil {
		t.Fatal(err)
	}
	wantNothingLeft(t, nl)
}

func TestLoadRefusesAParentTogetherWithItsVLAN(t *testing.T) {
	nl := inNetns(t)
	name := addVLAN(t, nl, planeA, 100, nil)
	for _, ifs := range [][]string{{planeA, name}, {name, planeA}} {
		_, err := Load(t.Context(), Options{Interfaces: ifs})
		wantError(t, err, ErrInUse, planeA, name)
	}
	wantNothingLeft(t, nl)
}

func TestLoadRefusesAVLANWhoseParentAnotherProcessHasAndNamesIt(t *testing.T) {
	for _, c := range []struct{ name, theirs, ours string }{
		{"the parent is theirs", planeA, planeA + ".100"},
		{"another VLAN of it is theirs", planeA + ".200", planeA + ".100"},
		{"its VLAN is theirs", planeA + ".200", planeA},
	} {
		t.Run(c.name, func(t *testing.T) {
			nl := inNetns(t)
			addVLAN(t, nl, planeA, 100, nil)
			addVLAN(t, nl, planeA, 200, nil)
			holder := holdInChild(t, c.theirs)
			_, err := Load(t.Context(), Options{Interfaces: []string{c.ours}})
			wantError(t, err, ErrInUse, planeA, c.ours, strconv.Itoa(holder.Process.Pid))
		})
	}
}

func TestLoadRemovesWhatAKilledProcessLeftOnAVLAN(t *testing.T) {
	nl := inNetns(t)
	name := addVLAN(t, nl, planeA, 100, nil)
	release := killAndKeep(t, holdInChild(t, name))
	if left := leftovers(t, nl); !slices.ContainsFunc(left, func(s string) bool { return strings.HasSuffix(s, "-"+planeA+stateSuffix) }) {
		t.Errorf("a killed process left %v, want the state file of %s among it", left, planeA)
	}
	release()
	// By way of the parent: its state file leads to the VLAN's device.
	o := mustLoad(t, Options{Interfaces: []string{planeA}})
	if err := o.Close(); err != nil {
		t.Fatal(err)
	}
	wantNothingLeft(t, nl)
}

func TestLoadRefusesAVLANOverAForeignProgramOfItsParent(t *testing.T) {
	nl := inNetns(t)
	name := addVLAN(t, nl, planeA, 100, nil)
	l, err := nl.LinkByName(planeA)
	if err != nil {
		t.Fatal(err)
	}
	lk, err := link.AttachXDP(link.XDPOptions{Program: foreignProgram(t), Interface: l.Attrs().Index, Flags: link.XDPDriverMode})
	if err != nil {
		t.Fatal(err)
	}
	_, err = Load(t.Context(), Options{Interfaces: []string{name}})
	wantError(t, err, ErrForeignProgram, planeA, name, "somebody_else")
	_ = lk.Close()
	wantNothingLeft(t, nl)
}

func TestLoadRefusesTagsThatItCannotWrite(t *testing.T) {
	for _, c := range []struct {
		name  string
		make  func(*testing.T, *netlink.Handle) string
		words []string
	}{
		{"QinQ", func(t *testing.T, nl *netlink.Handle) string {
			return addVLAN(t, nl, addVLAN(t, nl, planeA, 100, nil), 7, nil)
		}, []string{planeA + ".100.7", planeA + ".100", "QinQ", "one tag"}},
		{"802.1ad", func(t *testing.T, nl *netlink.Handle) string {
			return addVLAN(t, nl, planeA, 100, func(v *netlink.Vlan) { v.VlanProtocol = netlink.VLAN_PROTOCOL_8021AD })
		}, []string{planeA + ".100", "802.1ad", "802.1Q"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			nl := inNetns(t)
			_, err := Load(t.Context(), Options{Interfaces: []string{c.make(t, nl)}})
			wantError(t, err, ErrUnsupported, c.words...)
			wantNothingLeft(t, nl)
		})
	}
}

func TestParentThatTakesTagsOffReceivedFramesIsRefused(t *testing.T) {
	nl := inNetns(t)
	name := addVLAN(t, nl, planeA, 100, nil)
	strips, err := stripsTags(planeA)
	if err != nil {
		t.Fatal(err)
	}
	if !strips {
		t.Skip("this kernel's veth has no rx-vlan-offload")
	}
	itf := Interface{Name: name, Driver: "some_nic", VLAN: &VLAN{ID: 100, Parent: planeA}}
	wantError(t, checkTagsStay(itf), ErrUnsupported, name, "rx-vlan-offload", "ethtool -K "+planeA+" rxvlan off")

	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(s) }()
	flags, err := ethtoolValue(s, planeA, unix.ETHTOOL_GFLAGS, 0)
	if err == nil {
		_, err = ethtoolValue(s, planeA, unix.ETHTOOL_SFLAGS, flags&^ethFlagRxVLAN)
	}
	if err != nil {
		t.Fatalf("switch rx-vlan-offload off: %v", err)
	}
	if err := checkTagsStay(itf); err != nil {
		t.Errorf("refused with rx-vlan-offload off: %v", err)
	}
}

func TestPathsOfSeveralVLANsOfOneParentAreToldApartByTheirTag(t *testing.T) {
	tagged := func(tci uint16) *Path {
		p := &Path{Ifindex: 3}
		p.Tmpl[12], p.Tmpl[13], p.Tmpl[14], p.Tmpl[15] = 0x81, 0x00, byte(tci>>8), byte(tci)
		return p
	}
	plain := &Path{Ifindex: 3}
	plain.Tmpl[12] = 0x08
	vlan := func(id uint16) Interface {
		return Interface{Name: "e", Index: 9, VLAN: &VLAN{ID: id, ParentIndex: 3}}
	}
	for _, c := range []struct {
		name string
		itf  Interface
		path *Path
		want bool
	}{
		{"untagged by its own", Interface{Index: 3}, plain, true},
		{"untagged by another", Interface{Index: 4}, plain, false},
		{"its tag", vlan(100), tagged(5<<13 | 100), true},
		{"another tag", vlan(100), tagged(5<<13 | 101), false},
		{"untagged by a VLAN's parent", vlan(0), plain, false},
		{"tagged by the parent itself", Interface{Index: 3}, tagged(100), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := c.itf.Sends(c.path); got != c.want {
				t.Errorf("sends: %v, want %v", got, c.want)
			}
		})
	}
}
