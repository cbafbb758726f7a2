// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/metaroce/metaroce/transport/core"
)

var update = flag.Bool("update", false, "rewrite the golden files in testdata/setup")

var cmpAddr = cmp.Comparer(func(a, b netip.Addr) bool { return a == b })

func testEndpoint() core.Endpoint {
	return core.Endpoint{
		QPN: 0x123456, Token: 0xdeadbeef, Payload: 3072, Paths: 8, Checksum: true, InitialPSN: 0xfffffff0,
		Planes: []core.PlaneAddr{
			{Addr: netip.MustParseAddr("198.18.0.1"), MTU: 9000},
			{Addr: netip.MustParseAddr("2001:db8::1"), MTU: 3500},
		},
	}
}

// goldenMsgs are the messages whose bytes are in testdata/setup.
func goldenMsgs() map[string]setupMsg {
	return map[string]setupMsg{
		"hello":     {Type: msgHello, Endpoint: testEndpoint(), Private: []byte("rkey and address")},
		"accept":    {Type: msgAccept, Endpoint: testEndpoint()},
		"reject":    {Type: msgReject, Reason: "no room"},
		"ready":     {Type: msgReady},
		"close":     {Type: msgClose, LastPSN: 7, WaitMs: 5000},
		"close-ack": {Type: msgCloseAck, LastPSN: 0xffffffff, Flushed: 3},
		"abort":     {Type: msgAbort, Reason: "request 3 (write): remote access error"},
	}
}

func mustAppend(t testing.TB, m setupMsg) []byte {
	t.Helper()
	b, err := appendMsg(nil, m)
	if err != nil {
		t.Fatalf("appendMsg(%v): %v", m.Type, err)
	}
	return b
}

func TestSetupMessagesMatchGoldenBytes(t *testing.T) {
	for name, m := range goldenMsgs() {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join("testdata", "setup", name+".bin")
			got := mustAppend(t, m)
			if *update {
				if err := os.WriteFile(file, got, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, want) {
				t.Errorf("bytes differ:\n got %q\nwant %q", got, want)
			}
			back, err := readMsg(bytes.NewReader(want))
			if err != nil {
				t.Fatalf("readMsg: %v", err)
			}
			if d := cmp.Diff(m, back, cmpAddr); d != "" {
				t.Errorf("message read back differs (-want +got):\n%s", d)
			}
		})
	}
}

// frame wraps a body that appendMsg would not make.
func frame(version uint16, typ msgType, body string) []byte {
	b := append([]byte(setupMagic), byte(version>>8), byte(version), byte(typ))
	b = binary.BigEndian.AppendUint32(b, uint32(len(body)))
	return append(b, body...)
}

const helloBody = `{"qpn":2,"token":1,"payload":1024,"paths":1,"checksum":false,"initial_psn":0,"planes":[{"addr":"198.18.0.1","mtu":1500}]}`

