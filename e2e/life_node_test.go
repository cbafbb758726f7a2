// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/fabric/lab"
	"github.com/metaroce/metaroce/transport"
	"github.com/metaroce/metaroce/transport/core"
)

// A node is a program of its own on a lab's host, to be stopped and killed: it has one device, one
// memory region and one connection, and does what the test asks it to, see node.do.
const nodeRole = "node"

func init() { roles[nodeRole] = nodeMain }

// Operations of a node.
const (
	opOpen   = "open"   // Interfaces, RetryTime, Keepalive: opens the device
	opAlloc  = "alloc"  // Size, Seed: memory filled from Seed; 0 leaves it zero. Gives Addr and RKey
	opListen = "listen" // Peer: where; gives Peer
	opAccept = "accept"
	opDial   = "dial"  // Peer
	opWrite  = "write" // Length bytes from and to the region's start, Count times; ends when all are complete
	opSum    = "sum"   // gives the SHA-256 of the memory
	opDone   = "done"  // ends when the connection is over; gives why, as Kind and Text
	opUsage  = "usage" // gives CPU and Switches
	opClose  = "close" // the connection, within Wait
	opQuit   = "quit"  // closes the device and ends
)

// Kinds of an end of a connection.
const (
	kindNone   = ""
	kindClosed = "closed by this end"
	kindPeer   = "closed by the peer"
	kindDied   = "peer died"
	kindFailed = "peer's end failed"
	kindRetry  = "retry time exceeded"
	kindOther  = "other"
)

func kindOf(err error) string {
	var failed *transport.PeerFailedError
	var retry *core.RetryExceededError
	switch {
	case err == nil:
		return kindNone
	case errors.Is(err, transport.ErrPeerDied):
		return kindDied
	case errors.As(err, &failed):
		return kindFailed
	case errors.As(err, &retry):
		return kindRetry
	case errors.Is(err, transport.ErrPeerClosed):
		return kindPeer
	case errors.Is(err, transport.ErrClosed):
		return kindClosed
	}
	return kindOther
}

// nodeMsg is a request or its answer, which has the same ID.
type nodeMsg struct {
	ID int
	Op string

	Interfaces           []string
	RetryTime, Keepalive time.Duration
	Wait                 time.Duration
	Peer                 string
	Size, Seed           uint64
	Addr, Length         uint64
	RKey                 uint32
	Count                int

	Err, Kind, Text, Sum string
	CPU                  time.Duration
	Switches             int64 // voluntary context switches
}

// nodeServer is the program's side.
type nodeServer struct {
	mem      *transport.Memory
	listener *transport.Listener

	mu   sync.Mutex
	dev  *transport.Device
	pd   *transport.PD
	conn *transport.Conn
}

// nodeMain answers requests, one JSON value a line, until its standard input ends. Several may be
// under way.
func nodeMain([]string) int {
	var (
		n   nodeServer
		wmu sync.Mutex
		out = json.NewEncoder(os.Stdout)
		in  = json.NewDecoder(os.Stdin)
	)
	for {
		var m nodeMsg
		if err := in.Decode(&m); err != nil {
			// The test is over.
			n.mu.Lock()
			defer n.mu.Unlock()
			if n.dev != nil {
				_ = n.dev.Close()
			}
			return 0
		}
		go func() {
			err := n.do(&m)
			if err != nil {
				m.Err = err.Error()
				if m.Kind == kindNone {
					m.Kind = kindOf(err)
				}
			}
			wmu.Lock()
			_ = out.Encode(m)
			wmu.Unlock()
			if m.Op == opQuit {
				os.Exit(0)
			}
		}()
	}
}

func (n *nodeServer) connection() *transport.Conn {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.conn
}

func (n *nodeServer) setConn(c *transport.Conn) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.conn = c
}

