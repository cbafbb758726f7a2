// SPDX-License-Identifier: Apache-2.0

package filecopy

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const maxName = 255 // NAME_MAX

// tempName is what temporary files are called, and nothing else may be.
var tempName = regexp.MustCompile(`^\.metaroce-[0-9a-f]{16}\.part$`)

func newTempName() string { return fmt.Sprintf(".metaroce-%016x.part", rand.Uint64()) }

// checkName refuses names that are not those of a file in the directory itself.
func checkName(name string) error {
	switch {
	case name == "":
		return errors.New(`file name "" is empty`)
	case name == "." || name == "..":
		return fmt.Errorf("file name %q is a directory's", name)
	case len(name) > maxName:
		return fmt.Errorf("file name of %d bytes, want at most %d", len(name), maxName)
	case strings.ContainsRune(name, '/'):
		return fmt.Errorf("file name %q has a slash, want one without a directory", name)
	case strings.ContainsRune(name, 0):
		return fmt.Errorf("file name %q has a zero byte", name)
	case tempName.MatchString(name):
		return fmt.Errorf("file name %q is one of a temporary file", name)
	}
	return nil
}

// tempFile is a file that is not there yet. Where the file system can, it has no
// name until it is complete, so that not even kill -9 leaves it behind; elsewhere
// it has a temporary one, and CleanDir removes it at the next start.
type tempFile struct {
	*os.File
	dir  string
	path string // temporary name, "" while it has none
}

// newTempFile makes an empty file in dir.
func newTempFile(dir string) (*tempFile, error) {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EINVAL) {
			return nil, fmt.Errorf("temporary file in %s: %w", dir, err)
		}
		return newNamedTempFile(dir)
	}
	return (&tempFile{File: os.NewFile(uintptr(fd), dir), dir: dir}).locked()
}

func newNamedTempFile(dir string) (*tempFile, error) {
	path := filepath.Join(dir, newTempName())
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("temporary file: %w", err)
	}
	return (&tempFile{File: f, dir: dir, path: path}).locked()
}

// locked marks the file as somebody's: CleanDir leaves it alone.
func (t *tempFile) locked() (*tempFile, error) {
	if err := unix.Flock(int(t.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("lock the temporary file: %w", err), t.discard())
	}
	return t, nil
}

// reserve takes disk space, so that a full disk shows before the bytes come.
func (t *tempFile) reserve(size int64) error {
	if size == 0 {
		return nil
	}
	for {
		err := unix.Fallocate(int(t.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, size)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOSYS):
			return nil // not every file system can
		default:
			return err
		}
	}
}

// discard removes it.
func (t *tempFile) discard() error {
	var err error
	if t.path != "" {
		err = os.Remove(t.path)
	}
	return errors.Join(err, t.Close())
}

// publish gives the file its mode and time, brings it to the disk and lets it
// appear as name. It closes the file; after an error nothing of it is left.
func (t *tempFile) publish(name string, mode uint32, modTime time.Time) error {
	if err := t.complete(name, mode, modTime); err != nil {
		return errors.Join(err, t.discard())
	}
	return t.Close()
}

func (t *tempFile) complete(name string, mode uint32, modTime time.Time) error {
	self := fmt.Sprintf("/proc/self/fd/%d", t.Fd())
	if err := t.Chmod(fs.FileMode(mode)); err != nil {
		return fmt.Errorf("mode: %w", err)
	}
	stamp := unix.NsecToTimespec(modTime.UnixNano())
	if err := unix.UtimesNanoAt(unix.AT_FDCWD, self, []unix.Timespec{stamp, stamp}, 0); err != nil {
		return fmt.Errorf("time: %w", err)
	}
	if err := t.Sync(); err != nil {
		return fmt.Errorf("sync: %w", err)
	}
	if t.path == "" {
		path := filepath.Join(t.dir, newTempName())
		if err := unix.Linkat(unix.AT_FDCWD, self, unix.AT_FDCWD, path, unix.AT_SYMLINK_FOLLOW); err != nil {
			return fmt.Errorf("name the temporary file: %w", err)
		}
		t.path = path
	}
	if err := os.Rename(t.path, filepath.Join(t.dir, name)); err != nil {
		return err
	}
	t.path = ""
	return syncDir(t.dir)
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := d.Sync(); err != nil {
		return fmt.Errorf("sync: %w", err)
	}
	return nil
}

// CleanDir removes temporary files that nobody writes any more and returns their
// names.
func CleanDir(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var removed []string
	for _, e := range entries {
		if !e.Type().IsRegular() || !tempName.MatchString(e.Name()) {
			continue
		}
		path := filepath.Join(dir, e.Name())
		stale, err := removeStale(path)
		if err != nil {
			return removed, fmt.Errorf("stale temporary file %s: %w", path, err)
		}
		if stale {
			removed = append(removed, e.Name())
		}
	}
	return removed, nil
}

func removeStale(path string) (bool, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			return false, nil
		}
		return false, err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	return true, nil
}
