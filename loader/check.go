// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	// MinMTU takes a payload of 1024 bytes with every header over IPv6: 40 + 8 + 12 + 32 + 24.
	MinMTU = 1024 + 116
	// MaxNativeMTU bounds drivers that take frames of one page only: what a page has besides XDP's
	// headroom (256), the kernel's tail (320) and
	// Ethernet with two VLAN tags (22).
	MaxNativeMTU = 4096 - 256 - 320 - 22

	minMajor, minMinor = 6, 1

	xdpLiveFrames = 1 << 1 // BPF_F_TEST_XDP_LIVE_FRAMES
)

// checkKernel compares the running kernel with the oldest that has all we use.
func checkKernel() error {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return fmt.Errorf("ask for the kernel's version: %w", err)
	}
	return checkRelease(unix.ByteSliceToString(u.Release[:]))
}

func checkRelease(release string) error {
	major, minor, ok := parseRelease(release)
	if !ok {
		return fmt.Errorf("kernel release is %q, want %d.%d or later: %w", release, minMajor, minMinor, ErrUnsupported)
	}
	if major < minMajor || major == minMajor && minor < minMinor {
		return fmt.Errorf("kernel is %s, want %d.%d or later: %w", release, minMajor, minMinor, ErrUnsupported)
	}
	return nil
}

func parseRelease(release string) (major, minor int, ok bool) {
	parts := strings.SplitN(release, ".", 3)
	if len(parts) < 2 {
		return 0, 0, false
	}
	major, err := strconv.Atoi(parts[0])
	if err != nil {
		return 0, 0, false
	}
	end := 0
	for end < len(parts[1]) && parts[1][end] >= '0' && parts[1][end] <= '9' {
		end++
	}
	minor, err = strconv.Atoi(parts[1][:end])
	return major, minor, err == nil
}

// checkCapabilities wants what loading, attaching and making the parked interface need.
func checkCapabilities() error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return fmt.Errorf("ask for this process's capabilities: %w", err)
	}
	has := func(c int) bool { return data[c/32].Effective&(1<<(c%32)) != 0 }
	var missing []string
	for _, c := range []struct {
		bit  int
		name string
	}{{unix.CAP_BPF, "CAP_BPF"}, {unix.CAP_PERFMON, "CAP_PERFMON"}} {
		if !has(c.bit) && !has(unix.CAP_SYS_ADMIN) {
			missing = append(missing, c.name)
		}
	}
	if !has(unix.CAP_NET_ADMIN) {
		missing = append(missing, "CAP_NET_ADMIN")
	}
	if len(missing) > 0 {
		return fmt.Errorf("user id is %d without %s, want root or these capabilities: %w",
			os.Geteuid(), strings.Join(missing, ", "), ErrPermission)
	}
	return nil
}

// probeFeatures tries what a kernel of the right version may still lack.
func probeFeatures() error {
	if err := features.HaveMapType(ebpf.RingBuf); err != nil {
		return fmt.Errorf("BPF ring buffers: found none, want them: %w: %w", ErrUnsupported, err)
	}
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "mr_probe", Type: ebpf.XDP, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1 /* XDP_DROP */), asm.Return()},
	})
	if err != nil {
		return fmt.Errorf("load the smallest XDP program: %w: %w", ErrUnsupported, err)
	}
	defer func() { _ = prog.Close() }()
	for {
		_, err = prog.Run(&ebpf.RunOptions{Data: make([]byte, 64), Repeat: 1, Flags: xdpLiveFrames, BatchSize: 1})
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("BPF_PROG_RUN with live frames: refused, want it to send with: %w: %w", ErrUnsupported, err)
	}
	return nil
}

// findInterfaces looks the interfaces up and checks their MTU. It returns those that the programs
// are to be attached to.
func (o *Objects) findInterfaces(nl *netlink.Handle, opts Options) ([]netlink.Link, error) {
	links := make([]netlink.Link, 0, len(opts.Interfaces))
	for _, name := range opts.Interfaces {
		itf, lower, err := findInterface(nl, name)
		if err != nil {
			return nil, err
		}
		if opts.Generic {
			itf.Mode = ModeGeneric
		}
		o.Interfaces = append(o.Interfaces, itf)
		links = append(links, lower)
	}
	for _, itf := range o.Interfaces {
		for _, other := range o.Interfaces {
			if _, lower := other.Lower(); lower == itf.Index && other.Index != itf.Index {
				return nil, fmt.Errorf("interface %s: this device's %s has it as its parent, want it free: %w", itf.Name, other.Name, ErrInUse)
			}
		}
	}
	return links, nil
}

