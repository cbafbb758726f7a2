// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Placement is where a pump's thread may run.
type Placement struct {
	CPUs   []int // in order; one if it is pinned
	Pinned bool
}

// PlacePump calls choose with the number of pumps that are pinned to each CPU by other devices of this
// machine, and records what it says in the state files. Other devices choose before or after.
func (o *Objects) PlacePump(ctx context.Context, choose func(pumps map[int]int) (Placement, error)) error {
	release, err := lockRunRoot(ctx)
	if err != nil {
		return err
	}
	defer release()
	owners, err := liveOwners()
	if err != nil {
		return err
	}
	pumps := map[int]int{}
	for _, ow := range owners {
		if ow.PumpCPU != nil && ow.Device != o.owner.Device {
			pumps[*ow.PumpCPU]++
		}
	}
	p, err := choose(pumps)
	if err != nil {
		return err
	}
	o.mu.Lock()
	o.owner.PumpCPUs, o.owner.PumpCPU = FormatCPUs(p.CPUs), nil
	if p.Pinned {
		o.owner.PumpCPU = &p.CPUs[0]
	}
	o.mu.Unlock()
	return o.writeState()
}

// channels is how many transmit channels an interface has, 0 if its driver does not tell.
func channels(name string) int {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil || len(name) >= unix.IFNAMSIZ {
		return 0
	}
	defer func() { _ = unix.Close(s) }()
	// struct ethtool_channels
	c := struct{ cmd, maxRx, maxTx, maxOther, maxCombined, rx, tx, other, combined uint32 }{cmd: unix.ETHTOOL_GCHANNELS}
	ifr := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte // struct ifreq is 40 bytes on 64-bit machines
	}{data: unsafe.Pointer(&c)}
	copy(ifr.name[:], name)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(s), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&ifr)))
	runtime.KeepAlive(&c)
	if errno != 0 {
		return 0
	}
	return int(c.tx + c.combined)
}

// numaCPUs lists the CPUs of the NUMA node that an interface's device is on, nil if it has none. It
// goes by the PCI address: /sys/class/net shows the interfaces of another network namespace.
func numaCPUs(name string) []int {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	defer func() { _ = unix.Close(s) }()
	info, err := unix.IoctlGetEthtoolDrvinfo(s, name)
	if err != nil {
		return nil
	}
	bus := unix.ByteSliceToString(info.Bus_info[:])
	if bus == "" || strings.Contains(bus, "/") {
		return nil
	}
	node, err := os.ReadFile(filepath.Join("/sys/bus/pci/devices", bus, "numa_node"))
	if err != nil {
		return nil
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(node)))
	if err != nil || n < 0 {
		return nil
	}
	list, err := os.ReadFile(fmt.Sprintf("/sys/devices/system/node/node%d/cpulist", n))
	if err != nil {
		return nil
	}
	cpus, err := parseCPUs(strings.TrimSpace(string(list)))
	if err != nil {
		return nil
	}
	return cpus
}

// FormatCPUs writes a list in order as the kernel does: 0-3,8.
func FormatCPUs(cpus []int) string {
	var b strings.Builder
	for i := 0; i < len(cpus); {
		last := i
		for last+1 < len(cpus) && cpus[last+1] == cpus[last]+1 {
			last++
		}
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.Itoa(cpus[i]))
		if last > i {
			b.WriteString("-" + strconv.Itoa(cpus[last]))
		}
		i = last + 1
	}
	return b.String()
}

// parseCPUs reads a list as the kernel writes it.
func parseCPUs(list string) ([]int, error) {
	var cpus []int
	for part := range strings.SplitSeq(list, ",") {
		from, to, ranged := strings.Cut(part, "-")
		if !ranged {
			to = from
		}
		a, err := strconv.Atoi(from)
		if err != nil {
			return nil, fmt.Errorf("list of CPUs %q: %w", list, err)
		}
		b, err := strconv.Atoi(to)
		if err != nil || b < a || b > 1<<16 {
			return nil, fmt.Errorf("list of CPUs %q: range %q", list, part)
		}
		for ; a <= b; a++ {
			cpus = append(cpus, a)
		}
	}
	return cpus, nil
}
