// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/metaroce/metaroce/transport/core"
	"github.com/metaroce/metaroce/wire"
)

// Config says what Open makes. The zero value of every field but Interfaces
// means its default.
type Config struct {
	// Interfaces has one network interface a plane, in plane order.
	Interfaces []string
	// Port is the UDP destination port of data, default 4791.
	Port uint16
	// Paths is how many paths a connection has, 1 to 32, default 8. The peer may
	// ask for fewer.
	Paths int
	// Payload is the most bytes of payload a packet: 1024, 2048 or 3072. 0 is the
	// largest that the interfaces' MTU takes.
	Payload int
	// DSCP of every packet, 0 to 63; nil is 26.
	DSCP *uint8
	// ChecksumOff gives up UDP checksums where the peer does so too.
	ChecksumOff bool
	// Generic allows XDP in generic mode, for interfaces whose driver lacks it.
	Generic bool
	// PreferIPv6 uses an interface's IPv6 address even if it has an IPv4 one.
	PreferIPv6 bool
	// PumpCPU is the CPU on which the pump runs. nil leaves the choice to the
	// device: any CPU where interfaces have one transmit queue, else one of those
	// that all interfaces' drivers send from.
	PumpCPU *int
	// Spin is how long the pump looks for work before it sleeps, default 200 us;
	// negative is not at all.
	Spin time.Duration
	// RetryTime is how long a connection lives without hearing from its peer
	// while it waits for it, default 2 s.
	RetryTime time.Duration
	// Keepalive is how long an idle connection waits before it asks whether its
	// peer is still there, default 10 s. One that is gone is noticed within
	// Keepalive + RetryTime, give or take a probe.
	Keepalive time.Duration
	// MaxConns, PathPool and MaxRegions size the device's tables; defaults 256,
	// 2048 and 256.
	MaxConns, PathPool, MaxRegions int
	// Logger, default slog.Default.
	Logger *slog.Logger
}

// Defaults of Config.
const (
	defaultPaths      = 8
	defaultSpin       = 200 * time.Microsecond
	defaultRetryTime  = 2 * time.Second
	defaultKeepalive  = 10 * time.Second
	defaultMaxConns   = 256
	defaultPathPool   = 2048
	defaultMaxRegions = 256
)

// withDefaults fills in what is zero and refuses what cannot be.
func (c Config) withDefaults() (Config, error) {
	if len(c.Interfaces) == 0 || len(c.Interfaces) > core.MaxPlanes {
		return c, fmt.Errorf("%d interfaces, want 1 to %d, one a plane", len(c.Interfaces), core.MaxPlanes)
	}
	for i, name := range c.Interfaces {
		for _, other := range c.Interfaces[:i] {
			if name == other {
				return c, fmt.Errorf("interface %s is named twice, want one a plane", name)
			}
		}
	}
	c.Port = cmp.Or(c.Port, wire.UDPPort)
	c.Paths = cmp.Or(c.Paths, defaultPaths)
	if c.DSCP == nil {
		d := uint8(wire.DefaultDSCP)
		c.DSCP = &d
	}
	c.Spin = cmp.Or(c.Spin, defaultSpin)
	c.Spin = max(c.Spin, 1) // negative is not at all, and the engine takes 0 for its default
	c.RetryTime = cmp.Or(c.RetryTime, defaultRetryTime)
	c.Keepalive = cmp.Or(c.Keepalive, defaultKeepalive)
	c.MaxConns = cmp.Or(c.MaxConns, defaultMaxConns)
	c.PathPool = cmp.Or(c.PathPool, defaultPathPool)
	c.MaxRegions = cmp.Or(c.MaxRegions, defaultMaxRegions)
	c.Logger = cmp.Or(c.Logger, slog.Default())
	switch {
	case c.Paths < 1 || c.Paths > core.MaxPaths:
		return c, fmt.Errorf("paths %d, want 1 to %d", c.Paths, core.MaxPaths)
	case c.Payload != 0 && !slices.Contains(core.Payloads[:], c.Payload):
		return c, fmt.Errorf("payload %d, want one of %v, or 0 for the largest that fits", c.Payload, core.Payloads)
	case *c.DSCP > 63:
		return c, fmt.Errorf("DSCP %d, want 0 to 63", *c.DSCP)
	case c.RetryTime < 0:
		return c, fmt.Errorf("retry time %v, want a positive one", c.RetryTime)
	case c.Keepalive < 0:
		return c, fmt.Errorf("keepalive %v, want a positive time", c.Keepalive)
	case c.MaxConns < 0 || c.PathPool < 0 || c.MaxRegions < 0:
		return c, fmt.Errorf("table sizes %d, %d and %d, want positive ones", c.MaxConns, c.PathPool, c.MaxRegions)
	}
	return c, nil
}

