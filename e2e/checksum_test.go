// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/fabric/lab"
	"github.com/metaroce/metaroce/loader"
	"github.com/metaroce/metaroce/transport"
	"github.com/metaroce/metaroce/wire"
)

// plane0Of is a host's interface on plane 0.
func plane0Of(t *testing.T, l *lab.Lab, index int) (link netlink.Link) {
	t.Helper()
	err := l.Do(index, func() (err error) {
		link, err = netlink.LinkByName(l.Interfaces(index)[0])
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return link
}

// divert makes from believe that host to has the link address of host via, on plane 0, and waits
// until the paths of its connection c use it.
func divert(t *testing.T, from *host, c *transport.Conn, to, via int) {
	t.Helper()
	l := from.lab
	out, mac := plane0Of(t, l, from.index).Attrs().Index, plane0Of(t, l, via).Attrs().HardwareAddr
	err := l.Do(from.index, func() error {
		for _, ip := range []net.IP{l.Addr(to, 0).AsSlice(), l.Addr6(to, 0).AsSlice()} {
			n := netlink.Neigh{LinkIndex: out, IP: ip, HardwareAddr: mac, State: netlink.NUD_PERMANENT}
			if err := netlink.NeighSet(&n); err != nil {
				return fmt.Errorf("neighbour %v: %w", ip, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	base := from.register(t, c).PathBase
	waitFor(t, "the new link address in use", func() bool {
		follows := true
		from.state(t, func(s *loader.State) error {
			for i := range c.Info().Paths {
				p, err := s.Path(int(base) + i)
				if err != nil {
					return err
				}
				follows = follows && bytes.HasPrefix(p.Tmpl[:], mac)
			}
			return nil
		})
		return follows
	})
}

// capture opens a socket that gets what arrives at a host on plane 0. The host must have no device:
// XDP's packets pass no socket.
func capture(t *testing.T, l *lab.Lab, index int) (fd int) {
	t.Helper()
	protocol := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_ALL))
	err := l.Do(index, func() (err error) {
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(protocol)); err != nil {
			return err
		}
		return errors.Join(
			unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: plane0Of(t, l, index).Attrs().Index}),
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: int64(patience.Seconds())}),
		)
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	return fd
}

// firstData reads from a capture until a data packet comes.
func firstData(t *testing.T, fd int) []byte {
	t.Helper()
	frame := make([]byte, 4096)
	for end := time.Now().Add(patience); time.Now().Before(end); {
		n, err := unix.Read(fd, frame)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			t.Fatalf("no data packet: %v", err)
		}
		l, err := wire.Locate(frame[:n], lab.DefaultPort)
		if err != nil {
			continue // not ours
		}
		if op := wire.Opcode(frame[l.BTH]); op == wire.OpWrite {
			return frame[:n]
		}
	}
	t.Fatalf("no data packet within %v", patience)
	return nil
}

func TestChecksumIsOnTheWireUnlessBothEndsGiveItUp(t *testing.T) {
	l := newLab(t, lab.Config{Hosts: 3})
	for _, c := range fewer(1, []struct {
		off  [2]bool
		ipv6 bool
		want bool
	}{
		{off: [2]bool{false, true}, ipv6: true, want: true},
		{off: [2]bool{true, false}, want: true},
		{off: [2]bool{true, true}, ipv6: true, want: false},
		{off: [2]bool{true, true}, want: false},
	}) {
		t.Run(fmt.Sprintf("off %v, IPv6 %v", c.off, c.ipv6), func(t *testing.T) {
			h := openHosts(t, l,
				transport.Config{ChecksumOff: c.off[0], PreferIPv6: c.ipv6, RetryTime: patience},
				transport.Config{ChecksumOff: c.off[1], PreferIPv6: c.ipv6, RetryTime: patience})
			conn := connect(t, h[0], h[1], hardlyAny)
			for i := range conn {
				if got := conn[i].Info().Checksum; got != c.want {
					t.Errorf("host %d: checksum %v, want %v", i, got, c.want)
				}
			}
			d := newDirection(t, h[0], h[1], conn[0], conn[1], 1, []uint64{1000})
			tap := capture(t, l, 2)
			divert(t, h[0], conn[0], 1, 2)
			if err := d.post(0); err != nil {
				t.Fatal(err)
			}
			frame := firstData(t, tap)
			divert(t, h[0], conn[0], 1, 1)
			at, err := wire.Locate(frame, lab.DefaultPort)
			if err != nil {
				t.Fatal(err)
			}
			udp := frame[at.L4 : at.L4+at.UDPLen]
			path := conn[0].Info().Paths[0]
			if field := binary.BigEndian.Uint16(udp[6:]); (field != 0) != c.want {
				t.Errorf("the checksum field is %#x, want one %v", field, c.want)
			}
			if c.want && !wire.UDPVerify(path.Local, path.Remote, udp) {
				t.Errorf("wrong checksum in %x", udp)
			}
			if got := next(t, conn[0].SendCQ()); got.Status != 0 {
				t.Errorf("write ended with %v: %v", got.Status, conn[0].Err())
			}
			exchange(t, bothWays(t, h, conn, 7, mixed(7, pick[uint64](4<<20, 50<<10)))...)
		})
	}
}
