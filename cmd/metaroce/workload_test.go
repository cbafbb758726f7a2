// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/metaroce/metaroce/bench"
	"github.com/metaroce/metaroce/cmd/metaroce/internal/filecopy"
	"github.com/metaroce/metaroce/fabric/lab"
)

// patience bounds waiting in tests.
const patience = 2 * time.Minute

// output may be read while a command writes into it.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// ran is a command line that ran in this process.
type ran struct {
	status   int
	out, err output
}

// twoHosts makes a lab for command lines.
func twoHosts(t *testing.T) *lab.Lab {
	t.Helper()
	if uid := os.Geteuid(); uid != 0 {
		t.Skipf("running as uid %d, needs root: network namespaces and BPF", uid)
	}
	l, err := lab.Up(t.Context(), lab.Config{Name: fmt.Sprintf("cmd%d", os.Getpid()), Planes: 2})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Down(); err != nil {
			t.Error(err)
		}
	})
	return l
}

// on starts a command line on a host; the result is there when done is closed.
func on(ctx context.Context, t *testing.T, l *lab.Lab, host int, args ...string) (r *ran, done <-chan struct{}) {
	r, ended := &ran{}, make(chan struct{})
	go func() {
		defer close(ended)
		if err := l.Do(host, func() error {
			r.status = run(ctx, args, &r.out, &r.err)
			return nil
		}); err != nil {
			t.Error(err)
		}
	}()
	t.Cleanup(func() { <-ended })
	return r, ended
}

// await waits for a command's end and its success.
func await(t *testing.T, what string, r *ran, done <-chan struct{}) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatalf("%s has not ended within %v", what, patience)
	}
	if r.status != 0 {
		t.Errorf("%s: status %d: %s", what, r.status, r.err.String())
	}
}

func TestPerfCommandsMeasure(t *testing.T) {
	l := twoHosts(t)
	file := filepath.Join(t.TempDir(), "out.json")
	for _, tc := range []struct {
		name           string
		server, client []string
		want           []string
	}{
		{
			"bandwidth",
			[]string{"write-bw"},
			[]string{"write-bw", "-s", "4096", "-n", "20", "-q", "2", "-t", "4", "-m", "1024", "--paths", "4", "--report_gbits", "-F"},
			[]string{"Number of qps   : 2", "Mtu             : 1024[B]", "Paths a qp      : 4", "BW average[Gb/sec]", "\n 4096       40 "},
		},
		{
			"latency",
			[]string{"write-lat", "--checksum", "off"},
			[]string{"write-lat", "-n", "20", "--checksum", "off", "--out_json_file", file},
			[]string{"RDMA_Write Latency Test", "UDP checksum    : OFF", "t_typical[usec]", "\n 2       20 "},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			devices := []string{"-d", "p0,p1", "--warmup", "1ms"}
			server, serverDone := on(t.Context(), t, l, 1, append(append([]string{"perf"}, tc.server...), devices...)...)
			client, clientDone := on(t.Context(), t, l, 0, append(append(append([]string{"perf"}, tc.client...), devices...),
				"--wait", patience.String(), l.Addr(1, 0).String())...)
			await(t, "client", client, clientDone)
			await(t, "server", server, serverDone)
			for _, want := range tc.want {
				if !strings.Contains(client.out.String(), want) {
					t.Errorf("client's output lacks %q:\n%s", want, client.out.String())
				}
			}
			if !strings.Contains(server.out.String(), "Waiting for client") {
				t.Errorf("server's output lacks its banner:\n%s", server.out.String())
			}
		})
	}
	if b, err := os.ReadFile(file); err != nil || !strings.Contains(string(b), `"t_typical"`) {
		t.Errorf("JSON file has %q, error %v", b, err)
	}
}

