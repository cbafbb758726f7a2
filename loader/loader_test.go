// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Names of the test's interfaces: a veth pair's ends.
const (
	planeA, planeB = "mrt0", "mrt1"
	peerA, peerB   = "mrt0p", "mrt1p"
)

// The test binary plays other processes too.
func TestMain(m *testing.M) {
	switch os.Getenv("MR_LOADER_CHILD") {
	case "hold":
		childHold()
	case "load":
		childLoad()
	}
	os.Exit(m.Run())
}

func childLoad() {
	o, err := Load(context.Background(), Options{Interfaces: strings.Split(os.Getenv("MR_LOADER_IFS"), ",")})
	if err != nil {
		fmt.Println("error:", err)
		os.Exit(1)
	}
	if err := o.Close(); err != nil {
		fmt.Println("error:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func childHold() {
	o, err := Load(context.Background(), Options{Interfaces: strings.Split(os.Getenv("MR_LOADER_IFS"), ",")})
	if err != nil {
		fmt.Println("error:", err)
		os.Exit(1)
	}
	fmt.Println("holding")
	// Ends with the parent at the latest.
	_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
	_ = o.Close()
	os.Exit(0)
}

// inNetns gives the test a network namespace of its own, on a locked thread, with two veth pairs.
func inNetns(t *testing.T) *netlink.Handle {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes a network namespace and loads BPF programs")
	}
	runtime.LockOSThread()
	home, err := netns.Get()
	if err != nil {
		t.Fatal(err)
	}
	ns, err := netns.New()
	if err != nil {
		t.Skipf("cannot make a network namespace: %v", err)
	}
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		nl.Close()
		_ = ns.Close()
		if err := netns.Set(home); err != nil {
			t.Error(err) // the thread stays locked and ends with the test
			return
		}
		_ = home.Close()
		runtime.UnlockOSThread()
	})
	for _, p := range [][2]string{{planeA, peerA}, {planeB, peerB}} {
		addVeth(t, nl, p[0], p[1])
	}
	return nl
}

// notShort skips what asks nothing of the kernel that other tests do not ask too: each load takes an
// emulated machine's verifier seconds.
func notShort(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("short: loads programs, and the kernel makes no difference")
	}
}

func addVeth(t *testing.T, nl *netlink.Handle, name, peer string) {
	t.Helper()
	a := netlink.NewLinkAttrs()
	a.Name, a.MTU = name, 1500
	if err := nl.LinkAdd(&netlink.Veth{LinkAttrs: a, PeerName: peer, PeerMTU: 1500}); err != nil {
		t.Fatalf("add veth %s: %v", name, err)
	}
}

