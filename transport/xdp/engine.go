// SPDX-License-Identifier: Apache-2.0

// Package xdp is the engine whose fast path runs in the kernel, as XDP programs. The programs'
// maps are its device registers. Here are the pump that runs mr_tx, the control loop that applies
// transport/core's policy, connections, memory regions, and what netlink tells about the way to
// the peers. It never touches a data packet.
package xdp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/loader"
	"github.com/metaroce/metaroce/transport/core"
)

// Defaults of Config.
const (
	DefaultSpin      = 200 * time.Microsecond
	DefaultRetryTime = 2 * time.Second
)

// Config says what Open opens. Zero values take the defaults, but for DSCP.
type Config struct {
	Interfaces  []string      // one a plane, in plane order; at least one
	Port        uint16        // UDP destination port, host order
	Payload     int           // bytes a packet: 1024, 2048 or 3072; 0 = the largest that fits every plane
	DSCP        int           // 0 to 63, of every packet
	ChecksumOff bool          // offer peers to go without the UDP checksum
	Generic     bool          // generic XDP
	PreferIPv6  bool          // use a plane's IPv6 address though it has an IPv4 one
	PumpCPU     *int          // where the pump runs; nil: chosen by the interfaces' queues
	Spin        time.Duration // without a packet, before the pump sleeps
	RetryTime   time.Duration // without progress, before a connection fails
	Keepalive   time.Duration // without a word, before an idle peer is asked; 0: core's default
	MaxConns    int           // connection slots, rounded up to a power of two
	PathPool    int           // paths of all connections together
	MaxRegions  int           // memory regions, one less than that
	Logger      *slog.Logger

	watchBytes int // receive buffer of each netlink subscription; 0: watchBytes
}

func (c *Config) complete() error {
	c.Spin = cmp.Or(c.Spin, DefaultSpin)
	c.RetryTime = cmp.Or(c.RetryTime, DefaultRetryTime)
	c.Logger = cmp.Or(c.Logger, slog.New(slog.DiscardHandler))
	switch {
	case c.DSCP < 0 || c.DSCP > 63:
		return fmt.Errorf("DSCP is %d, want 0 to 63", c.DSCP)
	case c.Spin < 0:
		return fmt.Errorf("spin time is %v, want 0 or more", c.Spin)
	case c.RetryTime < 0:
		return fmt.Errorf("retry time is %v, want more than 0", c.RetryTime)
	}
	return nil
}

// plane is one interface and the address that the engine uses on it.
type plane struct {
	name string
	addr netip.Addr
	mtu  int
	up   atomic.Bool

	// Change when the interface returns; under the router's lock.
	ifindex int    // whose addresses, routes and neighbours count
	out     egress // how packets leave
	ring    uint8  // of the interface that they leave by, in map mr_egress
	mac     net.HardwareAddr

	// The router's worker's.
	lower string // interface that the programs are attached to
	gone  bool   // there is none of that name, or one that is not in use yet
	retry retry
}

// Engine is an open device. Its methods may be called from any goroutine.
type Engine struct {
	cfg     Config
	log     *slog.Logger
	reg     *loader.Objects
	ns      netns.NsHandle
	clk     clock
	planes  []*plane
	payload int

	pumpWords *loader.Pump
	pathWords []loader.Path   // map mr_path
	rings     []loader.Egress // transmit rings, mapped; by plane.ring
	mapped    [][]byte
	bell      bell
	pump      *pump
	router    *router
	events    *ringbuf.Reader

	slots   *indexes
	regions *indexes
	pool    *ranges

	conns []atomic.Pointer[Conn] // by slot, while started

	mu        sync.Mutex
	open      map[*Conn]struct{} // every one that NewConn made
	regionSet map[*Region]struct{}
	broken    error // why the engine works no more

	fence   *ebpf.Map      // see waitForReaders
	fencing sync.WaitGroup // connections that wait for readers

	poke chan struct{}
	stop chan struct{}
	wg   sync.WaitGroup
	once sync.Once
	err  error
}

