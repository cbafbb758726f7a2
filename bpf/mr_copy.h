/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Payload between a frame and a memory region. A region is an array of 64 KiB
 * blocks. The verifier does not relate an offset to a length, so a copy is either
 * "anywhere below 60 KiB, at most 4 KiB", which is one memcpy, or, near a block's
 * end or across it, two overlapping copies of a constant power of two.
 */
#ifndef MR_COPY_H
#define MR_COPY_H

struct mr_block {
	__u8 b[MR_BLOCK];
};

/* n bytes, 2^k <= n < 2^(k+1), at block offset off: first and last 2^k. */
#define MR_COPY_POW2(copy, k)                                         \
	if (n >= (k)) {                                               \
		__u64 last = off + n - (k);                           \
		MR_OPAQUE(last);                                      \
		if (off > MR_BLOCK - (k) || last > MR_BLOCK - (k))    \
			return -1;                                    \
		if (copy(ctx, at, block->b + off, (k)))               \
			return -1;                                    \
		return copy(ctx, at + n - (k), block->b + last, (k)); \
	}

#define MR_DEFINE_COPY(name, copy)                                                                \
	static __always_inline int name##_tail(struct xdp_md *ctx, __u32 at,                      \
					       struct mr_block *block, __u64 off, __u32 n)        \
	{                                                                                         \
		MR_COPY_POW2(copy, 2048)                                                          \
		MR_COPY_POW2(copy, 1024)                                                          \
		MR_COPY_POW2(copy, 512)                                                           \
		MR_COPY_POW2(copy, 256)                                                           \
		MR_COPY_POW2(copy, 128)                                                           \
		MR_COPY_POW2(copy, 64)                                                            \
		MR_COPY_POW2(copy, 32)                                                            \
		MR_COPY_POW2(copy, 16)                                                            \
		MR_COPY_POW2(copy, 8)                                                             \
		MR_COPY_POW2(copy, 4)                                                             \
		MR_COPY_POW2(copy, 2)                                                             \
		MR_COPY_POW2(copy, 1)                                                             \
		return -1;                                                                        \
	}                                                                                         \
	/* len bytes between frame offset at and offset pos of a region. */                       \
	__attribute__((noinline)) int name(struct xdp_md *ctx, __u32 at, __u32 len, __u32 region, \
					   __u64 pos)                                             \
	{                                                                                         \
		void *inner = bpf_map_lookup_elem(&mr_mem, &region);                              \
		__u64 off = pos & (MR_BLOCK - 1);                                                 \
		__u32 index = pos >> 16, n;                                                       \
		struct mr_block *block;                                                           \
                                                                                                  \
		MR_OPAQUE(off);                                                                   \
		if (!inner || !len || len > 4096 || at > 256)                                     \
			return -1;                                                                \
		block = bpf_map_lookup_elem(inner, &index);                                       \
		if (!block)                                                                       \
			return -1;                                                                \
		if (off <= MR_BLOCK - 4096)                                                       \
			return copy(ctx, at, block->b + off, MR_BOUND4K(len));                    \
		n = MR_BLOCK - off;                                                               \
		if (n > len)                                                                      \
			n = len;                                                                  \
		if (name##_tail(ctx, at, block, off, n))                                          \
			return -1;                                                                \
		if (len == n)                                                                     \
			return 0;                                                                 \
		index++;                                                                          \
		block = bpf_map_lookup_elem(inner, &index);                                       \
		if (!block)                                                                       \
			return -1;                                                                \
		return copy(ctx, at + n, block->b, MR_BOUND4K(len - n));                          \
	}

MR_DEFINE_COPY(mr_place, bpf_xdp_load_bytes)  /* frame to region */
MR_DEFINE_COPY(mr_fetch, bpf_xdp_store_bytes) /* region to frame */

#endif
