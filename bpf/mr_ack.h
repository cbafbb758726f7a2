/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* ACKs: the receiver's making of one out of a data frame, the sender's digestion. */
#ifndef MR_ACK_H
#define MR_ACK_H

/* A packet that is addressed to one of our connections, and which. */
struct mr_in {
	struct mr_view v;
	__u32 slot, path;
	struct mr_conn *c;
	struct mr_counters *ctr;
};

/* What an ACK tells, copied under the lock. */
struct mr_ackinfo {
	__u32 peer_qpn, token, ts;
	__u32 pseq_max, cum, limit, nak_psn, pkts, ce, dups, credit;
	__u64 vec[4];
	__u8 path, gen, flags, syndrome, tos, checksum;
	__u8 seen; /* MR_SEEN_*: what the packet that is answered was to its path */
};

struct mr_l4ack {
	struct udphdr udp;
	struct mr_bth bth;
	struct mr_ack ack;
} MR_PACKED;

static __always_inline void mr_ackinfo_fill(struct mr_ackinfo *k, const struct mr_conn *c,
					    const struct mr_rx_path *p, __u32 path)
{
	k->path = path;
	k->gen = p->gen;
	k->pseq_max = p->max;
	k->vec[0] = p->vec[0];
	k->vec[1] = p->vec[1];
	k->vec[2] = p->vec[2];
	k->vec[3] = p->vec[3];
	k->pkts = p->pkts;
	k->ce = p->ce;
	k->dups = p->dups;
	k->cum = c->rxs.cum;
	k->limit = c->rxs.cum + MR_PSN_LIMIT;
	k->syndrome = c->rxs.syndrome;
	k->nak_psn = c->rxs.nak_psn;
}

static __always_inline void mr_ack_write(struct mr_l4ack *f, const struct mr_ackinfo *k)
{
	f->udp.len = bpf_htons(sizeof(*f));
	f->udp.check = 0;
	f->bth.opcode = MR_OP_ACK;
	f->bth.flags = 0;
	f->bth.pkey = bpf_htons(MR_PKEY_DEFAULT);
	f->bth.qpn = bpf_htonl(k->peer_qpn);
	f->bth.apsn = bpf_htonl(k->cum & MR_PSN24);
	f->ack.path = k->path;
	f->ack.gen = k->gen;
	f->ack.flags = k->flags;
	f->ack.ver_ext = MR_VER_EXT(MR_EXT_ACK);
	f->ack.token = bpf_htonl(k->token);
	f->ack.pseq_max = bpf_htonl(k->pseq_max);
	f->ack.ts = k->ts;
	f->ack.vec[0] = bpf_cpu_to_be64(k->vec[0]);
	f->ack.vec[1] = bpf_cpu_to_be64(k->vec[1]);
	f->ack.vec[2] = bpf_cpu_to_be64(k->vec[2]);
	f->ack.vec[3] = bpf_cpu_to_be64(k->vec[3]);
	f->ack.stream = 0;
	f->ack.syndrome = k->syndrome;
	f->ack.reserved = 0;
	f->ack.psn_cum = bpf_htonl(k->cum);
	f->ack.psn_limit = bpf_htonl(k->limit);
	f->ack.nak_psn = bpf_htonl(k->nak_psn);
	f->ack.pkts = bpf_htonl(k->pkts);
	f->ack.ce = bpf_htonl(k->ce);
	f->ack.dups = bpf_htonl(k->dups);
	f->ack.rate_hint = 0;
	f->ack.hint_epoch = 0;
	f->ack.reserved2 = 0;
	f->ack.credit = bpf_htonl(k->credit);
}

/*
 * Turns the data frame round: MAC and IP addresses swap, ports do not (the
 * network hashes them, and the peer listens on the destination port too); the
 * congestion mark is cleared, TTL reset, lengths and checksums made anew. A
 * short frame grows. Global, so that it is verified once.
 */
