// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/metaroce/metaroce/fabric/lab"
	"github.com/metaroce/metaroce/transport"
)

// inExec starts a program below `ip netns exec`, which gives it a mount namespace with a /sys of its
// own. It ends with the test.
func inExec(t *testing.T, l *lab.Lab, index int, argv ...string) *command {
	t.Helper()
	ip, err := exec.LookPath("ip")
	if err != nil {
		t.Skip("needs iproute2")
	}
	return start(t, l, index, nil, append([]string{ip, "netns", "exec", filepath.Base(l.NetNS(index))}, argv...)...)
}

// done waits for a program's end and returns what it printed.
func (c *command) done() string {
	c.t.Helper()
	if code := c.wait(); code != 0 {
		c.t.Fatalf("%s: exit status %d: %s", c.line, code, c.err.String())
	}
	return c.out.String()
}

func TestCommandsBelowIPNetnsExecSeeAndAreSeen(t *testing.T) {
	anyKernel(t)
	bin := program(t)
	l := newLab(t, lab.Config{Direct: true})
	if out := inExec(t, l, 0, "stat", "-fc", "%T", "/sys/fs/bpf").done(); strings.TrimSpace(out) == "bpf_fs" {
		t.Fatal("/sys/fs/bpf is there below ip netns exec: this would prove nothing")
	}
	outside := &host{lab: l, index: 1}
	if err := outside.open(t, transport.Config{}); err != nil {
		t.Fatal(err)
	}
	outside.dir = pins(t, l, 1)
	dir := t.TempDir()
	recv := inExec(t, l, 0, bin, "recv", "-d", "p0", dir)
	recv.says("receiving into")

	inside, ok := findDevice(t, l, 0)
	if !ok || !inside.Alive || !strings.HasPrefix(inside.Dir, "/proc/") {
		t.Fatalf("the device below ip netns exec is found as %+v (%v), want it alive, by way of /proc", inside, ok)
	}
	there := start(t, l, 1, nil, bin, "status").done()
	here := inExec(t, l, 1, bin, "status").done()
	for _, name := range []string{inside.Name, filepath.Base(outside.dir)} {
		for where, text := range map[string]string{"outside": there, "inside": here} {
			if !strings.Contains(text, "device "+name+": pid") {
				t.Errorf("status %s does not show device %s:\n%s", where, name, text)
			}
		}
	}
	if err := outside.dev.Close(); err != nil {
		t.Fatal(err)
	}

	want := make([]byte, pick(3<<20, 200<<10))
	noise(want, 1)
	from := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(from, want, 0o600); err != nil {
		t.Fatal(err)
	}
	inExec(t, l, 1, bin, "cp", "-d", "p0", from, l.Addr(0, 0).String()+":").done()
	got, err := os.ReadFile(filepath.Join(dir, "file"))
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("what arrived differs (%v)", err)
	}
	if left, ok := findDevice(t, l, 1); ok {
		t.Errorf("%+v is left", left)
	}
}
