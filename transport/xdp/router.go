// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/transport/core"
)

const (
	// resolveTime bounds the wait for neighbours when the caller's context does not; the kernel
	// asks three times, a second apart.
	resolveTime = 5 * time.Second
	// straggleTime is how long others may take once one way is known.
	straggleTime = time.Second
	// settleTime is how long route changes are collected before they are followed.
	settleTime = 20 * time.Millisecond
	// rewatchTime is the wait before a broken subscription is renewed.
	rewatchTime = time.Second
	// watchBuffer is the receive buffer of a subscription, bytes.
	watchBuffer = 1 << 20
)

// usable are the neighbour states whose link address may be used.
const usable = unix.NUD_REACHABLE | unix.NUD_STALE | unix.NUD_DELAY | unix.NUD_PROBE | unix.NUD_PERMANENT | unix.NUD_NOARP

// router knows the link address behind each path, and follows what netlink says about it.
type router struct {
	e    *Engine
	nl   *netlink.Handle
	log  *slog.Logger
	done chan struct{}
	wg   sync.WaitGroup
	once sync.Once

	neighbours neighbours

	// ask is held while a neighbour is looked at and asked for, or let go. Taken before mu.
	ask sync.Mutex

	mu   sync.Mutex
	hops map[hopKey]*hop
}

// hopKey is what decides where a path's packets go next.
type hopKey struct {
	plane         *plane
	local, remote netip.Addr
}

// hop is the next hop of all paths with the same key, as the router last heard.
type hop struct {
	hopKey
	refs    int
	gateway netip.Addr       // whose link address counts: the peer's, or a router's
	mac     net.HardwareAddr // nil while unknown
	state   int              // NUD_*
	asked   bool             // the kernel was told to resolve the gateway
	users   map[user]struct{}
}

// user is a path of a connection.
type user struct {
	c    *Conn
	path int
}

// up says whether packets can leave.
func (h *hop) up() bool { return h.mac != nil && h.plane.up.Load() }

func newRouter(e *Engine) (*router, error) {
	handle, err := netlink.NewHandleAt(e.ns, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink in the device's network namespace: %w", err)
	}
	socket, err := nl.GetNetlinkSocketAt(e.ns, netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		handle.Close()
		return nil, fmt.Errorf("open netlink in the device's network namespace: %w", err)
	}
	return &router{
		e: e, nl: handle, log: e.log, done: make(chan struct{}), hops: map[hopKey]*hop{},
		neighbours: neighbours{sockets: map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: socket}}},
	}, nil
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
			h = &hop{hopKey: key, users: map[user]struct{}{}}
			r.hops[key] = h
		}
		h.refs++
		hops[i] = h
	}
	r.mu.Unlock()
	if err := r.resolve(ctx, hops); err != nil {
		r.give(hops)
		return nil, err
	}
	return hops, nil
}

// give ends the use of hops. The kernel no more keeps a neighbour alive that nobody uses.
func (r *router) give(hops []*hop) {
	r.ask.Lock()
	defer r.ask.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, h := range hops {
		if h.refs--; h.refs > 0 {
			continue
		}
		delete(r.hops, h.hopKey)
		// Asking for a permanent neighbour would make it one that must be resolved.
		fixed := h.state&(unix.NUD_PERMANENT|unix.NUD_NOARP) != 0
		if h.gateway.IsValid() && !fixed && !r.neighbourUsed(h.plane.ifindex, h.gateway) {
			if err := r.neighbours.manage(h.plane.ifindex, h.gateway, false); err != nil {
				r.log.Warn("neighbour stays managed", "interface", h.plane.name, "neighbour", h.gateway, "error", err)
			}
		}
	}
}

func (r *router) neighbourUsed(ifindex int, a netip.Addr) bool {
	for _, h := range r.hops {
		if h.plane.ifindex == ifindex && h.gateway == a {
			return true
		}
	}
	return false
}

// resolve waits until the link addresses of all hops are known, or of one and a while has passed.
func (r *router) resolve(ctx context.Context, hops []*hop) error {
	var straggle time.Time
	wait := time.Millisecond
	for {
		known, all := 0, true
		var err error
		for i, h := range hops {
			if slices.Index(hops, h) < i { // paths share hops
				continue
			}
			herr := r.refresh(h)
			r.mu.Lock()
			switch {
			case h.mac != nil:
				known++
			default:
				// Without carrier or route there is nothing to wait for, nor when the kernel
				// has given up.
				if h.plane.up.Load() && herr == nil && h.state&unix.NUD_FAILED == 0 {
					all = false
				}
				if err == nil {
					err = cmpErr(herr, fmt.Errorf("path %d from %v on %s to %v: neighbour %v is %s, want its link address",
						i, h.local, h.plane.name, h.remote, h.gateway, stateName(h)))
				}
			}
			r.mu.Unlock()
		}
		if known > 0 && straggle.IsZero() {
			straggle = time.Now().Add(straggleTime)
		}
		if known > 0 && (all || time.Now().After(straggle)) {
			if err != nil {
				r.log.Warn("path begins as down", "error", err)
			}
			return nil
		}
		if known == 0 && all {
			return err
		}
		select {
		case <-ctx.Done():
			if known > 0 {
				return nil
			}
			return fmt.Errorf("%w (%w)", err, ctx.Err())
		case <-time.After(wait):
			wait = min(2*wait, 20*time.Millisecond)
		}
	}
}

