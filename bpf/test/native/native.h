/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Compiles the programs' headers as ordinary C: for sanitizers and fuzzers. */
#ifndef MR_NATIVE_H
#define MR_NATIVE_H

#include <assert.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>

#ifndef __always_inline
#define __always_inline inline __attribute__((always_inline))
#endif

/* The kernel's xdp_md has room for 32 bits of a pointer: the verifier rewrites the accesses. */
struct mr_native_md {
	unsigned long data, data_end;
};
#define xdp_md mr_native_md

#include "mr_wire.h"
#include "mr_types.h"
#include "mr_core.h"

/* splitmix64: small, seedable */
static __attribute__((unused)) __u64 mr_rand(__u64 *state)
{
	__u64 z = (*state += 0x9e3779b97f4a7c15ull);

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

/* SEED=n replays a run. */
static __attribute__((unused)) __u64 mr_seed(void)
{
	const char *given = getenv("SEED");
	__u64 seed = given ? strtoull(given, 0, 0) : (__u64)time(0) * 1000003 + clock();

	printf("SEED=%llu\n", (unsigned long long)seed);
	fflush(stdout);
	return seed;
}

#endif
