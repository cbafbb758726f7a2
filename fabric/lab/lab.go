// SPDX-License-Identifier: Apache-2.0

// Package lab makes real networks on one machine: hosts are network namespaces,
// joined plane by plane through an XDP switch that has virtual queues and faults,
// or by bare veth pairs. See docs/lab.md.
package lab

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/metaroce/metaroce/loader"
)

// Bounds and defaults of a Config.
const (
	MaxHosts  = 250 // host i has address .(i+1) in a /24
	MaxPlanes = 16
	MaxSpines = 16
	MaxQueues = 16
	maxPorts  = 1000 // hosts x planes of one lab

	DefaultMTU          = 3400 // bytes of IP packet; with its headers a frame fits one page
	MaxMTU              = 9216 // what Ethernet switches take; its programs take frames of several pages
	MinMTU              = 1280 // IPv6
	DefaultECN   uint64 = 64 << 10
	DefaultQueue uint64 = 512 << 10
	DefaultPort  uint16 = loader.DefaultPort
)

// ErrNotFound reports that there is no lab of a name.
var ErrNotFound = errors.New("lab not found")

var nameRE = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,31}$`)

// Config describes a lab.
type Config struct {
	Name   string // namespaces are NAME-h0, NAME-h1, ... and NAME-sw
	Hosts  int    // default 2
	Planes int    // interfaces a host, default 1
	Spines int    // equal-cost paths a plane, default 1
	Direct bool   // two hosts, one veth pair a plane, no switch: no rate, no faults

	Rate  uint64 // bit/s of each spine towards each host; 0: not limited
	ECN   uint64 // bytes in a virtual queue above which it marks; 0: DefaultECN; NoECN: never
	Queue uint64 // bytes that a virtual queue holds; 0: DefaultQueue
	Seed  uint64 // of the switch's hash and of the faults

	MTU      int    // bytes of IP packet, default DefaultMTU
	Queues   int    // receive and transmit queues of every veth, default 1
	Threaded bool   // NAPI in kernel threads instead of on the sending CPU
	Port     uint16 // UDP port that scripts take for ours, default DefaultPort
}

func (c Config) withDefaults() Config {
	c.Hosts = cmp.Or(c.Hosts, 2)
	c.Planes = cmp.Or(c.Planes, 1)
	c.Spines = cmp.Or(c.Spines, 1)
	c.ECN = cmp.Or(c.ECN, DefaultECN)
	c.Queue = cmp.Or(c.Queue, DefaultQueue)
	c.MTU = cmp.Or(c.MTU, DefaultMTU)
	c.Queues = cmp.Or(c.Queues, 1)
	c.Port = cmp.Or(c.Port, DefaultPort)
	return c
}

func (c Config) validate() error {
	if err := checkName(c.Name); err != nil {
		return err
	}
	for _, v := range []struct {
		item              string
		found, least, top int
	}{
		{"hosts", c.Hosts, 2, MaxHosts},
		{"planes", c.Planes, 1, MaxPlanes},
		{"spines", c.Spines, 1, MaxSpines},
		{"hosts x planes", c.Hosts * c.Planes, 2, maxPorts},
		{"queues", c.Queues, 1, MaxQueues},
		{"mtu", c.MTU, MinMTU, MaxMTU},
	} {
		if v.found < v.least || v.found > v.top {
			return fmt.Errorf("lab %s: %s is %d, want %d to %d", c.Name, v.item, v.found, v.least, v.top)
		}
	}
	if c.Direct {
		switch {
		case c.Hosts != 2:
			return fmt.Errorf("lab %s: hosts is %d, want 2: a direct lab has no switch", c.Name, c.Hosts)
		case c.Spines != 1:
			return fmt.Errorf("lab %s: spines is %d, want 1: a direct lab has no switch", c.Name, c.Spines)
		case c.Rate != 0:
			return fmt.Errorf("lab %s: rate is %s, want none: a direct lab has no switch", c.Name, FormatRate(c.Rate))
		}
	}
	if c.Rate != 0 && (c.Rate < minRate || c.Rate > maxRate) {
		return fmt.Errorf("lab %s: rate is %d bit/s, want %d to %d", c.Name, c.Rate, uint64(minRate), uint64(maxRate))
	}
	if least := uint64(c.MTU) + ethernetHeader; c.Queue < least {
		return fmt.Errorf("lab %s: queue is %d bytes, want at least one frame, %d", c.Name, c.Queue, least)
	}
	return nil
}

const ethernetHeader = 14

func checkName(name string) error {
	if !nameRE.MatchString(name) {
		return fmt.Errorf("lab name %q: want 1 to 32 of a-z, 0-9 and -, not starting with -", name)
	}
	return nil
}

// Lab is a network that is up. Its state is in the kernel: a Lab is only a handle,
// and any process may open another one.
type Lab struct {
	cfg     Config
	sw      *switchMaps // nil: direct
	planeMu sync.Mutex  // a plane's settings are read, changed and written back
}

// Up makes a lab; one of the same name is torn down first. On failure nothing is
// left behind.
func Up(ctx context.Context, cfg Config) (_ *Lab, err error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if uid := os.Geteuid(); uid != 0 {
		return nil, fmt.Errorf("lab %s: running as uid %d, want root (network namespaces, BPF)", cfg.Name, uid)
	}
	unlock, err := lock(ctx)
	if err != nil {
		return nil, fmt.Errorf("lab %s: %w", cfg.Name, err)
	}
	defer unlock()

	if err := tearDown(cfg.Name); err != nil {
		return nil, fmt.Errorf("lab %s: remove the old one: %w", cfg.Name, err)
	}
	l := &Lab{cfg: cfg}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("lab %s: %w", cfg.Name, err), l.Close(), tearDown(cfg.Name))
		}
	}()
	if err := l.build(ctx); err != nil {
		return nil, err
	}
	return l, nil
}

func (l *Lab) build(ctx context.Context) error {
	for host := range l.cfg.Hosts {
		if err := errors.Join(ctx.Err(), l.makeHost(host)); err != nil {
			return err
		}
	}
	if l.cfg.Direct {
		return l.joinDirectly()
	}
	return l.joinBySwitch(ctx)
}

// makeHost makes a host's namespace, without interfaces.
func (l *Lab) makeHost(host int) error {
	name := l.namespace(host)
	if err := createNetNS(name); err != nil {
		return err
	}
	return inNetNS(name, func() error {
		// No chatter of the kernel's own: the counters show what tests send.
		return errors.Join(
			setSysctl("ipv6/conf/default/accept_dad", "0"),
			setSysctl("ipv6/conf/default/accept_ra", "0"),
			setSysctl("ipv6/conf/default/router_solicitations", "0"),
			setSysctl("ipv6/conf/default/addr_gen_mode", "1"),
		)
	})
}

// joinDirectly gives hosts 0 and 1 one veth pair a plane.
func (l *Lab) joinDirectly() error {
	handle, err := netlinkIn(l.namespace(0))
	if err != nil {
		return err
	}
	defer handle.Close()
	for plane := range l.cfg.Planes {
		p := pair{
			handle: handle, name: hostInterface(plane), mac: hostMAC(0, plane),
			peer: hostInterface(plane), peerMAC: hostMAC(1, plane), peerNamespace: l.namespace(1),
			mtu: l.cfg.MTU, queues: l.cfg.Queues,
		}
		if err := p.add(); err != nil {
			return err
		}
	}
	for host := range l.cfg.Hosts {
		if err := l.configureHost(host); err != nil {
			return err
		}
	}
	return nil
}

// configureHost sets up a host's interfaces, which exist: features, addresses and
// permanent neighbours, so that no packet ever waits for a resolution.
func (l *Lab) configureHost(host int) error {
	handle, err := netlinkIn(l.namespace(host))
	if err != nil {
		return err
	}
	defer handle.Close()
	if _, err := linkUp(handle, "lo"); err != nil {
		return err
	}
	for plane := range l.cfg.Planes {
		if _, err := linkUp(handle, hostInterface(plane)); err != nil {
			return fmt.Errorf("host h%d: %w", host, err)
		}
	}
	ipv6 := false
	err = inNetNS(l.namespace(host), func() error {
		ipv6 = hasIPv6()
		for plane := range l.cfg.Planes {
			if err := l.setFeatures(hostInterface(plane)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("host h%d: %w", host, err)
	}
	for plane := range l.cfg.Planes {
		if err := l.addAddresses(handle, host, plane, ipv6); err != nil {
			return fmt.Errorf("host h%d: %w", host, err)
		}
	}
	return nil
}

// setFeatures prepares a host's interface, which is up: while it is down, veth does
// not tell its peer that redirects can be taken.
func (l *Lab) setFeatures(ifname string) error {
	if l.cfg.Direct && !l.cfg.Threaded {
		return nil
	}
	// A redirect into a veth pair is dropped silently unless the far end polls by
	// NAPI, which GRO starts: no XDP program of the host's own is needed.
	if err := setOffload(ifname, unix.ETHTOOL_SGRO, true); err != nil {
		return err
	}
	if l.cfg.Threaded {
		if err := setThreaded(ifname); err != nil {
			return err
		}
	}
	if l.cfg.Direct {
		return nil
	}
	// A redirected frame keeps no note that its checksum is still to be made.
	return setOffload(ifname, unix.ETHTOOL_STXCSUM, false)
}

// addAddresses gives a host's interface its addresses, and those of the others as
// permanent neighbours.
func (l *Lab) addAddresses(handle *netlink.Handle, host, plane int, ipv6 bool) error {
	ifname := hostInterface(plane)
	link, err := handle.LinkByName(ifname)
	if err != nil {
		return fmt.Errorf("interface %s: %w", ifname, err)
	}
	prefixes := []netip.Prefix{netip.PrefixFrom(l.Addr(host, plane), 24)}
	if ipv6 {
		prefixes = append(prefixes, netip.PrefixFrom(l.Addr6(host, plane), 64))
	}
	for _, prefix := range prefixes {
		addr, err := netlink.ParseAddr(prefix.String())
		if err != nil {
			return fmt.Errorf("address %s: %w", prefix, err)
		}
		if prefix.Addr().Is6() {
			addr.Flags = unix.IFA_F_NODAD
		}
		if err := handle.AddrAdd(link, addr); err != nil {
			return fmt.Errorf("interface %s: address %s: %w", ifname, prefix, err)
		}
	}
	for peer := range l.cfg.Hosts {
		if peer == host {
			continue
		}
		for _, prefix := range prefixes {
			ip := l.Addr(peer, plane)
			if prefix.Addr().Is6() {
				ip = l.Addr6(peer, plane)
			}
			neighbour := &netlink.Neigh{
				LinkIndex: link.Attrs().Index, State: netlink.NUD_PERMANENT,
				IP: ip.AsSlice(), HardwareAddr: hostMAC(peer, plane),
			}
			if err := handle.NeighSet(neighbour); err != nil {
				return fmt.Errorf("interface %s: neighbour %s: %w", ifname, ip, err)
			}
		}
	}
	return nil
}

// Open finds a lab that some process made. It returns ErrNotFound, wrapped, when
// there is none.
func Open(name string) (*Lab, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	hosts, hasSwitch, err := findNamespaces(name)
	if err != nil {
		return nil, fmt.Errorf("lab %s: %w", name, err)
	}
	if len(hosts) == 0 && !hasSwitch {
		return nil, fmt.Errorf("lab %s: %w: no namespace %s-h0; make it with `metaroce lab up --name %s`",
			name, ErrNotFound, name, name)
	}
	var l *Lab
	if hasSwitch {
		l, err = openSwitched(name)
	} else {
		l, err = openDirect(name)
	}
	if err != nil {
		return nil, fmt.Errorf("lab %s: incomplete, remove it with `metaroce lab down --name %s`: %w", name, name, err)
	}
	if found := len(hosts); found != l.cfg.Hosts {
		return nil, errors.Join(fmt.Errorf("lab %s: incomplete: found %d host namespaces, want %d; remove it with `metaroce lab down --name %s`",
			name, found, l.cfg.Hosts, name), l.Close())
	}
	return l, nil
}

// openDirect reads a direct lab from its interfaces: it has no pins.
func openDirect(name string) (*Lab, error) {
	l := &Lab{cfg: Config{Name: name, Hosts: 2, Direct: true}}
	handle, err := netlinkIn(l.namespace(0))
	if err != nil {
		return nil, err
	}
	defer handle.Close()
	for {
		link, err := handle.LinkByName(hostInterface(l.cfg.Planes))
		if errors.As(err, new(netlink.LinkNotFoundError)) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("interface %s: %w", hostInterface(l.cfg.Planes), err)
		}
		l.cfg.Planes++
		l.cfg.MTU, l.cfg.Queues = link.Attrs().MTU, link.Attrs().NumRxQueues
	}
	if l.cfg.Planes == 0 {
		return nil, fmt.Errorf("namespace %s: no interface %s", l.namespace(0), hostInterface(0))
	}
	l.cfg = l.cfg.withDefaults()
	return l, nil
}

// Names lists the labs that are up, or partly up, by name.
func Names() ([]string, error) {
	entries, err := os.ReadDir(netnsDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list namespaces: %w", err)
	}
	var names []string
	for _, entry := range entries {
		if name, ok := strings.CutSuffix(entry.Name(), "-h0"); ok && nameRE.MatchString(name) {
			names = append(names, name)
		}
	}
	return names, nil
}

// findNamespaces lists a lab's host namespaces, sorted, and says whether it has a switch's.
func findNamespaces(name string) (hosts []string, hasSwitch bool, err error) {
	entries, err := os.ReadDir(netnsDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, false, fmt.Errorf("list namespaces: %w", err)
	}
	for _, entry := range entries {
		if entry.Name() == name+"-sw" {
			hasSwitch = true
		}
		number, ok := strings.CutPrefix(entry.Name(), name+"-h")
		if _, err := strconv.ParseUint(number, 10, 16); ok && err == nil {
			hosts = append(hosts, entry.Name())
		}
	}
	slices.Sort(hosts)
	return hosts, hasSwitch, nil
}

// Remove tears down the lab of a name, whatever state it is in. A lab that is not
// there is no error.
func Remove(ctx context.Context, name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	unlock, err := lock(ctx)
	if err != nil {
		return fmt.Errorf("lab %s: %w", name, err)
	}
	defer unlock()
	if err := tearDown(name); err != nil {
		return fmt.Errorf("lab %s: %w", name, err)
	}
	return nil
}

func tearDown(name string) error {
	hosts, hasSwitch, err := findNamespaces(name)
	if err != nil {
		return err
	}
	var errs []error
	namespaces := hosts
	if hasSwitch {
		// First: with a port goes its peer.
		namespaces = append([]string{name + "-sw"}, hosts...)
	}
	for _, ns := range namespaces {
		// A process that still runs inside would keep the namespace, and with it
		// the interfaces, alive.
		if err := deleteLinks(ns); err != nil {
			errs = append(errs, err)
		}
	}
	for _, ns := range namespaces {
		errs = append(errs, deleteNetNS(ns))
	}
	if err := os.RemoveAll(filepath.Join(pinRoot, name)); err != nil {
		errs = append(errs, fmt.Errorf("pins: %w", err))
	}
	// The last lab's directory goes too; with others in it, it stays.
	_ = os.Remove(pinRoot)
	return errors.Join(errs...)
}

// deleteLinks removes a namespace's veth interfaces. A name that a crash left
// without its namespace has none.
func deleteLinks(ns string) error {
	handle, err := netlinkIn(ns)
	if err != nil {
		return nil
	}
	defer handle.Close()
	links, err := handle.LinkList()
	if err != nil {
		return fmt.Errorf("namespace %s: list interfaces: %w", ns, err)
	}
	for _, link := range links {
		if link.Type() != "veth" {
			continue
		}
		// Gone with its peer, perhaps.
		if err := handle.LinkDel(link); err != nil && !errors.Is(err, unix.ENODEV) {
			return fmt.Errorf("namespace %s: delete %s: %w", ns, link.Attrs().Name, err)
		}
	}
	return nil
}

// lockDir serialises everything that makes or removes labs.
const lockDir = "/run/metaroce-lab"

func lock(ctx context.Context) (unlock func(), err error) {
	if err := os.MkdirAll(lockDir, 0o700); err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	dir, err := os.Open(lockDir)
	if err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for {
		err := unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { dir.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			dir.Close()
			return nil, fmt.Errorf("lock %s: %w", lockDir, err)
		}
		select {
		case <-ctx.Done():
			dir.Close()
			return nil, fmt.Errorf("lock %s, which another lab command holds: %w", lockDir, ctx.Err())
		case <-ticker.C:
		}
	}
}

// Close gives up the handle; the lab stays up.
func (l *Lab) Close() error {
	if l.sw == nil {
		return nil
	}
	return l.sw.close()
}

// Down gives up the handle and tears the lab down.
func (l *Lab) Down() error {
	// Not the caller's context: a cancelled test still has to clean up.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return errors.Join(l.Close(), Remove(ctx, l.cfg.Name))
}

// Config returns what the lab was made with. Of a direct lab that was opened, the
// seed and whether NAPI is threaded are not known.
func (l *Lab) Config() Config { return l.cfg }

// Name returns the lab's name.
func (l *Lab) Name() string { return l.cfg.Name }

func (l *Lab) namespace(host int) string { return l.cfg.Name + "-h" + strconv.Itoa(host) }

func (l *Lab) switchNamespace() string { return l.cfg.Name + "-sw" }

func hostInterface(plane int) string { return "p" + strconv.Itoa(plane) }

// NetNS returns the path of a host's network namespace.
func (l *Lab) NetNS(host int) string { return netnsPath(l.namespace(host)) }

// Interfaces returns a host's interfaces in the order of their planes; they have
// the same names on every host.
func (l *Lab) Interfaces(int) []string {
	names := make([]string, l.cfg.Planes)
	for plane := range names {
		names[plane] = hostInterface(plane)
	}
	return names
}

// Addr returns a host's IPv4 address on a plane, 198.18.PLANE.(HOST+1) (RFC 2544's range).
func (l *Lab) Addr(host, plane int) netip.Addr {
	return netip.AddrFrom4([4]byte{198, 18, byte(plane), byte(host + 1)})
}

// Addr6 returns a host's IPv6 address on a plane, fd00:198:18:PLANE::(HOST+1).
func (l *Lab) Addr6(host, plane int) netip.Addr {
	return netip.AddrFrom16([16]byte{
		0: 0xfd, 2: 0x01, 3: 0x98, 5: 0x18, 7: byte(plane), 15: byte(host + 1),
	})
}

// Do runs fn on the calling goroutine inside a host's network namespace. What fn
// opens stays there; goroutines that it starts run outside.
func (l *Lab) Do(host int, fn func() error) error {
	if err := l.checkHost(host); err != nil {
		return err
	}
	return inNetNS(l.namespace(host), fn)
}

// Start starts a command inside a host's network namespace; everything else,
// mounts too, it shares with the caller.
func (l *Lab) Start(host int, cmd *exec.Cmd) error { return l.Do(host, cmd.Start) }

// Exec replaces the calling process by a command inside a host's network namespace.
// It enters the network namespace only: /sys/fs/bpf stays the caller's. It returns
// only on failure.
func (l *Lab) Exec(host int, argv []string) error {
	if len(argv) == 0 {
		return fmt.Errorf("lab %s: no command to run", l.cfg.Name)
	}
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return fmt.Errorf("lab %s: command %s: %w", l.cfg.Name, argv[0], err)
	}
	return l.Do(host, func() error {
		return fmt.Errorf("lab %s: run %s: %w", l.cfg.Name, path, unix.Exec(path, argv, os.Environ()))
	})
}

func (l *Lab) checkHost(host int) error {
	if host < 0 || host >= l.cfg.Hosts {
		return fmt.Errorf("lab %s: host h%d: want h0 to h%d", l.cfg.Name, host, l.cfg.Hosts-1)
	}
	return nil
}