func cmpErr(a, b error) error {
	if a != nil {
		return a
	}
	return b
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

// refresh looks up a hop's route and neighbour, asks the kernel to resolve the latter if it is
// not known, and to keep it alive: packets that XDP sends and receives tell it nothing.
func (r *router) refresh(h *hop) error {
	r.ask.Lock()
	defer r.ask.Unlock()
	what := fmt.Sprintf("path from %v on %s to %v", h.local, h.plane.name, h.remote)
	gateway, err := r.nextHop(h)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	r.mu.Lock()
	if h.gateway != gateway {
		h.gateway, h.asked = gateway, false
	}
	asked := h.asked
	h.asked = true
	r.mu.Unlock()
	family := netlink.FAMILY_V4
	if gateway.Is6() {
		family = netlink.FAMILY_V6
	}
	list, err := r.nl.NeighList(h.plane.ifindex, family)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return fmt.Errorf("%s: list neighbours: %w", what, err)
	}
	var found netlink.Neigh
	for _, n := range list {
		if a, ok := netip.AddrFromSlice(n.IP); ok && a.Unmap() == gateway {
			found = n
		}
	}
	if found.State&(unix.NUD_PERMANENT|unix.NUD_NOARP) == 0 && (!asked || found.FlagsExt&netlink.NTF_EXT_MANAGED == 0) {
		if err := r.neighbours.manage(h.plane.ifindex, gateway, true); err != nil {
			return fmt.Errorf("%s: have neighbour %v resolved: %w", what, gateway, err)
		}
		if found.State&unix.NUD_FAILED != 0 {
			found.State = unix.NUD_INCOMPLETE // anew
		}
	}
	r.learn(h, &found)
	return nil
}

// nextHop is whose link address packets to the remote end carry.
func (r *router) nextHop(h *hop) (netip.Addr, error) {
	routes, err := r.nl.RouteGetWithOptions(h.remote.AsSlice(), &netlink.RouteGetOptions{
		OifIndex: h.plane.ifindex, SrcAddr: h.local.AsSlice(),
	})
	if err != nil {
		return netip.Addr{}, fmt.Errorf("no route: %w", err)
	}
	if len(routes) == 0 || routes[0].LinkIndex != h.plane.ifindex {
		return netip.Addr{}, fmt.Errorf("the route does not leave by interface %s: %v", h.plane.name, routes)
	}
	gw := routes[0].Gw
	if via, ok := routes[0].Via.(*netlink.Via); ok && via != nil {
		gw = via.Addr
	}
	if a, ok := netip.AddrFromSlice(gw); ok && !a.IsUnspecified() {
		return a.Unmap(), nil
	}
	return h.remote, nil
}

// learn takes what the neighbour table says about a hop.
func (r *router) learn(h *hop, n *netlink.Neigh) {
	r.mu.Lock()
	defer r.mu.Unlock()
	h.state = n.State
	if n.State&usable == 0 || len(n.HardwareAddr) != 6 || bytes.Equal(h.mac, n.HardwareAddr) {
		return
	}
	if h.mac != nil {
		r.log.Info("link address of a neighbour changed", "interface", h.plane.name, "neighbour", h.gateway, "from", h.mac.String(), "to", n.HardwareAddr.String())
	}
	h.mac = slices.Clone(n.HardwareAddr)
	r.update(h)
}

