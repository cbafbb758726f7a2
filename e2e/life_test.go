// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/fabric/lab"
)

// anyKernel leaves out of short runs, which are for other kernels than this machine's, what says
// nothing about the kernel.
func anyKernel(t *testing.T) {
	t.Helper()
	if short() {
		t.Skip("short: does not depend on the kernel")
	}
}

// threadStates are the letters that /proc gives for a process's threads.
func threadStates(pid int) ([]byte, error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil {
		return nil, err
	}
	var states []byte
	for _, file := range files {
		b, err := os.ReadFile(file)
		if os.IsNotExist(err) {
			continue // ended in between
		}
		if err != nil {
			return nil, err
		}
		// The name before it is in parentheses and may contain anything.
		if i := bytes.LastIndexByte(b, ')'); i >= 0 && i+2 < len(b) {
			states = append(states, b[i+2])
		}
	}
	return states, nil
}

// leftBehind lists what a device has outside its process on a host: XDP programs on its
// interfaces, parked interfaces, pins, state files.
func leftBehind(t *testing.T, l *lab.Lab, index int) []string {
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
	links, err := nl.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, link := range links {
		a := link.Attrs()
		if a.Xdp != nil && a.Xdp.Attached {
			found = append(found, "program on "+a.Name)
		}
		if strings.HasPrefix(a.Name, "mrp") {
			found = append(found, "parked interface "+a.Name)
		}
	}
	if d, ok := findDevice(t, l, index); ok {
		found = append(found, "pins "+d.Name)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(ns), &st); err != nil {
		t.Fatal(err)
	}
	states, err := filepath.Glob(fmt.Sprintf("/run/metaroce/%d-*.json", st.Ino))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range states {
		found = append(found, "state "+strings.TrimSuffix(filepath.Base(path), ".json"))
	}
	return found
}

// parkedOf names what leftBehind finds of a device whose first interface is name.
func parkedOf(t *testing.T, l *lab.Lab, index int, name string) (parked string) {
	t.Helper()
	linkOf(t, l, index, name, func(_ *netlink.Handle, i netlink.Link) error {
		parked = fmt.Sprintf("parked interface mrp%da", i.Attrs().Index)
		return nil
	})
	return parked
}

func wantNothingLeft(t *testing.T, l *lab.Lab, index int) {
	t.Helper()
	if found := leftBehind(t, l, index); len(found) > 0 {
		t.Errorf("left behind on host %d: %s", index, strings.Join(found, ", "))
	}
}

// wantNoProgram waits until no program is attached to any interface of a host.
func wantNoProgram(t *testing.T, l *lab.Lab, index int) {
	t.Helper()
	waitFor(t, fmt.Sprintf("no program attached on host %d", index), func() bool {
		return !strings.Contains(strings.Join(leftBehind(t, l, index), ","), "program on")
	})
}

