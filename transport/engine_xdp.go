// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"fmt"
	"runtime"

	"github.com/metaroce/metaroce/transport/core"
	"github.com/metaroce/metaroce/transport/xdp"
)

// Open attaches the programs to the interfaces of cfg and makes a device of
// them, in the calling thread's network namespace. It needs root. Its errors name
// the interface or the setting, what was found and what is wanted; they wrap
// ErrInterfaceInUse, ErrForeignProgram, ErrUnsupported and ErrPermission.
func Open(ctx context.Context, cfg Config) (*Device, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("open device: %w", err)
	}
	// Both look at the thread they run on.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ns, err := currentNetNS()
	if err != nil {
		return nil, fmt.Errorf("open device: %w", err)
	}
	eng, err := xdp.Open(ctx, xdp.Config{
		Interfaces: cfg.Interfaces, Port: cfg.Port, Payload: cfg.Payload, DSCP: int(*cfg.DSCP),
		ChecksumOff: cfg.ChecksumOff, Generic: cfg.Generic, PreferIPv6: cfg.PreferIPv6,
		PumpCPU: cfg.PumpCPU, Spin: cfg.Spin, RetryTime: cfg.RetryTime, Keepalive: cfg.Keepalive,
		MaxConns: cfg.MaxConns, PathPool: cfg.PathPool, MaxRegions: cfg.MaxRegions, Logger: cfg.Logger,
	})
	if err != nil {
		ns.close()
		return nil, fmt.Errorf("open device: %w", err)
	}
	return newDevice(xdpEngine{eng}, ns, cfg), nil
}

// xdpEngine is package xdp's engine, whose methods return its own types.
type xdpEngine struct{ *xdp.Engine }

func (e xdpEngine) AllocRegion(size uint64, access core.Access, pd uint32) (region, error) {
	r, err := e.Engine.AllocRegion(size, access, pd)
	if err != nil {
		return nil, err
	}
	return r, nil
}

func (e xdpEngine) NewConn(pd uint32) (engineConn, error) {
	c, err := e.Engine.NewConn(pd)
	if err != nil {
		return nil, err
	}
	return c, nil
}
