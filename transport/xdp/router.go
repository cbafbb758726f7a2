// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/loader"
	"github.com/metaroce/metaroce/transport/core"
)

const (
	// resolveTime bounds the wait for neighbours when the caller's context does not; the kernel
	// asks three times, a second apart.
	resolveTime = 5 * time.Second
	// straggleTime is how long others may take once one way is known.
	straggleTime = time.Second
)

// usable are the neighbour states whose link address may be used.
const usable = unix.NUD_REACHABLE | unix.NUD_STALE | unix.NUD_DELAY | unix.NUD_PROBE | unix.NUD_PERMANENT | unix.NUD_NOARP

// router knows the link address behind each path, and follows what netlink says about it. The readers
// of netlink (watch.go) put what may have changed into a set (dirty.go). One worker (follow.go) looks at
// it, and is the only one that asks the kernel. See docs/adr/0005-how-the-way-to-a-peer-is-followed.md.
type router struct {
	e          *Engine
	nl         *netlink.Handle // the worker's, once it runs
	log        *slog.Logger
	done       chan struct{}
	wg         sync.WaitGroup
	once       sync.Once
	dirty      *dirty
	subs       []*subscription
	watchBytes int           // receive buffer of each subscription
	lost       atomic.Uint64 // gaps in the subscriptions
	looks      atomic.Uint64 // at routes and neighbours
	reattach   func(ctx context.Context, name string, fits func([]loader.Interface, int) error) (loader.Interface, error)

	neighbours neighbours // the worker's, once it runs
	untold     []user     // paths whose connections have not been told yet that wayUp changed; the worker's

	// mu is held for work in memory only, because every start and close of a connection takes it. Locks are
	// taken in this order: Conn.tickMu, Conn.mu, router.mu, dirty.mu.
	mu      sync.Mutex
	hops    map[hopKey]*hop
	ends    map[netip.Addr]map[*hop]struct{} // by both addresses of each
	neighs  map[neighKey]*neighbour
	changed chan struct{} // closed, and made anew, when something was learnt
}

// hopKey is what decides where a path's packets go next.
type hopKey struct {
	plane         *plane
	local, remote netip.Addr
}

// ends are the addresses whose routes count: the kernel sends nothing from an address that it does not
// have, and says so by a route to it.
func (k hopKey) ends() [2]netip.Addr { return [2]netip.Addr{k.local, k.remote} }

// hop is the next hop of all paths with the same key, as the router last heard.
type hop struct {
	hopKey
	refs    int
	gateway netip.Addr       // whose link address counts: the peer's, or a router's
	mac     net.HardwareAddr // the last good one; nil while unknown
	state   int              // NUD_*
	via     *neighbour       // the gateway's
	seen    bool             // the worker has looked since somebody began to wait
	err     error            // why there is no route
	users   map[user]struct{}

	doubtNs atomic.Int64 // when the neighbour was last doubted, since the router's start
}

// neighbour is one that hops lead to.
type neighbour struct {
	neighKey
	hops  map[*hop]struct{}
	ours  bool      // the kernel manages it for us
	want  bool      // somebody waits: it is to be asked for, also if the kernel has given up
	asked time.Time // when it was last asked anew
}

// user is a path of a connection.
type user struct {
	c    *Conn
	path int
}

// up says whether packets can leave. That the kernel calls a neighbour FAILED is no reason against it: the
// last good link address may be right, and the probes that go there say whether it is.
func (h *hop) up() bool { return h.mac != nil && h.err == nil && h.plane.up.Load() }

// newRouter subscribes: whatever is read from now on is no older than what will be heard.
func newRouter(e *Engine) (_ *router, err error) {
	r := &router{
		e: e, log: e.log, done: make(chan struct{}), dirty: newDirty(), subs: subscriptions(), watchBytes: e.cfg.watchBytes,
		hops: map[hopKey]*hop{}, ends: map[netip.Addr]map[*hop]struct{}{}, neighs: map[neighKey]*neighbour{},
		changed: make(chan struct{}),
	}
	if r.watchBytes == 0 {
		r.watchBytes = watchBytes
	}
	if e.reg != nil {
		r.reattach = e.reg.Reattach
	}
	defer func() {
		if err != nil {
			r.close()
		}
	}()
	if err = r.subscribe(); err != nil {
		return nil, err
	}
	if r.nl, err = netlink.NewHandleAt(e.ns, unix.NETLINK_ROUTE); err != nil {
		return nil, fmt.Errorf("open netlink in the device's network namespace: %w", err)
	}
	socket, err := nl.GetNetlinkSocketAt(e.ns, netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink in the device's network namespace: %w", err)
	}
	r.neighbours.sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: socket}}
	timeout := unix.NsecToTimeval(int64(requestTime))
	if err = errors.Join(r.nl.SetSocketTimeout(requestTime), socket.SetReceiveTimeout(&timeout)); err != nil {
		return nil, fmt.Errorf("bound netlink requests: %w", err)
	}
	return r, nil
}

