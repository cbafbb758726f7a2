// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
)

func mustSpec(t *testing.T) *ebpf.CollectionSpec {
	t.Helper()
	spec, err := loadMetaroce()
	if err != nil {
		t.Fatal(err)
	}
	return spec
}

func structOf(t *testing.T, spec *ebpf.CollectionSpec, name string) *btf.Struct {
	t.Helper()
	var s *btf.Struct
	if err := spec.Types.TypeByName(name, &s); err != nil {
		t.Fatalf("struct %s in BTF: %v", name, err)
	}
	return s
}

// goName is what bpf2go makes of a C field's name.
func goName(c string) string {
	var b strings.Builder
	for _, w := range strings.Split(c, "_") {
		if w != "" {
			b.WriteString(strings.ToUpper(w[:1]) + w[1:])
		}
	}
	return b.String()
}

func TestGoStructsHaveTheSizesAndOffsetsOfTheBPFObject(t *testing.T) {
	spec := mustSpec(t)
	for _, c := range []struct {
		c   string
		typ any
	}{
		{"mr_conn", Conn{}},
		{"mr_tx_path", TxPath{}},
		{"mr_rx_path", RxPath{}},
		{"mr_rx_stream", RxStream{}},
		{"mr_path", Path{}},
		{"mr_desc", Desc{}},
		{"mr_reqs", Reqs{}},
		{"mr_req", Reqs{}.Req[0]},
		{"mr_wqe", WQE{}},
		{"mr_scqe", SCQE{}},
		{"mr_rcqe", RCQE{}},
		{"mr_qpage", QPage{}},
		{"mr_region", Region{}},
		{"mr_pump", Pump{}},
		{"mr_event", Event{}},
		{"mr_egress", Egress{}},
		{"mr_ctl", Ctl{}},
		{"mr_counters", Counters{}},
	} {
		t.Run(c.c, func(t *testing.T) {
			s, typ := structOf(t, spec, c.c), reflect.TypeOf(c.typ)
			if uint32(typ.Size()) != s.Size {
				t.Errorf("size is %d in Go, %d in BPF", typ.Size(), s.Size)
			}
			for _, m := range s.Members {
				f, ok := typ.FieldByName(goName(m.Name))
				if !ok {
					t.Errorf("Go has no field for %s", m.Name)
					continue
				}
				size, err := btf.Sizeof(m.Type)
				if err != nil {
					t.Fatal(err)
				}
				if f.Offset != uintptr(m.Offset.Bytes()) || f.Type.Size() != uintptr(size) {
					t.Errorf("%s is %d bytes at %d in Go, %d at %d in BPF", m.Name, f.Type.Size(), f.Offset, size, m.Offset.Bytes())
				}
			}
		})
	}
}

func TestMapsHoldTheStructsThatUserSpaceReadsThere(t *testing.T) {
	spec := mustSpec(t)
	for name, want := range map[string]uintptr{
		"mr_conn": unsafe.Sizeof(Conn{}), "mr_path": unsafe.Sizeof(Path{}), "mr_req": unsafe.Sizeof(Reqs{}),
		"mr_region": unsafe.Sizeof(Region{}), "mr_pump": unsafe.Sizeof(Pump{}), "mr_counter": unsafe.Sizeof(Counters{}), "mr_egress": unsafe.Sizeof(Egress{}),
	} {
		m := spec.Maps[name]
		if m == nil {
			t.Errorf("no map %s", name)
			continue
		}
		if uintptr(m.ValueSize) != want {
			t.Errorf("values of %s have %d bytes, want %d", name, m.ValueSize, want)
		}
		if m.Value == nil {
			t.Errorf("map %s has no BTF: bpftool could not print its fields", name)
		}
	}
	if got := spec.Maps["mr_qp"].InnerMap.ValueSize; uintptr(got) != unsafe.Sizeof(QPage{}) {
		t.Errorf("queues have %d bytes, want %d", got, unsafe.Sizeof(QPage{}))
	}
	if got := spec.Maps["mr_mem"].InnerMap.ValueSize; got != BlockBytes {
		t.Errorf("blocks have %d bytes, want %d", got, BlockBytes)
	}
	for name := range spec.Maps {
		if strings.HasPrefix(name, "mr_") && len(name) > 15 {
			t.Errorf("name %s has %d characters, the kernel keeps 15", name, len(name))
		}
	}
}