func TestServerWithFlagsRefusesAClientWithOthers(t *testing.T) {
	l := twoHosts(t)
	server, serverDone := on(t.Context(), t, l, 1, "perf", "write-bw", "-d", "p0,p1", "-s", "4096")
	client, clientDone := on(t.Context(), t, l, 0, "perf", "write-bw", "-d", "p0,p1", "--wait", patience.String(), "-s", "64", l.Addr(1, 0).String())
	for who, r := range map[string]*ran{"server": server, "client": client} {
		<-serverDone
		<-clientDone
		if want := "--size: the server was given 4096, the client 64"; r.status == 0 || !strings.Contains(r.err.String(), want) {
			t.Errorf("%s: status %d, error %q, want one with %q", who, r.status, r.err.String(), want)
		}
	}
}

func TestCopyCommandsCopy(t *testing.T) {
	l := twoHosts(t)
	src, dst := t.TempDir(), t.TempDir()
	var files []string
	for i, size := range []int{0, 1, 300000} {
		path := filepath.Join(src, fmt.Sprintf("file %d", i))
		if err := os.WriteFile(path, bytes.Repeat([]byte{byte(i + 1)}, size), 0o640); err != nil {
			t.Fatal(err)
		}
		files = append(files, path)
	}
	stale := filepath.Join(dst, ".metaroce-0123456789abcdef.part")
	if err := os.WriteFile(stale, []byte("left behind"), 0o600); err != nil {
		t.Fatal(err)
	}
	recv, recvDone := on(t.Context(), t, l, 1, "recv", "-d", "p0,p1", "--once", dst)
	args := append([]string{"cp", "-d", "p0,p1", "--wait", patience.String()}, files...)
	cp, cpDone := on(t.Context(), t, l, 0, append(args, l.Addr(1, 0).String()+":")...)
	await(t, "cp", cp, cpDone)
	await(t, "recv", recv, recvDone)
	for _, path := range files {
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(filepath.Join(dst, filepath.Base(path))); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: differs, error %v", path, err)
		}
	}
	list, err := os.ReadDir(dst)
	if err != nil || len(list) != len(files) {
		t.Errorf("directory has %v, error %v, want the %d files alone", list, err, len(files))
	}
	for who, r := range map[string]*ran{"cp": cp, "recv": recv} {
		if want := "file 1: 1 bytes in "; !strings.Contains(r.out.String(), want) || r.err.String() != "" {
			t.Errorf("%s: output %q, errors %q, want a line with %q and no error", who, r.out.String(), r.err.String(), want)
		}
	}
}

func TestRecvServesUntilItIsInterrupted(t *testing.T) {
	l := twoHosts(t)
	dst, path := t.TempDir(), filepath.Join(t.TempDir(), "x")
	if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	recv, recvDone := on(ctx, t, l, 1, "recv", "-d", "p0,p1", dst)
	for range 2 {
		cp, cpDone := on(t.Context(), t, l, 0, "cp", "-d", "p0,p1", "--wait", patience.String(), path, l.Addr(1, 0).String()+":")
		await(t, "cp", cp, cpDone)
	}
	interrupt()
	await(t, "recv", recv, recvDone)
	if got := strings.Count(recv.out.String(), "x: 1 bytes"); got != 2 {
		t.Errorf("recv tells of %d files, want 2:\n%s", got, recv.out.String())
	}
}

