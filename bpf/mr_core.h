/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the protocol decides, as pure inline functions: no helpers, no maps, no
 * packet pointers. They compile natively too (bpf/test), for sanitizers and
 * fuzzing. All of them run under the connection's lock, so none may call out.
 *
 * Straight-line arithmetic stands where a loop or a branch would do: the
 * verifier walks each path of a branch, and 64-way find-first-set costs it most
 * of its budget.
 */
#ifndef MR_CORE_H
#define MR_CORE_H

#ifndef __always_inline
#define __always_inline inline __attribute__((always_inline))
#endif

/* Serial number arithmetic (RFC 1982): is a before b? */
static __always_inline int mr_before(__u32 a, __u32 b)
{
	return (__s32)(a - b) < 0;
}

static __always_inline __u32 mr_popcount(__u64 x)
{
	x -= x >> 1 & 0x5555555555555555ull;
	x = (x & 0x3333333333333333ull) + (x >> 2 & 0x3333333333333333ull);
	x = (x + (x >> 4)) & 0x0f0f0f0f0f0f0f0full;
	return x * 0x0101010101010101ull >> 56;
}

/* Index of the lowest set bit; 64 for 0. */
static __always_inline __u32 mr_ctz(__u64 v)
{
	return mr_popcount((v & -v) - 1);
}

static __always_inline __u64 mr_reverse(__u64 x)
{
	x = (x >> 1 & 0x5555555555555555ull) | (x & 0x5555555555555555ull) << 1;
	x = (x >> 2 & 0x3333333333333333ull) | (x & 0x3333333333333333ull) << 2;
	x = (x >> 4 & 0x0f0f0f0f0f0f0f0full) | (x & 0x0f0f0f0f0f0f0f0full) << 4;
	return __builtin_bswap64(x);
}

/* v <<= d over 256 bits, v[0] lowest; d < 256. */
static __always_inline void mr_shl256(__u64 v[4], __u32 d)
{
	if (d & 128) {
		v[3] = v[1];
		v[2] = v[0];
		v[1] = 0;
		v[0] = 0;
	}
	if (d & 64) {
		v[3] = v[2];
		v[2] = v[1];
		v[1] = v[0];
		v[0] = 0;
	}
	d &= 63;
	if (d) {
		v[3] = v[3] << d | v[2] >> (64 - d);
		v[2] = v[2] << d | v[1] >> (64 - d);
		v[1] = v[1] << d | v[0] >> (64 - d);
		v[0] <<= d;
	}
}

static __always_inline void mr_rol256(__u64 v[4], __u32 d)
{
	__u64 t, u;

	if (d & 128) {
		t = v[3];
		u = v[2];
		v[3] = v[1];
		v[2] = v[0];
		v[1] = t;
		v[0] = u;
	}
	if (d & 64) {
		t = v[3];
		v[3] = v[2];
		v[2] = v[1];
		v[1] = v[0];
		v[0] = t;
	}
	d &= 63;
	if (d) {
		t = v[3] >> (64 - d);
		v[3] = v[3] << d | v[2] >> (64 - d);
		v[2] = v[2] << d | v[1] >> (64 - d);
		v[1] = v[1] << d | v[0] >> (64 - d);
		v[0] = v[0] << d | t;
	}
}

/* The lowest n of the 64 bits of word w of a 256-bit set: n counted over the whole set. */
static __always_inline __u64 mr_low(__u32 n, __u32 w)
{
	__u32 k = n > 64 * w ? n - 64 * w : 0;

	return k >= 64 ? ~0ull : (1ull << k) - 1;
}

/* ---- receiver: stream ---- */

enum mr_verdict {
	MR_NEW,     /* claimed: place it */
	MR_DUP,     /* has arrived already */
	MR_BUSY,    /* another CPU is placing it */
	MR_OVER,    /* beyond the limit */
	MR_REFUSED, /* NAK */
	MR_CLOSED,  /* the connection is over */
};

static __always_inline enum mr_verdict mr_core_seen(const struct mr_rx_stream *s, __u32 psn)
{
	__u32 w = psn / 64 % MR_PSN_WORDS;
	__u64 bit = 1ull << (psn & 63);

	if (mr_before(psn, s->cum))
		return MR_DUP;
	if (psn - s->cum >= MR_PSN_LIMIT)
		return MR_OVER;
	if (!(s->claimed[w] & bit))
		return MR_NEW;
	return s->arrived[w] & bit ? MR_DUP : MR_BUSY;
}

