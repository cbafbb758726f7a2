// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseScript_readsRules(t *testing.T) {
	for script, want := range map[string][]Rule{
		"":                            nil,
		" ; ;":                        nil,
		"drop ack 1; drop data last":  {{Drop, Ack, 1, 1}, {Drop, Data | Last, 1, 1}},
		"drop data 5":                 {{Drop, Data, 5, 5}},
		"DROP Probe 2;":               {{Drop, Probe, 2, 2}},
		"drop nak":                    {{Drop, Nak, 1, 1}},
		"corrupt data retx 3-7":       {{Corrupt, Data | Retx, 3, 7}},
		"duplicate data last retx 2":  {{Duplicate, Data | Last | Retx, 2, 2}},
		"reorder data imm":            {{Reorder, Data | Imm, 1, 1}},
		"drop ack 4294967295":         {{Drop, Ack, 4294967295, 4294967295}},
		"\tdrop\tack\n2 ; drop ack 3": {{Drop, Ack, 2, 2}, {Drop, Ack, 3, 3}},
	} {
		got, err := ParseScript(script)
		if err != nil {
			t.Errorf("ParseScript(%q): %v", script, err)
		} else if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("ParseScript(%q) (-want +got):\n%s", script, diff)
		}
	}
}

func TestParseScript_namesWhatItRefuses(t *testing.T) {
	for script, want := range map[string]string{
		"lose ack 1":                            `action "lose"`,
		"drop":                                  "no kind",
		"drop everything":                       `kind "everything"`,
		"drop ack 0":                            `"0"`,
		"drop ack -1":                           `"-1"`,
		"drop ack 5-2":                          `"5-2"`,
		"drop ack 1-":                           `"1-"`,
		"drop ack 1 2":                          `"2" after the number 1`,
		"drop ack last":                         `"last" goes with data only`,
		"drop data 1 last":                      `after the number 1`,
		"drop data 4294967296":                  `"4294967296"`,
		"drop ack 1, drop nak":                  `"1,"`,
		"drop ack 1; drop foo":                  `rule "drop foo"`,
		strings.Repeat("drop ack;", MaxRules+1): "more than 32 rules",
	} {
		rules, err := ParseScript(script)
		if err == nil {
			t.Errorf("ParseScript(%q) = %v, want an error", script, rules)
		} else if !strings.Contains(err.Error(), want) {
			t.Errorf("ParseScript(%q): %v, want %q in it", script, err, want)
		}
	}
}

func FuzzParseScript(f *testing.F) {
	for _, seed := range []string{"drop ack 1; drop data last", "corrupt data retx 3-7", "drop", "drop data last last 1", ";;"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, script string) {
		rules, err := ParseScript(script)
		if err != nil {
			return
		}
		var printed []string
		for _, rule := range rules {
			if rule.From == 0 || rule.To < rule.From || rule.Match == 0 || rule.Action == 0 {
				t.Fatalf("ParseScript(%q) gave %+v, which can never hit", script, rule)
			}
			printed = append(printed, rule.String())
		}
		again, err := ParseScript(strings.Join(printed, "; "))
		if err != nil || !cmp.Equal(rules, again) {
			t.Fatalf("ParseScript(%q) = %v, printed and read back %v, %v", script, rules, again, err)
		}
	})
}
