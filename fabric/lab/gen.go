// SPDX-License-Identifier: Apache-2.0

package lab

//go:generate ../../scripts/bpf2go.sh -type lab_class -type lab_action -type lab_plane_flag lab ../../bpf/lab_switch.bpf.c
