// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"github.com/metaroce/metaroce/loader"
)

const (
	// The wait before an interface that returned is tried once more doubles between these.
	minRetryTime = 100 * time.Millisecond
	maxRetryTime = 10 * time.Second
	// reattachTime bounds one try.
	reattachTime = 5 * time.Second
)

// retry is how long the next try to use an interface that returned has to wait, and why the last failed.
type retry struct {
	wait  time.Duration
	until time.Time
	said  string // the last reason that was logged
}

// watchPlane has news of the plane's interface, and of the one below it, noticed.
func (r *router) watchPlane(p *plane) {
	r.dirty.addPlane(p, []int{p.ifindex, p.out.ifindex}, []string{p.name, p.lower})
}

// bringBack takes a plane's interface into use again, which went away and is there again: its driver was
// loaded anew, or somebody made it anew. The worker alone calls it.
func (r *router) bringBack(p *plane) bool {
	now := time.Now()
	if now.Before(p.retry.until) {
		r.dirty.lookAgain(p, p.retry.until.Sub(now))
		return false
	}
	itf, mac, err := r.takeBack(p)
	if err != nil {
		p.gone = true
		p.retry.wait = min(max(2*p.retry.wait, minRetryTime), maxRetryTime)
		p.retry.until = now.Add(p.retry.wait)
		r.dirty.lookAgain(p, p.retry.wait)
		if said := err.Error(); said != p.retry.said {
			p.retry.said = said
			r.log.Error("interface is there again but cannot be used, is tried again", "interface", p.name, "error", err)
		}
		return false
	}
	r.mu.Lock()
	was := p.ifindex
	p.ifindex, p.mac, p.out, p.lower = itf.Index, mac, egressOf(itf, r.e.cfg.DSCP), lowerName(itf)
	p.gone, p.retry = false, retry{}
	for _, h := range r.hops {
		if h.plane != p {
			continue
		}
		for u := range h.users {
			retag(&r.e.pathWords[u.c.base+u.path], p.out)
		}
	}
	r.mu.Unlock()
	r.watchPlane(p)
	r.log.Info("interface is back", "interface", p.name, "ifindex", itf.Index, "was", was)
	return true
}

// takeBack attaches the program to the interface that returned, and checks that it is like the former one.
func (r *router) takeBack(p *plane) (itf loader.Interface, mac net.HardwareAddr, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), reattachTime)
	defer cancel()
	err = inside(r.e.ns, func() (err error) {
		itf, err = r.reattach(ctx, p.name, func(interfaces []loader.Interface, i int) error {
			if mac, err = r.e.suits(p, interfaces[i]); err != nil {
				return err
			}
			return r.e.placeAgain(ctx, interfaces)
		})
		return err
	})
	return itf, mac, err
}

// suits says whether a plane's interface, as it is now, can do what the device has promised to its peers.
func (e *Engine) suits(p *plane, itf loader.Interface) (net.HardwareAddr, error) {
	mac, err := net.ParseMAC(itf.MAC)
	if err != nil || len(mac) != 6 {
		return nil, fmt.Errorf("interface %s: link address %q, want an Ethernet address", p.name, itf.MAC)
	}
	if fitPayload(p.addr, itf.MTU) < e.payload {
		return nil, fmt.Errorf("interface %s: MTU is %d, want at least %d for the payload that was agreed on",
			p.name, itf.MTU, e.payload+headerLen(p.addr))
	}
	return mac, nil
}

func lowerName(itf loader.Interface) string {
	name, _ := itf.Lower()
	return name
}

// retag writes a template's VLAN tag, which may be another now. Reattach has seen to it that a template with
// a tag still needs one.
func retag(w *loader.Path, out egress) {
	if out.tagged {
		binary.BigEndian.PutUint16(w.Tmpl[14:], out.tci)
		atomic.StoreUint32(&w.Vlan, uint32(out.tci&0xfff))
	}
}
