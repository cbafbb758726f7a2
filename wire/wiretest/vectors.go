// SPDX-License-Identifier: Apache-2.0

// Package wiretest reads the golden vectors of the wire format, for the tests of whoever
// speaks it.
package wiretest

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/metaroce/metaroce/wire"
)

// Vector is one frame and what is to become of it.
type Vector struct {
	Name, Description string
	Port              uint16 // the receiver's UDP port
	Frame             []byte
	Packet            wire.Packet  // what the frame says, if Refuse is empty
	Refuse            wire.Refusal // why it is not taken
	Trailing          int          // bytes at the frame's end that are not the packet's
	Answer            *Answer      // the ACK that it is turned into, where the vector tells
}

// Answer is the ACK that a data frame is turned into.
type Answer struct {
	QPN   uint32 // of the data's sender
	TOS   uint8  // that the receiver sends
	ACK   wire.ACK
	Frame []byte
}

// ICRC is one RoCEv2 packet, from the IP header up to its ICRC.
type ICRC struct {
	Name   string
	Packet []byte
	ICRC   uint32
}

// Vectors reads all vectors, in the order of their names.
func Vectors(t testing.TB) []Vector {
	t.Helper()
	var out []Vector
	each(t, "*.json", func(b []byte) error {
		v, err := decode(b)
		out = append(out, v)
		return err
	})
	return out
}

// ICRCs reads all ICRC vectors.
func ICRCs(t testing.TB) []ICRC {
	t.Helper()
	var out []ICRC
	each(t, "icrc/*.json", func(b []byte) error {
		var v struct {
			Name, Description string
			Packet            hexBytes
			ICRC              hex64
		}
		err := strict(b, &v)
		out = append(out, ICRC{Name: v.Name, Packet: v.Packet, ICRC: uint32(v.ICRC)})
		return err
	})
	return out
}

// each calls f with the contents of every file that matches the pattern.
func each(t testing.TB, pattern string, f func([]byte) error) {
	t.Helper()
	dir, err := root()
	if err != nil {
		t.Fatal(err)
	}
	names, err := filepath.Glob(filepath.Join(dir, "testdata", "vectors", pattern))
	if err != nil {
		t.Fatal(err)
	}
	if len(names) == 0 {
		t.Fatalf("no vectors %s in testdata/vectors: make them with scripts/make_vectors.py", pattern)
	}
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err == nil {
			err = f(b)
		}
		if err != nil {
			t.Fatalf("vector %s: %v", filepath.Base(name), err)
		}
	}
}

// root is the directory with go.mod, at or above the working directory.
func root() (string, error) {
	dir, err := os.Getwd()
	for ; err == nil; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", errors.New("no go.mod at or above the working directory")
		}
	}
	return "", err
}

type hexBytes []byte

func (h *hexBytes) UnmarshalText(b []byte) (err error) {
	*h, err = hex.DecodeString(string(b))
	return err
}

type hex64 uint64

func (h *hex64) UnmarshalText(b []byte) error {
	n, err := strconv.ParseUint(string(b), 0, 64)
	*h = hex64(n)
	return err
}

type mac wire.MAC

func (m *mac) UnmarshalText(b []byte) error {
	hw, err := net.ParseMAC(string(b))
	if err != nil {
		return err
	}
	if len(hw) != len(m) {
		return fmt.Errorf("MAC %s: %d bytes, want %d", b, len(hw), len(m))
	}
	*m = mac(hw)
	return nil
}

type ackJSON struct {
	Path, Gen, Flags uint8
	Token            uint32
	PSeqMax          uint32 `json:"pseq_max"`
	TS               uint32
	Vec              [4]hex64
	Stream           uint16
	Syndrome         uint8
	Reserved         uint8
	PSNCum           uint32 `json:"psn_cum"`
	PSNLimit         uint32 `json:"psn_limit"`
	NakPSN           uint32 `json:"nak_psn"`
	Pkts, CE, Dups   uint32
	RateHint         uint32 `json:"rate_hint"`
	HintEpoch        uint16 `json:"hint_epoch"`
	Reserved2        uint16
	Credit           uint32
}

