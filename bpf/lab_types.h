/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The lab switch's registers. User space writes mr_lab_ports, mr_lab_planes and
 * mr_lab_rules (the rules' counters excepted); the switch writes the rest. A
 * plane's settings are plain words: a packet that passes while they change may
 * see some of the new ones, which no test can tell from having come earlier.
 */
#ifndef LAB_TYPES_H
#define LAB_TYPES_H

/* A host's interface on a plane: 02:4d:52:<plane>:<host, 16 bits>. */
#define LAB_MAC0 0x02
#define LAB_MAC1 0x4d
#define LAB_MAC2 0x52

#define LAB_MAX_IFINDEX 4096
#define LAB_MAX_PLANES 16
#define LAB_MAX_RULES 32
#define LAB_TICKS_PER_NS 1024 /* the virtual queues' clock; 64 bits hold 208 days of uptime */

enum lab_plane_flag {
	LAB_P_DOWN = 1,  /* everything on this plane is dropped */
	LAB_P_FAULT = 2, /* some random fault is set */
	LAB_P_RULES = 4, /* some rule of the script names this plane */
	LAB_P_QUEUE = 8, /* there is a rate, or more than one spine */
};

/* What a packet is, and what a rule asks for: all of its bits. */
enum lab_class {
	LAB_C_DATA = 1,
	LAB_C_ACK = 2,
	LAB_C_PROBE = 4,
	LAB_C_NAK = 8, /* an ACK too */
	LAB_C_LAST = 16,
	LAB_C_RETX = 32,
	LAB_C_IMM = 64,
};

enum lab_action {
	LAB_A_DROP = 1,
	LAB_A_CORRUPT = 2,
	LAB_A_DUPLICATE = 4,
	LAB_A_REORDER = 8,
};

/* By ifindex in the switch's namespace. */
struct lab_port {
	__u32 used;
	__u32 plane;
	__u32 host;
	__u32 id; /* plane * hosts + host: index of everything kept by port */
};

/* By plane. Probabilities are thresholds: an event happens when 32 random bits are below. */
struct lab_plane {
	__u64 seed;
	__u64 loss;      /* after a packet that was not lost */
	__u64 loss_next; /* after a packet that was lost */
	__u64 duplicate, corrupt, reorder;
	__u64 byte_cost; /* 2^-20 ticks a byte; 0: no rate */
	__u64 ecn_ticks; /* a queue that holds more than this marks */
	__u64 max_ticks; /* a queue that would hold more than this drops */
	enum lab_plane_flag flags;
	__u32 loss_ppb;    /* as asked for, for status: parts per 10^9 ... */
	__u32 burst_milli; /* ... and 1/1000 packets */
	__u32 reserved;
};

/* By port: the state of its random faults. Decisions depend on the seed, the port and its count. */
struct lab_random {
	__u64 count; /* IP packets drawn for since the fault was set */
	__u32 lost;  /* the last packet was lost */
	__u32 reserved;
};

/* By port and spine: what leaves the switch to the port's host by that spine. */
struct lab_queue {
	struct bpf_spin_lock lock; /* guards everything below; map never mapped */
	__u32 reserved;
	__u64 free_at; /* ticks: when the queue will have drained */
	__u64 packets, bytes, marked, dropped;
	__u64 peak_ticks;
};

struct lab_rule {
	enum lab_class match; /* all of them; 0 ends the list */
	enum lab_action action;
	__u32 planes; /* bit per plane */
	__u32 reserved;
	__u64 from, to; /* ordinals, from 1, of the matching packets it hits */
	__u64 seen;     /* matching packets so far */
	__u64 hits;
};

/* By port of entry, per CPU. */
struct lab_count {
	__u64 packets, bytes; /* arrived */
	__u64 flooded;        /* broadcast and multicast, sent to the plane's other ports */
	__u64 unknown;  /* dropped: no such destination on this plane, or shorter than Ethernet */
	__u64 down;     /* dropped: plane down */
	__u64 lost;     /* dropped: random loss */
	__u64 scripted; /* dropped: by a rule */
	__u64 corrupted, duplicated, reordered;
	__u64 queue_dropped, marked;
};

/* One entry: what the lab was made with, so that a later process finds it. */
struct lab_meta {
	__u64 version;
	__u64 seed;
	__u64 rate;  /* bit/s of one spine to one host; 0: not limited */
	__u64 ecn;   /* bytes */
	__u64 queue; /* bytes */
	__u32 hosts, planes, spines, mtu, queues, threaded, port, reserved;
};

#endif