func (n *nodeServer) do(m *nodeMsg) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	switch m.Op {
	case opOpen:
		dev, err := transport.Open(ctx, transport.Config{
			Interfaces: m.Interfaces, RetryTime: m.RetryTime, Keepalive: m.Keepalive,
			Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
		})
		if err != nil {
			return err
		}
		pd, err := dev.AllocPD()
		if err != nil {
			return err
		}
		n.mu.Lock()
		n.dev, n.pd = dev, pd
		n.mu.Unlock()
	case opAlloc:
		n.mem, err = n.pd.AllocMemory(m.Size, core.AllAccess)
		if err != nil {
			return err
		}
		if m.Seed != 0 {
			noise(n.mem.Bytes(), m.Seed)
		}
		m.Addr, m.RKey = n.mem.Addr(), n.mem.RKey()
	case opListen:
		n.listener, err = n.dev.Listen(ctx, m.Peer)
		if err != nil {
			return err
		}
		m.Peer = n.listener.Addr().String()
	case opAccept:
		in, err := n.listener.Accept(ctx)
		if err != nil {
			return err
		}
		c, err := in.Accept(ctx, nil, transport.WithPD(n.pd))
		if err != nil {
			return err
		}
		n.setConn(c)
	case opDial:
		c, err := n.dev.Dial(ctx, m.Peer, nil, transport.WithPD(n.pd))
		if err != nil {
			return err
		}
		n.setConn(c)
	case opWrite:
		return n.write(ctx, m)
	case opSum:
		m.Sum = sumOf(n.mem.Bytes())
	case opDone:
		c := n.connection()
		select {
		case <-c.Done():
			m.Kind, m.Text = kindOf(c.Err()), c.Err().Error()
		case <-ctx.Done():
			return ctx.Err()
		}
	case opUsage:
		var u unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
			return err
		}
		m.CPU = time.Duration(u.Utime.Nano() + u.Stime.Nano())
		m.Switches = u.Nvcsw
	case opClose:
		ctx, cancel := context.WithTimeout(ctx, m.Wait)
		defer cancel()
		return n.connection().Close(ctx)
	case opQuit:
		if n.dev != nil {
			return n.dev.Close()
		}
	default:
		return fmt.Errorf("operation %q is not known", m.Op)
	}
	return err
}

// write keeps the send queue full until all writes are posted.
func (n *nodeServer) write(ctx context.Context, m *nodeMsg) error {
	c := n.connection()
	w := transport.WriteRequest{Local: n.mem, Length: m.Length, RemoteAddr: m.Addr, RKey: m.RKey}
	comps := make([]transport.Completion, 16)
	for posted, done := 0, 0; done < m.Count; {
		if posted < m.Count {
			err := c.PostWrite(w)
			if err == nil {
				posted++
				continue
			}
			if !errors.Is(err, transport.ErrQueueFull) {
				return err
			}
		}
		got, err := c.SendCQ().Wait(ctx, comps)
		if err != nil {
			return err
		}
		for _, comp := range comps[:got] {
			if comp.Status != core.StatusSuccess {
				<-c.Done()
				return fmt.Errorf("write %d of %d: %v: %w", done, m.Count, comp.Status, c.Err())
			}
			done++
		}
	}
	return nil
}

func sumOf(b []byte) string {
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:])
}

// node is the test's side of a node.
type node struct {
	t     *testing.T
	name  string
	lab   *lab.Lab
	index int
	cmd   *exec.Cmd
	in    io.WriteCloser

	exited chan struct{} // closed when the process is gone

	mu      sync.Mutex
	last    int
	waiting map[int]chan nodeMsg
}

// startNode starts a node on a host of l. It ends with the test.
func startNode(t *testing.T, l *lab.Lab, index int) *node {
	t.Helper()
	n := &node{
		t: t, name: fmt.Sprintf("node on host %d", index), lab: l, index: index,
		exited: make(chan struct{}), waiting: map[int]chan nodeMsg{},
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	n.cmd = exec.Command(self)
	n.cmd.Env = append(os.Environ(), roleVariable+"="+nodeRole)
	n.cmd.Stderr = testLog{t}
	in, err := n.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := n.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	n.in = in
	if err := l.Start(index, n.cmd); err != nil {
		t.Fatal(err)
	}
	go n.read(out)
	t.Cleanup(func() {
		_ = n.in.Close()
		end(n.cmd.Process, n.exited, unix.SIGCONT)
	})
	return n
}

// end has a process end by a signal, so that it leaves nothing, or kills it after a while.
func end(p *os.Process, exited <-chan struct{}, gently unix.Signal) {
	_ = p.Signal(gently)
	select {
	case <-exited:
	case <-time.After(20 * time.Second):
		_ = p.Kill()
		<-exited
	}
}

// read hands the answers out, and after the end of the program empty ones to who still waits.
func (n *node) read(out io.Reader) {
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var m nodeMsg
		if err := json.Unmarshal(lines.Bytes(), &m); err != nil {
			n.t.Errorf("%s says %q: %v", n.name, lines.Bytes(), err)
			continue
		}
		n.mu.Lock()
		c := n.waiting[m.ID]
		delete(n.waiting, m.ID)
		n.mu.Unlock()
		if c != nil {
			c <- m
		}
	}
	_ = n.cmd.Wait()
	close(n.exited)
}

// ask sends a request and gives where its answer will come.
func (n *node) ask(m nodeMsg) <-chan nodeMsg {
	n.t.Helper()
	c := make(chan nodeMsg, 1)
	n.mu.Lock()
	n.last++
	m.ID = n.last
	n.waiting[m.ID] = c
	n.mu.Unlock()
	b, err := json.Marshal(m)
	if err != nil {
		n.t.Fatal(err)
	}
	if _, err := n.in.Write(append(b, '\n')); err != nil {
		n.t.Fatalf("%s: %s: %v", n.name, m.Op, err)
	}
	return c
}

