/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the lab switch needs to know about a packet. */
#ifndef LAB_PARSE_H
#define LAB_PARSE_H

struct lab_vlan {
	__be16 tci, proto;
};

struct lab_pkt {
	void *l3;
	__u32 version; /* 4, 6, or 0: not IP */
	__u32 class;   /* enum lab_class; 0: not ours */
	__u32 hash;    /* of the 5-tuple, seeded */
};

/* Finaliser of MurmurHash3 (public domain): every input bit reaches every output bit. */
static __always_inline __u64 lab_mix(__u64 x)
{
	x ^= x >> 33;
	x *= 0xff51afd7ed558ccdULL;
	x ^= x >> 33;
	x *= 0xc4ceb9fe1a85ec53ULL;
	return x ^ x >> 33;
}

/* The class of a packet of ours, whose BTH starts at `bth`. */
static __always_inline __u32 lab_classify(const struct mr_bth *bth, void *end)
{
	const struct mr_ack *ack = (const void *)(bth + 1);
	const struct mr_dh *dh = (const void *)(bth + 1);
	__u32 class;

	if ((void *)(dh + 1) > end)
		return 0;
	switch (bth->opcode) {
	case MR_OP_WRITE:
		class = LAB_C_DATA;
		if (dh->flags & MR_F_LAST)
			class |= LAB_C_LAST;
		if (dh->flags & MR_F_RETX)
			class |= LAB_C_RETX;
		if (dh->flags & MR_F_IMM)
			class |= LAB_C_IMM;
		return class;
	case MR_OP_PROBE:
		return LAB_C_PROBE;
	case MR_OP_ACK:
		if ((void *)(ack + 1) > end)
			return 0;
		return ack->syndrome == MR_SYN_NONE ? LAB_C_ACK : LAB_C_ACK | LAB_C_NAK;
	default:
		return 0;
	}
}

/* Fills `pkt`, the hash only if asked to; a packet that is cut short is simply less than it claims to be. */
static __always_inline void lab_parse(struct ethhdr *eth, void *end, __u32 udp_port, bool hash,
				      __u64 seed, struct lab_pkt *pkt)
{
	__be16 proto = eth->h_proto;
	void *l3 = eth + 1, *l4;
	const __be16 *ports;
	__u64 flow, tuple;
	__u32 l4_proto;

	pkt->version = 0;
	pkt->class = 0;
	pkt->hash = 0;
	if (proto == bpf_htons(ETH_P_8021Q)) {
		const struct lab_vlan *vlan = l3;

		if ((void *)(vlan + 1) > end)
			return;
		proto = vlan->proto;
		l3 = (void *)(vlan + 1);
	}
	if (proto == bpf_htons(ETH_P_IP)) {
		const struct iphdr *ip = l3;

		if ((void *)(ip + 1) > end || ip->version != 4 || ip->ihl < 5)
			return;
		pkt->version = 4;
		flow = (__u64)ip->saddr << 32 | ip->daddr;
		l4_proto = ip->protocol;
		l4 = l3 + ip->ihl * 4;
		/* A fragment but the first has no ports: all of them take one way. */
		if (ip->frag_off & bpf_htons(0x3fff))
			l4_proto = 0;
	} else if (proto == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip6 = l3;
		const __u32 *addr = (const __u32 *)&ip6->saddr;

		if ((void *)(ip6 + 1) > end || ip6->version != 6)
			return;
		pkt->version = 6;
		flow = lab_mix((__u64)addr[0] << 32 | addr[1]) ^ ((__u64)addr[2] << 32 | addr[3]);
		flow = lab_mix(flow) ^ ((__u64)addr[4] << 32 | addr[5]);
		flow = lab_mix(flow) ^ ((__u64)addr[6] << 32 | addr[7]);
		l4_proto = ip6->nexthdr;
		l4 = ip6 + 1;
	} else {
		return;
	}
	pkt->l3 = l3;
	tuple = l4_proto;
	ports = l4;
	if ((l4_proto == IPPROTO_UDP || l4_proto == IPPROTO_TCP) && (void *)(ports + 2) <= end) {
		tuple |= (__u64)ports[0] << 32 | (__u64)ports[1] << 16;
		if (l4_proto == IPPROTO_UDP && ports[1] == bpf_htons(udp_port))
			pkt->class = lab_classify(l4 + sizeof(struct udphdr), end);
	}
	if (hash)
		pkt->hash = lab_mix(lab_mix(flow ^ seed) ^ tuple);
}

/* Is this packet ECN-capable (RFC 3168)? */
static __always_inline bool lab_ect(const struct lab_pkt *pkt)
{
	__u32 ecn = 0;

	if (pkt->version == 4)
		ecn = ((const struct iphdr *)pkt->l3)->tos & 3;
	else if (pkt->version == 6)
		ecn = ((const __u8 *)pkt->l3)[1] >> 4 & 3;
	return ecn != 0;
}

/* Sets CE and mends IPv4's header checksum (RFC 1624, equation 3); UDP's does not cover ECN. */
static __always_inline void lab_mark(const struct lab_pkt *pkt)
{
	if (pkt->version == 4) {
		struct iphdr *ip = pkt->l3;
		__be16 *word = pkt->l3; /* version, length, TOS */
		__be16 before = *word;
		__u32 sum;

		ip->tos |= 3;
		sum = (__u16)~ip->check + (__u16)~before + *word;
		sum = (sum & 0xffff) + (sum >> 16);
		sum += sum >> 16;
		ip->check = ~sum;
	} else {
		((__u8 *)pkt->l3)[1] |= 0x30;
	}
}

#endif
