// SPDX-License-Identifier: Apache-2.0

package wire_test

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/metaroce/metaroce/wire"
)

func TestLess_isSerial(t *testing.T) {
	tests := []struct {
		a, b uint32
		less bool
	}{
		{0, 1, true},
		{1, 0, false},
		{7, 7, false},
		{0xffffffff, 0, true},
		{0xfffffff0, 0x10, true},
		{0x10, 0xfffffff0, false},
		{0, 0x7fffffff, true},
		{0, 0x80000001, false},
	}
	for _, tt := range tests {
		if got := wire.Less(tt.a, tt.b); got != tt.less {
			t.Errorf("Less(%#x, %#x) = %v, want %v", tt.a, tt.b, got, tt.less)
		}
		if got, want := wire.LessEq(tt.a, tt.b), tt.less || tt.a == tt.b; got != want {
			t.Errorf("LessEq(%#x, %#x) = %v, want %v", tt.a, tt.b, got, want)
		}
	}
}

func TestDiff_crossesTheWrap(t *testing.T) {
	if got := wire.Diff(3, 0xfffffffe); got != 5 {
		t.Errorf("forward %d, want 5", got)
	}
	if got := wire.Diff(0xfffffffe, 3); got != -5 {
		t.Errorf("back %d, want -5", got)
	}
}

func TestGenDiff_isSerialIn8Bits(t *testing.T) {
	tests := []struct {
		a, b uint8
		want int
	}{{0, 0, 0}, {1, 0, 1}, {0, 255, 1}, {255, 0, -1}, {127, 0, 127}, {128, 0, -128}}
	for _, tt := range tests {
		if got := wire.GenDiff(tt.a, tt.b); got != tt.want {
			t.Errorf("GenDiff(%d, %d) = %d, want %d", tt.a, tt.b, got, tt.want)
		}
	}
}

func TestExpand24_findsTheNearest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		near := rapid.Uint32().Draw(t, "near")
		psn := near + uint32(rapid.Int32Range(-1<<23, 1<<23-1).Draw(t, "distance"))
		if got := wire.Expand24(near, psn&wire.PSNMask24); got != psn {
			t.Fatalf("%#x, want %#x", got, psn)
		}
	})
}

// The vector against a plain set of the numbers that arrived.
func TestVector_marksWhatArrivedInTheLast256(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		top := rapid.Uint32().Draw(t, "start")
		var v wire.Vector
		arrived := map[uint32]bool{}
		for range rapid.IntRange(1, 200).Draw(t, "packets") {
			step := rapid.OneOf(rapid.Just(int32(1)), rapid.Int32Range(-300, 300)).Draw(t, "step")
			pseq := top + uint32(step)
			was, ahead := top, max(step, 0)
			var gap bool
			top, gap = v.Mark(top, pseq)
			if top-pseq < wire.VectorBits { // else it is too old for the vector, and stays so
				arrived[pseq] = true
			}
			if wantGap := step != 1; gap != wantGap {
				t.Fatalf("pseq %#x after %#x: gap %v, want %v", pseq, was, gap, wantGap)
			}
			if want := was + uint32(ahead); top != want {
				t.Fatalf("max %#x, want %#x", top, want)
			}
		}
		for i := range uint32(wire.VectorBits) {
			if got, want := v.Holds(top, top-i), arrived[top-i]; got != want {
				t.Fatalf("bit %d is %v, but arrival of %#x %v", i, got, top-i, want)
			}
		}
		if n := countRecent(arrived, top); v.Count() != n {
			t.Fatalf("%d bits, want %d", v.Count(), n)
		}
		if v.Bit(wire.VectorBits) || v.Holds(top, top+1) {
			t.Fatal("a bit outside the vector is set")
		}
	})
}

// countRecent is how many of the numbers are among the last 256 before top.
func countRecent(arrived map[uint32]bool, top uint32) int {
	n := 0
	for pseq := range arrived {
		if top-pseq < wire.VectorBits {
			n++
		}
	}
	return n
}

func TestVectorShift_movesEveryBit(t *testing.T) {
	for n := range uint32(260) {
		for i := range uint32(wire.VectorBits) {
			var v, want wire.Vector
			v.Set(i)
			v.Shift(n)
			want.Set(i + n)
			if v != want {
				t.Fatalf("bit %d by %d: %x, want %x", i, n, v, want)
			}
		}
	}
}

func TestVectorMark_farAheadClearsTheVector(t *testing.T) {
	v := wire.Vector{^uint64(0), ^uint64(0), ^uint64(0), ^uint64(0)}
	max, gap := v.Mark(10, 10+wire.VectorBits)
	if max != 10+wire.VectorBits || !gap || v != (wire.Vector{1}) {
		t.Errorf("max %d, gap %v, vector %x", max, gap, v)
	}
}
