// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/metaroce/metaroce/bench"
	"github.com/metaroce/metaroce/transport"
)

func init() { register(newPerfCommand) }

func newPerfCommand() *cobra.Command {
	command := &cobra.Command{
		Use:   "perf",
		Short: "Bandwidth and latency of RDMA Writes, in perftest's way",
		Long: "perf is used like perftest: without HOST it is the server, which serves one client and\n" +
			"ends; with HOST the client, which decides what is measured. Flags that the server is\n" +
			"given must be the client's too.",
		Args: cobra.NoArgs,
		// Only a command that runs has its arguments checked.
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	command.AddCommand(newPerfTestCommand(bench.WriteBWTest), newPerfTestCommand(bench.WriteLatTest))
	return command
}

// perfOptions are the flags of one perf command.
type perfOptions struct {
	deviceFlags
	params   bench.Params
	port     uint16
	seconds  int
	gbits    bool
	outJSON  bool
	jsonFile string
	spin     bool
	wait     time.Duration
}

// defaultJSONFile is perftest's.
const defaultJSONFile = "perftest_out.json"

// Defaults of waiting for the other end.
const (
	clientWait = 10 * time.Second
	serverWait = 10 * time.Minute
)

func newPerfTestCommand(test bench.Test) *cobra.Command {
	o := perfOptions{params: bench.Params{Test: test, Warmup: bench.DefaultWarmup}}
	short, size, iterations := "Bandwidth of RDMA Writes", 65536, 5000
	if test == bench.WriteLatTest {
		short, size, iterations = "Latency of RDMA Writes", 2, 1000
	}
	command := &cobra.Command{
		Use:   test.String() + " [HOST]",
		Short: short,
		Args:  cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			host := ""
			if len(args) == 1 {
				host = args[0]
				if host == "" {
					return errors.New(`HOST "" is empty, want a name or an address, or none at the server`)
				}
			}
			return o.run(cmd, host)
		},
	}
	flags := command.Flags()
	o.deviceFlags.register(flags)
	flags.Uint64VarP(&o.params.Size, "size", "s", uint64(size), "bytes a message")
	flags.IntVarP(&o.params.Iterations, "iters", "n", iterations, "messages on each queue pair")
	flags.IntVarP(&o.seconds, "duration", "D", 0, "measure for so many seconds instead of -n")
	flags.Uint16VarP(&o.port, "port", "p", defaultSetupPort, "TCP port of the server")
	flags.BoolVarP(&o.params.AllSizes, "all", "a", false, "sizes 2, 4, ... 2^23")
	flags.BoolVar(&o.outJSON, "out_json", false, "write the result as JSON, too")
	flags.StringVar(&o.jsonFile, "out_json_file", defaultJSONFile, "where to, instead of "+defaultJSONFile+"; means --out_json")
	flags.BoolP("CPU-freq", "F", false, "accepted for perftest's users: clock speeds are not looked at")
	flags.DurationVar(&o.params.Warmup, "warmup", bench.DefaultWarmup, "run so long before measuring, for each size")
	flags.BoolVar(&o.spin, "spin", false, "never sleep: poll for completions and keep the pump awake")
	flags.DurationVar(&o.wait, "wait", 0, fmt.Sprintf("for the other end (default: client %v, server %v)", clientWait, serverWait))
	flags.IntVarP(&o.params.Depth, "tx-depth", "t", 128, "messages outstanding on each queue pair, 1 to 128")
	flags.IntVarP(&o.params.QPs, "qp", "q", 1, fmt.Sprintf("queue pairs: connections, 1 to %d", bench.MaxQPs))
	switch test {
	case bench.WriteBWTest:
		flags.BoolVarP(&o.params.Bidirectional, "bidirectional", "b", false, "both ends write; rates are summed")
		flags.BoolVar(&o.gbits, "report_gbits", false, "print Gb/sec (10^9 bits) instead of MiB/sec (2^20 bytes)")
	case bench.WriteLatTest:
		flags.BoolVar(&o.params.Completion, "completion", false, "time from post to completion at the client, instead of half a ping-pong")
	}
	return command
}

// prepare checks flags that depend on each other.
func (o *perfOptions) prepare(cmd *cobra.Command, host string) error {
	flags := cmd.Flags()
	if flags.Changed("duration") {
		switch {
		case flags.Changed("iters"):
			return errors.New("--iters with --duration: want one of them")
		case o.seconds < 1:
			return fmt.Errorf("--duration %d, want at least 1 second", o.seconds)
		}
		o.params.Iterations, o.params.Duration = 0, time.Duration(o.seconds)*time.Second
	} else if o.params.Iterations < 1 {
		return fmt.Errorf("--iters %d, want at least 1", o.params.Iterations)
	}
	if o.params.AllSizes && flags.Changed("size") {
		return errors.New("--size with --all: want one of them")
	}
	if flags.Changed("out_json_file") {
		o.outJSON = true
	}
	if o.outJSON && o.jsonFile == "" {
		return errors.New(`--out_json_file "", want a file name`)
	}
	switch {
	case o.port == 0:
		return errors.New("--port 0, want 1 to 65535")
	case o.wait < 0:
		return fmt.Errorf("--wait %v, want a time", o.wait)
	case o.wait == 0 && host != "":
		o.wait = clientWait
	case o.wait == 0:
		o.wait = serverWait
	}
	return o.params.Validate()
}

