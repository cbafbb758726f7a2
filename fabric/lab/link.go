// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"unsafe"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// setOffload turns one of an interface's features on or off by its old ethtool
// command (ETHTOOL_SGRO, ...), in the calling thread's namespace.
func setOffload(ifname string, command uint32, on bool) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("ethtool socket: %w", err)
	}
	defer unix.Close(fd)
	value := struct{ command, data uint32 }{command: command}
	if on {
		value.data = 1
	}
	request := struct { // struct ifreq
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}{data: unsafe.Pointer(&value)}
	copy(request.name[:unix.IFNAMSIZ-1], ifname)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL,
		uintptr(unsafe.Pointer(&request))); errno != 0 {
		return fmt.Errorf("interface %s: ethtool command %#x: %w", ifname, command, errno)
	}
	return nil
}

// setThreaded moves an interface's NAPI polling into kernel threads.
func setThreaded(ifname string) error {
	file, err := openNetSysfs(ifname+"/threaded", unix.O_WRONLY)
	if err != nil {
		return fmt.Errorf("interface %s: threaded NAPI: %w", ifname, err)
	}
	defer file.Close()
	if _, err := file.WriteString("1"); err != nil {
		return fmt.Errorf("interface %s: threaded NAPI: %w", ifname, err)
	}
	return nil
}

// setSysctl writes a network sysctl of the calling thread's namespace. Where the
// kernel does not have it, IPv6 being absent, there is nothing to set.
func setSysctl(path, value string) error {
	err := os.WriteFile("/proc/sys/net/"+path, []byte(value), 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("sysctl net/%s=%s: %w", path, value, err)
	}
	return nil
}

func hasIPv6() bool {
	_, err := os.Stat("/proc/sys/net/ipv6")
	return err == nil
}

// pair is one veth pair: an end in one namespace, a peer in another or the same.
type pair struct {
	name, peer    string
	mac, peerMAC  net.HardwareAddr // nil: the kernel's choice
	peerNamespace string           // empty: the same
	mtu, queues   int
	handle        *netlink.Handle // of the namespace that gets `name`
}

// add makes the pair. Both ends have as many receive as transmit queues: veth
// offers XDP only then.
func (p *pair) add() error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = p.name
	attrs.MTU = p.mtu
	attrs.NumTxQueues, attrs.NumRxQueues = p.queues, p.queues
	attrs.HardwareAddr = p.mac
	veth := netlink.NewVeth(attrs)
	veth.PeerName = p.peer
	veth.PeerHardwareAddr = p.peerMAC
	veth.PeerMTU = uint32(p.mtu)
	veth.PeerNumTxQueues, veth.PeerNumRxQueues = uint32(p.queues), uint32(p.queues)
	if p.peerNamespace != "" {
		ns, err := netns.GetFromPath(netnsPath(p.peerNamespace))
		if err != nil {
			return fmt.Errorf("namespace %s: %w", p.peerNamespace, err)
		}
		defer ns.Close()
		veth.PeerNamespace = netlink.NsFd(ns)
	}
	if err := p.handle.LinkAdd(veth); err != nil {
		return fmt.Errorf("veth pair %s and %s: %w", p.name, p.peer, err)
	}
	return nil
}

// linkUp brings an interface up and returns its index.
func linkUp(handle *netlink.Handle, ifname string) (int, error) {
	link, err := handle.LinkByName(ifname)
	if err != nil {
		return 0, fmt.Errorf("interface %s: %w", ifname, err)
	}
	if err := handle.LinkSetUp(link); err != nil {
		return 0, fmt.Errorf("interface %s: up: %w", ifname, err)
	}
	return link.Attrs().Index, nil
}

// netlinkIn opens a netlink socket inside a named namespace.
func netlinkIn(name string) (*netlink.Handle, error) {
	ns, err := netns.GetFromPath(netnsPath(name))
	if err != nil {
		return nil, fmt.Errorf("namespace %s: %w", name, err)
	}
	defer ns.Close()
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("netlink in namespace %s: %w", name, err)
	}
	return handle, nil
}

// hostMAC is a host's fixed address on a plane: locally administered, and the
// switch reads plane and host from it.
func hostMAC(host, plane int) net.HardwareAddr {
	return net.HardwareAddr{
		macPrefix[0], macPrefix[1], macPrefix[2],
		byte(plane), byte(host >> 8), byte(host),
	}
}

// macPrefix is LAB_MAC0 to LAB_MAC2 of bpf/lab_types.h.
var macPrefix = [3]byte{0x02, 0x4d, 0x52}
