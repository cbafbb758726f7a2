// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/cilium/ebpf"
)

// XDP verdicts (linux/bpf.h).
const (
	xdpDrop     = 1
	xdpRedirect = 4
)

// loopback is the interface that BPF_PROG_RUN lets packets come from.
const loopback = 1

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: network namespaces and BPF")
	}
}

// bench is a switch that no interface is attached to: packets come from host 0 on
// plane 0 by BPF_PROG_RUN.
type bench struct {
	*testing.T
	*Lab
}

func newBench(t *testing.T, cfg Config) *bench {
	t.Helper()
	needRoot(t)
	cfg.Name = "bench"
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		t.Fatal(err)
	}
	sw, err := loadSwitch(cfg)
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{T: t, Lab: &Lab{cfg: cfg, sw: sw}}
	t.Cleanup(func() { b.Close() })
	if err := sw.Ports.Put(uint32(loopback), &labLabPort{Used: 1}); err != nil {
		t.Fatal(err)
	}
	b.must(b.putDevices(sw.Flood, 0, []int{loopback}))
	for id := range cfg.Hosts * cfg.Planes {
		b.must(sw.Tx.Put(uint32(id), uint32(loopback)))
		b.must(b.putDevices(sw.Dup, id, []int{loopback, loopback}))
	}
	b.must(sw.Tx.Put(uint32(cfg.Hosts*cfg.Planes), uint32(loopback)))
	return b
}

func (b *bench) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

// run sends a packet into the switch.
func (b *bench) run(packet []byte) (verdict uint32, out []byte) {
	b.Helper()
	opts := ebpf.RunOptions{Data: packet, DataOut: make([]byte, len(packet)+64)}
	verdict, err := b.sw.Switch.Run(&opts)
	b.must(err)
	return verdict, opts.DataOut
}

func (b *bench) wantVerdict(packet []byte, want uint32, why string) []byte {
	b.Helper()
	verdict, out := b.run(packet)
	if verdict != want {
		b.Fatalf("%s: verdict %d, want %d", why, verdict, want)
	}
	return out
}

func (b *bench) counters() Counters {
	b.Helper()
	status, err := b.Status()
	b.must(err)
	return status.Planes[0].Counters
}

// packet builds what host 0 sends to host 1 on plane 0.
type packet struct {
	dst        []byte // MAC; nil: host 1's
	ipv6, vlan bool
	ecn        byte
	sport      uint16
	opcode     byte // of the BTH; 0: not ours
	flags      byte // of the data header
	syndrome   byte
	size       int // bytes of UDP payload behind the headers
}

func (p packet) build() []byte {
	var udp []byte
	dport := DefaultPort
	if p.opcode == 0 {
		dport = 9
	} else {
		udp = append(udp, p.opcode, 0, 0xff, 0xff)
		udp = append(udp, make([]byte, 8)...) // QPN, PSN
		udp = append(udp, 0, 0, p.flags, 0x10)
		udp = append(udp, make([]byte, 84)...)
		udp[12+50] = p.syndrome
	}
	udp = append(udp, make([]byte, p.size)...)
	length := 8 + len(udp)

	frame := append([]byte(nil), p.dst...)
	if p.dst == nil {
		frame = append(frame, hostMAC(1, 0)...)
	}
	frame = append(frame, hostMAC(0, 0)...)
	if p.vlan {
		frame = append(frame, 0x81, 0, 0, 7)
	}
	if p.ipv6 {
		frame = append(frame, 0x86, 0xdd, 0x60, p.ecn<<4, 0, 0)
		frame = binary.BigEndian.AppendUint16(frame, uint16(length))
		frame = append(frame, 17, 64)
		for host := range 2 {
			addr := new(Lab).Addr6(host, 0).As16()
			frame = append(frame, addr[:]...)
		}
	} else {
		ip := []byte{0x45, p.ecn}
		ip = binary.BigEndian.AppendUint16(ip, uint16(20+length))
		ip = append(ip, 0, 0, 0x40, 0, 64, 17, 0, 0, 198, 18, 0, 1, 198, 18, 0, 2)
		binary.BigEndian.PutUint16(ip[10:], ^onesSum(ip))
		frame = append(append(frame, 8, 0), ip...)
	}
	frame = binary.BigEndian.AppendUint16(frame, p.sport)
	frame = binary.BigEndian.AppendUint16(frame, dport)
	frame = binary.BigEndian.AppendUint16(frame, uint16(length))
	return append(append(frame, 0, 0), udp...)
}