// update rewrites the templates of a hop's paths and tells the connections whether the way is
// open. The router's lock is held.
func (r *router) update(h *hop) {
	for u := range h.users {
		if h.mac != nil {
			writeLinkAddrs(&r.e.pathWords[u.c.base+u.path].Tmpl, h.mac, h.plane.mac)
		}
		bit := uint32(1) << u.path
		switch was := u.c.wayUp.Load()&bit != 0; {
		case h.up() && !was:
			u.c.wayUp.Or(bit)
			u.c.setPathState(u.path, core.PathSuspect) // until a probe comes back
		case !h.up() && was:
			u.c.wayUp.And(^bit)
			u.c.setPathState(u.path, core.PathDown)
		}
	}
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

// watch follows neighbours, routes and links until close.
func (r *router) watch() error {
	neigh, route, link, err := r.subscribe()
	if err != nil {
		return err
	}
	r.wg.Go(func() {
		for {
			r.follow(neigh, route, link)
			for {
				select {
				case <-r.done:
					return
				case <-time.After(rewatchTime):
				}
				if neigh, route, link, err = r.subscribe(); err == nil {
					break
				}
				r.log.Warn("netlink", "error", err)
			}
			r.lookAtAll()
		}
	})
	return nil
}

func (r *router) subscribe() (chan netlink.NeighUpdate, chan netlink.RouteUpdate, chan netlink.LinkUpdate, error) {
	neigh, route, link := make(chan netlink.NeighUpdate, 16), make(chan netlink.RouteUpdate, 16), make(chan netlink.LinkUpdate, 16)
	onError := func(err error) {
		select {
		case <-r.done:
		default:
			r.log.Warn("netlink subscription", "error", err)
		}
	}
	err := errors.Join(
		netlink.NeighSubscribeWithOptions(neigh, r.done, netlink.NeighSubscribeOptions{
			Namespace: &r.e.ns, ErrorCallback: onError, ReceiveBufferSize: watchBuffer,
		}),
		netlink.RouteSubscribeWithOptions(route, r.done, netlink.RouteSubscribeOptions{
			Namespace: &r.e.ns, ErrorCallback: onError, ReceiveBufferSize: watchBuffer,
		}),
		netlink.LinkSubscribeWithOptions(link, r.done, netlink.LinkSubscribeOptions{
			Namespace: &r.e.ns, ErrorCallback: onError, ReceiveBufferSize: watchBuffer,
		}),
	)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("subscribe to neighbours, routes and links: %w", err)
	}
	return neigh, route, link, nil
}

// follow takes updates until one of the subscriptions ends.
func (r *router) follow(neigh chan netlink.NeighUpdate, route chan netlink.RouteUpdate, link chan netlink.LinkUpdate) {
	// Each subscription ends by itself once r.done is closed, if somebody takes its last updates.
	defer func() {
		go drain(neigh)
		go drain(route)
		go drain(link)
	}()
	var settle <-chan time.Time
	for {
		select {
		case <-r.done:
			return
		case u, ok := <-neigh:
			if !ok {
				return
			}
			if u.Type == unix.RTM_NEWNEIGH {
				r.neighbourChanged(&u.Neigh)
			}
		case _, ok := <-route:
			if !ok {
				return
			}
			if settle == nil {
				settle = time.After(settleTime)
			}
		case <-settle:
			settle = nil
			r.lookAtAll()
		case u, ok := <-link:
			if !ok {
				return
			}
			r.linkChanged(u.Link.Attrs(), u.Header.Type == unix.RTM_DELLINK)
		}
	}
}

func drain[T any](ch chan T) {
	for range ch {
	}
}

func (r *router) neighbourChanged(n *netlink.Neigh) {
	a, ok := netip.AddrFromSlice(n.IP)
	if !ok {
		return
	}
	a = a.Unmap()
	r.mu.Lock()
	var hit []*hop
	for _, h := range r.hops {
		if h.plane.ifindex == n.LinkIndex && h.gateway == a {
			hit = append(hit, h)
		}
	}
	r.mu.Unlock()
	for _, h := range hit {
		r.learn(h, n)
	}
}

func (r *router) linkChanged(a *netlink.LinkAttrs, deleted bool) {
	for _, p := range r.e.planes {
		if p.ifindex != a.Index {
			continue
		}
		up := carrier(a) && !deleted
		r.mu.Lock()
		moved := len(a.HardwareAddr) == 6 && !bytes.Equal(a.HardwareAddr, p.mac)
		if moved {
			p.mac = slices.Clone(a.HardwareAddr)
		}
		if p.up.Swap(up) != up || moved {
			r.log.Info("interface", "interface", p.name, "carrier", up)
			for _, h := range r.hops {
				if h.plane == p {
					r.update(h)
				}
			}
		}
		r.mu.Unlock()
		if up {
			r.lookAtAll()
		}
	}
}

// lookAtAll refreshes every hop: routes changed, or updates were missed.
func (r *router) lookAtAll() {
	r.mu.Lock()
	hops := make([]*hop, 0, len(r.hops))
	for _, h := range r.hops {
		hops = append(hops, h)
	}
	r.mu.Unlock()
	for _, h := range hops {
		if !h.plane.up.Load() {
			continue
		}
		if err := r.refresh(h); err != nil {
			r.log.Warn("way to a peer", "error", err)
		}
	}
}

// close ends the subscriptions.
func (r *router) close() {
	r.once.Do(func() {
		close(r.done)
		r.wg.Wait()
		r.nl.Close()
		r.neighbours.sockets[unix.NETLINK_ROUTE].Close()
	})
}
