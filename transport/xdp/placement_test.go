// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"slices"
	"strings"
	"testing"

	"github.com/metaroce/metaroce/loader"
)

func TestPumpRunsWhereItsInterfacesSendFrom(t *testing.T) {
	nic := func(driver string, channels int, numa ...int) loader.Interface {
		return loader.Interface{Name: "eth1", Driver: driver, Channels: channels, NUMACPUs: numa}
	}
	planes := func(p ...loader.Interface) []loader.Interface { return p }
	cpu := func(n int) *int { return &n }
	all := []int{0, 1, 2, 3, 4, 5, 6, 7}
	for _, c := range []struct {
		name    string
		planes  []loader.Interface
		allowed []int
		pumps   map[int]int
		want    *int
		cpus    []int
		pinned  bool
		err     []string
	}{
		{name: "one queue: anywhere", planes: planes(nic("veth", 1)), allowed: all, cpus: all},
		{name: "the driver tells nothing: anywhere", planes: planes(nic("some_nic", 0)), allowed: all, cpus: all},
		{name: "one queue and few CPUs: those", planes: planes(nic("veth", 1)), allowed: []int{2, 5}, cpus: []int{2, 5}},
		{name: "several queues: one CPU, not the one that has most interrupts", planes: planes(nic("veth", 8)), allowed: all, cpus: []int{7}, pinned: true},
		{name: "channels bound a driver that refuses the rest", planes: planes(nic("mlx5_core", 4)), allowed: all, cpus: []int{3}, pinned: true},
		{name: "channels do not bound one that takes all", planes: planes(nic("virtio_net", 2)), allowed: all, cpus: []int{7}, pinned: true},
		{name: "one channel of a driver that refuses the rest", planes: planes(nic("i40e", 1)), allowed: all, cpus: []int{0}, pinned: true},
		{name: "the plane with least channels bounds all", planes: planes(nic("i40e", 6), nic("mlx5_core", 2), nic("veth", 8)), allowed: all, cpus: []int{1}, pinned: true},
		{name: "one plane with several queues pins", planes: planes(nic("veth", 1), nic("veth", 2)), allowed: all, cpus: []int{7}, pinned: true},
		{name: "fewest pumps first", planes: planes(nic("mlx5_core", 4)), allowed: all, pumps: map[int]int{3: 1, 2: 2, 1: 1}, cpus: []int{0}, pinned: true},
		{name: "then the last of equals", planes: planes(nic("mlx5_core", 4)), allowed: all, pumps: map[int]int{3: 1, 2: 1, 1: 1, 0: 1}, cpus: []int{3}, pinned: true},
		{name: "the NIC's node", planes: planes(nic("mlx5_core", 8, 0, 1, 2, 3)), allowed: all, pumps: map[int]int{3: 1}, cpus: []int{2}, pinned: true},
		{name: "none of the NIC's node allowed", planes: planes(nic("mlx5_core", 8, 0, 1)), allowed: []int{4, 5}, cpus: []int{5}, pinned: true},
		{name: "affinity and channels", planes: planes(nic("mlx5_core", 4)), allowed: []int{1, 2, 6}, cpus: []int{2}, pinned: true},
		{name: "chosen by hand", planes: planes(nic("mlx5_core", 4)), allowed: all, pumps: map[int]int{1: 3}, want: cpu(1), cpus: []int{1}, pinned: true},
		{name: "chosen by hand with one queue", planes: planes(nic("veth", 1)), allowed: all, want: cpu(5), cpus: []int{5}, pinned: true},
		{
			name: "affinity and channels have nothing in common", planes: planes(nic("mlx5_core", 4)), allowed: []int{4, 5, 6, 9},
			err: []string{"eth1", "mlx5_core", "4 channels", "CPUs 4-6,9", "ethtool -L eth1 combined", "taskset"},
		},
		{
			name: "chosen by hand above the channels", planes: planes(nic("mlx5_core", 4)), allowed: all, want: cpu(4),
			err: []string{"CPU 4", "0-3", "mlx5_core", "4 channels"},
		},
		{name: "chosen by hand beyond the affinity", planes: planes(nic("veth", 1)), allowed: []int{0, 1}, want: cpu(2), err: []string{"CPU 2", "0-1"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := slices.Clone(c.allowed)
			got, err := placePump(c.planes, c.allowed, c.pumps, c.want)
			if !slices.Equal(before, c.allowed) {
				t.Errorf("the list of allowed CPUs was changed to %v", c.allowed)
			}
			if c.err != nil {
				if err == nil {
					t.Fatalf("placed on %v, want an error with %q", got.CPUs, c.err)
				}
				for _, w := range c.err {
					if !strings.Contains(err.Error(), w) {
						t.Errorf("error %q does not say %q", err, w)
					}
				}
				return
			}
			if err != nil || !slices.Equal(got.CPUs, c.cpus) || got.Pinned != c.pinned {
				t.Errorf("placed on %v, pinned %v (%v), want %v, %v", got.CPUs, got.Pinned, err, c.cpus, c.pinned)
			}
		})
	}
}

func TestPumpStaysWhereItIsWhenAnInterfaceReturnsThatItCanSendBy(t *testing.T) {
	nic := func(driver string, channels int) []loader.Interface {
		return []loader.Interface{{Name: "eth1", Driver: driver, Channels: channels}}
	}
	two := 2
	all := []int{0, 1, 2, 3}
	for _, c := range []struct {
		name   string
		planes []loader.Interface
		want   *int
		now    []int
		cpus   []int
		err    bool
	}{
		{"as before", nic("mlx5_core", 4), nil, []int{1}, []int{1}, false},
		{"fewer channels, and it is above them", nic("mlx5_core", 2), nil, []int{3}, []int{0}, false},
		{"one queue now", nic("veth", 1), nil, []int{1}, []int{1}, false},
		{"several queues now", nic("veth", 2), nil, nil, []int{3}, false},
		{"several queues now, and it ran on some CPUs", nic("mlx5_core", 2), nil, []int{1, 2}, []int{0}, false},
		{"chosen by hand", nic("mlx5_core", 4), &two, []int{2}, []int{2}, false},
		{"chosen by hand, and now above the channels", nic("mlx5_core", 2), &two, []int{2}, nil, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, err := stayOrPlace(c.planes, all, map[int]int{1: 1}, c.want, c.now)
			if (err != nil) != c.err || !slices.Equal(p.CPUs, c.cpus) {
				t.Errorf("runs on %v (%v), want %v", p.CPUs, err, c.cpus)
			}
		})
	}
}
