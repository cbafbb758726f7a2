// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"strconv"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/metaroce/metaroce/loader"
)

// metaVersion changes when the maps' layout does: a lab of another version cannot be opened.
const metaVersion = 1

// The detour: a veth pair inside the switch, through which go what is to be
// overtaken and the second copies.
const (
	detourNear = "detour0"
	detourFar  = "detour1"
)

// switchMaps are the maps that outlive the process that made the lab.
type switchMaps struct {
	Counts *ebpf.Map     `ebpf:"mr_lab_counts"`
	Meta   *ebpf.Map     `ebpf:"mr_lab_meta"`
	Planes *ebpf.Map     `ebpf:"mr_lab_planes"`
	Ports  *ebpf.Map     `ebpf:"mr_lab_ports"`
	Queues *ebpf.Map     `ebpf:"mr_lab_queues"`
	Random *ebpf.Map     `ebpf:"mr_lab_random"`
	Rules  *ebpf.Map     `ebpf:"mr_lab_rules"`
	Tx     *ebpf.Map     `ebpf:"mr_lab_tx"`
	Dup    *ebpf.Map     `ebpf:"mr_lab_dup"`
	Flood  *ebpf.Map     `ebpf:"mr_lab_flood"`
	Switch *ebpf.Program `ebpf:"mr_lab_switch"`
	Detour *ebpf.Program `ebpf:"mr_lab_detour"`
}

func (m *switchMaps) maps() map[string]**ebpf.Map {
	return map[string]**ebpf.Map{
		labMapMrLabCounts: &m.Counts,
		labMapMrLabMeta:   &m.Meta,
		labMapMrLabPlanes: &m.Planes,
		labMapMrLabPorts:  &m.Ports,
		labMapMrLabQueues: &m.Queues,
		labMapMrLabRandom: &m.Random,
		labMapMrLabRules:  &m.Rules,
		labMapMrLabTx:     &m.Tx,
		labMapMrLabDup:    &m.Dup,
		labMapMrLabFlood:  &m.Flood,
	}
}

func (m *switchMaps) close() error {
	errs := []error{m.Switch.Close(), m.Detour.Close()}
	for _, field := range m.maps() {
		errs = append(errs, (*field).Close())
	}
	return errors.Join(errs...)
}

// loadSwitch loads the switch's programs and maps for a lab of cfg's shape.
func loadSwitch(cfg Config) (*switchMaps, error) {
	spec, err := loadLab()
	if err != nil {
		return nil, fmt.Errorf("switch: %w", err)
	}
	ports := uint32(cfg.Hosts * cfg.Planes)
	spec.Maps[labMapMrLabCounts].MaxEntries = ports
	spec.Maps[labMapMrLabRandom].MaxEntries = ports
	spec.Maps[labMapMrLabDup].MaxEntries = ports
	spec.Maps[labMapMrLabTx].MaxEntries = ports + 1
	spec.Maps[labMapMrLabQueues].MaxEntries = ports * uint32(cfg.Spines)
	for name, value := range map[string]any{
		labVarLabHosts:     uint32(cfg.Hosts),
		labVarLabSpines:    uint32(cfg.Spines),
		labVarLabDetourKey: ports,
		labVarLabUdpPort:   uint32(cfg.Port),
		labVarLabHashSeed:  cfg.Seed,
	} {
		if err := spec.Variables[name].Set(value); err != nil {
			return nil, fmt.Errorf("switch: constant %s: %w", name, err)
		}
	}
	var sw switchMaps
	if err := spec.LoadAndAssign(&sw, nil); err != nil {
		return nil, fmt.Errorf("switch: load: %w", err)
	}
	if err := sw.configure(cfg); err != nil {
		return nil, errors.Join(err, sw.close())
	}
	return &sw, nil
}

// configure writes what does not depend on interfaces.
func (m *switchMaps) configure(cfg Config) error {
	meta := labLabMeta{
		Version: metaVersion, Seed: cfg.Seed, Rate: cfg.Rate, Ecn: cfg.ECN, Queue: cfg.Queue,
		Hosts: uint32(cfg.Hosts), Planes: uint32(cfg.Planes), Spines: uint32(cfg.Spines),
		Mtu: uint32(cfg.MTU), Queues: uint32(cfg.Queues), Port: uint32(cfg.Port),
	}
	if cfg.Threaded {
		meta.Threaded = 1
	}
	if err := m.Meta.Put(uint32(0), &meta); err != nil {
		return fmt.Errorf("switch: %w", err)
	}
	for plane := range cfg.Planes {
		entry := labLabPlane{Seed: cfg.Seed}
		setQueue(&entry, cfg)
		if err := m.Planes.Put(uint32(plane), &entry); err != nil {
			return fmt.Errorf("switch: plane %d: %w", plane, err)
		}
	}
	return nil
}