func mustLoad(t *testing.T, opts Options) *Objects {
	t.Helper()
	o, err := Load(t.Context(), opts)
	if err != nil {
		t.Fatalf("Load: %+v", err)
	}
	t.Cleanup(func() {
		if err := o.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return o
}

func linkNames(t *testing.T, nl *netlink.Handle) []string {
	t.Helper()
	links, err := nl.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, l := range links {
		names = append(names, l.Attrs().Name)
	}
	slices.Sort(names)
	return names
}

func xdpOf(t *testing.T, nl *netlink.Handle, name string) *netlink.LinkXdp {
	t.Helper()
	l, err := nl.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return l.Attrs().Xdp
}

// leftovers lists what this network namespace's devices have on the machine.
func leftovers(t *testing.T, nl *netlink.Handle) []string {
	t.Helper()
	ns, err := netnsInode()
	if err != nil {
		t.Fatal(err)
	}
	var left []string
	for _, pattern := range []string{
		filepath.Join(pinRoot, fmt.Sprintf("%d-*", ns)), filepath.Join(pinRoot, fmt.Sprintf("%s%d-*", tmpPrefix, ns)),
		filepath.Join(runRoot, fmt.Sprintf("%d-*", ns)),
	} {
		m, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		left = append(left, m...)
	}
	for _, n := range linkNames(t, nl) {
		if strings.HasPrefix(n, "mrp") {
			left = append(left, n)
		}
	}
	for _, n := range []string{planeA, planeB} {
		if x := xdpOf(t, nl, n); x != nil && x.Attached {
			left = append(left, "program on "+n)
		}
	}
	return left
}

func wantNothingLeft(t *testing.T, nl *netlink.Handle) {
	t.Helper()
	if left := leftovers(t, nl); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// wantError checks a one-line error that wraps is (if not nil) and has all words.
func wantError(t *testing.T, err, is error, words ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want one with %q", words)
	}
	if is != nil && !errors.Is(err, is) {
		t.Errorf("error %q does not wrap %q", err, is)
	}
	if strings.Contains(err.Error(), "\n") {
		t.Errorf("error has several lines: %q", err)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q does not say %q", err, w)
		}
	}
}

// child starts this test binary as another process in the calling thread's network namespace.
func child(t *testing.T, role, ifs string, attr *syscall.SysProcAttr) (*exec.Cmd, *bufio.Reader) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if attr != nil && attr.Credential != nil {
		// Another user may not enter the directory where the test binary lies.
		exe = copyForAll(t, exe)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), "MR_LOADER_CHILD="+role, "MR_LOADER_IFS="+ifs)
	cmd.SysProcAttr = attr
	cmd.Dir = "/"
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = stdin.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd, bufio.NewReader(stdout)
}

func copyForAll(t *testing.T, exe string) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "mr-loader-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	b, err := os.ReadFile(exe)
	if err != nil {
		t.Fatal(err)
	}
	to := filepath.Join(dir, "child")
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(to, b, 0o755)); err != nil {
		t.Fatal(err)
	}
	return to
}

func holdInChild(t *testing.T, ifs string) *exec.Cmd {
	t.Helper()
	cmd, out := child(t, "hold", ifs, nil)
	line, err := out.ReadString('\n')
	if err != nil || line != "holding\n" {
		t.Fatalf("child said %q (%v), want holding", line, err)
	}
	return cmd
}

// killAndKeep kills the holder and keeps other processes' Loads from cleaning up after it until
// release is called.
func killAndKeep(t *testing.T, holder *exec.Cmd) (release func()) {
	t.Helper()
	unlock, err := lockRunRoot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	release = sync.OnceFunc(unlock)
	t.Cleanup(release)
	if err := holder.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = holder.Wait()
	return release
}

func TestLoadAttachesNativelyAndPinsEveryStateMapByName(t *testing.T) {
	nl := inNetns(t)
	o := mustLoad(t, Options{Interfaces: []string{planeA, planeB}})

	rx, err := o.Rx.Info()
	if err != nil {
		t.Fatal(err)
	}
	id, _ := rx.ID()
	for _, name := range []string{planeA, planeB} {
		x := xdpOf(t, nl, name)
		if x == nil || !x.Attached || x.AttachMode != 1 || x.ProgId != uint32(id) {
			t.Errorf("%s: XDP is %+v, want program %d attached natively (1)", name, x, id)
		}
	}
	tx, err := o.Tx.Info()
	if err != nil {
		t.Fatal(err)
	}
	id, _ = tx.ID()
	if x := xdpOf(t, nl, o.Parked.Name); x == nil || x.AttachMode != 1 || x.ProgId != uint32(id) {
		t.Errorf("parked %s: XDP is %+v, want program %d attached natively (1)", o.Parked.Name, x, id)
	}

	ns, err := netnsInode()
	if err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("/sys/fs/bpf/metaroce/%d-%s", ns, planeA)
	if o.PinDir != want {
		t.Errorf("pinned in %s, want %s", o.PinDir, want)
	}
	for _, dir := range []string{want, fmt.Sprintf("/sys/fs/bpf/metaroce/%d-%s", ns, planeB)} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, e := range entries {
			names = append(names, e.Name())
		}
		all := []string{"mr_conn", "mr_counter", "mr_egress", "mr_mem", "mr_path", "mr_pump", "mr_qp", "mr_region", "mr_req"}
		if !slices.Equal(names, all) {
			t.Errorf("%s has %v, want %v", dir, names, all)
		}
	}
}

