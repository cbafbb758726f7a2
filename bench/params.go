// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/metaroce/metaroce/transport/core"
)

// Test is what perf measures.
type Test uint8

// Tests.
const (
	WriteBWTest  Test = 1
	WriteLatTest Test = 2
)

// String gives the subcommand's name.
func (t Test) String() string {
	switch t {
	case WriteBWTest:
		return "write-bw"
	case WriteLatTest:
		return "write-lat"
	}
	return fmt.Sprintf("test %d", uint8(t))
}

// Params is what the client of a perf run decides and tells the server.
type Params struct {
	Test          Test
	AllSizes      bool          // 2, 4, ... 2^23 instead of Size
	Size          uint64        // bytes a message
	Iterations    int           // on each queue pair; 0 with Duration
	Duration      time.Duration // 0 with Iterations
	Warmup        time.Duration
	QPs           int // connections
	Depth         int // messages outstanding on each
	Bidirectional bool
	Completion    bool // write-lat: from post to completion, no ping-pong
}

// Bounds of Params.
const (
	MaxQPs          = 64
	maxAllSizesLog  = 23
	maxPerfDuration = 24 * time.Hour
	maxIterations   = 1 << 40
)

// Sizes lists the message sizes of a run in bytes, in order.
func (p Params) Sizes() []uint64 {
	if !p.AllSizes {
		return []uint64{p.Size}
	}
	var sizes []uint64
	for log := 1; log <= maxAllSizesLog; log++ {
		sizes = append(sizes, 1<<log)
	}
	return sizes
}

// maxSize is the largest of Sizes.
func (p Params) maxSize() uint64 {
	sizes := p.Sizes()
	return sizes[len(sizes)-1]
}

// stride is how far the landing areas of two queue pairs are apart in bytes.
func (p Params) stride() uint64 { return (p.maxSize() + 4095) &^ 4095 }

// pingPong says whether the server answers messages.
func (p Params) pingPong() bool { return p.Test == WriteLatTest && !p.Completion }

// Validate refuses what cannot be run, naming the item.
func (p Params) Validate() error {
	switch {
	case p.Test != WriteBWTest && p.Test != WriteLatTest:
		return fmt.Errorf("%v, want write-bw or write-lat", p.Test)
	case !p.AllSizes && (p.Size < 1 || p.Size > core.MaxRegion):
		return fmt.Errorf("size %d, want 1 to %d", p.Size, core.MaxRegion)
	case (p.Iterations > 0) == (p.Duration > 0):
		return fmt.Errorf("%d iterations and duration %v, want one of them", p.Iterations, p.Duration)
	case p.Iterations < 0 || p.Iterations > maxIterations:
		return fmt.Errorf("%d iterations, want 1 to %d", p.Iterations, maxIterations)
	case p.Duration < 0 || p.Duration > maxPerfDuration:
		return fmt.Errorf("duration %v, want at most %v", p.Duration, maxPerfDuration)
	case p.Warmup < 0 || p.Warmup > time.Minute:
		return fmt.Errorf("warm-up %v, want 0 to %v", p.Warmup, time.Minute)
	case p.QPs < 1 || p.QPs > MaxQPs:
		return fmt.Errorf("%d queue pairs, want 1 to %d", p.QPs, MaxQPs)
	case p.Depth < 1 || p.Depth > core.SQDepth:
		return fmt.Errorf("tx depth %d, want 1 to %d", p.Depth, core.SQDepth)
	case uint64(p.QPs)*p.stride() > core.MaxRegion:
		return fmt.Errorf("%d queue pairs with messages of %d bytes need %d bytes, want at most %d",
			p.QPs, p.maxSize(), uint64(p.QPs)*p.stride(), core.MaxRegion)
	case p.Test == WriteLatTest && p.QPs != 1:
		return fmt.Errorf("%d queue pairs, want 1 for write-lat", p.QPs)
	case p.Test == WriteLatTest && p.Bidirectional:
		return fmt.Errorf("bidirectional, want write-bw for that")
	case p.Test == WriteBWTest && p.Completion:
		return fmt.Errorf("completion, want write-lat for that")
	}
	return nil
}

// window is memory that a peer may write into.
type window struct {
	Addr uint64
	RKey uint32
}

// hello is what the client of a run says when it dials, for each queue pair.
type hello struct {
	Session uint64 // the same for all queue pairs of a run
	Index   int    // of the queue pair
	Landing window // zero where the server does not write
	Control window // one page
	Params  Params
}

// welcome is the server's answer.
type welcome struct {
	Landing window
	Control window
}

// perfMagic and perfVersion begin all private data; the version changes with its layout
// and with what the control messages mean.
const (
	perfMagic   = "MRPF"
	perfVersion = 1
)