// take finds the way of each path and waits for the neighbours. Every take needs a give.
func (r *router) take(ctx context.Context, paths []core.PathParams) ([]*hop, error) {
	ctx, cancel := context.WithTimeout(ctx, resolveTime)
	defer cancel()
	hops := make([]*hop, len(paths))
	r.mu.Lock()
	for i, p := range paths {
		key := hopKey{r.e.planes[p.Plane], p.Local.Unmap(), p.Remote.Unmap()}
		h := r.hops[key]
		if h == nil {
			h = r.newHop(key)
		}
		h.refs++
		hops[i] = h
		if h.mac == nil {
			h.seen = false
			if h.via != nil {
				h.via.want = true
			}
			r.dirty.do(func() { r.dirty.hops[h] = struct{}{} })
		}
	}
	r.mu.Unlock()
	if err := r.resolve(ctx, hops); err != nil {
		r.give(hops)
		return nil, err
	}
	return hops, nil
}

// newHop adds a hop. The router's lock is held.
func (r *router) newHop(key hopKey) *hop {
	h := &hop{hopKey: key, users: map[user]struct{}{}}
	r.hops[key] = h
	for _, a := range key.ends() {
		if r.ends[a] == nil {
			r.ends[a] = map[*hop]struct{}{}
		}
		r.ends[a][h] = struct{}{}
		r.dirty.addEnd(a, 1)
	}
	return h
}

// give ends the use of hops. The kernel no more keeps a neighbour alive that nobody uses.
func (r *router) give(hops []*hop) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, h := range hops {
		if h.refs--; h.refs > 0 {
			continue
		}
		delete(r.hops, h.hopKey)
		for _, a := range h.ends() {
			if delete(r.ends[a], h); len(r.ends[a]) == 0 {
				delete(r.ends, a)
			}
			r.dirty.addEnd(a, -1)
		}
		r.leave(h)
	}
}

// leave ends a hop's use of its neighbour. The router's lock is held.
func (r *router) leave(h *hop) {
	n := h.via
	if n == nil {
		return
	}
	h.via = nil
	if delete(n.hops, h); len(n.hops) > 0 {
		return
	}
	delete(r.neighs, n.neighKey)
	r.dirty.unwatch(n.neighKey)
	if n.ours {
		r.dirty.do(func() { r.dirty.freed[n.neighKey] = struct{}{} })
	}
}

// reach has a hop lead to a gateway. The router's lock is held.
func (r *router) reach(h *hop, gateway netip.Addr) *neighbour {
	h.gateway = gateway
	k := neighKey{h.plane, gateway}
	if h.via != nil && h.via.neighKey == k {
		return h.via
	}
	r.leave(h)
	n := r.neighs[k]
	if n == nil {
		n = &neighbour{neighKey: k, hops: map[*hop]struct{}{}, want: true}
		r.neighs[k] = n
		r.dirty.watch(k)
	}
	n.want = n.want || h.mac == nil
	n.hops[h] = struct{}{}
	h.via = n
	return n
}

// resolve waits until the link addresses of all hops are known, or of one and a while has passed.
func (r *router) resolve(ctx context.Context, hops []*hop) error {
	var straggle <-chan time.Time
	late := false
	for {
		r.mu.Lock()
		known, all, err := r.known(hops)
		changed := r.changed
		r.mu.Unlock()
		if known > 0 && (all || late) {
			if err != nil {
				r.log.Warn("path begins as down", "error", err)
			}
			return nil
		}
		if known == 0 && all {
			return err
		}
		if known > 0 && straggle == nil {
			straggle = time.After(straggleTime)
		}
		select {
		case <-ctx.Done():
			if known > 0 {
				return nil
			}
			return fmt.Errorf("%w (%w)", err, ctx.Err())
		case <-straggle:
			late = true
		case <-changed:
		}
	}
}

// known says of how many hops the link address is known, whether no other's is to be waited for, and
// what is wrong with the first such one. The router's lock is held.
func (r *router) known(hops []*hop) (known int, all bool, err error) {
	all = true
	for i, h := range hops {
		if h.mac != nil {
			known++
			continue
		}
		// Without carrier or route there is nothing to wait for, nor when the kernel has given up.
		if h.plane.up.Load() && (!h.seen || h.err == nil && h.state&unix.NUD_FAILED == 0) {
			all = false
		}
		if err == nil {
			err = h.err
		}
		if err == nil {
			err = fmt.Errorf("path %d from %v on %s to %v: neighbour %v is %s, want its link address",
				i, h.local, h.plane.name, h.remote, h.gateway, stateName(h))
		}
	}
	return known, all, err
}

