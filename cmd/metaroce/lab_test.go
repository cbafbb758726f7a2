// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/metaroce/metaroce/fabric/lab"
)

// runLab runs `metaroce lab ...`.
func runLab(t *testing.T, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	status = run(t.Context(), append([]string{"lab"}, args...), &out, &errs)
	return status, out.String(), errs.String()
}

// makeLab brings up a lab of the test's own.
func makeLab(t *testing.T, args ...string) (name string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: network namespaces and BPF")
	}
	name = fmt.Sprintf("c%d", os.Getpid())
	t.Cleanup(func() {
		if status, _, stderr := runLab(t, "down", "--name", name); status != 0 {
			t.Errorf("lab down: %s", stderr)
		}
	})
	if status, _, stderr := runLab(t, append([]string{"up", "--name", name}, args...)...); status != 0 {
		t.Fatalf("lab up: %s", stderr)
	}
	return name
}

func readLab(t *testing.T, name string) lab.Status {
	t.Helper()
	status, stdout, stderr := runLab(t, "status", "--name", name, "--json")
	if status != 0 {
		t.Fatalf("lab status: %s", stderr)
	}
	var labs []lab.Status
	if err := json.Unmarshal([]byte(stdout), &labs); err != nil || len(labs) != 1 {
		t.Fatalf("lab status --json printed %d labs, %v, want 1:\n%s", len(labs), err, stdout)
	}
	return labs[0]
}

func TestLab_badInputIsOneLineThatNamesIt(t *testing.T) {
	for args, want := range map[string]string{
		"up --frobnicate":                   "--frobnicate",
		"up extra":                          `"extra"`,
		"up --rate fast":                    `"fast"`,
		"up --ecn 64Kib/s":                  `"64Kib/s"`,
		"up --queue -1":                     `"-1"`,
		"up --hosts many":                   `"many"`,
		"up --hosts 0":                      "--hosts is 0",
		"up --name Bad/Name":                `"Bad/Name"`,
		"up --direct --hosts 3":             "hosts is 3, want 2",
		"up --direct --rate 1gbit":          "rate is 1gbit, want none",
		"up --direct --ecn 1KiB":            "--ecn with --direct",
		"fault --loss 1":                    `probability "1"`,
		"fault --name absent":               "no fault named",
		"fault --name absent --up":          "absent-h0",
		"fault --name absent --up --down":   "down up",
		"fault --name absent --plane -2":    "--plane is -2",
		"status --name absent":              "absent-h0",
		"exec --name absent h0 -- true":     "absent-h0",
		"exec --name absent zero -- true":   `"zero"`,
		"exec --name absent h0":             "at least 2 arg",
		"exec --name absent h0 --":          "no command",
		"down --name ../x":                  `"../x"`,
		"exec --name absent h99999 -- true": `"h99999"`,
	} {
		status, stdout, stderr := runLab(t, strings.Fields(args)...)
		if status != 1 || stdout != "" {
			t.Errorf("lab %s: exit status %d, printed %q, want 1 and nothing", args, status, stdout)
		}
		if !strings.HasPrefix(stderr, "metaroce: ") || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, want) {
			t.Errorf("lab %s: error %q, want one line with %q", args, stderr, want)
		}
	}
}

func TestRun_unknownCommandIsNamed(t *testing.T) {
	var out, errs bytes.Buffer
	if status := run(t.Context(), []string{"frobnicate"}, &out, &errs); status != 1 {
		t.Errorf("exit status %d, want 1", status)
	}
	if got := errs.String(); !strings.HasPrefix(got, "metaroce: ") || !strings.Contains(got, `"frobnicate"`) || strings.Count(got, "\n") != 1 {
		t.Errorf("error %q, want one line that names the command", got)
	}
}

func TestLabDown_withoutALabIsNoError(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: the lock that all labs share")
	}
	if status, _, stderr := runLab(t, "down", "--name", fmt.Sprintf("never%d", os.Getpid())); status != 0 {
		t.Errorf("lab down: %s", stderr)
	}
}

