// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"os"
	"testing"
)

func TestDropsAreSeenWhereTheKernelHasBTF(t *testing.T) {
	inNetns(t)
	o := mustLoad(t, Options{Interfaces: []string{planeA, planeB}})
	_, err := os.Stat(kernelBTF)
	if want := err == nil; o.Traced != want {
		t.Errorf("tracing programs run: %v, want %v (%s: %v)", o.Traced, want, kernelBTF, err)
	}
	rings, err := o.State().Egresses()
	if err != nil {
		t.Fatal(err)
	}
	if len(rings) != 2 {
		t.Fatalf("%d transmit rings, want one an interface", len(rings))
	}
	for i, itf := range o.Interfaces {
		if rings[i].Ifindex != uint32(itf.Index) || rings[i].Traced != boolWord(o.Traced) || o.Egress(itf.Index) != i {
			t.Errorf("ring %d has ifindex %d, traced %d, and Egress says %d; want %s's %d, %d and %d",
				i, rings[i].Ifindex, rings[i].Traced, o.Egress(itf.Index), itf.Name, itf.Index, boolWord(o.Traced), i)
		}
	}
}

func TestWithoutKernelBTFEveryRingHasALimitFromTheStart(t *testing.T) {
	inNetns(t)
	real := kernelBTF
	kernelBTF = t.TempDir() + "/absent"
	t.Cleanup(func() { kernelBTF = real })
	o := mustLoad(t, Options{Interfaces: []string{planeA}})
	rings, err := o.State().Egresses()
	if err != nil {
		t.Fatal(err)
	}
	pump, err := o.State().Pump()
	if err != nil {
		t.Fatal(err)
	}
	if o.Traced || len(rings) != 1 || rings[0].Traced != 0 || pump.Limited&1 == 0 {
		t.Errorf("traced %v, rings %+v, limited %#x; want not traced, one ring, and its bit set", o.Traced, rings, pump.Limited)
	}
}

func TestTransmitRingFollowsAnInterfaceThatReturns(t *testing.T) {
	inNetns(t)
	o := mustLoad(t, Options{Interfaces: []string{planeA, planeB}})
	was, now := o.Interfaces[1].Index, 1<<20
	if err := o.moveEgress(was, now); err != nil {
		t.Fatal(err)
	}
	rings, err := o.State().Egresses()
	if err != nil {
		t.Fatal(err)
	}
	if len(rings) != 2 || rings[1].Ifindex != uint32(now) || rings[1].Traced != boolWord(o.Traced) || o.Egress(now) != 1 {
		t.Errorf("rings %+v, Egress says %d; want ring 1 to have ifindex %d and nothing else changed", rings, o.Egress(now), now)
	}
	if o.Traced {
		var index uint32
		if err := o.ifindexes.Lookup(uint32(now), &index); err != nil || index != 1 {
			t.Errorf("the tracing programs find ring %d (%v) for ifindex %d, want 1", index, err, now)
		}
		if err := o.ifindexes.Lookup(uint32(was), &index); err == nil {
			t.Errorf("the tracing programs still find ring %d for ifindex %d", index, was)
		}
	}
	if err := o.moveEgress(was, now); err == nil {
		t.Error("an interface that is none of the device's was moved")
	}
}
