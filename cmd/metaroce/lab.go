// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/metaroce/metaroce/fabric/lab"
)

const defaultLabName = "lab"

func init() { register(newLabCommand) }

func newLabCommand() *cobra.Command {
	command := &cobra.Command{
		Use:   "lab",
		Short: "Networks on one machine: hosts, an XDP switch, planes and faults",
		Args:  cobra.NoArgs,
		// with it, an unknown subcommand is an error and not help with status 0
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	command.AddCommand(newLabUpCommand(), newLabStatusCommand(), newLabExecCommand(),
		newLabFaultCommand(), newLabDownCommand())
	return command
}

// parsed is a flag whose text one of lab's parsers reads, so that a bad value is
// reported with the flag's name.
type parsed[T any] struct {
	text  string
	value T
	parse func(string) (T, error)
}

func (p *parsed[T]) String() string { return p.text }
func (p *parsed[T]) Type() string   { return "value" }
func (p *parsed[T]) Set(text string) (err error) {
	p.text = text
	p.value, err = p.parse(text)
	return err
}

func parseECN(text string) (uint64, error) {
	if text == "off" {
		return lab.NoECN, nil
	}
	return lab.ParseSize(text)
}

func newLabUpCommand() *cobra.Command {
	var cfg lab.Config
	rate := parsed[uint64]{text: "unlimited", parse: lab.ParseRate}
	ecn := parsed[uint64]{text: lab.FormatSize(lab.DefaultECN), value: lab.DefaultECN, parse: parseECN}
	queue := parsed[uint64]{text: lab.FormatSize(lab.DefaultQueue), value: lab.DefaultQueue, parse: lab.ParseSize}
	command := &cobra.Command{
		Use:   "up",
		Short: "Make a lab; one of the same name is torn down first",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, v := range []struct {
				flag  string
				value int
			}{
				{"hosts", cfg.Hosts},
				{"planes", cfg.Planes},
				{"spines", cfg.Spines},
				{"queues", cfg.Queues},
				{"mtu", cfg.MTU},
			} {
				if v.value < 1 { // to the package, 0 is the default
					return fmt.Errorf("--%s is %d, want at least 1", v.flag, v.value)
				}
			}
			if cfg.Direct {
				// Asked for by name, these would be ignored silently.
				for _, flag := range []string{"ecn", "queue", "seed"} {
					if cmd.Flags().Changed(flag) {
						return fmt.Errorf("--%s with --direct: want one or the other, a direct lab has no switch", flag)
					}
				}
			}
			cfg.Rate, cfg.ECN, cfg.Queue = rate.value, ecn.value, queue.value
			if cfg.ECN == 0 || cfg.Queue == 0 {
				return errors.New("--ecn and --queue: found 0, want at least one byte (or --ecn off)")
			}
			l, err := lab.Up(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			defer l.Close()
			status, err := l.Status()
			if err != nil {
				return err
			}
			return printLab(cmd.OutOrStdout(), status)
		},
	}
	flags := command.Flags()
	addLabName(command, &cfg.Name)
	flags.IntVar(&cfg.Hosts, "hosts", 2, "hosts, each a network namespace NAME-h0, NAME-h1, ...")
	flags.IntVar(&cfg.Planes, "planes", 1, "planes: interfaces p0, p1, ... of every host")
	flags.IntVar(&cfg.Spines, "spines", 1, "equal-cost paths of a plane, chosen by the switch's hash")
	flags.BoolVar(&cfg.Direct, "direct", false, "join two hosts by a veth pair a plane, without a switch")
	flags.Var(&rate, "rate", "bit/s of every spine towards every host, such as 5gbit")
	flags.Var(&ecn, "ecn", "bytes queued above which packets are marked, or off")
	flags.Var(&queue, "queue", "bytes queued above which packets are dropped")
	flags.Uint64Var(&cfg.Seed, "seed", 1, "seed of the switch's hash and of random faults")
	flags.IntVar(&cfg.MTU, "mtu", lab.DefaultMTU, "bytes of an IP packet")
	flags.IntVar(&cfg.Queues, "queues", 1, "receive and transmit queues of every interface")
	flags.BoolVar(&cfg.Threaded, "threaded", false, "receive in kernel threads instead of on the sending CPU")
	flags.Uint16Var(&cfg.Port, "port", lab.DefaultPort, "UDP port of the packets that fault scripts look at")
	return command
}

func addLabName(command *cobra.Command, name *string) {
	command.Flags().StringVar(name, "name", defaultLabName, "name of the lab")
}

func newLabStatusCommand() *cobra.Command {
	var (
		name   string
		asJSON bool
	)
	command := &cobra.Command{
		Use:   "status",
		Short: "Show labs: hosts, planes, faults, counters; every lab without --name",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			names := []string{name}
			if !cmd.Flags().Changed("name") {
				var err error
				if names, err = lab.Names(); err != nil {
					return err
				}
			}
			labs := []*lab.Status{}
			var errs []error // of one lab, which must not hide the others
			for _, name := range names {
				status, err := labStatus(name)
				if err != nil {
					errs = append(errs, err)
					continue
				}
				labs = append(labs, status)
			}
			out := cmd.OutOrStdout()
			if asJSON {
				encoder := json.NewEncoder(out)
				encoder.SetIndent("", "  ")
				return errors.Join(append(errs, encoder.Encode(labs))...)
			}
			for _, status := range labs {
				errs = append(errs, printLab(out, status))
			}
			return errors.Join(errs...)
		},
	}
	addLabName(command, &name)
	command.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of labs")
	return command
}

