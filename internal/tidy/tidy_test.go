// SPDX-License-Identifier: Apache-2.0

package tidy

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
)

const (
	root   = "../.."
	module = "github.com/metaroce/metaroce"
)

// layer says what a folder's packages may import besides the standard library. A folder's own
// subfolders count as the folder unless they have a layer of their own.
type layer struct {
	internal []string // folders of this module
	stdOnly  bool     // nothing from other modules, tests excepted
}

// layers is docs/architecture.md's table of folders. Nothing may import cmd or bench: they stand in no list.
var layers = map[string]layer{
	"wire":           {stdOnly: true},
	"cc":             {stdOnly: true},
	"transport/core": {internal: []string{"wire", "cc"}, stdOnly: true},
	"transport/xdp":  {internal: []string{"transport/core", "wire", "cc", "loader"}},
	"transport":      {internal: []string{"transport/core", "transport/xdp", "wire", "cc", "loader"}},
	"loader":         {},
	"bpf":            {internal: []string{"loader", "wire"}}, // tests only: the folder's programs are C
	"fabric/lab":     {internal: []string{"loader"}},
	"telemetry":      {internal: []string{"loader", "cc"}},
	"internal":       {},
	"bench":          {internal: []string{"transport", "transport/core", "wire", "cc", "fabric/lab", "telemetry"}},
	"e2e":            {internal: []string{"transport", "transport/core", "transport/xdp", "wire", "cc", "loader", "fabric/lab", "telemetry"}},
	"cmd":            {internal: []string{"transport", "transport/core", "transport/xdp", "wire", "cc", "loader", "fabric/lab", "telemetry", "bench", "cmd"}},
}

// layerOf returns the name of the layer that a folder belongs to: the longest that leads to it.
func layerOf(dir string) (string, bool) {
	for d := dir; d != "."; d = filepath.Dir(d) {
		if _, ok := layers[d]; ok {
			return d, true
		}
	}
	return "", false
}

// checkImport returns what is wrong with a package in folder dir importing path, or "".
func checkImport(dir, path string, isTest bool) string {
	name, ok := layerOf(dir)
	if !ok {
		return "folder " + dir + " has no layer: add it to layers here and to docs/architecture.md"
	}
	l := layers[name]
	if rest, ours := strings.CutPrefix(path, module+"/"); ours {
		target, known := layerOf(rest)
		switch {
		case !known:
			return "imports " + path + ", whose folder has no layer"
		case target == name, target == "internal" && !l.stdOnly, slices.Contains(l.internal, target):
			return ""
		}
		return name + " may not import " + target + " (it may: " + strings.Join(l.internal, ", ") + ")"
	}
	first, _, _ := strings.Cut(path, "/")
	if l.stdOnly && !isTest && strings.Contains(first, ".") {
		return name + " imports " + path + ", want the standard library only"
	}
	return ""
}

func TestImportsFollowTheTableOfFolders(t *testing.T) {
	seen := 0
	for _, file := range files(t, ".go") {
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, file), nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, spec := range f.Imports {
			seen++
			path := strings.Trim(spec.Path.Value, `"`)
			if problem := checkImport(filepath.Dir(file), path, strings.HasSuffix(file, "_test.go")); problem != "" {
				t.Errorf("%s: %s", file, problem)
			}
		}
	}
	if seen == 0 {
		t.Fatal("found no import in the repository, want some")
	}
}

func TestImportRuleRefusesWhatTheTableForbids(t *testing.T) {
	for _, tc := range []struct {
		name, dir, path string
		isTest, allowed bool
	}{
		{"core uses wire", "transport/core", module + "/wire", false, true},
		{"core must not load programs", "transport/core", module + "/loader", false, false},
		{"core must not do I/O by other modules", "transport/core", "golang.org/x/sys/unix", false, false},
		{"core's tests may use test helpers", "transport/core", "pgregory.net/rapid", true, true},
		{"wire knows nothing above it", "wire", module + "/transport/core", false, false},
		{"engines do not know the public API", "transport/xdp", module + "/transport", false, false},
		{"the public API picks its engine", "transport", module + "/transport/xdp", false, true},
		{"nothing imports cmd", "bench", module + "/cmd/metaroce", false, false},
		{"nothing but cmd imports bench", "transport", module + "/bench", false, false},
		{"subfolders belong to their parent", "cmd/metaroce/internal", module + "/bench/report", false, true},
		{"a new folder needs a layer", "misc", "fmt", false, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := checkImport(tc.dir, tc.path, tc.isTest); (got == "") != tc.allowed {
				t.Errorf("import of %s by %s: found %q, want allowed = %v", tc.path, tc.dir, got, tc.allowed)
			}
		})
	}
}

func TestPackagesHaveOneDocComment(t *testing.T) {
	docs := map[string][]string{}
	for _, file := range files(t, ".go") {
		if strings.HasSuffix(file, "_test.go") || isGenerated(t, file) {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, file), nil, parser.ParseComments|parser.PackageClauseOnly)
		if err != nil {
			t.Fatal(err)
		}
		dir := filepath.Dir(file)
		docs[dir] = append(docs[dir], documented(f, file)...)
	}
	for dir, where := range docs {
		if len(where) != 1 {
			t.Errorf("%s: found package comments in %q, want one", dir, where)
		}
	}
}

