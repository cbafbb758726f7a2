/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Small things that touch maps. */
#ifndef MR_UTIL_H
#define MR_UTIL_H

#define MR_READ_ONCE(x) (*(const volatile typeof(x) *)&(x))
#define MR_WRITE_ONCE(x, v) (*(volatile typeof(x) *)&(x) = (v))
/* Hides a value's origin from the compiler, so that it keeps the bounds check before it. */
#define MR_OPAQUE(x) asm volatile("" : "+r"(x))
/* 1..4096 by arithmetic: 6.1's verifier does not learn "at least 1" from "not 0". */
#define MR_BOUND4K(x)                        \
	({                                   \
		__u64 _b = ((x) - 1) & 4095; \
		MR_OPAQUE(_b);               \
		_b + 1;                      \
	})

static __always_inline struct mr_counters *mr_counters(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&mr_counter, &zero);
}

static __always_inline struct mr_qpage *mr_qpage(__u32 slot)
{
	void *inner = bpf_map_lookup_elem(&mr_qp, &slot);
	__u32 zero = 0;

	return inner ? bpf_map_lookup_elem(inner, &zero) : 0;
}

static __always_inline __u32 mr_fold(__u64 s)
{
	s = (s & 0xffffffff) + (s >> 32);
	s = (s & 0xffffffff) + (s >> 32);
	s = (s & 0xffff) + (s >> 16);
	s = (s & 0xffff) + (s >> 16);
	return s;
}

/* The UDP checksum field of a one's complement sum: 0 means "none", so it is sent as its twin. */
static __always_inline __u16 mr_udp_check(__u64 sum)
{
	__u16 c = ~mr_fold(sum);

	return c ? c : 0xffff;
}

#endif