func labStatus(name string) (*lab.Status, error) {
	l, err := lab.Open(name)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	return l.Status()
}

// printLab prints a lab for people.
func printLab(out io.Writer, s *lab.Status) error {
	kind := fmt.Sprintf("%d spines a plane, rate %s, ECN above %s, queue %s, seed %d",
		s.Spines, lab.FormatRate(s.RateBps), formatECN(s.ECNBytes), lab.FormatSize(s.QueueBytes), s.Seed)
	if s.Direct {
		kind = "direct"
	}
	fmt.Fprintf(out, "lab %s: %d hosts, %d planes, MTU %d, %s\n", s.Name, len(s.Hosts), len(s.Planes), s.MTU, kind)
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "host\tnamespace\taddresses")
	for _, h := range s.Hosts {
		addresses := make([]string, len(h.Addresses))
		for i, a := range h.Addresses {
			addresses[i] = a.String()
		}
		fmt.Fprintf(table, "%s\t%s\t%s\n", h.Name, h.NetNS, strings.Join(addresses, " "))
	}
	if err := table.Flush(); err != nil || s.Direct {
		return err
	}
	table = tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "plane\tstate\tloss\tburst\tdup\tcorrupt\treorder\tpackets\tlost\tscripted\tqueue drops\tdown drops\tmarked\tduplicated\tcorrupted\treordered\tunknown\t")
	for _, p := range s.Planes {
		state := "up"
		if !p.Up {
			state = "down"
		}
		c := p.Counters
		fmt.Fprintf(table, "%d\t%s\t%s\t%g\t%s\t%s\t%s\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t\n", p.Plane, state,
			formatPercent(p.Loss), p.Burst, formatPercent(p.Duplicate), formatPercent(p.Corrupt), formatPercent(p.Reorder),
			c.Packets, c.Lost, c.Scripted, c.QueueDropped, c.Down, c.Marked, c.Duplicated, c.Corrupted, c.Reordered, c.Unknown)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	return printQueuesAndRules(out, s)
}