func TestCloseLeavesNothingAndMoreCallsDoNothing(t *testing.T) {
	nl := inNetns(t)
	before := linkNames(t, nl)
	o := mustLoad(t, Options{Interfaces: []string{planeA, planeB}})
	if len(leftovers(t, nl)) == 0 {
		t.Fatal("a loaded device leaves no trace: the check below would prove nothing")
	}
	for range 2 {
		if err := o.Close(); err != nil {
			t.Fatalf("Close: %v", err)
		}
	}
	wantNothingLeft(t, nl)
	if after := linkNames(t, nl); !slices.Equal(before, after) {
		t.Errorf("interfaces are %v, were %v", after, before)
	}
	mustLoad(t, Options{Interfaces: []string{planeA}})
}

func TestLoadSizesMapsAndSetsConstants(t *testing.T) {
	notShort(t)
	inNetns(t)
	o := mustLoad(t, Options{Interfaces: []string{planeA}, Port: 5000, MaxConns: 5, PathPool: 40, MaxRegions: 7})
	for _, c := range []struct {
		name string
		m    *ebpf.Map
		want uint32
	}{
		{"mr_conn", o.Conn, 8},
		{"mr_req", o.Req, 8},
		{"mr_qp", o.QP, 8},
		{"mr_path", o.Path, 40},
		{"mr_region", o.Region, 7},
		{"mr_mem", o.Mem, 7},
	} {
		if got := c.m.MaxEntries(); got != c.want {
			t.Errorf("%s has %d entries, want %d", c.name, got, c.want)
		}
	}
	spec, err := o.sizedSpec()
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]uint32{"mr_port": 5000, "mr_max_conns": 8} {
		var got uint32
		if err := spec.Variables[name].Get(&got); err != nil || got != want {
			t.Errorf("%s is %d (%v), want %d", name, got, err, want)
		}
	}
}

func TestLoadRefusesAnInterfaceThatThisProcessHas(t *testing.T) {
	notShort(t)
	inNetns(t)
	o := mustLoad(t, Options{Interfaces: []string{planeA, planeB}})
	for _, name := range []string{planeA, planeB} {
		_, err := Load(t.Context(), Options{Interfaces: []string{name}})
		wantError(t, err, ErrInUse, name, strconv.Itoa(os.Getpid()))
	}
	if _, err := os.Stat(filepath.Join(o.PinDir, "mr_conn")); err != nil {
		t.Errorf("the refused Load took the device's pins: %v", err)
	}
}

func TestLoadRefusesAnInterfaceOfAnotherProcessAndNamesItsPID(t *testing.T) {
	nl := inNetns(t)
	holder := holdInChild(t, planeA)
	_, err := Load(t.Context(), Options{Interfaces: []string{planeB, planeA}})
	wantError(t, err, ErrInUse, planeA, strconv.Itoa(holder.Process.Pid))
	if x := xdpOf(t, nl, planeA); x == nil || !x.Attached {
		t.Error("the refused Load detached the holder's program")
	}
	if x := xdpOf(t, nl, planeB); x != nil && x.Attached {
		t.Error("the refused Load left a program on the free interface")
	}
	mustLoad(t, Options{Interfaces: []string{planeB}})
}

