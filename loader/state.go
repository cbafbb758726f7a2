// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	bpffsRoot = "/sys/fs/bpf"
	pinRoot   = bpffsRoot + "/metaroce"
	runRoot   = "/run/metaroce"

	stateSuffix = ".json"
	tmpPrefix   = "tmp-"

	// claimWait bounds how long Load waits for another Load to finish claiming.
	claimWait = 5 * time.Second
)

// Owner is the content of an interface's state file under /run/metaroce. The owner holds a lock on
// the file as long as it lives; a file that nobody locks was left by a crash.
type Owner struct {
	PID        int         `json:"pid"`
	Device     string      `json:"device"` // name of the directory with the pins
	Netns      uint64      `json:"netns"`  // inode
	Interfaces []Interface `json:"interfaces"`
	Port       uint16      `json:"port"` // UDP
	Parked     string      `json:"parked"`
	MaxConns   int         `json:"max_conns"`
	PathPool   int         `json:"path_pool"`
	MaxRegions int         `json:"max_regions"`
	Since      time.Time   `json:"since"`
	BPFFS      uint64      `json:"bpffs"` // number of the file system that has the pins

	// Where the pump's thread may run, as in /proc/PID/status; and the one CPU if it is pinned.
	PumpCPUs string `json:"pump_cpus,omitempty"`
	PumpCPU  *int   `json:"pump_cpu,omitempty"`
}

// deviceKey names an interface beyond its namespace. A BPF file system takes no dots in names,
// interfaces take no colons in theirs.
func deviceKey(netns uint64, itf string) string {
	return strconv.FormatUint(netns, 10) + "-" + strings.ReplaceAll(itf, ".", ":")
}

func statePath(key string) string { return filepath.Join(runRoot, key+stateSuffix) }

// slot is an interface that a device claims.
type slot struct{ name, label string }

// slots are the device's interfaces, and the parents of those that are VLAN interfaces: whoever has a
// parent's XDP program has all of its VLANs.
func (o *Objects) slots() []slot {
	var slots []slot
	for _, itf := range o.Interfaces {
		slots = append(slots, slot{itf.Name, "interface " + itf.Name})
		if lower, _ := itf.Lower(); !slices.ContainsFunc(slots, func(s slot) bool { return s.name == lower }) {
			slots = append(slots, slot{lower, itf.label()})
		}
	}
	return slots
}

// claim locks every interface for this process, or names the process that has it, and then removes
// whatever dead processes left.
func (o *Objects) claim(ctx context.Context, nl *netlink.Handle) error {
	if err := os.MkdirAll(runRoot, 0o755); err != nil {
		return fmt.Errorf("make the directory of state files: %w", err)
	}
	release, err := lockRunRoot(ctx)
	if err != nil {
		return err
	}
	defer release()

	o.owner = Owner{
		PID: os.Getpid(), Device: deviceKey(o.Netns, o.Interfaces[0].Name), Netns: o.Netns,
		Interfaces: o.Interfaces, Port: o.Port, Parked: parkedName(o.Interfaces[0].Index),
		MaxConns: o.MaxConns, PathPool: o.PathPool, MaxRegions: o.MaxRegions,
		Since: time.Now().UTC().Truncate(time.Second),
	}
	if o.owner.BPFFS, err = bpffsNumber(); err != nil {
		return err
	}
	mine := map[string]bool{}
	for _, s := range o.slots() {
		key := deviceKey(o.Netns, s.name)
		f, err := tryLock(statePath(key), true)
		if errors.Is(err, errLocked) {
			return fmt.Errorf("%s: metaroce process %s has it, want it free: %w", s.label, ownerPID(key), ErrInUse)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", s.label, err)
		}
		mine[key] = true
		// The predecessor's state is gone once ours is written: clean up after it first.
		if err := o.removeLeftovers(key); err != nil {
			_ = f.Close()
			return err
		}
		o.onClose(func() error {
			// Unlinked while locked, so that nobody takes this file for a crash's.
			return errors.Join(removeFile(f.Name()), f.Close())
		})
		o.stateFiles = append(o.stateFiles, f)
	}
	if err := o.writeState(); err != nil {
		return err
	}
	return o.collectGarbage(nl, mine)
}

// writeState writes the owner into each of the device's state files.
func (o *Objects) writeState() error {
	o.mu.Lock()
	content, err := json.Marshal(o.owner)
	o.mu.Unlock()
	if err != nil {
		return fmt.Errorf("encode the state file: %w", err)
	}
	for _, f := range o.stateFiles {
		if err := overwrite(f, content); err != nil {
			return fmt.Errorf("write the state file %s: %w", f.Name(), err)
		}
	}
	return nil
}

