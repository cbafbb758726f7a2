// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bytes"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

func TestKindsThatCannotSendAreRefusedNamingWhatToGiveInstead(t *testing.T) {
	attrs := func(mac string) netlink.LinkAttrs {
		a := netlink.NewLinkAttrs()
		a.Name, a.Index = "x0", 7
		if mac != "" {
			a.HardwareAddr, _ = net.ParseMAC(mac)
		}
		return a
	}
	const mac = "02:00:00:00:00:01"
	for _, c := range []struct {
		name  string
		link  netlink.Link
		words []string // none: taken
	}{
		{"bond", &netlink.Bond{LinkAttrs: attrs(mac)}, []string{"bond", "members as planes", "(e1, e2)"}},
		{"team", &netlink.GenericLink{LinkAttrs: attrs(mac), LinkType: "team"}, []string{"team", "ports as planes", "(e1, e2)"}},
		{"bridge", &netlink.Bridge{LinkAttrs: attrs(mac)}, []string{"bridge", "port", "(e1, e2)"}},
		{"ipvlan", &netlink.IPVlan{LinkAttrs: attrs(mac)}, []string{"ipvlan", "its parent (e1, e2)"}},
		{"wireguard", &netlink.Wireguard{LinkAttrs: attrs("")}, []string{"tunnel", "leave by"}},
		{"tun", &netlink.Tuntap{LinkAttrs: attrs(""), Mode: netlink.TUNTAP_MODE_TUN}, []string{"tunnel", "leave by"}},
		{"vxlan", &netlink.Vxlan{LinkAttrs: attrs(mac)}, []string{"tunnel", "leave by"}},
		{"tap", &netlink.Tuntap{LinkAttrs: attrs(mac), Mode: netlink.TUNTAP_MODE_TAP}, nil},
		{"physical", &netlink.Device{LinkAttrs: attrs(mac)}, nil},
		{"veth", &netlink.Veth{LinkAttrs: attrs(mac)}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := checkKind(c.link, func() []string { return []string{"e1", "e2"} })
			if c.words == nil {
				if err != nil {
					t.Errorf("refused: %v", err)
				}
				return
			}
			wantError(t, err, ErrUnsupported, append(c.words, "interface x0")...)
		})
	}
}

