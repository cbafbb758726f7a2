// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/loader"
)

const (
	liveFrames = 2 // BPF_F_TEST_XDP_LIVE_FRAMES

	// pumpRepeat is how often mr_tx runs per system call: a call's set-up costs about 10 us, an
	// iteration that finds nothing about 50 ns, one that sends some 300 ns.
	pumpRepeat = 2048

	// idleRun is what a run of mr_tx takes that finds nothing.
	idleRun = 50 * time.Nanosecond

	// lookRepeat is the least length of a call, and that of the one that looks at all work once
	// more before the pump sleeps although connections are ready.
	lookRepeat = 64

	// heldRepeat is the length of a call that begins with a transmit ring full enough.
	heldRepeat = 256

	// maxBatch is the most live frames a batch: a veth ring holds 256 frames and drops beyond.
	maxBatch = 32

	// minNap is the shortest wait worth a sleep: timers are no more exact, and waking costs as much.
	minNap = 100 * time.Microsecond

	// stuckNap bounds a sleep while connections are ready.
	stuckNap = time.Millisecond

	// frameOverhead is the largest frame's headers: Ethernet, VLAN tag, IPv6, UDP, BTH, data
	// header, RETH, immediate; and 8 bytes too many, which mr_tx always cuts off again because
	// only a changed length reaches the driver.
	frameOverhead = 14 + 4 + 40 + 8 + 12 + 32 + 16 + 8 + 8

	maxTemplate = 3408 // bytes; the kernel wants live frames to fit one page
)

// tempo adapts the batch of live frames to the load. A batch leaves when its last frame has been
// made, so that big batches are cheap per packet and small ones quick.
type tempo struct {
	batch, max uint32
}

// adapt takes how many of a call's runs sent a packet.
func (t *tempo) adapt(sent, runs uint64) {
	switch {
	case 2*sent >= runs:
		t.batch = min(4*t.batch, t.max)
	case 8*sent < runs:
		t.batch = max(t.batch/4, 1)
	}
}

// outlook is what the pump knows after a call that sent nothing.
type outlook struct {
	now, lastSent int64  // ns
	paced         int64  // ns, when the first paced packet may leave; 0: none waits
	spin          int64  // ns without a packet before the pump sleeps
	ready         uint32 // connections in the ready ring
}

// nap says whether to sleep, and for how long at most: math.MaxInt64 is until woken.
func (o outlook) nap() (d int64, sleep bool) {
	switch {
	case o.paced > o.now:
		if d = o.paced - o.now; d < int64(minNap) {
			return 0, false
		}
		d -= int64(minNap) / 2 // the rest is spun
		if o.ready > 1 {
			// mr_tx names the paced connection that it met last; another one may be due earlier.
			d = min(d, int64(2*minNap))
		}
		// An ACK or a new pace does not wake the pump for a connection that is ready already.
		return min(d, int64(stuckNap)), true
	case o.paced != 0 || o.now-o.lastSent < o.spin:
		return 0, false
	case o.ready > 0:
		return int64(stuckNap), true
	}
	return math.MaxInt64, true
}

// pump is the thread inside BPF_PROG_RUN of mr_tx: whatever the device sends except ACKs, it sends.
type pump struct {
	prog   *ebpf.Program
	words  *loader.Pump
	frame  []byte
	tempo  tempo
	spin   int64
	clk    clock
	log    *slog.Logger
	wakeFD int
	cpus   []int // where its thread may run; nil: anywhere
	bell   int   // eventfd
	epoll  int
	ring   wakeRing
	woken  func()      // called when the pump has work again after a sleep
	failed func(error) // called once when it cannot go on

	runs     func(repeat, batch uint32) error // mr_tx, by the kernel
	patience time.Duration                    // with failures that may pass
	backoff  backoff

	awake atomic.Bool
	naps  atomic.Uint64
	calls atomic.Uint64 // of mr_tx's system call
	tid   atomic.Int32
	stop  atomic.Bool
	done  chan struct{}
	once  sync.Once

	started bool
}

