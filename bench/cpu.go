// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// tick is the unit of /proc/stat, USER_HZ, which is 100 on every architecture
// that Linux gives user space.
const tick = 10 * time.Millisecond

// busyTime is how long all CPUs together have been busy since boot: all of
// /proc/stat's first line but idle, iowait and what guests took, which is in user.
func busyTime() (time.Duration, error) {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, err
	}
	return parseBusy(string(b))
}

func parseBusy(stat string) (time.Duration, error) {
	line, _, _ := strings.Cut(stat, "\n")
	fields := strings.Fields(line)
	if len(fields) < 8 || fields[0] != "cpu" {
		return 0, fmt.Errorf("/proc/stat begins with %q, want cpu and at least 7 numbers", line)
	}
	var busy uint64
	// user nice system idle iowait irq softirq steal guest guest_nice
	for i, field := range fields[1:min(len(fields), 9)] {
		n, err := strconv.ParseUint(field, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("/proc/stat: %w", err)
		}
		if i != 3 && i != 4 {
			busy += n
		}
	}
	return time.Duration(busy) * tick, nil
}

// cpuOf runs f and says how much CPU time the whole machine spent on it: what it
// was busy less what it is when idle, which idleShare says in CPUs.
func cpuOf(idleShare float64, f func() error) (time.Duration, error) {
	before, err := busyTime()
	if err != nil {
		return 0, err
	}
	start := time.Now()
	err = f()
	elapsed := time.Since(start)
	after, busyErr := busyTime()
	if err := errors.Join(err, busyErr); err != nil {
		return 0, err
	}
	return max(after-before-time.Duration(idleShare*float64(elapsed)), tick), nil
}

// idleShare measures how many CPUs are busy while nothing is asked for.
func idleShare(d time.Duration) (float64, error) {
	before, err := busyTime()
	if err != nil {
		return 0, err
	}
	start := time.Now()
	time.Sleep(d)
	after, err := busyTime()
	return float64(after-before) / float64(time.Since(start)), err
}
