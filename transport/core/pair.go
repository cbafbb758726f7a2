// SPDX-License-Identifier: Apache-2.0

package core

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
)

// Payloads are the payload sizes in bytes that ends agree on, largest first.
var Payloads = [...]int{3072, 2048, 1024}

// PairPaths makes of both ends' offers what they agreed on, from local's view.
// Both ends get the same list of address pairs: path i uses plane i modulo the
// number of pairable planes, which are those of the same index and address
// family; planes that one end lacks are ignored. The source ports are drawn from
// rnd and are this end's own: a receiver does not look at them.
//
// It fails, naming both ends' values, when no plane can be paired, when the
// payloads leave none of 1024, 2048 and 3072, or when an end offers no path.
func PairPaths(local, remote Endpoint, rnd *rand.Rand) (ConnParams, error) {
	c := ConnParams{Local: local, Remote: remote, Checksum: local.Checksum || remote.Checksum}
	var err error
	if c.Payload, err = agreePayload(local.Payload, remote.Payload); err != nil {
		return ConnParams{}, err
	}
	npaths := min(local.Paths, remote.Paths, MaxPaths)
	if npaths < 1 {
		return ConnParams{}, fmt.Errorf("pair paths: local end offers %d paths, remote end %d, want 1 to %d", local.Paths, remote.Paths, MaxPaths)
	}
	var planes []int
	for k := range min(len(local.Planes), len(remote.Planes)) {
		l, r := local.Planes[k].Addr.Unmap(), remote.Planes[k].Addr.Unmap()
		if l.IsValid() && r.IsValid() && l.Is4() == r.Is4() {
			planes = append(planes, k)
		}
	}
	if len(planes) == 0 {
		return ConnParams{}, fmt.Errorf("pair paths: no plane has an address of the same family at both ends: local planes %s, remote planes %s",
			addrs(local.Planes), addrs(remote.Planes))
	}
	c.Paths = make([]PathParams, 0, npaths)
	for i := range npaths {
		k := planes[i%len(planes)]
		c.Paths = append(c.Paths, PathParams{
			Plane:  k,
			Local:  local.Planes[k].Addr.Unmap(),
			Remote: remote.Planes[k].Addr.Unmap(),
			Sport: drawSport(rnd, func(port uint16) bool {
				for _, p := range c.Paths {
					if p.Sport == port {
						return true
					}
				}
				return false
			}),
		})
	}
	return c, nil
}

func agreePayload(local, remote int) (int, error) {
	for _, p := range Payloads {
		if p <= local && p <= remote {
			return p, nil
		}
	}
	return 0, fmt.Errorf("pair paths: local end takes %d bytes of payload, remote end %d, want at least %d", local, remote, Payloads[len(Payloads)-1])
}

// drawSport draws a source port that is not taken. There are 16384, and a
// connection has at most MaxPaths, so that the loop ends soon.
func drawSport(rnd *rand.Rand, taken func(uint16) bool) uint16 {
	for {
		port := uint16(MinSport + rnd.IntN(1<<16-MinSport))
		if !taken(port) {
			return port
		}
	}
}

func addrs(planes []PlaneAddr) string {
	words := make([]string, len(planes))
	for i, p := range planes {
		words[i] = netip.Addr.String(p.Addr)
	}
	return "[" + strings.Join(words, " ") + "]"
}
