// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"math/bits"
	"strings"
	"testing"
	"time"

	"github.com/metaroce/metaroce/fabric/lab"
	"github.com/metaroce/metaroce/loader"
	"github.com/metaroce/metaroce/transport"
	"github.com/metaroce/metaroce/transport/core"
)

// onPlane lists a connection's paths on a plane.
func onPlane(c *transport.Conn, plane int) (paths []int) {
	for i, p := range c.Info().Paths {
		if p.Plane == plane {
			paths = append(paths, i)
		}
	}
	return paths
}

// pullPlane takes a plane down, until the end of the test at the latest.
func pullPlane(t *testing.T, l *lab.Lab, plane int) {
	t.Helper()
	if err := l.PlaneDown(plane); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.PlaneUp(plane); err != nil {
			t.Error(err)
		}
	})
}

func planeThatGoesDownAndUpInMidTransferIsUsedAgain(t *testing.T, h [2]*host) {
	const plane = 1
	l := h[0].lab
	c := connect(t, h[0], h[1], outage(3*2)) // of two paths, three times
	traffic := keepBusy(t, bothWays(t, h, c, 1, mixed(1, pick[uint64](16<<20, 100<<10)))...)
	paths := [2][]int{onPlane(c[0], plane), onPlane(c[1], plane)}
	all := func(holds func(loader.TxPath) bool) bool {
		for i := range h {
			r := h[i].register(t, c[i])
			for _, path := range paths[i] {
				if !holds(r.Tx[path]) {
					return false
				}
			}
		}
		return true
	}
	for range pick(3, 1) {
		pullPlane(t, l, plane)
		traffic.waitFor(t, "paths given up", func() bool {
			return all(func(p loader.TxPath) bool { return p.State == loader.PathSuspect })
		})
		n := traffic.rounds()
		traffic.waitFor(t, "transfers over the planes that are left", func() bool { return traffic.rounds() > n+1 })
		if err := l.PlaneUp(plane); err != nil {
			t.Fatal(err)
		}
		traffic.waitFor(t, "paths back", func() bool {
			return all(func(p loader.TxPath) bool { return p.State == loader.PathActive })
		})
		var before [2]loader.Conn
		for i := range h {
			before[i] = h[i].register(t, c[i])
		}
		traffic.waitFor(t, "the plane used again", func() bool {
			for i := range h {
				r := h[i].register(t, c[i])
				for _, path := range paths[i] {
					was, is := &before[i].Tx[path], &r.Tx[path]
					if is.Sent-is.Probes < was.Sent-was.Probes+10 || is.Acks == was.Acks {
						return false
					}
				}
			}
			return true
		})
	}
	traffic.stop(t)
}

func planeThatIsDownFromTheBeginningIsDoneWithout(t *testing.T, h [2]*host) {
	pullPlane(t, h[0].lab, 1)
	c := connect(t, h[0], h[1], hardlyAny)
	exchange(t, bothWays(t, h, c, 3, mixed(3, pick[uint64](4<<20, 100<<10)))...)
}

func TestAllPlanesDownIsAnErrorAtTheRetryTimeThatNamesThePeer(t *testing.T) {
	const retryTime = 1500 * time.Millisecond
	l := newLab(t, lab.Config{Planes: 2})
	h := openPair(t, l, transport.Config{RetryTime: retryTime})
	c := connect(t, h[0], h[1], outage(8))
	d := newDirection(t, h[0], h[1], c[0], c[1], 1, []uint64{1 << 20, 1 << 20, 1 << 20})
	run(t, d) // so that something was heard
	for plane := range 2 {
		pullPlane(t, l, plane)
	}
	start := time.Now()
	for i := range 2 {
		if err := d.post(i); err != nil {
			t.Fatal(err)
		}
	}
	<-c[0].Done()
	took := time.Since(start)
	// The clock of the policy does not count when this program did not run: it may be late.
	if took < retryTime-retryTime/10 || took > 10*retryTime {
		t.Errorf("the connection failed after %v, want the retry time of %v", took, retryTime)
	}
	for i, want := range []core.Status{core.StatusRetryExceeded, core.StatusFlushed} {
		if got := next(t, c[0].SendCQ()); got.WRID != uint64(i) || got.Status != want {
			t.Errorf("request %d ended with %v, want request %d to end with %v", got.WRID, got.Status, i, want)
		}
	}
	re, ok := errors.AsType[*core.RetryExceededError](c[0].Err())
	if !ok {
		t.Fatalf("connection's error %v, want retry exceeded", c[0].Err())
	}
	if re.RetryTime != retryTime || re.QPN != c[1].Info().QPN || re.Outstanding == 0 || len(re.Paths) != 8 {
		t.Errorf("error %+v, want retry time %v, QPN %#x, packets outstanding and 8 paths", re, retryTime, c[1].Info().QPN)
	}
	for _, want := range []string{"198.18.0.2", "last heard on path", "198.18.1.2", "suspect"} {
		if !strings.Contains(re.Error(), want) {
			t.Errorf("error %q does not contain %q", re, want)
		}
	}
	for plane := range 2 {
		if err := l.PlaneUp(plane); err != nil {
			t.Fatal(err)
		}
	}
	// The message that ends the other side waits for TCP to try again.
	select {
	case <-c[1].Done():
	case <-time.After(patience):
		t.Fatal("the other end was not told")
	}
	if _, ok := errors.AsType[*transport.PeerFailedError](c[1].Err()); !ok && !errors.Is(c[1].Err(), transport.ErrPeerDied) {
		t.Errorf("the other end's error %v, want that its peer failed", c[1].Err())
	}
}

func TestHundredsOfRepairsQueuedOverSeveralPathsAreAllSent(t *testing.T) {
	l := newLab(t, lab.Config{Planes: 4})
	for _, c := range fewer(1, []struct {
		name  string
		paths int
	}{
		{"16 paths", 16},
		{"32 paths", 32},
	}) {
		t.Run(c.name, func(t *testing.T) {
			h := openPair(t, l, transport.Config{Paths: c.paths})
			conn := connect(t, h[0], h[1], whatIsLost(t, l))
			d := newDirection(t, h[0], h[1], conn[0], conn[1], 1, mixed(1, pick[uint64](32<<20, 1<<20)))
			traffic := keepBusy(t, d)
			for range pick(3, 1) {
				n := traffic.rounds()
				// Windows grow.
				traffic.waitFor(t, "a transfer", func() bool { return traffic.rounds() > n })
				// Probes are answered, so that the connection lives.
				if err := l.Script(nil, "drop data 1-1000000000"); err != nil {
					t.Fatal(err)
				}
				most, over := 0, 0
				traffic.waitFor(t, "more than 256 repairs queued", func() bool {
					r := h[0].register(t, conn[0])
					queued, paths := 0, 0
					for _, p := range r.Tx[:c.paths] {
						path := 0
						for _, w := range p.Repair {
							path += bits.OnesCount64(w)
						}
						queued += path
						if path > 0 {
							paths++
						}
					}
					if queued > most {
						most, over = queued, paths
					}
					return most > 256
				})
				t.Logf("%d repairs queued over %d paths", most, over)
				if over < 2 {
					t.Errorf("the repairs are all on one path")
				}
				if err := l.Script(nil, ""); err != nil {
					t.Fatal(err)
				}
			}
			placed := traffic.rounds()
			traffic.waitFor(t, "transfers after the outages", func() bool { return traffic.rounds() > placed })
			traffic.stop(t)
		})
	}
}
