// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The bucket of an egress against a simulated ring: 256 frames, drained at a rate by a consumer
 * that may pause, then a way there and back with a fixed round trip. Time goes in steps of 100 ns.
 */
#include "native.h"

#include "mr_egress.h"

#define RING 256
#define STEP 100
#define FLIGHT (1 << 16) /* frames between the ring and their ACKs, a power of two */
#define START 1000000000ull
#define US 1000ull
#define MS 1000000ull

struct sim {
	/* what the case chooses */
	__u64 gap_ns, drain_ns, rtt_ns; /* sender's and consumer's time a frame */
	__u64 on_ns, off_ns; /* the consumer works and pauses in turn; off 0: never pauses */
	__u64 run_ns;
	int limited; /* by the bucket */
	/* what comes out */
	__u64 dropped, delivered;
};

static struct mr_egress e;
static __u64 ring_ts[RING], acked_at[FLIGHT], acked_ts[FLIGHT];
static __u8 ring_ask[RING];
static __u32 head, tail, ack_head, ack_tail;

/* ACKs that have come back by now. */
static void hear(const struct sim *s, __u64 now)
{
	for (; ack_tail != ack_head && acked_at[ack_tail % FLIGHT] <= now; ack_tail++)
		mr_core_egress_heard(&e, now, (__u32)acked_ts[ack_tail % FLIGHT], s->rtt_ns);
}

/* One frame leaves the ring; acknowledged when it asks, and every 8th, as a receiver does. */
static void leave(struct sim *s, __u64 now)
{
	static __u32 since;
	__u32 i = tail++ % RING;

	s->delivered++;
	if (!ring_ask[i] && ++since < 8)
		return;
	since = 0;
	acked_at[ack_head % FLIGHT] = now + s->rtt_ns;
	acked_ts[ack_head % FLIGHT] = ring_ts[i];
	ack_head++;
}

static int emit(struct sim *s, __u64 now, int held)
{
	__u32 ask = 0;

	if (s->limited && held && !mr_core_egress_open(&e, now))
		return 1;
	/* the tracing program has set the bit with the first drop */
	held = e.tx_local_drop && mr_core_egress_sent(&e, now, &ask);
	if (head - tail == RING) {
		s->dropped++;
		e.tx_local_drop++;
		return held;
	}
	ring_ts[head % RING] = now;
	ring_ask[head % RING] = ask;
	head++;
	return held;
}

static void simulate(struct sim *s)
{
	__u64 now, next_send = START, next_drain = START;
	int held = 0;

	head = tail = ack_head = ack_tail = 0;
	e = (struct mr_egress){ .ifindex = 1, .traced = 1 };
	for (now = START; now < START + s->run_ns; now += STEP) {
		hear(s, now);
		if (s->off_ns && (now - START) % (s->on_ns + s->off_ns) >= s->on_ns) {
			next_drain = now;
		} else {
			for (; next_drain <= now && tail != head; next_drain += s->drain_ns)
				leave(s, now);
			if (tail == head && next_drain < now)
				next_drain = now;
		}
		for (; next_send <= now; next_send += s->gap_ns)
			held = emit(s, now, held);
	}
	assert(ack_head - ack_tail < FLIGHT);
}

static void check(const char *what, struct sim s, double least, double most_dropped)
{
	struct sim free = s;
	double goodput;

	s.limited = 1;
	simulate(&s);
	simulate(&free);
	goodput = (double)s.delivered / (double)free.delivered;
	printf("%s: %.4f of the goodput without a limit; dropped %llu of %llu (without: %llu)\n",
	       what, goodput, (unsigned long long)s.dropped,
	       (unsigned long long)(s.delivered + s.dropped), (unsigned long long)free.dropped);
	fflush(stdout);
	assert(goodput >= least);
	assert((double)s.dropped <= RING + most_dropped * (double)(s.delivered + s.dropped));
}

static void an_egress_whose_drops_are_not_seen_is_held_at_the_burst(void)
{
	__u32 n = 1, ask = 0;

	e = (struct mr_egress){ .ifindex = 1, .rtt_ns = 5000 };
	while (!mr_core_egress_sent(&e, MS * 1000, &ask))
		n++;
	assert(n <= MR_BURST && ask);
}

static void a_drop_holds_at_once(void)
{
	__u32 ask = 0;

	e = (struct mr_egress){ .ifindex = 1, .traced = 1, .rtt_ns = 5000 };
	e.tx_local_drop = 1;
	assert(mr_core_egress_sent(&e, MS + 300, &ask) && ask);
	assert(!mr_core_egress_open(&e, MS + 1000));
}

