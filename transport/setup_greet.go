// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// setupLimits bounds what a peer can hold of this end during set-up
// (docs/wire.md, section 11).
type setupLimits struct {
	hello        time.Duration // from the TCP connection to the first whole message
	greeting     int           // callers that have not said it yet
	greetingFrom int           // ... of one source
	take         time.Duration // until the program takes a caller that has
	waiting      int           // callers that wait for that
	waitingFrom  int           // ... of one source
	bad          int           // callers that said something else: their errors wait for Accept
	start        time.Duration // from Accept until the dialler takes packets
	ready        time.Duration // from Accept to Ready; more than start
}

var defaultLimits = setupLimits{
	hello: 2 * time.Second, greeting: 128, greetingFrom: 16,
	take: setupTime, waiting: 512, waitingFrom: 128, bad: 16,
	start: 1800 * time.Millisecond, ready: 2 * time.Second,
}

// source is what counts as one source of callers: an IPv4 address, or the /64 of
// an IPv6 one, of which a host has as many addresses as it likes.
func source(a net.Addr) netip.Prefix {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.Prefix{}
	}
	ip := tcp.AddrPort().Addr().Unmap()
	bits := 32
	if ip.Is6() {
		bits = 64
	}
	p, _ := ip.Prefix(bits)
	return p
}

// greeting is the callers that have not said Hello yet, the oldest first. A new
// one always gets a place: the oldest silent caller of its source gives it up when
// the source has its share, the oldest of all when there is none left.
type greeting struct {
	limits setupLimits
	mu     sync.Mutex
	list   []*greeter
}

type greeter struct {
	conn    net.Conn // hung up when it loses its place
	from    netip.Prefix
	evicted bool
}

func (g *greeting) enter(conn net.Conn) *greeter {
	c := &greeter{conn: conn, from: source(conn.RemoteAddr())}
	g.mu.Lock()
	defer g.mu.Unlock()
	same := 0
	for _, other := range g.list {
		if other.from == c.from {
			same++
		}
	}
	switch {
	case same >= g.limits.greetingFrom:
		g.evict(func(other *greeter) bool { return other.from == c.from })
	case len(g.list) >= g.limits.greeting:
		g.evict(func(*greeter) bool { return true })
	}
	g.list = append(g.list, c)
	return c
}

// evict hangs up on the oldest caller that matches. One whose words have come but
// have not been read yet is not silent: it goes only if there is no other.
func (g *greeting) evict(match func(*greeter) bool) {
	victim := -1
	for i, c := range g.list {
		if !match(c) {
			continue
		}
		if victim < 0 {
			victim = i
		}
		if !unread(c.conn) {
			victim = i
			break
		}
	}
	c := g.list[victim]
	g.list = slices.Delete(g.list, victim, victim+1)
	c.evicted = true
	if c.conn != nil {
		_ = c.conn.Close()
	}
}

// unread says whether bytes wait in the kernel to be read.
func unread(conn net.Conn) bool {
	sc, ok := conn.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return false
	}
	n := 0
	if raw.Control(func(fd uintptr) { n, err = unix.IoctlGetInt(int(fd), unix.SIOCINQ) }) != nil {
		return false
	}
	return err == nil && n > 0
}

// hold makes conn, which may be nil, the connection that c loses together with its
// place. It returns false if that is lost already.
func (g *greeting) hold(c *greeter, conn net.Conn) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	c.conn = conn
	return !c.evicted
}

func (g *greeting) leave(c *greeter) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if i := slices.Index(g.list, c); i >= 0 {
		g.list = slices.Delete(g.list, i, i+1)
	}
}

// callers is those that have said Hello and wait for Accept, in the order of
// coming, and errors of those that said something else.
type callers struct {
	limits setupLimits
	wg     *sync.WaitGroup // the listener's
	ready  chan struct{}   // has a value while the queue may hold something

	mu     sync.Mutex
	closed bool
	queue  []*caller
}

type caller struct {
	in   *Incoming // or
	err  error
	from netip.Prefix
	age  *time.Timer
}

// put queues c. There may be one too many then, which it returns with the reason,
// to be rejected: c itself if its source has its share, else the last one of the
// source that has most.
func (q *callers) put(c *caller) (dropped *caller, reason string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return c, "the listener is closed"
	}
	q.queue = append(q.queue, c)
	if c.err != nil {
		q.forgetError()
	} else if dropped, reason = q.excess(c); dropped != nil {
		q.remove(dropped)
	}
	if dropped != c {
		c.age = time.AfterFunc(q.limits.take, func() { q.expire(c) })
		q.signal()
	}
	return dropped, reason
}

// excess finds who is one too many, now that c has come. Under mu.
func (q *callers) excess(c *caller) (*caller, string) {
	count, total, most := map[netip.Prefix]int{}, 0, c.from
	for _, other := range q.queue {
		if other.err == nil {
			count[other.from]++
			total++
		}
	}
	for from, n := range count {
		if n > count[most] {
			most = from
		}
	}
	switch {
	case count[c.from] > q.limits.waitingFrom:
		return c, fmt.Sprintf("%d callers from %v wait for the listener's program already, at most %d may", count[c.from]-1, c.from, q.limits.waitingFrom)
	case total <= q.limits.waiting:
		return nil, ""
	}
	for _, other := range slices.Backward(q.queue) {
		if other.err == nil && other.from == most {
			return other, fmt.Sprintf("%d callers wait for the listener's program already, at most %d may", total-1, q.limits.waiting)
		}
	}
	return nil, ""
}

// forgetError drops the oldest error if there are too many. Under mu.
func (q *callers) forgetError() {
	var oldest *caller
	n := 0
	for _, c := range q.queue {
		if c.err == nil {
			continue
		}
		if n++; oldest == nil {
			oldest = c
		}
	}
	if n > q.limits.bad {
		q.remove(oldest)
	}
}

// remove takes c out of the queue and says whether it was in it. Under mu.
func (q *callers) remove(c *caller) bool {
	i := slices.Index(q.queue, c)
	if i < 0 {
		return false
	}
	q.queue = slices.Delete(q.queue, i, i+1)
	if c.age != nil {
		c.age.Stop()
	}
	return true
}

// expire rejects a caller that nobody took in time.
func (q *callers) expire(c *caller) {
	q.mu.Lock()
	late := !q.closed && q.remove(c)
	if late {
		q.wg.Add(1)
	}
	q.mu.Unlock()
	if !late {
		return
	}
	defer q.wg.Done()
	if c.in != nil {
		_ = c.in.Reject(fmt.Sprintf("the listener's program did not take the call within %v", q.limits.take))
	}
}

// next takes the first one out of the queue; nil if there is none.
func (q *callers) next() *caller {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.queue) == 0 {
		return nil
	}
	c := q.queue[0]
	q.remove(c)
	if len(q.queue) > 0 {
		q.signal() // for another Accept
	}
	return c
}

func (q *callers) signal() {
	select {
	case q.ready <- struct{}{}:
	default:
	}
}

// close hangs up on all that wait; nobody is queued any more.
func (q *callers) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	for _, c := range slices.Clone(q.queue) {
		q.remove(c)
		if c.in != nil {
			_ = c.in.s.Close()
		}
	}
}
