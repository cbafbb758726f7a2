// SPDX-License-Identifier: Apache-2.0

package wire_test

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/metaroce/metaroce/wire"
	"github.com/metaroce/metaroce/wire/wiretest"
)

// cmpPacket lets cmp compare netip.Addr; an absent payload is an empty one.
var cmpPacket = cmp.Options{cmpopts.EquateComparable(wire.Packet{}.Src), cmpopts.EquateEmpty()}

func TestAppend_givesGoldenBytes(t *testing.T) {
	for _, v := range wiretest.Vectors(t) {
		if v.Refuse != "" {
			continue
		}
		t.Run(v.Name, func(t *testing.T) {
			prefix := []byte("before")
			got, err := v.Packet.Append(bytes.Clone(prefix))
			if err != nil {
				t.Fatal(err)
			}
			if want := append(prefix, v.Frame[:len(v.Frame)-v.Trailing]...); !bytes.Equal(got, want) {
				t.Errorf("%s\n got %x\nwant %x", v.Description, got, want)
			}
			if got, want := v.Packet.HeaderLen(), len(v.Frame)-v.Trailing-len(v.Packet.Payload); got != want {
				t.Errorf("HeaderLen %d, want %d", got, want)
			}
		})
	}
}

func TestParse_givesGoldenFields(t *testing.T) {
	for _, v := range wiretest.Vectors(t) {
		if v.Refuse != "" {
			continue
		}
		t.Run(v.Name, func(t *testing.T) {
			got, err := wire.Parse(v.Frame, v.Port)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(v.Packet, got, cmpPacket); diff != "" {
				t.Errorf("%s (-want +got):\n%s", v.Description, diff)
			}
		})
	}
}

func TestParse_refusesGoldenFramesForTheirReason(t *testing.T) {
	seen := map[wire.Refusal]int{}
	for _, v := range wiretest.Vectors(t) {
		if v.Refuse == "" {
			continue
		}
		seen[v.Refuse]++
		t.Run(v.Name, func(t *testing.T) {
			got, err := wire.Parse(v.Frame, v.Port)
			if !errors.Is(err, v.Refuse) {
				t.Errorf("%s: error %v, want %v", v.Description, err, v.Refuse)
			}
			if diff := cmp.Diff(wire.Packet{}, got, cmpPacket); diff != "" {
				t.Errorf("a refused frame left fields:\n%s", diff)
			}
		})
	}
	for _, r := range []wire.Refusal{
		wire.ErrNotOurs, wire.ErrTruncated, wire.ErrLength, wire.ErrOpcode,
		wire.ErrChecksum, wire.ErrVersion, wire.ErrHeader, wire.ErrPayload,
	} {
		if seen[r] == 0 {
			t.Errorf("no vector is refused as %q", r)
		}
	}
}

// Until the UDP header is whole a frame cannot be known to be ours. From then on it is
// shorter than its IP header says.
func TestParse_everyTruncationHasItsReason(t *testing.T) {
	for _, v := range wiretest.Vectors(t) {
		if v.Refuse != "" {
			continue
		}
		udpEnd := v.Packet.HeaderLen() - wire.BTHLen - headersBehindBTH(&v.Packet)
		for n := range len(v.Frame) - v.Trailing {
			want := wire.ErrLength
			if n < udpEnd {
				want = wire.ErrNotOurs
			}
			// A frame of its own, so that a read beyond its end is a panic.
			if _, err := wire.Parse(bytes.Clone(v.Frame[:n:n]), v.Port); !errors.Is(err, want) {
				t.Fatalf("%s cut to %d of %d bytes: error %v, want %v", v.Name, n, len(v.Frame), err, want)
			}
		}
	}
}

// The same with lengths that agree: what is cut off then are headers or payload.
func TestParse_everyShortPacketHasItsReason(t *testing.T) {
	for _, v := range wiretest.Vectors(t) {
		if v.Refuse != "" || v.Port != wire.UDPPort {
			continue
		}
		udpEnd := v.Packet.HeaderLen() - wire.BTHLen - headersBehindBTH(&v.Packet)
		for n := udpEnd; n < v.Packet.HeaderLen(); n++ {
			f := bytes.Clone(v.Frame[:n:n])
			if err := wire.FixLengths(f, v.Port); err != nil {
				t.Fatal(err)
			}
			if _, err := wire.Parse(f, v.Port); !errors.Is(err, wire.ErrTruncated) {
				t.Fatalf("%s shortened to %d bytes: error %v, want %v", v.Name, n, err, wire.ErrTruncated)
			}
		}
	}
}

