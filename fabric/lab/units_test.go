// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"math"
	"testing"
)

func TestParseSize_readsDecimalAndBinaryUnits(t *testing.T) {
	for text, want := range map[string]uint64{
		"0": 0, "4096": 4096, "1B": 1, "64KiB": 65536, "64kib": 65536, "512kB": 512000,
		"1 MiB": 1 << 20, "2MB": 2e6, "1GiB": 1 << 30, "3GB": 3e9,
	} {
		if got, err := ParseSize(text); err != nil || got != want {
			t.Errorf("ParseSize(%q) = %d, %v, want %d", text, got, err, want)
		}
	}
}

func TestParseSize_refusesWhatIsNoWholeNumberOfBytes(t *testing.T) {
	for _, text := range []string{"", "KiB", "-1", "1.5MiB", "64Kibit", "0x10", "9999999999999999999", "9223372036854775807GiB"} {
		if got, err := ParseSize(text); err == nil {
			t.Errorf("ParseSize(%q) = %d, want an error", text, got)
		}
	}
}

func TestParseRate_readsBitsASecond(t *testing.T) {
	for text, want := range map[string]uint64{
		"0": 0, "unlimited": 0, "5gbit": 5e9, "2.5Gbit": 2.5e9, "100mbit/s": 1e8, "10kbit": 1e4, "20000bit": 2e4, "1tbit": 1e12,
	} {
		if got, err := ParseRate(text); err != nil || got != want {
			t.Errorf("ParseRate(%q) = %d, %v, want %d", text, got, err, want)
		}
	}
}

func TestParseRate_refusesBytesAndWhatIsOutOfBounds(t *testing.T) {
	for _, text := range []string{"", "5", "5gbps", "5GB", "-5gbit", "1e3gbit", "nangbit", "infbit", "1bit", "11tbit", "1.2.3gbit"} {
		if got, err := ParseRate(text); err == nil {
			t.Errorf("ParseRate(%q) = %d, want an error", text, got)
		}
	}
}

func TestParseProbability_wantsAPercentage(t *testing.T) {
	for text, want := range map[string]float64{"0": 0, "0%": 0, "1%": 0.01, "0.1%": 0.001, "100%": 1, " 10 %": 0.1} {
		if got, err := ParseProbability(text); err != nil || math.Abs(got-want) > 1e-15 {
			t.Errorf("ParseProbability(%q) = %v, %v, want %v", text, got, err, want)
		}
	}
	for _, text := range []string{"", "%", "1", "0.01", "101%", "-1%", "nan%", "1e1%"} {
		if got, err := ParseProbability(text); err == nil {
			t.Errorf("ParseProbability(%q) = %v, want an error", text, got)
		}
	}
}

func FuzzParseSize(f *testing.F) {
	for _, seed := range []string{"64KiB", "1 MB", "0", "9223372036854775807", "1.5MiB"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		size, err := ParseSize(text)
		if err != nil {
			return
		}
		if again, err := ParseSize(FormatSize(size)); err != nil || again != size {
			t.Fatalf("ParseSize(%q) = %d, printed %q, read back %d, %v", text, size, FormatSize(size), again, err)
		}
	})
}

func FuzzParseRate(f *testing.F) {
	for _, seed := range []string{"5gbit", "2.5gbit", "0", "unlimited", "10kbit", "12345678bit/s"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		rate, err := ParseRate(text)
		if err != nil {
			return
		}
		if again, err := ParseRate(FormatRate(rate)); err != nil || again != rate {
			t.Fatalf("ParseRate(%q) = %d, printed %q, read back %d, %v", text, rate, FormatRate(rate), again, err)
		}
	})
}
