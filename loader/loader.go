// SPDX-License-Identifier: Apache-2.0

// Package loader puts the device's programs into the kernel and takes them out again: it checks
// what the machine offers, loads, attaches, pins the state maps for outside readers, and cleans up
// what a crashed process left. It decides nothing about the protocol.
package loader

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"os"
	"runtime"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Defaults of Options.
const (
	DefaultPort       = 4791 // RoCEv2's UDP port
	DefaultMaxConns   = 256
	DefaultPathPool   = 2048
	DefaultMaxRegions = 256
)

// Options says what to load and where. Zero values take the defaults.
type Options struct {
	Interfaces []string // one a plane, in plane order; at least one
	Port       uint16   // UDP destination port, host order
	MaxConns   int      // connection slots, rounded up to a power of two; at most MaxConns (4096)
	PathPool   int      // paths of all connections together
	MaxRegions int      // memory regions
	Generic    bool     // attach in generic mode: slow, for interfaces without native XDP
	Logger     *slog.Logger
}

// Interface is one plane's network interface, as it was when the device was loaded.
type Interface struct {
	Name   string `json:"name"`
	Index  int    `json:"ifindex"`
	MTU    int    `json:"mtu"` // bytes of an IP packet
	MAC    string `json:"mac"`
	Driver string `json:"driver"` // a VLAN or macvlan interface's: its parent's
	Mode   string `json:"mode"`   // ModeNative or ModeGeneric
	VLAN   *VLAN  `json:"vlan,omitempty"`

	Macvlan *Below `json:"macvlan,omitempty"`

	// Of the interface that the programs are attached to.
	Channels int   `json:"channels,omitempty"`  // transmit channels; 0: the driver does not tell
	NUMACPUs []int `json:"numa_cpus,omitempty"` // CPUs of its device's NUMA node
}

// Values of Interface.Mode.
const (
	ModeNative  = "native"
	ModeGeneric = "generic"
)

// Objects is a loaded device: its programs run until Close, or until this process ends.
type Objects struct {
	Rx, Tx, Control *ebpf.Program

	Conn, Path, Req, QP, Region, Mem, Pump, Counter *ebpf.Map
	EgressMap                                       *ebpf.Map // one entry a transmit ring, see Egress
	Wake, Event                                     *ebpf.Map // ring buffers

	Interfaces []Interface // in plane order
	Parked     Interface   // where Tx is attached; carries no traffic
	PinDir     string      // directory of the pinned maps
	Netns      uint64      // inode of the network namespace
	Port       uint16
	Traced     bool // what the drivers drop is counted

	rings     []int     // ifindexes, by index in map mr_egress
	ifindexes *ebpf.Map // mr_ifindex of the tracing programs; nil without them

	MaxConns, PathPool, MaxRegions int

	qpInner, memInner *ebpf.MapSpec

	mu         sync.Mutex // of owner, once loaded
	owner      Owner
	stateFiles []*os.File
	rxOn       map[string]attachment // by name of the interface
	log        *slog.Logger
	undo       []func() error // what Close does, last first
	closeOnce  sync.Once
	closeErr   error
}

// Load loads the device's programs, attaches them in the calling thread's network namespace to
// every interface of opts (to the parent of a VLAN interface), and pins the state maps under
// /sys/fs/bpf/metaroce. The caller need not stay in that namespace. Links are not pinned: when
// this process dies, its kernel half goes with it, and the next Load there removes the pins.
//
// Errors name the item, the value found and the value wanted. They wrap ErrInUse when another
// metaroce process has an interface, ErrForeignProgram when some other XDP program has it,
// ErrUnsupported when the kernel or a driver lacks something. After an error nothing is left
// behind.
func Load(ctx context.Context, opts Options) (_ *Objects, err error) {
	// Everything below must happen in one network namespace.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	if err := opts.complete(); err != nil {
		return nil, err
	}
	if err := checkKernel(); err != nil {
		return nil, err
	}
	if err := checkCapabilities(); err != nil {
		return nil, err
	}
	o := &Objects{
		Port:       opts.Port,
		MaxConns:   opts.MaxConns,
		PathPool:   opts.PathPool,
		MaxRegions: opts.MaxRegions,
		rxOn:       map[string]attachment{},
		log:        opts.Logger,
	}
	defer func() {
		if err != nil {
			if cerr := o.Close(); cerr != nil {
				err = errors.Join(err, cerr)
			}
		}
	}()

	if o.Netns, err = netnsInode(); err != nil {
		return nil, err
	}
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	o.onClose(func() error { nl.Close(); return nil })

	links, err := o.findInterfaces(nl, opts)
	if err != nil {
		return nil, err
	}
	if err := probeFeatures(); err != nil {
		return nil, err
	}
	if err := EnsureBPFFS(o.log); err != nil {
		return nil, err
	}
	if err := o.claim(ctx, nl); err != nil {
		return nil, err
	}
	for i, l := range links {
		if err := checkForeign(o.Interfaces[i], l); err != nil {
			return nil, err
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("load the device of %s: %w", o.Interfaces[0].Name, err)
	}
	if err := o.loadCollection(); err != nil {
		return nil, err
	}
	if err := o.trace(); err != nil {
		return nil, err
	}
	if err := o.park(nl); err != nil {
		return nil, err
	}
	if err := o.attachAll(nl); err != nil {
		return nil, err
	}
	if err := o.pin(); err != nil {
		return nil, err
	}
	o.log.Info("device loaded", "interface", o.Interfaces[0].Name, "planes", len(o.Interfaces),
		"mode", o.Interfaces[0].Mode, "port", o.Port, "pins", o.PinDir)
	return o, nil
}

