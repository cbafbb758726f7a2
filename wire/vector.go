// SPDX-License-Identifier: Apache-2.0

package wire

import "math/bits"

// VectorBits is how many transmissions an ACK's vector covers.
const VectorBits = 256

// Vector is an ACK's arrival vector: bit i, that is bit i%64 of word i/64, says that pseq
// max - i arrived, where max travels beside it.
type Vector [4]uint64

// Bit says whether bit i is set; false beyond the vector.
func (v *Vector) Bit(i uint32) bool {
	return i < VectorBits && v[i/64]>>(i%64)&1 != 0
}

// Set sets bit i; beyond the vector it does nothing.
func (v *Vector) Set(i uint32) {
	if i < VectorBits {
		v[i/64] |= 1 << (i % 64)
	}
}

// Holds says whether pseq, at or before max, is marked arrived.
func (v *Vector) Holds(max, pseq uint32) bool { return v.Bit(max - pseq) }

// Shift moves every bit n places up: max has grown by n. What falls out is gone.
func (v *Vector) Shift(n uint32) {
	if n >= VectorBits {
		*v = Vector{}
		return
	}
	w, s := int(n/64), n%64
	for i := len(v) - 1; i >= 0; i-- {
		var x uint64
		if i >= w {
			x = v[i-w] << s
		}
		if i > w {
			x |= v[i-w-1] >> (64 - s) // a shift by 64 gives 0
		}
		v[i] = x
	}
}

// Mark records the arrival of pseq and returns the new max. gap says that pseq was not the
// next in the path's order.
func (v *Vector) Mark(max, pseq uint32) (newMax uint32, gap bool) {
	d := Diff(pseq, max)
	if d <= 0 {
		v.Set(max - pseq)
		return max, true
	}
	v.Shift(uint32(d))
	v.Set(0)
	return pseq, d != 1
}

// Count is how many bits are set.
func (v *Vector) Count() int {
	n := 0
	for _, w := range v {
		n += bits.OnesCount64(w)
	}
	return n
}