func TestReadMsgRefusesBadBody(t *testing.T) {
	edit := func(old, new string) string {
		if !strings.Contains(helloBody, old) {
			t.Fatalf("%q is not in the body", old)
		}
		return strings.Replace(helloBody, old, new, 1)
	}
	plane := `{"addr":"198.18.0.1","mtu":1500}`
	for _, tc := range []struct{ name, body, want string }{
		{"QPN zero", edit(`"qpn":2`, `"qpn":0`), "qpn 0"},
		{"QPN one, InfiniBand's own", edit(`"qpn":2`, `"qpn":1`), "qpn 1"},
		{"token zero", edit(`"token":1`, `"token":0`), "token 0"},
		{"token of 33 bits", edit(`"token":1`, `"token":4294967296`), "cannot unmarshal"},
		{"initial PSN of 33 bits", edit(`"initial_psn":0`, `"initial_psn":4294967296`), "cannot unmarshal"},
		{"plane address loopback", edit(`198.18.0.1`, `127.0.0.1`), "want a plain unicast one"},
		{"plane address IPv6 loopback", edit(`198.18.0.1`, `::1`), "want a plain unicast one"},
		{"plane address broadcast", edit(`198.18.0.1`, `255.255.255.255`), "want a plain unicast one"},
		{"plane address mapped", edit(`198.18.0.1`, `::ffff:198.18.0.1`), "want a plain unicast one"},
		{"QPN of 25 bits", edit(`"qpn":2`, `"qpn":16777216`), "qpn 16777216"},
		{"QPN negative", edit(`"qpn":2`, `"qpn":-1`), "cannot unmarshal"},
		{"QPN missing", edit(`"qpn":2,`, ``), "qpn is missing"},
		{"token missing", edit(`"token":1,`, ``), "token is missing"},
		{"checksum missing", edit(`"checksum":false,`, ``), "checksum is missing"},
		{"initial PSN missing", edit(`"initial_psn":0,`, ``), "initial_psn is missing"},
		{"payload odd", edit(`1024`, `1025`), "payload 1025"},
		{"paths none", edit(`"paths":1`, `"paths":0`), "paths 0"},
		{"paths too many", edit(`"paths":1`, `"paths":33`), "paths 33"},
		{"planes none", edit(plane, ``), "0 planes"},
		{"planes too many", edit(plane, strings.Repeat(plane+",", 8)+plane), "9 planes"},
		{"plane address not an address", edit(`198.18.0.1`, `host`), "unable to parse IP"},
		{"plane address missing", edit(`"addr":"198.18.0.1",`, ``), "want a plain unicast one"},
		{"plane address unspecified", edit(`198.18.0.1`, `0.0.0.0`), "want a plain unicast one"},
		{"plane address multicast", edit(`198.18.0.1`, `ff02::1`), "want a plain unicast one"},
		{"plane address with a zone", edit(`198.18.0.1`, `fe80::1%eth0`), "want a plain unicast one"},
		{"MTU below the payload", edit(`"mtu":1500`, `"mtu":1000`), "MTU 1000"},
		{"MTU absurd", edit(`"mtu":1500`, `"mtu":65536`), "MTU 65536"},
		{"private data too long", edit(`{"qpn"`, `{"private":"`+strings.Repeat("AAAA", 66)+`","qpn"`), "private data of 198 bytes"},
		{"two documents", helloBody + helloBody, "after top-level value"},
		{"not JSON", "\x00", "invalid character"},
		{"empty", "", "unexpected end"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := readMsg(bytes.NewReader(frame(setupVersion, msgHello, tc.body)))
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want one with %q", err, tc.want)
			}
		})
	}
}

func TestReadMsgIgnoresUnknownFields(t *testing.T) {
	body := strings.Replace(helloBody, `{"qpn"`, `{"later":{"x":[1]},"qpn"`, 1)
	m, err := readMsg(bytes.NewReader(frame(setupVersion, msgHello, body)))
	if err != nil {
		t.Fatal(err)
	}
	if m.Endpoint.QPN != 2 {
		t.Errorf("QPN %d, want 2", m.Endpoint.QPN)
	}
}

