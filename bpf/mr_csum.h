/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
#ifndef MR_CSUM_H
#define MR_CSUM_H

/*
 * One's complement sum (RFC 1071) of len bytes of the frame from off, folded.
 * A plain loop: bpf_csum_diff refuses more than 512 bytes on 6.1 and is no
 * faster. Four sums, so that additions do not wait for one another. Bytes that
 * are not there make the sum wrong, never an access.
 */
__attribute__((noinline)) __u32 mr_csum(struct xdp_md *ctx, __u32 off, __u32 len)
{
	void *end = (void *)(long)ctx->data_end, *p = (void *)(long)ctx->data;
	__u64 a = 0, b = 0, c = 0, d = 0;
	int i;

	if (off > 128 || len > 3500)
		return 1;
	p += off;
	for (i = 0; i < 55; i++) {
		__u32 *w = p;

		if (len < 64 || p + 64 > end)
			break;
		a += (__u64)w[0] + w[4];
		b += (__u64)w[1] + w[5];
		c += (__u64)w[2] + w[6];
		d += (__u64)w[3] + w[7];
		a += (__u64)w[8] + w[12];
		b += (__u64)w[9] + w[13];
		c += (__u64)w[10] + w[14];
		d += (__u64)w[11] + w[15];
		p += 64;
		len -= 64;
	}
	for (i = 0; i < 16; i++) {
		if (len < 4 || p + 4 > end)
			break;
		a += *(__u32 *)p;
		p += 4;
		len -= 4;
	}
	if (len & 2) {
		if (p + 2 > end)
			return 1;
		a += *(__u16 *)p;
		p += 2;
	}
	if (len & 1) {
		if (p + 1 > end)
			return 1;
		a += *(__u8 *)p;
	}
	return mr_fold(a + b + c + d);
}

#endif
