/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What one interface's transmit ring holds of ours, and how much it may: a
 * bucket of frames over all connections. Pure functions like those of mr_core.h.
 *
 * A driver drops what a full ring does not take. What is in flight says nothing
 * about the ring: on a long path almost all of it is in the network. So the ring's
 * level is estimated, from two sides:
 *  - A ring is first-in first-out. Once a packet that left at time t is
 *    acknowledged, nothing that left before t is in the ring. The ACK echoes t.
 *  - Between ACKs the ring is believed to drain at a rate. That holds only for as
 *    long as an ACK can be on its way, two round trips: a ring whose ACKs stay out
 *    may have stopped, and a veth's does whenever its thread is not scheduled.
 * The level may reach `burst` frames. Rate and burst are learnt from drops; before the
 * first drop none of this runs: mr_tx and mr_rx look at a bit of mr_pump.limited, which the
 * tracing programs set, and the loader where they do not run.
 */
#ifndef MR_EGRESS_H
#define MR_EGRESS_H

#define MR_EGRESSES 64                /* bits of mr_pump.held; interfaces beyond share the last */
#define MR_BURST 128                  /* frames: half of a veth's or a virtio_net's ring */
#define MR_BURST_MIN 16               /* frames: what a driver gets at a time */
#define MR_MARKS 64                   /* a power of two */
#define MR_MARK_EVERY 8               /* frames at least */
#define MR_LEVEL 16                   /* levels and rates are frames << 16 */
#define MR_RATE_MAX (64u << MR_LEVEL) /* frames a 1024 ns: as good as no limit */
#define MR_RATE_MIN (1u << MR_LEVEL >> 10)
#define MR_SLACK_NS 20000        /* the peer acknowledges some packets later */
#define MR_HOLD_NS 20000         /* before a held egress is looked at again */
#define MR_LEARN_NS 1000000      /* rates change at most this often */
#define MR_DRAIN_NS 16000000ull  /* times are cut off at this */
#define MR_BEST (1u << MR_LEVEL) /* frames a 1024 ns: the first guess of what leaves */
#define MR_SILENCE_NS 10000000   /* without any ACK: some more may leave */
#define MR_SURE_NS 1000000000ull /* without a drop: the rate grows fast again */
#define MR_RTT_NS 50000000 /* the least round trip is that of the last one or two such times */

/* All frames before number `sent` left before `ns`. */
struct mr_mark {
	__u64 ns;
	__u32 sent, pad;
};

/* Map mr_egress, mapped: one interface that packets leave by. */
struct mr_egress {
	/* the loader */
	__u32 ifindex; /* 0: not used */
	__u32 traced;  /* the tracing programs run: drops are seen */
	__u64 pad0[7];
	/* 64: the tracing programs, any CPU, by atomic add; frames */
	__u64 tx_sent, tx_local_drop;   /* redirected there: taken by the driver, dropped by it */
	__u64 ack_sent, ack_local_drop; /* by XDP_TX */
	__u64 pad1[4];
	/* 128: mr_rx, any CPU; each word only guides */
	__u64 heard_ns;         /* when the last ACK came in */
	__u64 proven_ns;        /* what left before is in the ring no more */
	__u64 turn_ns;          /* when rtt_next became rtt_ns */
	__u32 rtt_ns, rtt_next; /* least round trip of the paths that are heard; 0: not known */
	__u64 pad2[4];
	/* 192: mr_tx, so the pump alone */
	__u32 active;         /* a drop was seen, or drops cannot be seen */
	__u32 burst;          /* frames */
	__u32 sent, proven;   /* frames ever; below that none is in the ring */
	__u32 asked, marked;  /* sent, at the last asking; at the last mark */
	__u32 head, tail;     /* of marks */
	__u64 level, rate;    /* frames << 16; and a 1024 ns */
	__u64 at_ns, last_ns; /* of level; of the last frame */
	/* 256 */
	__u64 calm_ns;           /* when a frame went into a ring that was known to be empty */
	__u64 dropped, drop_ns;  /* as seen last; when it grew last */
	__u64 learn_ns, grow_ns; /* last change of the rate, of the burst */
	__u64 held;              /* times that the ring was found full enough */
	__u32 from, fault;       /* proven, at from_ns; dropped since learn_ns */
	__u64 best;              /* frames << 16 a 1024 ns: the most that was seen to leave */
	/* 320 */
	__u64 from_ns; /* the ACK that the next measurement begins at */
	__u64 pad3[7];
	/* 384 */
	struct mr_mark marks[MR_MARKS];
};

