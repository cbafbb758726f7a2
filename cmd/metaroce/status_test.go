// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/metaroce/metaroce/loader"
	"github.com/metaroce/metaroce/telemetry"
)

const statusIf, statusIf2 = "mrstat0", "mrstat1"

// statusDevice loads a device of two interfaces in a network namespace of the test's own.
func statusDevice(t *testing.T) *loader.Objects {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes a network namespace and loads BPF programs")
	}
	runtime.LockOSThread()
	home, err := netns.Get()
	if err != nil {
		t.Fatal(err)
	}
	ns, err := netns.New()
	if err != nil {
		t.Skipf("cannot make a network namespace: %v", err)
	}
	t.Cleanup(func() {
		_ = ns.Close()
		if err := netns.Set(home); err != nil {
			t.Error(err) // the thread stays locked and ends with the test
			return
		}
		_ = home.Close()
		runtime.UnlockOSThread()
	})
	for _, name := range []string{statusIf, statusIf2} {
		a := netlink.NewLinkAttrs()
		a.Name = name
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: a, PeerName: name + "p"}); err != nil {
			t.Fatal(err)
		}
	}
	o, err := loader.Load(t.Context(), loader.Options{Interfaces: []string{statusIf, statusIf2}, MaxConns: 4, PathPool: 16})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := o.Close(); err != nil {
			t.Error(err)
		}
	})
	return o
}

func metaroce(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = run(t.Context(), args, &out, &errs)
	return code, out.String(), errs.String()
}

func TestStatusShowsALoadedDeviceAsTextAndJSON(t *testing.T) {
	o := statusDevice(t)
	c := loader.Conn{Qpn: 0x1a, PeerQpn: 0x2b, Npaths: 1, Payload: 1024}
	if err := o.Conn.Put(uint32(1), &c); err != nil {
		t.Fatal(err)
	}
	if err := o.Path.Put(uint32(0), &loader.Path{Ifindex: uint32(o.Interfaces[1].Index)}); err != nil {
		t.Fatal(err)
	}
	if ret, err := o.RunControl(loader.Ctl{Op: loader.CtlState, Slot: 1, Qpn: 0x1a, Value: loader.ConnOpen}); err != nil || ret != loader.CtlOK {
		t.Fatalf("open the connection: %d, %v", ret, err)
	}

	for _, name := range []string{o.PinDir, o.PinDir + "/", o.Device().Name, statusIf, statusIf2} {
		code, out, errs := metaroce(t, "status", "--device", name)
		if code != 0 {
			t.Fatalf("status --device %s: %d, %s", name, code, errs)
		}
		for _, w := range []string{o.PinDir, "pid " + strconv.Itoa(os.Getpid()), "port 4791", "native", statusIf2, "0x1a", "0x2b", "open"} {
			if !strings.Contains(out, w) {
				t.Errorf("status --device %s does not say %q:\n%s", name, w, out)
			}
		}
	}

	code, out, errs := metaroce(t, "status", "--json", "--device", o.PinDir)
	if code != 0 {
		t.Fatalf("status --json: %d, %s", code, errs)
	}
	var got struct{ Devices []telemetry.Status }
	if err := json.Unmarshal([]byte(out), &got); err != nil {
		t.Fatalf("%v in\n%s", err, out)
	}
	if len(got.Devices) != 1 || len(got.Devices[0].Connections) != 1 {
		t.Fatalf("JSON has %+v, want one device with one connection", got)
	}
	conn := got.Devices[0].Connections[0]
	if conn.QPN != 0x1a || conn.State != "open" || len(conn.Paths) != 1 || conn.Paths[0].Plane != 1 || conn.Paths[0].Interface != statusIf2 {
		t.Errorf("connection is %+v, want QPN 0x1a, open, with a path on plane 1", conn)
	}
	if _, ok := got.Devices[0].Counters.Get("sent_pkts"); !ok {
		t.Error("JSON has no counter sent_pkts")
	}
}

func TestStatusWithoutDevicesOrOfAnUnknownOneSaysWhereItLooked(t *testing.T) {
	devs, err := loader.Find()
	if err != nil {
		t.Skipf("cannot look for devices: %v", err)
	}
	if len(devs) == 0 {
		code, _, errs := metaroce(t, "status")
		if code == 0 || strings.Count(errs, "\n") != 1 || !strings.Contains(errs, "/sys/fs/bpf/metaroce") {
			t.Errorf("exit status %d with %q, want an error of one line that names /sys/fs/bpf/metaroce", code, errs)
		}
	}
	o := statusDevice(t)
	code, _, errs := metaroce(t, "status", "--device", "nosuch0")
	if code == 0 || strings.Count(errs, "\n") != 1 || !strings.Contains(errs, "nosuch0") || !strings.Contains(errs, o.Device().Name) {
		t.Errorf("exit status %d with %q, want an error of one line that names nosuch0 and %s", code, errs, o.Device().Name)
	}
}

func TestStatusRefusesArgumentsAndUnknownFlags(t *testing.T) {
	for _, args := range [][]string{{"status", "x"}, {"status", "--nosuch"}} {
		code, _, errs := metaroce(t, args...)
		if code == 0 || strings.Count(errs, "\n") != 1 || !strings.Contains(errs, args[1]) {
			t.Errorf("%v: exit status %d with %q, want an error of one line that names %s", args, code, errs, args[1])
		}
	}
}
