// SPDX-License-Identifier: Apache-2.0

package bpftest

import (
	"testing"

	"github.com/cilium/ebpf"
)

// The verifier gives up at 1 000 000 instructions. One careless branch behind a loop doubles what a
// program takes, so half of that is the budget.
const verifierBudget = 500_000

func TestVerifierWalksAreFarFromTheLimit(t *testing.T) {
	newWorld(t)
	o, err := load()
	if err != nil {
		t.Fatal(err)
	}
	for name, p := range map[string]*ebpf.Program{"mr_rx": o.Rx, "mr_tx": o.Tx, "mr_ctl": o.Control} {
		info, err := p.Info()
		if err != nil {
			t.Fatal(err)
		}
		n, ok := info.VerifiedInstructions() // Linux 5.16
		if !ok {
			t.Fatalf("%s: the kernel does not tell how far its verifier walked", name)
		}
		t.Logf("%s: %d instructions walked", name, n)
		if n > verifierBudget {
			t.Errorf("%s: %d instructions walked, want at most %d", name, n, verifierBudget)
		}
	}
}