// findInterface looks one interface up, and the one below it that the programs go to.
func findInterface(nl *netlink.Handle, name string) (itf Interface, lower netlink.Link, err error) {
	l, err := nl.LinkByName(name)
	if _, ok := errors.AsType[netlink.LinkNotFoundError](err); ok {
		return itf, nil, fmt.Errorf("interface %q is not there, want one of: %s", name, interfaceNames(nl))
	}
	if err != nil {
		return itf, nil, fmt.Errorf("interface %q: %w", name, err)
	}
	a := l.Attrs()
	itf = Interface{Name: a.Name, Index: a.Index, MTU: a.MTU, MAC: a.HardwareAddr.String(), Mode: ModeNative}
	lower = l
	switch v := l.(type) {
	case *netlink.Vlan:
		if lower, err = below(nl, v); err != nil {
			return itf, nil, err
		}
		p := lower.Attrs()
		itf.VLAN = &VLAN{
			ID: uint16(v.VlanId), Parent: p.Name, ParentIndex: p.Index, ParentMTU: p.MTU, Egress: v.EgressQosMap,
		}
	case *netlink.Macvlan:
		if lower, err = belowMacvlan(nl, v); err != nil {
			return itf, nil, err
		}
		p := lower.Attrs()
		itf.Macvlan = &Below{Name: p.Name, Index: p.Index, MTU: p.MTU}
	}
	if err := checkKind(lower, func() []string { return relatives(nl, lower) }); err != nil {
		return itf, nil, err
	}
	// A tag is no part of an MTU: drivers take frames that are 4 bytes longer.
	itf.MTU = min(itf.MTU, itf.lowerMTU())
	itf.Driver = driverName(lower.Attrs().Name, lower.Type())
	itf.Channels, itf.NUMACPUs = channels(lower.Attrs().Name), numaCPUs(lower.Attrs().Name)
	if itf.MTU < MinMTU {
		return itf, nil, fmt.Errorf("interface %s: MTU is %d, want at least %d (1024 bytes of payload and the headers)",
			name, itf.MTU, MinMTU)
	}
	if itf.VLAN != nil {
		err = checkTagsStay(itf)
	}
	return itf, lower, err
}

func interfaceNames(nl *netlink.Handle) string {
	links, err := nl.LinkList()
	if err != nil {
		return "(" + err.Error() + ")"
	}
	names := make([]string, 0, len(links))
	for _, l := range links {
		names = append(names, l.Attrs().Name)
	}
	return strings.Join(names, ", ")
}

// driverName is the kernel driver's name, or the link type if it tells none.
func driverName(name, linkType string) string {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return linkType
	}
	defer func() { _ = unix.Close(s) }()
	info, err := unix.IoctlGetEthtoolDrvinfo(s, name)
	if err != nil {
		return linkType
	}
	if d := unix.ByteSliceToString(info.Driver[:]); d != "" {
		return d
	}
	return linkType
}

// checkForeign refuses an interface that has an XDP program. Ours are gone by now: claim has made
// sure that no metaroce process has the interface.
func checkForeign(itf Interface, l netlink.Link) error {
	mode := xdpMode(l.Attrs())
	if mode == "" {
		return nil
	}
	xdp := l.Attrs().Xdp
	return fmt.Errorf("%s: XDP program %s (id %d, %s mode) is attached, want none: %w",
		itf.label(), programName(xdp.ProgId), xdp.ProgId, mode, ErrForeignProgram)
}

func programName(id uint32) string {
	p, err := ebpf.NewProgramFromID(ebpf.ProgramID(id))
	if err != nil {
		return "(name unreadable)"
	}
	defer func() { _ = p.Close() }()
	info, err := p.Info()
	if err != nil || info.Name == "" {
		return "(no name)"
	}
	return info.Name
}

func netnsInode() (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &st); err != nil {
		return 0, fmt.Errorf("look at the network namespace: %w", err)
	}
	return st.Ino, nil
}

// EnsureBPFFS mounts a BPF file system at /sys/fs/bpf if there is none. Two processes that find it
// missing together must not both mount it, or the second mount hides the first one's pins: the
// directory below the mount point serves as lock.
func EnsureBPFFS(log *slog.Logger) error {
	ok, err := isBPFFS()
	if ok || err != nil {
		return err
	}
	dir, err := os.Open(bpffsRoot)
	if err != nil {
		return fmt.Errorf("%s: no BPF file system is mounted, want one: %w", bpffsRoot, err)
	}
	defer dir.Close()
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("%s: lock it to mount the BPF file system: %w", bpffsRoot, err)
	}
	if ok, err = isBPFFS(); ok || err != nil {
		return err
	}
	if err := unix.Mount("bpf", bpffsRoot, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC|unix.MS_RELATIME, "mode=0700"); err != nil {
		return fmt.Errorf("%s: no BPF file system is mounted, want one, and mounting it failed: %w", bpffsRoot, err)
	}
	log.Info("mounted the BPF file system", "at", bpffsRoot)
	return nil
}

// bpffsNumber is the device number of the BPF file system that this mount namespace has.
func bpffsNumber() (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(bpffsRoot, &st); err != nil {
		return 0, fmt.Errorf("look at the BPF file system %s: %w", bpffsRoot, err)
	}
	return uint64(st.Dev), nil
}

func isBPFFS() (bool, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(bpffsRoot, &st); err != nil {
		if errors.Is(err, unix.ENOENT) {
			return false, fmt.Errorf("%s: not there, want sysfs with the BPF file system's mount point: %w", bpffsRoot, err)
		}
		return false, fmt.Errorf("%s: %w", bpffsRoot, err)
	}
	return uint32(st.Type) == unix.BPF_FS_MAGIC, nil
}
