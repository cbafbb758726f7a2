// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	// requestTime bounds a netlink request. The kernel answers at once, unless somebody holds its lock.
	requestTime = 5 * time.Second
	// doubtTime is the least time between two questions to one neighbour.
	doubtTime = time.Second
)

// work looks at what may have changed, until close.
func (r *router) work() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-r.done:
			b, _ := r.dirty.take(time.Now())
			for k := range b.freed {
				r.letGo(k)
			}
			return
		case <-r.dirty.wake:
		case <-timer.C:
		}
		b, next := r.dirty.take(time.Now())
		r.lookAt(&b)
		if next.IsZero() {
			timer.Stop()
		} else {
			timer.Reset(time.Until(next))
		}
	}
}

// lookAt does a batch's work. News of links does not wait for the rest of it.
func (r *router) lookAt(b *batch) {
	r.lookAtLinks(b.links)
	for k := range b.freed {
		r.letGo(k)
	}
	open := func() bool {
		if r.over() { // nobody is interested any more
			return false
		}
		r.lookAtLinks(r.dirty.takeLinks(time.Now()))
		return true
	}
	for k := range b.doubts {
		if !open() {
			return
		}
		r.askAnew(k)
	}
	r.mu.Lock()
	for a := range b.routes {
		for h := range r.ends[a] {
			b.hops[h] = struct{}{}
		}
	}
	r.mu.Unlock()
	for h := range b.hops {
		if !open() {
			return
		}
		if n := r.lookAtHop(h); n != nil {
			b.neighs[n.neighKey] = struct{}{}
		}
	}
	for k := range b.neighs {
		if !open() {
			return
		}
		r.lookAtNeighbour(k)
	}
	r.tell()
}

// over says that the router is being closed.
func (r *router) over() bool {
	select {
	case <-r.done:
		return true
	default:
		return false
	}
}

// lookAtHop looks up a hop's route. It returns the neighbour if that is to be looked at, too.
func (r *router) lookAtHop(h *hop) *neighbour {
	r.mu.Lock()
	ifindex, use := h.plane.ifindex, h.refs > 0 && h.plane.up.Load()
	if !use { // once it has carrier, all its hops are looked at
		h.seen = true
		r.learnt()
	}
	r.mu.Unlock()
	if !use {
		return nil
	}
	r.looks.Add(1)
	gateway, err := r.nextHop(h, ifindex)
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ENOBUFS) {
		r.log.Warn("way to a peer not looked at, is tried again", "remote", h.remote, "error", err)
		r.dirty.routeChanged(netip.PrefixFrom(h.remote, h.remote.BitLen()))
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if h.refs == 0 {
		return nil
	}
	if err != nil {
		err = fmt.Errorf("path from %v on %s to %v: %w", h.local, h.plane.name, h.remote, err)
		if h.err == nil || h.err.Error() != err.Error() {
			r.log.Warn("way to a peer", "error", err)
		}
		h.err, h.seen = err, true
		r.update(h)
		r.learnt()
		return nil
	}
	if h.err != nil {
		r.log.Info("way to a peer is back", "interface", h.plane.name, "remote", h.remote)
		h.err = nil
		r.update(h)
	}
	before := h.via
	n := r.reach(h, gateway)
	if before == n && h.mac != nil {
		return nil // of the neighbour itself the kernel tells
	}
	return n
}

