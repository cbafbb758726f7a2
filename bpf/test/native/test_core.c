// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* mr_core.h against models so plain that they are right at sight. */
#include "native.h"

#define ROUNDS 300

static __u64 rng;

static __u32 below(__u32 n)
{
	return mr_rand(&rng) % n;
}

static void bit_tricks_equal_loops(void)
{
	int i, k;

	for (i = 0; i < 20000; i++) {
		__u64 v = mr_rand(&rng) & mr_rand(&rng), r = 0, a[4], b[4], c[4];
		__u32 n = 0, d = below(256), ones = 0;

		while (n < 64 && !(v >> n & 1))
			n++;
		assert(mr_ctz(v) == n);
		for (k = 0; k < 64; k++) {
			ones += v >> k & 1;
			r |= (v >> k & 1) << (63 - k);
		}
		assert(mr_popcount(v) == ones);
		assert(mr_reverse(v) == r);
		for (k = 0; k < 4; k++)
			a[k] = b[k] = c[k] = mr_rand(&rng);
		mr_shl256(b, d);
		mr_rol256(c, d);
		for (k = 0; k < 256; k++) {
			__u32 from = (k - d) & 255;
			__u64 bit = a[from / 64] >> (from & 63) & 1;

			assert((c[k / 64] >> (k & 63) & 1) == bit);
			assert((b[k / 64] >> (k & 63) & 1) == ((__u32)k >= d ? bit : 0));
		}
	}
	assert(mr_ctz(0) == 64);
}

/* Packets arrive in any order, twice, early and late: each psn is new once, cum is the first gap. */
static void stream_takes_each_psn_once_in_any_order(void)
{
	static struct mr_rx_stream s;
	static __u8 claimed[20000], arrived[20000];
	int round;

	for (round = 0; round < ROUNDS; round++) {
		__u32 start = round & 1 ? 0xffffffff - below(3000) : mr_rand(&rng), cum = 0, i;
		__u32 spread = 1 + below(round % 7 ? 40 : 8500);

		memset(&s, 0, sizeof(s));
		memset(claimed, 0, sizeof(claimed));
		memset(arrived, 0, sizeof(arrived));
		s.cum = start;
		for (i = 0; i < 6000 && cum < 9000; i++) {
			__u32 n = below(20) ? cum + below(spread) : below(cum + 1);
			enum mr_verdict got = mr_core_claim(&s, start + n), want;

			if (n < cum)
				want = MR_DUP;
			else if (n - cum >= MR_PSN_LIMIT)
				want = MR_OVER;
			else if (arrived[n])
				want = MR_DUP;
			else if (claimed[n])
				want = MR_BUSY;
			else
				want = MR_NEW;
			assert(got == want);
			if (got == MR_NEW)
				claimed[n] = 1;
			if (got == MR_NEW || (got == MR_BUSY && below(2))) {
				switch (below(8)) {
				case 0: /* still being placed */
					break;
				case 1: /* placement failed */
					mr_core_unclaim(&s, start + n);
					claimed[n] = 0;
					break;
				default:
					mr_core_arrive(&s, start + n);
					arrived[n] = 1;
				}
			}
			while (arrived[cum])
				cum++;
			assert(s.cum == start + cum);
		}
	}
}

static void refusal_keeps_the_lowest_and_claims_nothing(void)
{
	static struct mr_rx_stream s;

	s.cum = 0xfffffff0;
	assert(mr_core_refuse(&s, 5, 0x62) == MR_REFUSED);
	assert(mr_core_refuse(&s, 9, 0x61) == MR_REFUSED);
	assert(s.nak_psn == 5 && s.syndrome == 0x62);
	assert(mr_core_refuse(&s, 0xfffffff5, 0x61) == MR_REFUSED);
	assert(s.nak_psn == 0xfffffff5 && s.syndrome == 0x61);
	assert(mr_core_claim(&s, 5) == MR_NEW);
	assert(mr_core_refuse(&s, 0xffffffef, 0x62) == MR_DUP);
}

/* The receiver's vector holds exactly what arrived of the last 256. */
static void vector_shows_what_arrived(void)
{
	static __u8 seen[40000];
	int round;

	for (round = 0; round < ROUNDS; round++) {
		struct mr_rx_path p = { 0 };
		__u32 start = mr_rand(&rng), max = 1000, i, k;
		int far = round % 5 == 0;

		memset(seen, 0, sizeof(seen));
		mr_core_rx_newgen(&p, 3, start + 1000);
		for (i = 0; i < 300; i++) {
			__u32 n = max + 1 + below(far ? 300 : 3);
			int in_order;

			if (!below(3))
				n = max - below(260); /* late */
			in_order = n == (i ? max + 1 : 1000);
			if (!i)
				n = 1000, in_order = 1, max = 999;
			assert(mr_core_rx_pseq(&p, start + n) == !in_order);
			if (n > max)
				max = n;
			if (max - n < 256)
				seen[n] = 1;
			assert(p.max == start + max);
			for (k = 0; k < 256 && k <= max; k++)
				assert((p.vec[k / 64] >> (k & 63) & 1) == seen[max - k]);
		}
	}
}

