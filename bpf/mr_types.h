/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The device's registers: what the maps hold. Host byte order. Laid out in
 * 64-byte lines by writer.
 *
 * Locking rule. Everything in struct mr_conn below `lock` changes only under
 * that lock (mr_tx, mr_rx on any number of CPUs, mr_ctl); what stands above the
 * line "control" is written by user space only while the connection is not open.
 * mr_path.desc belongs to the connection too: written by mr_tx under the lock,
 * read by mr_tx and mr_rx under the lock. mr_reqs belongs to the pump alone (one
 * pump a connection) and needs no lock. Nothing is called under the lock: look up
 * first. mr_qpage is mapped into the application, which is not trusted: read each
 * word once, validate the copy; what the kernel side mirrors there it stores
 * under the lock so that it never runs backwards.
 */
#ifndef MR_TYPES_H
#define MR_TYPES_H

#define MR_MAX_CONNS 4096 /* upper bound; the maps are sized at load */
#define MR_RING \
	(2 * MR_MAX_CONNS) /* each connection once, and the one that mr_tx holds once more */
#define MR_MAX_PATHS 32
#define MR_PATH_RING 256   /* descriptors a path = bits of an ACK's vector */
#define MR_PATH_WINDOW 248 /* data in flight a path; the rest is for probes */
#define MR_PSN_WINDOW 8192
#define MR_PSN_LIMIT (MR_PSN_WINDOW - 64)
#define MR_PSN_WORDS (MR_PSN_WINDOW / 64)
#define MR_SQ_DEPTH 128
#define MR_RQ_DEPTH 128
#define MR_BLOCK 65536 /* bytes a block of a memory region */
#define MR_ACK_EVERY 8 /* packets a path without an ACK, at most */
/* What a peer may say at most: docs/wire.md section 6. */
#define MR_GEN_AHEAD 64              /* generations beyond the one that we have */
#define MR_PSEQ_AHEAD 4096           /* pseqs beyond the newest seen */
#define MR_LIMIT_AHEAD MR_PSN_WINDOW /* psn_limit beyond psn_cum */
#define MR_CREDIT_AHEAD MR_RQ_DEPTH  /* credit beyond the ordinals used */

enum mr_conn_state {
	MR_CONN_FREE = 0,
	MR_CONN_OPEN = 1,
	MR_CONN_ERROR = 2, /* accepts and sends nothing any more */
};

enum mr_path_state {
	MR_PATH_ACTIVE = 0,
	MR_PATH_SUSPECT = 1, /* probed only; its repairs go by other paths */
	MR_PATH_DOWN = 2,    /* not even probed: no route or carrier */
};

enum mr_access {
	MR_ACCESS_LOCAL_WRITE = 1, /* ibv_access_flags */
	MR_ACCESS_REMOTE_WRITE = 2,
	MR_ACCESS_REMOTE_READ = 4,
};

/* Work that a send queue entry can ask for; more verbs take further numbers. */
enum mr_wr_op {
	MR_WR_WRITE = 0,
	MR_WR_WRITE_IMM = 1,
};

/* Why mr_tx stopped a connection: ibv_wc_status of the request that it stopped at. */
enum mr_fault {
	MR_FAULT_NONE = 0,
	MR_FAULT_LOC_PROT = 4,  /* IBV_WC_LOC_PROT_ERR: lkey, bounds */
	MR_FAULT_LOC_QP_OP = 2, /* IBV_WC_LOC_QP_OP_ERR: opcode */
};

/* One transmission: what this pseq carried. len: bytes of payload, or one of the three below. */
struct mr_desc {
	__u32 psn;
	__u32 offset;
	__u16 len;
	__u16 slot; /* in mr_reqs */
};
#define MR_DESC_PROBE 0xffff
#define MR_DESC_FULL 0xfffe  /* a full-size probe */
#define MR_DESC_AGAIN 0x8000 /* with the length of data: lost here before, and sent here again */

/* Pool entry of one path: how its packets look, and what is under way. Map mr_path. */
struct mr_path {
	/* control: written by user space */
	__u8 tmpl[64]; /* L2 and L3 headers, lengths and IPv4 checksum 0 */
	__u32 peer[4]; /* network byte order; IPv4 as ::ffff:a.b.c.d */
	__u32 local[4];
	__u32 ifindex;
	__u32 l3_sum;     /* IPv4: sum of the header with length and checksum 0 */
	__u32 pseudo_sum; /* addresses and protocol */
	__u8 l3_off, l4_off, v6, pad;
	__u32 vlan; /* VID that received packets must carry; 0: none */
	__u32 pad2[3];
	/* 128 */
	struct mr_desc desc[MR_PATH_RING];
};