func headersBehindBTH(p *wire.Packet) int {
	switch {
	case p.BTH.Opcode == wire.OpACK:
		return 88
	case p.BTH.Opcode == wire.OpProbe:
		return 32
	case p.Data.Flags&wire.FlagImm != 0:
		return 32 + 16 + 8
	}
	return 32 + 16
}

// Every bit that a checksum covers: with one turned, the frame is never taken as before.
func TestParse_noBitTurnsUnnoticed(t *testing.T) {
	for _, v := range wiretest.Vectors(t) {
		if v.Refuse != "" || v.Packet.NoChecksum || len(v.Packet.Payload) > 128 {
			continue
		}
		l, err := wire.Locate(v.Frame, v.Port)
		if err != nil {
			t.Fatal(err)
		}
		for bit := l.L4 * 8; bit < (len(v.Frame)-v.Trailing)*8; bit++ {
			f := bytes.Clone(v.Frame)
			f[bit/8] ^= 0x80 >> (bit % 8)
			if _, err := wire.Parse(f, v.Port); err == nil {
				t.Fatalf("%s: taken with bit %d of byte %d turned", v.Name, bit%8, bit/8)
			}
		}
	}
}

func TestTurn_givesGoldenAnswer(t *testing.T) {
	n := 0
	for _, v := range wiretest.Vectors(t) {
		if v.Answer == nil {
			continue
		}
		n++
		t.Run(v.Name, func(t *testing.T) {
			p := v.Packet.Turn(v.Answer.QPN, v.Answer.TOS, v.Answer.ACK)
			got, err := p.Append(nil)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, v.Answer.Frame) {
				t.Errorf("%s\n got %x\nwant %x", v.Description, got, v.Answer.Frame)
			}
		})
	}
	if n == 0 {
		t.Error("no vector has an answer")
	}
}

func TestICRC_givesGoldenValue(t *testing.T) {
	for _, v := range wiretest.ICRCs(t) {
		t.Run(v.Name, func(t *testing.T) {
			got, err := wire.ICRC(v.Packet)
			if err != nil {
				t.Fatal(err)
			}
			if got != v.ICRC {
				t.Errorf("%#010x, want %#010x", got, v.ICRC)
			}
		})
	}
}

func TestICRC_everyTruncationOfTheHeadersIsAnError(t *testing.T) {
	for _, v := range wiretest.ICRCs(t) {
		headers := 20 + 8 + 12
		if v.Packet[0]>>4 == 6 {
			headers = 40 + 8 + 12
		}
		for n := range headers {
			if _, err := wire.ICRC(bytes.Clone(v.Packet[:n:n])); !errors.Is(err, wire.ErrTruncated) {
				t.Fatalf("%s cut to %d bytes: error %v, want %v", v.Name, n, err, wire.ErrTruncated)
			}
		}
	}
}

func TestVectors_areWhatTheScriptMakes(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skipf("no python3: %v", err)
	}
	dir := t.TempDir()
	if out, err := exec.CommandContext(t.Context(), python, "../scripts/make_vectors.py", dir).CombinedOutput(); err != nil {
		t.Fatalf("make_vectors.py: %v\n%s", err, out)
	}
	committed := os.DirFS("../testdata/vectors")
	for _, pattern := range []string{"*.json", "icrc/*.json"} {
		want, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil {
			t.Fatal(err)
		}
		got, err := fs.Glob(committed, pattern)
		if err != nil {
			t.Fatal(err)
		}
		if len(got) != len(want) {
			t.Errorf("%s: %d committed, %d made", pattern, len(got), len(want))
		}
		for _, name := range want {
			rel, err := filepath.Rel(dir, name)
			if err != nil {
				t.Fatal(err)
			}
			made, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			have, err := fs.ReadFile(committed, filepath.ToSlash(rel))
			if err != nil || !bytes.Equal(have, made) {
				t.Errorf("%s: committed file differs (%v)", rel, err)
			}
		}
	}
}
