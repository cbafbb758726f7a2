// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// bound is how long a test waits for what comes at once on an idle machine.
const bound = 30 * time.Second

// labName gives each test labs of its own.
func labName(suffix string) string { return fmt.Sprintf("t%d-%s", os.Getpid(), suffix) }

func up(t *testing.T, cfg Config) *Lab {
	t.Helper()
	needRoot(t)
	if cfg.Name == "" {
		cfg.Name = labName("a")
	}
	l, err := Up(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Down(); err != nil {
			t.Error(err)
		}
		if left := leftovers(t, cfg.Name); len(left) != 0 {
			t.Errorf("left behind: %v", left)
		}
	})
	return l
}

// leftovers lists a lab's namespaces and pins.
func leftovers(t *testing.T, name string) []string {
	t.Helper()
	var left []string
	for _, pattern := range []string{netnsPath(name + "-*"), filepath.Join(pinRoot, name)} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		left = append(left, found...)
	}
	return left
}

// listen opens a TCP listener inside a host.
func listen(t *testing.T, l *Lab, host int, addr netip.Addr) net.Listener {
	t.Helper()
	var listener net.Listener
	err := l.Do(host, func() (err error) {
		listener, err = net.Listen("tcp", netip.AddrPortFrom(addr, 0).String())
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	return listener
}

// dial connects from inside a host. The socket is made by hand: a dialer may
// connect on another thread, in another namespace.
func dial(t *testing.T, l *Lab, host int, addr netip.AddrPort) net.Conn {
	t.Helper()
	var file *os.File
	err := l.Do(host, func() error {
		domain, sockaddr := unix.AF_INET, unix.Sockaddr(&unix.SockaddrInet4{Port: int(addr.Port()), Addr: [4]byte(addr.Addr().AsSlice()[:4])})
		if addr.Addr().Is6() {
			domain, sockaddr = unix.AF_INET6, &unix.SockaddrInet6{Port: int(addr.Port()), Addr: addr.Addr().As16()}
		}
		fd, err := unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		file = os.NewFile(uintptr(fd), "tcp")
		timeout := unix.NsecToTimeval(bound.Nanoseconds())
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &timeout); err != nil {
			return err
		}
		return unix.Connect(fd, sockaddr)
	})
	if err != nil {
		t.Fatalf("connect to %s: %v", addr, err)
	}
	defer file.Close()
	conn, err := net.FileConn(file)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// transfer moves bytes from host 0 to host 1 by TCP and compares them.
func transfer(t *testing.T, l *Lab, addr netip.Addr, size int) {
	t.Helper()
	data := make([]byte, size)
	chacha := rand.NewChaCha8([32]byte{1})
	if _, err := chacha.Read(data); err != nil {
		t.Fatal(err)
	}
	listener := listen(t, l, 1, addr)
	type result struct {
		sum   [32]byte
		bytes int
		err   error
	}
	received := make(chan result, 1)
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			received <- result{err: err}
			return
		}
		defer conn.Close()
		err = conn.SetDeadline(time.Now().Add(bound))
		got, readErr := io.ReadAll(conn)
		received <- result{sha256.Sum256(got), len(got), errors.Join(err, readErr)}
	}()
	conn := dial(t, l, 0, listener.Addr().(*net.TCPAddr).AddrPort())
	if err := conn.SetDeadline(time.Now().Add(bound)); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write(data); err != nil {
		t.Fatalf("write: %v", err)
	}
	conn.Close()
	got := <-received
	if got.err != nil {
		t.Fatalf("receive: %v", got.err)
	}
	if got.sum != sha256.Sum256(data) {
		t.Fatalf("%d bytes arrived, want the %d that were sent, unchanged", got.bytes, size)
	}
}

func TestLab_carriesTCPOnEveryPlaneInBothFamilies(t *testing.T) {
	l := up(t, Config{Hosts: 2, Planes: 2})
	for plane := range 2 {
		t.Run(fmt.Sprintf("plane %d IPv4", plane), func(t *testing.T) { transfer(t, l, l.Addr(1, plane), 2<<20) })
		t.Run(fmt.Sprintf("plane %d IPv6", plane), func(t *testing.T) {
			if !hasIPv6() {
				t.Skip("this kernel has no IPv6")
			}
			transfer(t, l, l.Addr6(1, plane), 2<<20)
		})
	}
	status, err := l.Status()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range status.Planes {
		if p.Counters.Bytes < 2<<20 || p.Counters.Unknown != 0 {
			t.Errorf("plane %d counts %+v, want more than 2 MiB and nothing unknown", p.Plane, p.Counters)
		}
	}
}

