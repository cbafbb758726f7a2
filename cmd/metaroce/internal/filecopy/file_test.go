// SPDX-License-Identifier: Apache-2.0

package filecopy

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// makers are both ways to a temporary file: file systems differ.
var makers = map[string]func(string) (*tempFile, error){"unnamed if possible": newTempFile, "named": newNamedTempFile}

func entries(t *testing.T, dir string) []string {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names
}

func TestPublishedFileHasItsBytesModeAndTime(t *testing.T) {
	for how, make := range makers {
		t.Run(how, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, "x"), []byte("old"), 0o600); err != nil {
				t.Fatal(err)
			}
			f, err := make(dir)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := f.Write([]byte("new bytes")); err != nil {
				t.Fatal(err)
			}
			when := time.Unix(981173106, 789000000)
			if err := f.publish("x", 0o640, when); err != nil {
				t.Fatal(err)
			}
			info, err := os.Stat(filepath.Join(dir, "x"))
			if err != nil {
				t.Fatal(err)
			}
			if info.Mode() != 0o640 || !info.ModTime().Equal(when) {
				t.Errorf("mode %v time %v, want 0640 and %v", info.Mode(), info.ModTime(), when)
			}
			if b, err := os.ReadFile(filepath.Join(dir, "x")); err != nil || string(b) != "new bytes" {
				t.Errorf("bytes %q, error %v", b, err)
			}
			if got := entries(t, dir); !slices.Equal(got, []string{"x"}) {
				t.Errorf("directory has %q, want x alone", got)
			}
		})
	}
}

func TestFileThatCannotBePublishedLeavesNothing(t *testing.T) {
	for how, make := range makers {
		t.Run(how, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.Mkdir(filepath.Join(dir, "x"), 0o755); err != nil {
				t.Fatal(err)
			}
			f, err := make(dir)
			if err != nil {
				t.Fatal(err)
			}
			if err := f.publish("x", 0o644, time.Now()); err == nil {
				t.Error("published over a directory")
			}
			if got := entries(t, dir); !slices.Equal(got, []string{"x"}) {
				t.Errorf("directory has %q, want the folder x alone", got)
			}
		})
	}
}

func TestDiscardedFileLeavesNothing(t *testing.T) {
	for how, make := range makers {
		t.Run(how, func(t *testing.T) {
			dir := t.TempDir()
			f, err := make(dir)
			if err != nil {
				t.Fatal(err)
			}
			if err := f.reserve(1 << 16); err != nil {
				t.Fatal(err)
			}
			if err := f.discard(); err != nil {
				t.Fatal(err)
			}
			if got := entries(t, dir); len(got) != 0 {
				t.Errorf("directory has %q, want nothing", got)
			}
		})
	}
}

func TestCleanDirRemovesWhatNobodyWrites(t *testing.T) {
	dir := t.TempDir()
	live, err := newNamedTempFile(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer live.Close()
	stale := ".metaroce-0123456789abcdef.part"
	keep := []string{filepath.Base(live.path), "notes.part", ".metaroce-short.part", "x" + stale}
	for _, name := range append([]string{stale}, keep[1:]...) {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	// Never opened, let alone followed.
	pipe := ".metaroce-00000000000000aa.part"
	if err := syscall.Mkfifo(filepath.Join(dir, pipe), 0o600); err != nil {
		t.Fatal(err)
	}
	removed, err := CleanDir(dir)
	if err != nil || !slices.Equal(removed, []string{stale}) {
		t.Errorf("removed %q, error %v, want %q alone", removed, err, stale)
	}
	want := append([]string{pipe}, keep...)
	slices.Sort(want)
	if got := entries(t, dir); !slices.Equal(got, want) {
		t.Errorf("directory has %q, want %q", got, want)
	}
}

func TestFilesThatCannotBeCopiedAreRefusedBeforeAnythingIs(t *testing.T) {
	dir := t.TempDir()
	for _, sub := range []string{"a", "b"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, sub, "same"), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Mkfifo(filepath.Join(dir, "pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		files []string
		want  string
	}{
		{[]string{"nope"}, "no such file"},
		{[]string{"a"}, "directory, want a regular file"},
		{[]string{"pipe"}, "pipe, want a regular file"},
		{[]string{"a/same", "b/same"}, "same name"},
	} {
		var paths []string
		for _, f := range tc.files {
			paths = append(paths, filepath.Join(dir, f))
		}
		if err := CheckFiles(paths); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%q: error %v, want one with %q", tc.files, err, tc.want)
		}
	}
	if err := CheckFiles([]string{filepath.Join(dir, "a/same")}); err != nil {
		t.Error(err)
	}
}
