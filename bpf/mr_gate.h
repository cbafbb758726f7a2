/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Where mr_tx and mr_rx meet the bucket of an egress, see mr_egress.h. */
#ifndef MR_GATE_H
#define MR_GATE_H

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct mr_egress);
} mr_egress SEC(".maps");

static __always_inline struct mr_egress *mr_egress_of(const struct mr_tx_path *p)
{
	__u32 index = p->egress & (MR_EGRESSES - 1);

	return bpf_map_lookup_elem(&mr_egress, &index);
}

/*
 * The paths of connection slot that leave by an egress that is held now. One of the held ones is
 * looked at again. Global, so that it is verified once.
 */
__attribute__((noinline)) __u32 mr_gate_shut(__u32 slot, __u64 now)
{
	struct mr_conn *c = bpf_map_lookup_elem(&mr_conn, &slot);
	struct mr_pump *pump = mr_the_pump();
	__u32 index, shut = 0, i;
	struct mr_egress *e;
	__u64 held;

	if (!c || !pump || !pump->held)
		return 0;
	held = pump->held;
	index = mr_ctz(held & ~pump->held_seen);
	if (index >= MR_EGRESSES) {
		index = mr_ctz(held);
		pump->held_seen = 0;
	}
	index &= MR_EGRESSES - 1;
	pump->held_seen |= 1ull << index;
	e = bpf_map_lookup_elem(&mr_egress, &index);
	if (!e || mr_core_egress_open(e, now))
		held &= ~(1ull << index);
	pump->held = held;
	if (!held)
		return 0;
	for (i = 0; i < MR_MAX_PATHS; i++) {
		if (i >= c->npaths)
			break;
		shut |= (__u32)(held >> (c->tx[i].egress & (MR_EGRESSES - 1)) & 1) << i;
	}
	return shut;
}

/* The bucket of path p's egress, 0 while it has no limit. */
static __always_inline struct mr_egress *mr_gate(const struct mr_pump *pump,
						 const struct mr_tx_path *p)
{
	__u64 limited = MR_READ_ONCE(pump->limited);

	if (!limited || !(limited >> (p->egress & (MR_EGRESSES - 1)) & 1))
		return 0;
	return mr_egress_of(p);
}

/* An ACK of path p came in that echoes ts. */
static __always_inline void mr_gate_heard(const struct mr_tx_path *p, __u32 ts, __u64 now)
{
	struct mr_pump *pump = mr_the_pump();
	struct mr_egress *e = pump ? mr_gate(pump, p) : 0;

	if (e)
		mr_core_egress_heard(e, now, ts, p->min_rtt_ns);
}

/* A frame leaves by e, the bucket of `egress`, or without any. */
static __always_inline void mr_gate_sent(struct mr_pump *pump, struct mr_egress *e, __u32 egress,
					 __u64 now, __u32 *ask)
{
	if (e && mr_core_egress_sent(e, now, ask))
		pump->held |= 1ull << (egress & (MR_EGRESSES - 1));
}

#endif