// Open loads the programs and starts the pump in the calling thread's network namespace. Errors
// are loader.Load's, and those that name an interface's missing address or too small MTU.
func Open(ctx context.Context, cfg Config) (_ *Engine, err error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	e := &Engine{
		cfg: cfg, log: cfg.Logger, ns: -1,
		open: map[*Conn]struct{}{}, regionSet: map[*Region]struct{}{},
		poke: make(chan struct{}, 1), stop: make(chan struct{}),
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.Close())
		}
	}()
	if e.ns, err = netns.Get(); err != nil {
		return nil, fmt.Errorf("open the calling thread's network namespace: %w", err)
	}
	if e.clk, err = newClock(); err != nil {
		return nil, err
	}
	// First of all that needs rights, because it says which are missing.
	e.reg, err = loader.Load(ctx, loader.Options{
		Interfaces: cfg.Interfaces, Port: cfg.Port, MaxConns: cfg.MaxConns, PathPool: cfg.PathPool,
		MaxRegions: cfg.MaxRegions, Generic: cfg.Generic, Logger: e.log,
	})
	if err != nil {
		return nil, err
	}
	if e.router, err = newRouter(e); err != nil {
		return nil, err
	}
	if err = e.findPlanes(); err != nil {
		return nil, err
	}
	firstGen := uint32(1) // QPNs 0 and 1 are reserved (InfiniBand: subnet management, general services)
	if e.reg.MaxConns == 1 {
		firstGen = 2
	}
	e.slots = newIndexes("connection slots", 0, e.reg.MaxConns, uint32(1<<24/e.reg.MaxConns-1), firstGen)
	e.regions = newIndexes("memory regions", 1, e.reg.MaxRegions, 0xff, 0) // index 0: no key is ever 0
	e.pool = &ranges{used: make([]bool, e.reg.PathPool)}
	e.conns = make([]atomic.Pointer[Conn], e.reg.MaxConns)
	if err = e.mapRegisters(); err != nil {
		return nil, err
	}
	if e.fence, err = e.reg.NewRegionMap(1); err != nil {
		return nil, err
	}
	for _, p := range e.planes {
		if err = e.router.forgetNeighbours(p); err != nil {
			return nil, err
		}
	}
	if e.pump, err = newPump(e.reg.Tx, e.reg.Wake, e.pumpWords, e.payload, cfg.Spin, e.clk, e.log); err != nil {
		return nil, err
	}
	if err = e.choosePumpCPUs(ctx); err != nil {
		return nil, err
	}
	e.bell = bell{words: e.pumpWords, wake: e.pump.wake}
	e.pump.woken = e.nudge
	e.pump.failed = e.fail
	e.pump.patience = cfg.RetryTime
	if e.events, err = ringbuf.NewReader(e.reg.Event); err != nil {
		return nil, fmt.Errorf("read ring buffer %v: %w", e.reg.Event, err)
	}
	if err = e.pump.start(e.ns); err != nil {
		return nil, err
	}
	e.router.watch() // may move the pump
	e.wg.Go(e.controlLoop)
	e.wg.Go(e.eventLoop)
	return e, nil
}

func (e *Engine) mapRegisters() error {
	words, mem, err := mapOne[loader.Pump](e.reg.Pump)
	if err != nil {
		return err
	}
	e.pumpWords, e.mapped = words, append(e.mapped, mem)
	first, mem, err := mapOne[loader.Path](e.reg.Path)
	if err != nil {
		return err
	}
	e.pathWords, e.mapped = unsafe.Slice(first, e.reg.PathPool), append(e.mapped, mem)
	ring, mem, err := mapOne[loader.Egress](e.reg.EgressMap)
	if err != nil {
		return err
	}
	e.rings, e.mapped = unsafe.Slice(ring, e.reg.EgressMap.MaxEntries()), append(e.mapped, mem)
	return nil
}

// ringDrops is how many frames transmit ring i has dropped, modulo 2^32.
func (e *Engine) ringDrops(i uint8) uint32 {
	if int(i) >= len(e.rings) {
		return 0
	}
	return uint32(atomic.LoadUint64(&e.rings[i].TxLocalDrop))
}

// findPlanes reads each interface's address and MTU and settles the payload.
func (e *Engine) findPlanes() error {
	e.payload = core.Payloads[0]
	for i, name := range e.cfg.Interfaces {
		itf := e.reg.Interfaces[i]
		link, err := e.router.nl.LinkByName(name)
		if err != nil {
			return fmt.Errorf("interface %s: %w", name, err)
		}
		a := link.Attrs()
		p := &plane{
			name: name, ifindex: itf.Index, out: egressOf(itf, e.cfg.DSCP), lower: lowerName(itf),
			mac: a.HardwareAddr, mtu: min(a.MTU, itf.MTU),
		}
		p.ring = uint8(e.reg.Egress(p.out.ifindex))
		p.up.Store(carrier(a))
		if len(p.mac) != 6 {
			return fmt.Errorf("interface %s: link address %q, want an Ethernet address", name, p.mac)
		}
		if p.addr, err = e.planeAddr(link); err != nil {
			return err
		}
		fits := fitPayload(p.addr, p.mtu)
		if fits == 0 {
			least := core.Payloads[len(core.Payloads)-1] + headerLen(p.addr)
			return fmt.Errorf("interface %s: MTU is %d, want at least %d", name, p.mtu, least)
		}
		e.payload = min(e.payload, fits)
		e.planes = append(e.planes, p)
	}
	if want := e.cfg.Payload; want != 0 {
		if want > e.payload {
			return fmt.Errorf("payload is %d bytes, want at most %d, which is what the interfaces' MTU takes", want, e.payload)
		}
		if fitPayload(netip.Addr{}, want+headerLen(netip.Addr{})) != want {
			return fmt.Errorf("payload is %d bytes, want one of %v", want, core.Payloads)
		}
		e.payload = want
	}
	return nil
}

