// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/metaroce/metaroce/transport/core"
)

func validParams() Params {
	return Params{Test: WriteBWTest, Size: 65536, Iterations: 5000, Warmup: DefaultWarmup, QPs: 4, Depth: 128, Bidirectional: true}
}

func testHello() hello {
	return hello{
		Session: 0x1122334455667788, Index: 3, Params: validParams(),
		Landing: window{Addr: 1 << 40, RKey: 0x301}, Control: window{Addr: 2 << 40, RKey: 0x402},
	}
}

func TestHelloSurvivesThePrivateData(t *testing.T) {
	seconds := testHello()
	seconds.Params = Params{Test: WriteLatTest, AllSizes: true, Duration: 3 * time.Second, QPs: 1, Depth: 1, Completion: true}
	seconds.Index = 0
	for _, h := range []hello{testHello(), seconds} {
		b := h.marshal()
		if len(b) > core.MaxPrivate {
			t.Fatalf("private data of %d bytes, want at most %d", len(b), core.MaxPrivate)
		}
		got, err := parseHello(b)
		if err != nil {
			t.Fatal(err)
		}
		if got != h {
			t.Errorf("got %+v, want %+v", got, h)
		}
	}
}

func TestHelloIsRefused(t *testing.T) {
	edit := func(f func([]byte) []byte) []byte { return f(testHello().marshal()) }
	with := func(change func(*hello)) []byte {
		h := testHello()
		change(&h)
		return h.marshal()
	}
	for _, tc := range []struct {
		name string
		b    []byte
		want string
	}{
		{"nothing", nil, "not metaroce perf"},
		{"cp's", []byte("MRCP\x00\x01aaaa"), `"MRCP"`},
		{"another version", edit(func(b []byte) []byte { b[5] = 9; return b }), "perf protocol version 9, want 1"},
		{"short", edit(func(b []byte) []byte { return b[:len(b)-1] }), "wrong length"},
		{"long", edit(func(b []byte) []byte { return append(b, 0) }), "wrong length"},
		{"unknown flag", edit(func(b []byte) []byte { b[7] |= 0x80; return b }), "flags"},
		{"unknown test", edit(func(b []byte) []byte { b[6] = 77; return b }), "test 77"},
		{"index outside", with(func(h *hello) { h.Index = 4 }), "queue pair 4 of 4"},
		{"iterations beyond an int", with(func(h *hello) { h.Params.Iterations = math.MaxInt64 }), "iterations"},
		{"duration of a year", with(func(h *hello) { h.Params.Duration = 365 * 24 * time.Hour }), "duration"},
		{"size zero", with(func(h *hello) { h.Params.Size = 0 }), "size 0"},
		{"no queue pair", with(func(h *hello) { h.Params.QPs, h.Index = 0, 0 }), "0 queue pairs"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if _, err := parseHello(tc.b); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want one with %q", err, tc.want)
			}
		})
	}
}

func TestWelcomeSurvivesThePrivateData(t *testing.T) {
	w := welcome{Landing: window{Addr: math.MaxUint64, RKey: 7}, Control: window{Addr: 3, RKey: math.MaxUint32}}
	got, err := parseWelcome(w.marshal())
	if err != nil || got != w {
		t.Errorf("got %+v, error %v, want %+v", got, err, w)
	}
}

func TestParamsThatCannotBeRunAreRefused(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*Params)
		want   string
	}{
		{"iterations and duration", func(p *Params) { p.Duration = time.Second }, "want one of them"},
		{"neither", func(p *Params) { p.Iterations = 0 }, "want one of them"},
		{"depth beyond the queue", func(p *Params) { p.Depth = 129 }, "tx depth 129"},
		{"more memory than a region", func(p *Params) { p.Size = 1 << 29 }, "want at most 1073741824"},
		{"size that overflows", func(p *Params) { p.Size = math.MaxUint64 }, "size"},
		{"latency on two queue pairs", func(p *Params) { p.Test, p.Bidirectional = WriteLatTest, false }, "want 1 for write-lat"},
		{"latency in both directions", func(p *Params) { p.Test, p.QPs = WriteLatTest, 1 }, "bidirectional"},
		{"completion of bandwidth", func(p *Params) { p.Completion = true }, "write-lat"},
		{"negative warm-up", func(p *Params) { p.Warmup = -1 }, "warm-up"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := validParams()
			tc.change(&p)
			if err := p.Validate(); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want one with %q", err, tc.want)
			}
		})
	}
}

func TestAllSizesArePerftests(t *testing.T) {
	sizes := Params{AllSizes: true}.Sizes()
	if len(sizes) != 23 || sizes[0] != 2 || sizes[22] != 1<<23 {
		t.Errorf("sizes %v, want 2, 4, ... 2^23", sizes)
	}
}

func FuzzParseHello(f *testing.F) {
	f.Add(testHello().marshal())
	f.Add(welcome{}.marshal())
	f.Add([]byte("MRPF"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if h, err := parseHello(b); err == nil {
			if err := h.Params.Validate(); err != nil {
				t.Errorf("accepted %+v: %v", h, err)
			}
			if got := h.marshal(); string(got) != string(b) {
				t.Errorf("accepted %x, which says %x", b, got)
			}
		}
		if w, err := parseWelcome(b); err == nil && string(w.marshal()) != string(b) {
			t.Errorf("accepted %x, which says %x", b, w.marshal())
		}
	})
}