// The budget is for what every connection has, besides its memory regions: state, requests, queues
// (mapped, so whole pages) and 8 entries of the path pool.
func TestMapMemoryOfAConnectionWithEightPathsIsAtMost64KiB(t *testing.T) {
	const paths, budget = 8, 64 << 10
	spec := mustSpec(t)
	page := uint32(os.Getpagesize())
	inner := spec.Maps["mr_qp"].InnerMap
	parts := map[string]uint32{
		"mr_conn":   spec.Maps["mr_conn"].ValueSize,
		"mr_req":    spec.Maps["mr_req"].ValueSize,
		"8 mr_path": paths * spec.Maps["mr_path"].ValueSize,
		"mr_qp":     (inner.ValueSize*inner.MaxEntries + page - 1) / page * page,
	}
	var sum uint32
	for _, n := range parts {
		sum += n
	}
	if sum > budget {
		t.Errorf("a connection takes %d bytes, want at most %d: %v", sum, budget, parts)
	}
}

func TestKernelsBefore61AreRefused(t *testing.T) {
	for _, c := range []struct {
		release string
		ok      bool
	}{
		{"6.1.0-13-amd64", true},
		{"6.1", true},
		{"6.12.9", true},
		{"7.0.0-rc1", true},
		{"6.2-rc3", true},
		{"6.0.19", false},
		{"5.15.0-91-generic", false},
		{"4.19", false},
		{"six", false},
		{"6", false},
	} {
		err := checkRelease(c.release)
		if c.ok && err != nil {
			t.Errorf("%s: %v", c.release, err)
		}
		if !c.ok {
			wantError(t, err, ErrUnsupported, c.release, "6.1")
		}
	}
}

func TestVerifierErrorSaysTheLastLinesAndKeepsTheLog(t *testing.T) {
	cause := errors.New("program mr_rx: load program: permission denied\nmore")
	err := &VerifierError{Err: cause, Log: []string{
		"0: R1=ctx()", "1: (61) r2 = *(u32 *)(r1 +4)", "2: (71) r0 = *(u8 *)(r2 +0)",
		"invalid access to packet, off=0 size=1, R2(id=0,off=0,r=0)", "R2 offset is outside of the packet",
		"verification time 12 usec", "stack depth 0+0", "processed 3 insns (limit 1000000)",
	}}
	wantError(t, err, cause, "mr_rx", "invalid access to packet", "R2 offset is outside of the packet")
	if s := err.Error(); strings.Contains(s, "R1=ctx()") || strings.Contains(s, "processed") {
		t.Errorf("message %q has more than the last lines", s)
	}
	full := fmt.Sprintf("%+v", err)
	for _, line := range err.Log {
		if !strings.Contains(full, line) {
			t.Errorf("%%+v lacks %q", line)
		}
	}
}

func TestBrokenProgramGivesAVerifierErrorWithItsLog(t *testing.T) {
	inNetns(t)
	spec := mustSpec(t)
	// Returns without setting R0.
	spec.Programs["mr_rx"].Instructions = asm.Instructions{asm.Return()}
	var objs metarocePrograms
	err := spec.LoadAndAssign(&objs, nil)
	if err == nil {
		_ = objs.Close()
		t.Fatal("the kernel takes a program without a result")
	}
	err = loadError(err)
	wantError(t, err, nil, "mr_rx", "R0")
	if ve, ok := errors.AsType[*VerifierError](err); !ok || len(ve.Log) == 0 {
		t.Errorf("error is %T, want a *VerifierError with the log", err)
	}
}