// fitPayload is the largest payload whose packets an MTU takes, 0 if none.
func fitPayload(a netip.Addr, mtu int) int {
	for _, p := range core.Payloads {
		if p+headerLen(a) <= mtu {
			return p
		}
	}
	return 0
}

// planeAddr is an interface's first global IPv4 address, else its first global IPv6 one; the
// other way round if IPv6 is preferred.
func (e *Engine) planeAddr(link netlink.Link) (netip.Addr, error) {
	families := []int{netlink.FAMILY_V4, netlink.FAMILY_V6}
	if e.cfg.PreferIPv6 {
		families[0], families[1] = families[1], families[0]
	}
	name := link.Attrs().Name
	for _, family := range families {
		addrs, err := e.router.nl.AddrList(link, family)
		if err != nil {
			return netip.Addr{}, fmt.Errorf("interface %s: list addresses: %w", name, err)
		}
		for _, a := range addrs {
			ip, ok := netip.AddrFromSlice(a.IP)
			if ok && a.Scope == int(netlink.SCOPE_UNIVERSE) && a.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) == 0 {
				return ip.Unmap(), nil
			}
		}
	}
	return netip.Addr{}, fmt.Errorf("interface %s: no global address, want an IPv4 or IPv6 one", name)
}

// Planes lists the interfaces' addresses and MTUs (bytes of IP packet) in plane order.
func (e *Engine) Planes() []core.PlaneAddr {
	out := make([]core.PlaneAddr, len(e.planes))
	for i, p := range e.planes {
		out[i] = core.PlaneAddr{Addr: p.addr, MTU: p.mtu}
	}
	return out
}

// MaxPayload is the largest payload that every plane's MTU takes, or the configured one, in bytes.
func (e *Engine) MaxPayload() int { return e.payload }

// waitForReaders returns when every run of a program that began before has ended: the kernel waits
// for that at each change of a map of maps. Region index 0 is never handed out, so its entry serves.
func (e *Engine) waitForReaders() error {
	var unused uint32
	if err := e.reg.Mem.Put(&unused, e.fence); err != nil {
		return fmt.Errorf("wait for packets that are being placed: %w", err)
	}
	return nil
}

// nudge makes the control loop look at once.
func (e *Engine) nudge() {
	select {
	case e.poke <- struct{}{}:
	default:
	}
}

// fail ends all connections: the engine can send nothing any more.
func (e *Engine) fail(err error) {
	e.log.Error("engine failed", "error", err)
	e.mu.Lock()
	e.broken = err
	open := make([]*Conn, 0, len(e.open))
	for c := range e.open {
		open = append(open, c)
	}
	e.mu.Unlock()
	for _, c := range open {
		c.Fail(err)
	}
}

// eventLoop hands records of mr_event to the connections that they are for.
func (e *Engine) eventLoop() {
	var rec ringbuf.Record
	for {
		err := e.events.ReadInto(&rec)
		if errors.Is(err, ringbuf.ErrClosed) {
			return
		}
		if err != nil {
			e.fail(fmt.Errorf("read ring buffer mr_event: %w", err))
			return
		}
		if len(rec.RawSample) < int(unsafe.Sizeof(loader.Event{})) {
			continue
		}
		ev := *(*loader.Event)(unsafe.Pointer(&rec.RawSample[0]))
		if ev.Slot >= uint32(len(e.conns)) {
			continue
		}
		if c := e.conns[ev.Slot].Load(); c != nil && c.qpn == ev.Qpn {
			c.notify()
		}
	}
}

// Close ends every connection, frees every region, stops the pump and takes the programs out of
// the kernel. It takes one run of the pump, some milliseconds.
func (e *Engine) Close() error {
	e.once.Do(func() { e.err = e.close() })
	return e.err
}

func (e *Engine) close() error {
	var errs []error
	e.mu.Lock()
	if e.broken == nil {
		e.broken = errClosed
	}
	var conns []*Conn
	for c := range e.open {
		conns = append(conns, c)
	}
	e.mu.Unlock()
	for _, c := range conns {
		c.Fail(errClosed)
		errs = append(errs, c.Close())
	}
	e.fencing.Wait()
	if e.fence != nil {
		errs = append(errs, e.fence.Close())
	}
	close(e.stop)
	if e.router != nil {
		e.router.close()
	}
	if e.events != nil {
		errs = append(errs, e.events.Close())
	}
	e.wg.Wait()
	if e.pump != nil {
		errs = append(errs, e.pump.close())
	}
	e.mu.Lock()
	var regions []*Region
	for r := range e.regionSet {
		regions = append(regions, r)
	}
	e.mu.Unlock()
	for _, r := range regions {
		errs = append(errs, r.Close())
	}
	if e.reg != nil {
		errs = append(errs, e.reg.Close())
	}
	for _, m := range e.mapped {
		errs = append(errs, loader.Munmap(m))
	}
	if e.ns != -1 {
		errs = append(errs, e.ns.Close())
	}
	return errors.Join(errs...)
}

// never is a time that does not come.
const never = math.MaxInt64

var errClosed = errors.New("device closed")