// newPump prepares a pump; start runs it.
func newPump(prog *ebpf.Program, wake *ebpf.Map, words *loader.Pump, payload int, spin time.Duration, clk clock, log *slog.Logger) (_ *pump, err error) {
	size := frameOverhead + payload
	if size > maxTemplate {
		return nil, fmt.Errorf("pump: payload of %d bytes makes a frame of %d, want at most %d", payload, size, maxTemplate)
	}
	p := &pump{
		prog: prog, words: words, frame: make([]byte, size), tempo: tempo{1, maxBatch},
		spin: int64(spin), clk: clk, log: log, wakeFD: wake.FD(), bell: -1, epoll: -1, done: make(chan struct{}),
		woken: func() {}, failed: func(error) {},
	}
	p.runs = func(repeat, batch uint32) error {
		_, err := p.prog.Run(&ebpf.RunOptions{Data: p.frame, Repeat: repeat, Flags: liveFrames, BatchSize: batch})
		return err
	}
	p.patience = DefaultRetryTime
	defer func() {
		if err != nil {
			p.release()
		}
	}()
	if p.ring, err = newWakeRing(wake); err != nil {
		return nil, err
	}
	if p.bell, err = unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC); err != nil {
		return nil, fmt.Errorf("pump: eventfd: %w", err)
	}
	if p.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, fmt.Errorf("pump: epoll: %w", err)
	}
	for _, fd := range []int{p.bell, p.wakeFD} {
		if err = unix.EpollCtl(p.epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)}); err != nil {
			return nil, fmt.Errorf("pump: epoll on descriptor %d: %w", fd, err)
		}
	}
	return p, nil
}

// start runs the pump on a thread of its own in namespace ns, where mr_tx's redirects find their
// interfaces. It returns when the thread is there.
func (p *pump) start(ns netns.NsHandle) error {
	ready := make(chan error)
	p.started = true
	go p.thread(ns, ready)
	return <-ready
}

// thread is the pump's goroutine.
func (p *pump) thread(ns netns.NsHandle, ready chan<- error) {
	// Not unlocked: the thread has another namespace than the rest and ends with the goroutine.
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		// The process's first thread would not end but keep name and namespace. While this goroutine
		// holds it, the next one gets another.
		there := make(chan error)
		go p.thread(ns, there)
		ready <- <-there
		runtime.UnlockOSThread()
		return
	}
	defer close(p.done)
	if err := netns.Set(ns); err != nil {
		ready <- fmt.Errorf("pump: enter the device's network namespace: %w", err)
		return
	}
	if err := p.bind(); err != nil {
		ready <- err
		return
	}
	name := [16]byte{'m', 'r', '-', 'p', 'u', 'm', 'p'}
	// Both are comforts: without them the thread has another name and sleeps 50 us longer.
	_ = unix.Prctl(unix.PR_SET_NAME, uintptr(unsafe.Pointer(&name[0])), 0, 0, 0)
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)
	p.tid.Store(int32(unix.Gettid()))
	p.awake.Store(true)
	ready <- nil
	p.run()
}

// run pumps until stop is set.
func (p *pump) run() {
	defer p.awake.Store(false)
	w := p.words
	last := p.clk.now()
	for !p.stop.Load() {
		atomic.StoreUint64(&w.PacedNs, 0)
		repeat := p.repeat()
		sent, err := p.call(repeat, p.tempo.batch)
		if err != nil {
			p.failed(err)
			return
		}
		p.tempo.adapt(sent, uint64(repeat))
		now := p.clk.now()
		if sent > 0 {
			last = now
			continue
		}
		o := outlook{now: now, lastSent: last, spin: p.spin, paced: int64(atomic.LoadUint64(&w.PacedNs)), ready: p.ready()}
		d, sleep := o.nap()
		if !sleep {
			if atomic.LoadUint64(&w.Held) != 0 {
				// A ring that does not drain waits for another thread's turn, perhaps on this CPU.
				_, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
			}
			continue
		}
		slept, err := p.sleep(d, o.ready > 0)
		if err != nil {
			p.failed(err)
			return
		}
		if slept {
			p.tempo.batch = 1
			last = p.clk.now()
		}
	}
}

// repeat is the length of the next call: no longer than the pump may spin, unless much is sent. A
// stream makes long ones worth it: each call begins with pages that the cache has not seen.
func (p *pump) repeat() uint32 {
	switch {
	case atomic.LoadUint64(&p.words.Held) != 0:
		return heldRepeat
	case p.tempo.batch == p.tempo.max:
		return 4 * pumpRepeat
	case p.tempo.batch > 1:
		return pumpRepeat
	}
	return uint32(min(max(p.spin/int64(idleRun), lookRepeat), pumpRepeat))
}

// call runs mr_tx and says how many packets it sent. A run that a signal ended has run some.
func (p *pump) call(repeat, batch uint32) (sent uint64, err error) {
	before := atomic.LoadUint64(&p.words.Sent)
	err = p.runs(repeat, batch)
	if err != nil && !errors.Is(err, unix.EINTR) {
		if err = p.waitOut(err); err != nil {
			return 0, fmt.Errorf("pump: run mr_tx (%d times, batch %d): %w", repeat, batch, err)
		}
		return atomic.LoadUint64(&p.words.Sent) - before, nil
	}
	p.backoff.succeed()
	p.calls.Add(1)
	return atomic.LoadUint64(&p.words.Sent) - before, nil
}