// onesSum is the Internet checksum's sum (RFC 1071).
func onesSum(b []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return uint16(sum)
}

func TestSwitch_forwardsByDestinationWithinThePlane(t *testing.T) {
	b := newBench(t, Config{Hosts: 3, Planes: 2})
	// Only host 2 has a way out: a packet that arrives went there.
	for id := range 6 {
		b.must(b.sw.Tx.Put(uint32(id), uint32(loopback)))
		if id != 2 {
			b.must(b.sw.Tx.Delete(uint32(id)))
		}
	}
	b.wantVerdict(packet{dst: hostMAC(2, 0)}.build(), xdpRedirect, "to host 2")
	b.wantVerdict(packet{dst: hostMAC(1, 0)}.build(), xdpDrop, "to host 1, unplugged")
	b.wantVerdict(packet{dst: hostMAC(2, 1)}.build(), xdpDrop, "to the other plane")
	b.wantVerdict(packet{dst: hostMAC(3, 0)}.build(), xdpDrop, "to a host that is not there")
	b.wantVerdict(packet{dst: []byte{0x02, 0, 0, 0, 0, 2}}.build(), xdpDrop, "to a foreign MAC")
	if got := b.counters(); got.Packets != 5 || got.Unknown != 3 {
		t.Errorf("packets %d, unknown %d, want 5 and 3", got.Packets, got.Unknown)
	}
}

func TestSwitch_floodsMulticastAndBroadcast(t *testing.T) {
	b := newBench(t, Config{})
	b.wantVerdict(packet{dst: []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}}.build(), xdpRedirect, "broadcast")
	b.wantVerdict(packet{dst: []byte{0x33, 0x33, 0, 0, 0, 1}, ipv6: true}.build(), xdpRedirect, "multicast")
	if got := b.counters().Flooded; got != 2 {
		t.Errorf("flooded %d, want 2", got)
	}
}

func TestSwitch_leavesPacketsOfAHealthyNetworkAlone(t *testing.T) {
	b := newBench(t, Config{Spines: 4, Rate: 1e13})
	for _, p := range []packet{{}, {ipv6: true}, {vlan: true, ecn: 2}, {opcode: 0xc0, size: 3072, ecn: 2}} {
		in := p.build()
		if out := b.wantVerdict(in, xdpRedirect, fmt.Sprintf("%+v", p)); !bytes.Equal(in, out) {
			t.Errorf("%+v: packet changed on its way", p)
		}
	}
}

// slow is a rate at which a queue does not drain while a test runs.
const slow = 10_000

func TestSwitch_marksECNCapablePacketsAboveTheThreshold(t *testing.T) {
	for _, p := range []packet{
		{ecn: 2, size: 1000},
		{ecn: 1, size: 1001},
		{ecn: 2, size: 1000, vlan: true},
		{ecn: 2, size: 1000, ipv6: true},
		{ecn: 2, size: 1000, ipv6: true, vlan: true},
	} {
		t.Run(fmt.Sprintf("%+v", p), func(t *testing.T) {
			b := newBench(t, Config{Rate: slow, ECN: 1500})
			in := p.build()
			for i := range 2 { // nothing queued, then less than the threshold
				if out := b.wantVerdict(in, xdpRedirect, "below the threshold"); !bytes.Equal(in, out) {
					t.Fatalf("packet %d changed below the threshold", i)
				}
			}
			out := b.wantVerdict(in, xdpRedirect, "above the threshold")
			l3 := 14
			if p.vlan {
				l3 += 4
			}
			want := bytes.Clone(in)
			if p.ipv6 {
				want[l3+1] |= 0x30
			} else {
				want[l3+1] |= 3
				want[l3+10], want[l3+11] = 0, 0
				binary.BigEndian.PutUint16(want[l3+10:], ^onesSum(want[l3:l3+20]))
			}
			if !bytes.Equal(out, want) {
				t.Errorf("above the threshold: got\n%x, want CE and a good header checksum\n%x", out[:l3+40], want[:l3+40])
			}
			status, err := b.Status()
			b.must(err)
			if got := status.Planes[0].Counters.Marked; got != 1 {
				t.Errorf("plane counts %d marks, want 1", got)
			}
			if q := status.Planes[0].Queues[1]; q.Marked != 1 || q.Packets != 3 || q.Bytes != uint64(3*len(in)) {
				t.Errorf("queue counts %+v, want 1 mark, 3 packets, %d bytes", q, 3*len(in))
			}
		})
	}
}

