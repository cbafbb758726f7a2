// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// reason is what the kernel tells about a refusal besides its errno.
type reason struct {
	words string // extended ACK, "" if there is none
	lro   bool   // the interface has large-receive-offload on
}

// guestOffloads are QEMU's properties of a virtio-net-pci device that XDP cannot live with.
const guestOffloads = "guest_tso4=off,guest_tso6=off,guest_ecn=off,guest_ufo=off"

// attachError explains why a driver took no program: what was found, what is wanted.
func attachError(itf Interface, err error, why reason) error {
	name, _ := itf.Lower()
	who := fmt.Sprintf("%s (driver %s)", itf.label(), itf.Driver)
	said := ""
	if why.words != "" {
		said = fmt.Sprintf(" (the kernel says: %s)", why.words)
	}
	refused := errors.Is(err, unix.ERANGE) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.E2BIG)
	switch mtu := itf.lowerMTU(); {
	case errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EEXIST):
		return fmt.Errorf("%s: %w%s", who, ErrForeignProgram, said)
	case refused && why.offloads(itf.Driver):
		want := fmt.Sprintf("ethtool -K %s lro off rx-gro-hw off", name)
		if itf.Driver == "virtio_net" {
			want += ", or, if that is fixed, the hypervisor's option (QEMU: virtio-net-pci," + guestOffloads + ")"
		}
		return fmt.Errorf("%s: received packets are merged before XDP sees them, want that off: %s%s: %w", who, want, said, ErrUnsupported)
	case refused && mtu > MaxNativeMTU && !why.noNative():
		return fmt.Errorf("%s: MTU is %d, and this kernel's driver takes XDP programs with one page a frame only: want at most %d (some drivers less), or a newer kernel%s: %w",
			who, mtu, MaxNativeMTU, said, ErrUnsupported)
	case errors.Is(err, unix.EOPNOTSUPP) && itf.Mode == ModeNative && (why.words == "" || why.noNative()):
		return fmt.Errorf("%s has no native XDP, want a driver that has it, or generic XDP asked for (Generic, --generic): %w",
			who, ErrUnsupported)
	}
	return fmt.Errorf("%s: attach in %s mode: %w%s", who, itf.Mode, rootErrno(err), said)
}

// offloads says whether the refusal is about received packets that hardware or hypervisor merges.
func (r reason) offloads(driver string) bool {
	words := strings.ToUpper(r.words)
	for _, w := range []string{"LRO", "GRO", "RSC", "AGGREGATION", "TPA"} {
		if strings.Contains(words, w) {
			return true
		}
	}
	// ixgbe refuses without a word. virtio_net turns off by itself what it can.
	return r.lro && driver != "virtio_net"
}

// noNative says whether the kernel itself knows of no native XDP in the driver.
func (r reason) noNative() bool { return strings.Contains(r.words, "not support") }

// whyNot asks the kernel for its words: links of programs are refused by errno alone.
func whyNot(prog *ebpf.Program, itf Interface) (r reason) {
	name, index := itf.Lower()
	if s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err == nil {
		flags, err := ethtoolValue(s, name, unix.ETHTOOL_GFLAGS, 0)
		r.lro = err == nil && flags&ethFlagLRO != 0
		_ = unix.Close(s)
	}
	flags := uint32(unix.XDP_FLAGS_DRV_MODE)
	if itf.Mode == ModeGeneric {
		flags = unix.XDP_FLAGS_SKB_MODE
	}
	words, attached := setXDP(index, prog.FD(), flags|unix.XDP_FLAGS_UPDATE_IF_NOEXIST)
	if attached { // what was in the way is gone by now; the caller has failed all the same
		_, _ = setXDP(index, -1, flags)
	}
	r.words = words
	return r
}

// setXDP attaches a program as `ip link set xdp` does, fd -1 detaches, and returns the words of the
// extended ACK.
func setXDP(ifindex, fd int, flags uint32) (words string, ok bool) {
	s, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return "", false
	}
	defer func() { _ = unix.Close(s) }()
	for _, opt := range []int{unix.NETLINK_EXT_ACK, unix.NETLINK_CAP_ACK} {
		if err := unix.SetsockoptInt(s, unix.SOL_NETLINK, opt, 1); err != nil {
			return "", false
		}
	}
	if err := unix.SetsockoptTimeval(s, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 5}); err != nil {
		return "", false
	}
	req := nl.NewNetlinkRequest(unix.RTM_SETLINK, unix.NLM_F_ACK)
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index = int32(ifindex)
	xdp := nl.NewRtAttr(unix.IFLA_XDP|unix.NLA_F_NESTED, nil)
	xdp.AddRtAttr(unix.IFLA_XDP_FD, nl.Uint32Attr(uint32(int32(fd))))
	xdp.AddRtAttr(unix.IFLA_XDP_FLAGS, nl.Uint32Attr(flags))
	req.AddData(msg)
	req.AddData(xdp)
	if err := unix.Sendto(s, req.Serialize(), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return "", false
	}
	b := make([]byte, 8192)
	n, _, err := unix.Recvfrom(s, b, 0)
	if err != nil {
		return "", false
	}
	return extendedACK(b[:n])
}

// extendedACK reads the kernel's answer to one request: struct nlmsgerr, the request's header, and
// attributes.
func extendedACK(b []byte) (words string, ok bool) {
	const fixed = unix.SizeofNlMsghdr + 4 + unix.SizeofNlMsghdr
	if len(b) < fixed || binary.NativeEndian.Uint16(b[4:]) != unix.NLMSG_ERROR {
		return "", false
	}
	ok = binary.NativeEndian.Uint32(b[unix.SizeofNlMsghdr:]) == 0
	if binary.NativeEndian.Uint16(b[6:])&unix.NLM_F_ACK_TLVS == 0 {
		return "", ok
	}
	attrs, err := nl.ParseRouteAttr(b[fixed:])
	if err != nil {
		return "", ok
	}
	for _, a := range attrs {
		if a.Attr.Type == unix.NLMSGERR_ATTR_MSG {
			words = unix.ByteSliceToString(a.Value)
		}
	}
	return words, ok
}
