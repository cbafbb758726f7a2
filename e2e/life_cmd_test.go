// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
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

	"github.com/metaroce/metaroce/fabric/lab"
)

// program gives the path of the real binary, which any user may run. METAROCE_BIN names one that
// is there already.
func program(t *testing.T) string {
	t.Helper()
	if path := os.Getenv("METAROCE_BIN"); path != "" {
		return path
	}
	dir, err := os.MkdirTemp("", "metaroce-e2e-") // a test's own folders are closed to others
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "metaroce")
	build := exec.Command("go", "build", "-o", path, "github.com/metaroce/metaroce/cmd/metaroce")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build metaroce: %v\n%s", err, out)
	}
	return path
}

// buffer may be read while a program writes into it.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// command is a running program on a lab's host.
type command struct {
	t        *testing.T
	line     string
	cmd      *exec.Cmd
	out, err buffer
	ended    chan struct{}
}

// start starts a program, which ends with the test.
func start(t *testing.T, l *lab.Lab, index int, attr *syscall.SysProcAttr, argv ...string) *command {
	t.Helper()
	c := &command{t: t, line: strings.Join(argv[1:], " "), cmd: exec.Command(argv[0], argv[1:]...), ended: make(chan struct{})}
	c.cmd.Stdout, c.cmd.Stderr, c.cmd.SysProcAttr = &c.out, &c.err, attr
	if err := l.Start(index, c.cmd); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = c.cmd.Wait() // its state says it
		close(c.ended)
	}()
	t.Cleanup(func() { end(c.cmd.Process, c.ended, unix.SIGTERM) })
	return c
}

// kill is kill -9, if it still runs, and waits for its end.
func (c *command) kill() {
	_ = c.cmd.Process.Kill()
	c.wait()
}

// wait gives the exit code, -1 for one that was killed.
func (c *command) wait() int {
	c.t.Helper()
	select {
	case <-c.ended:
	case <-time.After(patience):
		c.t.Fatalf("%s: has not ended within %v", c.line, patience)
	}
	return c.cmd.ProcessState.ExitCode()
}

// says waits until the program has printed text.
func (c *command) says(text string) {
	c.t.Helper()
	waitFor(c.t, fmt.Sprintf("%s prints %q", c.line, text), func() bool {
		select {
		case <-c.ended:
			if !strings.Contains(c.out.String(), text) {
				c.t.Fatalf("%s: ended with %v: %s", c.line, c.cmd.ProcessState, c.err.String())
			}
		default:
		}
		return strings.Contains(c.out.String(), text)
	})
}

// wantRefusal waits for the end, which must be a failure that one line on standard error explains
// with all of words in it.
func (c *command) wantRefusal(words ...string) {
	c.t.Helper()
	if code := c.wait(); code <= 0 {
		c.t.Errorf("%s: %v, want a failure's exit code", c.line, c.cmd.ProcessState)
	}
	line, more, _ := strings.Cut(c.err.String(), "\n")
	if more != "" || !strings.HasPrefix(line, "metaroce: ") {
		c.t.Errorf("%s: standard error is %q, want one line of metaroce's", c.line, c.err.String())
	}
	for _, w := range words {
		if !strings.Contains(line, w) {
			c.t.Errorf("%s: says %q, want %q in it", c.line, line, w)
		}
	}
}

// linkOf calls f with an interface of a lab's host.
func linkOf(t *testing.T, l *lab.Lab, index int, name string, f func(*netlink.Handle, netlink.Link) error) {
	t.Helper()
	ns, err := netns.GetFromPath(l.NetNS(index))
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	nl, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	defer nl.Close()
	found, err := nl.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := f(nl, found); err != nil {
		t.Fatal(err)
	}
}

// answerer accepts TCP connections at addr on a lab's host and sends each what says.
func answerer(t *testing.T, l *lab.Lab, index int, addr string, says []byte) {
	t.Helper()
	var tcp net.Listener
	err := l.Do(index, func() (err error) {
		tcp, err = net.Listen("tcp", addr)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tcp.Close() })
	go func() {
		for {
			c, err := tcp.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write(says)
			_ = c.(*net.TCPConn).CloseWrite()
			_, _ = io.Copy(io.Discard, c)
			_ = c.Close()
		}
	}()
}

// setupHeader is the head of a set-up message: magic, version, type, length of the body.
func setupHeader(version uint16, kind byte, body string) []byte {
	b := append([]byte("MROC"), 0, 0, kind)
	binary.BigEndian.PutUint16(b[4:], version)
	return append(binary.BigEndian.AppendUint32(b, uint32(len(body))), body...)
}