// answer waits for an answer, which may be an error.
func (n *node) answer(op string, c <-chan nodeMsg) nodeMsg {
	n.t.Helper()
	select {
	case m := <-c:
		return m
	case <-n.exited:
		n.t.Fatalf("%s: %s: the program has ended: %v", n.name, op, n.cmd.ProcessState)
	case <-time.After(patience + 10*time.Second):
		n.t.Fatalf("%s: %s: no answer", n.name, op)
	}
	return nodeMsg{}
}

// must is answer, and an error ends the test.
func (n *node) must(op string, c <-chan nodeMsg) nodeMsg {
	n.t.Helper()
	m := n.answer(op, c)
	if m.Err != "" {
		n.t.Fatalf("%s: %s: %s", n.name, op, m.Err)
	}
	return m
}

// do asks and waits; an error ends the test.
func (n *node) do(m nodeMsg) nodeMsg {
	n.t.Helper()
	return n.must(m.Op, n.ask(m))
}

// signal sends a signal to the program.
func (n *node) signal(s unix.Signal) {
	n.t.Helper()
	if err := n.cmd.Process.Signal(s); err != nil {
		n.t.Fatalf("%s: %v: %v", n.name, s, err)
	}
}

// kill is kill -9; it returns when the process is gone.
func (n *node) kill() {
	n.t.Helper()
	n.signal(unix.SIGKILL)
	select {
	case <-n.exited:
	case <-time.After(patience):
		n.t.Fatalf("%s is still there after kill -9", n.name)
	}
}

// stop is SIGSTOP; it returns when every thread has stopped.
func (n *node) stop() {
	n.t.Helper()
	n.signal(unix.SIGSTOP)
	pid := n.cmd.Process.Pid
	waitFor(n.t, n.name+" stopped", func() bool {
		states, err := threadStates(pid)
		if err != nil {
			n.t.Fatal(err)
		}
		for _, s := range states {
			if s != 'T' {
				return false
			}
		}
		return len(states) > 0
	})
}

func (n *node) cont() {
	n.t.Helper()
	n.signal(unix.SIGCONT)
}

// nodeConfig says how the nodes of a pair open their devices.
type nodeConfig struct {
	retry, keepalive time.Duration
	size             uint64 // of both memories; the dialler's is filled
}

// nodes are two connected programs: 0 dialled, 1 listened.
type nodes struct {
	*lab.Lab
	n   [2]*node
	mem [2]nodeMsg // Addr, RKey
}

const nodeSeed = 12

// startNodes starts a node on hosts 0 and 1 of l, connects them through plane 0 and gives each memory.
func startNodes(t *testing.T, l *lab.Lab, cfg nodeConfig, most mostRepairs) *nodes {
	t.Helper()
	p := &nodes{Lab: l}
	for i := range p.n {
		p.n[i] = startNode(t, l, i)
		p.open(i, cfg)
		watchProgram(t, l, i, most)
	}
	p.connect()
	return p
}

// open opens node i's device and allocates its memory.
func (p *nodes) open(i int, cfg nodeConfig) {
	p.n[i].t.Helper()
	p.n[i].do(nodeMsg{Op: opOpen, Interfaces: p.Interfaces(i), RetryTime: cfg.retry, Keepalive: cfg.keepalive})
	seed := uint64(0)
	if i == 0 {
		seed = nodeSeed
	}
	p.mem[i] = p.n[i].do(nodeMsg{Op: opAlloc, Size: cfg.size, Seed: seed})
}

func (p *nodes) connect() {
	p.n[0].t.Helper()
	at := p.n[1].do(nodeMsg{Op: opListen, Peer: p.Addr(1, 0).String() + ":0"}).Peer
	accepted := p.n[1].ask(nodeMsg{Op: opAccept})
	p.n[0].do(nodeMsg{Op: opDial, Peer: at})
	p.n[1].must(opAccept, accepted)
}

// write has node 0 write its memory to node 1's, count times.
func (p *nodes) write(length uint64, count int) <-chan nodeMsg {
	p.n[0].t.Helper()
	return p.n[0].ask(nodeMsg{Op: opWrite, Addr: p.mem[1].Addr, RKey: p.mem[1].RKey, Length: length, Count: count})
}

// wantEqualSums compares the nodes' memories.
func (p *nodes) wantEqualSums() {
	t := p.n[0].t
	t.Helper()
	from, to := p.n[0].do(nodeMsg{Op: opSum}).Sum, p.n[1].do(nodeMsg{Op: opSum}).Sum
	if from != to {
		t.Errorf("the memory written to has SHA-256 %s, want %s", to, from)
	}
}
