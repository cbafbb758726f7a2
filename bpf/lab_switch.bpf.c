// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The lab's switch: one XDP program on every port, forwarding by destination
 * MAC within a plane, with virtual queues and faults (docs/lab.md).
 */
#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "mr_wire.h"
#include "lab_types.h"
#include "lab_parse.h"
#include "lab_fault.h"

/* Set before loading; what a lab has not is then no code. */
const volatile __u32 lab_hosts = 2;
const volatile __u32 lab_spines = 1;
const volatile __u32 lab_detour_key = 2; /* of the detour in mr_lab_tx: one behind the ports */
const volatile __u32 lab_udp_port = MR_UDP_PORT;
const volatile __u64 lab_hash_seed;

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LAB_MAX_IFINDEX);
	__type(key, __u32);
	__type(value, struct lab_port);
} mr_lab_ports SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LAB_MAX_PLANES);
	__type(key, __u32);
	__type(value, struct lab_plane);
} mr_lab_planes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2); /* ports; sized at load */
	__type(key, __u32);
	__type(value, struct lab_random);
} mr_lab_random SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2); /* ports x spines; sized at load */
	__type(key, __u32);
	__type(value, struct lab_queue);
} mr_lab_queues SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LAB_MAX_RULES);
	__type(key, __u32);
	__type(value, struct lab_rule);
} mr_lab_rules SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 2); /* ports; sized at load */
	__type(key, __u32);
	__type(value, struct lab_count);
} mr_lab_counts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct lab_meta);
} mr_lab_meta SEC(".maps");

/* By port, and the detour behind them. */
struct {
	__uint(type, BPF_MAP_TYPE_DEVMAP);
	__uint(max_entries, 3); /* ports + 1; sized at load */
	__uint(key_size, 4);
	__uint(value_size, 4);
} mr_lab_tx SEC(".maps");

struct lab_devmap {
	__uint(type, BPF_MAP_TYPE_DEVMAP);
	__uint(max_entries, 2);
	__uint(key_size, 4);
	__uint(value_size, 4);
};

/* By port: the port and the detour, which a broadcast serves with a copy each. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 2); /* ports; sized at load */
	__uint(key_size, 4);
	__uint(value_size, 4);
	__array(values, struct lab_devmap);
} mr_lab_dup SEC(".maps");

/* By plane: all of its ports. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, LAB_MAX_PLANES);
	__uint(key_size, 4);
	__uint(value_size, 4);
	__array(values, struct lab_devmap);
} mr_lab_flood SEC(".maps");

/* Where a MAC of ours leads, if it is on `plane`. */
static __always_inline bool lab_egress(const struct ethhdr *eth, __u32 plane, __u32 *port)
{
	__u32 host = eth->h_dest[4] << 8 | eth->h_dest[5];

	if (eth->h_dest[0] != LAB_MAC0 || eth->h_dest[1] != LAB_MAC1 ||
	    eth->h_dest[2] != LAB_MAC2 || eth->h_dest[3] != plane || host >= lab_hosts)
		return false;
	*port = plane * lab_hosts + host;
	return true;
}

/* Random faults and the script. Returns enum lab_action; LAB_A_DROP is counted already. */
static __always_inline __u32 lab_faults(const struct lab_port *port, const struct lab_plane *plane,
					const struct lab_pkt *pkt, struct lab_count *count,
					__u64 *entropy)
{
	struct lab_random *random;
	__u32 actions = 0, id = port->id;

	if (plane->flags & LAB_P_RULES && pkt->class) {
		for (__u32 i = 0; i < LAB_MAX_RULES; i++) {
			__u32 key = i;
			struct lab_rule *rule = bpf_map_lookup_elem(&mr_lab_rules, &key);

			if (!rule || !rule->match)
				break;
			actions |= lab_match(rule, pkt->class, port->plane);
		}
		*entropy = lab_mix(plane->seed + count->packets);
		if (actions & LAB_A_DROP) {
			count->scripted++;
			return actions;
		}
	}
	if (plane->flags & LAB_P_FAULT) {
		random = bpf_map_lookup_elem(&mr_lab_random, &id);
		if (random)
			actions |= lab_draw(plane, random, id, entropy);
		if (actions & LAB_A_DROP)
			count->lost++;
	}
	return actions;
}