func TestReadMsgRefusesBadFrame(t *testing.T) {
	hello := frame(setupVersion, msgHello, helloBody)
	long := frame(setupVersion, msgHello, "")
	binary.BigEndian.PutUint32(long[7:], maxSetupBody+1)
	t.Run("other protocol", func(t *testing.T) {
		_, err := readMsg(strings.NewReader("GET / HTTP/1.1\r\n\r\n"))
		if !errors.Is(err, ErrNotMetaroce) || !strings.Contains(err.Error(), `"GET "`) {
			t.Errorf("error %v, want ErrNotMetaroce that shows the bytes", err)
		}
	})
	t.Run("other version", func(t *testing.T) {
		_, err := readMsg(bytes.NewReader(frame(setupVersion+1, msgHello, `{"whatever":1}`)))
		var ve *VersionError
		if !errors.As(err, &ve) || ve.Theirs != setupVersion+1 || ve.Ours != setupVersion {
			t.Errorf("error %v, want a VersionError", err)
		}
	})
	t.Run("unknown type", func(t *testing.T) {
		if _, err := readMsg(bytes.NewReader(frame(setupVersion, 99, "{}"))); err == nil || !strings.Contains(err.Error(), "message 99") {
			t.Errorf("error %v, want one that names message 99", err)
		}
	})
	t.Run("length over the bound", func(t *testing.T) {
		if _, err := readMsg(bytes.NewReader(long)); err == nil || !strings.Contains(err.Error(), "65537 bytes") {
			t.Errorf("error %v, want one that names 65537 bytes", err)
		}
	})
	t.Run("nothing", func(t *testing.T) {
		if _, err := readMsg(bytes.NewReader(nil)); err != io.EOF {
			t.Errorf("error %v, want io.EOF", err)
		}
	})
	for n := 1; n < len(hello); n++ {
		if _, err := readMsg(bytes.NewReader(hello[:n])); err == nil || err == io.EOF {
			t.Fatalf("truncated to %d bytes: error %v, want one that says so", n, err)
		}
	}
}

func TestPeersReasonCannotMoveTheCursor(t *testing.T) {
	m, err := readMsg(bytes.NewReader(mustAppend(t, setupMsg{Type: msgReject, Reason: "a\x1b[2J\nb"})))
	if err != nil {
		t.Fatal(err)
	}
	if m.Reason != "a [2J b" {
		t.Errorf("reason %q, want control characters gone", m.Reason)
	}
}

func TestAppendMsgRefusesLongPrivateData(t *testing.T) {
	m := setupMsg{Type: msgHello, Endpoint: testEndpoint(), Private: make([]byte, core.MaxPrivate+1)}
	if _, err := appendMsg(nil, m); err == nil || !strings.Contains(err.Error(), "197 bytes") {
		t.Errorf("error %v, want one that names 197 bytes", err)
	}
}

func TestNumbersOfCloseAreBounded(t *testing.T) {
	for _, tc := range []struct {
		name, body string
		want       setupMsg // of type Close
		err        string
	}{
		{"wait as long as may be", `{"last_psn":1,"wait_ms":60000}`, setupMsg{LastPSN: 1, WaitMs: 60000}, ""},
		{"wait of 50 days", `{"last_psn":1,"wait_ms":4294967295}`, setupMsg{LastPSN: 1, WaitMs: 60000}, ""},
		{"wait of 33 bits", `{"last_psn":1,"wait_ms":4294967296}`, setupMsg{}, "wait_ms"},
		{"wait negative", `{"last_psn":1,"wait_ms":-1}`, setupMsg{}, "wait_ms"},
		{"PSN of 33 bits", `{"last_psn":4294967296}`, setupMsg{}, "last_psn"},
		{"PSN missing", `{"wait_ms":1}`, setupMsg{}, "last_psn is missing"},
		{"as many flushed as may be", `{"last_psn":1,"flushed":65535}`, setupMsg{LastPSN: 1, Flushed: 65535}, ""},
		{"more flushed than any queue holds", `{"last_psn":1,"flushed":65536}`, setupMsg{}, "flushed 65536, want at most 65535"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m, err := readMsg(bytes.NewReader(frame(setupVersion, msgClose, tc.body)))
			if tc.err != "" {
				if err == nil || !strings.Contains(err.Error(), tc.err) {
					t.Errorf("error %v, want one with %q", err, tc.err)
				}
				return
			}
			tc.want.Type = msgClose
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tc.want, m); d != "" {
				t.Errorf("-want +got:\n%s", d)
			}
		})
	}
}

