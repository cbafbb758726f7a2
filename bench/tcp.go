// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/fabric/lab"
)

// TCP is kernel TCP between hosts 0 and 1 of a lab: one connection a plane, which
// is as many planes as it can use.
type TCP struct {
	clients, servers []*net.TCPConn
	received         atomic.Uint64
}

// NewTCP connects. congestion is a congestion control of the kernel's, "" its
// default.
func NewTCP(ctx context.Context, l *lab.Lab, planes int, congestion string) (_ *TCP, err error) {
	t := &TCP{}
	defer func() {
		if err != nil {
			t.Close()
		}
	}()
	for plane := range planes {
		client, server, err := tcpPair(ctx, l, plane, congestion)
		if err != nil {
			return nil, fmt.Errorf("TCP on plane %d: %w", plane, err)
		}
		t.clients, t.servers = append(t.clients, client), append(t.servers, server)
	}
	return t, nil
}

// EnableTCPECN lets TCP of hosts 0 and 1 heed the switch's marks, as metaroce does.
func EnableTCPECN(l *lab.Lab) error {
	for host := range 2 {
		// The file shows the namespace of the thread that opens it.
		if err := l.Do(host, func() error {
			return os.WriteFile("/proc/sys/net/ipv4/tcp_ecn", []byte("1"), 0o644)
		}); err != nil {
			return fmt.Errorf("ECN for TCP on host %d: %w", host, err)
		}
	}
	return nil
}

// tcpPair makes a connection. Sockets belong to the namespace of the thread that
// makes them; with an address instead of a name that is the calling one.
func tcpPair(ctx context.Context, l *lab.Lab, plane int, congestion string) (client, server *net.TCPConn, err error) {
	ctx, cancel := context.WithTimeout(ctx, tcpTime)
	defer cancel()
	control := func(_, _ string, c syscall.RawConn) error {
		if congestion == "" {
			return nil
		}
		var optErr error
		err := c.Control(func(fd uintptr) {
			optErr = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, congestion)
		})
		if optErr != nil {
			return fmt.Errorf("congestion control %s: %w", congestion, optErr)
		}
		return err
	}
	var ln net.Listener
	addr := l.Addr(1, plane)
	if err := l.Do(1, func() error {
		var err error
		ln, err = (&net.ListenConfig{Control: control}).Listen(ctx, "tcp", netip.AddrPortFrom(addr, 0).String())
		return err
	}); err != nil {
		return nil, nil, err
	}
	defer ln.Close()
	if err := l.Do(0, func() error {
		d := net.Dialer{Control: control, LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(l.Addr(0, plane), 0))}
		c, err := d.DialContext(ctx, "tcp", ln.Addr().String())
		if err == nil {
			client = c.(*net.TCPConn)
		}
		return err
	}); err != nil {
		return nil, nil, err
	}
	if err := ln.(*net.TCPListener).SetDeadline(time.Now().Add(tcpTime)); err != nil {
		return nil, nil, errors.Join(err, client.Close())
	}
	c, err := ln.Accept()
	if err != nil {
		return nil, nil, errors.Join(err, client.Close())
	}
	return client, c.(*net.TCPConn), nil
}

// tcpTime bounds connecting.
const tcpTime = 10 * time.Second

// Close closes the connections.
func (t *TCP) Close() {
	for _, c := range append(append([]*net.TCPConn(nil), t.clients...), t.servers...) {
		// Nothing is waited for, and nothing that is lost is missed.
		_ = c.SetLinger(0)
		_ = c.Close()
	}
}

// Received is how many bytes have arrived at the application.
func (t *TCP) Received() uint64 { return t.received.Load() }

const tcpBuffer = 256 << 10

// Stream sends on all connections until ctx ends or d is over.
func (t *TCP) Stream(ctx context.Context, d time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	n := len(t.clients)
	errs := make(chan error, 2*n)
	past := func(c *net.TCPConn) { _ = c.SetDeadline(time.Unix(1, 0)) }
	for i := range t.clients {
		go func() {
			buf := make([]byte, tcpBuffer)
			for {
				if _, err := t.clients[i].Write(buf); err != nil {
					errs <- err
					return
				}
			}
		}()
		go func() {
			buf := make([]byte, tcpBuffer)
			for {
				got, err := t.servers[i].Read(buf)
				t.received.Add(uint64(got))
				if err != nil {
					errs <- err
					return
				}
			}
		}()
	}
	stop := context.AfterFunc(ctx, func() {
		for i := range t.clients {
			past(t.clients[i])
			past(t.servers[i])
		}
	})
	defer stop()
	var first error
	for range 2 * n {
		if err := <-errs; first == nil && !errors.Is(err, context.DeadlineExceeded) && !isTimeout(err) {
			first = err
			cancel()
		}
	}
	return first
}

