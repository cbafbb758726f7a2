// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"os"
	"runtime"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

const (
	// watchBytes is the receive buffer of a subscription: some 20 000 messages.
	watchBytes = 16 << 20
	// renewTime is the wait before a broken subscription is renewed once more.
	renewTime = time.Second
	// messageBytes takes the longest datagram of a subscription.
	messageBytes = 64 << 10
)

// subscription is a netlink socket that hears of one kind of thing. Each kind has a socket of its own,
// so that a flood of routes costs no news of links.
type subscription struct {
	kind   string
	groups uint32
	parse  func(*dirty, uint16, []byte) // of one message: type and payload
	all    func(*dirty)                 // messages were lost

	file *os.File
}

// group is the bit of a multicast group in a socket address.
func group(n uint) uint32 { return 1 << (n - 1) }

func subscriptions() []*subscription {
	return []*subscription{
		{kind: "links", groups: group(unix.RTNLGRP_LINK), parse: parseLink, all: (*dirty).allLinks},
		{kind: "neighbours", groups: group(unix.RTNLGRP_NEIGH), parse: parseNeighbour, all: (*dirty).allNeighbours},
		{
			kind: "routes", parse: parseRoute, all: (*dirty).allRoutes,
			groups: group(unix.RTNLGRP_IPV4_ROUTE) | group(unix.RTNLGRP_IPV6_ROUTE) |
				group(unix.RTNLGRP_IPV4_RULE) | group(unix.RTNLGRP_IPV6_RULE) | group(unix.RTNLGRP_NEXTHOP),
		},
	}
}

// inside runs f on a thread in the device's network namespace.
func inside(ns netns.NsHandle, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		origin, err := netns.Get()
		if err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("open the thread's network namespace: %w", err)
			return
		}
		defer origin.Close()
		if err := netns.Set(ns); err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("enter the device's network namespace: %w", err)
			return
		}
		err = f()
		// A thread that cannot go back stays locked: it ends with this goroutine.
		if netns.Set(origin) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// open begins the subscription; buffer is its receive buffer in bytes.
func (s *subscription) open(ns netns.NsHandle, buffer int) error {
	err := inside(ns, func() error {
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, buffer); err != nil {
			// Not root of the first user namespace: as much as is allowed. What is lost is read again.
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, buffer)
		}
		if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: s.groups}); err != nil {
			_ = unix.Close(fd)
			return err
		}
		s.file = os.NewFile(uintptr(fd), "netlink "+s.kind)
		return nil
	})
	if err != nil {
		return fmt.Errorf("subscribe to %s: %w", s.kind, err)
	}
	return nil
}

// read moves messages into the dirty set until the socket is closed or breaks. It asks the kernel
// nothing, so that it is faster than whoever changes things.
func (s *subscription) read(file *os.File, d *dirty, lost func()) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	buf := make([]byte, messageBytes)
	missed := false
	for {
		var n int
		var from unix.Sockaddr
		var rerr error
		err := raw.Read(func(fd uintptr) bool {
			n, from, rerr = unix.Recvfrom(int(fd), buf, unix.MSG_TRUNC)
			return !errors.Is(rerr, unix.EAGAIN) || missed
		})
		if err == nil {
			err = rerr
		}
		sender, _ := from.(*unix.SockaddrNetlink)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			missed = false
			s.all(d)
		case errors.Is(err, unix.ENOBUFS) || err == nil && n > len(buf):
			// The kernel drops everything from the first message that finds no room until the queue
			// is empty, which is soon, and says so once. Only what is read after that is complete.
			missed = true
			lost()
		case err != nil:
			return err
		case sender == nil || sender.Pid != 0:
			// Not from the kernel.
		default:
			s.messages(d, buf[:n])
		}
	}
}

// messages takes a datagram apart.
func (s *subscription) messages(d *dirty, b []byte) {
	for len(b) >= unix.SizeofNlMsghdr {
		length := int(binary.NativeEndian.Uint32(b))
		if length < unix.SizeofNlMsghdr || length > len(b) {
			return
		}
		s.parse(d, binary.NativeEndian.Uint16(b[4:]), b[unix.SizeofNlMsghdr:length])
		b = b[min((length+3)&^3, len(b)):]
	}
}

