// SPDX-License-Identifier: Apache-2.0

package wire_test

import (
	"bytes"
	"testing"

	"github.com/metaroce/metaroce/wire"
	"github.com/metaroce/metaroce/wire/wiretest"
)

// FuzzParse: whatever is taken builds the same frame again.
func FuzzParse(f *testing.F) {
	for _, v := range wiretest.Vectors(f) {
		f.Add(v.Frame, v.Port)
	}
	f.Fuzz(func(t *testing.T, frame []byte, port uint16) {
		p, err := wire.Parse(frame, port)
		if err != nil {
			return
		}
		l, err := wire.Locate(frame, port)
		if err != nil {
			t.Fatalf("Parse takes what Locate does not find: %v", err)
		}
		want := bytes.Clone(frame[:l.L4+l.UDPLen]) // without the link's padding
		if p.Src.Is4() && want[l.L3+10] == 0xff && want[l.L3+11] == 0xff {
			want[l.L3+10], want[l.L3+11] = 0, 0 // the other zero of one's complement
		}
		got, err := p.Append(nil)
		if err != nil {
			t.Fatalf("Append refuses what Parse took: %v", err)
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("\n got %x\nwant %x", got, want)
		}
	})
}

// FuzzParsePastChecksums repairs lengths and checksums first, so that the fuzzer reaches
// the checks behind them.
func FuzzParsePastChecksums(f *testing.F) {
	for _, v := range wiretest.Vectors(f) {
		f.Add(v.Frame)
	}
	f.Fuzz(func(t *testing.T, frame []byte) {
		if len(frame) > 4096 || wire.FixLengths(frame, wire.UDPPort) != nil {
			return
		}
		p, err := wire.Parse(frame, wire.UDPPort)
		if err != nil {
			return
		}
		got, err := p.Append(nil)
		if err != nil {
			t.Fatalf("Append refuses what Parse took: %v", err)
		}
		if !bytes.Equal(got, frame) {
			t.Fatalf("\n got %x\nwant %x", got, frame)
		}
	})
}

// FuzzAck: an ACK that is taken builds the same bytes again.
func FuzzAck(f *testing.F) {
	for _, v := range wiretest.Vectors(f) {
		if v.Refuse == "" && v.Packet.BTH.Opcode == wire.OpACK {
			f.Add(v.Frame[len(v.Frame)-v.Trailing-wire.ACKLen:])
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var a wire.ACK
		if a.Decode(b) != nil {
			return
		}
		if got := a.Append(nil); !bytes.Equal(got, b[:wire.ACKLen]) {
			t.Fatalf("\n got %x\nwant %x", got, b[:wire.ACKLen])
		}
	})
}

// FuzzICRC: no packet makes it panic, and the fields that the fabric changes do not count.
func FuzzICRC(f *testing.F) {
	for _, v := range wiretest.ICRCs(f) {
		f.Add(v.Packet, byte(0xff))
	}
	f.Fuzz(func(t *testing.T, ip []byte, x byte) {
		want, err := wire.ICRC(ip)
		if err != nil {
			return
		}
		ttl := 8
		if ip[0]>>4 == 6 {
			ttl = 7
		}
		ip = bytes.Clone(ip)
		ip[ttl] ^= x
		if got, err := wire.ICRC(ip); err != nil || got != want {
			t.Fatalf("other TTL: %#x, %v, want %#x", got, err, want)
		}
	})
}