/* Exactly once: only who is told MR_NEW may place psn. */
static __always_inline enum mr_verdict mr_core_claim(struct mr_rx_stream *s, __u32 psn)
{
	enum mr_verdict v = mr_core_seen(s, psn);

	if (v == MR_NEW)
		s->claimed[psn / 64 % MR_PSN_WORDS] |= 1ull << (psn & 63);
	return v;
}

static __always_inline void mr_core_unclaim(struct mr_rx_stream *s, __u32 psn)
{
	s->claimed[psn / 64 % MR_PSN_WORDS] &= ~(1ull << (psn & 63));
}

/* A refused packet is neither claimed nor marked; the lowest one is told in every ACK. */
static __always_inline enum mr_verdict mr_core_refuse(struct mr_rx_stream *s, __u32 psn,
						      __u32 syndrome)
{
	enum mr_verdict v = mr_core_seen(s, psn);

	if (v != MR_NEW)
		return v; /* e.g. a late duplicate whose region is gone since */
	if (!s->syndrome || mr_before(psn, s->nak_psn)) {
		s->nak_psn = psn;
		s->syndrome = syndrome;
	}
	return MR_REFUSED;
}

/* psn is placed. Moves cum over all that is there and frees what it passes. */
static __always_inline void mr_core_arrive(struct mr_rx_stream *s, __u32 psn)
{
	__u32 cum = s->cum;
	int i;

	s->arrived[psn / 64 % MR_PSN_WORDS] |= 1ull << (psn & 63);
	if (psn != cum)
		return;
	for (i = 0; i < MR_PSN_WORDS; i++) {
		__u32 w = cum / 64 % MR_PSN_WORDS, b = cum & 63, run;
		__u64 missing = ~s->arrived[w] >> b, passed;

		run = mr_ctz(missing); /* 64 if all are there */
		if (run > 64 - b)
			run = 64 - b;
		passed = (run >= 64 ? ~0ull : (1ull << run) - 1) << b;
		s->arrived[w] &= ~passed;
		s->claimed[w] &= ~passed;
		cum += run;
		if (run + b < 64)
			break;
	}
	s->cum = cum;
}

/* ---- receiver: path ---- */

enum mr_gen {
	MR_GEN_CURRENT,
	MR_GEN_NEW,      /* opens a new vector */
	MR_GEN_PREVIOUS, /* late: counts for psn only */
	MR_GEN_STALE,    /* refused */
};

/* Generations compare serially in 8 bits. */
static __always_inline enum mr_gen mr_core_gen(__u8 have, __u8 got)
{
	__s8 d = got - have;

	if (d == 0)
		return MR_GEN_CURRENT;
	if (d > MR_GEN_AHEAD)
		return MR_GEN_STALE; /* no sender goes so far ahead */
	if (d > 0)
		return MR_GEN_NEW;
	return d == -1 ? MR_GEN_PREVIOUS : MR_GEN_STALE;
}

static __always_inline void mr_core_rx_newgen(struct mr_rx_path *p, __u8 gen, __u32 pseq)
{
	p->gen = gen;
	p->max = pseq - 1;
	p->vec[0] = 0; /* the sender looks at no pseq of before the generation's first one */
	p->vec[1] = 0;
	p->vec[2] = 0;
	p->vec[3] = 0;
	p->pkts = 0;
	p->ce = 0;
	p->dups = 0;
	p->since = 0;
}

/* Nobody who hears answers gets so far ahead: what says so does not enter its path. */
static __always_inline int mr_core_rx_ahead(const struct mr_rx_path *p, __u32 pseq)
{
	return (__s32)(pseq - p->max) > MR_PSEQ_AHEAD;
}