// A header that announces much takes no memory before it comes.
func TestAnnouncedLengthTakesNoMemory(t *testing.T) {
	h := frame(setupVersion, msgHello, strings.Repeat(" ", maxSetupBody))[:setupHeader]
	const times = 100
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range times {
		if _, err := readMsg(bytes.NewReader(h)); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatalf("error %v, want an unexpected end", err)
		}
	}
	runtime.ReadMemStats(&after)
	if each := (after.TotalAlloc - before.TotalAlloc) / times; each > 4096 {
		t.Errorf("%d bytes for a header alone, want at most 4096", each)
	}
}

func FuzzReadMsg(f *testing.F) {
	for _, body := range []string{`{"last_psn":1,"wait_ms":4294967295}`, `{"last_psn":1,"flushed":65536}`} {
		f.Add(frame(setupVersion, msgClose, body))
		f.Add(frame(setupVersion, msgCloseAck, body))
	}
	for _, planes := range []string{`[]`, `[{"addr":"127.0.0.1","mtu":1500}]`, `[{"addr":"255.255.255.255","mtu":65536}]`} {
		f.Add(frame(setupVersion, msgAccept, `{"qpn":1,"token":0,"payload":1,"paths":33,"checksum":true,"initial_psn":4294967295,"planes":`+planes+`}`))
	}
	for _, m := range goldenMsgs() {
		f.Add(mustAppend(f, m))
	}
	f.Add([]byte("GET / HTTP/1.1"))
	f.Add(frame(setupVersion+1, msgHello, "x"))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := readMsg(bytes.NewReader(b))
		if err != nil {
			return
		}
		if err := outside(m); err != nil {
			t.Fatalf("accepted %+v: %v", m, err)
		}
		// What was accepted can be said again and means the same.
		again, err := appendMsg(nil, m)
		if err != nil {
			t.Fatalf("accepted %+v, which cannot be written: %v", m, err)
		}
		back, err := readMsg(bytes.NewReader(again))
		if err != nil {
			t.Fatalf("rewritten as %q: %v", again, err)
		}
		if d := cmp.Diff(m, back, cmpAddr); d != "" {
			t.Errorf("changed by writing and reading (-first +second):\n%s", d)
		}
	})
}

// outside says which number of an accepted message has no bound, as docs/wire.md section 11 has them.
func outside(m setupMsg) error {
	e := m.Endpoint
	if m.Type == msgHello || m.Type == msgAccept {
		switch {
		case e.QPN < 2 || e.QPN >= 1<<24:
			return fmt.Errorf("qpn %d", e.QPN)
		case e.Token == 0:
			return errors.New("token 0")
		case e.Payload != 1024 && e.Payload != 2048 && e.Payload != 3072:
			return fmt.Errorf("payload %d", e.Payload)
		case e.Paths < 1 || e.Paths > 32:
			return fmt.Errorf("%d paths", e.Paths)
		case len(e.Planes) < 1 || len(e.Planes) > core.MaxPlanes:
			return fmt.Errorf("%d planes", len(e.Planes))
		case len(m.Private) > 196:
			return fmt.Errorf("%d bytes of private data", len(m.Private))
		}
		for _, p := range e.Planes {
			if !p.Addr.IsGlobalUnicast() && !p.Addr.IsLinkLocalUnicast() || p.Addr.Is4In6() || p.Addr.Zone() != "" {
				return fmt.Errorf("address %v", p.Addr)
			}
			if p.MTU < e.Payload || p.MTU > 65535 {
				return fmt.Errorf("MTU %d", p.MTU)
			}
		}
	}
	switch {
	case len(m.Reason) > 3*1024: // what is no UTF-8 is written anew
		return fmt.Errorf("reason of %d bytes", len(m.Reason))
	case m.WaitMs > 60_000:
		return fmt.Errorf("wait of %d ms", m.WaitMs)
	case m.Flushed > 65_535:
		return fmt.Errorf("%d flushed", m.Flushed)
	}
	return nil
}
