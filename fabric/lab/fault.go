// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"math"
)

// ErrDirect reports that a direct lab was asked for what only a switch can do.
var ErrDirect = errors.New("a direct lab has no switch: no faults, no planes to pull")

// FaultConfig is what the switch does to packets at random, and by script. The
// zero value is a healthy network. Random faults hit IP packets in both directions;
// a probability of 1 is certainty.
type FaultConfig struct {
	Planes    []int   // nil: all
	Loss      float64 // share of packets
	Burst     float64 // mean packets lost in a row; up to 1: losses are independent
	Duplicate float64
	Corrupt   float64 // one bit or one byte, checksums left as they are
	Reorder   float64 // sent through a detour, on which later packets overtake
	Script    string  // see ParseScript
	Seed      uint64  // 0: the lab's
}

func (c FaultConfig) validate() error {
	for _, p := range []struct {
		item  string
		found float64
	}{{"loss", c.Loss}, {"duplicate", c.Duplicate}, {"corrupt", c.Corrupt}, {"reorder", c.Reorder}} {
		if !(p.found >= 0 && p.found <= 1) {
			return fmt.Errorf("%s is %v, want a probability from 0 to 1", p.item, p.found)
		}
	}
	if !(c.Burst >= 0 && c.Burst <= 1e6) {
		return fmt.Errorf("burst is %v packets, want 0 to 1000000", c.Burst)
	}
	return nil
}

// threshold turns a probability into what 32 random bits are compared with.
func threshold(probability float64) uint64 {
	return uint64(math.Round(min(max(probability, 0), 1) * (1 << 32)))
}

// lossThresholds gives the chances of a loss after a packet that arrived and after
// one that did not, so that the share lost is loss and a run of losses has the mean
// length burst (Gilbert's model).
func lossThresholds(loss, burst float64) (first, next uint64) {
	if burst <= 1 || loss == 0 || loss == 1 {
		return threshold(loss), threshold(loss)
	}
	return threshold(loss / (burst * (1 - loss))), threshold(1 - 1/burst)
}

// Fault replaces the random faults of some planes, starting their draws anew, and
// the whole script. Planes that are down stay down.
func (l *Lab) Fault(cfg FaultConfig) error {
	if err := l.SetRandom(cfg); err != nil {
		return err
	}
	return l.Script(cfg.Planes, cfg.Script)
}

// SetRandom is Fault without the script, which it leaves alone.
func (l *Lab) SetRandom(cfg FaultConfig) error {
	planes, err := l.faultPlanes(cfg.Planes)
	if err != nil {
		return err
	}
	if err := cfg.validate(); err != nil {
		return fmt.Errorf("lab %s: %w", l.cfg.Name, err)
	}
	seed := cfg.Seed
	if seed == 0 {
		seed = l.cfg.Seed
	}
	for _, plane := range planes {
		for host := range l.cfg.Hosts {
			if err := l.sw.Random.Put(uint32(plane*l.cfg.Hosts+host), &labLabRandom{}); err != nil {
				return fmt.Errorf("lab %s: plane %d: %w", l.cfg.Name, plane, err)
			}
		}
		err := l.updatePlane(plane, func(entry *labLabPlane) {
			entry.Seed = seed
			entry.Loss, entry.LossNext = lossThresholds(cfg.Loss, cfg.Burst)
			entry.Duplicate = threshold(cfg.Duplicate)
			entry.Corrupt = threshold(cfg.Corrupt)
			entry.Reorder = threshold(cfg.Reorder)
			entry.LossPpb = uint32(math.Round(cfg.Loss * 1e9))
			entry.BurstMilli = uint32(math.Round(cfg.Burst * 1e3))
			entry.Flags &^= labLabPlaneFlagLAB_P_FAULT
			if entry.Loss|entry.LossNext|entry.Duplicate|entry.Corrupt|entry.Reorder != 0 {
				entry.Flags |= labLabPlaneFlagLAB_P_FAULT
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// Script replaces the lab's rules by a script for some planes, nil being all. The
// n-th packet of a rule is the n-th on any of these planes. An empty script leaves none.
func (l *Lab) Script(planes []int, script string) error {
	planes, err := l.faultPlanes(planes)
	if err != nil {
		return err
	}
	rules, err := ParseScript(script)
	if err != nil {
		return fmt.Errorf("lab %s: %w", l.cfg.Name, err)
	}
	var mask uint32
	for _, plane := range planes {
		mask |= 1 << plane
	}
	// Planes look at the rules only while their flag is set: none sees half a script.
	if err := l.setRulesFlag(0); err != nil {
		return err
	}
	for i := range MaxRules {
		var entry labLabRule
		if i < len(rules) {
			entry = labLabRule{
				Match: labLabClass(rules[i].Match), Action: labLabAction(rules[i].Action),
				Planes: mask, From: rules[i].From, To: rules[i].To,
			}
		}
		if err := l.sw.Rules.Put(uint32(i), &entry); err != nil {
			return fmt.Errorf("lab %s: rule %d: %w", l.cfg.Name, i, err)
		}
	}
	if len(rules) == 0 {
		return nil
	}
	return l.setRulesFlag(mask)
}

func (l *Lab) setRulesFlag(mask uint32) error {
	for plane := range l.cfg.Planes {
		err := l.updatePlane(plane, func(entry *labLabPlane) {
			entry.Flags &^= labLabPlaneFlagLAB_P_RULES
			if mask>>plane&1 != 0 {
				entry.Flags |= labLabPlaneFlagLAB_P_RULES
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// PlaneDown drops everything on a plane from now on.
func (l *Lab) PlaneDown(plane int) error { return l.setDown(plane, true) }

// PlaneUp ends PlaneDown.
func (l *Lab) PlaneUp(plane int) error { return l.setDown(plane, false) }

func (l *Lab) setDown(plane int, down bool) error {
	planes, err := l.faultPlanes([]int{plane})
	if err != nil {
		return err
	}
	return l.updatePlane(planes[0], func(entry *labLabPlane) {
		entry.Flags &^= labLabPlaneFlagLAB_P_DOWN
		if down {
			entry.Flags |= labLabPlaneFlagLAB_P_DOWN
		}
	})
}

func (l *Lab) updatePlane(plane int, change func(*labLabPlane)) error {
	l.planeMu.Lock()
	defer l.planeMu.Unlock()
	var entry labLabPlane
	if err := l.sw.Planes.Lookup(uint32(plane), &entry); err != nil {
		return fmt.Errorf("lab %s: plane %d: %w", l.cfg.Name, plane, err)
	}
	change(&entry)
	if err := l.sw.Planes.Put(uint32(plane), &entry); err != nil {
		return fmt.Errorf("lab %s: plane %d: %w", l.cfg.Name, plane, err)
	}
	return nil
}

// faultPlanes checks planes and stands in for nil with all of them.
func (l *Lab) faultPlanes(planes []int) ([]int, error) {
	if l.sw == nil {
		return nil, fmt.Errorf("lab %s: %w", l.cfg.Name, ErrDirect)
	}
	if planes == nil {
		for plane := range l.cfg.Planes {
			planes = append(planes, plane)
		}
	}
	for _, plane := range planes {
		if plane < 0 || plane >= l.cfg.Planes {
			return nil, fmt.Errorf("lab %s: plane %d, want 0 to %d", l.cfg.Name, plane, l.cfg.Planes-1)
		}
	}
	return planes, nil
}