/* Enters pseq into the vector. Returns 1 if it was not the next one. */
static __always_inline int mr_core_rx_pseq(struct mr_rx_path *p, __u32 pseq)
{
	__u32 d = pseq - p->max;

	if ((__s32)d > 0) {
		if (d >= 256) {
			p->vec[0] = 0;
			p->vec[1] = 0;
			p->vec[2] = 0;
			p->vec[3] = 0;
		} else {
			mr_shl256(p->vec, d);
		}
		p->vec[0] |= 1;
		p->max = pseq;
		return d != 1;
	}
	d = -d;
	if (d < 256)
		p->vec[d / 64 & 3] |= 1ull << (d & 63);
	return 1;
}

/* ---- sender ---- */

static __always_inline __u32 mr_core_inflight(const struct mr_tx_path *p)
{
	return p->next - p->una;
}

enum mr_open {
	MR_OPEN,
	MR_SHUT,  /* by window or state: an ACK or control opens it */
	MR_PACED, /* by time */
};

/* May data leave on this path now? repair: one passes a closed window after an ACK or timeout. */
static __always_inline enum mr_open mr_core_tx_open(const struct mr_tx_path *p, __u64 now,
						    int repair)
{
	__u32 inflight = mr_core_inflight(p);

	if (p->state != MR_PATH_ACTIVE || inflight >= MR_PATH_WINDOW)
		return MR_SHUT;
	if (inflight >= p->cwnd && !(repair && p->one))
		return MR_SHUT;
	return now < p->next_ns ? MR_PACED : MR_OPEN;
}

/* Everything sent and unresolved is lost: data is queued as repairs. Returns how many. */
static __always_inline __u32 mr_core_tx_all_lost(struct mr_tx_path *p)
{
	__u32 n = p->next - p->una, data = 0, i;
	__u64 set[4];

	if (n > 256)
		n = 256;
	for (i = 0; i < 4; i++)
		set[i] = mr_low(n, i);
	mr_rol256(set, p->una & 255);
	for (i = 0; i < 4; i++) {
		p->repair[i] |= set[i] & ~p->probed[i];
		data += mr_popcount(set[i] & ~p->probed[i]);
	}
	p->una = p->next;
	return data;
}

/*
 * The path half of an ACK: what [una, max] lacks is lost, except the youngest
 * `tolerance`, which may only be late. An ACK that answers a probe makes no
 * exception: control's probes leave long after the data; mr_tx's own, right
 * behind it, is told by its pseq. Returns how many were lost. The caller has
 * checked that max was sent.
 */
static __always_inline __u32 mr_core_tx_ack(struct mr_tx_path *p, __u32 max, const __u64 vec[4],
					    int probe)
{
	__u32 hold = probe && max != p->idle_pseq ? 0 : p->tolerance;
	__u32 n = max - p->una + 1, lost = 0, i;
	__u64 late = 0, any = 0, set[4];

	if ((__s32)n <= 0)
		return 0; /* an older ACK */
	if (n > 256)
		n = 256;
	for (i = 0; i < 4; i++) {
		__u64 missing = ~vec[i] & mr_low(n, i), young = mr_low(hold, i);

		late |= missing & young;
		any |= missing & ~young;
		set[3 - i] = mr_reverse(missing & ~young);
		lost += mr_popcount(missing & ~young);
		/* one word after the other: side by side they need too much of the stack */
		asm volatile("" ::: "memory");
	}
	if (any) {
		/* bit i of the vector is pseq max - i, so reversed and turned by max + 1
		 * it is bit pseq % 256 */
		mr_rol256(set, (max + 1) & 255);
		for (i = 0; i < 4; i++)
			p->repair[i] |= set[i] & ~p->probed[i];
	}
	if (!late)
		p->una = max + 1;
	else if (n > hold)
		p->una = max + 1 - hold;
	return lost;
}

/*
 * What an ACK shows arrived needs no repair any more: a timeout was hasty. Bits of pseqs from
 * before the generation's first have no meaning.
 */
static __always_inline void mr_core_tx_late(struct mr_tx_path *p, __u32 max, const __u64 vec[4])
{
	__u32 after = p->next - 1 - max, n, i; /* their descriptors have replaced as many */
	__u32 gen = max - p->first + 1;
	__u64 set[4];

	if (after >= 256 || (__s32)gen <= 0)
		return;
	n = 256 - after;
	if (n > gen)
		n = gen;
	for (i = 0; i < 4; i++) {
		set[3 - i] = mr_reverse(vec[i] & mr_low(n, i));
		asm volatile("" ::: "memory");
	}
	mr_rol256(set, (max + 1) & 255);
	for (i = 0; i < 4; i++)
		p->repair[i] &= ~set[i];
}