__attribute__((noinline)) int mr_turn(struct xdp_md *ctx, const struct mr_view *v,
				      const struct mr_ackinfo *k)
{
	void *data, *end;
	struct mr_l4ack *f;
	__u16 *mac, t0, t1, t2;
	__u32 l3;
	__u64 sum;
	int have, want;

	if (!v || !k)
		return XDP_DROP;
	have = bpf_xdp_get_buff_len(ctx);
	want = v->l4 + sizeof(struct mr_l4ack);
	l3 = v->l3 & 31;
	/* the pseudo header's sum is symmetric in the addresses: only the length changes */
	sum = (__u64)v->pseudo + (0xffff ^ bpf_htons(v->udp_len)) +
	      bpf_htons(sizeof(struct mr_l4ack));
	if (want != have && bpf_xdp_adjust_tail(ctx, want - have))
		return XDP_DROP;
	data = (void *)(long)ctx->data;
	end = (void *)(long)ctx->data_end;
	if (data + ETH_HLEN > end)
		return XDP_DROP;
	mac = data;
	t0 = mac[0];
	t1 = mac[1];
	t2 = mac[2];
	mac[0] = mac[3];
	mac[1] = mac[4];
	mac[2] = mac[5];
	mac[3] = t0;
	mac[4] = t1;
	mac[5] = t2;
	if (!v->v6) {
		struct {
			struct iphdr ip;
			struct mr_l4ack l4;
		} MR_PACKED *q = data + l3;
		__u32 addr, s;
		__u16 *h;

		if ((void *)(q + 1) > end)
			return XDP_DROP;
		addr = q->ip.saddr;
		q->ip.saddr = q->ip.daddr;
		q->ip.daddr = addr;
		q->ip.tos = k->tos;
		q->ip.ttl = 64;
		q->ip.tot_len = bpf_htons(sizeof(*q));
		q->ip.check = 0;
		h = (void *)q;
		s = h[0] + h[1] + h[2] + h[3] + h[4] + h[6] + h[7] + h[8] + h[9];
		q->ip.check = ~mr_fold(s);
		f = &q->l4;
	} else {
		struct {
			struct ipv6hdr ip;
			struct mr_l4ack l4;
		} MR_PACKED *q = data + l3;
		__u32 *a, t;
		__u8 *b;
		int i;

		if ((void *)(q + 1) > end)
			return XDP_DROP;
		a = (void *)&q->ip.saddr;
		for (i = 0; i < 4; i++) {
			t = a[i];
			a[i] = a[i + 4];
			a[i + 4] = t;
		}
		b = (void *)q; /* version 4, traffic class 8, flow label 20 */
		b[0] = 0x60 | k->tos >> 4;
		b[1] = (b[1] & 0x0f) | k->tos << 4;
		q->ip.payload_len = bpf_htons(sizeof(q->l4));
		q->ip.hop_limit = 64;
		f = &q->l4;
	}
	mr_ack_write(f, k);
	if (k->checksum) {
		sum += (__u32)bpf_csum_diff(0, 0, (void *)f, sizeof(*f), 0);
		f->udp.check = mr_udp_check(sum);
	}
	return XDP_TX;
}