/* The sender's half of a path. */
struct mr_tx_path {
	__u32 next;      /* pseq of the next transmission */
	__u32 una;       /* oldest unresolved pseq; next - una <= MR_PATH_WINDOW (+ probes) */
	__u32 cwnd;      /* packets; control, braked by mr_rx */
	__u32 pace;      /* ns a KiB, 0 = not paced; control, braked by mr_rx */
	__u64 next_ns;   /* nothing leaves before */
	__u64 repair[4]; /* bit pseq % 256: that descriptor is lost and waits for its repair */
	__u8 gen, state; /* enum mr_path_state */
	__u8 tolerance;  /* packets: a gap younger than this is reordering */
	__u8 one;        /* one repair may pass a closed window (set by ACK and timeout) */
	__u16 sport;
	__u8 acked_gen; /* newest generation that the peer has acknowledged */
	__u8 egress;    /* of its interface, in mr_egress; control, before the connection opens */
	/* 64: written by mr_rx when an ACK comes in */
	__u64 last_ack_ns;
	__u64 brake_ns;
	__u32 srtt_ns, min_rtt_ns;
	__u32 acks;                          /* ACKs of this path, all generations */
	__u32 peer_pkts, peer_ce, peer_dups; /* the ACK's counts, this generation */
	__u32 lost;                          /* transmissions found missing */
	__u32 ce;                            /* marks reported, all generations */
	__u32 pace_max;  /* the brake goes no further: control wrote half of it */
	__u32 idle_pseq; /* mr_tx's own last probe: it left right behind the data */
	__u32 heard;     /* highest pseq of this generation that an ACK has shown arrived */
	__u32 proofs;    /* full-size packets that an ACK has shown arrived while not active */
	/* 128: written by mr_tx */
	__u64 sent_bytes; /* frames' bytes */
	__u32 sent, retx, probes;
	__u32 first;     /* pseq that this generation began with; control */
	__u64 probed[4]; /* bit pseq % 256: that descriptor is a probe, which is never repaired */
	__u64 pad5;
	/* 192 */
};

/* The receiver's half of a path. */
struct mr_rx_path {
	__u32 max; /* highest pseq */
	__u32 pkts, ce, dups;
	__u64 vec[4];    /* as in struct mr_ack, host order */
	__u8 gen, since; /* since: packets since the last ACK */
	__u16 sport;     /* the peer's, as last seen */
	__u32 ooo;       /* arrived out of the path's order */
	__u32 pad[2];
};

/* The receiver's half of an ordered stream. Stream 0 is all there is in version 1. */
struct mr_rx_stream {
	__u32 cum;      /* all below arrived */
	__u32 nak_psn;  /* lowest refused */
	__u32 syndrome; /* of nak_psn; 0 = none */
	__u32 pad;
	__u64 claimed[MR_PSN_WORDS];
	__u64 arrived[MR_PSN_WORDS];
};

/* Map mr_conn. */
struct mr_conn {
	/* control */
	__u32 qpn, peer_qpn;
	__u32 rx_token, tx_token; /* host order of the wire's field */
	__u32 pd;
	__u32 path_base; /* first entry in mr_path */
	__u16 payload;
	__u8 npaths;
	__u8 checksum; /* 0: no UDP checksum, agreed by both ends */
	__u8 tos;      /* DSCP << 2 | ECT(0) */
	__u8 pad0[3];
	__u32 pad1[8];
	/* 64 */
	struct bpf_spin_lock lock;
	__u32 state; /* enum mr_conn_state; mr_ctl */
	/* the sender's half of stream 0 */
	__u32 psn_next, psn_cum, psn_limit;
	__u32 msn_next;        /* requests copied out of the queue so far */
	__u32 cur_off;         /* next byte of request msn_next - 1, if busy */
	__u32 cur_len;         /* its bytes */
	__u32 busy;            /* request msn_next - 1 has packets to send */
	__u32 credit, ordinal; /* receives the peer has posted; that were used */
	__u32 nak_psn, nak_syndrome;
	__u32 rr;      /* path to try first */
	__u32 repairs; /* bit i: path i has bits in repair[] */
	__u32 probe;   /* bit i: control wants a probe on path i */
	/* 128 */
	__u32 active;     /* bit i: tx[i].state is MR_PATH_ACTIVE */
	__u32 unasked;    /* bit i: the last packet on path i did not ask for an ACK */
	__u32 no_credit;  /* stalled for want of a receive */
	__u32 fault;      /* enum mr_fault */
	__u32 fault_psn;  /* of the first packet that could not be sent */
	__u32 probe_full; /* bit i: control wants a full-size probe on path i */
	__u32 held;       /* bit i: a probe waits until others have taken path i's next repair */
	__u32 exile; /* bit i: path i's next repair was lost there twice: it leaves by another */
	__u32 cut;   /* bytes of payload that a message is cut into; <= payload */
	__u32 pad2[7];
	/* 192 */
	struct mr_tx_path tx[MR_MAX_PATHS];
	struct mr_rx_path rx[MR_MAX_PATHS];
	struct mr_rx_stream rxs;
};