// nextHop is whose link address packets to the remote end carry.
func (r *router) nextHop(h *hop, ifindex int) (netip.Addr, error) {
	routes, err := r.nl.RouteGetWithOptions(h.remote.AsSlice(), &netlink.RouteGetOptions{
		OifIndex: ifindex, SrcAddr: h.local.AsSlice(),
	})
	if err != nil {
		return netip.Addr{}, fmt.Errorf("no route: %w", err)
	}
	if len(routes) == 0 || routes[0].LinkIndex != ifindex {
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

// neighbour finds one that is still used and whose interface has carrier.
func (r *router) neighbour(k neighKey) (n *neighbour, ifindex int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n = r.neighs[k]; n == nil || !k.plane.up.Load() {
		return nil, 0
	}
	return n, k.plane.ifindex
}

// lookAtNeighbour looks up a neighbour. If the kernel does not manage it, it is made to: packets that
// XDP sends and receives tell it nothing.
func (r *router) lookAtNeighbour(k neighKey) {
	n, ifindex := r.neighbour(k)
	if n == nil {
		return
	}
	r.looks.Add(1)
	found, err := r.neighbours.get(ifindex, k.addr)
	if err != nil {
		r.cannotLook(k, err)
		return
	}
	r.mu.Lock()
	want := n.want
	n.want = false
	n.ours = n.ours || found.ours()
	r.mu.Unlock()
	gone := found.State&(usable|unix.NUD_INCOMPLETE) == 0
	if !found.fixed() && (!found.managed() || want && gone) {
		r.manage(n, ifindex, &found)
	}
	r.learn(n, &found.Neigh)
}

// manage has the kernel resolve a neighbour and keep it alive.
func (r *router) manage(n *neighbour, ifindex int, found *entry) {
	mark := !found.managed() || found.ours() // an administrator's stays his
	if err := r.neighbours.manage(ifindex, n.addr, true, mark); err != nil {
		r.cannotLook(n.neighKey, err)
		return
	}
	r.mu.Lock()
	n.ours = n.ours || mark
	used := r.neighs[n.neighKey] == n
	r.mu.Unlock()
	if !used && mark { // given back meanwhile
		r.letGo(n.neighKey)
	}
	if found.State&usable == 0 {
		found.State = unix.NUD_INCOMPLETE // anew
	}
}

// cannotLook reports what went wrong, unless the interface is just going.
func (r *router) cannotLook(k neighKey, err error) {
	if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENETDOWN) {
		r.dirty.do(func() { r.dirty.links[k.plane] = struct{}{} })
		return
	}
	r.log.Warn("neighbour not looked at", "interface", k.plane.name, "neighbour", k.addr, "error", err)
}

// letGo has the kernel treat a neighbour as any other, if nobody uses it again by now.
func (r *router) letGo(k neighKey) {
	r.mu.Lock()
	n, ifindex := r.neighs[k], k.plane.ifindex
	r.mu.Unlock()
	if n != nil || k.plane.gone {
		return
	}
	found, err := r.neighbours.get(ifindex, k.addr)
	// Asking for a permanent neighbour would make it one that must be resolved.
	if err == nil && (found.fixed() || !found.ours()) {
		return
	}
	if err == nil {
		err = r.neighbours.manage(ifindex, k.addr, false, true)
	}
	if err != nil && !errors.Is(err, unix.ENODEV) {
		r.log.Warn("neighbour stays managed", "interface", k.plane.name, "neighbour", k.addr, "error", err)
	}
}

// doubt says that a path gets no answers: its neighbour's link address may be wrong. Callers may say
// so as often as they like.
func (r *router) doubt(h *hop) {
	nowNs := r.e.clk.now()
	last := h.doubtNs.Load()
	if last != 0 && nowNs-last < int64(doubtTime) || !h.doubtNs.CompareAndSwap(last, nowNs) {
		return
	}
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	n := h.via
	if n == nil || now.Sub(n.asked) < doubtTime { // another path's doubt
		return
	}
	n.asked = now
	r.dirty.do(func() { r.dirty.doubts[n.neighKey] = struct{}{} })
}

// askAnew has the kernel ask everybody on the link for a neighbour, as if it had never known it. By
// itself the kernel would trust what it has for 5 s, and then ask only that link address for 3 s.
func (r *router) askAnew(k neighKey) {
	n, ifindex := r.neighbour(k)
	if n == nil {
		return
	}
	found, err := r.neighbours.get(ifindex, k.addr)
	if err != nil {
		r.cannotLook(k, err)
		return
	}
	if found.fixed() || found.State&unix.NUD_INCOMPLETE != 0 { // the kernel asks everybody, once a second
		return
	}
	if found.State&usable != 0 {
		if err := r.neighbours.forget(ifindex, k.addr); err != nil {
			r.cannotLook(k, err)
			return
		}
	}
	r.manage(n, ifindex, &found)
}

// learn takes what the neighbour table says.
func (r *router) learn(n *neighbour, found *netlink.Neigh) {
	r.mu.Lock()
	defer r.mu.Unlock()
	good := found.State&usable != 0 && len(found.HardwareAddr) == 6
	said := false
	for h := range n.hops {
		h.state, h.seen = found.State, true
		if !good || bytes.Equal(h.mac, found.HardwareAddr) {
			continue
		}
		if h.mac != nil && !said {
			said = true
			r.log.Info("link address of a neighbour changed", "interface", h.plane.name, "neighbour", h.gateway,
				"from", h.mac.String(), "to", found.HardwareAddr.String())
		}
		h.mac = slices.Clone(found.HardwareAddr)
		r.update(h)
	}
	r.learnt()
}

// lookAtLinks looks at interfaces, and tells the connections of that and of what was found before.
func (r *router) lookAtLinks(links map[*plane]struct{}) {
	for p := range links {
		r.lookAtLink(p)
	}
	r.tell()
}

// lookAtLink compares an interface with what is known of it.
func (r *router) lookAtLink(p *plane) {
	link, err := r.nl.LinkByName(p.name)
	if _, none := errors.AsType[netlink.LinkNotFoundError](err); none {
		if !p.gone {
			r.log.Warn("interface is gone, its paths are down until it returns", "interface", p.name, "ifindex", p.ifindex)
		}
		p.gone, p.retry = true, retry{}
		r.linkIs(p, false, nil)
		return
	}
	if err != nil {
		r.log.Warn("interface not looked at, is tried again", "interface", p.name, "error", err)
		r.dirty.lookAgain(p, renewTime)
		return
	}
	a := link.Attrs()
	if p.gone || a.Index != p.ifindex {
		r.linkIs(p, false, nil)
		if r.bringBack(p) {
			// It may have changed since it was looked up.
			r.dirty.do(func() { r.dirty.links[p] = struct{}{} })
		}
		return
	}
	r.linkIs(p, carrier(a), a.HardwareAddr)
}

// linkIs takes an interface's carrier and link address.
func (r *router) linkIs(p *plane, up bool, mac net.HardwareAddr) {
	r.mu.Lock()
	defer r.mu.Unlock()
	moved := len(mac) == 6 && !bytes.Equal(mac, p.mac)
	if moved {
		p.mac = slices.Clone(mac)
	}
	was := p.up.Swap(up)
	if was != up || moved {
		r.log.Info("interface", "interface", p.name, "carrier", up)
		for _, h := range r.hops {
			if h.plane == p {
				r.update(h)
			}
		}
		r.learnt()
	}
	if up && (!was || moved) {
		r.lookAtPlane(p)
	}
}

// lookAtPlane has all routes and neighbours of a plane looked at: they go with its carrier, and the
// kernel tells nothing about such routes. The router's lock is held.
func (r *router) lookAtPlane(p *plane) {
	r.dirty.do(func() {
		for _, h := range r.hops {
			if h.plane != p {
				continue
			}
			r.dirty.hops[h] = struct{}{}
			if h.via != nil {
				r.dirty.neighs[h.via.neighKey] = struct{}{}
			}
		}
	})
}
