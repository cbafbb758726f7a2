// SPDX-License-Identifier: Apache-2.0

package tidy

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestEveryCounterHasOneRowInOperations holds the table of docs/operations.md to struct mr_counters.
func TestEveryCounterHasOneRowInOperations(t *testing.T) {
	read := func(name string) string {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	_, body, found := strings.Cut(read("bpf/mr_types.h"), "struct mr_counters {")
	body, _, closed := strings.Cut(body, "};")
	if !found || !closed {
		t.Fatal("bpf/mr_types.h has no struct mr_counters")
	}
	_, table, found := strings.Cut(read("docs/operations.md"), "\n## Counters\n")
	if !found {
		t.Fatal("docs/operations.md has no section on counters")
	}
	rows := map[string]int{}
	for _, row := range regexp.MustCompile(`(?m)^\| (`+"`[^|]*`"+`) \|`).FindAllStringSubmatch(table, -1) {
		for _, name := range regexp.MustCompile("`([a-z_]+)`").FindAllStringSubmatch(row[1], -1) {
			rows[name[1]]++
		}
	}
	counters := 0
	for _, decl := range regexp.MustCompile(`(?m)^\s*__u64 ([a-z_, ]+);`).FindAllStringSubmatch(body, -1) {
		for _, name := range strings.Split(decl[1], ", ") {
			counters++
			if rows[name] != 1 {
				t.Errorf("counter %s: %d rows, want 1", name, rows[name])
			}
			delete(rows, name)
		}
	}
	if counters == 0 {
		t.Error("found no counter in struct mr_counters")
	}
	for name := range rows {
		t.Errorf("row of %s: struct mr_counters has no such counter", name)
	}
}