func TestLoadRemovesWhatAKilledProcessLeft(t *testing.T) {
	nl := inNetns(t)
	holder := holdInChild(t, planeA+","+planeB)
	release := killAndKeep(t, holder)
	left := leftovers(t, nl)
	parked := 0
	for _, n := range left {
		if strings.HasPrefix(n, "mrp") {
			parked++
		}
		if strings.HasPrefix(n, "program") {
			t.Errorf("%s outlives its process", n)
		}
	}
	if parked != 2 || len(left) != 6 {
		t.Fatalf("a killed process leaves %v, want 2 pin entries, 2 state files and a parked pair", left)
	}
	release()

	// By way of its second interface: everything of the old device has to go.
	o := mustLoad(t, Options{Interfaces: []string{planeB}})
	for _, n := range leftovers(t, nl) {
		if strings.Contains(n, planeA) || strings.HasPrefix(n, "mrp") && n != o.Parked.Name && n != strings.TrimSuffix(o.Parked.Name, "a")+"b" {
			t.Errorf("still there: %s", n)
		}
	}
	if err := o.Close(); err != nil {
		t.Fatal(err)
	}
	wantNothingLeft(t, nl)
}

func TestLoadRemovesPinsOfADeadProcessInAnotherNamespace(t *testing.T) {
	notShort(t)
	inNetns(t)
	ns, err := netnsInode()
	if err != nil {
		t.Fatal(err)
	}
	holder := holdInChild(t, planeA)
	release := killAndKeep(t, holder)
	dir := filepath.Join(pinRoot, deviceKey(ns, planeA))
	if _, err := os.Stat(dir); err != nil {
		t.Fatalf("a killed process leaves no pins: %v", err)
	}
	release()
	t.Run("elsewhere", func(t *testing.T) {
		inNetns(t)
		mustLoad(t, Options{Interfaces: []string{planeA}})
		if _, err := os.Stat(dir); err == nil {
			t.Errorf("%s is still there", dir)
		}
	})
}

func foreignProgram(t *testing.T) *ebpf.Program {
	t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "somebody_else", Type: ebpf.XDP, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

func TestLoadRefusesOverAForeignProgramNamingIt(t *testing.T) {
	for _, mode := range []struct {
		name  string
		flags link.XDPAttachFlags
	}{{ModeNative, link.XDPDriverMode}, {ModeGeneric, link.XDPGenericMode}} {
		t.Run(mode.name, func(t *testing.T) {
			nl := inNetns(t)
			l, err := nl.LinkByName(planeB)
			if err != nil {
				t.Fatal(err)
			}
			p := foreignProgram(t)
			lk, err := link.AttachXDP(link.XDPOptions{Program: p, Interface: l.Attrs().Index, Flags: mode.flags})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = lk.Close() }()
			info, err := p.Info()
			if err != nil {
				t.Fatal(err)
			}
			id, _ := info.ID()
			_, err = Load(t.Context(), Options{Interfaces: []string{planeA, planeB}})
			wantError(t, err, ErrForeignProgram, planeB, "somebody_else", strconv.Itoa(int(id)), mode.name)
			if x := xdpOf(t, nl, planeB); x == nil || x.ProgId != uint32(id) {
				t.Errorf("XDP is %+v, want the foreign program still there", x)
			}
			_ = lk.Close()
			wantNothingLeft(t, nl)
		})
	}
}

func TestInterfaceWithoutNativeXDPIsRefusedUnlessGenericIsAskedFor(t *testing.T) {
	nl := inNetns(t)
	_, err := Load(t.Context(), Options{Interfaces: []string{planeA, "lo"}})
	wantError(t, err, ErrUnsupported, "lo", "driver", "native XDP", "--generic")
	wantNothingLeft(t, nl)

	o := mustLoad(t, Options{Interfaces: []string{"lo"}, Generic: true})
	if x := xdpOf(t, nl, "lo"); x == nil || x.AttachMode != 2 {
		t.Errorf("lo: XDP is %+v, want generic (2)", x)
	}
	if o.Interfaces[0].Mode != ModeGeneric {
		t.Errorf("mode is %q, want %q", o.Interfaces[0].Mode, ModeGeneric)
	}
}