// foreignProgram attaches an XDP program of nobody's to an interface, until the end of the test.
func foreignProgram(t *testing.T, l *lab.Lab, index int, name string) {
	t.Helper()
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "somebodys", Type: ebpf.XDP, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2 /* XDP_PASS */), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { prog.Close() })
	linkOf(t, l, index, name, func(_ *netlink.Handle, i netlink.Link) error {
		return l.Do(index, func() error {
			x, err := link.AttachXDP(link.XDPOptions{Program: prog, Interface: i.Attrs().Index, Flags: link.XDPDriverMode})
			if err != nil {
				return err
			}
			t.Cleanup(func() { x.Close() })
			return nil
		})
	})
}

func TestWhatCannotBeSetUpIsRefusedInOneLineAndLeavesNothing(t *testing.T) {
	bin := program(t)
	l := newLab(t, lab.Config{Planes: 2})
	peer := l.Addr(1, 0).String()
	port := func(n int) []string { return []string{"-p", strconv.Itoa(n)} }
	for _, c := range []struct {
		name    string
		prepare func(t *testing.T)
		attr    *syscall.SysProcAttr
		args    []string
		words   []string
		opens   bool // fails only after a device is open, which takes its time
	}{
		{
			name: "unknown flag",
			args: []string{"perf", "write-bw", "--bogus"}, words: []string{"--bogus"},
		},
		{
			name: "absent interface",
			args: []string{"perf", "write-bw", "-d", "nope0"}, words: []string{`"nope0"`, "p0, p1"},
		},
		{
			name: "interface without native XDP",
			prepare: func(t *testing.T) {
				linkOf(t, l, 0, "lo", func(nl *netlink.Handle, lo netlink.Link) error {
					a, err := netlink.ParseAddr("198.18.99.1/32")
					if err != nil {
						return err
					}
					return nl.AddrAdd(lo, a)
				})
			},
			args: []string{"perf", "write-bw", "-d", "lo"}, words: []string{"interface lo", "native XDP"},
		},
		{
			name: "MTU too small",
			prepare: func(t *testing.T) {
				mtu := func(bytes int) {
					linkOf(t, l, 0, "p1", func(nl *netlink.Handle, i netlink.Link) error { return nl.LinkSetMTU(i, bytes) })
				}
				mtu(600)
				t.Cleanup(func() { mtu(l.Config().MTU) })
			},
			args: []string{"perf", "write-bw", "-d", "p0,p1"}, words: []string{"interface p1", "MTU is 600", "at least 1140"},
		},
		{
			name: "no root",
			attr: &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}},
			args: []string{"perf", "write-bw", "-d", "p0"}, words: []string{"65534", "CAP_NET_ADMIN", "want root"},
		},
		{
			name:    "foreign XDP program",
			prepare: func(t *testing.T) { foreignProgram(t, l, 0, "p1") },
			args:    []string{"perf", "write-bw", "-d", "p0,p1"}, words: []string{"interface p1", "somebodys", "want none"},
		},
		{
			name:    "port taken",
			opens:   true,
			prepare: func(t *testing.T) { answerer(t, l, 0, ":7001", nil) },
			args:    append(port(7001), "perf", "write-bw", "-d", "p0"), words: []string{"7001", "in use"},
		},
		{
			name:  "peer not there",
			opens: true,
			args:  append(port(7002), "perf", "write-bw", "-d", "p0", "--wait", "200ms", peer), words: []string{peer + ":7002", "nothing listens", "200ms"},
		},
		{
			name:  "peer's machine not there",
			opens: true,
			prepare: func(t *testing.T) {
				down(t, l)
				t.Cleanup(func() { up(t, l) })
			},
			args: append(port(7002), "perf", "write-bw", "-d", "p0", "--wait", "200ms", peer), words: []string{peer, "does not answer"},
		},
		{
			name:    "peer of another version",
			opens:   true,
			prepare: func(t *testing.T) { answerer(t, l, 1, ":7003", setupHeader(9, 3, `{}`)) },
			args:    append(port(7003), "perf", "write-bw", "-d", "p0", peer), words: []string{peer, "version 9", "version 1"},
		},
		{
			name:    "no peer of ours",
			opens:   true,
			prepare: func(t *testing.T) { answerer(t, l, 1, ":7004", []byte("HTTP/1.0 400 Bad Request\r\n\r\n")) },
			args:    append(port(7004), "cp", "-d", "p0", os.Args[0], peer+":"), words: []string{peer, "not a metaroce peer"},
		},
		{
			name: "file that is not there",
			args: []string{"cp", "-d", "p0", "/nope/file", peer + ":"}, words: []string{"/nope/file"},
		},
		{
			name: "folder that is not there",
			args: []string{"recv", "-d", "p0", "/nope"}, words: []string{"/nope"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.opens {
				anyKernel(t)
			}
			if c.prepare != nil {
				c.prepare(t)
			}
			// There may be something: a program of the test's, or what a killed process left in
			// an earlier namespace whose inode this one has.
			before := leftBehind(t, l, 0)
			argv := append([]string{bin}, c.args...)
			start(t, l, 0, c.attr, argv...).wantRefusal(c.words...)
			for _, found := range leftBehind(t, l, 0) {
				if !slices.Contains(before, found) {
					t.Errorf("left behind: %s", found)
				}
			}
		})
	}
}