// ready is how many connections stand in the ready ring.
func (p *pump) ready() uint32 {
	return atomic.LoadUint32(&p.words.Tail) - atomic.LoadUint32(&p.words.Head)
}

// sleep waits until a producer wakes the pump, d ns at most. It drains what woke it before,
// publishes that it sleeps and only then looks at the work once more: whoever publishes work later
// sees `sleeping`. If connections stand in the ready ring and yet sent nothing, looking means to
// run mr_tx over them.
func (p *pump) sleep(d int64, ready bool) (slept bool, err error) {
	p.drain()
	atomic.SwapUint32(&p.words.Sleeping, 1)
	defer atomic.SwapUint32(&p.words.Sleeping, 0)
	switch {
	case p.stop.Load():
		return false, nil
	case ready:
		if sent, err := p.call(2*min(p.ready(), uint32(loader.MaxConns))+lookRepeat, 1); err != nil || sent > 0 {
			return false, err
		}
	case p.ready() > 0:
		return false, nil
	}
	p.awake.Store(false)
	p.naps.Add(1)
	err = epollWait(p.epoll, d)
	p.awake.Store(true)
	p.woken()
	return true, err
}

// drain takes back all that woke the pump.
func (p *pump) drain() {
	var b [8]byte
	for {
		if _, err := unix.Read(p.bell, b[:]); err != unix.EINTR { // EAGAIN: empty
			break
		}
	}
	p.ring.drain()
}

// wake ends a sleep.
func (p *pump) wake() {
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], 1)
	for {
		if _, err := unix.Write(p.bell, b[:]); err != unix.EINTR { // EAGAIN: wakes anyhow
			return
		}
	}
}

// close stops the thread, which takes one call of mr_tx, and frees what the pump holds.
func (p *pump) close() error {
	var err error
	p.once.Do(func() {
		p.stop.Store(true)
		p.wake()
		if p.started {
			<-p.done
		}
		err = p.release()
	})
	return err
}

func (p *pump) release() error {
	var errs []error
	for _, fd := range []int{p.epoll, p.bell} {
		if fd >= 0 {
			errs = append(errs, unix.Close(fd))
		}
	}
	return errors.Join(append(errs, p.ring.close())...)
}

// epollWait waits for any event, ns at most; math.MaxInt64 is without a bound. A signal ends it too.
func epollWait(epoll int, ns int64) error {
	var events [2]unix.EpollEvent
	var ts *unix.Timespec
	if ns != math.MaxInt64 {
		t := unix.NsecToTimespec(ns)
		ts = &t
	}
	// epoll_pwait2 (Linux 5.11): epoll_wait's milliseconds are too coarse for pacing.
	_, _, e := unix.Syscall6(unix.SYS_EPOLL_PWAIT2, uintptr(epoll), uintptr(unsafe.Pointer(&events[0])),
		uintptr(len(events)), uintptr(unsafe.Pointer(ts)), 0, 0)
	if e != 0 && e != unix.EINTR {
		return fmt.Errorf("pump: epoll_pwait2: %w", e)
	}
	return nil
}

// wakeRing is the consumer's side of ring buffer mr_wake, of which only the positions matter.
type wakeRing struct {
	consumer, producer         *uint64
	consumerPage, producerPage []byte
}

func newWakeRing(m *ebpf.Map) (r wakeRing, err error) {
	page := os.Getpagesize()
	if r.consumerPage, err = unix.Mmap(m.FD(), 0, page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return r, fmt.Errorf("%v: map consumer page: %w", m, err)
	}
	if r.producerPage, err = unix.Mmap(m.FD(), int64(page), page, unix.PROT_READ, unix.MAP_SHARED); err != nil {
		return r, errors.Join(fmt.Errorf("%v: map producer page: %w", m, err), r.close())
	}
	r.consumer = (*uint64)(unsafe.Pointer(&r.consumerPage[0]))
	r.producer = (*uint64)(unsafe.Pointer(&r.producerPage[0]))
	return r, nil
}

// drain declares all records read. One that is still being written needs no reading either: its
// writer published the work first, and the pump looks for work after this.
func (r wakeRing) drain() {
	if r.consumer != nil {
		atomic.StoreUint64(r.consumer, atomic.LoadUint64(r.producer))
	}
}

func (r *wakeRing) close() error {
	var errs []error
	for _, p := range [][]byte{r.consumerPage, r.producerPage} {
		if p != nil {
			errs = append(errs, unix.Munmap(p))
		}
	}
	*r = wakeRing{}
	return errors.Join(errs...)
}
