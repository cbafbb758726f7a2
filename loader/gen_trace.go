// SPDX-License-Identifier: Apache-2.0

package loader

//go:generate ../scripts/bpf2go.sh mrtrace ../bpf/mr_trace.bpf.c