/* The sender reads an ACK. Everything it says is a total, so any order and any loss will do. */
static __attribute__((noinline)) int mr_ack_in(struct mr_in *in, struct mr_l4ack *f)
{
	__u32 slot = in->slot, path = in->path, udp_len = in->v.udp_len;
	struct mr_counters *ctr = in->ctr;
	struct mr_conn *c = in->c;
	__u32 index = c->path_base + path;
	struct mr_path *pp = bpf_map_lookup_elem(&mr_path, &index);
	__u32 max, cum, x, lost = 0, marks = 0;
	struct mr_qpage *page = mr_qpage(slot);
	__u8 gen = f->ack.gen;
	int bad = 0, stale = 0, nak = 0, work = 0, done = 0;
	__u64 now = bpf_ktime_get_ns();
	struct mr_tx_path *p;
	__u32 tail;

	if (f->ack.ver_ext != MR_VER_EXT(MR_EXT_ACK) || (f->ack.flags & ~MR_AF_PROBE) ||
	    udp_len != sizeof(*f)) {
		ctr->drop_header++;
		return XDP_DROP;
	}
	if (f->ack.stream) {
		ctr->drop_stream++;
		return XDP_DROP;
	}
	if (!page || !pp)
		return XDP_DROP;
	max = bpf_ntohl(f->ack.pseq_max);
	cum = bpf_ntohl(f->ack.psn_cum);
	/* in place: the frame ends here, and the stack is short, so fields are read where used */
	f->ack.vec[0] = bpf_be64_to_cpu(f->ack.vec[0]);
	f->ack.vec[1] = bpf_be64_to_cpu(f->ack.vec[1]);
	f->ack.vec[2] = bpf_be64_to_cpu(f->ack.vec[2]);
	f->ack.vec[3] = bpf_be64_to_cpu(f->ack.vec[3]);
	tail = MR_READ_ONCE(page->sq_tail);

	p = &c->tx[path & (MR_MAX_PATHS - 1)];
	bpf_spin_lock(&c->lock);
	if (mr_before(c->psn_next, cum) ||
	    (gen == p->gen && (!mr_before(max, p->next) || mr_before(max, p->first - 1))) ||
	    (__s8)(gen - p->gen) > 0 ||
	    (__s32)(bpf_ntohl(f->ack.psn_limit) - cum) > MR_LIMIT_AHEAD ||
	    (__s32)(bpf_ntohl(f->ack.credit) - c->ordinal) > MR_CREDIT_AHEAD) {
		bad = 1;
		goto unlock;
	}
	if (mr_before(c->psn_cum, cum)) {
		c->psn_cum = cum;
		done = 1;
	}
	x = bpf_ntohl(f->ack.psn_limit);
	if (mr_before(c->psn_limit, x))
		c->psn_limit = x;
	x = bpf_ntohl(f->ack.credit);
	if (mr_before(c->credit, x)) {
		c->credit = x;
		c->no_credit = 0;
	}
	x = bpf_ntohl(f->ack.nak_psn);
	if (f->ack.syndrome && !mr_before(x, c->psn_cum) && mr_before(x, c->psn_next) &&
	    (!c->nak_syndrome || mr_before(x, c->nak_psn))) {
		c->nak_psn = x;
		c->nak_syndrome = f->ack.syndrome;
		nak = 1;
	}
	if (gen == p->gen) {
		p->acked_gen = gen;
		p->last_ack_ns = now;
		p->acks++;
		/* news of a full-size packet: what is older than the suspicion proves nothing */
		if (p->state != MR_PATH_ACTIVE && !mr_before(max, p->una) && (f->ack.vec[0] & 1) &&
		    mr_core_is_proof(pp->desc[max & 255].len, c->cut))
			p->proofs++;
		if (mr_before(p->heard, max))
			p->heard = max;
		lost = mr_core_tx_ack(p, max, f->ack.vec, f->ack.flags & MR_AF_PROBE);
		if (lost)
			c->repairs |= 1u << (path & (MR_MAX_PATHS - 1));
		if (mr_core_any_repair(p)) {
			p->one = 1;
			mr_core_tx_late(p, max, f->ack.vec);
		}
		p->lost += lost;
		mr_core_rtt(p, (__u32)now - bpf_ntohl(f->ack.ts));
		x = bpf_ntohl(f->ack.ce);
		if (mr_before(p->peer_ce, x)) {
			marks = x - p->peer_ce;
			p->ce += marks;
			p->peer_ce = x;
			mr_core_brake(p, now);
		}
		x = bpf_ntohl(f->ack.pkts);
		if (mr_before(p->peer_pkts, x))
			p->peer_pkts = x;
		x = bpf_ntohl(f->ack.dups);
		if (mr_before(p->peer_dups, x))
			p->peer_dups = x;
	} else {
		stale = 1;
	}
	work = c->repairs || c->busy || c->msn_next != tail;
	page->nak_psn = c->nak_psn;
	/* exchanges: in order behind what was stored before, and before arm_send is read */
	if (nak)
		__sync_lock_test_and_set(&page->nak_syndrome, c->nak_syndrome);
	if (done)
		__sync_lock_test_and_set(&page->tx_cum, c->psn_cum);
unlock:
	bpf_spin_unlock(&c->lock);
	if (bad) {
		ctr->drop_ack_invalid++;
		return XDP_DROP;
	}
	mr_gate_heard(p, bpf_ntohl(f->ack.ts), now);
	ctr->rcvd_acks++;
	ctr->packet_seq_err += lost;
	if (stale)
		ctr->stale_ack++;
	if (marks)
		ctr->rp_cnp_handled++;
	if (nak)
		ctr->rcvd_naks++;
	if (work)
		mr_make_ready(slot);
	if ((done || nak) && MR_READ_ONCE(page->arm_send)) {
		/* a fetch: read behind arm_send, or it may be what was armed before */
		__u32 n = __sync_fetch_and_add(&page->wait_send, 0);
		struct mr_scqe *e = &page->scq[n % MR_SQ_DEPTH];

		if ((MR_READ_ONCE(e->valid) == MR_VALID(n) && mr_before(e->last_psn, cum)) ||
		    MR_READ_ONCE(page->nak_syndrome))
			mr_notify(&page->arm_send, slot, c->qpn, ctr);
	}
	return XDP_DROP;
}

#endif
