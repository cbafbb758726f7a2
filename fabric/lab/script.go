// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"strconv"
	"strings"
)

// Action is what a rule does to a packet.
type Action uint32

// Actions.
const (
	Drop      = Action(labLabActionLAB_A_DROP)
	Corrupt   = Action(labLabActionLAB_A_CORRUPT)
	Duplicate = Action(labLabActionLAB_A_DUPLICATE)
	Reorder   = Action(labLabActionLAB_A_REORDER)
)

// Class is what a packet of ours is: one kind and, for data, any qualifiers.
type Class uint32

// Kinds and, from Last on, qualifiers of Data. A NAK is an ACK with a syndrome, so
// that rules for ACKs match it too.
const (
	Data  = Class(labLabClassLAB_C_DATA)
	Ack   = Class(labLabClassLAB_C_ACK)
	Probe = Class(labLabClassLAB_C_PROBE)
	Nak   = Class(labLabClassLAB_C_NAK)
	Last  = Class(labLabClassLAB_C_LAST)
	Retx  = Class(labLabClassLAB_C_RETX)
	Imm   = Class(labLabClassLAB_C_IMM)
)

// MaxRules is the most rules that a lab holds at once.
const MaxRules = 32

type name[T any] struct {
	name  string
	value T
}

var (
	actionNames    = []name[Action]{{"drop", Drop}, {"corrupt", Corrupt}, {"duplicate", Duplicate}, {"reorder", Reorder}}
	kindNames      = []name[Class]{{"data", Data}, {"ack", Ack}, {"probe", Probe}, {"nak", Nak}}
	qualifierNames = []name[Class]{{"last", Last}, {"retx", Retx}, {"imm", Imm}}
)

func lookUp[T any](names []name[T], word string) (value T, ok bool) {
	for _, n := range names {
		if n.name == word {
			return n.value, true
		}
	}
	return value, false
}

func listNames[T any](names []name[T]) string {
	words := make([]string, len(names))
	for i, n := range names {
		words[i] = n.name
	}
	return strings.Join(words, ", ")
}

// Rule hits the From-th to To-th packet, counted from 1 since the rule was
// installed, of those that are all that Match asks for.
type Rule struct {
	Action   Action
	Match    Class
	From, To uint64
}

// String writes the rule so that ParseScript reads the same one.
func (r Rule) String() string {
	var words []string
	for _, n := range actionNames {
		if r.Action == n.value {
			words = append(words, n.name)
		}
	}
	for _, names := range [][]name[Class]{kindNames, qualifierNames} {
		for _, n := range names {
			if r.Match&n.value != 0 {
				words = append(words, n.name)
			}
		}
	}
	ordinals := strconv.FormatUint(r.From, 10)
	if r.To != r.From {
		ordinals += "-" + strconv.FormatUint(r.To, 10)
	}
	return strings.Join(append(words, ordinals), " ")
}

// ParseScript reads rules separated by semicolons:
//
//	rule = action kind {qualifier} [first ["-" last]]
//
// action is drop, corrupt, duplicate or reorder; kind is data, ack, probe or nak;
// qualifiers, for data only, are last (of its message), retx and imm. Without a
// number the rule hits the first such packet. "drop ack 1; drop data last" is a script.
func ParseScript(script string) ([]Rule, error) {
	var rules []Rule
	for text := range strings.SplitSeq(script, ";") {
		words := strings.Fields(strings.ToLower(text))
		if len(words) == 0 {
			continue
		}
		rule, err := parseRule(words)
		if err != nil {
			return nil, fmt.Errorf("script rule %q: %w", strings.TrimSpace(text), err)
		}
		if len(rules) == MaxRules {
			return nil, fmt.Errorf("script has more than %d rules", MaxRules)
		}
		rules = append(rules, rule)
	}
	return rules, nil
}

func parseRule(words []string) (Rule, error) {
	rule := Rule{From: 1, To: 1}
	action, ok := lookUp(actionNames, words[0])
	if !ok {
		return Rule{}, fmt.Errorf("action %q: want one of %s", words[0], listNames(actionNames))
	}
	if len(words) < 2 {
		return Rule{}, fmt.Errorf("no kind of packet: want one of %s", listNames(kindNames))
	}
	kind, ok := lookUp(kindNames, words[1])
	if !ok {
		return Rule{}, fmt.Errorf("kind %q: want one of %s", words[1], listNames(kindNames))
	}
	rule.Action, rule.Match = action, kind
	for i, word := range words[2:] {
		if qualifier, ok := lookUp(qualifierNames, word); ok {
			if kind != Data {
				return Rule{}, fmt.Errorf("%q goes with data only, not with %s", word, words[1])
			}
			rule.Match |= qualifier
			continue
		}
		from, to, err := parseOrdinals(word)
		if err != nil {
			return Rule{}, err
		}
		if i != len(words)-3 {
			return Rule{}, fmt.Errorf("%q after the number %s: want nothing", words[i+3], word)
		}
		rule.From, rule.To = from, to
	}
	return rule, nil
}

func parseOrdinals(word string) (from, to uint64, err error) {
	first, last, isRange := strings.Cut(word, "-")
	from, err = strconv.ParseUint(first, 10, 32)
	to = from
	if err == nil && isRange {
		to, err = strconv.ParseUint(last, 10, 32)
	}
	if err != nil || from == 0 || to < from {
		return 0, 0, fmt.Errorf("%q: want one of %s, a number from 1, or a range such as 2-5", word, listNames(qualifierNames))
	}
	return from, to, nil
}