/* One request in flight, copied and checked. Map mr_req: one struct mr_reqs a connection. */
struct mr_req {
	__u64 local; /* offset in its region */
	__u64 raddr;
	__u32 lkey, rkey, len, imm;
	__u32 msn, ordinal;
	__u8 op, flags;
	__u16 stream;
	__u32 pad;
};
struct mr_reqs {
	struct mr_req req[MR_SQ_DEPTH];
};

/* Send queue entry, written by the application. */
struct mr_wqe {
	__u64 laddr, raddr;
	__u32 lkey, rkey, len, imm;
	__u8 op, flags;
	__u16 stream;
	__u32 pad;
};

#define MR_VALID(n) (1ull << 32 | (__u32)(n))

/* Request n is complete once valid == MR_VALID(n) and tx_cum has passed last_psn. */
struct mr_scqe {
	__u64 valid;
	__u32 last_psn, pad;
};

/* Receive n is complete once valid == MR_VALID(n) and rx_cum has passed psn. */
struct mr_rcqe {
	__u64 valid;
	__u32 psn, imm, len;
	__u16 stream, pad;
};

/* A connection's queues, mapped into its application. Map-in-map mr_qp, one entry each. */
struct mr_qpage {
	/* the application's line */
	__u32 sq_tail;              /* requests posted so far */
	__u32 rq_tail;              /* receives posted so far: the peer's credit */
	__u32 arm_send, arm_recv;   /* 1: wake me; taken by atomic exchange */
	__u32 wait_send, wait_recv; /* ... when request / receive n is complete */
	__u32 pad0[10];
	/* mirrored under the connection's lock */
	__u32 tx_cum, rx_cum;
	__u32 nak_psn, nak_syndrome;
	__u32 fault, fault_msn;
	__u32 pad1[10];
	struct mr_wqe sq[MR_SQ_DEPTH];
	struct mr_scqe scq[MR_SQ_DEPTH];
	struct mr_rcqe rcq[MR_RQ_DEPTH];
};

/* Map mr_region, indexed by rkey >> 8. */
struct mr_region {
	__u32 key; /* index << 8 | generation; 0: free */
	__u32 pd;
	__u32 access; /* enum mr_access */
	__u32 pad;
	__u64 base, len;
};

/*
 * A pump: the ready ring of connections that may have something to send, and
 * whether it sleeps. Map mr_pump, mapped. A producer (Post, mr_rx) sets
 * ready[slot] by atomic exchange; whoever found 0 there adds 1 to tail and
 * exchanges slot + 1 into ring[old tail % MR_RING]. Then it exchanges
 * `sleeping` with 0, and who found 1 wakes the pump.
 */
struct mr_pump {
	/* mr_tx */
	__u32 head, burst;
	__u64 sent, idle; /* runs of mr_tx that emitted a packet; that found the ring empty */
	__u64 paced_ns;   /* when the paced connection met last may go on */
	__u64 now_ns;     /* the clock as read last, 0 after a pause: see mr_tx_now */
	__u64 held;       /* bit i: the ring of egress i is full enough, see mr_egress.h */
	__u64 held_seen;  /* bits of held that were looked at in this round */
	__u64 pad0;
	/* producers */
	__u32 tail, pad1[15];
	/* the pump's thread sets, producers clear */
	__u32 sleeping;
	__u32 transient; /* failures of mr_tx's call that were waited out; the pump's thread */
	__u64 limited;   /* bit i: a drop on egress i was seen, or none can be; see mr_egress.h */
	__u32 pad2[12];
	__u32 ready[MR_MAX_CONNS];
	__u32 ring[MR_RING];
};

/* Ring buffer mr_event: a connection's consumer is to look at its queues. */
struct mr_event {
	__u32 slot, qpn;
};

