// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/metaroce/metaroce/bench"
	"github.com/metaroce/metaroce/fabric/lab"
	"github.com/metaroce/metaroce/telemetry"
)

func init() { register(newDemoCommand) }

// demoTime is what the demo may take.
const demoTime = 90 * time.Second

// defaultReport is where the report goes.
const defaultReport = "metaroce-demo.html"

func newDemoCommand() *cobra.Command {
	var out string
	rate := parsed[uint64]{text: "2gbit", value: 2e9, parse: lab.ParseRate}
	command := &cobra.Command{
		Use:   "demo",
		Short: "Two hosts, four planes, loss, a pulled plane, TCP beside it; at most 90 s",
		Long: "demo makes a lab of two hosts and four planes, moves bytes by RDMA Write at 0, 1 and 10 % loss,\n" +
			"pulls a plane in mid-transfer, runs kernel TCP through the same switch beside it, writes a\n" +
			"report and removes the lab.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runDemo(cmd, out, rate.value)
		},
	}
	command.Flags().StringVar(&out, "out", defaultReport, "where the report goes, an HTML page")
	command.Flags().Var(&rate, "rate", "bit/s of each plane")
	return command
}

func runDemo(cmd *cobra.Command, out string, rate uint64) (err error) {
	if out == "" {
		return errors.New(`--out "", want a file name`)
	}
	// Before anything is made: a bad path should not cost 90 seconds.
	report, err := os.CreateTemp(filepath.Dir(out), ".metaroce-demo-*")
	if err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	defer func() {
		if err != nil {
			_ = os.Remove(report.Name())
		}
	}()
	defer report.Close()
	ctx, cancel := context.WithTimeoutCause(cmd.Context(), demoTime,
		fmt.Errorf("the demo did not end within %v", demoTime))
	defer cancel()
	view := newDemoView(cmd.OutOrStdout())
	story, err := bench.Tell(ctx, bench.StoryConfig{
		Lab: fmt.Sprintf("demo-%d", os.Getpid()), Planes: 4, Rate: rate,
		Losses: []float64{0, 0.01, 0.1}, Stream: 2500 * time.Millisecond, Direct: true,
		Counts: telemetry.OwnPackets, Show: view.show(), Logger: quiet(),
	})
	view.end()
	if err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return err
	}
	if err := saveReport(report, out, story); err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	fmt.Fprintln(cmd.OutOrStdout(), summary(story, out))
	return nil
}

// saveReport writes the report into its temporary file and gives it its name.
func saveReport(f *os.File, out string, s *bench.Story) error {
	if err := bench.WriteReport(f, s); err != nil {
		return err
	}
	if err := f.Chmod(0o644); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), out)
}

// summary is the demo's last line.
func summary(s *bench.Story, out string) string {
	var parts []string
	for _, r := range s.Rows {
		if r.Transport == bench.Ours {
			parts = append(parts, fmt.Sprintf("%.2f Gbit/s at %.3g %% loss", r.GoodputBps/1e9, 100*r.Loss))
		}
	}
	pulled := "no plane was pulled"
	for _, p := range s.Pulls {
		switch {
		case p.Transport != bench.Ours:
		case p.Error != "":
			pulled = "a pulled plane ended the connection"
		case p.Recovered:
			pulled = fmt.Sprintf("a pulled plane was made good for in %d ms", p.Recovery.Milliseconds())
		default:
			pulled = "a pulled plane was not made good for in time"
		}
	}
	return fmt.Sprintf("Shown: RDMA Write through XDP over %d planes, %s; %s; report: %s",
		s.Planes, strings.Join(parts, ", "), pulled, out)
}

// demoView shows the demo as it runs: on a terminal the line of what is being
// measured is alive, elsewhere there are only lines that stay.
type demoView struct {
	w    io.Writer
	live bool

	mu    sync.Mutex
	shown time.Time
	head  bool
}

func newDemoView(w io.Writer) *demoView {
	f, ok := w.(*os.File)
	return &demoView{w: w, live: ok && term.IsTerminal(int(f.Fd()))}
}

