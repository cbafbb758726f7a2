/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The ready ring and who sleeps: see struct mr_pump. */
#ifndef MR_READY_H
#define MR_READY_H

static __always_inline struct mr_pump *mr_the_pump(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&mr_pump, &zero);
}

static __always_inline void mr_ring_push(struct mr_pump *pump, __u32 slot)
{
	__u32 at = __sync_fetch_and_add(&pump->tail, 1);

	__sync_lock_test_and_set(&pump->ring[at % MR_RING], slot + 1);
}

/* Connection slot may have something to send. The caller has published what. */
static __always_inline void mr_make_ready(__u32 slot)
{
	struct mr_pump *pump = mr_the_pump();
	__u64 nothing = 0;

	if (!pump || __sync_lock_test_and_set(&pump->ready[slot % MR_MAX_CONNS], 1))
		return;
	mr_ring_push(pump, slot);
	if (__sync_lock_test_and_set(&pump->sleeping, 0))
		bpf_ringbuf_output(&mr_wake, &nothing, sizeof(nothing), BPF_RB_FORCE_WAKEUP);
}

/* Whoever armed *armed is to look at its queues. */
static __always_inline void mr_notify(__u32 *armed, __u32 slot, __u32 qpn, struct mr_counters *ctr)
{
	struct mr_event event = { .slot = slot, .qpn = qpn };

	if (!__sync_lock_test_and_set(armed, 0) ||
	    !bpf_ringbuf_output(&mr_event, &event, sizeof(event), 0))
		return;
	MR_WRITE_ONCE(*armed, 1);
	ctr->events_lost++;
}

#endif
