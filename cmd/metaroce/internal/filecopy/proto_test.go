// SPDX-License-Identifier: Apache-2.0

package filecopy

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/metaroce/metaroce/transport/core"
)

var (
	testHello   = hello{addr: 1 << 40, rkey: 0x301, slots: maxSlots}
	testWelcome = welcome{addr: 1 << 41, rkey: 0x302, chunk: chunkBytes, slots: ringSlots}
	testHeader  = fileHeader{Size: 1 << 40, Mode: 0o751, ModTime: time.Unix(981173106, 789000000), Name: "a file"}
)

func TestPrivateDataSurvives(t *testing.T) {
	if got, err := parseHello(testHello.marshal()); err != nil || got != testHello {
		t.Errorf("hello %+v, error %v, want %+v", got, err, testHello)
	}
	if got, err := parseWelcome(testWelcome.marshal()); err != nil || got != testWelcome {
		t.Errorf("welcome %+v, error %v, want %+v", got, err, testWelcome)
	}
	if n := len(testWelcome.marshal()); n > core.MaxPrivate {
		t.Errorf("%d bytes, want at most %d", n, core.MaxPrivate)
	}
}

func TestFileHeaderSurvives(t *testing.T) {
	got, err := parseFileHeader(testHeader.marshal())
	if err != nil || got.Name != testHeader.Name || got.Size != testHeader.Size || got.Mode != testHeader.Mode || !got.ModTime.Equal(testHeader.ModTime) {
		t.Errorf("%+v, error %v, want %+v", got, err, testHeader)
	}
}

func TestPrivateDataIsRefused(t *testing.T) {
	other := testHello.marshal()
	other[5] = 2
	for _, tc := range []struct {
		name string
		b    []byte
		want string
	}{
		{"nothing", nil, "not metaroce cp or recv"},
		{"perf's", []byte("MRPF\x00\x01"), `"MRPF"`},
		{"another version", other, "cp protocol version 2, want 1"},
		{"short", testHello.marshal()[:10], "bytes after the version"},
		{"no slots", hello{slots: 0}.marshal(), "0 slots"},
		{"too many slots", hello{slots: maxSlots + 1}.marshal(), "65 slots"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if _, err := parseHello(tc.b); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want one with %q", err, tc.want)
			}
		})
	}
	if _, err := parseWelcome(welcome{slots: 2, chunk: 1 << 30}.marshal()); err == nil || !strings.Contains(err.Error(), "chunks of") {
		t.Errorf("chunk of 1 GiB: error %v, want a refusal", err)
	}
}

func TestNamesThatLeaveTheDirectoryAreRefused(t *testing.T) {
	for name, want := range map[string]string{
		"":                                   "empty",
		".":                                  "directory",
		"..":                                 "directory",
		"../x":                               "slash",
		"/etc/passwd":                        "slash",
		"a/b":                                "slash",
		"a\x00b":                             "zero byte",
		strings.Repeat("x", 256):             "256 bytes",
		".metaroce-0123456789abcdef.part":    "temporary",
		"x" + strings.Repeat("y/../", 10):    "slash",
		strings.Repeat("../", 3) + "etc/foo": "slash",
	} {
		if err := checkName(name); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want one with %q", name, err, want)
		}
		h := testHeader
		h.Name = name
		if _, err := parseFileHeader(h.marshal()); err == nil {
			t.Errorf("%q: accepted from a sender", name)
		}
	}
	for _, name := range []string{"a", "...", ".hidden", "ü b\nc", strings.Repeat("x", 255), ".metaroce-x.part"} {
		if err := checkName(name); err != nil {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestFileHeaderIsRefused(t *testing.T) {
	for _, tc := range []struct {
		name string
		b    []byte
		want string
	}{
		{"short", testHeader.marshal()[:fileHeaderBytes-1], "at least 20"},
		{"negative size", fileHeader{Size: -1, Name: "x"}.marshal(), "size -1"},
		{"set-user-ID", fileHeader{Mode: 0o4755, Name: "x"}.marshal(), "mode 04755"},
	} {
		if _, err := parseFileHeader(tc.b); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: error %v, want one with %q", tc.name, err, tc.want)
		}
	}
}

func TestImmediateSurvives(t *testing.T) {
	for _, number := range []uint32{0, 1, numberMask, numberMask + 1, 1<<32 - 1} {
		k, got := splitImm(imm(kindWorking, number))
		if k != kindWorking || got != number&numberMask {
			t.Errorf("%d: kind %d number %d", number, k, got)
		}
	}
}

func TestPeersReasonIsOneLineOfText(t *testing.T) {
	got := printable([]byte("a\x1b[2Jb\nc\xffd\u009b" + strings.Repeat("x", 1000)))
	if strings.ContainsAny(got, "\x1b\n\u009b") || len(got) > maxReason+8 || !strings.HasPrefix(got, "a [2Jb c?d ") {
		t.Errorf("reason %q", got)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(testHello.marshal())
	f.Add(testWelcome.marshal())
	f.Add(testHeader.marshal())
	f.Fuzz(func(t *testing.T, b []byte) {
		if h, err := parseHello(b); err == nil && !bytes.Equal(h.marshal(), b) {
			t.Errorf("accepted hello %x, which says %x", b, h.marshal())
		}
		if w, err := parseWelcome(b); err == nil && !bytes.Equal(w.marshal(), b) {
			t.Errorf("accepted welcome %x, which says %x", b, w.marshal())
		}
		if h, err := parseFileHeader(b); err == nil {
			if !bytes.Equal(h.marshal(), b) {
				t.Errorf("accepted header %x, which says %x", b, h.marshal())
			}
			if h.Name == "" || strings.ContainsAny(h.Name, "/\x00") {
				t.Errorf("accepted name %q", h.Name)
			}
		}
		_ = printable(b)
	})
}