/*
 * An ACK came in: it echoes when its packet left, and its path's least round trip is
 * min_rtt. Any CPU.
 */
static __always_inline void mr_core_egress_heard(struct mr_egress *e, __u64 now, __u32 ts,
						 __u32 min_rtt)
{
	__u32 age = (__u32)now - ts;

	if ((__s32)age < 0)
		return; /* from the future: not ours */
	e->heard_ns = now;
	if (e->proven_ns < now - age)
		e->proven_ns = now - age;
	if (now - e->turn_ns > MR_RTT_NS) {
		e->rtt_ns = e->rtt_next;
		e->rtt_next = 0;
		e->turn_ns = now;
	}
	if (!e->rtt_next || min_rtt < e->rtt_next)
		e->rtt_next = min_rtt;
	if (!e->rtt_ns || min_rtt < e->rtt_ns)
		e->rtt_ns = min_rtt;
}

/* Brings the level up to date. */
static __always_inline void mr_core_egress_drain(struct mr_egress *e, __u64 now)
{
	__u64 heard = e->heard_ns, proven_ns = e->proven_ns, until, gone, most, way;
	__u32 rtt = e->rtt_ns;
	int i;

	if (heard < e->calm_ns)
		heard = e->calm_ns;
	/* before anything was heard only an ACK tells */
	until = rtt ? heard + 2 * (__u64)rtt + MR_SLACK_NS : 0;
	if (until > now)
		until = now;
	if (until > e->at_ns) {
		gone = until - e->at_ns;
		if (gone > MR_DRAIN_NS)
			gone = MR_DRAIN_NS;
		gone = gone * e->rate >> 10;
		e->level = e->level > gone ? e->level - gone : 0;
	}
	if (now > e->at_ns)
		e->at_ns = now;
	if (e->head - e->tail > MR_MARKS)
		e->tail = e->head - MR_MARKS;
	for (i = 0; i < 4; i++) {
		struct mr_mark *m = &e->marks[e->tail & (MR_MARKS - 1)];

		if (e->tail == e->head || m->ns > proven_ns)
			break;
		if ((__s32)(m->sent - e->proven) > 0)
			e->proven = m->sent;
		e->tail++;
	}
	/* at most all that nothing is known of; at least what should have been heard of by now */
	most = (__u64)(e->sent - e->proven) << MR_LEVEL;
	way = ((2 * (__u64)rtt + MR_SLACK_NS) * e->best) >> 10;
	if (e->level > most)
		e->level = most;
	else if (e->level + way < most)
		e->level = most - way;
}

/* The bucket begins to count. */
static __always_inline void mr_core_egress_begin(struct mr_egress *e, __u64 now)
{
	e->active = 1;
	e->burst = MR_BURST;
	e->rate = MR_RATE_MAX;
	e->best = MR_BEST;
	e->proven = e->sent - MR_BURST; /* it may be full */
	e->asked = e->sent;
	e->from = e->proven;
	e->from_ns = 0;
	e->marked = e->sent - MR_MARK_EVERY;
	e->tail = e->head;
	e->level = 0;
	e->at_ns = now;
	e->learn_ns = now;
	e->grow_ns = now;
}

/* How fast frames leave the ring: what was proven from one ACK to a later one. */
static __always_inline void mr_core_egress_measure(struct mr_egress *e)
{
	__u64 heard = e->heard_ns, dt = heard - e->from_ns, seen;

	if (heard < e->from_ns + MR_LEARN_NS || e->proven == e->from)
		return;
	seen = ((__u64)(e->proven - e->from) << MR_LEVEL) / (dt >> 10);
	e->from = e->proven;
	e->from_ns = heard;
	if (dt > MR_DRAIN_NS)
		return; /* nothing was sent for a while */
	if (seen > MR_RATE_MAX)
		seen = MR_RATE_MAX;
	if (e->best < seen)
		e->best = seen;
	else if (e->drop_ns + MR_DRAIN_NS > heard)
		e->best -= (e->best - seen) / 8;
}

