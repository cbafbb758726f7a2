// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * What drivers took and dropped of our frames, which they tell nobody but these
 * tracepoints. An object of its own, because it needs the kernel's BTF: without
 * it the device runs and drops are not seen.
 *
 * The tracepoints see all XDP traffic of the machine, so what is not ours has to
 * leave fast. The programs run on the CPU that sent, within the flush.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "mr_types.h"
#include "mr_egress.h"

/* As much of the kernel's types as is read here; the loader finds the offsets in the kernel's BTF. */
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct ns_common {
	unsigned int inum;
};
struct net {
	struct ns_common ns;
};
typedef struct {
	struct net *net;
} possible_net_t;
struct net_device {
	int ifindex;
	possible_net_t nd_net;
};
#pragma clang attribute pop

volatile const __u32 mr_netns; /* inode of the device's network namespace */

/* These maps are the device's, but for mr_ifindex: the loader puts its own in their place. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct mr_egress);
} mr_egress SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct mr_counters);
} mr_counter SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct mr_pump);
} mr_pump SEC(".maps");

/* By ifindex: the index in mr_egress. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024); /* several interfaces may share an entry */
	__type(key, __u32);
	__type(value, __u32);
} mr_ifindex SEC(".maps");

static __always_inline struct mr_egress *mr_ours(const struct net_device *dev, __u32 *egress)
{
	__u32 ifindex, *index;

	if (dev->nd_net.net->ns.inum != mr_netns)
		return 0;
	ifindex = dev->ifindex;
	index = bpf_map_lookup_elem(&mr_ifindex, &ifindex);
	if (!index)
		return 0;
	*egress = *index;
	return bpf_map_lookup_elem(&mr_egress, egress);
}

/* xdp_devmap_xmit(from, to, sent, drops, err): frames that were redirected to an interface. */
SEC("tp_btf/xdp_devmap_xmit")
int mr_devmap_xmit(__u64 *ctx)
{
	const struct net_device *to = (const void *)ctx[1];
	__u32 zero = 0, egress = 0;
	struct mr_egress *e = mr_ours(to, &egress);
	int sent = ctx[2], drops = ctx[3];
	struct mr_counters *ctr;
	struct mr_pump *pump;

	if (!e)
		return 0;
	if (sent > 0)
		__sync_fetch_and_add(&e->tx_sent, sent);
	if (drops <= 0)
		return 0;
	__sync_fetch_and_add(&e->tx_local_drop, drops);
	ctr = bpf_map_lookup_elem(&mr_counter, &zero);
	if (ctr)
		ctr->tx_local_drop += drops;
	/* from now on mr_tx counts what is in that ring */
	pump = bpf_map_lookup_elem(&mr_pump, &zero);
	if (pump)
		__sync_fetch_and_or(&pump->limited, 1ull << (egress & (MR_EGRESSES - 1)));
	return 0;
}

/* xdp_bulk_tx(dev, sent, drops, err): frames that XDP_TX sent, so ACKs. */
SEC("tp_btf/xdp_bulk_tx")
int mr_bulk_tx(__u64 *ctx)
{
	const struct net_device *dev = (const void *)ctx[0];
	__u32 zero = 0, egress = 0;
	struct mr_egress *e = mr_ours(dev, &egress);
	int sent = ctx[1], drops = ctx[2];
	struct mr_counters *ctr;

	if (!e)
		return 0;
	if (sent > 0)
		__sync_fetch_and_add(&e->ack_sent, sent);
	if (drops <= 0)
		return 0;
	__sync_fetch_and_add(&e->ack_local_drop, drops);
	ctr = bpf_map_lookup_elem(&mr_counter, &zero);
	if (ctr)
		ctr->ack_local_drop += drops;
	return 0;
}

char _license[] SEC("license") = "Dual BSD/GPL";