// closeTime bounds what has no bound of its caller: an orderly close.
const closeTime = 5 * time.Second

// Device is a set of interfaces that moves data for this program.
type Device struct {
	cfg Config
	eng engine
	ns  netNS
	log *slog.Logger

	// ctx ends with Close; pending counts the calls under way that Close must wait for.
	ctx     context.Context
	cancel  context.CancelFunc
	pending sync.WaitGroup

	mu        sync.Mutex
	closed    bool
	conns     map[*Conn]struct{}
	listeners map[*Listener]struct{}
	mems      map[*Memory]struct{}
	pds       map[uint32]*PD
	lastPD    uint32

	limits setupLimits
}

// newDevice puts a device on an engine. It owns both from here on.
func newDevice(eng engine, ns netNS, cfg Config) *Device {
	ctx, cancel := context.WithCancel(context.Background())
	return &Device{
		cfg: cfg, eng: eng, ns: ns, log: cfg.Logger, ctx: ctx, cancel: cancel,
		conns:     make(map[*Conn]struct{}),
		listeners: make(map[*Listener]struct{}),
		mems:      make(map[*Memory]struct{}),
		pds:       make(map[uint32]*PD),
		limits:    defaultLimits,
	}
}

// begin counts one more thing that Close must wait for.
func (d *Device) begin() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return fmt.Errorf("device: %w", ErrClosed)
	}
	d.pending.Add(1)
	return nil
}

// bound gives a context for a set-up: it ends with ctx, with the device, and
// after setupTime.
func (d *Device) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancelTime := context.WithTimeout(ctx, setupTime)
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(d.ctx, func() { cancel(fmt.Errorf("device: %w", ErrClosed)) })
	return ctx, func() {
		stop()
		cancel(nil)
		cancelTime()
	}
}

// endpoint is what this device tells a peer about connection ec.
func (d *Device) endpoint(ec engineConn) core.Endpoint {
	return core.Endpoint{
		QPN: ec.QPN(), Token: ec.Token(), InitialPSN: ec.InitialPSN(),
		Payload: d.eng.MaxPayload(), Paths: d.cfg.Paths, Checksum: !d.cfg.ChecksumOff,
		Planes: d.eng.Planes(),
	}
}

// Close closes the listeners, then the connections in order within 5 s, the
// memory, whose Bytes must not be used any more, and the interfaces. Requests
// that are still outstanding are flushed. A second Close returns nil.
func (d *Device) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil
	}
	d.closed = true
	d.mu.Unlock()
	// From here on nothing new begins; what is under way ends soon.
	d.cancel()
	d.pending.Wait()

	d.mu.Lock()
	var listeners []*Listener
	for l := range d.listeners {
		listeners = append(listeners, l)
	}
	var conns []*Conn
	for c := range d.conns {
		conns = append(conns, c)
	}
	mems := d.mems
	d.mems = nil
	d.mu.Unlock()
	var errs []error
	for _, l := range listeners {
		errs = append(errs, l.Close())
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeTime)
	defer cancel()
	closed := make(chan error, len(conns))
	for _, c := range conns {
		go func() { closed <- c.Close(ctx) }()
	}
	for range conns {
		// That a peer has gone in the meantime is its connection's error, not ours.
		var failed *PeerFailedError
		if err := <-closed; err != nil && !errors.Is(err, ErrPeerDied) && !errors.As(err, &failed) {
			errs = append(errs, err)
		}
	}
	for m := range mems {
		errs = append(errs, m.release())
	}
	errs = append(errs, d.eng.Close())
	d.ns.close()
	return errors.Join(errs...)
}

// DeviceStatus is a device at one moment.
type DeviceStatus struct {
	Planes  []core.PlaneAddr
	Payload int // bytes, the most that this end takes
	Conns   []ConnInfo
	Memory  uint64 // bytes in memory regions
	Regions int
}

// Status says what the device has. It is for an open device.
func (d *Device) Status() DeviceStatus {
	s := DeviceStatus{Planes: d.eng.Planes(), Payload: d.eng.MaxPayload()}
	d.mu.Lock()
	defer d.mu.Unlock()
	for c := range d.conns {
		s.Conns = append(s.Conns, c.Info())
	}
	for m := range d.mems {
		s.Memory += m.size
		s.Regions++
	}
	return s
}
