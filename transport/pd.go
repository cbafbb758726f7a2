// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"fmt"
	"strings"

	"github.com/metaroce/metaroce/transport/core"
)

// PD is a protection domain. Memory belongs to one, and so does each connection; a
// connection's peer can reach the memory of its domain alone, and so can the
// connection's own requests. Whoever knows a key of another domain gets a remote
// access error. Methods may be called from any goroutine.
type PD struct {
	dev *Device
	id  uint32
	own bool // made for one connection: it ends with its last user

	// Under dev.mu.
	closed      bool
	mems, conns int
}

// AllocPD makes a protection domain, for memory and for connections that are set
// up WithPD. Connections of one domain share its memory: a server that lends the
// same region to all its clients puts them into one.
func (d *Device) AllocPD() (*PD, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, fmt.Errorf("device: %w", ErrClosed)
	}
	return d.newPD(false), nil
}

// newPD gives a domain the next number that no other has. Under d.mu.
func (d *Device) newPD(own bool) *PD {
	for {
		d.lastPD++
		if _, used := d.pds[d.lastPD]; !used && d.lastPD != 0 {
			break
		}
	}
	p := &PD{dev: d, id: d.lastPD, own: own}
	d.pds[p.id] = p
	return p
}

// Close gives the domain back. While memory or connections are in it, Close
// returns ErrPDInUse, says what, and does nothing. A second Close returns nil. The
// domain that a connection was given of its own needs no Close: it ends with the
// connection and the last memory in it.
func (p *PD) Close() error {
	p.dev.mu.Lock()
	defer p.dev.mu.Unlock()
	var users []string
	for _, u := range []struct {
		n    int
		what string
	}{{p.mems, "memory region"}, {p.conns, "connection"}} {
		switch {
		case u.n == 1:
			users = append(users, "1 "+u.what)
		case u.n > 1:
			users = append(users, fmt.Sprintf("%d %ss", u.n, u.what))
		}
	}
	if len(users) > 0 && !p.dev.closed {
		return fmt.Errorf("protection domain %d: %w by %s", p.id, ErrPDInUse, strings.Join(users, " and "))
	}
	p.end()
	return nil
}

// end is under dev.mu.
func (p *PD) end() {
	if !p.closed {
		p.closed = true
		delete(p.dev.pds, p.id)
	}
}

// hold counts one more user in users, which is &p.mems or &p.conns.
func (p *PD) hold(users *int) error {
	p.dev.mu.Lock()
	defer p.dev.mu.Unlock()
	if p.closed {
		return fmt.Errorf("protection domain %d: %w", p.id, ErrClosed)
	}
	*users++
	return nil
}

// drop counts one user less.
func (p *PD) drop(users *int) {
	p.dev.mu.Lock()
	defer p.dev.mu.Unlock()
	*users--
	if p.own && p.mems == 0 && p.conns == 0 {
		p.end()
	}
}

// AllocMemory makes a region of size bytes, at most 1 GiB, all zero, in this
// domain. access says what may be done with it besides sending from it; as in
// verbs, the right to write from remote needs the local one.
func (p *PD) AllocMemory(size uint64, access core.Access) (*Memory, error) {
	switch {
	case size == 0 || size > core.MaxRegion:
		return nil, fmt.Errorf("memory of %d bytes, want 1 to %d", size, core.MaxRegion)
	case access&^core.AllAccess != 0:
		return nil, fmt.Errorf("access %#x, want a combination of %#x", uint32(access), uint32(core.AllAccess))
	case access&core.RemoteWrite != 0 && access&core.LocalWrite == 0:
		return nil, fmt.Errorf("access %#x has remote write without local write", uint32(access))
	}
	d := p.dev
	if err := d.begin(); err != nil {
		return nil, err
	}
	defer d.pending.Done()
	if err := p.hold(&p.mems); err != nil {
		return nil, fmt.Errorf("memory of %d bytes: %w", size, err)
	}
	reg, err := d.eng.AllocRegion(size, access, p.id)
	if err != nil {
		p.drop(&p.mems)
		return nil, fmt.Errorf("memory of %d bytes: %w", size, err)
	}
	m := &Memory{dev: d, pd: p, reg: reg, size: size, addr: reg.Addr(), key: reg.Key()}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mems[m] = struct{}{}
	return m, nil
}