/* What an ACK lacks becomes a repair, once; una never passes what is held back. */
static void ack_queues_exactly_what_is_lost(void)
{
	int round;

	for (round = 0; round < ROUNDS * 20; round++) {
		struct mr_tx_path p = { 0 };
		__u64 vec[4], before[4];
		__u32 flight = below(257), max, n, k, lost = 0, una, held = 0;
		int probe = !below(4);

		p.una = mr_rand(&rng);
		if (below(2))
			p.una = 0xffffffff - below(300);
		p.next = p.una + flight;
		p.idle_pseq = p.una - 1;
		p.tolerance = below(3) ? 0 : below(70);
		for (k = 0; k < 4; k++) {
			vec[k] = mr_rand(&rng) | (below(2) ? mr_rand(&rng) : 0);
			p.probed[k] = mr_rand(&rng) & mr_rand(&rng);
			before[k] = p.repair[k] = below(2) ? 0 : mr_rand(&rng);
		}
		if (!flight)
			continue;
		max = p.una + below(flight);
		vec[0] |= 1;
		una = p.una;
		n = max - una + 1;
		lost = mr_core_tx_ack(&p, max, vec, probe);
		for (k = 0; k < n; k++) { /* pseq max - k */
			int missing = !(vec[k / 64] >> (k & 63) & 1);
			int young = !probe && k < p.tolerance;
			__u32 slot = (max - k) & 255;

			if (missing && young)
				held = k + 1;
			if (missing && !young) {
				__u64 data = ~p.probed[slot / 64];

				assert(lost);
				before[slot / 64] |= data & 1ull << (slot & 63);
				lost--;
			}
		}
		assert(!lost);
		assert(!memcmp(before, p.repair, sizeof(before)));
		if (!held)
			assert(p.una == max + 1);
		else
			assert(!mr_before(max + 1 - held, p.una) && !mr_before(p.una, una));
		assert(!mr_core_tx_ack(&p, p.una - 1, vec, 0)); /* an older one */
	}
}

static void all_lost_is_every_slot_in_flight_but_those_of_probes(void)
{
	int round;

	for (round = 0; round < ROUNDS * 20; round++) {
		struct mr_tx_path p = { 0 };
		__u32 flight = below(257), k, count = 0, lost, data = 0;

		p.una = mr_rand(&rng);
		p.next = p.una + flight;
		for (k = 0; k < 4; k++)
			p.probed[k] = mr_rand(&rng);
		lost = mr_core_tx_all_lost(&p);
		for (k = 0; k < flight; k++) {
			__u32 slot = (p.next - flight + k) & 255;
			int probe = p.probed[slot / 64] >> (slot & 63) & 1;

			assert((p.repair[slot / 64] >> (slot & 63) & 1) == !probe);
			data += !probe;
		}
		for (k = 0; k < 4; k++)
			count += mr_popcount(p.repair[k]);
		assert(count == data && lost == data && p.una == p.next);
	}
}

/* Repairs that an ACK shows needless are cancelled, and none from before the generation's first. */
static void late_ack_cancels_exactly_what_arrived(void)
{
	int round;

	for (round = 0; round < ROUNDS * 20; round++) {
		struct mr_tx_path p = { 0 };
		__u64 vec[4], before[4];
		__u32 after = below(270), max, k, sent = below(2) ? below(300) : 100000;

		p.next = p.una = mr_rand(&rng);
		p.first = p.next - sent; /* so many transmissions in this generation */
		max = p.next - 1 - after;
		for (k = 0; k < 4; k++) {
			vec[k] = mr_rand(&rng);
			before[k] = p.repair[k] = mr_rand(&rng);
		}
		mr_core_tx_late(&p, max, vec);
		for (k = 0; k < 256; k++) { /* descriptor of pseq next - 1 - k */
			__u32 slot = (p.next - 1 - k) & 255, bit = k - after;
			int arrived = k >= after && k < sent && vec[bit / 64 & 3] >> (bit & 63) & 1;

			assert((p.repair[slot / 64] >> (slot & 63) & 1) ==
			       (arrived ? 0 : before[slot / 64] >> (slot & 63) & 1));
		}
	}
}

/* The slot that the next transmission takes is emptied before any other. */
static void first_repair_is_the_oldest(void)
{
	int round;

	for (round = 0; round < ROUNDS * 20; round++) {
		struct mr_tx_path p = { 0 };
		__u32 k;

		p.next = mr_rand(&rng);
		p.repair[below(4)] = mr_rand(&rng) & mr_rand(&rng) & mr_rand(&rng);
		p.repair[below(4)] |= 1ull << below(64);
		for (k = 0; k < 256; k++) {
			__u32 slot = (p.next + k) & 255;

			if (p.repair[slot / 64] >> (slot & 63) & 1)
				break;
		}
		assert(mr_core_first_repair(&p) == ((p.next + k) & 255));
		assert(mr_core_next_is_repair(&p) == !k);
	}
}

