// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// netnsDir is where ip(8) keeps named network namespaces, so that `ip netns` sees a lab's.
const netnsDir = "/run/netns"

func netnsPath(name string) string { return filepath.Join(netnsDir, name) }

// createNetNS makes a named network namespace, as `ip netns add` does.
func createNetNS(name string) error {
	if err := shareNetNSDir(); err != nil {
		return fmt.Errorf("namespace directory %s: %w", netnsDir, err)
	}
	path := netnsPath(name)
	file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0)
	if err != nil {
		return fmt.Errorf("namespace %s: %w", name, err)
	}
	file.Close()

	done := make(chan error, 1)
	go func() {
		// Never unlocked: the thread, which lives in the new namespace, ends with the goroutine.
		runtime.LockOSThread()
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = unix.Mount("/proc/thread-self/ns/net", path, "none", unix.MS_BIND, "")
		}
		done <- err
	}()
	if err := <-done; err != nil {
		return errors.Join(fmt.Errorf("namespace %s: %w", name, err), deleteNetNS(name))
	}
	return nil
}

// shareNetNSDir makes the directory a shared mount point: a namespace deleted here
// must disappear from every mount namespace, else whoever copied the mount keeps it alive.
func shareNetNSDir() error {
	if err := os.MkdirAll(netnsDir, 0o755); err != nil {
		return err
	}
	err := unix.Mount("", netnsDir, "none", unix.MS_SHARED|unix.MS_REC, "")
	if !errors.Is(err, unix.EINVAL) {
		return err
	}
	if err := unix.Mount(netnsDir, netnsDir, "none", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return err
	}
	return unix.Mount("", netnsDir, "none", unix.MS_SHARED|unix.MS_REC, "")
}

// deleteNetNS removes a namespace's name; the namespace itself goes when its last
// process does. A name that is not there is no error.
func deleteNetNS(name string) error {
	path := netnsPath(name)
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil &&
		!errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("namespace %s: unmount: %w", name, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("namespace %s: %w", name, err)
	}
	return nil
}

// inNetNS runs fn on the calling goroutine, inside the named namespace. Goroutines
// that fn starts, and whatever it leaves to others, run outside.
func inNetNS(name string, fn func() error) error {
	target, err := os.Open(netnsPath(name))
	if err != nil {
		return fmt.Errorf("namespace %s: %w", name, err)
	}
	defer target.Close()

	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	origin, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return fmt.Errorf("own namespace: %w", err)
	}
	defer origin.Close()
	if err := unix.Setns(int(target.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter namespace %s: %w", name, err)
	}
	defer func() {
		// Going on in the wrong namespace would act on the wrong interfaces.
		if err := unix.Setns(int(origin.Fd()), unix.CLONE_NEWNET); err != nil {
			panic(fmt.Sprintf("lab: cannot return from namespace %s: %v", name, err))
		}
	}()
	return fn()
}

// openNetSysfs opens a file of the calling thread's network namespace below
// /sys/class/net. The mounted /sys shows the namespace it was mounted in, so that a
// private mount, seen by nobody else, is made.
func openNetSysfs(file string, flags int) (*os.File, error) {
	fsFD, err := unix.Fsopen("sysfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("sysfs: %w", err)
	}
	defer unix.Close(fsFD)
	if err := unix.FsconfigCreate(fsFD); err != nil {
		return nil, fmt.Errorf("sysfs: %w", err)
	}
	root, err := unix.Fsmount(fsFD, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("sysfs: %w", err)
	}
	defer unix.Close(root)
	fd, err := unix.Openat(root, "class/net/"+file, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("sysfs class/net/%s: %w", file, err)
	}
	return os.NewFile(uintptr(fd), file), nil
}
