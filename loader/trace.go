// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"math"
	"os"

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
		if _, index := itf.Lower(); o.egressIn(list, index) < 0 {
			list = append(list, index)
		}
	}
	return list
}

func (o *Objects) egressIn(list []int, ifindex int) int {
	for i, index := range list {
		if index == ifindex {
			return i
		}
	}
	return -1
}

// Egress is the index in map mr_egress of the interface that packets leave by.
func (o *Objects) Egress(ifindex int) int {
	return min(max(o.egressIn(o.egresses(), ifindex), 0), MaxEgresses-1)
}

// fillEgresses writes which interface each entry of mr_egress belongs to.
func (o *Objects) fillEgresses() error {
	for i, ifindex := range o.egresses() {
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
			for _, f := range undo {
				err = errors.Join(err, f())
			}
			return
		}
		for _, f := range undo {
			o.onClose(f)
		}
	}()
	for i, ifindex := range o.egresses() {
		if err := objs.MrIfindex.Put(uint32(ifindex), uint32(min(i, MaxEgresses-1))); err != nil {
			return fmt.Errorf("write ifindex %d into mr_ifindex: %w", ifindex, err)
		}
	}
	for _, p := range []*ebpf.Program{objs.MrDevmapXmit, objs.MrBulkTx} {
		l, err := link.AttachTracing(link.TracingOptions{Program: p})
		if err != nil {
			return fmt.Errorf("attach %v: %w", p, rootErrno(err))
		}
		undo = append(undo, l.Close)
	}
	return nil
}
