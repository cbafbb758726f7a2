/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The maps: the device's registers. max_entries here are defaults; the loader sizes them. */
#ifndef MR_MAPS_H
#define MR_MAPS_H

/* Load-time configuration. */
volatile const __u32 mr_port = MR_UDP_PORT;
volatile const __u32 mr_max_conns = 256; /* a power of two, = max_entries of mr_conn */
volatile const __u32 mr_quantum = 16;    /* packets before another ready connection has its turn */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 256);
	__type(key, __u32);
	__type(value, struct mr_conn);
} mr_conn SEC(".maps");

/* Mapped: control rewrites a template while packets are under way, and nothing else of the entry. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 2048);
	__type(key, __u32);
	__type(value, struct mr_path);
} mr_path SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 256);
	__type(key, __u32);
	__type(value, struct mr_reqs);
} mr_req SEC(".maps");

/* Inner maps by value_size: a __type would only be forward-declared in BTF. */
struct mr_qp_inner {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE | BPF_F_INNER_MAP);
	__uint(max_entries, 1);
	__uint(key_size, 4);
	__uint(value_size, sizeof(struct mr_qpage));
};
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 256);
	__uint(key_size, 4);
	__array(values, struct mr_qp_inner);
} mr_qp SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 256);
	__type(key, __u32);
	__type(value, struct mr_region);
} mr_region SEC(".maps");

struct mr_mem_inner {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE | BPF_F_INNER_MAP);
	__uint(max_entries, 1);
	__uint(key_size, 4);
	__uint(value_size, MR_BLOCK);
};
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 256);
	__uint(key_size, 4);
	__array(values, struct mr_mem_inner);
} mr_mem SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct mr_pump);
} mr_pump SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct mr_counters);
} mr_counter SEC(".maps");

/* Zeros, the padding of full-size probes: frames come with what others left in their pages. */
struct mr_zero {
	__u8 b[4096];
};
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct mr_zero);
} mr_zero SEC(".maps");

/* Wakes the pump; what it carries does not matter. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} mr_wake SEC(".maps");

/* struct mr_event: wakes a connection's consumer. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 262144); /* two records a connection at most, with room to spare */
} mr_event SEC(".maps");

#endif