func setMTU(t *testing.T, nl *netlink.Handle, mtu int, names ...string) {
	t.Helper()
	for _, n := range names {
		l, err := nl.LinkByName(n)
		if err == nil {
			err = nl.LinkSetMTU(l, mtu)
		}
		if err != nil {
			t.Fatalf("set MTU of %s: %v", n, err)
		}
	}
}

func TestLoadRefusesAnMTUThatIsTooSmall(t *testing.T) {
	nl := inNetns(t)
	setMTU(t, nl, MinMTU-1, planeA, peerA)
	_, err := Load(t.Context(), Options{Interfaces: []string{planeA}})
	wantError(t, err, nil, strconv.Itoa(MinMTU-1), strconv.Itoa(MinMTU), planeA, "MTU")
	wantNothingLeft(t, nl)
}

func TestErrorOfADriverWithoutJumboXDPNamesBothMTUs(t *testing.T) {
	for _, errno := range []unix.Errno{unix.ERANGE, unix.EINVAL, unix.EOPNOTSUPP} {
		err := attachError(Interface{Name: "eth1", MTU: 9000, Driver: "virtio_net", Mode: ModeGeneric}, errno, reason{})
		wantError(t, err, ErrUnsupported, "eth1", "virtio_net", "9000", strconv.Itoa(MaxNativeMTU))
	}
}

func TestLoadTakesTheSmallestAndTheLargestMTU(t *testing.T) {
	for _, mtu := range []int{MinMTU, MaxNativeMTU, 9000} {
		t.Run(strconv.Itoa(mtu), func(t *testing.T) {
			nl := inNetns(t)
			setMTU(t, nl, mtu, planeA, peerA)
			mustLoad(t, Options{Interfaces: []string{planeA}})
		})
	}
}

func TestLoadRefusesAbsentInterfacesAndBadNumbers(t *testing.T) {
	nl := inNetns(t)
	for _, c := range []struct {
		name  string
		opts  Options
		words []string
	}{
		{"no interface", Options{}, []string{"interface"}},
		{"absent", Options{Interfaces: []string{planeA, "nosuch0"}}, []string{"nosuch0", planeB}},
		{"twice", Options{Interfaces: []string{planeA, planeA}}, []string{planeA, "twice"}},
		{"connections", Options{Interfaces: []string{planeA}, MaxConns: MaxConns + 1}, []string{"4097", "4096"}},
		{"paths", Options{Interfaces: []string{planeA}, PathPool: -1}, []string{"-1", "paths"}},
		{"regions", Options{Interfaces: []string{planeA}, MaxRegions: 1 << 20}, []string{"1048576", "65536"}},
	} {
		// No t.Run: that would be another thread, in another network namespace.
		t.Log(c.name)
		_, err := Load(t.Context(), c.opts)
		wantError(t, err, nil, c.words...)
		wantNothingLeft(t, nl)
	}
}

func TestLoadWithoutRootFailsInOneLineNamingTheCapabilities(t *testing.T) {
	nl := inNetns(t)
	_, out := child(t, "load", planeA, &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}})
	text := readAll(t, out)
	if strings.Count(text, "\n") != 1 || !strings.HasPrefix(text, "error: ") {
		t.Errorf("output is %q, want one line of error", text)
	}
	for _, w := range []string{"65534", "root", "CAP_BPF", "CAP_NET_ADMIN"} {
		if !strings.Contains(text, w) {
			t.Errorf("output %q does not say %q", text, w)
		}
	}
	wantNothingLeft(t, nl)
}

