// SPDX-License-Identifier: Apache-2.0

// Package telemetry turns a device's registers into what people and their tools read: counters
// under the names of their fields, and a status that encodes to JSON.
package telemetry

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"unicode"

	"github.com/metaroce/metaroce/loader"
)

// Counter is one of the device's counters, summed over its CPUs.
type Counter struct {
	Name  string // of the field in struct mr_counters
	Value uint64
}

// Counters is all of a device's counters, in the order of struct mr_counters. It encodes to a JSON
// object in that order.
type Counters []Counter

// counterNames are the fields' names in C, in order.
var counterNames = cNames(reflect.TypeFor[loader.Counters]())

// cNames gives each field its name in C. The generated structs have a blank field for the layout.
func cNames(typ reflect.Type) []string {
	var names []string
	for f := range typ.Fields() {
		if f.Name != "_" {
			names = append(names, cName(f.Name))
		}
	}
	return names
}

// cName undoes what makes a Go name of a C field: SentPkts was sent_pkts.
func cName(goName string) string {
	var b strings.Builder
	for i, r := range goName {
		if unicode.IsUpper(r) && i > 0 {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}

// NewCounters names the values of c.
func NewCounters(c loader.Counters) Counters {
	v := reflect.ValueOf(c)
	out := make(Counters, 0, len(counterNames))
	for f := range v.Type().Fields() {
		if f.Name != "_" {
			out = append(out, Counter{counterNames[len(out)], v.FieldByIndex(f.Index).Uint()})
		}
	}
	return out
}

// Get is the value of the counter of that name, and whether there is one.
func (c Counters) Get(name string) (uint64, bool) {
	for _, k := range c {
		if k.Name == name {
			return k.Value, true
		}
	}
	return 0, false
}

// MarshalJSON encodes to an object with a member for every counter.
func (c Counters) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, k := range c {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "%q:%d", k.Name, k.Value)
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}

// UnmarshalJSON reads what MarshalJSON wrote, in its order.
func (c *Counters) UnmarshalJSON(b []byte) error {
	dec := json.NewDecoder(bytes.NewReader(b))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return fmt.Errorf("counters: found %v (%v), want an object", t, err)
	}
	*c = nil
	for dec.More() {
		t, err := dec.Token()
		if err != nil {
			return fmt.Errorf("counters: %w", err)
		}
		k := Counter{Name: fmt.Sprint(t)}
		if err := dec.Decode(&k.Value); err != nil {
			return fmt.Errorf("counter %s: %w", k.Name, err)
		}
		*c = append(*c, k)
	}
	return nil
}
