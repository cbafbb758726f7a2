// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"slices"
	"testing"
)

func TestListsOfCPUsAreWrittenAsTheKernelDoesAndReadBack(t *testing.T) {
	for want, cpus := range map[string][]int{
		"0": {0}, "0-3": {0, 1, 2, 3}, "0-1,4,6-7": {0, 1, 4, 6, 7}, "5,7": {5, 7},
	} {
		if got := FormatCPUs(cpus); got != want {
			t.Errorf("%v is written as %q, want %q", cpus, got, want)
		}
		if got, err := parseCPUs(want); err != nil || !slices.Equal(got, cpus) {
			t.Errorf("%q is read as %v (%v), want %v", want, got, err, cpus)
		}
	}
	for _, bad := range []string{"", "x", "3-1", "0-", "0-9999999"} {
		if got, err := parseCPUs(bad); err == nil {
			t.Errorf("%q is read as %v, want an error", bad, got)
		}
	}
}

func TestPumpsOfOtherDevicesAreCountedWhereTheyArePinned(t *testing.T) {
	notShort(t)
	inNetns(t)
	const cpu = 777 // no real one: devices of other tests do not disturb
	a := mustLoad(t, Options{Interfaces: []string{planeA, peerA}})
	pin := func(pumps map[int]int) (Placement, error) { return Placement{CPUs: []int{cpu}, Pinned: true}, nil }
	if err := a.PlacePump(t.Context(), pin); err != nil {
		t.Fatal(err)
	}
	b := mustLoad(t, Options{Interfaces: []string{planeB}})
	seen := 0
	look := func(pumps map[int]int) (Placement, error) {
		seen = pumps[cpu]
		return Placement{CPUs: []int{0, 1}}, nil
	}
	if err := b.PlacePump(t.Context(), look); err != nil {
		t.Fatal(err)
	}
	if seen != 1 {
		t.Errorf("%d pumps seen on CPU %d, want one for the device of two interfaces", seen, cpu)
	}
	if err := a.PlacePump(t.Context(), look); err != nil {
		t.Fatal(err)
	}
	if seen != 0 {
		t.Errorf("%d pumps seen on CPU %d by the device itself, want none", seen, cpu)
	}
	if ow := b.Device().Owner; ow.PumpCPUs != "0-1" || ow.PumpCPU != nil {
		t.Errorf("recorded %q, %v; want 0-1 and not pinned", ow.PumpCPUs, ow.PumpCPU)
	}
}

func TestTransmitChannelsOfAVethAreItsQueues(t *testing.T) {
	inNetns(t)
	if got := channels(planeA); got != 1 {
		t.Errorf("%d channels, want 1", got)
	}
	if got := channels("nosuch0"); got != 0 {
		t.Errorf("%d channels of an interface that is not there, want 0", got)
	}
}
