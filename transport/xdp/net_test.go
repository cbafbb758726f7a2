// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/transport/core"
)

// host is a network namespace of a test with one interface a plane, p0, p1, ...
type host struct {
	ns    netns.NsHandle
	nl    *netlink.Handle
	names []string
}

// in runs f in the host's namespace on a thread of its own.
func (h *host) in(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		if err := netns.Set(h.ns); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}

// newHosts makes two namespaces joined by a veth pair a plane. Host i has the addresses
// 198.18.k.(i+1) and fd12:k::(i+1) on plane k.
func newHosts(t testing.TB, planes int) [2]*host {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces and loads BPF programs")
	}
	var hosts [2]*host
	for i := range hosts {
		h := &host{}
		hosts[i] = h
		done := make(chan error)
		go func() {
			runtime.LockOSThread()
			var err error
			h.ns, err = netns.New()
			done <- err
		}()
		if err := <-done; err != nil {
			t.Fatalf("new network namespace: %v", err)
		}
		t.Cleanup(func() { h.ns.Close() })
		nl, err := netlink.NewHandleAt(h.ns, unix.NETLINK_ROUTE)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nl.Close)
		h.nl = nl
	}
	for k := range planes {
		name := fmt.Sprintf("p%d", k)
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU = name, 3400
		veth := &netlink.Veth{LinkAttrs: attrs, PeerName: name, PeerNamespace: netlink.NsFd(hosts[1].ns)}
		if err := hosts[0].nl.LinkAdd(veth); err != nil {
			t.Fatalf("add veth pair %s: %v", name, err)
		}
		for i, h := range hosts {
			link, err := h.nl.LinkByName(name)
			if err != nil {
				t.Fatal(err)
			}
			if err := h.nl.LinkSetMTU(link, 3400); err != nil {
				t.Fatal(err)
			}
			for _, a := range []*netlink.Addr{
				{IPNet: &net.IPNet{IP: net.IPv4(198, 18, byte(k), byte(i+1)), Mask: net.CIDRMask(24, 32)}},
				{IPNet: &net.IPNet{IP: net.ParseIP(fmt.Sprintf("fd12:%d::%d", k, i+1)), Mask: net.CIDRMask(64, 128)}, Flags: unix.IFA_F_NODAD},
			} {
				if err := h.nl.AddrAdd(link, a); err != nil {
					t.Fatalf("add %v to %s: %v", a, name, err)
				}
			}
			if err := h.nl.LinkSetUp(link); err != nil {
				t.Fatal(err)
			}
			h.names = append(h.names, name)
		}
	}
	for _, h := range hosts {
		for _, name := range h.names {
			waitFor(t, "carrier on "+name, func() bool {
				link, err := h.nl.LinkByName(name)
				return err == nil && carrier(link.Attrs())
			})
		}
	}
	return hosts
}

// waitFor waits until what happens, and fails the test after a time that only a hang exceeds.
func waitFor(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited 20 s for: %s", what)
		}
	}
}

// openOn opens a device on a host, on all its interfaces if cfg names none.
func openOn(t *testing.T, h *host, cfg Config) *Engine {
	t.Helper()
	if cfg.Interfaces == nil {
		cfg.Interfaces = h.names
	}
	cfg.Logger = slog.New(slog.NewTextHandler(t.Output(), nil))
	var e *Engine
	err := h.in(func() (err error) {
		e, err = Open(context.Background(), cfg)
		return err
	})
	if err != nil {
		t.Fatalf("open device: %+v", err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Errorf("close device: %v", err)
		}
	})
	return e
}

// openPair opens a device on each of two new hosts.
func openPair(t *testing.T, planes int, cfg Config) [2]*Engine {
	t.Helper()
	hosts := newHosts(t, planes)
	return [2]*Engine{openOn(t, hosts[0], cfg), openOn(t, hosts[1], cfg)}
}

const testPD = 7

func endpoint(e *Engine, c *Conn, paths int) core.Endpoint {
	return core.Endpoint{
		QPN: c.QPN(), Token: c.Token(), InitialPSN: c.InitialPSN(), Payload: e.MaxPayload(),
		Paths: paths, Checksum: !e.cfg.ChecksumOff, Planes: e.Planes(),
	}
}

// connect joins two devices by a connection.
func connect(t *testing.T, e [2]*Engine, paths int) [2]*Conn {
	t.Helper()
	c, err := tryConnect(e, paths)
	t.Cleanup(func() {
		for i := range c {
			if c[i] == nil {
				continue
			}
			if err := c[i].Close(); err != nil {
				t.Error(err)
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func tryConnect(e [2]*Engine, paths int) (c [2]*Conn, err error) {
	var ends [2]core.Endpoint
	for i := range e {
		if c[i], err = e[i].NewConn(testPD); err != nil {
			return c, err
		}
		ends[i] = endpoint(e[i], c[i], paths)
	}
	for i := range e {
		p, err := core.PairPaths(ends[i], ends[1-i], rand.New(rand.NewPCG(1, uint64(i))))
		if err != nil {
			return c, err
		}
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		err = c[i].Start(ctx, p)
		cancel()
		if err != nil {
			return c, err
		}
	}
	return c, nil
}

func alloc(t *testing.T, e *Engine, size uint64) *Region {
	t.Helper()
	r, err := e.AllocRegion(size, core.AllAccess, testPD)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// write is the request to write all of from to the start of to.
func write(from, to *Region, length int) core.WorkRequest {
	return core.WorkRequest{
		Op: core.OpWrite, LocalAddr: from.Addr(), LKey: from.Key(), RemoteAddr: to.Addr(), RKey: to.Key(), Length: uint32(length),
	}
}

// waitSend waits until request msn is complete.
func waitSend(t *testing.T, c *Conn, msn uint32) core.Status {
	t.Helper()
	var status core.Status
	waitFor(t, fmt.Sprintf("request %d complete", msn), func() (ok bool) {
		status, ok = c.SendDone(msn)
		return ok
	})
	return status
}

func fill(b []byte, seed uint64) {
	r := rand.NewChaCha8([32]byte{byte(seed)})
	r.Read(b)
}