// Close detaches the programs, removes the pins and the parked interface, and gives the
// interfaces back. More calls do nothing and return the first one's error. What NewQPage and
// NewRegionMap made belongs to the caller.
func (o *Objects) Close() error {
	o.closeOnce.Do(func() {
		var errs []error
		for i := len(o.undo) - 1; i >= 0; i-- {
			if err := o.undo[i](); err != nil {
				errs = append(errs, err)
			}
		}
		o.undo = nil
		o.closeErr = errors.Join(errs...)
	})
	return o.closeErr
}

func (o *Objects) onClose(f func() error) { o.undo = append(o.undo, f) }

// RunControl gives one command to mr_ctl and returns its answer: CtlOK, CtlNoConn,
// CtlBad or CtlLimit.
func (o *Objects) RunControl(c Ctl) (uint32, error) {
	for {
		ret, err := o.Control.Run(&ebpf.RunOptions{Data: ctlBytes(&c), Repeat: 1})
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("run mr_ctl (op %d, slot %d): %w", c.Op, c.Slot, err)
		}
		return ret, nil
	}
}

func (opts *Options) complete() error {
	if len(opts.Interfaces) == 0 {
		return errors.New("no interface given, want at least one")
	}
	seen := map[string]bool{}
	for _, name := range opts.Interfaces {
		if seen[name] {
			return fmt.Errorf("interface %s is given twice, want each plane on its own", name)
		}
		seen[name] = true
	}
	if opts.Port == 0 {
		opts.Port = DefaultPort
	}
	for _, v := range []struct {
		name      string
		val       *int
		def, most int
	}{
		{"connections", &opts.MaxConns, DefaultMaxConns, MaxConns},
		{"paths in the pool", &opts.PathPool, DefaultPathPool, MaxConns * MaxPaths},
		{"memory regions", &opts.MaxRegions, DefaultMaxRegions, 1 << 16},
	} {
		if *v.val == 0 {
			*v.val = v.def
		}
		if *v.val < 1 || *v.val > v.most {
			return fmt.Errorf("number of %s is %d, want 1 to %d", v.name, *v.val, v.most)
		}
	}
	opts.MaxConns = 1 << bits.Len(uint(opts.MaxConns-1))
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	return nil
}

// sizedSpec is the collection with its maps sized and its constants set.
func (o *Objects) sizedSpec() (*ebpf.CollectionSpec, error) {
	spec, err := loadMetaroce()
	if err != nil {
		return nil, fmt.Errorf("read the embedded BPF object: %w", err)
	}
	for name, n := range map[string]int{
		metaroceMapMrConn: o.MaxConns, metaroceMapMrReq: o.MaxConns, metaroceMapMrQp: o.MaxConns,
		metaroceMapMrPath:   o.PathPool,
		metaroceMapMrRegion: o.MaxRegions, metaroceMapMrMem: o.MaxRegions,
		metaroceMapMrEgress: min(max(len(o.egresses()), 1), MaxEgresses),
	} {
		spec.Maps[name].MaxEntries = uint32(n)
	}
	for name, v := range map[string]uint32{
		metaroceVarMrPort:     uint32(o.Port),
		metaroceVarMrMaxConns: uint32(o.MaxConns),
	} {
		if err := spec.Variables[name].Set(v); err != nil {
			return nil, fmt.Errorf("set %s to %d: %w", name, v, err)
		}
	}
	return spec, nil
}

func (o *Objects) loadCollection() error {
	spec, err := o.sizedSpec()
	if err != nil {
		return err
	}
	o.qpInner = spec.Maps[metaroceMapMrQp].InnerMap
	o.memInner = spec.Maps[metaroceMapMrMem].InnerMap
	var objs struct {
		metarocePrograms
		metaroceMaps
	}
	if err := spec.LoadAndAssign(&objs, nil); err != nil {
		return loadError(err)
	}
	o.onClose(func() error {
		return errors.Join(objs.metarocePrograms.Close(), objs.metaroceMaps.Close())
	})
	o.Rx, o.Tx, o.Control = objs.MrRx, objs.MrTx, objs.MrCtl
	o.Conn, o.Path, o.Req, o.QP = objs.MrConn, objs.MrPath, objs.MrReq, objs.MrQp
	o.Region, o.Mem, o.Pump, o.Counter = objs.MrRegion, objs.MrMem, objs.MrPump, objs.MrCounter
	o.EgressMap, o.Wake, o.Event = objs.MrEgress, objs.MrWake, objs.MrEvent
	return nil
}

// attachAll attaches mr_rx to every interface, and then looks again at what they can do: some drivers
// take redirected frames only while they have a program.
func (o *Objects) attachAll(nl *netlink.Handle) error {
	attached := map[int]bool{}
	for _, itf := range o.Interfaces {
		_, index := itf.Lower()
		if attached[index] { // another VLAN of the same parent
			continue
		}
		if err := o.attachRx(itf); err != nil {
			return err
		}
		attached[index] = true
	}
	for _, itf := range o.Interfaces {
		_, index := itf.Lower()
		if !attached[index] {
			continue
		}
		if err := o.checkSends(nl, itf); err != nil {
			return err
		}
		attached[index] = false
	}
	return nil
}

// attach attaches prog to one interface, and returns what detaches it.
func (o *Objects) attach(prog *ebpf.Program, itf Interface) (detach func() error, err error) {
	flags := link.XDPDriverMode
	if itf.Mode == ModeGeneric {
		flags = link.XDPGenericMode
	}
	name, index := itf.Lower()
	l, err := link.AttachXDP(link.XDPOptions{Program: prog, Interface: index, Flags: flags})
	if err != nil {
		return nil, attachError(itf, err, whyNot(prog, itf))
	}
	return func() error {
		if err := l.Close(); err != nil {
			return fmt.Errorf("detach from interface %s: %w", name, err)
		}
		return nil
	}, nil
}
