// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/metaroce/metaroce/loader"
	"github.com/metaroce/metaroce/telemetry"
)

func init() { register(newStatusCommand) }

func newStatusCommand() *cobra.Command {
	var opts statusOptions
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the devices of this machine: connections, paths, regions, counters",
		Long: "status reads the pinned maps of every metaroce device on this machine, in all network\n" +
			"namespaces, while the device's process runs. It changes nothing. Reading needs root.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runStatus(cmd.OutOrStdout(), opts)
		},
	}
	cmd.Flags().BoolVar(&opts.json, "json", false, "print JSON: an object with a list of devices")
	cmd.Flags().BoolVar(&opts.all, "all", false, "print counters that are zero, too (JSON always has them)")
	cmd.Flags().StringVar(&opts.device, "device", "", "only this one: directory of its pins, its last element, or an interface")
	return cmd
}

type statusOptions struct {
	json, all bool
	device    string
}

func runStatus(w io.Writer, opts statusOptions) error {
	devs, err := loader.Find()
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("%w, want root", err)
	}
	if err != nil {
		return err
	}
	if len(devs) == 0 {
		return fmt.Errorf("no metaroce device found: looked for pinned maps in %s, and for processes in %s",
			loader.PinRoot(), loader.RunRoot())
	}
	if opts.device != "" {
		if devs, err = selectDevices(devs, opts.device); err != nil {
			return err
		}
	}
	list := make([]*telemetry.Status, 0, len(devs))
	for _, d := range devs {
		st, err := readDevice(d)
		// Devices come and go between Find and here.
		if errors.Is(err, fs.ErrNotExist) && len(devs) > 1 {
			continue
		}
		if err != nil {
			return err
		}
		list = append(list, st)
	}
	if opts.json {
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		return enc.Encode(map[string]any{"devices": list})
	}
	for i, st := range list {
		if i > 0 {
			if _, err := fmt.Fprintln(w); err != nil {
				return err
			}
		}
		if err := st.WriteText(w, opts.all); err != nil {
			return err
		}
	}
	return nil
}

func readDevice(d loader.Device) (st *telemetry.Status, err error) {
	s, err := loader.OpenPinned(d.Dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	return telemetry.Collect(s, d)
}

// selectDevices keeps those that name means. Interface names repeat between network namespaces, so
// it may mean several.
func selectDevices(devs []loader.Device, name string) ([]loader.Device, error) {
	var found []loader.Device
	names := make([]string, 0, len(devs))
	for _, d := range devs {
		names = append(names, d.Name)
		if d.Dir == filepath.Clean(name) || d.Name == name ||
			slices.ContainsFunc(d.Owner.Interfaces, func(i loader.Interface) bool { return i.Name == name }) {
			found = append(found, d)
		}
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("device %q is not there, want one of these in %s, or an interface of theirs: %s",
			name, loader.PinRoot(), strings.Join(names, ", "))
	}
	return found, nil
}
