// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"net/netip"
	"slices"
	"sync"
	"time"
)

// settleTime is how long route changes are collected before they are followed.
const settleTime = 20 * time.Millisecond

// neighKey names a neighbour. It names the plane, whose interface may return under another ifindex.
type neighKey struct {
	plane *plane
	addr  netip.Addr
}

// batch is what the worker has to look at. Each thing is in it once, however often it changed.
type batch struct {
	links  map[*plane]struct{}
	hops   map[*hop]struct{}
	neighs map[neighKey]struct{}   // changed in the kernel's table
	doubts map[neighKey]struct{}   // to be asked anew
	freed  map[neighKey]struct{}   // nobody uses them any more
	routes map[netip.Addr]struct{} // ends of hops whose routes may have changed
}

func newBatch() batch {
	return batch{
		links: map[*plane]struct{}{}, hops: map[*hop]struct{}{}, routes: map[netip.Addr]struct{}{},
		neighs: map[neighKey]struct{}{}, doubts: map[neighKey]struct{}{}, freed: map[neighKey]struct{}{},
	}
}

// dirty collects what may have changed, for the worker to look at. The readers of netlink only put
// things in here. It is bounded by what is watched, because messages about anything else stay outside.
// Its lock is held for map operations only.
type dirty struct {
	wake chan struct{} // has a value when there is work

	mu      sync.Mutex
	planes  []*plane
	byIndex map[int][]*plane    // by the index of the interface, and of a VLAN interface's parent
	byName  map[string][]*plane // the same by name: an interface that returns has another index
	watched map[neighKey]struct{}
	ends    map[netip.Addr]int // hops from or to each address
	sorted  []netip.Addr       // ends in order; nil: to be sorted
	batch
	settled time.Time            // when the routes may be taken; zero: none there
	later   map[*plane]time.Time // links to look at again
}

func newDirty() *dirty {
	return &dirty{
		wake: make(chan struct{}, 1), byIndex: map[int][]*plane{}, byName: map[string][]*plane{},
		watched: map[neighKey]struct{}{}, ends: map[netip.Addr]int{}, batch: newBatch(), later: map[*plane]time.Time{},
	}
}

func (d *dirty) ring() {
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// do changes the set under its lock and wakes the worker.
func (d *dirty) do(f func()) {
	d.mu.Lock()
	f()
	d.mu.Unlock()
	d.ring()
}

// addPlane begins to watch a plane's interface and the one below it, under these indexes only.
func (d *dirty) addPlane(p *plane, ifindexes []int, names []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !slices.Contains(d.planes, p) {
		d.planes = append(d.planes, p)
	}
	for index, planes := range d.byIndex {
		if planes = slices.DeleteFunc(planes, func(q *plane) bool { return q == p }); len(planes) == 0 {
			delete(d.byIndex, index)
		} else {
			d.byIndex[index] = planes
		}
	}
	for _, index := range ifindexes {
		d.byIndex[index] = append(d.byIndex[index], p)
	}
	for _, name := range names {
		if !slices.Contains(d.byName[name], p) {
			d.byName[name] = append(d.byName[name], p)
		}
	}
}

// watch and unwatch say which neighbours count.
func (d *dirty) watch(k neighKey) {
	d.mu.Lock()
	d.watched[k] = struct{}{}
	d.mu.Unlock()
}

func (d *dirty) unwatch(k neighKey) {
	d.mu.Lock()
	delete(d.watched, k)
	delete(d.neighs, k)
	delete(d.doubts, k)
	d.mu.Unlock()
}

// addEnd says how many more hops, or less, begin or end at an address.
func (d *dirty) addEnd(a netip.Addr, n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ends[a] += n; d.ends[a] <= 0 {
		delete(d.ends, a)
		delete(d.routes, a)
	}
	d.sorted = nil
}

// linkChanged: something is new about an interface.
func (d *dirty) linkChanged(ifindex int, name string) {
	d.mu.Lock()
	hit := false
	for _, planes := range [2][]*plane{d.byIndex[ifindex], d.byName[name]} {
		for _, p := range planes {
			d.links[p] = struct{}{}
			hit = true
		}
	}
	d.mu.Unlock()
	if hit {
		d.ring()
	}
}

// neighbourChanged: something is new about a neighbour.
func (d *dirty) neighbourChanged(ifindex int, a netip.Addr) {
	d.mu.Lock()
	hit := false
	for _, p := range d.byIndex[ifindex] {
		k := neighKey{p, a}
		if _, ok := d.watched[k]; ok {
			d.neighs[k] = struct{}{}
			hit = true
		}
	}
	d.mu.Unlock()
	if hit {
		d.ring()
	}
}

// routeChanged: a route came, changed or went. Only the ends of hops that it covers count.
func (d *dirty) routeChanged(dst netip.Prefix) {
	d.mu.Lock()
	if d.sorted == nil {
		for a := range d.ends {
			d.sorted = append(d.sorted, a)
		}
		slices.SortFunc(d.sorted, netip.Addr.Compare)
	}
	dst = dst.Masked()
	i, _ := slices.BinarySearchFunc(d.sorted, dst.Addr(), netip.Addr.Compare)
	hit := false
	for ; i < len(d.sorted) && dst.Contains(d.sorted[i]); i++ {
		d.routes[d.sorted[i]] = struct{}{}
		hit = true
	}
	if hit = hit && d.settled.IsZero(); hit {
		d.settled = time.Now().Add(settleTime)
	}
	d.mu.Unlock()
	if hit {
		d.ring()
	}
}

// allLinks, allNeighbours and allRoutes: messages were lost, anything may have changed.
func (d *dirty) allLinks() {
	d.do(func() {
		for _, p := range d.planes {
			d.links[p] = struct{}{}
		}
	})
}

func (d *dirty) allNeighbours() {
	d.do(func() {
		for k := range d.watched {
			d.neighs[k] = struct{}{}
		}
	})
}

func (d *dirty) allRoutes() {
	d.do(func() {
		for a := range d.ends {
			d.routes[a] = struct{}{}
		}
		if d.settled.IsZero() && len(d.routes) > 0 {
			d.settled = time.Now().Add(settleTime)
		}
	})
}

// lookAgain has a link looked at once more after a while.
func (d *dirty) lookAgain(p *plane, after time.Duration) {
	d.do(func() { d.later[p] = time.Now().Add(after) })
}

// takeLinks takes the links alone, which come before everything else; nil if there are none.
func (d *dirty) takeLinks(now time.Time) map[*plane]struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	for p, at := range d.later {
		if !now.Before(at) {
			d.links[p] = struct{}{}
			delete(d.later, p)
		}
	}
	if len(d.links) == 0 {
		return nil
	}
	links := d.links
	d.links = map[*plane]struct{}{}
	return links
}

// take takes what is due, and says when more will be; zero: when somebody wakes.
func (d *dirty) take(now time.Time) (b batch, next time.Time) {
	links := d.takeLinks(now)
	d.mu.Lock()
	defer d.mu.Unlock()
	pending := d.links // since takeLinks
	b, d.batch = d.batch, newBatch()
	b.links, d.links = links, pending
	if !d.settled.IsZero() && now.Before(d.settled) {
		b.routes, d.routes = d.routes, b.routes
		next = d.settled
	} else {
		d.settled = time.Time{}
	}
	for _, at := range d.later {
		if next.IsZero() || at.Before(next) {
			next = at
		}
	}
	return b, next
}