func TestCommandLinesThatMakeNoSenseAreRefused(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"perf", "write-bw", "-D", "1", "-n", "5"}, "--iters with --duration"},
		{[]string{"perf", "write-bw", "-D", "0"}, "--duration 0"},
		{[]string{"perf", "write-bw", "-n", "0"}, "--iters 0"},
		{[]string{"perf", "write-bw", "-a", "-s", "5"}, "--size with --all"},
		{[]string{"perf", "write-bw", "-s", "0"}, "size 0"},
		{[]string{"perf", "write-bw", "-t", "129"}, "tx depth 129"},
		{[]string{"perf", "write-bw", "-q", "65"}, "65 queue pairs"},
		{[]string{"perf", "write-bw", "-m", "4096", "-d", "x"}, "--mtu 4096, want one of [3072 2048 1024]"},
		{[]string{"perf", "write-bw", "--paths", "33", "-d", "x"}, "--paths 33"},
		{[]string{"perf", "write-bw", "--checksum", "maybe", "-d", "x"}, `--checksum "maybe"`},
		{[]string{"perf", "write-bw", "-d", "p0,,p1"}, "empty name"},
		{[]string{"perf", "write-bw", "-p", "0"}, "--port 0"},
		{[]string{"perf", "write-bw", "a", "b"}, "accepts at most 1 arg"},
		{[]string{"perf", "write-bw", "--completion"}, "unknown flag: --completion"},
		{[]string{"perf", "write-bw", ""}, "HOST"},
		{[]string{"perf", "write-lat", "-b"}, "unknown shorthand flag"},
		{[]string{"perf", "write-lat", "-q", "2"}, "want 1 for write-lat"},
		{[]string{"perf", "write-lat", "--out_json_file", ""}, "--out_json_file"},
		{[]string{"perf", "nonsense"}, "nonsense"},
		{[]string{"cp", file, "198.18.0.1"}, "want HOST: with a colon"},
		{[]string{"cp", file, ":"}, "has no host"},
		{[]string{"cp", dir, "198.18.0.1:"}, "directory, want a regular file"},
		{[]string{"cp", filepath.Join(dir, "nope"), "198.18.0.1:"}, "no such file"},
		{[]string{"cp", file, "198.18.0.1:", "--timeout", "1ms"}, "--timeout 1ms"},
		{[]string{"cp", file}, "requires at least 2 arg"},
		{[]string{"recv"}, "accepts 1 arg"},
		{[]string{"recv", file}, "is a file, want a directory"},
		{[]string{"recv", filepath.Join(dir, "nope")}, "no such file"},
		{[]string{"demo", "--out", filepath.Join(dir, "nope", "x")}, "--out"},
		{[]string{"demo", "--out", ""}, "--out"},
		{[]string{"bench", "--pairs", "0"}, "--pairs 0"},
	} {
		t.Run(strings.Join(tc.args, " "), func(t *testing.T) {
			var out, errs output
			status := run(t.Context(), tc.args, &out, &errs)
			line := errs.String()
			if status == 0 || !strings.Contains(line, tc.want) || strings.Count(line, "\n") != 1 {
				t.Errorf("status %d, error %q, want one line with %q", status, line, tc.want)
			}
		})
	}
	if list, err := os.ReadDir(dir); err != nil || len(list) != 1 {
		t.Errorf("directory has %v, error %v: refused commands left something", list, err)
	}
}

func TestProgressSaysShareRateAndTimeLeft(t *testing.T) {
	for _, tc := range []struct {
		p       filecopy.Progress
		elapsed time.Duration
		want    string
	}{
		{filecopy.Progress{Name: "a", Done: 0, Total: 100}, 0, "a    0%  0 B of 100 B  0 MB/s  -:-- left"},
		{filecopy.Progress{Name: "a", Done: 25e6, Total: 100e6}, time.Second, "a   25%  25.0 MB of 100.0 MB  25.0 MB/s  0:03 left"},
		{filecopy.Progress{Name: "a", Done: 1e9, Total: 8e12}, time.Second, "a    0%  1.00 GB of 8000.00 GB  1.00 GB/s  2:13:19 left"},
		{filecopy.Progress{Name: "a\nb", Done: 5, Total: 5}, time.Second, `"a\nb"  100%  5 B of 5 B  0.0 kB/s  0:00 left`},
		{filecopy.Progress{Name: "empty"}, time.Second, "empty  100%  0 B of 0 B  0.0 kB/s  0:00 left"},
	} {
		if got := progressLine(tc.p, tc.elapsed); got != tc.want {
			t.Errorf("%+v: %q, want %q", tc.p, got, tc.want)
		}
	}
}