// learnt wakes those who wait for a hop. The router's lock is held.
func (r *router) learnt() {
	close(r.changed)
	r.changed = make(chan struct{})
}

// stateName is a hop's neighbour state in iproute2's words.
func stateName(h *hop) string {
	if !h.plane.up.Load() {
		return "behind an interface without carrier"
	}
	for _, n := range []struct {
		bit  int
		name string
	}{
		{unix.NUD_INCOMPLETE, "INCOMPLETE"},
		{unix.NUD_REACHABLE, "REACHABLE"},
		{unix.NUD_STALE, "STALE"},
		{unix.NUD_DELAY, "DELAY"},
		{unix.NUD_PROBE, "PROBE"},
		{unix.NUD_FAILED, "FAILED"},
		{unix.NUD_NOARP, "NOARP"},
		{unix.NUD_PERMANENT, "PERMANENT"},
	} {
		if h.state&n.bit != 0 {
			return n.name
		}
	}
	return "NONE"
}

// update rewrites the templates of a hop's paths, and notes those whose way has opened or closed: tell
// does the rest. The worker alone calls it, with the router's lock held.
func (r *router) update(h *hop) {
	for u := range h.users {
		w := &r.e.pathWords[u.c.base+u.path]
		if h.mac != nil {
			writeLinkAddrs(&w.Tmpl, h.mac, h.plane.mac)
		}
		atomic.StoreUint32(&w.Ifindex, uint32(h.plane.out.ifindex))
		bit := uint32(1) << u.path
		switch was := u.c.wayUp.Load()&bit != 0; {
		case h.up() && !was:
			u.c.wayUp.Or(bit)
			r.untold = append(r.untold, u)
		case !h.up() && was:
			u.c.wayUp.And(^bit)
			r.untold = append(r.untold, u)
		}
	}
}

// tell tells connections whose paths' ways have opened or closed. The worker calls it without any lock.
func (r *router) tell() {
	for _, u := range r.untold {
		r.mu.Lock()
		_, used := u.c.hops[u.path].users[u]
		r.mu.Unlock()
		if used { // else it is being closed, which takes a while
			u.c.wayChanged(u.path)
		}
	}
	clear(r.untold)
	r.untold = r.untold[:0]
}

// writeLinkAddrs replaces a template's link addresses while mr_tx copies it. The destination
// changes at one stroke; a packet with the old source address does no harm.
func writeLinkAddrs(tmpl *[64]uint8, dst, src net.HardwareAddr) {
	copy(tmpl[8:12], src[2:])
	var b [8]byte
	copy(b[:], dst)
	copy(b[6:], src)
	atomic.StoreUint64((*uint64)(unsafe.Pointer(&tmpl[0])), binary.NativeEndian.Uint64(b[:]))
}

// attach fills the templates of a connection's paths and keeps them up to date from now on. It
// returns the mask of paths that can send.
func (r *router) attach(c *Conn) (up uint32, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, h := range c.hops {
		mac := h.mac
		if mac == nil {
			mac = make(net.HardwareAddr, 6)
		}
		w := &r.e.pathWords[c.base+i]
		clear(w.Desc[:])
		if err := fillTemplate(w, h.plane.out, h.local, h.remote, h.plane.mac, mac, r.e.cfg.DSCP); err != nil {
			return 0, fmt.Errorf("path %d: %w", i, err)
		}
		if h.up() {
			up |= 1 << i
		}
	}
	for i, h := range c.hops {
		h.users[user{c, i}] = struct{}{}
	}
	c.wayUp.Store(up)
	return up, nil
}

// detach ends what attach began.
func (r *router) detach(c *Conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, h := range c.hops {
		delete(h.users, user{c, i})
	}
}

// carrier says whether an interface can send.
func carrier(a *netlink.LinkAttrs) bool {
	const want = unix.IFF_UP | unix.IFF_LOWER_UP
	return a.RawFlags&want == want
}

// close ends the subscriptions and lets the neighbours go.
func (r *router) close() {
	r.once.Do(func() {
		close(r.done)
		r.mu.Lock()
		for _, s := range r.subs {
			if s.file != nil {
				_ = s.file.Close()
			}
		}
		r.mu.Unlock()
		r.wg.Wait()
		if r.nl != nil {
			r.nl.Close()
		}
		for _, s := range r.neighbours.sockets {
			s.Close()
		}
	})
}
