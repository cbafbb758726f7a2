// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/metaroce/metaroce/loader"
)

var update = flag.Bool("update", false, "write the golden files")

func TestCounterNamesAreTheFieldsOfTheBPFStructInItsOrder(t *testing.T) {
	spec, err := ebpf.LoadCollectionSpec("../loader/metaroce_bpfel.o")
	if err != nil {
		t.Fatal(err)
	}
	var s *btf.Struct
	if err := spec.Types.TypeByName("mr_counters", &s); err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, m := range s.Members {
		want = append(want, m.Name)
	}
	var got []string
	for _, c := range NewCounters(loader.Counters{}) {
		got = append(got, c.Name)
	}
	if !slices.Equal(got, want) {
		t.Errorf("names are %v, want %v", got, want)
	}
}

func TestEveryCounterKeepsItsValueUnderItsName(t *testing.T) {
	var raw loader.Counters
	v := reflect.ValueOf(&raw).Elem()
	n := uint64(0)
	for i := range v.NumField() {
		if v.Type().Field(i).Name != "_" {
			n++
			v.Field(i).SetUint(n)
		}
	}
	c := NewCounters(raw)
	for i, k := range c {
		if k.Value != uint64(i+1) {
			t.Errorf("%s is %d, want %d", k.Name, k.Value, i+1)
		}
	}
	if got, ok := c.Get("np_ecn_marked_roce_packets"); !ok || got != raw.NpEcnMarkedRocePackets {
		t.Errorf("np_ecn_marked_roce_packets is %d (%v), want %d", got, ok, raw.NpEcnMarkedRocePackets)
	}
	if _, ok := c.Get("no_such_counter"); ok {
		t.Error("a counter that is not there is found")
	}
}

func TestCountersAreSummedOverCPUs(t *testing.T) {
	sum := loader.SumCounters([]loader.Counters{
		{SentPkts: 1, BadReady: 10}, {SentPkts: 1 << 40}, {SentPkts: 5, BadReady: 1, DropToken: 3},
	})
	want := loader.Counters{SentPkts: 1<<40 + 6, BadReady: 11, DropToken: 3}
	if sum != want {
		t.Errorf("sum is %+v, want %+v", sum, want)
	}
}

func TestCountersSurviveJSONInOrder(t *testing.T) {
	in := NewCounters(loader.Counters{SentPkts: 7, BadReady: 1<<64 - 1})
	b, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	var out Counters
	if err := json.Unmarshal(b, &out); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(in, out) {
		t.Errorf("%s decodes to %v, want %v", b, out, in)
	}
}

func TestCountersRefuseJSONThatIsNone(t *testing.T) {
	for _, s := range []string{`[]`, `{"sent_pkts":-1}`, `{"sent_pkts":"x"}`, `{"a":1`, `7`} {
		var c Counters
		if err := json.Unmarshal([]byte(s), &c); err == nil {
			t.Errorf("%s decodes to %v, want an error", s, c)
		}
	}
}

// fakeDevice holds a device's registers as the kernel would.
type fakeDevice struct {
	conns   []loader.Conn
	paths   []loader.Path
	regions []loader.Region
	pump    loader.Pump
	rings   []loader.Egress
	counter loader.Counters
	err     error
}

func (f *fakeDevice) MaxConns() int                      { return len(f.conns) }
func (f *fakeDevice) Conn(i int) (*loader.Conn, error)   { return &f.conns[i], f.err }
func (f *fakeDevice) Regions() ([]loader.Region, error)  { return f.regions, nil }
func (f *fakeDevice) Egresses() ([]loader.Egress, error) { return f.rings, nil }
func (f *fakeDevice) Pump() (*loader.Pump, error)        { return &f.pump, nil }
func (f *fakeDevice) Counters() (loader.Counters, error) { return f.counter, nil }
func (f *fakeDevice) Path(i int) (*loader.Path, error)   { return &f.paths[i], nil }