static void an_acknowledged_packet_proves_that_all_before_has_left(void)
{
	__u32 ask = 0;

	a_drop_holds_at_once();
	mr_core_egress_heard(&e, MS + 6000, MS + 300, 5000);
	assert(mr_core_egress_open(&e, MS + 6000));
	assert(!mr_core_egress_sent(&e, MS + 6000, &ask));
}

static void an_echo_from_the_future_proves_nothing(void)
{
	a_drop_holds_at_once();
	mr_core_egress_heard(&e, MS + 6000, MS + 7000, 5000);
	assert(!e.proven_ns);
	assert(!mr_core_egress_open(&e, MS + 6000));
}

static void silence_opens_for_a_part_of_the_burst_only(void)
{
	__u32 n = 0, ask = 0;
	__u64 t = 2 * MS, end;

	a_drop_holds_at_once();
	while (!mr_core_egress_open(&e, t))
		t += MS;
	assert(t < 20 * MS);
	for (end = t + MS; t < end; t += US)
		while (mr_core_egress_open(&e, t) && !mr_core_egress_sent(&e, t, &ask))
			n++;
	/* and what two round trips of 5 us and the slack bring at the first guess */
	assert(n > 0 && n <= e.burst / 4 + 30);
}

static void rates_and_bursts_stay_within_bounds_whatever_comes(void)
{
	__u64 rng = 7, now = MS;
	__u32 i, ask;

	e = (struct mr_egress){ .ifindex = 1, .traced = 1 };
	for (i = 0; i < 2000000; i++) {
		ask = 0;
		now += mr_rand(&rng) % (mr_rand(&rng) % 5000 ? 4000 : 3000000000ull);
		if (!(mr_rand(&rng) % 50))
			e.tx_local_drop += mr_rand(&rng) % 16;
		if (!(mr_rand(&rng) % 8))
			mr_core_egress_heard(&e, now, (__u32)(now - mr_rand(&rng) % 100000),
					     mr_rand(&rng));
		mr_core_egress_sent(&e, now, &ask);
		mr_core_egress_open(&e, now);
		if (!e.active)
			continue;
		assert(e.burst >= MR_BURST_MIN && e.burst <= MR_BURST_MAX);
		assert(e.drain >= MR_DRAIN_MIN && e.drain <= MR_DRAIN_MAX);
		assert(e.sent - e.proven < 1u << 31);
	}
}

int main(void)
{
	an_egress_whose_drops_are_not_seen_is_held_at_the_burst();
	a_drop_holds_at_once();
	an_acknowledged_packet_proves_that_all_before_has_left();
	an_echo_from_the_future_proves_nothing();
	silence_opens_for_a_part_of_the_burst_only();
	rates_and_bursts_stay_within_bounds_whatever_comes();
	/* what is in flight is not what is in the ring: 5000 to 10 000 frames here */
	check("10 ms, faster ring",
	      (struct sim){
		      .gap_ns = 2000, .drain_ns = 1000, .rtt_ns = 10 * MS, .run_ns = 2000 * MS },
	      1, 0);
	check("10 ms, slower ring",
	      (struct sim){
		      .gap_ns = 1000, .drain_ns = 2000, .rtt_ns = 10 * MS, .run_ns = 4000 * MS },
	      0.95, 0.001);
	check("10 ms, pauses of 0.3 ms",
	      (struct sim){ .gap_ns = 2000,
			    .drain_ns = 500,
			    .rtt_ns = 10 * MS,
			    .on_ns = 10 * MS,
			    .off_ns = 300 * US,
			    .run_ns = 4000 * MS },
	      0.95, 1);
	/* no ACK can tell of a pause in time: the goodput is worth more than the drops */
	check("10 ms, pauses of 1 ms",
	      (struct sim){ .gap_ns = 2000,
			    .drain_ns = 500,
			    .rtt_ns = 10 * MS,
			    .on_ns = 10 * MS,
			    .off_ns = MS,
			    .run_ns = 4000 * MS },
	      0.95, 0.02);
	check("5 us, slower ring",
	      (struct sim){
		      .gap_ns = 500, .drain_ns = 1000, .rtt_ns = 5 * US, .run_ns = 1000 * MS },
	      0.95, 0.001);
	check("5 us, pauses of 3 ms",
	      (struct sim){ .gap_ns = 800,
			    .drain_ns = 500,
			    .rtt_ns = 5 * US,
			    .on_ns = 3 * MS,
			    .off_ns = 3 * MS,
			    .run_ns = 1000 * MS },
	      0.9, 0.001);
	return 0;
}