func (v *demoView) show() bench.Show {
	show := bench.Show{Step: v.step, Row: v.row, Pull: v.pull}
	if v.live {
		show.Live = v.tick
	}
	return show
}

func (v *demoView) print(format string, args ...any) {
	if v.live {
		fmt.Fprint(v.w, eraseLine)
	}
	fmt.Fprintf(v.w, format+"\n", args...)
}

func (v *demoView) step(text string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.print("%s", text)
}

const demoRow = "  %-22s %14s %10s %10s %16s   %s"

func (v *demoView) row(r bench.Row) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !v.head {
		v.head = true
		v.print(demoRow, "", "goodput", "p50 4 KiB", "p99 4 KiB", "sent again", "share of planes")
	}
	again, planes := "", ""
	if r.Sent > 0 {
		again = fmt.Sprintf("%d (%.2f %%)", r.Again, 100*r.AgainShare())
	}
	if r.Shares != nil {
		shares := make([]string, len(r.Shares))
		for i, share := range r.Shares {
			shares[i] = fmt.Sprintf("%.0f", 100*share)
		}
		planes = strings.Join(shares, " ") + " %"
	}
	v.print("%s", strings.TrimRight(fmt.Sprintf(demoRow, rowName(r), fmt.Sprintf("%.2f Gbit/s", r.GoodputBps/1e9),
		formatNs(r.Latency.P50Ns), formatNs(r.Latency.P99Ns), again, planes), " "))
}

// rowName says how a transport was used: TCP needs a connection for each plane.
func rowName(r bench.Row) string {
	switch {
	case r.Transport == bench.Ours:
		return r.Transport
	case r.Shares == nil:
		return r.Transport + ", TSO"
	}
	return fmt.Sprintf("%s x %d, no TSO", r.Transport, len(r.Shares))
}

func formatNs(ns float64) string {
	switch {
	case ns >= 1e6:
		return fmt.Sprintf("%.1f ms", ns/1e6)
	case ns >= 1e3:
		return fmt.Sprintf("%.1f us", ns/1e3)
	}
	return fmt.Sprintf("%.0f ns", ns)
}

// tick redraws the live line.
func (v *demoView) tick(transport string, s bench.Series) {
	v.mu.Lock()
	defer v.mu.Unlock()
	now := time.Now()
	if now.Sub(v.shown) < barEvery {
		return
	}
	v.shown = now
	last := s[len(s)-1].At
	fmt.Fprintf(v.w, eraseLine+"  %-22s %7.2f Gbit/s  %s", transport, s.Rate(last-barEvery, last)/1e9,
		sparkline(s.Rates(barEvery)))
}

// sparkline draws values as a row of blocks.
func sparkline(values []float64) string {
	blocks := []rune("▁▂▃▄▅▆▇█")
	top := 0.0
	for _, v := range values {
		top = max(top, v)
	}
	line := make([]rune, len(values))
	for i, v := range values {
		k := 0
		if top > 0 {
			k = int(v / top * float64(len(blocks)-1))
		}
		line[i] = blocks[min(max(k, 0), len(blocks)-1)]
	}
	return string(line)
}

func (v *demoView) pull(p bench.Pull) {
	v.mu.Lock()
	defer v.mu.Unlock()
	result := "not back to 0.9 of the rest before the plane was"
	if p.Recovered {
		result = fmt.Sprintf("back to 0.9 of the rest after %d ms", p.Recovery.Milliseconds())
	}
	if p.Error != "" {
		result = "error: " + p.Error
	}
	v.print("  %-22s %s  %.2f -> %.2f Gbit/s, %s", p.Transport, sparkline(p.Series.Rates(100*time.Millisecond)),
		p.BeforeBps/1e9, p.DuringBps/1e9, result)
}

// end leaves a clean line.
func (v *demoView) end() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.live {
		fmt.Fprint(v.w, eraseLine)
	}
}
