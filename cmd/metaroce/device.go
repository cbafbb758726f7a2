// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"github.com/vishvananda/netlink"

	"github.com/metaroce/metaroce/transport"
	"github.com/metaroce/metaroce/transport/core"
	"github.com/metaroce/metaroce/wire"
)

// defaultSetupPort is the TCP port of connection set-up, perftest's.
const defaultSetupPort = 18515

// deviceFlags are the flags of every command that opens a device.
type deviceFlags struct {
	devices  string
	paths    int
	payload  int
	checksum string
	udpPort  uint16
	generic  bool
	pumpCPU  int
}

func (f *deviceFlags) register(flags *pflag.FlagSet) {
	flags.StringVarP(&f.devices, "device", "d", "", "interfaces, one a plane, with commas between (default: the only one that can be meant)")
	flags.IntVar(&f.paths, "paths", 8, "paths of a connection, 1 to 32")
	flags.IntVarP(&f.payload, "mtu", "m", 0, "bytes of payload a packet: 1024, 2048 or 3072 (default: the largest that fits)")
	flags.StringVar(&f.checksum, "checksum", "on", "UDP checksums, on or off; off only if the peer says so too")
	flags.Uint16Var(&f.udpPort, "udp-port", wire.UDPPort, "UDP port of data, the same at both ends")
	flags.IntVar(&f.pumpCPU, "pump-cpu", -1, "CPU of the sending thread (default: chosen by the interfaces' queues)")
	flags.BoolVar(&f.generic, "generic", false, "allow XDP in generic mode, for drivers without native XDP (slow)")
}

// config makes of the flags what transport.Open wants.
func (f *deviceFlags) config() (transport.Config, error) {
	c := transport.Config{Paths: f.paths, Payload: f.payload, Generic: f.generic, Port: f.udpPort, Logger: quiet()}
	switch f.checksum {
	case "on":
	case "off":
		c.ChecksumOff = true
	default:
		return c, fmt.Errorf("--checksum %q, want on or off", f.checksum)
	}
	switch {
	case f.paths < 1 || f.paths > core.MaxPaths:
		return c, fmt.Errorf("--paths %d, want 1 to %d", f.paths, core.MaxPaths)
	case f.payload != 0 && !slices.Contains(core.Payloads[:], f.payload):
		return c, fmt.Errorf("--mtu %d, want one of %v", f.payload, core.Payloads)
	case f.pumpCPU < -1:
		return c, fmt.Errorf("--pump-cpu %d, want a CPU's number, or -1 to choose", f.pumpCPU)
	case f.udpPort == 0:
		return c, errors.New("--udp-port 0, want 1 to 65535")
	}
	if f.pumpCPU >= 0 {
		c.PumpCPU = &f.pumpCPU
	}
	var err error
	c.Interfaces, err = f.interfaces()
	return c, err
}

// quiet logs what is wrong and nothing else: standard output and error are the
// command's own.
func quiet() *slog.Logger {
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
}

func (f *deviceFlags) interfaces() ([]string, error) {
	if f.devices == "" {
		return guessInterface()
	}
	names := strings.Split(f.devices, ",")
	for _, name := range names {
		if name == "" {
			return nil, fmt.Errorf("--device %q has an empty name, want interfaces with commas between", f.devices)
		}
	}
	return names, nil
}

// open opens the device in the network namespace of the calling thread, which is
// the process's.
func (f *deviceFlags) open(ctx context.Context, change func(*transport.Config)) (*transport.Device, transport.Config, error) {
	c, err := f.config()
	if err != nil {
		return nil, c, err
	}
	if change != nil {
		change(&c)
	}
	d, err := transport.Open(ctx, c)
	return d, c, err
}

// guessInterface finds the one interface that can be meant: up, with an address,
// and neither the loopback nor the one that the default route goes by, where a
// program that drops packets would cut the machine off.
func guessInterface() ([]string, error) {
	byDefault := map[int]bool{}
	routes, err := netlink.RouteList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("routes: %w", err)
	}
	for _, r := range routes {
		if r.Dst == nil || r.Dst.IP.IsUnspecified() {
			byDefault[r.LinkIndex] = true
		}
	}
	ifs, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("interfaces: %w", err)
	}
	var names []string
	for _, i := range ifs {
		if i.Flags&net.FlagUp == 0 || i.Flags&net.FlagLoopback != 0 || byDefault[i.Index] {
			continue
		}
		addrs, err := i.Addrs()
		if err != nil {
			return nil, fmt.Errorf("interface %s: %w", i.Name, err)
		}
		for _, a := range addrs {
			if n, ok := a.(*net.IPNet); ok && n.IP.IsGlobalUnicast() {
				names = append(names, i.Name)
				break
			}
		}
	}
	switch len(names) {
	case 1:
		return names, nil
	case 0:
		return nil, errors.New("no interface that is up, has an address and is not the default route's: name one with -d")
	}
	list := strings.Join(names, ",")
	return nil, fmt.Errorf("%d interfaces can be meant: name those to use with -d, all of them with -d %s", len(names), list)
}

// hostPort adds the set-up port to a host name or address, which may have brackets.
func hostPort(host string, port uint16) string {
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	return net.JoinHostPort(host, strconv.Itoa(int(port)))
}

// closeDevice closes d and keeps the first error.
func closeDevice(d *transport.Device, err *error) {
	if closeErr := d.Close(); *err == nil && closeErr != nil {
		*err = fmt.Errorf("close device: %w", closeErr)
	}
}

// forever is a pump's spin time that never ends in practice.
const forever = time.Hour
