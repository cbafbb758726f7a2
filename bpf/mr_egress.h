/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What one interface's transmit ring holds of ours, and how much it may: a
 * bucket of frames over all connections. Pure functions like those of mr_core.h.
 * The reasons are in docs/adr/0004-transmit-rings.md.
 *
 * A driver drops what a full ring does not take. What is in flight says nothing
 * about the ring: on a long path almost all of it is in the network. So the ring's
 * level is estimated, from two sides:
 *  - A ring is first-in first-out. Once a packet that left at time t is
 *    acknowledged, nothing that left before t is in the ring. The ACK echoes t.
 *  - Between ACKs the ring is believed to drain as fast as it was seen to, but no more of
 *    it than two round trips bring: a ring whose ACKs stay out may have stopped, and a
 *    veth's does whenever its thread is not scheduled.
 * The level may reach `burst` frames. Before the first drop none of this runs: mr_tx and
 * mr_rx look at a bit of mr_pump.limited, which the tracing programs set, and the loader
 * where they do not run.
 */
#ifndef MR_EGRESS_H
#define MR_EGRESS_H

#define MR_EGRESSES 64           /* bits of mr_pump.held; interfaces beyond share the last */
#define MR_BURST 128             /* frames at first: half of a veth's or a virtio_net's ring */
#define MR_BURST_MIN 16          /* frames: what a driver gets at a time */
#define MR_BURST_MAX 4096        /* frames: as long as transmit rings are */
#define MR_BURST_EVERY 2048      /* frames without a drop, for a burst that is one frame larger */
#define MR_MARKS 64              /* a power of two */
#define MR_MARK_EVERY 8          /* frames at least */
#define MR_LEVEL 16              /* levels and rates are frames << 16 */
#define MR_DRAIN (1u << 16)      /* frames << 16 a 1024 ns: the first guess of how a ring drains */
#define MR_DRAIN_MIN (1u << 6)   /* a thousand frames a second */
#define MR_DRAIN_MAX (64u << 16) /* as good as no limit */
#define MR_SLACK_NS 20000        /* the peer acknowledges some packets later */
#define MR_HOLD_NS 20000         /* before a held egress is looked at again */
#define MR_LEARN_NS 1000000      /* the least time to measure over */
#define MR_PAUSE_NS 16000000ull  /* a longer time between two frames or ACKs measures nothing */
#define MR_SILENCE_NS 10000000   /* without any ACK: some more may leave */
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
	__u64 proven_ns;        /* what left before is in the ring no more */
	__u64 turn_ns;          /* when rtt_next became rtt_ns */
	__u32 rtt_ns, rtt_next; /* least round trip of the paths that are heard; 0: not known */
	__u64 pad2[5];
	/* 192: mr_tx, so the pump alone */
	__u32 active;         /* a drop was seen, or drops cannot be seen */
	__u32 burst, grown;   /* frames; sent, when it last changed */
	__u32 sent, proven;   /* frames ever; below that none is in the ring */
	__u32 asked, marked;  /* sent, at the last asking; at the last mark */
	__u32 head, tail;     /* of marks */
	__u32 from;           /* proven, at from_ns, where the measurement of drain began */
	__u64 from_ns, drain; /* frames << 16 a 1024 ns: how fast frames were seen to leave */
	__u64 level;          /* frames << 16 */
	/* 256 */
	__u64 at_ns, last_ns;   /* of level; of the last frame */
	__u64 dropped, drop_ns; /* as seen last; when it grew last */
	__u64 held;             /* times that the ring was found full enough */
	__u64 moved_ns;         /* when proven grew last */
	__u64 pad3[2];
	/* 320 */
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

/*
 * How fast the level sinks: a 32nd below what was seen right after a drop, then by and by
 * faster, up to an eighth above it, or a ring that became faster were never found out.
 */
static __always_inline __u64 mr_core_egress_rate(const struct mr_egress *e, __u64 now)
{
	__u64 calm_ms = (now - e->drop_ns) >> 20;

	if (calm_ms > 160)
		calm_ms = 160;
	return e->drain + e->drain * calm_ms / 1024 - e->drain / 32;
}