func printQueuesAndRules(out io.Writer, s *lab.Status) error {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	heading := "plane\tto host\tspine\tpackets\tbytes\tmarked\tdropped\tpeak bytes\t\n"
	for _, p := range s.Planes {
		for _, q := range p.Queues {
			fmt.Fprintf(table, "%s%d\th%d\t%d\t%d\t%d\t%d\t%d\t%d\t\n", heading,
				p.Plane, q.Host, q.Spine, q.Packets, q.Bytes, q.Marked, q.Dropped, q.PeakBytes)
			heading = ""
		}
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for _, r := range s.Rules {
		fmt.Fprintf(out, "rule %q on planes %v: %d seen, %d hit\n", r.Rule, r.Planes, r.Seen, r.Hits)
	}
	return nil
}

func formatPercent(share float64) string {
	return strconv.FormatFloat(share*100, 'g', 6, 64) + "%"
}

func formatECN(bytes uint64) string {
	if bytes == lab.NoECN {
		return "off"
	}
	return lab.FormatSize(bytes)
}

func newLabExecCommand() *cobra.Command {
	var name string
	command := &cobra.Command{
		Use:   "exec h0 -- COMMAND [ARGUMENT...]",
		Short: "Run a command in a host's network namespace",
		Args:  cobra.MinimumNArgs(2),
		RunE: func(_ *cobra.Command, args []string) error {
			number, ok := strings.CutPrefix(args[0], "h")
			host, err := strconv.ParseUint(number, 10, 16)
			if !ok || err != nil {
				return fmt.Errorf("host %q: want h and a number, such as h0", args[0])
			}
			argv := args[1:]
			if argv[0] == "--" {
				argv = argv[1:]
			}
			if len(argv) == 0 {
				return errors.New("no command to run: want one behind the host")
			}
			l, err := lab.Open(name)
			if err != nil {
				return err
			}
			defer l.Close()
			return l.Exec(int(host), argv)
		},
	}
	addLabName(command, &name)
	// What follows the host belongs to the command, flags too.
	command.Flags().SetInterspersed(false)
	return command
}

func newLabFaultCommand() *cobra.Command {
	var (
		name            string
		plane           int
		script          string
		burst           float64
		seed            uint64
		down, up, clear bool
	)
	probabilities := map[string]*parsed[float64]{}
	command := &cobra.Command{
		Use:   "fault",
		Short: "Set faults: what is not named stays as it is",
		Args:  cobra.NoArgs,
	}
	flags := command.Flags()
	addLabName(command, &name)
	flags.IntVar(&plane, "plane", -1, "plane; without it, all of them")
	for _, p := range []struct{ flag, usage string }{
		{"loss", "share of IP packets lost, such as 1%"},
		{"duplicate", "share of IP packets that arrive twice"},
		{"corrupt", "share of IP packets with a bit or a byte flipped"},
		{"reorder", "share of IP packets that others overtake"},
	} {
		probabilities[p.flag] = &parsed[float64]{text: "unchanged", parse: lab.ParseProbability}
		flags.Var(probabilities[p.flag], p.flag, p.usage)
	}
	flags.Float64Var(&burst, "burst", 0, "mean packets lost in a row; up to 1, losses are independent")
	flags.StringVar(&script, "script", "", `rules, such as "drop ack 1; drop data last"; they replace the last script's`)
	flags.Uint64Var(&seed, "seed", 0, "seed of the random faults, instead of the lab's")
	flags.BoolVar(&down, "down", false, "drop everything")
	flags.BoolVar(&up, "up", false, "end --down")
	flags.BoolVar(&clear, "clear", false, "first end all random faults and the script")
	command.MarkFlagsMutuallyExclusive("down", "up")
	command.RunE = func(*cobra.Command, []string) error {
		if flags.Changed("plane") && plane < 0 {
			return fmt.Errorf("--plane is %d, want 0 or more", plane)
		}
		asked := false
		for _, flag := range []string{"loss", "burst", "duplicate", "corrupt", "reorder", "script", "seed", "down", "up", "clear"} {
			asked = asked || flags.Changed(flag)
		}
		if !asked {
			return errors.New("no fault named: want at least one of --loss --burst --duplicate --corrupt --reorder --script --seed --down --up --clear")
		}
		l, err := lab.Open(name)
		if err != nil {
			return err
		}
		defer l.Close()
		if l.Config().Direct {
			return fmt.Errorf("lab %s: %w", name, lab.ErrDirect)
		}
		status, err := l.Status()
		if err != nil {
			return err
		}
		planes := status.Planes
		if plane >= 0 {
			if plane >= len(planes) {
				return fmt.Errorf("--plane is %d, want 0 to %d", plane, len(planes)-1)
			}
			planes = planes[plane : plane+1]
		}
		change := func(flag string, field *float64) bool {
			if flags.Changed(flag) {
				*field = probabilities[flag].value
			}
			return flags.Changed(flag)
		}
		var selected []int
		for _, p := range planes {
			selected = append(selected, p.Plane)
			cfg := lab.FaultConfig{
				Planes: []int{p.Plane}, Seed: p.Seed,
				Loss: p.Loss, Burst: p.Burst, Duplicate: p.Duplicate, Corrupt: p.Corrupt, Reorder: p.Reorder,
			}
			if clear {
				cfg = lab.FaultConfig{Planes: []int{p.Plane}}
			}
			changed := clear
			changed = change("loss", &cfg.Loss) || changed
			changed = change("duplicate", &cfg.Duplicate) || changed
			changed = change("corrupt", &cfg.Corrupt) || changed
			changed = change("reorder", &cfg.Reorder) || changed
			if flags.Changed("burst") {
				cfg.Burst, changed = burst, true
			}
			if flags.Changed("seed") {
				cfg.Seed, changed = seed, true
			}
			if changed {
				if err := l.SetRandom(cfg); err != nil {
					return err
				}
			}
			if down {
				err = l.PlaneDown(p.Plane)
			} else if up {
				err = l.PlaneUp(p.Plane)
			}
			if err != nil {
				return err
			}
		}
		if clear || flags.Changed("script") {
			return l.Script(selected, script)
		}
		return nil
	}
	return command
}

func newLabDownCommand() *cobra.Command {
	var name string
	command := &cobra.Command{
		Use:   "down",
		Short: "Tear a lab down, whatever state it is in; without one there is nothing to do",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return lab.Remove(cmd.Context(), name)
		},
	}
	addLabName(command, &name)
	return command
}
