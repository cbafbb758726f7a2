// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/loader"
)

// takesAnyCPU are the drivers that send redirected frames from every CPU: they take its number modulo
// their queues, or share queues under a lock. All others are thought to do as mlx5 and i40e do, which
// refuse the frames of a CPU whose number is not below that of their channels, without a word.
var takesAnyCPU = map[string]bool{
	"veth": true, "virtio_net": true, "tun": true, "vmxnet3": true, "bnxt_en": true, "ena": true,
	"ixgbe": true, "igb": true, "igc": true, "gve": true, "hv_netvsc": true, "atlantic": true,
}

// placePump says on which CPUs the pump may run. A path is first-in first-out only if its packets
// leave by one queue, and the queue follows the CPU: with several, the pump is pinned to one CPU, of
// the interfaces' NUMA node if one is allowed there, and where fewest pumps are pinned already.
// allowed is in order; want is the configured CPU, nil to choose.
func placePump(planes []loader.Interface, allowed []int, pumps map[int]int, want *int) (loader.Placement, error) {
	cpus := slices.Clone(allowed)
	pinned := false
	var local []int
	for _, p := range planes {
		pinned = pinned || p.Channels > 1
		local = append(local, p.NUMACPUs...)
		if p.Channels == 0 || takesAnyCPU[p.Driver] {
			continue
		}
		cpus = slices.DeleteFunc(cpus, func(cpu int) bool { return cpu >= p.Channels })
		if len(cpus) == 0 {
			name, _ := p.Lower()
			return loader.Placement{}, fmt.Errorf(
				"pump: interface %s (driver %s) has %d channels and sends from CPUs below that only, and this process may run on CPUs %s, want one in common: more channels (ethtool -L %s combined N) or another affinity (taskset): %w",
				name, p.Driver, p.Channels, loader.FormatCPUs(allowed), name, loader.ErrUnsupported)
		}
	}
	switch {
	case want != nil && !slices.Contains(cpus, *want):
		return loader.Placement{}, fmt.Errorf("pump: CPU %d is asked for, want one of %s, which this process may use and the interfaces' drivers send from (%s)",
			*want, loader.FormatCPUs(cpus), channelList(planes))
	case want != nil:
		return loader.Placement{CPUs: []int{*want}, Pinned: true}, nil
	case !pinned:
		return loader.Placement{CPUs: cpus, Pinned: len(cpus) == 1 && len(allowed) > 1}, nil
	}
	candidates := slices.DeleteFunc(slices.Clone(cpus), func(cpu int) bool { return !slices.Contains(local, cpu) })
	if len(candidates) == 0 {
		candidates = cpus
	}
	best := candidates[0]
	for _, cpu := range candidates {
		// CPU 0 has most of the interrupts of a machine that nobody tuned, so equals go to the last.
		if pumps[cpu] <= pumps[best] {
			best = cpu
		}
	}
	return loader.Placement{CPUs: []int{best}, Pinned: true}, nil
}

func channelList(planes []loader.Interface) string {
	var list []string
	for _, p := range planes {
		name, _ := p.Lower()
		list = append(list, fmt.Sprintf("%s: driver %s, %d channels", name, p.Driver, p.Channels))
	}
	return strings.Join(list, "; ")
}

// choosePumpCPUs places the engine's pump.
func (e *Engine) choosePumpCPUs(ctx context.Context) error {
	allowed, err := affinity()
	if err != nil {
		return err
	}
	return e.reg.PlacePump(ctx, func(pumps map[int]int) (loader.Placement, error) {
		p, err := placePump(e.reg.Interfaces, allowed, pumps, e.cfg.PumpCPU)
		if err == nil && !slices.Equal(p.CPUs, allowed) {
			e.pump.cpus = p.CPUs
		}
		return p, err
	})
}

// placeAgain places the pump anew for interfaces of which one has returned, maybe with other channels. The
// pump stays where it is if it can. The router's worker calls it.
func (e *Engine) placeAgain(ctx context.Context, planes []loader.Interface) error {
	allowed, err := affinity()
	if err != nil {
		return err
	}
	var cpus []int
	err = e.reg.PlacePump(ctx, func(pumps map[int]int) (loader.Placement, error) {
		p, err := stayOrPlace(planes, allowed, pumps, e.cfg.PumpCPU, e.pump.cpus)
		cpus = p.CPUs
		return p, err
	})
	if err != nil {
		return err
	}
	return e.pump.move(cpus)
}

// stayOrPlace is placePump for a pump that runs on now, nil for wherever it is allowed.
func stayOrPlace(planes []loader.Interface, allowed []int, pumps map[int]int, want *int, now []int) (loader.Placement, error) {
	if len(now) == 1 && want == nil {
		if p, err := placePump(planes, allowed, pumps, &now[0]); err == nil {
			return p, nil
		}
	}
	return placePump(planes, allowed, pumps, want)
}

// affinity lists the CPUs that the calling thread may use, in order.
func affinity() ([]int, error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil, fmt.Errorf("ask for the CPUs that this process may use: %w", err)
	}
	var cpus []int
	for cpu := range len(set) * 64 {
		if set.IsSet(cpu) {
			cpus = append(cpus, cpu)
		}
	}
	return cpus, nil
}

// bind keeps the calling thread on the pump's CPUs.
func (p *pump) bind() error {
	if p.cpus == nil {
		return nil
	}
	return setAffinity(0, p.cpus)
}

// move keeps the pump's thread on other CPUs from now on. Not concurrently with itself.
func (p *pump) move(cpus []int) error {
	if slices.Equal(cpus, p.cpus) {
		return nil
	}
	if err := setAffinity(int(p.tid.Load()), cpus); err != nil {
		return err
	}
	p.cpus = cpus
	return nil
}

func setAffinity(tid int, cpus []int) error {
	var set unix.CPUSet
	for _, cpu := range cpus {
		set.Set(cpu)
	}
	if err := unix.SchedSetaffinity(tid, &set); err != nil {
		return fmt.Errorf("pump: run on CPUs %s: %w", loader.FormatCPUs(cpus), err)
	}
	return nil
}