func TestSecondProcessOnAnInterfaceIsToldThePIDOfTheFirst(t *testing.T) {
	anyKernel(t)
	bin := program(t)
	l := newLab(t, lab.Config{Planes: 2})
	first := start(t, l, 0, nil, bin, "perf", "write-bw", "-d", "p0,p1")
	first.says("Waiting")
	before := fmt.Sprint(leftBehind(t, l, 0))
	for _, itf := range []string{"p0", "p1"} {
		second := start(t, l, 0, nil, bin, "perf", "write-bw", "-d", itf, "-p", "7001")
		second.wantRefusal("interface "+itf, strconv.Itoa(first.cmd.Process.Pid))
	}
	if after := fmt.Sprint(leftBehind(t, l, 0)); after != before {
		t.Errorf("the first process has %s, before the second came: %s", after, before)
	}
	if err := first.cmd.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	first.wait()
	wantNothingLeft(t, l, 0)
}

// files are the names in a folder.
func files(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	names := []string{}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func wantFiles(t *testing.T, dir string, want ...string) {
	t.Helper()
	if got := files(t, dir); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%s has %q, want %q", filepath.Base(dir), got, want)
	}
}

// forwarded is how many packets a lab's switch has taken.
func forwarded(t *testing.T, l *lab.Lab) (n uint64) {
	t.Helper()
	s, err := l.Status()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range s.Planes {
		n += p.Counters.Packets
	}
	return n
}

// inMidCopy waits until a copy that has just been started has moved some of its data.
func inMidCopy(t *testing.T, l *lab.Lab, before uint64, cp *command) {
	t.Helper()
	waitFor(t, "copy under way", func() bool {
		select {
		case <-cp.ended:
			t.Fatalf("%s: ended with %v: %s", cp.line, cp.cmd.ProcessState, cp.err.String())
		default:
		}
		return forwarded(t, l) > before+200
	})
}

func TestKilledCopyLeavesNoPartOfAFile(t *testing.T) {
	anyKernel(t)
	const size = 16 << 20
	bin := program(t)
	// The file takes more than a second.
	l := newLab(t, lab.Config{Rate: 100e6})
	peer := l.Addr(1, 0).String() + ":"
	content := make([]byte, size)
	noise(content, 5)
	source := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(source, content, 0o600); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "dir")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	recv := func() *command {
		t.Helper()
		c := start(t, l, 1, nil, bin, "recv", "-d", "p0", dir)
		c.says("receiving")
		watchProgram(t, l, 1, whatIsLost(t, l))
		return c
	}
	cp := func() *command {
		t.Helper()
		before, most := forwarded(t, l), whatIsLost(t, l)
		c := start(t, l, 0, nil, bin, "cp", "-d", "p0", source, peer)
		inMidCopy(t, l, before, c)
		watchProgram(t, l, 0, most)
		return c
	}

	// The sender dies: the receiver says so, has nothing of the file, and goes on.
	receiver := recv()
	sender := cp()
	wantFiles(t, dir)
	sender.kill()
	waitFor(t, "word of the sender's death", func() bool { return strings.Contains(receiver.err.String(), "gone") })
	wantFiles(t, dir)

	// The receiver dies: the sender says so and fails.
	sender = cp()
	receiver.kill()
	sender.wantRefusal(l.Addr(1, 0).String(), "gone")
	wantNothingLeft(t, l, 0)

	// What the dead left is gone when their successors run, and the file arrives.
	recv()
	wantFiles(t, dir)
	if code := cp().wait(); code != 0 {
		t.Fatalf("the copy ended with code %d", code)
	}
	wantFiles(t, dir, "file")
	got, err := os.ReadFile(filepath.Join(dir, "file"))
	if err != nil {
		t.Fatal(err)
	}
	wantEqual(t, "the copy", got, content)
}

func TestFullDiskEndsTheCopyWithItsReasonAndLeavesNoPartOfTheFile(t *testing.T) {
	anyKernel(t)
	const size = 4 << 20
	bin := program(t)
	l := newLab(t, lab.Config{Direct: true})
	source := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(source, make([]byte, size), 0o600); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	// The receiver, which the test ends later than this, may still have its folder open.
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	receiver := start(t, l, 1, nil, bin, "recv", "-d", "p0", dir)
	receiver.says("receiving")
	start(t, l, 0, nil, bin, "cp", "-d", "p0", source, l.Addr(1, 0).String()+":").wantRefusal("file", "no space left")
	wantFiles(t, dir)
	waitFor(t, "the receiver's own word", func() bool { return strings.Contains(receiver.err.String(), "no space left") })
}