static __always_inline __u64 mr_core_any_repair(const struct mr_tx_path *p)
{
	return p->repair[0] | p->repair[1] | p->repair[2] | p->repair[3];
}

/*
 * The oldest queued repair: the first bit from slot `next` on, round the ring.
 * So the slot that the next transmission takes is always emptied first.
 */
static __always_inline __u32 mr_core_first_repair(const struct mr_tx_path *p)
{
	__u32 from = p->next & 255, i;
	__u64 set[4];

	for (i = 0; i < 4; i++)
		set[i] = p->repair[i];
	mr_rol256(set, (256 - from) & 255);
	if (set[0])
		i = mr_ctz(set[0]);
	else if (set[1])
		i = 64 + mr_ctz(set[1]);
	else if (set[2])
		i = 128 + mr_ctz(set[2]);
	else
		i = 192 + mr_ctz(set[3]);
	return (from + i) & 255;
}

/* Slot idx of the descriptor ring holds a probe, or data: probes are never repaired. */
static __always_inline void mr_core_mark_probe(struct mr_tx_path *p, __u32 idx, int probe)
{
	__u64 bit = 1ull << (idx & 63);

	if (probe)
		p->probed[idx / 64 & 3] |= bit;
	else
		p->probed[idx / 64 & 3] &= ~bit;
}

/*
 * Does the arrival of this transmission prove that the path carries the longest packets, cut
 * bytes of payload each? Short ones prove nothing: they pass where an MTU is too small.
 */
static __always_inline int mr_core_is_proof(__u16 len, __u32 cut)
{
	if (len >= MR_DESC_FULL)
		return len == MR_DESC_FULL;
	return (len & ~MR_DESC_AGAIN) >= cut;
}

static __always_inline int mr_core_next_is_repair(const struct mr_tx_path *p)
{
	__u32 slot = p->next & 255;

	return p->repair[slot / 64] >> (slot & 63) & 1;
}

/*
 * Smoothed and least round trip; gain 1/8 (RFC 6298). A queue can fill within one round trip. The
 * probes' patience, four of these, must cover at once what was just seen (its variance does that in RFC 6298).
 */
static __always_inline void mr_core_rtt(struct mr_tx_path *p, __u32 rtt_ns)
{
	if ((__s32)rtt_ns < 0)
		return;
	if (!p->srtt_ns)
		p->srtt_ns = rtt_ns;
	else
		p->srtt_ns += (__s32)(rtt_ns - p->srtt_ns) >> 3;
	if (p->srtt_ns < rtt_ns / 4)
		p->srtt_ns = rtt_ns / 4;
	if (!p->min_rtt_ns || rtt_ns < p->min_rtt_ns)
		p->min_rtt_ns = rtt_ns ? rtt_ns : 1;
}

/* A mark came in: an eighth slower at once, at most once a round trip and to half of what
 * control wrote; control computes the rest.
 */
#define MR_BRAKE_MIN_NS 50000
static __always_inline void mr_core_brake(struct mr_tx_path *p, __u64 now)
{
	__u32 gap = p->srtt_ns > MR_BRAKE_MIN_NS ? p->srtt_ns : MR_BRAKE_MIN_NS;
	__u32 pace = p->pace + p->pace / 8;

	if (now - p->brake_ns < gap)
		return;
	p->brake_ns = now;
	if (p->cwnd > 8)
		p->cwnd -= p->cwnd / 8;
	if (pace <= p->pace_max)
		p->pace = pace;
}

/* Time the path is taken by `bytes`; a path that fell behind may catch up 200 us */
#define MR_PACE_BURST_NS 200000
static __always_inline void mr_core_pace(struct mr_tx_path *p, __u64 now, __u32 bytes)
{
	__u64 from = p->next_ns;

	if (!p->pace)
		return;
	if (from + MR_PACE_BURST_NS < now)
		from = now - MR_PACE_BURST_NS;
	p->next_ns = from + ((__u64)bytes * p->pace >> 10);
}

#endif
