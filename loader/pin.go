// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// stateMaps are the maps that are pinned, by name. Ring buffers are not: a second reader would
// take records away from the device.
func (o *Objects) stateMaps() map[string]*ebpf.Map {
	return map[string]*ebpf.Map{
		metaroceMapMrConn: o.Conn, metaroceMapMrPath: o.Path, metaroceMapMrReq: o.Req,
		metaroceMapMrQp: o.QP, metaroceMapMrRegion: o.Region, metaroceMapMrMem: o.Mem,
		metaroceMapMrPump: o.Pump, metaroceMapMrCounter: o.Counter, metaroceMapMrEgress: o.EgressMap,
	}
}

// pin pins the state maps all at once: into a directory that is renamed when it is complete.
// Further interfaces of the device get links to the first one's.
func (o *Objects) pin() error {
	key := o.owner.Device
	tmp, dir := filepath.Join(pinRoot, tmpPrefix+key), filepath.Join(pinRoot, key)
	o.onClose(func() error {
		err := errors.Join(os.RemoveAll(tmp), os.RemoveAll(dir))
		for _, itf := range o.Interfaces[1:] {
			err = errors.Join(err, os.RemoveAll(filepath.Join(pinRoot, deviceKey(o.Netns, itf.Name))))
		}
		if err != nil {
			return fmt.Errorf("remove the pins: %w", err)
		}
		// Stays while other devices have pins there.
		_ = unix.Rmdir(pinRoot)
		return nil
	})
	if err := mkdirPins(tmp); err != nil {
		return err
	}
	for name, m := range o.stateMaps() {
		if err := m.Pin(filepath.Join(tmp, name)); err != nil {
			return fmt.Errorf("pin map %s: %w", name, err)
		}
	}
	if err := unix.Renameat2(unix.AT_FDCWD, tmp, unix.AT_FDCWD, dir, unix.RENAME_NOREPLACE); err != nil {
		return fmt.Errorf("rename %s to %s: %w", tmp, dir, err)
	}
	for _, itf := range o.Interfaces[1:] {
		if err := os.Symlink(key, filepath.Join(pinRoot, deviceKey(o.Netns, itf.Name))); err != nil {
			return fmt.Errorf("link the pins of interface %s: %w", itf.Name, err)
		}
	}
	o.PinDir = dir
	return nil
}

// mkdirPins makes a directory whose parent another device's Close may remove meanwhile.
func mkdirPins(dir string) error {
	var err error
	for range 10 {
		if err = os.MkdirAll(dir, 0o700); !errors.Is(err, os.ErrNotExist) {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("make the directory of the pins: %w", err)
	}
	return nil
}

// Device is a device found by its pins.
type Device struct {
	Dir   string // directory of the pins
	Name  string // of the directory: <netns inode>-<first interface>
	Alive bool   // its process lives
	Owner Owner  // zero if the state file is gone
}

// Find lists all devices that have pins on this machine, in all network namespaces, by name. No
// device, and no BPF file system, is no error. A process in another mount namespace, as below
// `ip netns exec`, has its pins in a file system that only it sees: they are found by way of
// /proc/PID/root.
func Find() ([]Device, error) {
	entries, err := os.ReadDir(pinRoot)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("look for devices: %w", err)
	}
	here, _ := bpffsNumber()
	var devs []Device
	for _, e := range entries {
		if !e.IsDir() || strings.HasPrefix(e.Name(), tmpPrefix) {
			continue
		}
		d := Device{Dir: filepath.Join(pinRoot, e.Name()), Name: e.Name(), Alive: isLocked(statePath(e.Name()))}
		if ow, err := readOwner(e.Name()); err == nil {
			d.Owner = ow
		}
		if d.Alive && d.Owner.elsewhere(here) {
			continue // left by a crash: the device's own pins are not these
		}
		devs = append(devs, d)
	}
	away, err := findElsewhere(here)
	if err != nil {
		return nil, err
	}
	devs = append(devs, away...)
	slices.SortFunc(devs, func(a, b Device) int { return strings.Compare(a.Name, b.Name) })
	return devs, nil
}

// elsewhere says whether the device's pins are in another BPF file system than that of this number.
func (ow Owner) elsewhere(here uint64) bool { return ow.BPFFS != 0 && ow.BPFFS != here }

// findElsewhere lists the living devices whose pins are in other mount namespaces.
func findElsewhere(here uint64) ([]Device, error) {
	owners, err := liveOwners()
	if err != nil {
		return nil, err
	}
	var devs []Device
	for _, ow := range owners {
		if !ow.elsewhere(here) {
			continue
		}
		dir := filepath.Join("/proc", strconv.Itoa(ow.PID), "root", pinRoot, ow.Device)
		if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
			continue // it is being made, or closed
		}
		devs = append(devs, Device{Dir: dir, Name: ow.Device, Alive: true, Owner: ow})
	}
	return devs, nil
}

// Device describes this device as Find would.
func (o *Objects) Device() Device {
	o.mu.Lock()
	defer o.mu.Unlock()
	return Device{Dir: o.PinDir, Name: o.owner.Device, Alive: true, Owner: o.owner}
}

// PinRoot is where Find looks for pins.
func PinRoot() string { return pinRoot }

// RunRoot is where Find looks for processes that have their pins elsewhere.
func RunRoot() string { return runRoot }