/* Commands of mr_ctl: the frame that BPF_PROG_RUN gives it. */
enum mr_ctl_op {
	MR_CTL_STATE = 1,   /* conn.state = value */
	MR_CTL_PATH = 2,    /* cwnd, pace, tolerance of path */
	MR_CTL_PROBE = 3,   /* probe |= value, probe_full |= full (masks of paths) */
	MR_CTL_SUSPECT = 4, /* path.state = value; all unresolved is queued as repairs */
	MR_CTL_REROLL = 5,  /* sport = value, gen + 1; all unresolved is queued as repairs */
	MR_CTL_TIMEOUT = 6, /* all unresolved of path is lost, one = 1 */
	MR_CTL_KICK = 7,    /* mark ready, wake the pump */
	MR_CTL_CUT = 8,     /* cut = value, if no request has been begun */
};
struct mr_ctl {
	__u32 op, slot, qpn, path;
	__u32 value, cwnd, pace, tolerance;
	__u32 full;
	__u8 pad[28]; /* at least an Ethernet header */
};
enum mr_ctl_result {
	MR_CTL_OK = 1,
	MR_CTL_NO_CONN = 2, /* slot out of range or another qpn there */
	MR_CTL_BAD = 3,
	MR_CTL_LIMIT = 4, /* too far beyond what the peer has heard; too late for another cut */
};

/*
 * Counters, per CPU. Names follow mlx5's hw_counters and rxe's where they have
 * one. Each reason to refuse a packet has its own. Map mr_counter, one entry.
 */
struct mr_counters {
	/* traffic */
	__u64 sent_pkts, sent_bytes; /* data, first and repeated; payload bytes */
	__u64 rcvd_pkts, rcvd_bytes; /* data packets placed; payload bytes */
	__u64 sent_acks, rcvd_acks;
	__u64 sent_probes, rcvd_probes;
	__u64 retransmits;
	__u64 rx_write_requests; /* messages whose last packet was placed */
	/* order, loss, congestion */
	__u64 out_of_sequence;            /* pseq was not the next of its path */
	__u64 duplicate_request;          /* psn had arrived already */
	__u64 duplicate_busy;             /* psn is being placed by another CPU: dropped, no ACK */
	__u64 packet_seq_err;             /* transmissions that an ACK showed lost */
	__u64 prev_generation;            /* late data of the previous generation: placed */
	__u64 np_ecn_marked_roce_packets; /* CE seen on data */
	__u64 rp_cnp_handled;             /* ACKs that reported new marks */
	__u64 local_ack_timeout_err;      /* paths timed out (by control) */
	__u64 stale_ack;                  /* ACK of an older generation: its psn counted */
	__u64 pseq_ahead;                 /* pseq too far ahead: placed, but not of its path */
	/* refused: not authenticated, dropped */
	__u64 drop_truncated;
	__u64 drop_length; /* UDP or IP length disagrees with the frame */
	__u64 drop_opcode;
	__u64 drop_unknown_qp;
	__u64 drop_token;
	__u64 drop_path;
	__u64 drop_address;
	__u64 drop_checksum;
	__u64 drop_version;
	__u64 drop_header;  /* extension length or flags that the opcode may not have */
	__u64 drop_payload; /* longer than agreed */
	__u64 drop_generation;
	__u64 drop_window; /* psn beyond the limit */
	__u64 drop_stream;
	__u64 drop_closed;      /* connection in error */
	__u64 drop_ack_invalid; /* acknowledges what was never sent */
	__u64 drop_place;       /* the region vanished while it was written */
	__u64 drop_turn;        /* no room to turn the frame into its ACK */
	__u64 drop_nonlinear;   /* the driver cut the frame into pieces */
	__u64 drop_vlan;        /* other VID than its plane's */
	/* refused: authenticated, answered by a NAK */
	__u64 nak_rkey; /* no such region, old generation of the key */
	__u64 nak_pd;
	__u64 nak_access;
	__u64 nak_bounds;
	__u64 nak_no_receive; /* ordinal of a receive that was not posted */
	__u64 rcvd_naks;
	/* the pump */
	__u64 tx_paced;     /* runs of mr_tx that found every open path paced */
	__u64 tx_no_credit; /* a request waited for a posted receive */
	__u64 tx_fault;     /* a request that mr_tx refused */
	__u64 tx_skipped;   /* repairs that were no longer needed */
	__u64 tx_error;     /* a frame could not be built */
	__u64 bad_ready;    /* nonsense in the ready ring */
	__u64 events_lost;  /* ring buffer mr_event was full; the next ACK tries again */
	__u64 tx_held;      /* runs of mr_tx that found a transmit ring full enough */
	/* the drivers, by the tracing programs */
	__u64 tx_local_drop;  /* frames that a full transmit ring did not take */
	__u64 ack_local_drop; /* ACKs, likewise */
};

#endif