/* Brings the level up to date. */
static __always_inline void mr_core_egress_drain(struct mr_egress *e, __u64 now)
{
	__u64 proven_ns = e->proven_ns, gone, most, way;
	int i;

	if (now > e->at_ns) {
		gone = now - e->at_ns;
		if (gone > MR_PAUSE_NS)
			gone = MR_PAUSE_NS;
		gone = gone * mr_core_egress_rate(e, now) >> 10;
		e->level = e->level > gone ? e->level - gone : 0;
		e->at_ns = now;
	}
	if (e->head - e->tail > MR_MARKS)
		e->tail = e->head - MR_MARKS;
	for (i = 0; i < 4; i++) {
		struct mr_mark *m = &e->marks[e->tail & (MR_MARKS - 1)];

		if (e->tail == e->head || m->ns > proven_ns)
			break;
		if ((__s32)(m->sent - e->proven) > 0) {
			e->proven = m->sent;
			e->moved_ns = now;
		}
		e->tail++;
	}
	/* at most all that nothing is known of; at least what should have been heard of by now */
	most = (__u64)(e->sent - e->proven) << MR_LEVEL;
	way = ((2 * (__u64)e->rtt_ns + MR_SLACK_NS) * e->drain) >> 10;
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
	e->drain = MR_DRAIN;
	e->proven = e->sent - MR_BURST; /* it may be full */
	e->asked = e->sent;
	e->from = e->proven;
	e->from_ns = now;
	e->grown = e->sent;
	e->marked = e->sent - MR_MARK_EVERY;
	e->tail = e->head;
	e->level = 0;
	e->at_ns = now;
}

/* How fast frames leave the ring: what ACKs proved to have left, over a time. */
static __always_inline void mr_core_egress_measure(struct mr_egress *e, __u64 now)
{
	__u64 dt = e->moved_ns - e->from_ns, seen;

	if (e->moved_ns < e->from_ns + MR_LEARN_NS || e->proven == e->from)
		return;
	seen = ((__u64)(e->proven - e->from) << MR_LEVEL) / (dt >> 10);
	e->from = e->proven;
	e->from_ns = e->moved_ns;
	if (dt > MR_PAUSE_NS + 2 * (__u64)e->rtt_ns)
		return; /* nothing was sent for a while */
	if (e->drain < seen)
		e->drain = seen;
	else if (now - e->drop_ns < MR_PAUSE_NS + 2 * (__u64)e->rtt_ns)
		e->drain -= (e->drain - seen) / 8; /* it was full, so that is all that it gives */
	if (e->drain > MR_DRAIN_MAX)
		e->drain = MR_DRAIN_MAX;
	if (e->drain < MR_DRAIN_MIN)
		e->drain = MR_DRAIN_MIN;
}

/* Learns from what was dropped so far, `dropped` of all. */
static __always_inline void mr_core_egress_learn(struct mr_egress *e, __u64 now, __u64 dropped)
{
	if (dropped != e->dropped) {
		/* the ring was full a moment ago, whatever the estimate says */
		e->level = (__u64)e->burst << MR_LEVEL;
		if (now - e->drop_ns > MR_LEARN_NS) { /* else it is the same one */
			e->burst -= e->burst / 8;
			if (e->burst < MR_BURST_MIN)
				e->burst = MR_BURST_MIN;
		}
		e->dropped = dropped;
		e->drop_ns = now;
		e->grown = e->sent;
	}
	mr_core_egress_measure(e, now);
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
		/* it had no room: perhaps the ring is longer; but only where drops are seen */
		if (e->traced && e->burst < MR_BURST_MAX && e->sent - e->grown >= MR_BURST_EVERY) {
			e->grown = e->sent;
			e->burst++;
		}
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
	__u64 room = e->burst - e->burst / 4;
	__u32 open;

	mr_core_egress_drain(e, now);
	if (e->level <= room << MR_LEVEL)
		return 1;
	if (now < e->last_ns + MR_SILENCE_NS + 4 * (__u64)e->rtt_ns)
		return 0;
	/*
	 * Nothing is heard, so nothing will be proven: the network may be down, or it lost the lot.
	 * A quarter of the burst asks again, and no more, as the ring may have stopped.
	 */
	open = e->sent - room;
	if ((__s32)(open - e->proven) > 0) {
		e->from += open - e->proven; /* which is not seen to drain */
		e->proven = open;
	}
	e->level = room << MR_LEVEL;
	return 1;
}

#endif