func (o *perfOptions) run(cmd *cobra.Command, host string) (err error) {
	if err := o.prepare(cmd, host); err != nil {
		return err
	}
	ctx := cmd.Context()
	d, cfg, err := o.open(ctx, func(c *transport.Config) {
		if o.spin {
			c.Spin = forever
		}
	})
	if err != nil {
		return err
	}
	defer closeDevice(d, &err)
	out := &bench.Perftest{Out: cmd.OutOrStdout(), Gbits: o.gbits, Devices: cfg.Interfaces}
	opts := bench.Options{Poll: o.spin, Wait: o.wait}
	if host != "" {
		s, err := bench.Connect(ctx, d, hostPort(host, o.port), o.params, opts)
		if err != nil {
			return err
		}
		return o.finish(s, o.measure(ctx, s, out))
	}
	l, err := d.Listen(ctx, hostPort("", o.port))
	if err != nil {
		return err
	}
	defer l.Close()
	out.Waiting()
	opts.Check = func(client bench.Params) error { return o.check(cmd, client) }
	s, err := bench.Serve(ctx, d, l, opts)
	if err != nil {
		return err
	}
	return o.finish(s, o.answer(ctx, s, out))
}

// finish closes a run; why it failed matters more than what closing it says.
func (o *perfOptions) finish(s *bench.Session, err error) error {
	if closeErr := s.Close(); err == nil && closeErr != nil {
		return fmt.Errorf("close: %w", closeErr)
	}
	return err
}

// check refuses a client that wants something else than this server's flags say.
func (o *perfOptions) check(cmd *cobra.Command, client bench.Params) error {
	flags, ours := cmd.Flags(), o.params
	if client.Test != ours.Test {
		return fmt.Errorf("the server runs %v, the client %v", ours.Test, client.Test)
	}
	for _, f := range []struct {
		flag         string
		ours, theirs any
	}{
		{"size", ours.Size, client.Size},
		{"all", ours.AllSizes, client.AllSizes},
		{"iters", ours.Iterations, client.Iterations},
		{"duration", ours.Duration, client.Duration},
		{"qp", ours.QPs, client.QPs},
		{"tx-depth", ours.Depth, client.Depth},
		{"bidirectional", ours.Bidirectional, client.Bidirectional},
		{"completion", ours.Completion, client.Completion},
	} {
		if flags.Lookup(f.flag) != nil && flags.Changed(f.flag) && f.ours != f.theirs {
			return fmt.Errorf("--%s: the server was given %v, the client %v", f.flag, f.ours, f.theirs)
		}
	}
	return nil
}

// describe prints what precedes the rows.
func describe(out *bench.Perftest, s *bench.Session) {
	info := s.Conns()[0].Info()
	out.Params, out.Mtu, out.Paths, out.Checksum = s.Params, info.Payload, len(info.Paths), info.Checksum
	var local, remote []bench.QPInfo
	for i := range s.Conns() {
		local, remote = append(local, s.Local(i)), append(remote, s.Remote(i))
	}
	out.Preamble(local, remote)
}

// measure is the client.
func (o *perfOptions) measure(ctx context.Context, s *bench.Session, out *bench.Perftest) error {
	describe(out, s)
	for i := range s.Params.Sizes() {
		r, err := s.Run(ctx, i)
		if err != nil {
			return err
		}
		if err := o.show(out, r); err != nil {
			return err
		}
	}
	out.End()
	return nil
}

// answer is the server.
func (o *perfOptions) answer(ctx context.Context, s *bench.Session, out *bench.Perftest) error {
	describe(out, s)
	var errs []error
	if err := s.Answer(ctx, func(r bench.Report) { errs = append(errs, o.show(out, r)) }); err != nil {
		return err
	}
	out.End()
	return errors.Join(errs...)
}

// show prints a result and writes the JSON file, anew for each size as perftest
// does.
func (o *perfOptions) show(out *bench.Perftest, r bench.Report) error {
	out.Row(r)
	if !o.outJSON {
		return nil
	}
	b, err := out.JSON(r)
	if err != nil {
		return err
	}
	if err := os.WriteFile(o.jsonFile, b, 0o644); err != nil {
		return fmt.Errorf("--out_json_file: %w", err)
	}
	return nil
}