/* The virtual queue of the packet's way out. */
static __always_inline bool lab_pass_queue(const struct lab_plane *plane, const struct lab_pkt *pkt,
					   __u32 egress, __u64 bytes, struct lab_count *count)
{
	__u32 spine = (__u64)pkt->hash * lab_spines >> 32;
	__u32 key = egress * lab_spines + spine;
	struct lab_queue *queue = bpf_map_lookup_elem(&mr_lab_queues, &key);

	if (!queue)
		return true;
	switch (lab_enqueue(queue, plane, bpf_ktime_get_ns(), bytes, lab_ect(pkt))) {
	case LAB_V_DROP:
		count->queue_dropped++;
		return false;
	case LAB_V_MARK:
		count->marked++;
		lab_mark(pkt);
		return true;
	default:
		return true;
	}
}

static __always_inline int lab_flood(const struct lab_port *port, struct lab_count *count)
{
	__u32 plane = port->plane;
	void *ports = bpf_map_lookup_elem(&mr_lab_flood, &plane);

	if (!ports)
		return XDP_DROP;
	count->flooded++;
	return bpf_redirect_map(ports, 0, BPF_F_BROADCAST | BPF_F_EXCLUDE_INGRESS);
}

SEC("xdp.frags")
int mr_lab_switch(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	__u32 ifindex = ctx->ingress_ifindex, plane_key, id, egress, actions = 0;
	struct ethhdr *eth = data;
	struct lab_count *count;
	struct lab_plane *plane;
	struct lab_port *port;
	__u64 entropy = 0, bytes = bpf_xdp_get_buff_len(ctx);

	port = bpf_map_lookup_elem(&mr_lab_ports, &ifindex);
	if (!port || !port->used)
		return XDP_DROP;
	plane_key = port->plane;
	id = port->id;
	plane = bpf_map_lookup_elem(&mr_lab_planes, &plane_key);
	count = bpf_map_lookup_elem(&mr_lab_counts, &id);
	if (!plane || !count)
		return XDP_DROP;
	count->packets++;
	count->bytes += bytes;

	if (plane->flags & LAB_P_DOWN) {
		count->down++;
		return XDP_DROP;
	}
	if ((void *)(eth + 1) > end) {
		count->unknown++;
		return XDP_DROP;
	}
	if (eth->h_dest[0] & 1)
		return lab_flood(port, count);
	if (!lab_egress(eth, plane_key, &egress)) {
		count->unknown++;
		return XDP_DROP;
	}
	if (plane->flags) {
		struct lab_pkt pkt;

		lab_parse(eth, end, lab_udp_port, lab_spines > 1, lab_hash_seed, &pkt);
		if (!pkt.version)
			goto forward;
		if (plane->flags & (LAB_P_FAULT | LAB_P_RULES)) {
			actions = lab_faults(port, plane, &pkt, count, &entropy);
			if (actions & LAB_A_DROP)
				return XDP_DROP;
		}
		if (plane->flags & LAB_P_QUEUE &&
		    !lab_pass_queue(plane, &pkt, egress, bytes, count))
			return XDP_DROP;
		/* After the mark, which reads the header: a corrupted one must stay so. */
		if (actions & LAB_A_CORRUPT) {
			lab_corrupt(data, end, entropy);
			count->corrupted++;
		}
	}
	if (actions & LAB_A_DUPLICATE) {
		void *both = bpf_map_lookup_elem(&mr_lab_dup, &egress);

		if (!both)
			return XDP_DROP;
		count->duplicated++;
		return bpf_redirect_map(both, 0, BPF_F_BROADCAST);
	}
	if (actions & LAB_A_REORDER) {
		count->reordered++;
		return bpf_redirect_map(&mr_lab_tx, lab_detour_key, XDP_DROP);
	}
forward:
	return bpf_redirect_map(&mr_lab_tx, egress, XDP_DROP);
}

/* The far end of the detour: back on the way that the MAC says. */
SEC("xdp.frags")
int mr_lab_detour(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data;
	__u32 egress;

	if ((void *)(eth + 1) > end || !lab_egress(eth, eth->h_dest[3], &egress))
		return XDP_DROP;
	return bpf_redirect_map(&mr_lab_tx, egress, XDP_DROP);
}

char lab_license[] SEC("license") = "Dual BSD/GPL";
