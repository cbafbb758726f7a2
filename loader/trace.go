// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// MaxEgresses bounds the transmit rings that are told apart (MR_EGRESSES). Interfaces beyond share
// the last one's entry.
const MaxEgresses = 64

// kernelBTF is what the tracing programs need of the kernel, and without which drops are not seen.
var kernelBTF = "/sys/kernel/btf/vmlinux"

// egresses are the interfaces that packets leave by, by index in map mr_egress: each plane's, or
// the parent of a VLAN interface, once.
func (o *Objects) egresses() []int {
	var list []int
	for _, itf := range o.Interfaces {
		if _, index := itf.Lower(); !slices.Contains(list, index) {
			list = append(list, index)
		}
	}
	return list
}

// Egress is the index in map mr_egress of the interface that packets leave by.
func (o *Objects) Egress(ifindex int) int {
	return min(max(slices.Index(o.rings, ifindex), 0), MaxEgresses-1)
}

// moveEgress tells the transmit ring of interface `was` that the interface has returned as `now`: what
// was learnt and counted stays. Not concurrently with itself, nor with Egress.
func (o *Objects) moveEgress(was, now int) error {
	if was == now {
		return nil // only the program was attached again
	}
	i := slices.Index(o.rings, was)
	if i < 0 {
		return fmt.Errorf("transmit ring of ifindex %d: not one of %v", was, o.rings)
	}
	index := min(i, MaxEgresses-1)
	if o.ifindexes != nil {
		if err := o.ifindexes.Put(uint32(now), uint32(index)); err != nil {
			return fmt.Errorf("write ifindex %d into mr_ifindex: %w", now, err)
		}
		if err := o.ifindexes.Delete(uint32(was)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("delete ifindex %d from mr_ifindex: %w", was, err)
		}
	}
	o.rings[i] = now
	if i != index {
		return nil // it shares the last entry, which is another one's
	}
	// The entry's other words belong to others, so it cannot be written as a whole.
	mem, err := Mmap(o.EgressMap)
	if err != nil {
		return err
	}
	entries := unsafe.Slice((*Egress)(unsafe.Pointer(&mem[0])), o.EgressMap.MaxEntries())
	atomic.StoreUint32(&entries[index].Ifindex, uint32(now))
	return Munmap(mem)
}

// fillEgresses writes which interface each entry of mr_egress belongs to.
func (o *Objects) fillEgresses() error {
	for i, ifindex := range o.rings {
		if i >= MaxEgresses {
			break
		}
		e := Egress{Ifindex: uint32(ifindex), Traced: boolWord(o.Traced)}
		if err := o.EgressMap.Put(uint32(i), &e); err != nil {
			return fmt.Errorf("write entry %d of mr_egress: %w", i, err)
		}
	}
	if o.Traced {
		return nil
	}
	// Nobody will see a drop, so every ring has a limit from the start.
	if err := o.Pump.Put(uint32(0), &Pump{Limited: math.MaxUint64}); err != nil {
		return fmt.Errorf("write mr_pump: %w", err)
	}
	return nil
}

func boolWord(b bool) uint32 {
	if b {
		return 1
	}
	return 0
}

// trace attaches the programs that see what the drivers drop, which is a comfort: where the kernel
// has no BTF, or refuses them for another reason, the device runs without and says so.
func (o *Objects) trace() error {
	o.rings = o.egresses()
	err := o.attachTracing()
	if err != nil {
		o.log.Warn("what full transmit rings drop is not seen", "error", err)
	}
	o.Traced = err == nil
	return o.fillEgresses()
}

func (o *Objects) attachTracing() (err error) {
	if _, err := os.Stat(kernelBTF); err != nil {
		return fmt.Errorf("the kernel's BTF: %w", err)
	}
	spec, err := loadMrtrace()
	if err != nil {
		return fmt.Errorf("read the embedded BPF object of the tracing programs: %w", err)
	}
	if err := spec.Variables[mrtraceVarMrNetns].Set(uint32(o.Netns)); err != nil {
		return fmt.Errorf("set %s: %w", mrtraceVarMrNetns, err)
	}
	spec.Maps[mrtraceMapMrEgress].MaxEntries = o.EgressMap.MaxEntries()
	var objs mrtraceObjects
	err = spec.LoadAndAssign(&objs, &ebpf.CollectionOptions{MapReplacements: map[string]*ebpf.Map{
		mrtraceMapMrEgress: o.EgressMap, mrtraceMapMrCounter: o.Counter, mrtraceMapMrPump: o.Pump,
	}})
	if err != nil {
		return loadError(err)
	}
	undo := []func() error{objs.Close}
	defer func() {
		if err != nil {
			o.ifindexes = nil
			for _, f := range undo {
				err = errors.Join(err, f())
			}
			return
		}
		for _, f := range undo {
			o.onClose(f)
		}
	}()
	for i, ifindex := range o.rings {
		if err := objs.MrIfindex.Put(uint32(ifindex), uint32(min(i, MaxEgresses-1))); err != nil {
			return fmt.Errorf("write ifindex %d into mr_ifindex: %w", ifindex, err)
		}
	}
	o.ifindexes = objs.MrIfindex
	for _, p := range []*ebpf.Program{objs.MrDevmapXmit, objs.MrBulkTx} {
		l, err := link.AttachTracing(link.TracingOptions{Program: p})
		if err != nil {
			return fmt.Errorf("attach %v: %w", p, rootErrno(err))
		}
		undo = append(undo, l.Close)
	}
	return nil
}