// collectGarbage removes the state, pins and parked interfaces of processes that have died. Parked
// interfaces of other namespaces are left to the next Load there.
func (o *Objects) collectGarbage(nl *netlink.Handle, mine map[string]bool) error {
	entries, err := os.ReadDir(runRoot)
	if err != nil {
		return fmt.Errorf("look for what crashed processes left: %w", err)
	}
	for _, e := range entries {
		key, ok := strings.CutSuffix(e.Name(), stateSuffix)
		if !ok || mine[key] {
			continue
		}
		f, err := tryLock(statePath(key), false)
		if err != nil {
			continue // its owner lives, or has just closed it
		}
		if ow, err := readOwner(key); err == nil && ow.BPFFS != 0 && ow.BPFFS != o.owner.BPFFS {
			_ = f.Close() // its pins are elsewhere: who sees them cleans up
			continue
		}
		err = errors.Join(o.removeLeftovers(key), removeFile(f.Name()), f.Close())
		if err != nil {
			return err
		}
	}
	links, err := nl.LinkList()
	if err != nil {
		return fmt.Errorf("look for parked interfaces that crashed processes left: %w", err)
	}
	for _, l := range links {
		key, ok := strings.CutPrefix(l.Attrs().Alias, parkedAlias)
		if ok {
			key, _, ok = strings.Cut(key, " ")
		}
		if !ok || l.Type() != "veth" || !mine[key] && isLocked(statePath(key)) {
			continue
		}
		// Its peer goes with it and may come later in this very list.
		if err := nl.LinkDel(l); err != nil && !isGone(err) {
			return fmt.Errorf("remove parked interface %s of a crashed process: %w", l.Attrs().Name, err)
		}
		o.log.Info("removed a crashed process's parked interface", "interface", l.Attrs().Name)
	}
	return nil
}

// removeLeftovers removes the pins of a device whose lock this process holds.
func (o *Objects) removeLeftovers(key string) error {
	for _, dir := range []string{filepath.Join(pinRoot, key), filepath.Join(pinRoot, tmpPrefix+key)} {
		if _, err := os.Lstat(dir); err != nil {
			continue
		}
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("remove the pins of a crashed process: %w", err)
		}
		o.log.Info("removed a crashed process's pins", "dir", dir)
	}
	return nil
}

// lockRunRoot makes claims of several processes follow one another.
func lockRunRoot(ctx context.Context) (release func(), err error) {
	d, err := os.Open(runRoot)
	if err != nil {
		return nil, fmt.Errorf("open the directory of state files: %w", err)
	}
	deadline := time.Now().Add(claimWait)
	for {
		err := unix.Flock(int(d.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { _ = d.Close() }, nil
		}
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(deadline) {
			_ = d.Close()
			return nil, fmt.Errorf("lock %s (waited up to %v): %w", runRoot, claimWait, err)
		}
		select {
		case <-ctx.Done():
			_ = d.Close()
			return nil, fmt.Errorf("wait for the lock of %s: %w", runRoot, ctx.Err())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

var errLocked = errors.New("locked by another process")

// tryLock opens a state file and locks it, until the file is closed or the process dies.
func tryLock(path string, create bool) (*os.File, error) {
	flags := os.O_RDWR
	if create {
		flags |= os.O_CREATE
	}
	for {
		f, err := os.OpenFile(path, flags, 0o644)
		if err != nil {
			return nil, fmt.Errorf("open the state file: %w", err)
		}
		// Locks of the open file, not of the process: a second Load in this process is refused too.
		lk := unix.Flock_t{Type: unix.F_WRLCK}
		if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &lk); err != nil {
			_ = f.Close()
			if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
				return nil, errLocked
			}
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		var st unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &st); err != nil {
			_ = f.Close()
			return nil, fmt.Errorf("look at %s: %w", path, err)
		}
		if st.Nlink > 0 {
			return f, nil
		}
		_ = f.Close() // its owner removed it in between
		if !create {
			return nil, fmt.Errorf("open the state file: %w", os.ErrNotExist)
		}
	}
}

// isLocked asks whether a living process holds the state file, without locking it.
func isLocked(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer func() { _ = f.Close() }()
	lk := unix.Flock_t{Type: unix.F_WRLCK}
	return unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &lk) == nil && lk.Type != unix.F_UNLCK
}

func readOwner(key string) (Owner, error) {
	var ow Owner
	b, err := os.ReadFile(statePath(key))
	if err != nil {
		return ow, fmt.Errorf("read the state file: %w", err)
	}
	if err := json.Unmarshal(b, &ow); err != nil {
		return ow, fmt.Errorf("read the state file %s: %w", statePath(key), err)
	}
	return ow, nil
}

// liveOwners lists the owners of all devices whose processes live, each once.
func liveOwners() ([]Owner, error) {
	entries, err := os.ReadDir(runRoot)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look for devices: %w", err)
	}
	var owners []Owner
	for _, e := range entries {
		key, ok := strings.CutSuffix(e.Name(), stateSuffix)
		if !ok || !isLocked(statePath(key)) {
			continue
		}
		// Further interfaces of a device have files of the same content.
		if ow, err := readOwner(key); err == nil && ow.Device == key {
			owners = append(owners, ow)
		}
	}
	return owners, nil
}

func ownerPID(key string) string {
	ow, err := readOwner(key)
	if err != nil {
		return "(id unreadable)"
	}
	return strconv.Itoa(ow.PID)
}

func overwrite(f *os.File, b []byte) error {
	if _, err := f.WriteAt(b, 0); err != nil {
		return err
	}
	return f.Truncate(int64(len(b)))
}

func removeFile(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove the state file: %w", err)
	}
	return nil
}