func isTimeout(err error) bool {
	var t net.Error
	return errors.As(err, &t) && t.Timeout()
}

// Segments says how many segments were sent and how many of them were
// retransmissions.
func (t *TCP) Segments() (sent, again uint64, err error) {
	for _, c := range t.clients {
		raw, err := c.SyscallConn()
		if err != nil {
			return 0, 0, err
		}
		var info *unix.TCPInfo
		var infoErr error
		if err := raw.Control(func(fd uintptr) {
			info, infoErr = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		}); err != nil || infoErr != nil {
			return 0, 0, fmt.Errorf("TCP_INFO: %w", errors.Join(err, infoErr))
		}
		sent += uint64(info.Data_segs_out)
		again += uint64(info.Total_retrans)
	}
	return sent, again, nil
}

// PingPong sends messages of o.Size bytes on the first connection and waits for
// an answer of answer bytes to each: what an application has that wants to know
// that its message arrived. Both ends make blocking system calls on threads of
// their own, as a program in C would. The connections are closed after.
func (t *TCP) PingPong(ctx context.Context, o LatOptions, answer int) (r LatResult, err error) {
	defer t.Close()
	client, err := blocking(t.clients[0])
	if err != nil {
		return r, err
	}
	defer client.Close()
	server, err := blocking(t.servers[0])
	if err != nil {
		return r, err
	}
	// Ends whatever waits.
	hangUp := func() {
		_ = unix.Shutdown(client.fd, unix.SHUT_RDWR)
		_ = unix.Shutdown(server.fd, unix.SHUT_RDWR)
	}
	stop := context.AfterFunc(ctx, hangUp)
	defer stop()
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer server.Close()
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		buf := make([]byte, max(int(o.Size), answer))
		for {
			if server.read(buf[:o.Size]) != nil || server.write(buf[:answer]) != nil {
				return // the client says why
			}
		}
	}()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	buf := make([]byte, max(int(o.Size), answer))
	r, err = measureLat(o, func() (int64, error) {
		start := time.Now()
		if err := client.write(buf[:o.Size]); err != nil {
			return 0, err
		}
		if err := client.read(buf[:answer]); err != nil {
			return 0, err
		}
		return time.Since(start).Nanoseconds(), nil
	})
	hangUp()
	<-done
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return r, err
}

// blockingConn is a TCP connection by plain system calls.
type blockingConn struct {
	*os.File
	fd int
}

// stallTime bounds one blocking call.
const stallTime = 30 * time.Second

// blocking gives a second, blocking descriptor of c's socket.
func blocking(c *net.TCPConn) (*blockingConn, error) {
	f, err := c.File()
	if err != nil {
		return nil, err
	}
	b := &blockingConn{File: f, fd: int(f.Fd())} // Fd makes it blocking
	limit := unix.NsecToTimeval(stallTime.Nanoseconds())
	if err := errors.Join(
		unix.SetNonblock(b.fd, false),
		unix.SetsockoptTimeval(b.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit),
		unix.SetsockoptTimeval(b.fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit),
	); err != nil {
		return nil, errors.Join(fmt.Errorf("socket: %w", err), f.Close())
	}
	return b, nil
}

func (b *blockingConn) read(buf []byte) error {
	return b.all(buf, func(rest []byte) (int, error) { return unix.Read(b.fd, rest) })
}

func (b *blockingConn) write(buf []byte) error {
	return b.all(buf, func(rest []byte) (int, error) { return unix.Write(b.fd, rest) })
}

// all calls io until buf is done.
func (b *blockingConn) all(buf []byte, io func([]byte) (int, error)) error {
	for len(buf) > 0 {
		n, err := io(buf)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			return fmt.Errorf("TCP stalled for %v", stallTime)
		case err != nil:
			return err
		case n == 0:
			return errors.New("TCP connection ended")
		default:
			buf = buf[n:]
		}
	}
	return nil
}