const (
	flagAllSizes = 1 << iota
	flagBidirectional
	flagCompletion
	knownFlags = 1<<iota - 1
)

func (w window) append(b []byte) []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint64(b, w.Addr), w.RKey)
}

func (h hello) marshal() []byte {
	p := h.Params
	var flags byte
	for _, f := range []struct {
		on  bool
		bit byte
	}{{p.AllSizes, flagAllSizes}, {p.Bidirectional, flagBidirectional}, {p.Completion, flagCompletion}} {
		if f.on {
			flags |= f.bit
		}
	}
	b := append([]byte(perfMagic), 0, perfVersion, byte(p.Test), flags, byte(h.Index), byte(p.QPs))
	b = binary.BigEndian.AppendUint16(b, uint16(p.Depth))
	b = binary.BigEndian.AppendUint64(b, h.Session)
	b = binary.BigEndian.AppendUint64(b, p.Size)
	b = binary.BigEndian.AppendUint64(b, uint64(p.Iterations))
	b = binary.BigEndian.AppendUint64(b, uint64(p.Duration))
	b = binary.BigEndian.AppendUint64(b, uint64(p.Warmup))
	return h.Control.append(h.Landing.append(b))
}

// reader takes fields off the front of b; after a failure everything is zero.
type reader struct {
	b    []byte
	fail bool
}

func (r *reader) bytes(n int) []byte {
	if r.fail || len(r.b) < n {
		r.fail = true
		return make([]byte, n)
	}
	got := r.b[:n]
	r.b = r.b[n:]
	return got
}

func (r *reader) u8() byte       { return r.bytes(1)[0] }
func (r *reader) u16() uint16    { return binary.BigEndian.Uint16(r.bytes(2)) }
func (r *reader) u32() uint32    { return binary.BigEndian.Uint32(r.bytes(4)) }
func (r *reader) u64() uint64    { return binary.BigEndian.Uint64(r.bytes(8)) }
func (r *reader) window() window { return window{Addr: r.u64(), RKey: r.u32()} }

// header reads magic and version.
func (r *reader) header() error {
	if magic := r.bytes(len(perfMagic)); r.fail || string(magic) != perfMagic {
		return fmt.Errorf("private data begins with %q, want %q: the other end is not metaroce perf", magic, perfMagic)
	}
	if v := r.u16(); !r.fail && v != perfVersion {
		return fmt.Errorf("perf protocol version %d, want %d", v, perfVersion)
	}
	return nil
}

// end says whether exactly everything was read.
func (r *reader) end() error {
	if r.fail || len(r.b) != 0 {
		return fmt.Errorf("private data has the wrong length for perf protocol version %d", perfVersion)
	}
	return nil
}

func parseHello(b []byte) (hello, error) {
	r := &reader{b: b}
	if err := r.header(); err != nil {
		return hello{}, err
	}
	var h hello
	p := &h.Params
	p.Test = Test(r.u8())
	flags := r.u8()
	h.Index, p.QPs, p.Depth = int(r.u8()), int(r.u8()), int(r.u16())
	h.Session = r.u64()
	size, iterations, duration, warmup := r.u64(), r.u64(), r.u64(), r.u64()
	h.Landing, h.Control = r.window(), r.window()
	if err := r.end(); err != nil {
		return hello{}, err
	}
	p.AllSizes = flags&flagAllSizes != 0
	p.Bidirectional = flags&flagBidirectional != 0
	p.Completion = flags&flagCompletion != 0
	p.Size = size
	switch {
	case flags&^knownFlags != 0:
		return hello{}, fmt.Errorf("flags %#x, want some of %#x", flags, knownFlags)
	case iterations > maxIterations:
		return hello{}, fmt.Errorf("%d iterations, want at most %d", iterations, maxIterations)
	case duration > uint64(maxPerfDuration) || warmup > uint64(maxPerfDuration):
		return hello{}, fmt.Errorf("duration %d ns and warm-up %d ns, want at most %v", duration, warmup, maxPerfDuration)
	}
	p.Iterations, p.Duration, p.Warmup = int(iterations), time.Duration(duration), time.Duration(warmup)
	if err := p.Validate(); err != nil {
		return hello{}, err
	}
	if h.Index >= p.QPs {
		return hello{}, fmt.Errorf("queue pair %d of %d", h.Index, p.QPs)
	}
	return h, nil
}

func (w welcome) marshal() []byte {
	return w.Control.append(w.Landing.append(append([]byte(perfMagic), 0, perfVersion)))
}

func parseWelcome(b []byte) (welcome, error) {
	r := &reader{b: b}
	if err := r.header(); err != nil {
		return welcome{}, err
	}
	w := welcome{Landing: r.window(), Control: r.window()}
	return w, r.end()
}