func TestLab_carriesTCPThroughAHostThatHasAnXDPProgram(t *testing.T) {
	l := up(t, Config{})
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.XDP, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2 /* XDP_PASS */), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	var links []link.Link
	for host := range 2 {
		err := l.Do(host, func() error {
			p0, err := net.InterfaceByName(l.Interfaces(host)[0])
			if err != nil {
				return err
			}
			xdp, err := link.AttachXDP(link.XDPOptions{Program: program, Interface: p0.Index, Flags: link.XDPDriverMode})
			links = append(links, xdp)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	transfer(t, l, l.Addr(1, 0), 1<<20)
	for _, xdp := range links {
		if err := xdp.Close(); err != nil {
			t.Fatal(err)
		}
	}
	transfer(t, l, l.Addr(1, 0), 1<<20) // and when it is gone again
}

func TestLab_directJoinsTwoHostsWithoutASwitch(t *testing.T) {
	l := up(t, Config{Direct: true, Planes: 2, MTU: 3000})
	transfer(t, l, l.Addr(1, 1), 1<<20)
	if _, err := os.Stat(netnsPath(l.switchNamespace())); err == nil {
		t.Error("there is a switch")
	}
	if err := l.PlaneDown(0); !errors.Is(err, ErrDirect) {
		t.Errorf("PlaneDown: %v, want %v", err, ErrDirect)
	}
	if err := l.Fault(FaultConfig{Loss: 0.1}); !errors.Is(err, ErrDirect) {
		t.Errorf("Fault: %v, want %v", err, ErrDirect)
	}
	again, err := Open(l.Name())
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if got := again.Config(); !got.Direct || got.Planes != 2 || got.MTU != 3000 {
		t.Errorf("opened again: %+v, want a direct lab with 2 planes and MTU 3000", got)
	}
}

func TestLab_twoQueuesAndThreadedNAPI(t *testing.T) {
	for _, direct := range []bool{false, true} {
		t.Run(fmt.Sprintf("direct=%v", direct), func(t *testing.T) {
			l := up(t, Config{Queues: 2, Threaded: true, Direct: direct})
			handle, err := netlinkIn(l.namespace(0))
			if err != nil {
				t.Fatal(err)
			}
			defer handle.Close()
			p0, err := handle.LinkByName("p0")
			if err != nil {
				t.Fatal(err)
			}
			if got := p0.Attrs(); got.NumRxQueues != 2 || got.NumTxQueues != 2 {
				t.Errorf("p0 has %d receive and %d transmit queues, want 2 and 2", got.NumRxQueues, got.NumTxQueues)
			}
			err = l.Do(0, func() error {
				file, err := openNetSysfs("p0/threaded", unix.O_RDONLY)
				if err != nil {
					return err
				}
				defer file.Close()
				threaded, err := io.ReadAll(file)
				if err == nil && string(threaded) != "1\n" {
					t.Errorf("p0/threaded is %q, want 1", threaded)
				}
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			transfer(t, l, l.Addr(1, 0), 1<<20)
		})
	}
}

func TestUp_replacesALabOfTheSameName(t *testing.T) {
	old := up(t, Config{Hosts: 3, Planes: 2})
	if err := old.PlaneDown(0); err != nil {
		t.Fatal(err)
	}
	l := up(t, Config{Name: old.Name(), Hosts: 2, Planes: 1})
	if _, err := os.Stat(netnsPath(old.Name() + "-h2")); err == nil {
		t.Error("the old lab's third host is still there")
	}
	transfer(t, l, l.Addr(1, 0), 1<<16) // and its plane is up
}

func TestUp_labsSideBySideDoNotMeet(t *testing.T) {
	a, b := up(t, Config{Name: labName("a")}), up(t, Config{Name: labName("b")})
	if err := a.PlaneDown(0); err != nil {
		t.Fatal(err)
	}
	transfer(t, b, b.Addr(1, 0), 1<<16)
	if err := a.Down(); err != nil {
		t.Fatal(err)
	}
	transfer(t, b, b.Addr(1, 0), 1<<16)
}

func TestUp_cancelledLeavesNothing(t *testing.T) {
	needRoot(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	name := labName("cancelled")
	if l, err := Up(ctx, Config{Name: name}); !errors.Is(err, context.Canceled) {
		t.Errorf("Up = %v, %v, want %v", l, err, context.Canceled)
	}
	if left := leftovers(t, name); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestUp_refusesWhatCannotBe(t *testing.T) {
	for want, cfg := range map[string]Config{
		"lab name":              {Name: "no/slash"},
		"hosts is 1":            {Name: "x", Hosts: 1},
		"hosts is 251":          {Name: "x", Hosts: 251},
		"planes is 17":          {Name: "x", Planes: 17},
		"spines is -1":          {Name: "x", Spines: -1},
		"hosts x planes":        {Name: "x", Hosts: 250, Planes: 5},
		"mtu is 9217":           {Name: "x", MTU: 9217},
		"queues is 17":          {Name: "x", Queues: 17},
		"queue is 100 bytes":    {Name: "x", Queue: 100},
		"hosts is 3, want 2":    {Name: "x", Direct: true, Hosts: 3},
		"spines is 2, want 1":   {Name: "x", Direct: true, Spines: 2},
		"rate is 1gbit, want n": {Name: "x", Direct: true, Rate: 1e9},
		"rate is 1 bit/s":       {Name: "x", Rate: 1},
	} {
		if _, err := Up(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Up(%+v): %v, want %q in the error", cfg, err, want)
		}
	}
}

func TestRemove_cleansUpAfterACrashAndTwice(t *testing.T) {
	for what, crash := range map[string]func(*Lab) error{
		"pins lost":        func(l *Lab) error { return os.RemoveAll(filepath.Join(pinRoot, l.Name())) },
		"switch lost":      func(l *Lab) error { return deleteNetNS(l.switchNamespace()) },
		"host 0 lost":      func(l *Lab) error { return deleteNetNS(l.namespace(0)) },
		"only names left":  func(l *Lab) error { return os.WriteFile(l.NetNS(7), nil, 0) },
		"nothing happened": func(*Lab) error { return nil },
	} {
		t.Run(what, func(t *testing.T) {
			l := up(t, Config{})
			if err := errors.Join(crash(l), l.Close()); err != nil {
				t.Fatal(err)
			}
			for range 2 {
				if err := Remove(t.Context(), l.Name()); err != nil {
					t.Fatal(err)
				}
				if left := leftovers(t, l.Name()); len(left) != 0 {
					t.Fatalf("left behind: %v", left)
				}
			}
			if _, err := Open(l.Name()); !errors.Is(err, ErrNotFound) {
				t.Errorf("Open: %v, want %v", err, ErrNotFound)
			}
		})
	}
}

func TestRemove_takesTheInterfacesFromAProcessThatStaysInside(t *testing.T) {
	l := up(t, Config{})
	cmd := exec.Command("sleep", "60")
	if err := l.Start(0, cmd); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := cmd.Process.Kill(); err != nil {
			t.Error(err)
		}
		_ = cmd.Wait() // killed: that it says so is no failure
	}()
	interfaces := fmt.Sprintf("/proc/%d/net/dev", cmd.Process.Pid)
	if before, err := os.ReadFile(interfaces); err != nil || !bytes.Contains(before, []byte("p0:")) {
		t.Fatalf("%s: %q, %v, want p0 in it", interfaces, before, err)
	}
	if err := l.Down(); err != nil {
		t.Fatal(err)
	}
	if after, err := os.ReadFile(interfaces); err != nil || bytes.Contains(after, []byte("p0:")) {
		t.Errorf("%s: %q, %v, want no p0 in it", interfaces, after, err)
	}
}

func TestOpen_findsALabAndItsFaults(t *testing.T) {
	cfg := Config{Hosts: 3, Planes: 2, Spines: 2, Rate: 5e9, ECN: 32 << 10, Queue: 256 << 10, Seed: 42, MTU: 2000, Port: 4792}
	l := up(t, cfg)
	fault := FaultConfig{Planes: []int{1}, Loss: 0.01, Burst: 4, Duplicate: 0.02, Corrupt: 0.001, Reorder: 0.5, Script: "drop data last 3", Seed: 9}
	if err := errors.Join(l.Fault(fault), l.PlaneDown(0)); err != nil {
		t.Fatal(err)
	}
	again, err := Open(l.Name())
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if got := again.Config(); got != l.Config() {
		t.Errorf("opened %+v, want %+v", got, l.Config())
	}
	status, err := again.Status()
	if err != nil {
		t.Fatal(err)
	}
	got := status.Planes[1]
	if !got.Up || status.Planes[0].Up {
		t.Errorf("planes up: %v, %v, want only plane 1", status.Planes[0].Up, got.Up)
	}
	if got.Loss != 0.01 || got.Burst != 4 || got.Duplicate != 0.02 || got.Corrupt != 0.001 || got.Reorder != 0.5 || got.Seed != 9 {
		t.Errorf("faults %+v, want %+v", got, fault)
	}
	if len(status.Rules) != 1 || status.Rules[0].Rule != "drop data last 3" {
		t.Errorf("rules %+v, want the script", status.Rules)
	}
}

func TestOpen_namesWhatAnIncompleteLabLacks(t *testing.T) {
	l := up(t, Config{})
	if err := os.RemoveAll(filepath.Join(pinRoot, l.Name())); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(l.Name()); err == nil || !strings.Contains(err.Error(), "lab down") {
		t.Errorf("Open: %v, want an error that says what to do", err)
	}
}

func TestDo_returnsToTheCallersNamespace(t *testing.T) {
	l := up(t, Config{})
	here := readlink(t, "/proc/thread-self/ns/net")
	var there string
	if err := l.Do(0, func() error { there = readlink(t, "/proc/thread-self/ns/net"); return io.EOF }); !errors.Is(err, io.EOF) {
		t.Errorf("Do: %v, want what fn returned", err)
	}
	if there == here {
		t.Error("fn ran in the caller's namespace")
	}
	if after := readlink(t, "/proc/thread-self/ns/net"); after != here {
		t.Errorf("now in %s, want %s", after, here)
	}
	if err := l.Do(2, func() error { return nil }); err == nil {
		t.Error("Do on host 2 of 2: accepted, want an error")
	}
}

func readlink(t *testing.T, path string) string {
	t.Helper()
	target, err := os.Readlink(path)
	if err != nil {
		t.Fatal(err)
	}
	return target
}

func TestStart_entersTheNetworkNamespaceOnly(t *testing.T) {
	l := up(t, Config{})
	var out bytes.Buffer
	cmd := exec.Command("sh", "-c", "readlink /proc/self/ns/mnt; readlink /proc/self/ns/net")
	cmd.Stdout = &out
	if err := l.Start(0, cmd); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	got := strings.Fields(out.String())
	if len(got) != 2 || got[0] != readlink(t, "/proc/self/ns/mnt") {
		t.Errorf("mount namespace: %v, want the caller's", got)
	}
	if len(got) != 2 || got[1] == readlink(t, "/proc/self/ns/net") {
		t.Errorf("network namespace: %v, want another than the caller's", got)
	}
}

// flow is numbered datagrams from host 0 to host 1.
type flow struct {
	t        *testing.T
	lab      *Lab
	tx, rx   *net.UDPConn
	received []uint32 // in the order of arrival
}

func newFlow(t *testing.T, l *Lab) *flow {
	t.Helper()
	f := &flow{t: t, lab: l}
	to := netip.AddrPortFrom(l.Addr(1, 0), 4791)
	err := errors.Join(
		l.Do(1, func() (err error) {
			f.rx, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(to))
			return err
		}),
		l.Do(0, func() (err error) {
			f.tx, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
			return err
		}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.rx.Close(); f.tx.Close() })
	// All of a burst fits: what is missing was lost on the way.
	raw, err := f.rx.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var sockErr error
	err = raw.Control(func(fd uintptr) {
		sockErr = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20)
	})
	if err := errors.Join(err, sockErr); err != nil {
		t.Fatal(err)
	}
	return f
}

// train is what leaves at a time: a veth ring holds 256 frames and drops what comes beyond.
const train = 32

// send sends datagrams numbered from 0 and receives until `want` have arrived, or
// as many as the switch then says have.
func (f *flow) send(datagrams int, want func(Counters) uint64) Counters {
	f.t.Helper()
	var datagram [512]byte
	for i := range datagrams {
		binary.BigEndian.PutUint32(datagram[:], uint32(i))
		if _, err := f.tx.Write(datagram[:]); err != nil {
			f.t.Fatal(err)
		}
		if i%train == train-1 {
			for f.next(2*time.Millisecond) == nil {
			}
		}
	}
	status, err := f.lab.Status()
	if err != nil {
		f.t.Fatal(err)
	}
	counters := status.Planes[0].Counters
	f.receive(want(counters), bound)
	return counters
}

func (f *flow) receive(want uint64, wait time.Duration) {
	f.t.Helper()
	for end := time.Now().Add(wait); uint64(len(f.received)) < want; {
		if err := f.next(time.Until(end)); err != nil {
			f.t.Fatalf("%d of %d datagrams arrived: %v", len(f.received), want, err)
		}
	}
}

// next takes one datagram, or says that none came for so long.
func (f *flow) next(wait time.Duration) error {
	f.t.Helper()
	var buffer [2048]byte
	if err := f.rx.SetReadDeadline(time.Now().Add(wait)); err != nil {
		f.t.Fatal(err)
	}
	n, err := f.rx.Read(buffer[:])
	if err != nil {
		return err
	}
	if n != 512 {
		f.t.Fatalf("a datagram of %d bytes, want 512", n)
	}
	f.received = append(f.received, binary.BigEndian.Uint32(buffer[:]))
	return nil
}

// none fails the test if anything more arrives.
func (f *flow) none() {
	f.t.Helper()
	if err := f.rx.SetReadDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
		f.t.Fatal(err)
	}
	var buffer [2048]byte
	if n, err := f.rx.Read(buffer[:]); err == nil {
		f.t.Errorf("another datagram of %d bytes arrived", n)
	}
}

func TestFault_lossIsWhatTheSwitchCounts(t *testing.T) {
	l := up(t, Config{Seed: 11})
	if err := l.Fault(FaultConfig{Loss: 0.1}); err != nil {
		t.Fatal(err)
	}
	f := newFlow(t, l)
	counters := f.send(2000, func(c Counters) uint64 { return 2000 - c.Lost })
	f.none()
	if counters.Lost < 100 || counters.Lost > 300 {
		t.Errorf("lost %d of 2000, want about 200", counters.Lost)
	}
}

func TestFault_duplicatesArriveTwice(t *testing.T) {
	l := up(t, Config{Seed: 11})
	if err := l.Fault(FaultConfig{Duplicate: 0.1}); err != nil {
		t.Fatal(err)
	}
	f := newFlow(t, l)
	counters := f.send(1000, func(c Counters) uint64 { return 1000 + c.Duplicated })
	f.none()
	copies := map[uint32]uint64{}
	for _, number := range f.received {
		copies[number]++
	}
	var twice uint64
	for _, n := range copies {
		if n == 2 {
			twice++
		}
	}
	if len(copies) != 1000 || twice != counters.Duplicated || twice < 50 {
		t.Errorf("%d different datagrams, %d of them twice, want 1000 and the %d counted", len(copies), twice, counters.Duplicated)
	}
}

func TestFault_reorderedAreOvertakenAndNotLost(t *testing.T) {
	l := up(t, Config{Seed: 11})
	if err := l.Fault(FaultConfig{Reorder: 0.1}); err != nil {
		t.Fatal(err)
	}
	f := newFlow(t, l)
	// When a packet on the detour goes on is the scheduler's choice: try until one came late.
	overtaken := 0
	for deadline := time.Now().Add(bound); overtaken == 0 && time.Now().Before(deadline); {
		f.received = nil
		f.send(1000, func(Counters) uint64 { return 1000 })
		for i := 1; i < len(f.received); i++ {
			if f.received[i] < f.received[i-1] {
				overtaken++
			}
		}
	}
	if overtaken == 0 {
		t.Error("nothing was overtaken")
	}
}

func TestFault_planeDownAndUp(t *testing.T) {
	l := up(t, Config{})
	f := newFlow(t, l)
	if err := l.PlaneDown(0); err != nil {
		t.Fatal(err)
	}
	counters := f.send(10, func(Counters) uint64 { return 0 })
	f.none()
	// and perhaps a multicast report of a host's own
	if counters.Down < 10 {
		t.Errorf("counted %d dropped, want 10", counters.Down)
	}
	if err := l.PlaneUp(0); err != nil {
		t.Fatal(err)
	}
	f.send(10, func(Counters) uint64 { return 10 })
}