func documented(f *ast.File, file string) []string {
	if f.Doc == nil || strings.TrimSpace(f.Doc.Text()) == "" {
		return nil
	}
	return []string{file}
}

func TestEverySourceNamesItsLicence(t *testing.T) {
	for _, file := range files(t, ".go", ".c", ".h", ".sh", ".py", "Makefile", ".ci/run") {
		if isGenerated(t, file) {
			continue
		}
		want := "SPDX-License-Identifier: Apache-2.0"
		if ext := filepath.Ext(file); ext == ".c" || ext == ".h" {
			want = "SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause"
		}
		head := bytes.SplitN(read(t, file), []byte("\n"), 4)
		if !bytes.Contains(bytes.Join(head[:min(3, len(head))], []byte("\n")), []byte(want)) {
			t.Errorf("%s: its first three lines lack %q", file, want)
		}
	}
}

type rule struct {
	name string
	expr *regexp.Regexp
}

// forbidden is put together from halves so that this file does not contain what it looks for.
var forbidden = []rule{
	{"unfinished work", regexp.MustCompile(`\b(TO` + `DO|FIX` + `ME|XX` + `X)\b`)},
	{"a path of somebody's machine", regexp.MustCompile(`(?m)(^|[\s"'(=:])/(wo` + `rk|ho` + `me/\w+|Us` + `ers)/`)},
	{"a package registry's host", regexp.MustCompile(`proxy\.` + `golang\.org|deb\.` + `debian\.org|security\.` + `debian\.org|registry\.` + `npmjs\.org|pypi\.` + `org`)},
	{"a merge conflict", regexp.MustCompile(`(?m)^(<{7}|>{7}) `)},
}

func TestNothingUnfinishedOrLocalIsCommitted(t *testing.T) {
	for _, file := range files(t, ".go", ".c", ".h", ".sh", ".py", ".md", ".yml", "Makefile", ".ci/run") {
		content := read(t, file)
		for _, r := range forbidden {
			for _, at := range r.expr.FindAllIndex(content, -1) {
				line := 1 + bytes.Count(content[:at[1]-1], []byte("\n"))
				t.Errorf("%s:%d: found %q, which is %s", file, line, bytes.TrimSpace(content[at[0]:at[1]]), r.name)
			}
		}
	}
}

func TestForbiddenWordsAreRecognised(t *testing.T) {
	for _, line := range []string{
		"// TO" + "DO: later", "/* FIX" + "ME */", `path := "/wo` + `rk/main"`,
		"see /ho" + "me/someone/x", "GOPROXY=https://proxy." + "golang.org", "<<<<<<" + "< HEAD",
	} {
		if !slices.ContainsFunc(forbidden, func(r rule) bool { return r.expr.MatchString(line) }) {
			t.Errorf("no rule finds %q", line)
		}
	}
}

// maxName is BPF_OBJ_NAME_LEN less its NUL: the kernel cuts map and program names there, and
// bpftool then shows the stump.
const maxName = 15

func TestBPFNamesFitTheKernel(t *testing.T) {
	objects := files(t, "_bpfel.o")
	if len(objects) == 0 {
		if sources := files(t, ".bpf.c"); len(sources) != 0 {
			t.Fatalf("found no *_bpfel.o, want those of %q: make generate", sources)
		}
		t.Skip("there are no BPF programs")
	}
	for _, object := range objects {
		spec, err := ebpf.LoadCollectionSpec(filepath.Join(root, object))
		if err != nil {
			t.Fatalf("%s: %v", object, err)
		}
		for name := range spec.Programs {
			checkName(t, object, "program", name)
		}
		for name := range spec.Maps {
			if !strings.HasPrefix(name, ".") { // sections of global data
				checkName(t, object, "map", name)
			}
		}
	}
}

func checkName(t *testing.T, object, kind, name string) {
	t.Helper()
	if len(name) > maxName || !strings.HasPrefix(name, "mr_") {
		t.Errorf("%s: %s %q has %d characters, want at most %d and the prefix mr_", object, kind, name, len(name), maxName)
	}
}

// files lists the repository's files, relative to its root, whose path ends in one of suffixes.
func files(t *testing.T, suffixes ...string) []string {
	t.Helper()
	var found []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		if d.IsDir() {
			if rel == ".git" || rel == "bin" || rel == "build" {
				return filepath.SkipDir
			}
			return nil
		}
		if d.Type().IsRegular() && slices.ContainsFunc(suffixes, func(s string) bool { return strings.HasSuffix(rel, s) }) {
			found = append(found, rel)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func read(t *testing.T, file string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

var generated = regexp.MustCompile(`(?m)^// Code generated .* DO NOT EDIT\.$`)

func isGenerated(t *testing.T, file string) bool {
	t.Helper()
	return strings.HasSuffix(file, ".go") && generated.Match(read(t, file))
}