func TestSwitch_neverMarksWhatIsNotECNCapable(t *testing.T) {
	b := newBench(t, Config{Rate: slow, ECN: 1})
	for _, p := range []packet{{size: 1000}, {size: 1000, ipv6: true}} {
		in := p.build()
		for range 4 {
			if out := b.wantVerdict(in, xdpRedirect, "not ECT"); !bytes.Equal(in, out) {
				t.Fatalf("%+v: packet changed", p)
			}
		}
	}
	if got := b.counters().Marked; got != 0 {
		t.Errorf("marked %d, want 0", got)
	}
}

func TestSwitch_dropsWhenTheQueueIsFull(t *testing.T) {
	b := newBench(t, Config{Rate: slow, Queue: 8000, MTU: 3400})
	in := packet{size: 2000 - 42}.build() // a frame of 2000 bytes
	for i := range 4 {
		b.wantVerdict(in, xdpRedirect, fmt.Sprintf("packet %d fits", i))
	}
	b.wantVerdict(in, xdpDrop, "packet 4 does not fit")
	b.wantVerdict(packet{dst: hostMAC(0, 0), size: 2000 - 42}.build(), xdpRedirect, "another host's queue")
	status, err := b.Status()
	b.must(err)
	if q := status.Planes[0].Queues[1]; q.Dropped != 1 || q.Packets != 4 || q.PeakBytes < 7000 || q.PeakBytes > 8000 {
		t.Errorf("queue counts %+v, want 1 drop, 4 packets, a peak of nearly 8000 bytes", q)
	}
	if got := status.Planes[0].Counters.QueueDropped; got != 1 {
		t.Errorf("plane counts %d queue drops, want 1", got)
	}
}

func TestSwitch_spreadsFlowsOverSpinesAndKeepsEachOnOne(t *testing.T) {
	for _, ipv6 := range []bool{false, true} {
		t.Run(fmt.Sprintf("ipv6=%v", ipv6), func(t *testing.T) {
			b := newBench(t, Config{Spines: 4, Seed: 7})
			for range 10 {
				b.run(packet{ipv6: ipv6, sport: 50000}.build())
			}
			used := func() (spines []uint64) {
				status, err := b.Status()
				b.must(err)
				for _, q := range status.Planes[0].Queues {
					if q.Host == 1 && q.Packets > 0 {
						spines = append(spines, q.Packets)
					}
				}
				return spines
			}
			if got := used(); len(got) != 1 || got[0] != 10 {
				t.Fatalf("one flow: packets by used spine %v, want [10]", got)
			}
			for flow := range 400 {
				b.run(packet{ipv6: ipv6, sport: uint16(50001 + flow)}.build())
			}
			got := used()
			if len(got) != 4 {
				t.Fatalf("400 flows: packets by used spine %v, want 4 spines", got)
			}
			for _, packets := range got {
				if packets < 60 || packets > 150 {
					t.Errorf("400 flows: packets by spine %v, want about 100 each", got)
				}
			}
		})
	}
}

func TestSwitch_scriptHitsExactlyTheDescribedPackets(t *testing.T) {
	const write, ack, probe = 0xc0, 0xd0, 0xd1
	shared := newBench(t, Config{})
	data := packet{opcode: write}
	last := packet{opcode: write, flags: 0x02}
	retx := packet{opcode: write, flags: 0x01}
	lastRetx := packet{opcode: write, flags: 0x03}
	ok, nak, probing := packet{opcode: ack}, packet{opcode: ack, syndrome: 0x62}, packet{opcode: probe}
	foreign := packet{}
	for _, test := range []struct {
		script string
		send   []packet
		drops  []int
	}{
		{"drop ack 1; drop data last", []packet{data, ok, ok, data, last, last}, []int{1, 4}},
		{"drop data 3", []packet{data, foreign, ok, last, data, data}, []int{4}},
		{"drop data 2-3", []packet{data, data, data, data}, []int{1, 2}},
		{"drop data retx 1", []packet{data, last, retx, retx}, []int{2}},
		{"drop data last retx", []packet{last, retx, lastRetx, lastRetx}, []int{2}},
		{"drop probe 2", []packet{probing, data, probing, probing}, []int{2}},
		{"drop nak 1", []packet{ok, nak, nak}, []int{1}},
		{"drop ack 2", []packet{ok, nak, ok}, []int{1}},
		{"drop ack 1; drop ack 2; drop ack 2", []packet{ok, ok, ok}, []int{0, 1}},
	} {
		for _, variant := range []packet{{}, {vlan: true}, {ipv6: true}} {
			t.Run(fmt.Sprintf("%s vlan=%v ipv6=%v", test.script, variant.vlan, variant.ipv6), func(t *testing.T) {
				b := &bench{T: t, Lab: shared.Lab}
				b.must(b.Fault(FaultConfig{Script: test.script}))
				before := b.counters().Scripted
				var drops []int
				for i, p := range test.send {
					p.vlan, p.ipv6 = variant.vlan, variant.ipv6
					if verdict, _ := b.run(p.build()); verdict == xdpDrop {
						drops = append(drops, i)
					}
				}
				if fmt.Sprint(drops) != fmt.Sprint(test.drops) {
					t.Errorf("dropped %v, want %v", drops, test.drops)
				}
				if got := b.counters().Scripted - before; got != uint64(len(test.drops)) {
					t.Errorf("counted %d scripted drops, want %d", got, len(test.drops))
				}
			})
		}
	}
}