func readAll(t *testing.T, r *bufio.Reader) string {
	t.Helper()
	var b strings.Builder
	if _, err := r.WriteTo(&b); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestLoadMountsTheBPFFileSystemWhenItIsMissing(t *testing.T) {
	nl := inNetns(t)
	// The mounts of one thread, which ends with the test.
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		t.Skipf("cannot make a mount namespace: %v", err)
	}
	runtime.LockOSThread() // once more than Cleanup unlocks
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		t.Skipf("cannot make mounts private: %v", err)
	}
	for {
		ok, err := isBPFFS()
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			break
		}
		if err := unix.Unmount(bpffsRoot, unix.MNT_DETACH); err != nil {
			t.Skipf("cannot unmount %s: %v", bpffsRoot, err)
		}
	}
	o := mustLoad(t, Options{Interfaces: []string{planeA}})
	if ok, err := isBPFFS(); !ok {
		t.Errorf("%s has no BPF file system (%v)", bpffsRoot, err)
	}
	if _, err := os.Stat(filepath.Join(o.PinDir, "mr_conn")); err != nil {
		t.Error(err)
	}
	if err := o.Close(); err != nil {
		t.Error(err)
	}
	wantNothingLeft(t, nl)
}

func TestTwoDevicesOfTheSameInterfaceNameLiveInTwoNamespaces(t *testing.T) {
	notShort(t)
	inNetns(t)
	a := mustLoad(t, Options{Interfaces: []string{planeA}})
	t.Run("other namespace", func(t *testing.T) {
		inNetns(t)
		b := mustLoad(t, Options{Interfaces: []string{planeA}})
		if a.PinDir == b.PinDir {
			t.Errorf("both pin in %s", a.PinDir)
		}
	})
	if _, err := os.Stat(filepath.Join(a.PinDir, "mr_conn")); err != nil {
		t.Errorf("closing the other device took our pins: %v", err)
	}
}

func TestInterfaceNameWithADotGetsPins(t *testing.T) {
	notShort(t)
	nl := inNetns(t)
	addVeth(t, nl, "mrt.7", "mrt7p")
	o := mustLoad(t, Options{Interfaces: []string{"mrt.7"}})
	if !strings.HasSuffix(o.PinDir, "-mrt:7") {
		t.Errorf("pinned in %s, want a name that ends in -mrt:7 (a BPF file system takes no dots)", o.PinDir)
	}
}