// ticksPerNs is LAB_TICKS_PER_NS of bpf/lab_types.h.
const ticksPerNs = 1024

// setQueue computes a plane's virtual queues: their clock counts ticks, and a byte
// costs byteCost/2^20 of them.
func setQueue(entry *labLabPlane, cfg Config) {
	if cfg.Rate > 0 {
		entry.ByteCost = uint64(math.Round(ticksPerNs * (1 << 20) * 8e9 / float64(cfg.Rate)))
		entry.EcnTicks = queueTicks(cfg.ECN, entry.ByteCost)
		entry.MaxTicks = queueTicks(cfg.Queue, entry.ByteCost)
	}
	if cfg.Rate > 0 || cfg.Spines > 1 {
		entry.Flags |= labLabPlaneFlagLAB_P_QUEUE
	}
}

func queueTicks(bytes, byteCost uint64) uint64 {
	ticks := float64(bytes) * float64(byteCost) / (1 << 20)
	return uint64(min(ticks, math.MaxInt64/2))
}

// pinRoot holds a directory for each lab that has a switch.
const pinRoot = "/sys/fs/bpf/metaroce-lab"

// joinBySwitch makes the switch and gives every host one interface a plane.
func (l *Lab) joinBySwitch(ctx context.Context) error {
	if err := loader.EnsureBPFFS(slog.New(slog.DiscardHandler)); err != nil {
		return err
	}
	if err := createNetNS(l.switchNamespace()); err != nil {
		return err
	}
	// The switch has no addresses: whatever its own stack sent would be noise.
	err := inNetNS(l.switchNamespace(), func() error {
		return setSysctl("ipv6/conf/default/disable_ipv6", "1")
	})
	if err != nil {
		return err
	}
	if l.sw, err = loadSwitch(l.cfg); err != nil {
		return err
	}
	if err := l.sw.pin(l.cfg.Name); err != nil {
		return err
	}
	detour, err := l.addDetour()
	if err != nil {
		return err
	}
	for plane := range l.cfg.Planes {
		if err := l.addPlane(ctx, plane, detour); err != nil {
			return fmt.Errorf("plane %d: %w", plane, err)
		}
	}
	for host := range l.cfg.Hosts {
		if err := l.configureHost(host); err != nil {
			return err
		}
	}
	return nil
}

// addDetour makes the pair for what is to come late and returns its near end's index.
func (l *Lab) addDetour() (index int, err error) {
	handle, err := netlinkIn(l.switchNamespace())
	if err != nil {
		return 0, err
	}
	defer handle.Close()
	p := pair{handle: handle, name: detourNear, peer: detourFar, mtu: l.cfg.MTU, queues: 1}
	if err := p.add(); err != nil {
		return 0, err
	}
	if index, err = linkUp(handle, detourNear); err != nil {
		return 0, err
	}
	far, err := linkUp(handle, detourFar)
	if err != nil {
		return 0, err
	}
	return index, inNetNS(l.switchNamespace(), func() error {
		if err := l.attach(l.sw.Detour, detourFar, far); err != nil {
			return err
		}
		// A thread must be woken before the detour goes on; meanwhile others overtake.
		if err := setThreaded(detourFar); err != nil {
			return err
		}
		return l.sw.Tx.Put(uint32(l.cfg.Hosts*l.cfg.Planes), uint32(index))
	})
}

func switchPort(host, plane int) string {
	return "h" + strconv.Itoa(host) + "p" + strconv.Itoa(plane)
}

// addPlane makes a plane's ports with everything that leads to them.
func (l *Lab) addPlane(ctx context.Context, plane, detour int) error {
	handle, err := netlinkIn(l.switchNamespace())
	if err != nil {
		return err
	}
	defer handle.Close()
	indices := make([]int, l.cfg.Hosts)
	for host := range l.cfg.Hosts {
		p := pair{
			handle: handle, name: switchPort(host, plane),
			peer: hostInterface(plane), peerMAC: hostMAC(host, plane), peerNamespace: l.namespace(host),
			mtu: l.cfg.MTU, queues: l.cfg.Queues,
		}
		if err := errors.Join(ctx.Err(), p.add()); err != nil {
			return err
		}
		if indices[host], err = linkUp(handle, p.name); err != nil {
			return err
		}
	}
	return inNetNS(l.switchNamespace(), func() error {
		for host, index := range indices {
			if err := l.addPort(host, plane, index, detour); err != nil {
				return fmt.Errorf("port %s: %w", switchPort(host, plane), err)
			}
		}
		return l.putDevices(l.sw.Flood, plane, indices)
	})
}

