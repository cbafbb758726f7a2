// SPDX-License-Identifier: Apache-2.0

package bpftest

import (
	"testing"

	"github.com/metaroce/metaroce/wire"
	"github.com/metaroce/metaroce/wire/wiretest"
)

// The golden vectors name connections that this world has not, so a good packet ends at
// "unknown QP"; what is refused before, mr_rx must refuse as package wire does.
func TestVectorsAreRefusedForTheReasonThatTheyTell(t *testing.T) {
	w := newWorld(t)
	counter := map[wire.Refusal]string{
		wire.ErrLength: "DropLength", wire.ErrTruncated: "DropTruncated", wire.ErrOpcode: "DropOpcode",
	}
	for _, v := range wiretest.Vectors(t) {
		if v.Port != port {
			continue
		}
		t.Run(v.Name, func(t *testing.T) {
			var ret uint32
			moved := w.counted(func() { ret, _ = w.rx(v.Frame) })
			if v.Refuse == wire.ErrNotOurs {
				if ret != xdpPass || len(moved) != 0 {
					t.Errorf("mr_rx returned %d, counted %v; want it passed and not counted", ret, moved)
				}
				return
			}
			want, ok := counter[v.Refuse]
			if v.Name == "bad_truncated_write_imm" {
				ok = false // the immediate's room is looked at with its packet's flags, later
			}
			if !ok {
				want = "DropUnknownQp"
			}
			if ret != xdpDrop || moved[want] != 1 || len(moved) != 1 {
				t.Errorf("mr_rx returned %d, counted %v; want XDP_DROP and one %s", ret, moved, want)
			}
		})
	}
}