func TestWritesCompleteWhileEveryThreadOfTheReceiverIsStopped(t *testing.T) {
	const retry, keepalive = 500 * time.Millisecond, 200 * time.Millisecond
	size := uint64(pick(100<<20, 8<<20))
	cfg := nodeConfig{size: size, retry: pick(retry, 10*time.Second), keepalive: keepalive}
	p := startNodes(t, newLab(t, lab.Config{Planes: 2}), cfg, hardlyAny)
	over := p.over()
	p.n[1].stop()
	p.n[0].must(opWrite, p.write(size, 1))
	// A stopped program is alive, busy or idle.
	time.Sleep(2*retry + keepalive)
	states, err := threadStates(p.n[1].cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	if running := bytes.Trim(states, "T"); len(running) > 0 || len(states) == 0 {
		t.Fatalf("threads of the receiver have states %q, want all stopped", states)
	}
	p.n[1].cont()
	p.wantEqualSums()
	wantAlive(t, over)
}

// over asks both nodes to tell the end of their connections.
func (p *nodes) over() [2]<-chan nodeMsg {
	p.n[0].t.Helper()
	return [2]<-chan nodeMsg{p.n[0].ask(nodeMsg{Op: opDone}), p.n[1].ask(nodeMsg{Op: opDone})}
}

func wantAlive(t *testing.T, over [2]<-chan nodeMsg) {
	t.Helper()
	for i, c := range over {
		select {
		case m := <-c:
			t.Errorf("end %d of the connection ended with %q", i, m.Text)
		default:
		}
	}
}

func TestTransferGoesOnAfterTheSenderWasStoppedForLongerThanTheRetryTime(t *testing.T) {
	anyKernel(t)
	const retry = 500 * time.Millisecond
	const size = 8 << 20
	// Slow enough that the transfer is under way when the sender stops.
	l := newLab(t, lab.Config{Planes: 2, Rate: 50e6})
	p := startNodes(t, l, nodeConfig{size: size, retry: retry}, whatIsLost(t, l))
	over := p.over()
	written := p.write(size, 2)
	select {
	case m := <-written:
		t.Fatalf("the transfer was over before the sender could be stopped: %q", m.Err)
	case <-time.After(50 * time.Millisecond):
	}
	p.n[0].stop()
	time.Sleep(3 * retry)
	wantAlive(t, over)
	p.n[0].cont()
	p.n[0].must(opWrite, written)
	p.wantEqualSums()
	wantAlive(t, over)
}

func TestCloseTowardsAStoppedPeerEndsInTimeAndLosesNothing(t *testing.T) {
	anyKernel(t)
	const size, wait = 1 << 20, 300 * time.Millisecond
	p := startNodes(t, newLab(t, lab.Config{Planes: 2}), nodeConfig{size: size}, hardlyAny)
	p.n[1].stop()
	p.n[0].must(opWrite, p.write(size, 1))
	start := time.Now()
	m := p.n[0].answer(opClose, p.n[0].ask(nodeMsg{Op: opClose, Wait: wait}))
	// Far less than the 5 s that Close has without a deadline.
	if took := time.Since(start); took > wait+3*time.Second {
		t.Errorf("closing took %v, its context allowed %v", took, wait)
	}
	if !strings.Contains(m.Err, "did not confirm") {
		t.Errorf("closing says %q, want that the peer did not confirm", m.Err)
	}
	p.n[1].cont()
	if m := p.n[1].do(nodeMsg{Op: opDone}); m.Kind != kindPeer {
		t.Errorf("the stopped end ended with %q (%s), want %s", m.Text, m.Kind, kindPeer)
	}
	p.wantEqualSums()
}

func TestPeerOfAKilledProgramIsToldWithinASecondAndTheNextStartCleansUp(t *testing.T) {
	l := newLab(t, lab.Config{Planes: 2})
	for _, c := range []struct {
		name string
		dead int
		busy bool
	}{
		{"idle listener", 1, false},
		{"receiver in mid-transfer", 1, true},
		{"sender in mid-transfer", 0, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			if !c.busy || c.dead == 0 {
				anyKernel(t)
			}
			// Neither retry time nor keepalive can be what tells the peer.
			cfg := nodeConfig{size: 1 << 20, retry: time.Minute, keepalive: time.Minute}
			p := startNodes(t, l, cfg, outage(8))
			dead, alive := p.n[c.dead], p.n[1-c.dead]
			over := alive.ask(nodeMsg{Op: opDone})
			var written <-chan nodeMsg
			if c.busy {
				written = p.write(cfg.size, 1e6)
				select {
				case m := <-written:
					t.Fatalf("the transfer ended before anybody was killed: %q", m.Err)
				case <-time.After(200 * time.Millisecond):
				}
			}
			start := time.Now()
			dead.kill()
			gone := time.Since(start)
			m := alive.must(opDone, over)
			// How long the kernel takes to take a process down is its own affair.
			if took, most := time.Since(start)-gone, pick(time.Second, 5*time.Second); took > most {
				t.Errorf("the peer was told after %v, want at most %v (the process itself took %v)", took, most, gone)
			}
			if m.Kind != kindDied {
				t.Errorf("the connection ended with %q (%s), want %s", m.Text, m.Kind, kindDied)
			}
			if c.busy && c.dead == 1 {
				if m := alive.answer(opWrite, written); m.Kind != kindDied {
					t.Errorf("the write ended with %q (%s), want %s", m.Err, m.Kind, kindDied)
				}
			}
			wantNoProgram(t, l, c.dead)
			if found := leftBehind(t, l, c.dead); len(found) == 0 {
				t.Error("the killed program left nothing: this test shows nothing")
			}
			// The successor takes another interface than the first, after which the dead one's
			// pins and parked interface are called.
			next := startNode(t, l, c.dead)
			next.do(nodeMsg{Op: opOpen, Interfaces: l.Interfaces(c.dead)[1:]})
			for _, found := range leftBehind(t, l, c.dead) {
				if strings.HasSuffix(found, "-p0") || found == "program on p0" || found == parkedOf(t, l, c.dead, "p0") {
					t.Errorf("after the next start there still is: %s", found)
				}
			}
			next.do(nodeMsg{Op: opQuit})
			alive.do(nodeMsg{Op: opQuit})
			for i := range 2 {
				wantNothingLeft(t, l, i)
			}
		})
	}
}

func TestIdleConnectionCostsHardlyAnyCPU(t *testing.T) {
	anyKernel(t)
	const idle = 10 * time.Second
	p := startNodes(t, newLab(t, lab.Config{Planes: 4}), nodeConfig{size: 1 << 20}, hardlyAny)
	p.n[0].must(opWrite, p.write(1<<20, 4))
	usage := func() (u [2]nodeMsg) {
		for i, n := range p.n {
			u[i] = n.do(nodeMsg{Op: opUsage})
		}
		return u
	}
	// What set-up and transfer started, a collection of garbage for example, ends first.
	before := usage()
	waitFor(t, "quiet after the transfer", func() bool {
		time.Sleep(300 * time.Millisecond)
		last := before
		before = usage()
		return before[0].Switches-last[0].Switches < 100 && before[1].Switches-last[1].Switches < 100
	})
	time.Sleep(idle)
	after := usage()
	for i := range p.n {
		cpu, switches := after[i].CPU-before[i].CPU, after[i].Switches-before[i].Switches
		t.Logf("end %d: %v of CPU, %d voluntary context switches in %v", i, cpu, switches, idle)
		// Whatever a thread wakes up for costs microseconds; the machine's other load can make
		// each of them dear, but not many. `metaroce bench` holds the CPU time to its bound.
		if most := int64(idle / (10 * time.Millisecond)); switches > most {
			t.Errorf("end %d: %d voluntary context switches in %v, want at most %d", i, switches, idle, most)
		}
	}
}