func TestSwitch_statusReportsRules(t *testing.T) {
	b := newBench(t, Config{Planes: 2})
	b.must(b.Script([]int{0}, "drop ack 2"))
	b.must(b.Script([]int{1}, "drop probe 1"))
	b.must(b.Script([]int{0}, "drop ack 2"))
	for range 3 {
		b.run(packet{opcode: 0xd0}.build())
	}
	status, err := b.Status()
	b.must(err)
	if len(status.Rules) != 1 {
		t.Fatalf("rules %+v, want only the last script's", status.Rules)
	}
	got := status.Rules[0]
	if got.Rule != "drop ack 2" || fmt.Sprint(got.Planes) != "[0]" || got.Seen != 3 || got.Hits != 1 {
		t.Errorf("rule %+v, want drop ack 2 on plane 0, 3 seen, 1 hit", got)
	}
}

// losses sends packets and says which the switch dropped.
func (b *bench) losses(packets int) []bool {
	in := packet{size: 20}.build()
	lost := make([]bool, packets)
	for i := range lost {
		verdict, _ := b.run(in)
		lost[i] = verdict == xdpDrop
	}
	return lost
}

func TestSwitch_sameSeedReplaysTheSameLosses(t *testing.T) {
	const packets = 2000
	fault := FaultConfig{Loss: 0.3}
	run := func(seed uint64) []bool {
		b := newBench(t, Config{Seed: seed})
		b.must(b.Fault(fault))
		lost := b.losses(packets)
		if got := b.counters().Lost; got < packets/4 || got > packets*35/100 {
			t.Errorf("seed %d: lost %d of %d, want about 30 %%", seed, got, packets)
		}
		b.must(b.Fault(fault))
		if again := b.losses(packets); fmt.Sprint(again) != fmt.Sprint(lost) {
			t.Errorf("seed %d: setting the fault again did not start the draws anew", seed)
		}
		return lost
	}
	first, second, other := run(5), run(5), run(6)
	if fmt.Sprint(first) != fmt.Sprint(second) {
		t.Error("two labs with one seed lost different packets")
	}
	if fmt.Sprint(first) == fmt.Sprint(other) {
		t.Error("two labs with different seeds lost the same packets")
	}
}

func TestSwitch_burstsHaveTheirMeanLengthAndKeepTheShare(t *testing.T) {
	b := newBench(t, Config{Seed: 3})
	b.must(b.Fault(FaultConfig{Loss: 0.1, Burst: 5}))
	lost, runs, previous := 0, 0, false
	for _, l := range b.losses(20000) {
		if l {
			lost++
			if !previous {
				runs++
			}
		}
		previous = l
	}
	if mean := float64(lost) / float64(runs); mean < 4 || mean > 6 {
		t.Errorf("mean run of losses %.2f packets, want about 5", mean)
	}
	if lost < 1600 || lost > 2400 {
		t.Errorf("lost %d of 20000, want about 10 %%", lost)
	}
}

func TestSwitch_corruptsOneByteBehindTheEthernetHeaderAndMendsNothing(t *testing.T) {
	b := newBench(t, Config{})
	b.must(b.Fault(FaultConfig{Corrupt: 1}))
	in := packet{opcode: 0xc0, size: 64}.build()
	bits, wholeBytes, places := 0, 0, map[int]bool{}
	for range 500 {
		out := b.wantVerdict(in, xdpRedirect, "corrupted")
		var differing []int
		for i := range in {
			if in[i] != out[i] {
				differing = append(differing, i)
			}
		}
		if len(differing) != 1 || differing[0] < ethernetHeader {
			t.Fatalf("bytes %v differ, want exactly one, from %d on", differing, ethernetHeader)
		}
		places[differing[0]] = true
		switch change := in[differing[0]] ^ out[differing[0]]; {
		case change == 0xff:
			wholeBytes++
		case change&(change-1) == 0:
			bits++
		default:
			t.Fatalf("byte %d changed by %#x, want one bit or all", differing[0], change)
		}
	}
	if bits < 150 || wholeBytes < 150 || len(places) < len(in)/2 {
		t.Errorf("%d bits, %d bytes, %d places of %d: want about 250, 250 and nearly all", bits, wholeBytes, len(places), len(in))
	}
	if got := b.counters().Corrupted; got != 500 {
		t.Errorf("counted %d, want 500", got)
	}
}

