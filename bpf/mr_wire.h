/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The wire, version 1. docs/wire.md is the norm, this file and Go's package
 * wire/ follow it. All fields are big-endian; nothing here is padded by the
 * compiler.
 *
 *   Ethernet [802.1Q] | IPv4 or IPv6 | UDP | BTH | data header | op header | payload
 *   Ethernet [802.1Q] | IPv4 or IPv6 | UDP | BTH | ACK
 */
#ifndef MR_WIRE_H
#define MR_WIRE_H

#define MR_WIRE_VERSION 1
#define MR_UDP_PORT 4791 /* default; configurable */

/* BTH opcodes, from the manufacturer range (InfiniBand spec 1.7, 9.2.1). */
enum mr_opcode {
	MR_OP_FIRST = 0xC0,
	MR_OP_WRITE = 0xC0,
	MR_OP_SEND = 0xC1,         /* reserved: refused in this version */
	MR_OP_READ_REQUEST = 0xC2, /* reserved */
	MR_OP_READ_RESPONSE = 0xC3,
	MR_OP_ATOMIC_REQUEST = 0xC4,
	MR_OP_ATOMIC_RESPONSE = 0xC5,
	MR_OP_ACK = 0xD0,
	MR_OP_PROBE = 0xD1,
};

/* BTH.A: the receiver acknowledges this packet at once. */
#define MR_BTH_ACKREQ (1u << 31)
#define MR_PSN24 0xffffffu
#define MR_PKEY_DEFAULT 0xffff

enum mr_data_flag {
	MR_F_RETX = 0x01,   /* a retransmission */
	MR_F_LAST = 0x02,   /* last packet of its message */
	MR_F_IMM = 0x04,    /* an immediate header follows the RETH */
	MR_F_INT = 0x08,    /* an INT block follows (reserved) */
	MR_F_MORE = 0x10,   /* the sender has more to send after this */
	MR_F_CRC32C = 0x20, /* a CRC32C trailer is present (reserved) */
};

enum mr_ack_flag {
	MR_AF_PROBE = 0x01, /* answers a probe */
	MR_AF_INT = 0x08,   /* echoed INT block follows (reserved) */
};

/* Syndromes: AETH's NAK codes (InfiniBand spec 9.7.5.2.8), 0 is "none". */
enum mr_syndrome {
	MR_SYN_NONE = 0,
	MR_SYN_INVALID_REQUEST = 0x61,
	MR_SYN_REMOTE_ACCESS = 0x62,
	MR_SYN_REMOTE_OPERATION = 0x63,
};

/*
 * No padding, and fields read as words: headers lie at any address, which every machine
 * that runs this takes; plain "packed" would have clang read them byte by byte.
 */
#define MR_PACKED __attribute__((packed, aligned(4)))

struct mr_bth {
	__u8 opcode, flags; /* SE, M, Pad, TVer: 0 */
	__u16 pkey;
	__u32 qpn;  /* 8 reserved, 24 destination QPN */
	__u32 apsn; /* A, 7 reserved, low 24 bits of psn */
} MR_PACKED;        /* 12 */

/* First 32 bytes after the BTH of every data packet and probe. */
struct mr_dh {
	__u8 path, gen, flags;
	__u8 ver_ext; /* version 4 | units of 8 bytes after these 32: 4 */
	__u32 token;
	__u32 pseq;
	__u32 psn;             /* a probe: the psn that the sender gives next */
	__u32 ts;              /* sender's clock, ns */
	__u16 stream, backlog; /* backlog: log2 of bytes waiting, 0 = none or unknown */
	__u32 msn, offset;
} MR_PACKED;

struct mr_reth {
	__u64 addr;      /* of this packet's payload */
	__u32 rkey, len; /* len: of the whole message */
} MR_PACKED;             /* 16 */

struct mr_immh {
	__u32 imm;
	__u32 ordinal; /* of the receive that it completes */
} MR_PACKED;           /* 8 */

struct mr_ack {
	__u8 path, gen, flags;
	__u8 ver_ext;
	__u32 token;
	__u32 pseq_max; /* highest pseq arrived on this path */
	__u32 ts;       /* echoed, of the packet that this ACK answers */
	__u64 vec[4];   /* bit i of the 256 (bit i%64 of vec[i/64]): pseq_max - i arrived */
	__u16 stream;
	__u8 syndrome, reserved;
	__u32 psn_cum;        /* all below arrived */
	__u32 psn_limit;      /* the sender's psn stays below */
	__u32 nak_psn;        /* lowest refused psn; valid if syndrome != 0 */
	__u32 pkts, ce, dups; /* on this path and generation, cumulative */
	__u32 rate_hint; /* Mbit/s that the receiver gives this sender, 0 = no hint (reserved) */
	__u16 hint_epoch, reserved2;
	__u32 credit; /* receives posted so far: ordinals below are valid */
} MR_PACKED;          /* 88 */

#define MR_EXT_PROBE 0
#define MR_EXT_WRITE 2
#define MR_EXT_WRITE_IMM 3
#define MR_EXT_ACK 7
#define MR_VER_EXT(ext) (MR_WIRE_VERSION << 4 | (ext))

_Static_assert(sizeof(struct mr_bth) == 12, "BTH");
_Static_assert(sizeof(struct mr_dh) == 32, "data header");
_Static_assert(sizeof(struct mr_reth) == 16, "RETH");
_Static_assert(sizeof(struct mr_ack) == 32 + 8 * MR_EXT_ACK, "ACK");

#endif
