// SPDX-License-Identifier: Apache-2.0

package loader

// The object and its bindings are committed, so that building needs no clang. Regenerate them
// whenever bpf/ changes: make generate.
//
// Structs that are a map's value come out by themselves; a type that shares its name with a map
// cannot be asked for (mr_btf.h gives those another name).

//go:generate ../scripts/bpf2go.sh -type mr_conn_state -type mr_path_state -type mr_access -type mr_wr_op -type mr_fault -type mr_ctl_op -type mr_ctl_result -type mr_desc -type mr_tx_path -type mr_rx_path -type mr_rx_stream -type mr_reqs -type mr_wqe -type mr_scqe -type mr_rcqe -type mr_qpage -type mr_event_record -type mr_ctl_frame -type mr_counters metaroce ../bpf/metaroce.bpf.c
