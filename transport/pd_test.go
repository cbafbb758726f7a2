// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/metaroce/metaroce/transport/core"
)

// newPD makes a domain with memory of 8 bytes in it.
func newPD(t *testing.T, d *Device) (*PD, *Memory) {
	t.Helper()
	p, err := d.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	return p, allocIn(t, p)
}

func allocIn(t *testing.T, p *PD) *Memory {
	t.Helper()
	m, err := p.AllocMemory(8, core.LocalWrite|core.RemoteWrite)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// written posts a write of c and returns its status.
func written(t *testing.T, c *Conn, src, dst *Memory) core.Status {
	t.Helper()
	write(t, c, 0, src, dst, 8)
	return collect(t, c.SendCQ(), 1)[0].Status
}

func TestPeerReachesTheMemoryOfItsConnectionsDomainAlone(t *testing.T) {
	for _, tc := range []struct {
		name   string
		accept func(shared *PD) []ConnOption
		memory func(shared *Memory, b, other *Conn) *Memory
		want   core.Status
	}{
		{
			"own domain", func(*PD) []ConnOption { return nil },
			func(_ *Memory, b, _ *Conn) *Memory { return allocIn(t, b.PD()) }, core.StatusSuccess,
		},
		{
			"shared domain", func(p *PD) []ConnOption { return []ConnOption{WithPD(p)} },
			func(shared *Memory, _, _ *Conn) *Memory { return shared }, core.StatusSuccess,
		},
		{
			"own domain of another connection", func(*PD) []ConnOption { return nil },
			func(_ *Memory, _, other *Conn) *Memory { return allocIn(t, other.PD()) }, core.StatusRemAccess,
		},
		{
			"shared domain that it is not in", func(*PD) []ConnOption { return nil },
			func(shared *Memory, _, _ *Conn) *Memory { return shared }, core.StatusRemAccess,
		},
		{
			"own domain of another one, from the shared one", func(p *PD) []ConnOption { return []ConnOption{WithPD(p)} },
			func(_ *Memory, _, other *Conn) *Memory { return allocIn(t, other.PD()) }, core.StatusRemAccess,
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFabric(t)
			da, _ := newTestDevice(t, f)
			db, _ := newTestDevice(t, f)
			pd, shared := newPD(t, db)
			a, b := connectPD(t, da, db, nil, tc.accept(pd))
			_, other := connectPD(t, da, db, nil, nil)
			if got := written(t, a, allocIn(t, a.PD()), tc.memory(shared, b, other)); got != tc.want {
				t.Errorf("write: %v, want %v", got, tc.want)
			}
		})
	}
}

func TestConnectionWithoutDomainGetsItsOwn(t *testing.T) {
	f := newFabric(t)
	da, _ := newTestDevice(t, f)
	db, _ := newTestDevice(t, f)
	seen := map[*PD]bool{}
	for range 3 {
		a, _ := connectPD(t, da, db, nil, nil)
		if a.PD() == nil || seen[a.PD()] {
			t.Fatalf("domain %v, want a new one", a.PD())
		}
		seen[a.PD()] = true
	}
}

func TestPostRefusesMemoryOfAnotherDomain(t *testing.T) {
	f := newFabric(t)
	da, _ := newTestDevice(t, f)
	db, _ := newTestDevice(t, f)
	_, foreign := newPD(t, da)
	a, b := connectPD(t, da, db, nil, nil)
	dst := allocIn(t, b.PD())
	err := a.PostWrite(WriteRequest{Local: foreign, Length: 8, RemoteAddr: dst.Addr(), RKey: dst.RKey()})
	if err == nil || !strings.Contains(err.Error(), "want the connection's") {
		t.Errorf("error %v, want one that names both domains", err)
	}
	if got := written(t, a, allocIn(t, a.PD()), dst); got != core.StatusSuccess {
		t.Errorf("write after it: %v", got)
	}
}

func TestDomainStaysWhileItIsUsed(t *testing.T) {
	f := newFabric(t)
	da, _ := newTestDevice(t, f)
	db, _ := newTestDevice(t, f)
	p, m := newPD(t, da)
	a, _ := connectPD(t, da, db, []ConnOption{WithPD(p)}, nil)
	closing := func(want string) {
		t.Helper()
		if err := p.Close(); !errors.Is(err, ErrPDInUse) || !strings.Contains(err.Error(), want) {
			t.Errorf("Close says %v, want ErrPDInUse by %s", err, want)
		}
	}
	closing("1 memory region and 1 connection")
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	closing("1 connection")
	if err := a.Close(testCtx(t)); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := p.Close(); err != nil {
			t.Errorf("Close says %v, want nil", err)
		}
	}
	if _, err := p.AllocMemory(8, 0); !errors.Is(err, ErrClosed) {
		t.Errorf("AllocMemory says %v, want ErrClosed", err)
	}
	if _, err := da.Dial(testCtx(t), "127.0.0.1:1", nil, WithPD(p)); !errors.Is(err, ErrClosed) {
		t.Errorf("Dial says %v, want ErrClosed", err)
	}
}

