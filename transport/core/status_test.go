// SPDX-License-Identifier: Apache-2.0

package core

import "testing"

func TestStatusOfSyndrome(t *testing.T) {
	for _, tc := range []struct {
		syndrome uint32
		want     Status
	}{
		{0, StatusSuccess},
		{0x61, StatusRemInvReq},
		{0x62, StatusRemAccess},
		{0x63, StatusRemOp},
		{0x7f, StatusRemOp}, // of a later version
	} {
		if got := StatusOfSyndrome(tc.syndrome); got != tc.want {
			t.Errorf("syndrome %#x is %v, want %v", tc.syndrome, got, tc.want)
		}
	}
}

func TestStatusOfFault(t *testing.T) {
	for _, tc := range []struct {
		fault uint32
		want  Status
	}{
		{0, StatusSuccess},
		{2, StatusLocQPOp},
		{4, StatusLocProt},
		{9, StatusFatal},
		{0x104, StatusFatal},
	} {
		if got := StatusOfFault(tc.fault); got != tc.want {
			t.Errorf("fault %#x is %v, want %v", tc.fault, got, tc.want)
		}
	}
}
