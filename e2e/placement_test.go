// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/metaroce/metaroce/fabric/lab"
	"github.com/metaroce/metaroce/transport"
)

// cpusOf is the list of CPUs on which the kernel lets a thread of this process run.
func cpusOf(t *testing.T, tid int) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/status", tid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(b), "\nCpus_allowed_list:")
	line, _, _ := strings.Cut(rest, "\n")
	return strings.TrimSpace(line)
}

func TestPumpsArePinnedApartWhereInterfacesHaveSeveralQueues(t *testing.T) {
	anyKernel(t)
	if runtime.NumCPU() < 2 {
		t.Skip("needs 2 CPUs")
	}
	cpu := 0
	anywhere := cpusOf(t, os.Getpid())
	for _, c := range []struct {
		name   string
		queues int
		want   *int
		check  func(cpus []string) bool
		text   string // of what status says
	}{
		{"one queue", 1, nil, func(cpus []string) bool { return cpus[0] == anywhere && cpus[1] == anywhere }, "on any of CPUs " + anywhere},
		{"two queues", 2, nil, func(cpus []string) bool {
			return cpus[0] != cpus[1] && !strings.ContainsAny(cpus[0]+cpus[1], "-,")
		}, "on CPU "},
		{"by hand", 1, &cpu, func(cpus []string) bool { return cpus[0] == "0" && cpus[1] == "0" }, "on CPU 0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newLab(t, lab.Config{Direct: true, Planes: 2, Queues: c.queues})
			h := openPair(t, l, transport.Config{PumpCPU: c.want})
			var cpus []string
			for _, tid := range pumps(t) {
				cpus = append(cpus, cpusOf(t, tid))
			}
			if len(cpus) != 2 || !c.check(cpus) {
				t.Errorf("pumps may run on CPUs %q (this process: %s)", cpus, anywhere)
			}
			for i := range h {
				d, _ := findDevice(t, l, i)
				if !slices.Contains(cpus, d.Owner.PumpCPUs) || (d.Owner.PumpCPU != nil) != strings.HasPrefix(c.text, "on CPU") {
					t.Errorf("host %d: recorded CPUs %q, pinned %v; pumps have %q", i, d.Owner.PumpCPUs, d.Owner.PumpCPU != nil, cpus)
				}
			}
			exchange(t, bothWays(t, h, connect(t, h[0], h[1], hardlyAny), 1, mixed(1, 200<<10))...)
		})
	}
}

func TestPumpOnACPUThatIsNotAllowedIsRefused(t *testing.T) {
	l := newLab(t, lab.Config{Direct: true})
	cpu := 1000
	h := &host{lab: l}
	err := h.open(t, transport.Config{PumpCPU: &cpu})
	if err == nil || !strings.Contains(err.Error(), "CPU 1000") || !strings.Contains(err.Error(), cpusOf(t, os.Getpid())) {
		t.Errorf("error is %v, want one that names CPU 1000 and those that are allowed", err)
	}
	if d, ok := findDevice(t, l, 0); ok {
		t.Errorf("%+v is left", d)
	}
}