func TestProgressIsDrawnOnATerminalAlone(t *testing.T) {
	var w output
	now := time.Unix(1000, 0)
	b := newProgressBar(&w)
	b.now = func() time.Time { return now }
	b.show(filecopy.Progress{Name: "a", Done: 0, Total: 10})
	b.clear()
	if w.String() != "" {
		t.Errorf("a file got %q, want nothing", w.String())
	}
	b.on, b.width = true, 12
	b.show(filecopy.Progress{Name: "a", Done: 0, Total: 10})
	b.show(filecopy.Progress{Name: "a", Done: 1, Total: 10}) // too soon
	now = now.Add(barEvery)
	b.show(filecopy.Progress{Name: "a", Done: 5, Total: 10})
	b.clear()
	if want := eraseLine + "a    0%  0 " + eraseLine + "a   50%  5 " + eraseLine; w.String() != want {
		t.Errorf("drawn %q, want %q", w.String(), want)
	}
}

func TestSetupAddressesAreWrittenAsTheyAreDialled(t *testing.T) {
	for host, want := range map[string]string{"198.18.0.1": "198.18.0.1:7", "fd00::1": "[fd00::1]:7", "[fd00::1]": "[fd00::1]:7", "": ":7", "name": "name:7"} {
		if got := hostPort(host, 7); got != want {
			t.Errorf("%q: %q, want %q", host, got, want)
		}
	}
}

func demoStory() *bench.Story {
	lat := bench.LatResult{Iterations: 1, P50Ns: 5500, P99Ns: 3.6e6}
	return &bench.Story{
		Planes: 4,
		Rows: []bench.Row{
			{Transport: bench.Ours, GoodputBps: 7.1e9, Latency: lat, Sent: 1000, Shares: []float64{.25, .25, .25, .25}},
			{Transport: bench.TCPs, Loss: 0.1, GoodputBps: 0.8e9, Latency: lat, Sent: 1000, Again: 289, Shares: []float64{.14, .22, .29, .35}},
			{Transport: bench.Ours, Loss: 0.1, GoodputBps: 5.75e9, Latency: lat, Sent: 1000, Again: 100, Shares: []float64{.25, .25, .25, .25}},
		},
		Pulls: []bench.Pull{{
			Transport: bench.Ours, BeforeBps: 7e9, DuringBps: 5e9, Recovered: true, Recovery: 14 * time.Millisecond,
			Series: bench.Series{{}, {At: 100 * time.Millisecond, Bytes: 100}, {At: 200 * time.Millisecond, Bytes: 150}},
		}},
		Direct: []bench.Row{{Transport: bench.TCPs, GoodputBps: 7.6e9, Latency: lat}},
	}
}

func TestDemoWithoutATerminalPrintsLines(t *testing.T) {
	var w output
	v := newDemoView(&w)
	show := v.show()
	if show.Live != nil {
		t.Error("the live line is drawn into a file")
	}
	s := demoStory()
	show.Step("a step")
	for _, r := range append(s.Rows, s.Direct...) {
		show.Row(r)
	}
	show.Pull(s.Pulls[0])
	v.end()
	want := `a step
                                goodput  p50 4 KiB  p99 4 KiB       sent again   share of planes
  metaroce                  7.10 Gbit/s     5.5 us     3.6 ms       0 (0.00 %)   25 25 25 25 %
  TCP x 4, no TSO           0.80 Gbit/s     5.5 us     3.6 ms    289 (28.90 %)   14 22 29 35 %
  metaroce                  5.75 Gbit/s     5.5 us     3.6 ms    100 (10.00 %)   25 25 25 25 %
  TCP, TSO                  7.60 Gbit/s     5.5 us     3.6 ms
  metaroce               █▄  7.00 -> 5.00 Gbit/s, back to 0.9 of the rest after 14 ms
`
	if w.String() != want {
		t.Errorf("printed:\n%s\nwant:\n%s", w.String(), want)
	}
}

func TestDemoEndsWithOneLineThatSaysWhatWasShown(t *testing.T) {
	got := summary(demoStory(), "report.html")
	want := "Shown: RDMA Write through XDP over 4 planes, 7.10 Gbit/s at 0 % loss, 5.75 Gbit/s at 10 % loss; " +
		"a pulled plane was made good for in 14 ms; report: report.html"
	if got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