func TestBridgeIsRefusedNamingItsPorts(t *testing.T) {
	nl := inNetns(t)
	a := netlink.NewLinkAttrs()
	a.Name = "mrtbr"
	if err := nl.LinkAdd(&netlink.Bridge{LinkAttrs: a}); err != nil {
		t.Skipf("this kernel makes no bridges: %v", err)
	}
	br, err := nl.LinkByName("mrtbr")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{planeA, planeB} {
		l, err := nl.LinkByName(name)
		if err == nil {
			err = nl.LinkSetMaster(l, br)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, generic := range []bool{false, true} {
		_, err = Load(t.Context(), Options{Interfaces: []string{"mrtbr"}, Generic: generic})
		wantError(t, err, ErrUnsupported, "mrtbr", "bridge", planeA, planeB)
	}
	wantNothingLeft(t, nl)
	mustLoad(t, Options{Interfaces: []string{planeA}}) // a port is taken
}

func addMacvlan(t *testing.T, nl *netlink.Handle, name, parent string) {
	t.Helper()
	l, err := nl.LinkByName(parent)
	if err != nil {
		t.Fatal(err)
	}
	a := netlink.NewLinkAttrs()
	a.Name, a.ParentIndex = name, l.Attrs().Index
	err = nl.LinkAdd(&netlink.Macvlan{LinkAttrs: a, Mode: netlink.MACVLAN_MODE_BRIDGE})
	if errors.Is(err, unix.EOPNOTSUPP) {
		t.Skipf("this kernel makes no macvlan interfaces: %v", err)
	}
	if err != nil {
		t.Fatalf("add macvlan %s: %v", name, err)
	}
}

func TestMacvlanIsServedByAProgramOnItsParent(t *testing.T) {
	nl := inNetns(t)
	addMacvlan(t, nl, "mrtmv", planeA)
	o := mustLoad(t, Options{Interfaces: []string{"mrtmv"}})
	if x := xdpOf(t, nl, planeA); x == nil || x.AttachMode != 1 {
		t.Errorf("%s: XDP is %+v, want native (1)", planeA, x)
	}
	itf := o.Interfaces[0]
	parent, err := nl.LinkByName(planeA)
	if err != nil {
		t.Fatal(err)
	}
	if lower, index := itf.Lower(); lower != planeA || index != parent.Attrs().Index || itf.Driver != "veth" {
		t.Errorf("programs go to %s (%d, driver %s), want %s (%d, veth)", lower, index, itf.Driver, planeA, parent.Attrs().Index)
	}
	_, err = Load(t.Context(), Options{Interfaces: []string{planeA}})
	wantError(t, err, ErrInUse, planeA)
	if err := o.Close(); err != nil {
		t.Fatal(err)
	}
	wantNothingLeft(t, nl)
	_, err = Load(t.Context(), Options{Interfaces: []string{planeA, "mrtmv"}})
	wantError(t, err, ErrInUse, planeA, "mrtmv")
}

func TestPathsOfSeveralMacvlansOfOneParentAreToldApartByTheirLinkAddress(t *testing.T) {
	p := &Path{Ifindex: 3}
	copy(p.Tmpl[6:], []byte{2, 0, 0, 0, 0, 9})
	for mac, want := range map[string]bool{"02:00:00:00:00:09": true, "02:00:00:00:00:08": false} {
		if got := (Interface{Index: 9, MAC: mac, Macvlan: &Below{Index: 3}}).Sends(p); got != want {
			t.Errorf("%s sends: %v, want %v", mac, got, want)
		}
	}
}

// otherNetns makes a network namespace that lasts as long as the test.
func otherNetns(t *testing.T) netns.NsHandle {
	t.Helper()
	ns := netns.None()
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		var err error
		ns, err = netns.New()
		made <- err
	}()
	if err := <-made; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	return ns
}

// doIn runs f in a network namespace, on a thread of its own.
func doIn(ns netns.NsHandle, f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if err := netns.Set(ns); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}

func bothUp(t *testing.T, nl *netlink.Handle, names ...string) {
	t.Helper()
	for _, n := range names {
		l, err := nl.LinkByName(n)
		if err == nil {
			err = nl.LinkSetUp(l)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestVethWithDifferentModesAtItsEndsIsRefusedAtBoth(t *testing.T) {
	for _, c := range []struct {
		name          string
		first, second bool // generic
		refused       bool
	}{
		{"native, then generic", false, true, true},
		{"generic, then native", true, false, true},
		{"generic twice", true, true, true},
		{"native twice", false, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			nl := inNetns(t)
			bothUp(t, nl, planeA, peerA)
			var out bytes.Buffer
			log := slog.New(slog.NewTextHandler(&out, nil))
			mustLoad(t, Options{Interfaces: []string{planeA}, Generic: c.first, Logger: log})
			if !strings.Contains(out.String(), "other end") {
				t.Errorf("log is %q, want a word about the other end, which has no program yet", out.String())
			}
			o, err := Load(t.Context(), Options{Interfaces: []string{peerA}, Generic: c.second})
			if !c.refused {
				if err != nil {
					t.Fatal(err)
				}
				if err := o.Close(); err != nil {
					t.Error(err)
				}
				return
			}
			wantError(t, err, ErrUnsupported, peerA, planeA, "generic mode", "other end", "native at both ends")
			if x := xdpOf(t, nl, peerA); x != nil && x.Attached {
				t.Error("the refused Load left its program")
			}
		})
	}
}

func TestVethPeerInAnotherNetworkNamespaceIsLookedAt(t *testing.T) {
	nl := inNetns(t)
	bothUp(t, nl, planeA)
	l, err := nl.LinkByName(peerA)
	if err != nil {
		t.Fatal(err)
	}
	ns := otherNetns(t)
	if err := nl.LinkSetNsFd(l, int(ns)); err != nil {
		t.Fatal(err)
	}
	var lk link.Link
	err = doIn(ns, func() error {
		far, err := net.InterfaceByName(peerA)
		if err == nil {
			lk, err = link.AttachXDP(link.XDPOptions{Program: foreignProgram(t), Interface: far.Index, Flags: link.XDPGenericMode})
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer lk.Close()
	_, err = Load(t.Context(), Options{Interfaces: []string{planeA}})
	wantError(t, err, ErrUnsupported, planeA, peerA, "network namespace id", "generic mode at the veth pair's other end")
	wantNothingLeft(t, nl)
}

func TestKernelsOwnWordsAreInTheErrorOfARefusedProgram(t *testing.T) {
	nl := inNetns(t)
	lo, err := nl.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	words, ok := setXDP(lo.Attrs().Index, foreignProgram(t).FD(), unix.XDP_FLAGS_DRV_MODE|unix.XDP_FLAGS_UPDATE_IF_NOEXIST)
	if ok || !strings.Contains(words, "not support") {
		t.Errorf("the kernel says %q (attached: %v), want why lo takes no native program", words, ok)
	}
	l, err := nl.LinkByName(planeA)
	if err != nil {
		t.Fatal(err)
	}
	lk, err := link.AttachXDP(link.XDPOptions{Program: foreignProgram(t), Interface: l.Attrs().Index, Flags: link.XDPDriverMode})
	if err != nil {
		t.Fatal(err)
	}
	defer lk.Close()
	before := xdpOf(t, nl, planeA).ProgId
	if r := whyNot(foreignProgram(t), Interface{Name: planeA, Index: l.Attrs().Index, Mode: ModeNative}); r.words == "" {
		t.Error("no words for an interface that is taken")
	}
	if x := xdpOf(t, nl, planeA); x == nil || x.ProgId != before {
		t.Errorf("asking changed the program: %+v, want id %d", x, before)
	}
}

func TestAttachErrorsSayWhatWasFoundAndWhatIsWanted(t *testing.T) {
	for _, c := range []struct {
		name   string
		driver string
		mtu    int
		errno  unix.Errno
		why    reason
		words  []string
	}{
		{"no native XDP", "e1000", 9000, unix.EOPNOTSUPP, reason{words: "Underlying driver does not support XDP in native mode"}, []string{"no native XDP", "--generic"}},
		{"jumbo without frags", "virtio_net", 9000, unix.EINVAL, reason{words: "MTU too large to enable XDP without frags"}, []string{"MTU is 9000", "at most 3498", "without frags"}},
		{"guest offloads", "virtio_net", 1500, unix.EOPNOTSUPP, reason{words: "Can't set XDP while host is implementing GRO_HW/CSUM, disable GRO_HW/CSUM first"}, []string{"ethtool -K eth1 lro off rx-gro-hw off", guestOffloads, "GRO_HW"}},
		{"LRO", "mlx5_core", 1500, unix.EINVAL, reason{words: "can't set XDP while HW-GRO/LRO is on, disable them first"}, []string{"ethtool -K eth1 lro off rx-gro-hw off"}},
		{"LRO without a word", "ixgbe", 1500, unix.EINVAL, reason{lro: true}, []string{"ethtool -K eth1 lro off rx-gro-hw off"}},
		{"queues", "ena", 1500, unix.EINVAL, reason{words: "the Rx/Tx channel count should be at most half of the maximum allowed"}, []string{"channel count"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := attachError(Interface{Name: "eth1", MTU: c.mtu, Driver: c.driver, Mode: ModeNative}, c.errno, c.why)
			wantError(t, err, nil, append(c.words, "eth1")...)
			if strings.Contains(err.Error(), guestOffloads) != (c.driver == "virtio_net" && strings.Contains(c.why.words, "GRO")) {
				t.Errorf("error is %q: the hypervisor's options are virtio_net's", err)
			}
		})
	}
}

// tso asks for tcp-segmentation-offload.
func tso(t *testing.T, name string) bool {
	t.Helper()
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(s)
	on, err := ethtoolValue(s, name, unix.ETHTOOL_GTSO, 0)
	if err != nil {
		t.Fatal(err)
	}
	return on != 0
}

func TestFirstInterfaceIsAsItWasWhenTheSecondCannotBeAttached(t *testing.T) {
	if testing.Short() {
		t.Skip("short: does not depend on the kernel")
	}
	for _, c := range []struct {
		name   string
		second func(*testing.T, *netlink.Handle) string
		is     error
	}{
		{"it has no native XDP", func(*testing.T, *netlink.Handle) string { return "lo" }, ErrUnsupported},
		{"somebody else's program is there", func(t *testing.T, nl *netlink.Handle) string {
			l, err := nl.LinkByName(planeB)
			if err != nil {
				t.Fatal(err)
			}
			lk, err := link.AttachXDP(link.XDPOptions{Program: foreignProgram(t), Interface: l.Attrs().Index, Flags: link.XDPDriverMode})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { lk.Close() })
			return planeB
		}, ErrForeignProgram},
		{"its other end is in generic mode", func(t *testing.T, nl *netlink.Handle) string {
			bothUp(t, nl, planeB, peerB)
			l, err := nl.LinkByName(peerB)
			if err != nil {
				t.Fatal(err)
			}
			lk, err := link.AttachXDP(link.XDPOptions{Program: foreignProgram(t), Interface: l.Attrs().Index, Flags: link.XDPGenericMode})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { lk.Close() })
			return planeB
		}, ErrUnsupported},
	} {
		t.Run(c.name, func(t *testing.T) {
			nl := inNetns(t)
			bothUp(t, nl, planeA, peerA)
			second := c.second(t, nl)
			before, links := tso(t, peerA), linkNames(t, nl)
			if !before {
				t.Fatal("the peer's TSO is off before: the check would prove nothing")
			}
			o := mustLoad(t, Options{Interfaces: []string{planeA}})
			if tso(t, peerA) {
				t.Log("this kernel keeps TSO with XDP")
			}
			if err := o.Close(); err != nil {
				t.Fatal(err)
			}
			_, err := Load(t.Context(), Options{Interfaces: []string{planeA, second}})
			wantError(t, err, c.is, second)
			if x := xdpOf(t, nl, planeA); x != nil && x.Attached {
				t.Errorf("%s: XDP is %+v, want none", planeA, x)
			}
			if !tso(t, peerA) {
				t.Errorf("TSO of %s is off, was on", peerA)
			}
			if after := linkNames(t, nl); strings.Join(after, " ") != strings.Join(links, " ") {
				t.Errorf("interfaces are %v, were %v", after, links)
			}
			ns, _ := netnsInode()
			for _, dir := range []string{pinRoot, runRoot} {
				if left, _ := filepath.Glob(filepath.Join(dir, "*"+deviceKey(ns, "")+"*")); len(left) > 0 {
					t.Errorf("left behind: %v", left)
				}
			}
		})
	}
}
