// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// NoECN as Config.ECN makes queues that never mark.
const NoECN uint64 = math.MaxUint64

type unit struct {
	suffix string
	factor uint64
}

// Longer suffixes come before those that end them.
var sizeUnits = []unit{
	{"kib", 1 << 10},
	{"mib", 1 << 20},
	{"gib", 1 << 30},
	{"kb", 1e3},
	{"mb", 1e6},
	{"gb", 1e9},
	{"b", 1},
	{"", 1},
}

var rateUnits = []unit{{"kbit", 1e3}, {"mbit", 1e6}, {"gbit", 1e9}, {"tbit", 1e12}, {"bit", 1}}

// splitUnit cuts the unit off s. It reports false when none of units ends it.
func splitUnit(s string, units []unit) (number string, factor uint64, ok bool) {
	lower := strings.ToLower(strings.TrimSpace(s))
	for _, u := range units {
		if n, found := strings.CutSuffix(lower, u.suffix); found {
			return strings.TrimSpace(n), u.factor, true
		}
	}
	return "", 0, false
}

// ParseSize reads a number of bytes: "64KiB", "512kB" (1000), "1MiB", "4096".
func ParseSize(s string) (uint64, error) {
	number, factor, _ := splitUnit(s, sizeUnits)
	n, err := strconv.ParseUint(number, 10, 64)
	if err != nil || n > math.MaxInt64/factor {
		return 0, fmt.Errorf("size %q: want a whole number of bytes, kB, MB, GB, KiB, MiB or GiB, such as 64KiB", s)
	}
	return n * factor, nil
}

// ParseRate reads bits a second as tc writes them: "5gbit", "2.5gbit",
// "100mbit". "0" and "unlimited" are no limit, 0.
func ParseRate(s string) (uint64, error) {
	switch strings.ToLower(strings.TrimSpace(s)) {
	case "0", "unlimited":
		return 0, nil
	}
	number, factor, ok := splitUnit(strings.TrimSuffix(strings.ToLower(strings.TrimSpace(s)), "/s"), rateUnits)
	bits, valid := parseDecimal(number)
	if !ok || !valid || bits*float64(factor) < minRate || bits*float64(factor) > maxRate {
		return 0, fmt.Errorf("rate %q: want bits a second from 10kbit to 10tbit, such as 5gbit, or 0 for no limit", s)
	}
	return uint64(math.Round(bits * float64(factor))), nil
}

// Bounds of a rate, bit/s: outside, the virtual queues' arithmetic is not exact.
const (
	minRate = 1e4
	maxRate = 1e13
)

// ParseProbability reads a percentage: "1%", "0.1%". A bare number could mean
// either per cent or a fraction and is refused, except 0.
func ParseProbability(s string) (float64, error) {
	trimmed := strings.TrimSpace(s)
	if trimmed == "0" {
		return 0, nil
	}
	number, isPercent := strings.CutSuffix(trimmed, "%")
	percent, valid := parseDecimal(strings.TrimSpace(number))
	if !isPercent || !valid || percent > 100 {
		return 0, fmt.Errorf("probability %q: want a percentage from 0%% to 100%%, such as 0.1%%", s)
	}
	return percent / 100, nil
}

// parseDecimal reads digits with at most one point: no sign, exponent, NaN or hexadecimal.
func parseDecimal(s string) (float64, bool) {
	if s == "" || strings.Trim(s, "0123456789.") != "" {
		return 0, false
	}
	v, err := strconv.ParseFloat(s, 64)
	return v, err == nil
}

// FormatSize writes bytes so that ParseSize reads the same number.
func FormatSize(bytes uint64) string {
	for _, u := range []unit{{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}} {
		if bytes != 0 && bytes%u.factor == 0 {
			return strconv.FormatUint(bytes/u.factor, 10) + u.suffix
		}
	}
	return strconv.FormatUint(bytes, 10) + "B"
}

// FormatRate writes bits a second so that ParseRate reads the same number.
func FormatRate(bits uint64) string {
	if bits == 0 {
		return "unlimited"
	}
	for _, u := range []unit{{"tbit", 1e12}, {"gbit", 1e9}, {"mbit", 1e6}, {"kbit", 1e3}} {
		if bits >= u.factor && bits%(u.factor/1e3) == 0 {
			return strconv.FormatFloat(float64(bits)/float64(u.factor), 'f', -1, 64) + u.suffix
		}
	}
	return strconv.FormatUint(bits, 10) + "bit"
}
