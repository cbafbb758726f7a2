// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/metaroce/metaroce/fabric/lab"
)

// Ceiling is a program that measures the least possible XDP protocol on this
// machine, in network namespaces of its own.
type Ceiling struct{ path string }

// CeilingResult is what it prints, in part.
type CeilingResult struct {
	GbitPerS float64 `json:"gbit_per_s"`
	RTT50Ns  float64 `json:"rtt_ns_p50"`
}

// baselineTime bounds one run of a baseline.
const baselineTime = time.Minute

// BuildCeiling builds the program whose source is in dir into the directory into.
func BuildCeiling(ctx context.Context, dir, into string) (*Ceiling, error) {
	if _, err := os.Stat(filepath.Join(dir, "main.go")); err != nil {
		return nil, err
	}
	out := filepath.Join(into, "ceiling")
	cmd := exec.CommandContext(ctx, "go", "build", "-o", out, ".")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if msg, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("go build in %s: %w: %s", dir, err, bytes.TrimSpace(msg))
	}
	return &Ceiling{path: out}, nil
}

// Run measures at a payload in bytes a packet and a span of memory in bytes.
func (c *Ceiling) Run(ctx context.Context, payload, span int, d time.Duration) (r CeilingResult, err error) {
	ctx, cancel := context.WithTimeout(ctx, baselineTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, c.path, "-payload", fmt.Sprint(payload), "-span", fmt.Sprint(span), "-d", d.String())
	// It removes its namespaces at the end, and only then: it is not interrupted, not
	// even from the terminal, but waited for.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return nil }
	cmd.WaitDelay = baselineTime
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return r, fmt.Errorf("ceiling: %w: %s", err, bytes.TrimSpace(stderr.Bytes()))
	}
	if err := json.Unmarshal(out, &r); err != nil {
		return r, fmt.Errorf("ceiling printed %q: %w", out, err)
	}
	return r, nil
}

// congestionControls lists those of the kernel.
func congestionControls() ([]string, error) {
	b, err := os.ReadFile("/proc/sys/net/ipv4/tcp_available_congestion_control")
	if err != nil {
		return nil, err
	}
	return strings.Fields(string(b)), nil
}

// iperf runs iperf3 from host 0 to host 1 of a lab and returns the receiver's
// rate in bit/s and how many bytes arrived.
func iperf(ctx context.Context, l *lab.Lab, congestion string, d time.Duration) (bps float64, received uint64, err error) {
	ctx, cancel := context.WithTimeout(ctx, baselineTime)
	defer cancel()
	addr := l.Addr(1, 0).String()
	server := exec.CommandContext(ctx, "iperf3", "-s", "-1", "-B", addr, "--forceflush")
	stdout, err := server.StdoutPipe()
	if err != nil {
		return 0, 0, err
	}
	if err := l.Start(1, server); err != nil {
		return 0, 0, fmt.Errorf("iperf3: %w", err)
	}
	defer func() {
		cancel() // it ends by itself after a client
		_ = server.Wait()
	}()
	lines := bufio.NewScanner(stdout)
	listening := false
	for !listening && lines.Scan() {
		listening = strings.Contains(lines.Text(), "listening")
	}
	if !listening {
		return 0, 0, errors.New("iperf3 server ended before it listened")
	}
	client := exec.CommandContext(ctx, "iperf3", "-c", addr, "-J", "-C", congestion, "-t", fmt.Sprint(max(1, int(d.Seconds()))))
	var out bytes.Buffer
	client.Stdout = &out
	if err := l.Start(0, client); err != nil {
		return 0, 0, fmt.Errorf("iperf3: %w", err)
	}
	waitErr := client.Wait()
	bps, received, err = parseIperf(out.Bytes())
	return bps, received, errors.Join(waitErr, err)
}

func parseIperf(b []byte) (bps float64, received uint64, err error) {
	var r struct {
		Error string `json:"error"`
		End   struct {
			Received struct {
				Bps   float64 `json:"bits_per_second"`
				Bytes uint64  `json:"bytes"`
			} `json:"sum_received"`
		} `json:"end"`
	}
	if err := json.Unmarshal(b, &r); err != nil {
		return 0, 0, fmt.Errorf("iperf3's report: %w", err)
	}
	switch {
	case r.Error != "":
		return 0, 0, fmt.Errorf("iperf3: %s", r.Error)
	case r.End.Received.Bytes == 0:
		return 0, 0, errors.New("iperf3's report has no bytes received")
	}
	return r.End.Received.Bps, r.End.Received.Bytes, nil
}