/* Learns from what was dropped so far, `dropped` of all. */
static __always_inline void mr_core_egress_learn(struct mr_egress *e, __u64 now, __u64 dropped)
{
	__u64 calm = now - e->drop_ns;
	__u32 slow = 1024;

	if (dropped != e->dropped) {
		/* the ring was full a moment ago, whatever the estimate says */
		e->dropped = dropped;
		e->drop_ns = now;
		e->grow_ns = now;
		e->fault = 1;
		if (e->best && e->rate > e->best)
			e->rate = e->best;
		if (e->level < (__u64)e->burst << MR_LEVEL)
			e->level = (__u64)e->burst << MR_LEVEL;
	}
	mr_core_egress_measure(e);
	if (now - e->learn_ns < MR_LEARN_NS)
		return;
	e->learn_ns = now;
	if (e->fault) {
		e->fault = 0;
		e->rate -= e->rate / 16;
		if (e->rate < MR_RATE_MIN)
			e->rate = MR_RATE_MIN;
		e->burst -= e->burst / 8;
		if (e->burst < MR_BURST_MIN)
			e->burst = MR_BURST_MIN;
		return;
	}
	/* the rate matters only where a burst has drained before any ACK can tell of it */
	if (e->rtt_ns * e->best >> (10 + MR_LEVEL) < e->burst)
		slow = 4;
	else if (calm > MR_SURE_NS)
		slow = 16;
	else if (calm > MR_SURE_NS / 8)
		slow = 256;
	e->rate += e->rate / slow + 1;
	if (e->rate > MR_RATE_MAX)
		e->rate = MR_RATE_MAX;
	if (now - e->grow_ns > MR_DRAIN_NS) {
		e->grow_ns = now;
		if (e->burst < MR_BURST)
			e->burst++;
	}
}

/*
 * A frame leaves. Returns 1 if the egress is full enough with it: nothing more then until
 * mr_core_egress_open. *ask is set when its ACK is wanted as a proof.
 */
static __always_inline int mr_core_egress_sent(struct mr_egress *e, __u64 now, __u32 *ask)
{
	__u64 dropped = e->tx_local_drop;
	struct mr_mark *m;
	__u32 gap;
	int full;

	if (!e->active)
		mr_core_egress_begin(e, now);
	if (e->proven_ns >= e->last_ns)
		e->calm_ns = now; /* all before has left, so the ring is empty */
	mr_core_egress_drain(e, now);
	mr_core_egress_learn(e, now, dropped);
	e->last_ns = now;
	e->level += 1 << MR_LEVEL;
	full = e->level >= (__u64)e->burst << MR_LEVEL;
	/* the more is under way the rarer, so that a ring of marks lasts for all of it */
	gap = (e->sent - e->proven) / 16;
	if (gap < MR_MARK_EVERY)
		gap = MR_MARK_EVERY;
	if (e->sent - e->marked >= gap || (full && e->head == e->tail)) {
		e->marked = e->sent;
		m = &e->marks[e->head & (MR_MARKS - 1)];
		m->ns = now;
		m->sent = e->sent;
		e->head++;
	}
	e->sent++;
	if (full) {
		e->held++;
		e->asked = e->sent;
		*ask = 1;
		return 1;
	}
	/* paths share the ring, and each is acknowledged every 8th packet only */
	if (e->sent - e->asked >= e->burst / 4) {
		e->asked = e->sent;
		*ask = 1;
	}
	return 0;
}

/* May a held egress go on? Not for each single frame that leaves, or batches would have one. */
static __always_inline int mr_core_egress_open(struct mr_egress *e, __u64 now)
{
	__u64 quiet = MR_SILENCE_NS + 4 * (__u64)e->rtt_ns, heard = e->heard_ns;
	__u32 open;

	mr_core_egress_drain(e, now);
	if (e->level <= (__u64)(e->burst - e->burst / 4) << MR_LEVEL)
		return 1;
	if (heard < e->calm_ns)
		heard = e->calm_ns;
	if (heard < e->last_ns)
		heard = e->last_ns;
	if (now < heard + quiet)
		return 0;
	/*
	 * Nothing is heard, so nothing will be proven: the network may be down, or it lost the lot.
	 * A quarter of the burst asks again, and no more, as the ring may have stopped.
	 */
	open = e->sent - (e->burst - e->burst / 4);
	if ((__s32)(open - e->proven) > 0) {
		e->from += open - e->proven; /* which is not seen to drain */
		e->proven = open;
	}
	e->level = (__u64)(e->burst - e->burst / 4) << MR_LEVEL;
	return 1;
}

#endif