func TestDomainOfAnotherDeviceIsRefused(t *testing.T) {
	f := newFabric(t)
	da, _ := newTestDevice(t, f)
	db, _ := newTestDevice(t, f)
	p, _ := newPD(t, db)
	if _, err := da.Dial(testCtx(t), "127.0.0.1:1", nil, WithPD(p)); err == nil || !strings.Contains(err.Error(), "of another device") {
		t.Errorf("Dial says %v, want one that says so", err)
	}
	l := listen(t, da)
	dialled := make(chan error, 1)
	go func() {
		_, err := db.Dial(testCtx(t), l.Addr().String(), nil)
		dialled <- err
	}()
	in, err := l.Accept(testCtx(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := in.Accept(testCtx(t), nil, WithPD(p)); err == nil || !strings.Contains(err.Error(), "of another device") {
		t.Errorf("Accept says %v, want one that says so", err)
	}
	var re *RejectedError
	if err := <-dialled; !errors.As(err, &re) {
		t.Errorf("the peer hears %v, want a RejectedError", err)
	}
}

// domains counts those that a device has.
func domains(d *Device) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.pds)
}

func TestOwnDomainEndsWithItsLastUser(t *testing.T) {
	for _, tc := range []struct {
		name       string
		memoryLast bool
	}{{"the connection", false}, {"the memory", true}} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFabric(t)
			da, _ := newTestDevice(t, f)
			db, _ := newTestDevice(t, f)
			a, _ := connectPD(t, da, db, nil, nil)
			m := allocIn(t, a.PD())
			ends := []func() error{m.Close, func() error { return a.Close(testCtx(t)) }}
			if tc.memoryLast {
				ends[0], ends[1] = ends[1], ends[0]
			}
			for i, end := range ends {
				if n := domains(da); n != 1 {
					t.Errorf("%d domains before end %d, want 1", n, i)
				}
				if err := end(); err != nil {
					t.Fatal(err)
				}
			}
			if n := domains(da); n != 0 {
				t.Errorf("%d domains left", n)
			}
			if _, err := a.PD().AllocMemory(8, 0); !errors.Is(err, ErrClosed) {
				t.Errorf("AllocMemory says %v, want ErrClosed", err)
			}
		})
	}
}

func TestConnectionThatComesToNothingLeavesNoDomain(t *testing.T) {
	f := newFabric(t)
	da, ea := newTestDevice(t, f)
	da.limits.start = 10 * time.Millisecond
	db, eb := newTestDevice(t, f)
	p, _ := newPD(t, da)
	l := listen(t, db)
	for _, breaks := range []func(){
		func() { eb.startErr = errors.New("no route") },
		func() { eb.startErr, ea.startWaits = nil, true },
		func() { ea.connErr = errors.New("table full") },
	} {
		breaks()
		for _, opts := range [][]ConnOption{nil, {WithPD(p)}} {
			done := make(chan struct{})
			go func() {
				defer close(done)
				ctx := testCtx(t)
				if ea.connErr != nil {
					return // nobody calls
				}
				if in, err := l.Accept(ctx); err == nil {
					_, _ = in.Accept(ctx, nil)
				}
			}()
			if _, err := da.Dial(testCtx(t), l.Addr().String(), nil, opts...); err == nil {
				t.Error("Dial gives a connection")
			}
			<-done
		}
	}
	if n, m := domains(da), domains(db); n != 1 || m != 0 {
		t.Errorf("%d and %d domains left, want 1, which the test made, and 0", n, m)
	}
	if err := p.Close(); !errors.Is(err, ErrPDInUse) || strings.Contains(err.Error(), "connection") {
		t.Errorf("Close says %v, want ErrPDInUse by memory alone", err)
	}
}

func TestDomainsNumbersAreNotUsedTwice(t *testing.T) {
	d, _ := newTestDevice(t, newFabric(t))
	first, err := d.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	d.mu.Lock()
	d.lastPD = 1<<32 - 2
	d.mu.Unlock()
	seen := map[uint32]bool{0: true, first.id: true} // 0 is none
	for range 3 {
		p, err := d.AllocPD()
		if err != nil {
			t.Fatal(err)
		}
		if seen[p.id] {
			t.Errorf("domain %d is there already", p.id)
		}
		seen[p.id] = true
	}
}