func TestCanceledContextLoadsNothing(t *testing.T) {
	nl := inNetns(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := Load(ctx, Options{Interfaces: []string{planeA}})
	wantError(t, err, context.Canceled, planeA)
	wantNothingLeft(t, nl)
}

func TestGenericModeWarnsWhenTheDriverCannotSend(t *testing.T) {
	nl := inNetns(t)
	l, err := nl.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := xdpFeatures(l.Attrs().Index); err != nil {
		t.Skipf("this kernel does not tell: %v", err)
	}
	var out bytes.Buffer
	mustLoad(t, Options{Interfaces: []string{"lo"}, Generic: true, Logger: slog.New(slog.NewTextHandler(&out, nil))})
	if s := out.String(); !strings.Contains(s, "level=WARN") || !strings.Contains(s, "interface=lo") {
		t.Errorf("log is %q, want a warning that names lo", s)
	}
}

func TestCloseSucceedsWhenTheInterfacesAreGone(t *testing.T) {
	nl := inNetns(t)
	o := mustLoad(t, Options{Interfaces: []string{planeA}})
	for _, name := range []string{planeA, o.Parked.Name} {
		l, err := nl.LinkByName(name)
		if err == nil {
			err = nl.LinkDel(l)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := o.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	if _, err := os.Lstat(o.PinDir); err == nil {
		t.Errorf("%s is still there", o.PinDir)
	}
}

func TestCloseWorksFromAnotherNetworkNamespace(t *testing.T) {
	nl := inNetns(t)
	o := mustLoad(t, Options{Interfaces: []string{planeA}})
	// A goroutine of its own: another thread, in the namespace that the process started in.
	done := make(chan error)
	go func() { done <- o.Close() }()
	if err := <-done; err != nil {
		t.Errorf("Close: %v", err)
	}
	wantNothingLeft(t, nl)
}

func TestLoadGivesUpWaitingForAnotherLoadWhenItsContextEnds(t *testing.T) {
	nl := inNetns(t)
	if err := os.MkdirAll(runRoot, 0o755); err != nil {
		t.Fatal(err)
	}
	release, err := lockRunRoot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	_, err = Load(ctx, Options{Interfaces: []string{planeA}})
	release()
	wantError(t, err, context.DeadlineExceeded, runRoot)
	wantNothingLeft(t, nl)
}

func TestFindListsDevicesAndWhetherTheirProcessLives(t *testing.T) {
	notShort(t)
	inNetns(t)
	find := func() *Device {
		devs, err := Find()
		if err != nil {
			t.Fatal(err)
		}
		ns, err := netnsInode()
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range devs {
			if d.Name == deviceKey(ns, planeA) {
				return &d
			}
			if d.Name == deviceKey(ns, planeB) {
				t.Errorf("the second interface is listed as a device of its own")
			}
		}
		return nil
	}
	holder := holdInChild(t, planeA+","+planeB)
	d := find()
	if d == nil {
		t.Fatal("a loaded device is not found")
	}
	if !d.Alive || d.Owner.PID != holder.Process.Pid || len(d.Owner.Interfaces) != 2 || d.Owner.Interfaces[1].Name != planeB {
		t.Errorf("device is %+v, want it alive with pid %d and two interfaces", d, holder.Process.Pid)
	}
	release := killAndKeep(t, holder)
	if d = find(); d == nil || d.Alive {
		t.Errorf("device of a killed process is %+v, want it there and not alive", d)
	}
	release()
	mustLoad(t, Options{Interfaces: []string{planeA}})
}

func TestPinnedStateReadsWhatTheDeviceHolds(t *testing.T) {
	inNetns(t)
	o := mustLoad(t, Options{Interfaces: []string{planeA}, MaxConns: 4, PathPool: 32, MaxRegions: 8})
	c := Conn{Qpn: 2, PeerQpn: 77, Npaths: 1, PathBase: 8}
	c.Tx[0].Sport = 50000
	if err := o.Conn.Put(uint32(2), &c); err != nil {
		t.Fatal(err)
	}
	if err := o.Path.Put(uint32(8), &Path{Ifindex: 42}); err != nil {
		t.Fatal(err)
	}
	if err := o.Region.Put(uint32(3), &Region{Key: 3<<8 | 9, Access: AccessRemoteWrite, Len: 4096}); err != nil {
		t.Fatal(err)
	}
	if err := o.Pump.Put(uint32(0), &Pump{Burst: 5}); err != nil {
		t.Fatal(err)
	}
	perCPU := make([]Counters, ebpf.MustPossibleCPU())
	for i := range perCPU {
		perCPU[i].SentPkts, perCPU[i].BadReady = uint64(i+1), 10
	}
	if err := o.Counter.Put(uint32(0), perCPU); err != nil {
		t.Fatal(err)
	}

	s, err := OpenPinned(o.PinDir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	if s.MaxConns() != 4 {
		t.Errorf("MaxConns is %d, want 4", s.MaxConns())
	}
	got, err := s.Conn(2)
	if err != nil || got.PeerQpn != 77 || got.Tx[0].Sport != 50000 {
		t.Errorf("connection is %+v (%v), want what was written", got, err)
	}
	if p, err := s.Path(8); err != nil || p.Ifindex != 42 {
		t.Errorf("path is %+v (%v), want ifindex 42", p, err)
	}
	if r, err := s.Regions(); err != nil || len(r) != 1 || r[0].Key != 3<<8|9 {
		t.Errorf("regions are %+v (%v), want key %#x only", r, err, 3<<8|9)
	}
	if p, err := s.Pump(); err != nil || p.Burst != 5 {
		t.Errorf("pump is %v (%v), want burst 5", p, err)
	}
	n := uint64(len(perCPU))
	if k, err := s.Counters(); err != nil || k.SentPkts != n*(n+1)/2 || k.BadReady != 10*n {
		t.Errorf("counters are %+v (%v), want sums over %d CPUs", k, err, n)
	}
	if err := s.conn.Put(uint32(0), &Conn{}); err == nil {
		t.Error("the reader can write")
	}
}

func TestControlProgramAnswers(t *testing.T) {
	inNetns(t)
	o := mustLoad(t, Options{Interfaces: []string{planeA}, MaxConns: 4})
	got, err := o.RunControl(Ctl{Op: CtlKick, Slot: 1 << 20, Qpn: 1})
	if err != nil || got != CtlNoConn {
		t.Errorf("a command for a slot out of range gives %d (%v), want %d", got, err, CtlNoConn)
	}
}

func TestQueuesAndRegionsGoIntoTheirMapsAndAreMapped(t *testing.T) {
	inNetns(t)
	o := mustLoad(t, Options{Interfaces: []string{planeA}})
	q, err := o.NewQPage()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = q.Close() }()
	if err := o.QP.Put(uint32(0), q); err != nil {
		t.Error(err)
	}
	r, err := o.NewRegionMap(BlockBytes + 1)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	if err := o.Mem.Put(uint32(1), r); err != nil {
		t.Error(err)
	}
	b, err := Mmap(r)
	if err != nil {
		t.Fatal(err)
	}
	if len(b) != 2*BlockBytes {
		t.Errorf("%d bytes mapped, want 2 blocks", len(b))
	}
	b[BlockBytes] = 0xA5
	block := make([]byte, BlockBytes)
	if err := r.Lookup(uint32(1), &block); err != nil || block[0] != 0xA5 {
		t.Errorf("block 1 begins with %#x (%v), want what was stored through the mapping", block[0], err)
	}
	if err := Munmap(b); err != nil {
		t.Error(err)
	}
	if _, err := o.NewRegionMap(0); err == nil {
		t.Error("a region of no bytes is made")
	}
}

func TestPacketsThatAreNotOursPassTheAttachedProgram(t *testing.T) {
	nl := inNetns(t)
	mustLoad(t, Options{Interfaces: []string{planeA}})
	for _, n := range []string{planeA, peerA} {
		l, err := nl.LinkByName(n)
		if err == nil {
			err = nl.LinkSetUp(l)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	l, err := nl.LinkByName(planeA)
	if err != nil {
		t.Fatal(err)
	}
	peer, err := nl.LinkByName(peerA)
	if err != nil {
		t.Fatal(err)
	}
	// A frame of an experimental EtherType, until the receiving end's packet socket has it.
	in := packetSocket(t, l.Attrs().Index)
	out := packetSocket(t, peer.Attrs().Index)
	frame := make([]byte, 64)
	copy(frame, l.Attrs().HardwareAddr)
	copy(frame[6:], peer.Attrs().HardwareAddr)
	frame[12], frame[13] = 0x88, 0xb5
	buf := make([]byte, 2048)
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); {
		if _, err := unix.Write(out, frame); err != nil && !errors.Is(err, unix.ENETDOWN) {
			t.Fatal(err)
		}
		n, _, err := unix.Recvfrom(in, buf, 0)
		if err == nil && n >= 14 && buf[12] == 0x88 && buf[13] == 0xb5 {
			return
		}
	}
	t.Error("no frame came through in 10 s")
}

func packetSocket(t *testing.T, ifindex int) int {
	t.Helper()
	const ethAll = 0x0300 // ETH_P_ALL, big-endian
	s, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, ethAll)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(s) })
	if err := unix.Bind(s, &unix.SockaddrLinklayer{Protocol: ethAll, Ifindex: ifindex}); err != nil {
		t.Fatal(err)
	}
	if err := unix.SetsockoptTimeval(s, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 100_000}); err != nil {
		t.Fatal(err)
	}
	return s
}
