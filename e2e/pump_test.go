// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/fabric/lab"
	"github.com/metaroce/metaroce/loader"
	"github.com/metaroce/metaroce/transport"
	"github.com/metaroce/metaroce/transport/core"
)

// pumps are the thread ids of the pumps in this process.
func pumps(t *testing.T) (tids []int) {
	t.Helper()
	names, err := filepath.Glob("/proc/self/task/*/comm")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		comm, err := os.ReadFile(name)
		if err != nil || string(bytes.TrimSpace(comm)) != "mr-pump" {
			continue // other threads come and go
		}
		tid, err := strconv.Atoi(filepath.Base(filepath.Dir(name)))
		if err != nil {
			t.Fatal(err)
		}
		tids = append(tids, tid)
	}
	return tids
}

// sleeps is how often the pumps have blocked.
func sleeps(t *testing.T, tids []int) (n uint64) {
	t.Helper()
	for _, tid := range tids {
		b, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/status", tid))
		if err != nil {
			t.Fatal(err)
		}
		_, rest, _ := bytes.Cut(b, []byte("\nvoluntary_ctxt_switches:"))
		line, _, _ := bytes.Cut(rest, []byte("\n"))
		v, err := strconv.ParseUint(string(bytes.TrimSpace(line)), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		n += v
	}
	return n
}

// migrate moves the pumps from CPU to CPU until the end of the test, or until stop.
func migrate(t *testing.T) {
	t.Helper()
	tids := pumps(t)
	if len(tids) != 2 {
		t.Fatalf("threads of pumps %v, want two", tids)
	}
	stop, stopped := make(chan struct{}), make(chan error, 1)
	go func() {
		for n := 0; ; n++ {
			for i, tid := range tids {
				var set unix.CPUSet
				set.Set((n>>i ^ i) % runtime.NumCPU()) // together and apart
				if err := unix.SchedSetaffinity(tid, &set); err != nil {
					stopped <- fmt.Errorf("move thread %d: %w", tid, err)
					return
				}
			}
			select {
			case <-stop:
				stopped <- nil
				return
			case <-time.After(200 * time.Microsecond):
			}
		}
	}()
	t.Cleanup(func() {
		close(stop)
		if err := <-stopped; err != nil {
			t.Error(err)
		}
	})
}

func TestSeveralReceiveQueuesAndPumpsThatMigratePlaceEveryPacketOnce(t *testing.T) {
	if runtime.NumCPU() < 2 {
		t.Skip("needs 2 CPUs")
	}
	for _, c := range fewer(1, []struct {
		name string
		cfg  lab.Config
		loss float64
		// A pump that comes to another CPU takes another queue, and its packets overtake those in the last one's:
		// 3 % seen.
		most mostRepairs
	}{
		{"no switch", lab.Config{Direct: true, Planes: 2, Queues: 2, Threaded: true}, 0, perCent(5)},
		{"receiving on the sender's CPU", lab.Config{Planes: 2, Queues: 2}, 0, hardlyAny},
		{"a switch", lab.Config{Planes: 2, Queues: 2, Threaded: true}, 0, perCent(5)},
		{"a switch that loses 1 %", lab.Config{Planes: 2, Queues: 2, Threaded: true}, 0.01, perCent(7)},
	}) {
		t.Run(c.name, func(t *testing.T) {
			l := newLab(t, c.cfg)
			h := openPair(t, l, transport.Config{RetryTime: time.Minute})
			conn := connect(t, h[0], h[1], c.most)
			if c.loss > 0 {
				setFault(t, l, lab.FaultConfig{Loss: c.loss, Seed: 3})
			}
			migrate(t)
			for round := range uint64(pick(3, 1)) {
				exchange(t, bothWays(t, h, conn, round, mixed(round, pick[uint64](16<<20, 200<<10)))...)
			}
		})
	}
}

// sleepFlag is where a device's pump says that it sleeps, mapped until the end of the test.
func sleepFlag(t *testing.T, h *host) *uint32 {
	t.Helper()
	m, err := ebpf.LoadPinnedMap(filepath.Join(h.dir, "mr_pump"), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	b, err := loader.Mmap(m)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := loader.Munmap(b); err != nil {
			t.Error(err)
		}
	})
	return &(*loader.Pump)(unsafe.Pointer(&b[0])).Sleeping
}

func TestPumpThatSleepsAfterEachPacketNeverMissesAPost(t *testing.T) {
	rounds := pick(100_000, 1000)
	h := openPair(t, newLab(t, lab.Config{Direct: true}), transport.Config{Spin: -1, RetryTime: time.Minute})
	c := connect(t, h[0], h[1], hardlyAny)
	from, to := h[0].alloc(t, 8), h[1].alloc(t, 8)
	tids := pumps(t)
	before := sleeps(t, tids)
	ctx := bounded(t)
	asleep := sleepFlag(t, h[0])
	done := make([]transport.Completion, 1)
	for i := range rounds {
		// Every other post finds a pump that sleeps; those between may find it falling asleep.
		for i%2 == 1 && ctx.Err() == nil && atomic.LoadUint32(asleep) == 0 {
			runtime.Gosched()
		}
		w := transport.WriteRequest{WRID: uint64(i), Local: from, Length: 8, RemoteAddr: to.Addr(), RKey: to.RKey()}
		if err := c[0].PostWrite(w); err != nil {
			t.Fatal(err)
		}
		// The same with waiting: nobody but the pump sleeps while this polls.
		for i%2 == 0 && ctx.Err() == nil && c[0].SendCQ().Poll(done) == 0 {
			runtime.Gosched()
		}
		if i%2 == 1 {
			if _, err := c[0].SendCQ().Wait(ctx, done); err != nil {
				t.Fatalf("round %d: %v (connection: %v)", i, err, c[0].Err())
			}
		}
		if done[0].WRID != uint64(i) || done[0].Status != core.StatusSuccess {
			t.Fatalf("round %d: completion %+v: %v, %v", i, done[0], c[0].Err(), ctx.Err())
		}
	}
	n := sleeps(t, tids) - before
	t.Logf("the pumps slept %d times in %d rounds", n, rounds)
	if n < uint64(rounds)/10 {
		t.Errorf("the pumps slept %d times in %d rounds, want most of them", n, rounds)
	}
}
