/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Faults and virtual queues of the lab switch: decisions about one packet. */
#ifndef LAB_FAULT_H
#define LAB_FAULT_H

/*
 * Random faults for one IP packet: enum lab_action. `*entropy` gets bits for
 * where to corrupt. The n-th packet of a port always draws the same, so that a
 * seed replays a run; two CPUs that share a port only share out the draws.
 */
static __always_inline __u32 lab_draw(const struct lab_plane *plane, struct lab_random *random,
				      __u32 port, __u64 *entropy)
{
	__u64 n = __sync_fetch_and_add(&random->count, 1);
	__u64 base = lab_mix(plane->seed ^ (__u64)port << 48) + n * 0x9e3779b97f4a7c15ULL;
	__u64 r0 = lab_mix(base), r1 = lab_mix(base ^ 0xa5a5a5a5a5a5a5a5ULL);
	__u32 actions = 0;

	*entropy = lab_mix(r0 + r1);
	if ((r0 & 0xffffffff) < (random->lost ? plane->loss_next : plane->loss)) {
		random->lost = 1;
		return LAB_A_DROP;
	}
	if (random->lost)
		random->lost = 0;
	if (r0 >> 32 < plane->duplicate)
		actions |= LAB_A_DUPLICATE;
	if ((r1 & 0xffffffff) < plane->corrupt)
		actions |= LAB_A_CORRUPT;
	if (r1 >> 32 < plane->reorder)
		actions |= LAB_A_REORDER;
	return actions;
}

/* Does the n-th packet that matches `rule` come now, on this plane? */
static __always_inline __u32 lab_match(struct lab_rule *rule, __u32 class, __u32 plane)
{
	__u64 n;

	if (!(rule->planes >> plane & 1) || (class & rule->match) != rule->match)
		return 0;
	n = __sync_fetch_and_add(&rule->seen, 1) + 1;
	if (n < rule->from || n > rule->to)
		return 0;
	__sync_fetch_and_add(&rule->hits, 1);
	return rule->action;
}

/* Flips one bit, or one byte's every bit, behind the Ethernet header. No checksum is mended. */
static __always_inline void lab_corrupt(void *data, void *end, __u64 entropy)
{
	__u64 len = end - data, off;
	__u8 *at;

	if (len <= ETH_HLEN)
		return;
	off = ETH_HLEN + (entropy & 0xffffffff) % (len - ETH_HLEN);
	if (off > 4095)
		return;
	at = data + off;
	if ((void *)(at + 1) > end)
		return;
	*at ^= entropy >> 63 ? 0xff : 1 << (entropy >> 32 & 7);
}

enum lab_verdict { LAB_V_SEND, LAB_V_MARK, LAB_V_DROP };

/*
 * Passes a packet through a virtual queue: one that holds no packets but knows
 * when a link of that rate would have sent them. Nothing waits, so a round trip
 * does not grow; marks and drops come where a real queue would make them.
 */
static __always_inline enum lab_verdict lab_enqueue(struct lab_queue *queue,
						    const struct lab_plane *plane, __u64 now_ns,
						    __u64 bytes, bool ect)
{
	__u64 now = now_ns * LAB_TICKS_PER_NS, cost = bytes * plane->byte_cost >> 20;
	__u64 ecn = plane->ecn_ticks, max = plane->max_ticks, held;
	enum lab_verdict verdict = LAB_V_SEND;

	bpf_spin_lock(&queue->lock);
	held = queue->free_at > now ? queue->free_at - now : 0;
	if (held + cost > max) {
		queue->dropped++;
		verdict = LAB_V_DROP;
	} else {
		if (held > ecn && ect) {
			queue->marked++;
			verdict = LAB_V_MARK;
		}
		queue->packets++;
		queue->bytes += bytes;
		held += cost;
		queue->free_at = now + held;
		if (held > queue->peak_ticks)
			queue->peak_ticks = held;
	}
	bpf_spin_unlock(&queue->lock);
	return verdict;
}

#endif
