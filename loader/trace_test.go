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