func (a *ackJSON) ack() wire.ACK {
	out := wire.ACK{
		Path: a.Path, Gen: a.Gen, Flags: a.Flags, Token: a.Token, PSeqMax: a.PSeqMax, TS: a.TS,
		Stream: a.Stream, Syndrome: wire.Syndrome(a.Syndrome), Resv1: a.Reserved,
		PSNCum: a.PSNCum, PSNLimit: a.PSNLimit, NakPSN: a.NakPSN,
		Pkts: a.Pkts, CE: a.CE, Dups: a.Dups, RateHint: a.RateHint, HintEpoch: a.HintEpoch,
		Resv2: a.Reserved2, Credit: a.Credit,
	}
	for i, w := range a.Vec {
		out.Vec[i] = uint64(w)
	}
	return out
}

type fieldsJSON struct {
	SrcMAC       mac `json:"src_mac"`
	DstMAC       mac `json:"dst_mac"`
	VLAN         *uint16
	Src, Dst     netip.Addr
	TOS, TTL     uint8
	ID           uint16
	IPFlags      uint8  `json:"ip_flags"`
	FlowLabel    uint32 `json:"flow_label"`
	Sport, Dport uint16
	NoChecksum   bool `json:"no_checksum"`
	BTH          struct {
		Opcode, Flags   uint8
		PKey            uint16
		Reserved, Resv7 uint8
		QPN, PSN        uint32
		AckReq          bool
	}
	Data *wire.Data
	RETH *struct {
		Addr      hex64
		RKey, Len uint32
	}
	Imm     *wire.Imm
	ACK     *ackJSON
	Payload hexBytes
}

func (f *fieldsJSON) packet() wire.Packet {
	p := wire.Packet{
		SrcMAC: wire.MAC(f.SrcMAC), DstMAC: wire.MAC(f.DstMAC), VLAN: f.VLAN, Src: f.Src, Dst: f.Dst,
		TOS: f.TOS, TTL: f.TTL, ID: f.ID, IPFlags: f.IPFlags, FlowLabel: f.FlowLabel,
		Sport: f.Sport, Dport: f.Dport, NoChecksum: f.NoChecksum,
		BTH: wire.BTH{
			Opcode: wire.Opcode(f.BTH.Opcode), Flags: f.BTH.Flags, PKey: f.BTH.PKey, Reserved: f.BTH.Reserved,
			QPN: f.BTH.QPN, AckReq: f.BTH.AckReq, Resv7: f.BTH.Resv7, PSN: f.BTH.PSN,
		},
		Payload: f.Payload,
	}
	if f.Data != nil {
		p.Data = *f.Data
	}
	if f.RETH != nil {
		p.RETH = wire.RETH{Addr: uint64(f.RETH.Addr), RKey: f.RETH.RKey, Len: f.RETH.Len}
	}
	if f.Imm != nil {
		p.Imm = *f.Imm
	}
	if f.ACK != nil {
		p.ACK = f.ACK.ack()
	}
	return p
}

// strict decodes JSON and refuses names that it does not know, so that no field of a vector
// goes unchecked.
func strict(b []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	return d.Decode(into)
}

func decode(b []byte) (Vector, error) {
	var j struct {
		Name, Description string
		Port              uint16
		Frame             hexBytes
		Fields            *fieldsJSON
		Refuse            string
		Trailing          int
		Answer            *struct {
			QPN   uint32
			TOS   uint8
			ACK   ackJSON
			Frame hexBytes
		}
	}
	if err := strict(b, &j); err != nil {
		return Vector{}, err
	}
	v := Vector{
		Name: j.Name, Description: j.Description, Port: j.Port, Frame: j.Frame,
		Refuse: wire.Refusal(j.Refuse), Trailing: j.Trailing,
	}
	if (j.Fields == nil) == (j.Refuse == "") {
		return v, errors.New("want either fields or refuse")
	}
	if j.Fields != nil {
		v.Packet = j.Fields.packet()
	}
	if j.Answer != nil {
		v.Answer = &Answer{QPN: j.Answer.QPN, TOS: j.Answer.TOS, ACK: j.Answer.ACK.ack(), Frame: j.Answer.Frame}
	}
	return v, nil
}
