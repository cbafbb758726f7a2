// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"fmt"
	"log/slog"
)

// LoadDetached loads the programs and maps without attaching or pinning anything: for
// BPF_PROG_RUN, packet in, packet out. Interfaces and Generic of opts are not looked at.
func LoadDetached(opts Options) (*Objects, error) {
	opts.Interfaces = []string{"lo"}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	if err := opts.complete(); err != nil {
		return nil, err
	}
	o := &Objects{
		Port: opts.Port, MaxConns: opts.MaxConns, PathPool: opts.PathPool, MaxRegions: opts.MaxRegions,
		log: opts.Logger,
	}
	if err := o.loadCollection(); err != nil {
		return nil, fmt.Errorf("load the programs: %w", err)
	}
	return o, nil
}
