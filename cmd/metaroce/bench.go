// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/spf13/cobra"

	"github.com/metaroce/metaroce/bench"
	"github.com/metaroce/metaroce/loader"
)

func init() { register(newBenchCommand) }

// defaultCeiling is where the baseline's source may be, seen from the repository.
const defaultCeiling = "../shared/ceiling"

func newBenchCommand() *cobra.Command {
	cfg := bench.NumbersConfig{ConnMemory: connMemory}
	var ceiling string
	command := &cobra.Command{
		Use:    "bench",
		Short:  "Measure every figure of docs/performance.md (minutes; leave the machine alone)",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg.Lab, cfg.Logger = fmt.Sprintf("bench-%d", os.Getpid()), quiet()
			switch {
			case cfg.Pairs < 1:
				return fmt.Errorf("--pairs %d, want at least 1", cfg.Pairs)
			case cfg.Stream < 200*time.Millisecond:
				return fmt.Errorf("--time %v, want at least 200ms", cfg.Stream)
			case cfg.Idle < 100*time.Millisecond:
				return fmt.Errorf("--idle %v, want at least 100ms", cfg.Idle)
			}
			return runBench(cmd, cfg, ceiling)
		},
	}
	flags := command.Flags()
	flags.IntVar(&cfg.Pairs, "pairs", 7, "interleaved pairs that each median is of")
	flags.DurationVar(&cfg.Stream, "time", time.Second, "how long each rate is measured")
	flags.DurationVar(&cfg.Idle, "idle", 10*time.Second, "how long an idle connection is watched")
	flags.StringVar(&ceiling, "ceiling", defaultCeiling, "source directory of the ceiling program; what needs it is left out when it is not there")
	return command
}

func runBench(cmd *cobra.Command, cfg bench.NumbersConfig, ceiling string) error {
	dir, err := os.MkdirTemp("", "metaroce-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	cfg.Ceiling, err = bench.BuildCeiling(cmd.Context(), ceiling, dir)
	if errors.Is(err, os.ErrNotExist) && !cmd.Flags().Changed("ceiling") {
		err = nil
	}
	if err != nil {
		return fmt.Errorf("--ceiling: %w", err)
	}
	cfg.Progress = func(text string) { fmt.Fprintln(cmd.ErrOrStderr(), text) }
	numbers, err := bench.Measure(cmd.Context(), cfg)
	if err != nil {
		if cmd.Context().Err() != nil {
			return context.Cause(cmd.Context())
		}
		return err
	}
	return numbers.WriteMarkdown(cmd.OutOrStdout())
}

// connMemory is the map memory of a connection with 8 paths in bytes: what the
// kernel accounts to the maps of this process's devices, an entry, and the
// connection's own queue pages.
func connMemory() (int, error) {
	const paths = 8
	devs, err := loader.Find()
	if err != nil {
		return 0, err
	}
	for _, d := range devs {
		if d.Owner.PID != os.Getpid() {
			continue
		}
		total := queueBytes()
		for name, entries := range map[string]int{"mr_conn": 1, "mr_req": 1, "mr_path": paths} {
			each, err := entryBytes(filepath.Join(d.Dir, name))
			if err != nil {
				return 0, err
			}
			total += entries * each
		}
		return total, nil
	}
	return 0, errors.New("no device of this process found")
}

// queueBytes is a connection's queue map, which is mapped and so takes whole pages.
func queueBytes() int {
	page := os.Getpagesize()
	return (int(unsafe.Sizeof(loader.QPage{})) + page - 1) / page * page
}

// entryBytes is what the kernel accounts to a pinned map, divided by its entries.
func entryBytes(path string) (int, error) {
	m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return 0, fmt.Errorf("map %s: %w", path, err)
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil {
		return 0, fmt.Errorf("map %s: %w", path, err)
	}
	bytes, ok := info.Memlock()
	if !ok {
		return 0, fmt.Errorf("map %s: the kernel does not say its memory", path)
	}
	entries := uint64(m.MaxEntries())
	return int((bytes + entries - 1) / entries), nil
}