func TestSwitch_faultsSpareWhatIsNotIP(t *testing.T) {
	b := newBench(t, Config{})
	b.must(b.Fault(FaultConfig{Loss: 1}))
	arp := packet{}.build()
	arp[12], arp[13] = 8, 6
	b.wantVerdict(arp, xdpRedirect, "ARP")
	b.wantVerdict(packet{}.build(), xdpDrop, "IPv4")
	b.wantVerdict(packet{ipv6: true}.build(), xdpDrop, "IPv6")
}

func TestSwitch_countsDuplicatesAndDetours(t *testing.T) {
	b := newBench(t, Config{})
	b.must(b.Fault(FaultConfig{Duplicate: 1}))
	b.wantVerdict(packet{}.build(), xdpRedirect, "duplicated")
	b.must(b.Fault(FaultConfig{Reorder: 1}))
	b.wantVerdict(packet{}.build(), xdpRedirect, "reordered")
	b.must(b.Fault(FaultConfig{}))
	b.wantVerdict(packet{}.build(), xdpRedirect, "healed")
	if got := b.counters(); got.Duplicated != 1 || got.Reordered != 1 {
		t.Errorf("duplicated %d, reordered %d, want 1 and 1", got.Duplicated, got.Reordered)
	}
}

func TestSwitch_planeDownDropsEverythingUntilItIsUp(t *testing.T) {
	b := newBench(t, Config{Planes: 2})
	b.must(b.PlaneDown(0))
	b.must(b.Fault(FaultConfig{})) // does not bring it up
	b.wantVerdict(packet{}.build(), xdpDrop, "down")
	b.wantVerdict(packet{dst: []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}}.build(), xdpDrop, "broadcast, down")
	b.must(b.PlaneUp(0))
	b.wantVerdict(packet{}.build(), xdpRedirect, "up")
	if got := b.counters().Down; got != 2 {
		t.Errorf("counted %d, want 2", got)
	}
}

func TestFault_refusesWhatIsNotThere(t *testing.T) {
	b := newBench(t, Config{Planes: 2})
	for _, err := range []error{
		b.PlaneDown(2),
		b.PlaneUp(-1),
		b.Fault(FaultConfig{Planes: []int{2}}),
		b.Fault(FaultConfig{Loss: 1.5}),
		b.Fault(FaultConfig{Burst: -1}),
		b.Fault(FaultConfig{Script: "drop everything"}),
	} {
		if err == nil {
			t.Error("accepted, want an error")
		}
	}
}

func BenchmarkSwitch(b *testing.B) {
	if os.Geteuid() != 0 {
		b.Skip("needs root: BPF")
	}
	for _, test := range []struct {
		name  string
		cfg   Config
		fault FaultConfig
	}{
		{name: "plain"},
		{name: "rate", cfg: Config{Rate: 1e13}},
		{name: "loss", fault: FaultConfig{Loss: 0.01}},
		{name: "script", fault: FaultConfig{Script: "drop ack 1; drop data 4000000000"}},
	} {
		b.Run(test.name, func(b *testing.B) {
			sw, err := loadSwitch(test.cfg.withDefaults())
			if err != nil {
				b.Fatal(err)
			}
			l := &Lab{cfg: test.cfg.withDefaults(), sw: sw}
			defer l.Close()
			if err := sw.Ports.Put(uint32(loopback), &labLabPort{Used: 1}); err != nil {
				b.Fatal(err)
			}
			if err := l.Fault(test.fault); err != nil {
				b.Fatal(err)
			}
			perRun, err := measure(sw.Switch, packet{opcode: 0xc0, size: 1024}.build(), b.N)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(float64(perRun.Nanoseconds()), "ns/op")
		})
	}
}

// measure asks the kernel what a run of the program costs.
func measure(program *ebpf.Program, packet []byte, runs int) (time.Duration, error) {
	_, perRun, err := program.Benchmark(packet, max(runs, 1), nil)
	return perRun, err
}
