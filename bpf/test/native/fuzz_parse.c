// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* mr_parse and mr_csum over any bytes: no access outside the frame, offsets that make sense. */
#include "native.h"

static __u32 mr_port = MR_UDP_PORT;

static __u32 mr_fold(__u64 s)
{
	while (s >> 16)
		s = (s & 0xffff) + (s >> 16);
	return s;
}

/* Bytes of the frame in all its pieces; data to data_end is the first one. */
static __u64 whole;

static __u64 bpf_xdp_get_buff_len(struct xdp_md *ctx)
{
	(void)ctx;
	return whole;
}

#include "mr_parse.h"
#include "mr_csum.h"

int LLVMFuzzerTestOneInput(const __u8 *data, size_t size)
{
	struct mr_native_md ctx;
	struct mr_view v = { 0 };
	__u8 *frame = malloc(size ? size : 1); /* its own allocation: the sanitizer sees the end */
	__u32 sum, i;
	__u64 want = 0;
	int parsed;

	memcpy(frame, data, size);
	ctx.data = (unsigned long)frame;
	ctx.data_end = ctx.data + size;
	whole = size;
	parsed = mr_parse(&ctx, &v);
	if (parsed == MR_OURS) {
		assert(v.l3 == 14 || v.l3 == 18);
		assert(v.l4 == v.l3 + (v.v6 ? 40 : 20));
		assert(v.l4 + v.udp_len <= size && v.ce <= 1 && v.vlan < 4096);
		assert(!v.nonlinear);
		sum = mr_csum(&ctx, v.l4, v.udp_len);
		if (v.udp_len <= 3500) {
			for (i = 0; i < v.udp_len; i++)
				want += i & 1 ? (__u32)frame[v.l4 + i] << 8 : frame[v.l4 + i];
			assert(mr_fold(sum) == mr_fold(want));
		}
	}
	free(frame);
	/* The same bytes as the first piece of a larger frame. */
	frame = malloc(size ? size : 1);
	memcpy(frame, data, size);
	ctx.data = (unsigned long)frame;
	ctx.data_end = ctx.data + size;
	whole = size + 3000;
	parsed = mr_parse(&ctx, &v);
	if (parsed == MR_OURS) {
		assert(v.l4 + v.udp_len <= whole);
		assert(v.nonlinear == (v.l4 + v.udp_len > size));
	}
	free(frame);
	return 0;
}
