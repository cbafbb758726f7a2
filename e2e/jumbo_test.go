// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/fabric/lab"
	"github.com/metaroce/metaroce/transport"
)

// tcpStream sends size bytes of noise over TCP from host a to host b of a lab on plane 0, compares what
// arrives and returns the connection's segment size.
func tcpStream(l *lab.Lab, a, b int, size int64, seed uint64) (mss int, err error) {
	var listener net.Listener
	err = l.Do(b, func() (err error) {
		listener, err = net.Listen("tcp", net.JoinHostPort(l.Addr(b, 0).String(), "0"))
		return err
	})
	if err != nil {
		return 0, err
	}
	defer listener.Close()
	type result struct {
		sum [sha256.Size]byte
		n   int64
		err error
	}
	arrived := make(chan result, 1)
	go func() {
		var r result
		c, err := listener.Accept()
		if err == nil {
			defer c.Close()
			h := sha256.New()
			_ = c.SetReadDeadline(time.Now().Add(patience))
			r.n, err = io.Copy(h, c)
			h.Sum(r.sum[:0])
		}
		r.err = err
		arrived <- r
	}()
	var c net.Conn
	err = l.Do(a, func() (err error) {
		c, err = net.DialTimeout("tcp", listener.Addr().String(), patience)
		return err
	})
	if err != nil {
		return 0, err
	}
	defer c.Close()
	var key [32]byte
	key[0] = byte(seed)
	h := sha256.New()
	_ = c.SetWriteDeadline(time.Now().Add(patience))
	// Both together, not by sendfile: what is compared must have been in user space.
	if _, err := io.CopyBuffer(io.MultiWriter(h, struct{ io.Writer }{c}), io.LimitReader(rand.NewChaCha8(key), size), make([]byte, 256<<10)); err != nil {
		return 0, fmt.Errorf("TCP: send: %w", err)
	}
	raw, err := c.(syscall.Conn).SyscallConn()
	if err != nil {
		return 0, err
	}
	ctlErr := raw.Control(func(fd uintptr) { mss, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG) })
	if err := errors.Join(ctlErr, err, c.(*net.TCPConn).CloseWrite()); err != nil {
		return 0, err
	}
	r := <-arrived
	if r.err != nil || r.n != size || !bytes.Equal(r.sum[:], h.Sum(nil)) {
		return mss, fmt.Errorf("TCP: %d of %d bytes arrived, the same: %v: %w", r.n, size, bytes.Equal(r.sum[:], h.Sum(nil)), r.err)
	}
	return mss, nil
}

func TestForeignJumboFramesPassWhileWritesRunOverTheSameInterface(t *testing.T) {
	for _, c := range fewer(1, []struct {
		name string
		cfg  lab.Config
	}{
		{"a switch", lab.Config{MTU: 9000}},
		{"no switch", lab.Config{Direct: true, MTU: 9000}},
	}) {
		t.Run(c.name, func(t *testing.T) {
			l := newLab(t, c.cfg)
			h := openPair(t, l, transport.Config{RetryTime: time.Minute})
			// A veth's ring of 256 frames is TCP's too, and drops what both together have too much: mostly none,
			// up to 5.3 % seen where the receiving end is polled late.
			conn := connect(t, h[0], h[1], perCent(15))
			if got := conn[0].Info().Payload; got != 3072 {
				t.Errorf("payload is %d bytes at MTU 9000, want 3072", got)
			}
			busy := keepBusy(t, bothWays(t, h, conn, 7, mixed(7, pick[uint64](8<<20, 100<<10)))...)
			size := pick[int64](64<<20, 2<<20)
			for way, ends := range [][2]int{{0, 1}, {1, 0}} {
				mss, err := tcpStream(l, ends[0], ends[1], size, uint64(way))
				if err != nil {
					t.Fatal(err)
				}
				if mss < 8000 {
					t.Errorf("TCP's segments have %d bytes, want jumbo frames", mss)
				}
			}
			busy.waitFor(t, "a round of writes", func() bool { return busy.rounds() > 0 })
			busy.stop(t)
			for i := range h {
				linkOf(t, l, i, "p0", func(_ *netlink.Handle, link netlink.Link) error {
					if mtu := link.Attrs().MTU; mtu != 9000 {
						t.Errorf("host %d: MTU is %d, was 9000", i, mtu)
					}
					return nil
				})
				k := h[i].counters(t)
				if k.DropNonlinear != 0 || k.DropVlan != 0 || k.DropLength != 0 {
					t.Errorf("host %d: drop_nonlinear %d, drop_vlan %d, drop_length %d, want none", i, k.DropNonlinear, k.DropVlan, k.DropLength)
				}
			}
		})
	}
}
