/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Ethernet, VLAN, IP and UDP of a frame that may be ours. */
#ifndef MR_PARSE_H
#define MR_PARSE_H

enum mr_parsed {
	MR_FOREIGN, /* pass to the stack */
	MR_OURS,
	MR_BADLENGTH, /* UDP to our port, but its lengths disagree with the frame */
};

struct mr_view {
	__u32 l3, l4;         /* offsets of the IP and UDP headers */
	__u32 udp_len;        /* bytes from the UDP header on */
	__u32 pseudo;         /* pseudo header's sum, length included */
	__u32 src[4], dst[4]; /* network order; IPv4 mapped */
	__u32 v6, ce, no_check, sport;
	__u32 vlan;      /* VID of its tag; 0 if it has none */
	__u32 nonlinear; /* what IP says is there, but not all of it at one place */
};

struct mr_vlan {
	__u16 tci, proto;
};

/*
 * Fragments, IPv4 options and IPv6 extension headers are never ours: whoever
 * needs them is not this transport. Global, so that it is verified once.
 */
__attribute__((noinline)) int mr_parse(struct xdp_md *ctx, struct mr_view *v)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data;
	struct udphdr *udp;
	__u32 off = sizeof(*eth), room, i;
	__u64 sum = 0;
	__u16 proto;

	if (!v || (void *)(eth + 1) > end)
		return MR_FOREIGN;
	proto = eth->h_proto;
	v->vlan = 0;
	v->nonlinear = 0;
	if (proto == bpf_htons(ETH_P_8021Q)) {
		struct mr_vlan *tag = data + off;

		if ((void *)(tag + 1) > end)
			return MR_FOREIGN;
		proto = tag->proto;
		v->vlan = bpf_ntohs(tag->tci) & 0xfff;
		off += sizeof(*tag);
	}
	v->l3 = off;
	if (proto == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = data + off;

		if ((void *)(ip + 1) > end || ip->version != 4 || ip->ihl != 5 ||
		    ip->protocol != IPPROTO_UDP || (ip->frag_off & bpf_htons(0x3fff)))
			return MR_FOREIGN;
		v->v6 = 0;
		v->src[0] = 0;
		v->src[1] = 0;
		v->src[2] = bpf_htonl(0xffff);
		v->src[3] = ip->saddr;
		v->dst[0] = 0;
		v->dst[1] = 0;
		v->dst[2] = bpf_htonl(0xffff);
		v->dst[3] = ip->daddr;
		v->ce = (ip->tos & 3) == 3;
		sum = (__u64)ip->saddr + ip->daddr;
		room = bpf_ntohs(ip->tot_len) - sizeof(*ip);
		off += sizeof(*ip);
	} else if (proto == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip = data + off;
		__u32 *a;

		if ((void *)(ip + 1) > end || ip->version != 6 || ip->nexthdr != IPPROTO_UDP)
			return MR_FOREIGN;
		a = (void *)&ip->saddr;
		for (i = 0; i < 4; i++) {
			v->src[i] = a[i];
			v->dst[i] = a[i + 4];
			sum += (__u64)a[i] + a[i + 4];
		}
		v->v6 = 1;
		v->ce = (ip->flow_lbl[0] & 0x30) == 0x30;
		room = bpf_ntohs(ip->payload_len);
		off += sizeof(*ip);
	} else {
		return MR_FOREIGN;
	}
	udp = data + off;
	if ((void *)(udp + 1) > end || udp->dest != bpf_htons(mr_port))
		return MR_FOREIGN;
	v->l4 = off;
	v->udp_len = bpf_ntohs(udp->len);
	v->no_check = !udp->check;
	v->sport = bpf_ntohs(udp->source);
	v->pseudo = mr_fold(sum + udp->len + bpf_htons(IPPROTO_UDP));
	/* Ethernet pads short frames, so the frame may be longer than IP says, never shorter. */
	if (v->udp_len != room)
		return MR_BADLENGTH;
	if ((__u64)(end - data) < off + room) {
		if (bpf_xdp_get_buff_len(ctx) < off + room)
			return MR_BADLENGTH;
		v->nonlinear = 1;
	}
	return MR_OURS;
}

#endif