// words lays out an address as the registers hold it: bytes in network order.
func words(b [16]byte) (w [4]uint32) {
	for i := range w {
		w[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return w
}

func mapped(a, b, c, d byte) [4]uint32 {
	return words([16]byte{10: 0xff, 11: 0xff, 12: a, 13: b, 14: c, 15: d})
}

func example() (*fakeDevice, loader.Device) {
	f := &fakeDevice{
		conns: make([]loader.Conn, 3),
		paths: make([]loader.Path, 8),
		regions: []loader.Region{
			{Key: 3<<8 | 9, Pd: 1, Access: loader.AccessLocalWrite | loader.AccessRemoteWrite, Base: 0x10000, Len: 1 << 20},
			{Key: 5<<8 | 1, Pd: 1, Len: 4096},
		},
		rings: []loader.Egress{
			{Ifindex: 3, Traced: 1, TxSent: 990, TxLocalDrop: 10, AckSent: 9, Active: 1, Burst: 112, Held: 4},
			{Ifindex: 5},
		},
		pump:    loader.Pump{Sleeping: 1, Sent: 1234, Idle: 5, Tail: 7, Head: 5},
		counter: loader.Counters{SentPkts: 1000, Retransmits: 10, RcvdAcks: 130},
	}
	c := &f.conns[1]
	*c = loader.Conn{
		Qpn: 0x101, PeerQpn: 0x2fe, Payload: 3072, Npaths: 2, Checksum: 1, Tos: 26<<2 | 2, PathBase: 4,
		State: loader.ConnOpen, PsnNext: 900, PsnCum: 880, PsnLimit: 9000, MsnNext: 12, Credit: 4, Ordinal: 4, NoCredit: 1,
	}
	c.Rxs.Cum = 77
	c.Tx[0] = loader.TxPath{
		Next: 500, Una: 480, Cwnd: 32, Pace: 4096, Gen: 1, Sport: 50001, SrttNs: 123456, MinRttNs: 20100,
		Lost: 6, Ce: 3, Sent: 510, SentBytes: 1600000, Retx: 6, Probes: 2, Acks: 70,
	}
	c.Tx[1] = loader.TxPath{Next: 3, Una: 0xfffffffe, Cwnd: 16, State: loader.PathSuspect, Sport: 50002, Gen: 255}
	c.Rx[0] = loader.RxPath{Pkts: 70, Dups: 1, Ce: 2, Ooo: 3, Sport: 51000}
	f.paths[4] = loader.Path{Ifindex: 3, Local: mapped(198, 18, 0, 1), Peer: mapped(198, 18, 0, 2)}
	v6 := [16]byte{0xfd, 15: 2}
	f.paths[5] = loader.Path{Ifindex: 99, Local: words([16]byte{0xfd, 15: 1}), Peer: words(v6)}
	f.conns[2] = loader.Conn{Qpn: 0x102, State: loader.ConnError, Payload: 1024, NakSyndrome: 0x62, NakPsn: 5, Fault: loader.FaultLocProt}
	d := loader.Device{
		Dir: "/sys/fs/bpf/metaroce/4026532300-h0p0", Name: "4026532300-h0p0", Alive: true,
		Owner: loader.Owner{
			PID: 4711, Device: "4026532300-h0p0", PumpCPUs: "0", PumpCPU: new(int), Netns: 4026532300, Port: 4791, MaxConns: 256,
			Since: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
			Interfaces: []loader.Interface{
				{Name: "h0p0", Index: 3, MTU: 3400, MAC: "02:00:00:00:00:01", Driver: "veth", Mode: loader.ModeNative},
				{Name: "h0p1", Index: 5, MTU: 3400, MAC: "02:00:00:00:00:02", Driver: "veth", Mode: loader.ModeNative},
			},
		},
	}
	return f, d
}

func mustCollect(t *testing.T) *Status {
	t.Helper()
	f, d := example()
	st, err := Collect(f, d)
	if err != nil {
		t.Fatal(err)
	}
	return st
}

func TestCollectListsConnectionsThatAreNotFree(t *testing.T) {
	st := mustCollect(t)
	if len(st.Connections) != 2 || st.Connections[0].Slot != 1 || st.Connections[1].State != "error" {
		t.Fatalf("connections are %+v, want slots 1 and 2", st.Connections)
	}
	c := st.Connections[0]
	if c.Peer != "198.18.0.2" || c.DSCP != 26 || len(c.Paths) != 2 {
		t.Errorf("connection is %+v, want peer 198.18.0.2, DSCP 26 and 2 paths", c)
	}
	p := c.Paths[0]
	if p.Plane != 0 || p.Interface != "h0p0" || p.RateBps != 2_000_000_000 {
		t.Errorf("path 0 is %+v, want plane 0, h0p0, and 2 Gbit/s from a pace of 4096 ns a KiB", p)
	}
	p = c.Paths[1]
	if p.Plane != -1 || p.Peer != "fd00::2" || p.InFlight != 5 {
		t.Errorf("path 1 is %+v, want plane -1, peer fd00::2, and 5 in flight across the wrap", p)
	}
}

func TestCollectSaysWhichDeviceItCouldNotRead(t *testing.T) {
	f, d := example()
	f.err = errors.New("no such map")
	_, err := Collect(f, d)
	if !errors.Is(err, f.err) || !strings.Contains(err.Error(), d.Name) {
		t.Errorf("error is %v, want it to name %s", err, d.Name)
	}
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s differs (-update writes it); got:\n%s", path, got)
	}
}

func TestTextOfADeviceIsTheGoldenOne(t *testing.T) {
	var b bytes.Buffer
	if err := mustCollect(t).WriteText(&b, false); err != nil {
		t.Fatal(err)
	}
	golden(t, "status.txt", b.Bytes())
}

func TestJSONOfADeviceIsTheGoldenOne(t *testing.T) {
	st := mustCollect(t)
	// New counters are no reason to change the file.
	st.Counters = slices.DeleteFunc(st.Counters, func(c Counter) bool { return c.Value == 0 })
	b, err := json.MarshalIndent(st, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "status.json", append(b, '\n'))
}

func TestTextHasAllCountersWhenAsked(t *testing.T) {
	var b bytes.Buffer
	st := mustCollect(t)
	if err := st.WriteText(&b, true); err != nil {
		t.Fatal(err)
	}
	for _, c := range st.Counters {
		if !strings.Contains(b.String(), "\n"+c.Name+" ") {
			t.Errorf("no line for %s", c.Name)
		}
	}
}

func TestTextOfADeadDeviceSaysSo(t *testing.T) {
	f, d := example()
	d.Alive = false
	st, err := Collect(f, d)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := st.WriteText(&b, false); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(b.String(), "4711) is gone") {
		t.Errorf("text does not say that process 4711 is gone:\n%s", b.String())
	}
}
