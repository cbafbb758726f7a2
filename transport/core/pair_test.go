// SPDX-License-Identifier: Apache-2.0

package core

import (
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func planes(addrs ...string) []PlaneAddr {
	var out []PlaneAddr
	for _, a := range addrs {
		p := PlaneAddr{MTU: 3500}
		if a != "" {
			p.Addr = netip.MustParseAddr(a)
		}
		out = append(out, p)
	}
	return out
}

func endpoint(payload, paths int, checksum bool, addrs ...string) Endpoint {
	return Endpoint{QPN: 7, Payload: payload, Paths: paths, Checksum: checksum, Planes: planes(addrs...)}
}

func testRand(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 0)) }

func TestPairPaths(t *testing.T) {
	for _, tc := range []struct {
		name          string
		local, remote Endpoint
		payload       int
		checksum      bool
		planes        []int // of each path
	}{
		{
			"paths go round the planes",
			endpoint(3072, 8, true, "198.18.0.1", "198.18.1.1"), endpoint(3072, 5, true, "198.18.0.2", "198.18.1.2"),
			3072, true,
			[]int{0, 1, 0, 1, 0},
		},
		{
			"the smaller payload of the allowed ones",
			endpoint(3000, 1, true, "198.18.0.1"), endpoint(3072, 1, true, "198.18.0.2"),
			2048, true,
			[]int{0},
		},
		{
			"checksum stays on when one end wants it",
			endpoint(1024, 1, false, "198.18.0.1"), endpoint(1024, 1, true, "198.18.0.2"),
			1024, true,
			[]int{0},
		},
		{
			"checksum is off when both ends say so",
			endpoint(1024, 1, false, "198.18.0.1"), endpoint(1024, 1, false, "198.18.0.2"),
			1024, false,
			[]int{0},
		},
		{
			"planes that the peer lacks are ignored",
			endpoint(1024, 3, true, "198.18.0.1", "198.18.1.1", "198.18.2.1"), endpoint(1024, 3, true, "198.18.0.2", "198.18.1.2"),
			1024, true,
			[]int{0, 1, 0},
		},
		{
			"a plane of two families is left out",
			endpoint(1024, 3, true, "198.18.0.1", "fd00::1", "fd01::1"), endpoint(1024, 3, true, "198.18.0.2", "198.18.1.2", "fd01::2"),
			1024, true,
			[]int{0, 2, 0},
		},
		{
			"a mapped IPv4 address is IPv4",
			endpoint(1024, 1, true, "::ffff:198.18.0.1"), endpoint(1024, 1, true, "198.18.0.2"),
			1024, true,
			[]int{0},
		},
		{
			"more paths than there can be",
			endpoint(1024, 99, true, "198.18.0.1"), endpoint(1024, 99, true, "198.18.0.2"),
			1024, true, make([]int, MaxPaths),
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, err := PairPaths(tc.local, tc.remote, testRand(1))
			if err != nil {
				t.Fatal(err)
			}
			if c.Payload != tc.payload || c.Checksum != tc.checksum {
				t.Errorf("payload %d, checksum %v, want %d, %v", c.Payload, c.Checksum, tc.payload, tc.checksum)
			}
			if len(c.Paths) != len(tc.planes) {
				t.Fatalf("%d paths, want %d", len(c.Paths), len(tc.planes))
			}
			for i, p := range c.Paths {
				want := PathParams{
					Plane: tc.planes[i],
					Local: tc.local.Planes[tc.planes[i]].Addr.Unmap(), Remote: tc.remote.Planes[tc.planes[i]].Addr.Unmap(),
					Sport: p.Sport,
				}
				if p != want {
					t.Errorf("path %d is %+v, want %+v", i, p, want)
				}
			}
		})
	}
}

func TestPairPathsRefuses(t *testing.T) {
	for _, tc := range []struct {
		name          string
		local, remote Endpoint
		names         []string // what the error must name
	}{
		{
			"no common family", endpoint(1024, 1, true, "198.18.0.1"), endpoint(1024, 1, true, "fd00::2"),
			[]string{"198.18.0.1", "fd00::2"},
		},
		{"no planes", endpoint(1024, 1, true), endpoint(1024, 1, true, "198.18.0.2"), []string{"[]", "198.18.0.2"}},
		{"an address that is none", endpoint(1024, 1, true, ""), endpoint(1024, 1, true, "198.18.0.2"), []string{"198.18.0.2"}},
		{
			"payload below the least", endpoint(3072, 1, true, "198.18.0.1"), endpoint(1000, 1, true, "198.18.0.2"),
			[]string{"3072", "1000", "1024"},
		},
		{"no paths", endpoint(1024, 0, true, "198.18.0.1"), endpoint(1024, 4, true, "198.18.0.2"), []string{" 0 ", " 4"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := PairPaths(tc.local, tc.remote, testRand(1))
			if err == nil {
				t.Fatal("no error")
			}
			for _, w := range tc.names {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("error %q does not name %q", err, w)
				}
			}
		})
	}
}

// TestPairPathsIsSymmetric: both ends pair the same addresses, and draw ports of
// the range without repeating one.
func TestPairPathsIsSymmetric(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		end := func(host string) Endpoint {
			e := Endpoint{
				Payload: rapid.IntRange(1024, 4000).Draw(t, host+" payload"), Paths: rapid.IntRange(1, 40).Draw(t, host+" paths"),
				Checksum: rapid.Bool().Draw(t, host+" checksum"), Planes: planes("198.18.0." + host),
			}
			for range rapid.IntRange(0, MaxPlanes-1).Draw(t, host+" planes") {
				e.Planes = append(e.Planes, planes(rapid.SampledFrom([]string{"198.18.1." + host, "fd00::" + host}).Draw(t, "addr"))...)
			}
			return e
		}
		a, b := end("1"), end("2")
		here, err := PairPaths(a, b, testRand(rapid.Uint64().Draw(t, "seed")))
		if err != nil {
			t.Fatal(err)
		}
		there, err := PairPaths(b, a, testRand(rapid.Uint64().Draw(t, "seed")))
		if err != nil {
			t.Fatal(err)
		}
		if here.Payload != there.Payload || here.Checksum != there.Checksum || len(here.Paths) != len(there.Paths) {
			t.Fatalf("ends disagree: %+v and %+v", here, there)
		}
		seen := map[uint16]bool{}
		for i, p := range here.Paths {
			q := there.Paths[i]
			if p.Plane != q.Plane || p.Local != q.Remote || p.Remote != q.Local {
				t.Fatalf("path %d is %+v here and %+v there", i, p, q)
			}
			if p.Sport < MinSport || seen[p.Sport] {
				t.Fatalf("path %d has port %d, want a fresh one from %d", i, p.Sport, MinSport)
			}
			seen[p.Sport] = true
		}
	})
}