// attributes are those of a message, by type without its flags.
func attributes(b []byte) iter.Seq2[uint16, []byte] {
	const flags = unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= unix.SizeofRtAttr {
			length := int(binary.NativeEndian.Uint16(b))
			if length < unix.SizeofRtAttr || length > len(b) {
				return
			}
			if !yield(binary.NativeEndian.Uint16(b[2:])&^flags, b[unix.SizeofRtAttr:length]) {
				return
			}
			b = b[min((length+3)&^3, len(b)):]
		}
	}
}

func parseLink(d *dirty, kind uint16, b []byte) {
	if kind != unix.RTM_NEWLINK && kind != unix.RTM_DELLINK || len(b) < unix.SizeofIfInfomsg {
		return
	}
	name := ""
	for attr, value := range attributes(b[unix.SizeofIfInfomsg:]) {
		if attr == unix.IFLA_IFNAME {
			name = unix.ByteSliceToString(value)
			break
		}
	}
	d.linkChanged(int(int32(binary.NativeEndian.Uint32(b[4:]))), name)
}

func parseNeighbour(d *dirty, kind uint16, b []byte) {
	if kind != unix.RTM_NEWNEIGH && kind != unix.RTM_DELNEIGH || len(b) < unix.SizeofNdMsg {
		return
	}
	for attr, value := range attributes(b[unix.SizeofNdMsg:]) {
		if a, ok := netip.AddrFromSlice(value); ok && attr == netlink.NDA_DST {
			d.neighbourChanged(int(int32(binary.NativeEndian.Uint32(b[4:]))), a.Unmap())
			break
		}
	}
}

// parseRoute hears of routes. Rules and next hop objects may concern every route.
func parseRoute(d *dirty, kind uint16, b []byte) {
	switch kind {
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
	case unix.RTM_NEWRULE, unix.RTM_DELRULE, unix.RTM_NEWNEXTHOP, unix.RTM_DELNEXTHOP:
		d.allRoutes()
		return
	default:
		return
	}
	if len(b) < unix.SizeofRtMsg {
		return
	}
	var dst netip.Addr // a default route has no RTA_DST
	switch b[0] {
	case unix.AF_INET:
		dst = netip.IPv4Unspecified()
	case unix.AF_INET6:
		dst = netip.IPv6Unspecified()
	default:
		return
	}
	for attr, value := range attributes(b[unix.SizeofRtMsg:]) {
		if a, ok := netip.AddrFromSlice(value); ok && attr == unix.RTA_DST {
			dst = a
			break
		}
	}
	if p := netip.PrefixFrom(dst, int(b[1])); p.IsValid() {
		d.routeChanged(p)
	}
}

// subscribe opens all subscriptions: before anything is read that they tell about.
func (r *router) subscribe() error {
	for _, s := range r.subs {
		if err := s.open(r.e.ns, r.watchBytes); err != nil {
			return err
		}
	}
	return nil
}

// watch follows links, neighbours and routes until close.
func (r *router) watch() {
	for _, p := range r.e.planes {
		r.watchPlane(p)
	}
	r.dirty.allLinks() // whatever happened while the device was opened
	r.wg.Go(r.work)
	for _, s := range r.subs {
		r.wg.Go(func() { r.follow(s) })
	}
}

// follow reads a subscription and renews it when it breaks.
func (r *router) follow(s *subscription) {
	for {
		r.mu.Lock()
		file := s.file
		r.mu.Unlock()
		begun := time.Now()
		err := s.read(file, r.dirty, func() { r.lost.Add(1) })
		_ = file.Close()
		for pause := renewTime - time.Since(begun); err != nil; pause = renewTime {
			select {
			case <-r.done:
				return
			case <-time.After(max(pause, 0)):
			}
			if r.over() {
				return
			}
			r.log.Warn("netlink subscription broke, is renewed", "of", s.kind, "error", err)
			err = r.renew(s)
		}
	}
}

// renew opens a broken subscription again, and has everything read that it may have missed.
func (r *router) renew(s *subscription) error {
	fresh := *s
	if err := fresh.open(r.e.ns, r.watchBytes); err != nil {
		return err
	}
	r.mu.Lock()
	s.file = fresh.file
	r.mu.Unlock()
	if r.over() { // close may have come before it
		_ = fresh.file.Close()
	}
	s.all(r.dirty)
	return nil
}