static void generations_compare_serially(void)
{
	int have;

	for (have = 0; have < 256; have++) {
		assert(mr_core_gen(have, have) == MR_GEN_CURRENT);
		assert(mr_core_gen(have, have + 1) == MR_GEN_NEW);
		assert(mr_core_gen(have, have + 64) == MR_GEN_NEW);
		assert(mr_core_gen(have, have + 65) == MR_GEN_STALE);
		assert(mr_core_gen(have, have + 127) == MR_GEN_STALE);
		assert(mr_core_gen(have, have - 1) == MR_GEN_PREVIOUS);
		assert(mr_core_gen(have, have - 2) == MR_GEN_STALE);
		assert(mr_core_gen(have, have - 127) == MR_GEN_STALE);
	}
}

static void pseq_far_ahead_of_the_newest_is_not_of_the_path(void)
{
	struct mr_rx_path p = { .max = 0xffffff00 };

	assert(!mr_core_rx_ahead(&p, p.max + 1));
	assert(!mr_core_rx_ahead(&p, p.max + 4096));
	assert(mr_core_rx_ahead(&p, p.max + 4097));
	assert(mr_core_rx_ahead(&p, p.max + (1u << 30)));
	assert(!mr_core_rx_ahead(&p, p.max - 5000));
}

static void only_full_size_packets_prove_a_path(void)
{
	assert(mr_core_is_proof(MR_DESC_FULL, 3072));
	assert(!mr_core_is_proof(MR_DESC_PROBE, 3072));
	assert(mr_core_is_proof(3072, 3072));
	assert(mr_core_is_proof(3072 | MR_DESC_AGAIN, 3072));
	assert(!mr_core_is_proof(3071, 3072));
	assert(!mr_core_is_proof(0 | MR_DESC_AGAIN, 1024));
}

static void brake_is_bounded(void)
{
	struct mr_tx_path p = { .cwnd = 200, .pace = 1000, .pace_max = 2000, .srtt_ns = 100000 };
	__u64 now = 1 << 20;
	int i;

	mr_core_brake(&p, now);
	assert(p.cwnd == 175 && p.pace == 1125);
	mr_core_brake(&p, now + 99999);
	assert(p.cwnd == 175 && p.pace == 1125);
	for (i = 1; i < 100; i++)
		mr_core_brake(&p, now + i * 100000ull);
	assert(p.pace <= 2000 && p.cwnd >= 7);
}

static void pace_catches_up_a_little_and_never_bursts(void)
{
	struct mr_tx_path p = { .pace = 4096 }; /* 250 MB/s */
	__u64 now = 1000000000;

	mr_core_pace(&p, now, 1024);
	assert(p.next_ns == now - MR_PACE_BURST_NS + 4096);
	p.next_ns = now + 5000;
	mr_core_pace(&p, now, 2048);
	assert(p.next_ns == now + 5000 + 8192);
	p.pace = 0;
	mr_core_pace(&p, now, 2048);
	assert(p.next_ns == now + 5000 + 8192);
}

static void round_trip_smooths_and_ignores_time_that_ran_backwards(void)
{
	struct mr_tx_path p = { 0 };

	mr_core_rtt(&p, 8000);
	assert(p.srtt_ns == 8000 && p.min_rtt_ns == 8000);
	mr_core_rtt(&p, 16000);
	assert(p.srtt_ns == 9000 && p.min_rtt_ns == 8000);
	mr_core_rtt(&p, 1000);
	assert(p.srtt_ns == 8000 && p.min_rtt_ns == 1000);
	mr_core_rtt(&p, 0x80000001);
	assert(p.srtt_ns == 8000);
	/* a queue that fills at once: a quarter of what was seen */
	mr_core_rtt(&p, 80000);
	assert(p.srtt_ns == 20000);
}

int main(void)
{
	rng = mr_seed();
#define RUN(test)            \
	do {                 \
		puts(#test); \
		test();      \
	} while (0)
	RUN(bit_tricks_equal_loops);
	RUN(stream_takes_each_psn_once_in_any_order);
	RUN(refusal_keeps_the_lowest_and_claims_nothing);
	RUN(vector_shows_what_arrived);
	RUN(ack_queues_exactly_what_is_lost);
	RUN(all_lost_is_every_slot_in_flight_but_those_of_probes);
	RUN(late_ack_cancels_exactly_what_arrived);
	RUN(first_repair_is_the_oldest);
	RUN(generations_compare_serially);
	RUN(pseq_far_ahead_of_the_newest_is_not_of_the_path);
	RUN(only_full_size_packets_prove_a_path);
	RUN(brake_is_bounded);
	RUN(pace_catches_up_a_little_and_never_bursts);
	RUN(round_trip_smooths_and_ignores_time_that_ran_backwards);
	return 0;
}