// addPort makes an interface a port of the switch, in whose namespace it is called.
func (l *Lab) addPort(host, plane, index, detour int) error {
	id := plane*l.cfg.Hosts + host
	port := labLabPort{Used: 1, Plane: uint32(plane), Host: uint32(host), Id: uint32(id)}
	if err := l.sw.Ports.Put(uint32(index), &port); err != nil {
		return fmt.Errorf("ifindex %d, want less than %d: %w", index, l.sw.Ports.MaxEntries(), err)
	}
	if err := l.sw.Tx.Put(uint32(id), uint32(index)); err != nil {
		return err
	}
	if err := l.putDevices(l.sw.Dup, id, []int{index, detour}); err != nil {
		return err
	}
	if err := l.attach(l.sw.Switch, switchPort(host, plane), index); err != nil {
		return err
	}
	if l.cfg.Threaded {
		return setThreaded(switchPort(host, plane))
	}
	return nil
}

// putDevices stores a device map of ifindices in a map of maps.
func (l *Lab) putDevices(outer *ebpf.Map, key int, indices []int) error {
	inner, err := ebpf.NewMap(&ebpf.MapSpec{
		Name: "mr_lab_devices", Type: ebpf.DevMap,
		KeySize: 4, ValueSize: 4, MaxEntries: uint32(len(indices)),
	})
	if err != nil {
		return fmt.Errorf("device map: %w", err)
	}
	defer inner.Close() // the outer map holds it
	for i, index := range indices {
		if err := inner.Put(uint32(i), uint32(index)); err != nil {
			return fmt.Errorf("device map: ifindex %d: %w", index, err)
		}
	}
	return outer.Put(uint32(key), inner)
}

// attach attaches a program for as long as the lab is up.
func (l *Lab) attach(program *ebpf.Program, ifname string, index int) error {
	xdp, err := link.AttachXDP(link.XDPOptions{Program: program, Interface: index, Flags: link.XDPDriverMode})
	if err != nil {
		return fmt.Errorf("interface %s: attach XDP: %w", ifname, err)
	}
	defer xdp.Close()
	if err := xdp.Pin(filepath.Join(pinRoot, l.cfg.Name, "link_"+ifname)); err != nil {
		return fmt.Errorf("interface %s: pin XDP link: %w", ifname, err)
	}
	return nil
}

func (m *switchMaps) pin(name string) error {
	dir := filepath.Join(pinRoot, name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("pins: %w", err)
	}
	for mapName, field := range m.maps() {
		if err := (*field).Pin(filepath.Join(dir, mapName)); err != nil {
			return fmt.Errorf("pin map %s: %w", mapName, err)
		}
	}
	for progName, prog := range map[string]*ebpf.Program{
		labProgMrLabSwitch: m.Switch, labProgMrLabDetour: m.Detour,
	} {
		if err := prog.Pin(filepath.Join(dir, progName)); err != nil {
			return fmt.Errorf("pin program %s: %w", progName, err)
		}
	}
	return nil
}

// openSwitched opens a lab from its pins.
func openSwitched(name string) (_ *Lab, err error) {
	dir := filepath.Join(pinRoot, name)
	sw := new(switchMaps)
	defer func() {
		if err != nil {
			err = errors.Join(err, sw.close())
		}
	}()
	for mapName, field := range sw.maps() {
		if *field, err = ebpf.LoadPinnedMap(filepath.Join(dir, mapName), nil); err != nil {
			return nil, fmt.Errorf("map %s: %w", filepath.Join(dir, mapName), err)
		}
	}
	for progName, field := range map[string]**ebpf.Program{
		labProgMrLabSwitch: &sw.Switch, labProgMrLabDetour: &sw.Detour,
	} {
		if *field, err = ebpf.LoadPinnedProgram(filepath.Join(dir, progName), nil); err != nil {
			return nil, fmt.Errorf("program %s: %w", filepath.Join(dir, progName), err)
		}
	}
	var meta labLabMeta
	if err := sw.Meta.Lookup(uint32(0), &meta); err != nil {
		return nil, fmt.Errorf("map %s: %w", labMapMrLabMeta, err)
	}
	if meta.Version != metaVersion {
		return nil, fmt.Errorf("map %s: layout version %d, want %d", labMapMrLabMeta, meta.Version, metaVersion)
	}
	return &Lab{sw: sw, cfg: Config{
		Name: name, Hosts: int(meta.Hosts), Planes: int(meta.Planes), Spines: int(meta.Spines),
		Rate: meta.Rate, ECN: meta.Ecn, Queue: meta.Queue, Seed: meta.Seed,
		MTU: int(meta.Mtu), Queues: int(meta.Queues), Threaded: meta.Threaded != 0, Port: uint16(meta.Port),
	}}, nil
}