func TestLabUp_passesItsFlagsOn(t *testing.T) {
	name := makeLab(t, "--hosts", "3", "--planes", "2", "--spines", "2", "--rate", "5gbit",
		"--ecn", "32KiB", "--queue", "256KiB", "--seed", "7", "--mtu", "2000")
	got := readLab(t, name)
	if len(got.Hosts) != 3 || len(got.Planes) != 2 || got.Spines != 2 || got.RateBps != 5e9 ||
		got.ECNBytes != 32<<10 || got.QueueBytes != 256<<10 || got.Seed != 7 || got.MTU != 2000 || got.Direct {
		t.Errorf("status %+v, want what the flags say", got)
	}
	if addr := got.Hosts[2].Addresses[1].String(); addr != "198.18.1.3" {
		t.Errorf("host 2 on plane 1 has %s, want 198.18.1.3", addr)
	}
}

func TestLabFault_changesOnlyWhatIsNamed(t *testing.T) {
	name := makeLab(t, "--planes", "2")
	for _, args := range []string{
		"--loss 1% --burst 4",
		"--plane 1 --duplicate 2%",
		"--plane 1 --down",
		"--plane 0 --loss 5%",
	} {
		if status, _, stderr := runLab(t, append([]string{"fault", "--name", name}, strings.Fields(args)...)...); status != 0 {
			t.Fatalf("lab fault %s: %s", args, stderr)
		}
	}
	if status, _, stderr := runLab(t, "fault", "--name", name, "--script", "drop ack 1; drop data last"); status != 0 {
		t.Fatalf("lab fault --script: %s", stderr)
	}
	got := readLab(t, name)
	p0, p1 := got.Planes[0], got.Planes[1]
	if p0.Loss != 0.05 || p0.Burst != 4 || p0.Duplicate != 0 || !p0.Up {
		t.Errorf("plane 0 %+v, want loss 5 %%, burst 4, up", p0)
	}
	if p1.Loss != 0.01 || p1.Burst != 4 || p1.Duplicate != 0.02 || p1.Up {
		t.Errorf("plane 1 %+v, want loss 1 %%, burst 4, duplicate 2 %%, down", p1)
	}
	if len(got.Rules) != 2 {
		t.Errorf("rules %+v, want 2", got.Rules)
	}
	if status, _, stderr := runLab(t, "fault", "--name", name, "--clear", "--up"); status != 0 {
		t.Fatalf("lab fault --clear --up: %s", stderr)
	}
	got = readLab(t, name)
	for _, p := range got.Planes {
		if p.Loss != 0 || p.Duplicate != 0 || !p.Up {
			t.Errorf("plane %d %+v after --clear --up, want it healthy", p.Plane, p)
		}
	}
	if len(got.Rules) != 0 {
		t.Errorf("rules %+v after --clear, want none", got.Rules)
	}
	if status, _, stderr := runLab(t, "fault", "--name", name, "--plane", "2", "--down"); status != 1 || !strings.Contains(stderr, "want 0 to 1") {
		t.Errorf("plane 2 of 2: exit status %d, %q, want an error with the range", status, stderr)
	}
}

func TestLabFault_refusesADirectLab(t *testing.T) {
	name := makeLab(t, "--direct")
	if status, _, stderr := runLab(t, "fault", "--name", name, "--loss", "1%"); status != 1 || !strings.Contains(stderr, "no switch") {
		t.Errorf("exit status %d, %q, want an error that says why", status, stderr)
	}
}

// execArgs, when set, makes the test below stand in for the program: exec replaces
// the process, so that it needs one of its own.
const execArgs = "METAROCE_TEST_LAB_EXEC"

func TestLabExec_standsInForTheProgram(t *testing.T) {
	args, ok := os.LookupEnv(execArgs)
	if !ok {
		t.Skip("is a part of TestLabExec_*, which runs it in a process of its own")
	}
	os.Exit(run(t.Context(), strings.Split(args, "\n"), os.Stdout, os.Stderr))
}

func TestLabExec_runsInTheHostAndReturnsTheExitStatus(t *testing.T) {
	name := makeLab(t, "--planes", "2")
	script := `grep -q p1: /proc/net/dev && readlink /proc/self/ns/mnt; exit 7`
	cmd := exec.Command(os.Args[0], "-test.run=^TestLabExec_standsInForTheProgram$")
	cmd.Env = append(os.Environ(), execArgs+"="+strings.Join([]string{"lab", "exec", "--name", name, "h1", "--", "sh", "-c", script}, "\n"))
	out, err := cmd.Output()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 7 {
		t.Errorf("lab exec: %v, want the command's exit status 7", err)
	}
	mnt, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.TrimSpace(string(out)); got != mnt {
		t.Errorf("printed %q, want interface p1 and the caller's mount namespace %s", got, mnt)
	}
}
