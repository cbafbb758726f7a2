// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/metaroce/metaroce/bench"
	"github.com/metaroce/metaroce/cmd/metaroce/internal/filecopy"
	"github.com/metaroce/metaroce/transport"
)

func init() { register(newCpCommand) }

// copyFlags are those that cp and recv share.
type copyFlags struct {
	deviceFlags
	port uint16
	idle time.Duration
}

// defaultIdle is how long the other end of a copy may do nothing.
const defaultIdle = time.Minute

func (f *copyFlags) register(cmd *cobra.Command) {
	flags := cmd.Flags()
	f.deviceFlags.register(flags)
	flags.Uint16VarP(&f.port, "port", "p", defaultSetupPort, "TCP port of the receiver")
	flags.DurationVar(&f.idle, "timeout", defaultIdle, "give up when the other end does nothing for so long")
}

func (f *copyFlags) check() error {
	switch {
	case f.port == 0:
		return errors.New("--port 0, want 1 to 65535")
	case f.idle < time.Second:
		return fmt.Errorf("--timeout %v, want at least 1s", f.idle)
	}
	return nil
}

func newCpCommand() *cobra.Command {
	var flags copyFlags
	var wait time.Duration
	command := &cobra.Command{
		Use:   "cp FILE... HOST:",
		Short: "Copy files to a receiver by RDMA Write",
		Long: "cp copies files to `metaroce recv` on HOST, an address or a name with a colon behind it.\n" +
			"Each is compared by SHA-256 and appears there whole or not at all, with its mode and time.",
		Example: "  metaroce cp big.img notes.txt 198.18.0.2:",
		Args:    cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			host, err := parseHost(args[len(args)-1])
			if err != nil {
				return err
			}
			if err := flags.check(); err != nil {
				return err
			}
			if wait < 0 {
				return fmt.Errorf("--wait %v, want a time", wait)
			}
			files := args[:len(args)-1]
			if err := filecopy.CheckFiles(files); err != nil {
				return err
			}
			return runCp(cmd, &flags, files, host, wait)
		},
	}
	flags.register(command)
	command.Flags().DurationVar(&wait, "wait", clientWait, "for a receiver to be there")
	return command
}

// parseHost takes the colon off HOST:.
func parseHost(arg string) (string, error) {
	host, ok := strings.CutSuffix(arg, ":")
	if !ok {
		return "", fmt.Errorf("last argument %q, want HOST: with a colon at its end", arg)
	}
	if host == "" {
		return "", fmt.Errorf("last argument %q has no host", arg)
	}
	return host, nil
}

func runCp(cmd *cobra.Command, flags *copyFlags, files []string, host string, wait time.Duration) (err error) {
	ctx := cmd.Context()
	d, _, err := flags.open(ctx, nil)
	if err != nil {
		return err
	}
	defer closeDevice(d, &err)
	addr := hostPort(host, flags.port)
	s, err := filecopy.Dial(d, flags.idle, func(private []byte, opt transport.ConnOption) (*transport.Conn, error) {
		return bench.DialRetry(ctx, d, addr, private, wait, opt)
	})
	if err != nil {
		return err
	}
	bar := newProgressBar(cmd.ErrOrStderr())
	s.Progress = bar.show
	for _, path := range files {
		f, err := s.Send(ctx, path)
		bar.clear()
		if err != nil {
			_ = s.Close() // the copy's error matters more
			if ctx.Err() != nil {
				return fmt.Errorf("%s: interrupted", path)
			}
			return fmt.Errorf("copy to %s: %w", host, err)
		}
		printFile(cmd.OutOrStdout(), f)
	}
	if err := s.Close(); err != nil {
		return fmt.Errorf("close: %w", err)
	}
	return nil
}

// printFile prints one line about a file that was copied.
func printFile(w io.Writer, f filecopy.File) {
	fmt.Fprintf(w, "%s: %d bytes in %.3f s, %s, sha256 %x\n",
		printName(f.Name), f.Size, f.Elapsed.Seconds(), formatRate(float64(f.Size), f.Elapsed), f.Sum)
}

// printName quotes a name that would spoil a line.
func printName(name string) string {
	if quoted := fmt.Sprintf("%q", name); quoted != `"`+name+`"` {
		return quoted
	}
	return name
}

// formatRate writes bytes over a time as a rate.
func formatRate(bytes float64, d time.Duration) string {
	if d <= 0 {
		return "0 MB/s"
	}
	bps := bytes / d.Seconds()
	switch {
	case bps >= 1e9:
		return fmt.Sprintf("%.2f GB/s", bps/1e9)
	case bps >= 1e6:
		return fmt.Sprintf("%.1f MB/s", bps/1e6)
	}
	return fmt.Sprintf("%.1f kB/s", bps/1e3)
}

// progressBar shows how far a file is, on a terminal; elsewhere it is silent, and
// the line that follows each file says all.
type progressBar struct {
	w     io.Writer
	on    bool
	width int
	name  string
	start time.Time
	shown time.Time
	now   func() time.Time
}

func newProgressBar(w io.Writer) *progressBar {
	b := &progressBar{w: w, now: time.Now, width: 80}
	if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		b.on = true
		if width, _, err := term.GetSize(int(f.Fd())); err == nil && width > 20 {
			b.width = width
		}
	}
	return b
}

const (
	barEvery  = 100 * time.Millisecond
	eraseLine = "\r\x1b[K"
)

func (b *progressBar) show(p filecopy.Progress) {
	now := b.now()
	if p.Done == 0 || p.Name != b.name {
		b.name, b.start, b.shown = p.Name, now, time.Time{}
	}
	if !b.on || now.Sub(b.shown) < barEvery && p.Done != p.Total {
		return
	}
	b.shown = now
	line := []rune(progressLine(p, now.Sub(b.start)))
	fmt.Fprint(b.w, eraseLine+string(line[:min(len(line), b.width-1)]))
}

func (b *progressBar) clear() {
	if b.on {
		fmt.Fprint(b.w, eraseLine)
	}
}

// progressLine says how much of a file is copied, how fast, and how long the rest
// takes at that rate.
func progressLine(p filecopy.Progress, elapsed time.Duration) string {
	share, left := 100.0, "0:00"
	if p.Total > 0 {
		share = 100 * float64(p.Done) / float64(p.Total)
	}
	if p.Done < p.Total {
		left = "-:--"
		if p.Done > 0 {
			rest := elapsed.Seconds() * float64(p.Total-p.Done) / float64(p.Done)
			left = formatLeft(time.Duration(rest * float64(time.Second)))
		}
	}
	return fmt.Sprintf("%s  %3.0f%%  %s of %s  %s  %s left", printName(p.Name), share,
		formatBytes(p.Done), formatBytes(p.Total), formatRate(float64(p.Done), elapsed), left)
}

func formatLeft(d time.Duration) string {
	s := int(d.Round(time.Second).Seconds())
	if s >= 3600 {
		return fmt.Sprintf("%d:%02d:%02d", s/3600, s/60%60, s%60)
	}
	return fmt.Sprintf("%d:%02d", s/60, s%60)
}

func formatBytes(n int64) string {
	switch f := float64(n); {
	case n >= 1e9:
		return fmt.Sprintf("%.2f GB", f/1e9)
	case n >= 1e6:
		return fmt.Sprintf("%.1f MB", f/1e6)
	case n >= 1e3:
		return fmt.Sprintf("%.1f kB", f/1e3)
	}
	return fmt.Sprintf("%d B", n)
}

// interrupted says whether a command was told to stop.
func interrupted(ctx context.Context) bool { return ctx.Err() != nil }
