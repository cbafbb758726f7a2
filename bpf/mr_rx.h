/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Receive: check, place, mark, answer. The order of the checks is docs/wire.md's. */
#ifndef MR_RX_H
#define MR_RX_H

struct mr_l4dh {
	struct udphdr udp;
	struct mr_bth bth;
	struct mr_dh dh;
} MR_PACKED;

struct mr_l4write {
	struct udphdr udp;
	struct mr_bth bth;
	struct mr_dh dh;
	struct mr_reth reth;
} MR_PACKED;

struct mr_l4imm {
	struct mr_l4write write;
	struct mr_immh imm;
} MR_PACKED;

/* Why an authenticated peer may not write there; 0 if it may. */
static __always_inline __u32 mr_check_region(const struct mr_region *r, __u32 rkey, __u32 pd,
					     __u32 access, __u64 addr, __u32 len,
					     struct mr_counters *ctr, __u64 **why)
{
	if (!r || !r->key || r->key != rkey)
		*why = &ctr->nak_rkey;
	else if (r->pd != pd)
		*why = &ctr->nak_pd;
	else if ((r->access & access) != access)
		*why = &ctr->nak_access;
	else if (addr < r->base || addr - r->base > r->len || len > r->len - (addr - r->base))
		*why = &ctr->nak_bounds;
	else
		return 0;
	return MR_SYN_REMOTE_ACCESS;
}

/* How a packet met its path: mr_ackinfo.seen, since 6.1 gives three calls 512 bytes of stack. */
#define MR_SEEN_OOO 1   /* not the next one */
#define MR_SEEN_AHEAD 2 /* too far ahead: it did not enter */

/* The path half of an arrival, under the lock. Returns 1 if an ACK is due at once. */
static __always_inline int mr_rx_enter(struct mr_rx_path *p, enum mr_gen gen, __u8 pgen, __u32 pseq,
				       __u32 ce, __u8 *seen)
{
	if (gen == MR_GEN_PREVIOUS)
		return 0;
	if (gen == MR_GEN_NEW)
		mr_core_rx_newgen(p, pgen, pseq);
	if (mr_core_rx_ahead(p, pseq)) {
		*seen = MR_SEEN_AHEAD;
		return 1; /* the ACK tells the sender where its path stands */
	}
	*seen = mr_core_rx_pseq(p, pseq); /* MR_SEEN_OOO or 0 */
	p->ooo += *seen;
	p->pkts++;
	p->ce += ce;
	return *seen || ce || gen == MR_GEN_NEW || ++p->since >= MR_ACK_EVERY;
}

static __always_inline int mr_answer(struct xdp_md *ctx, const struct mr_view *v,
				     const struct mr_ackinfo *k, struct mr_counters *ctr)
{
	int action = mr_turn(ctx, v, k);

	if (action == XDP_TX)
		ctr->sent_acks++;
	else
		ctr->drop_turn++;
	return action;
}

/* Wakes who waits for a receive that all below cum completes. Not inline: its caller's stack is full. */
static __attribute__((noinline)) int mr_rx_wake(struct mr_qpage *page, __u32 slot, __u32 qpn,
						__u32 cum, struct mr_counters *ctr)
{
	/* a fetch: read behind arm_recv, or it may be what was armed before */
	__u32 n = __sync_fetch_and_add(&page->wait_recv, 0);
	struct mr_rcqe *e = &page->rcq[n % MR_RQ_DEPTH];

	if (MR_READ_ONCE(e->valid) == MR_VALID(n) && mr_before(e->psn, cum))
		mr_notify(&page->arm_recv, slot, qpn, ctr);
	return 0;
}

static __attribute__((noinline)) int mr_rx_probe(struct xdp_md *ctx, struct mr_in *in,
						 struct mr_l4dh *f)
{
	__u32 slot = in->slot, path = in->path;
	struct mr_counters *ctr = in->ctr;
	struct mr_view *v = &in->v;
	struct mr_conn *c = in->c;
	struct mr_rx_path *p = &c->rx[path & (MR_MAX_PATHS - 1)];
	struct mr_qpage *page = mr_qpage(slot);
	struct mr_ackinfo k = {};
	__u32 pseq = bpf_ntohl(f->dh.pseq);
	__u8 pgen = f->dh.gen;
	enum mr_gen gen;

	if (f->dh.ver_ext != MR_VER_EXT(MR_EXT_PROBE) || (f->dh.flags & ~MR_F_MORE)) {
		ctr->drop_header++;
		return XDP_DROP;
	}
	/* padded to the longest data packet, or less: what is behind the header is not looked at */
	if (v->udp_len > sizeof(struct mr_l4imm) + c->payload) {
		ctr->drop_payload++;
		return XDP_DROP;
	}
	if (f->dh.stream) {
		ctr->drop_stream++;
		return XDP_DROP;
	}
	if (!page)
		return XDP_DROP;
	k.ts = f->dh.ts;
	k.credit = MR_READ_ONCE(page->rq_tail);
	k.flags = MR_AF_PROBE;
	bpf_spin_lock(&c->lock);
	gen = mr_core_gen(p->gen, pgen);
	if (gen != MR_GEN_STALE) {
		mr_rx_enter(p, gen, pgen, pseq, v->ce, &k.seen);
		p->since = 0;
		p->sport = v->sport;
	}
	mr_ackinfo_fill(&k, c, p, path);
	bpf_spin_unlock(&c->lock);
	if (gen == MR_GEN_STALE) {
		ctr->drop_generation++;
		return XDP_DROP;
	}
	ctr->rcvd_probes++;
	ctr->out_of_sequence += k.seen & MR_SEEN_OOO;
	ctr->pseq_ahead += k.seen / MR_SEEN_AHEAD;
	ctr->np_ecn_marked_roce_packets += v->ce;
	k.peer_qpn = c->peer_qpn;
	k.token = c->tx_token;
	k.tos = c->tos;
	k.checksum = c->checksum;
	return mr_answer(ctx, v, &k, ctr);
}

static __attribute__((noinline)) int mr_rx_write(struct xdp_md *ctx, struct mr_in *in,
						 struct mr_l4write *f)
{
	__u32 slot = in->slot, path = in->path;
	struct mr_counters *ctr = in->ctr;
	struct mr_view *v = &in->v;
	struct mr_conn *c = in->c;
	void *end = (void *)(long)ctx->data_end;
	__u32 flags = f->dh.flags, psn, pseq, rkey, len, hdr, index, mlen, ask, syndrome;
	struct mr_rx_path *p = &c->rx[path & (MR_MAX_PATHS - 1)];
	__u32 imm = 0, ordinal = 0, ext = MR_EXT_WRITE, before = 0;
	struct mr_qpage *page = mr_qpage(slot);
	struct mr_ackinfo k = {};
	struct mr_region *region;
	enum mr_verdict verdict;
	int ack;
	__u64 addr, *why = 0;
	enum mr_gen gen;
	__u8 pgen;

	hdr = sizeof(*f);
	if (flags & MR_F_IMM) {
		struct mr_l4imm *fi = (void *)f;

		ext = MR_EXT_WRITE_IMM;
		hdr = sizeof(*fi);
		if ((void *)(fi + 1) > end || v->udp_len < hdr) {
			ctr->drop_truncated++;
			return XDP_DROP;
		}
		imm = bpf_ntohl(fi->imm.imm);
		ordinal = bpf_ntohl(fi->imm.ordinal);
	}
	if (f->dh.ver_ext != MR_VER_EXT(ext) ||
	    (flags & ~(MR_F_RETX | MR_F_LAST | MR_F_IMM | MR_F_MORE)) ||
	    (flags & (MR_F_IMM | MR_F_LAST)) == MR_F_IMM) {
		ctr->drop_header++;
		return XDP_DROP;
	}
	len = v->udp_len - hdr;
	if (len > c->payload) {
		ctr->drop_payload++;
		return XDP_DROP;
	}
	if (f->dh.stream) {
		ctr->drop_stream++;
		return XDP_DROP;
	}
	if (!page)
		return XDP_DROP;
	pgen = f->dh.gen;
	if (mr_core_gen(MR_READ_ONCE(p->gen), pgen) == MR_GEN_STALE) {
		ctr->drop_generation++;
		return XDP_DROP;
	}
	psn = bpf_ntohl(f->dh.psn);
	pseq = bpf_ntohl(f->dh.pseq);
	ask = f->bth.apsn & bpf_htonl(MR_BTH_ACKREQ);
	addr = bpf_be64_to_cpu(f->reth.addr);
	rkey = bpf_ntohl(f->reth.rkey);
	mlen = bpf_ntohl(f->reth.len);
	k.ts = f->dh.ts;
	k.credit = MR_READ_ONCE(page->rq_tail);
	index = rkey >> 8;
	syndrome = 0;
	if (len || mlen) { /* as verbs: a write of nothing needs no key */
		region = bpf_map_lookup_elem(&mr_region, &index);
		syndrome = mr_check_region(region, rkey, c->pd, MR_ACCESS_REMOTE_WRITE, addr, len,
					   ctr, &why);
		addr -= region ? region->base : 0;
	}
	/* posted, and not so long ago that its slot is another one's by now */
	if (!syndrome && (flags & MR_F_IMM) && k.credit - 1 - ordinal >= MR_RQ_DEPTH) {
		why = &ctr->nak_no_receive;
		syndrome = MR_SYN_INVALID_REQUEST;
	}

	bpf_spin_lock(&c->lock);
	/* once more, and under the lock: nothing lands after the connection is over */
	if (c->state != MR_CONN_OPEN)
		verdict = MR_CLOSED;
	else if (syndrome)
		verdict = mr_core_refuse(&c->rxs, psn, syndrome);
	else
		verdict = mr_core_claim(&c->rxs, psn);
	bpf_spin_unlock(&c->lock);
	if (verdict == MR_CLOSED) {
		ctr->drop_closed++;
		return XDP_DROP;
	}
	if (verdict == MR_OVER) {
		ctr->drop_window++;
		return XDP_DROP;
	}
	if (verdict == MR_BUSY) {
		ctr->duplicate_busy++;
		return XDP_DROP;
	}
	if (verdict == MR_REFUSED && why)
		(*why)++;
	if (verdict == MR_NEW) {
		if (len && mr_place(ctx, v->l4 + hdr, len, index, addr)) {
			bpf_spin_lock(&c->lock);
			mr_core_unclaim(&c->rxs, psn);
			bpf_spin_unlock(&c->lock);
			ctr->drop_place++;
			return XDP_DROP;
		}
		if (flags & MR_F_IMM) {
			struct mr_rcqe *e = &page->rcq[ordinal % MR_RQ_DEPTH];

			e->psn = psn;
			e->imm = imm;
			e->len = mlen;
			e->stream = 0;
			__sync_lock_test_and_set(&e->valid, MR_VALID(ordinal));
		}
	}

	bpf_spin_lock(&c->lock);
	gen = mr_core_gen(p->gen, pgen);
	if (verdict == MR_NEW) {
		before = c->rxs.cum;
		mr_core_arrive(&c->rxs, psn);
		before = c->rxs.cum - before;
		/* an exchange: behind payload and record, and before arm_recv is read. Always,
		 * though only receives need it: a branch here multiplies what the verifier walks
		 */
		__sync_lock_test_and_set(&page->rx_cum, c->rxs.cum);
	}
	ack = verdict != MR_NEW || (flags & MR_F_LAST) || ask;
	if (verdict != MR_REFUSED && gen != MR_GEN_STALE) {
		ack |= mr_rx_enter(p, gen, pgen, pseq, v->ce, &k.seen);
		p->dups += verdict == MR_DUP && gen != MR_GEN_PREVIOUS && k.seen != MR_SEEN_AHEAD;
		p->sport = v->sport;
	}
	k.cum = c->rxs.cum;
	if (ack) {
		p->since = 0;
		mr_ackinfo_fill(&k, c, p, path);
	}
	bpf_spin_unlock(&c->lock);

	if (verdict == MR_NEW) {
		ctr->rcvd_pkts++;
		ctr->rcvd_bytes += len;
		if (flags & MR_F_LAST)
			ctr->rx_write_requests++;
		if (before && MR_READ_ONCE(page->arm_recv))
			mr_rx_wake(page, slot, c->qpn, k.cum, ctr);
	} else if (verdict == MR_DUP) {
		ctr->duplicate_request++;
	}
	ctr->out_of_sequence += k.seen & MR_SEEN_OOO;
	ctr->pseq_ahead += k.seen / MR_SEEN_AHEAD;
	ctr->np_ecn_marked_roce_packets += v->ce;
	if (gen == MR_GEN_PREVIOUS)
		ctr->prev_generation++;
	if (!ack)
		return XDP_DROP;
	k.peer_qpn = c->peer_qpn;
	k.token = c->tx_token;
	k.tos = c->tos;
	k.checksum = c->checksum;
	return mr_answer(ctx, v, &k, ctr);
}

static __always_inline int mr_rx_main(struct xdp_md *ctx)
{
	__u32 l4, qpn, slot, path, index, token, least;
	struct mr_counters *ctr = mr_counters();
	struct mr_in in = {};
	struct mr_path *pp;
	struct mr_conn *c;
	struct mr_l4dh *f;
	void *data, *end;
	__u8 opcode;
	int parsed;

	if (!ctr)
		return XDP_ABORTED;
	parsed = mr_parse(ctx, &in.v);
	if (parsed == MR_FOREIGN)
		return XDP_PASS;
	if (parsed != MR_OURS) {
		ctr->drop_length++;
		return XDP_DROP;
	}
	l4 = in.v.l4 & 127;
	data = (void *)(long)ctx->data;
	end = (void *)(long)ctx->data_end;
	f = data + l4;
	if ((void *)&f->dh > end || in.v.udp_len < sizeof(f->udp) + sizeof(f->bth)) {
		if (in.v.nonlinear)
			ctr->drop_nonlinear++;
		else
			ctr->drop_truncated++;
		return XDP_DROP;
	}
	opcode = f->bth.opcode;
	if (opcode < MR_OP_FIRST)
		return XDP_PASS; /* RoCEv2 on the same port: not ours */
	if (in.v.nonlinear) {
		ctr->drop_nonlinear++;
		return XDP_DROP;
	}
	if (opcode == MR_OP_WRITE)
		least = sizeof(struct mr_l4write);
	else if (opcode == MR_OP_PROBE)
		least = sizeof(struct mr_l4dh);
	else if (opcode == MR_OP_ACK)
		least = sizeof(struct mr_l4ack);
	else {
		ctr->drop_opcode++;
		return XDP_DROP;
	}
	if (in.v.udp_len < least || (void *)(f + 1) > end) {
		ctr->drop_truncated++;
		return XDP_DROP;
	}
	qpn = bpf_ntohl(f->bth.qpn) & 0xffffff;
	slot = qpn & (mr_max_conns - 1);
	c = bpf_map_lookup_elem(&mr_conn, &slot);
	if (!c || c->qpn != qpn || MR_READ_ONCE(c->state) == MR_CONN_FREE) {
		ctr->drop_unknown_qp++;
		return XDP_DROP;
	}
	if (MR_READ_ONCE(c->state) != MR_CONN_OPEN) {
		ctr->drop_closed++;
		return XDP_DROP;
	}
	/* path, gen, flags, version and token stand at the same place in data and ACK */
	token = bpf_ntohl(f->dh.token);
	if (token != c->rx_token) {
		ctr->drop_token++;
		return XDP_DROP;
	}
	path = f->dh.path;
	if (path >= c->npaths || path >= MR_MAX_PATHS) {
		ctr->drop_path++;
		return XDP_DROP;
	}
	index = c->path_base + path;
	pp = bpf_map_lookup_elem(&mr_path, &index);
	if (!pp || ((in.v.src[3] ^ pp->peer[3]) | (in.v.src[2] ^ pp->peer[2]) |
		    (in.v.src[1] ^ pp->peer[1]) | (in.v.src[0] ^ pp->peer[0]) |
		    (in.v.dst[3] ^ pp->local[3]) | (in.v.dst[2] ^ pp->local[2]) |
		    (in.v.dst[1] ^ pp->local[1]) | (in.v.dst[0] ^ pp->local[0]))) {
		ctr->drop_address++;
		return XDP_DROP;
	}
	if (in.v.vlan != pp->vlan) {
		ctr->drop_vlan++;
		return XDP_DROP;
	}
	if (c->checksum) {
		if (in.v.no_check ||
		    mr_fold((__u64)in.v.pseudo + mr_csum(ctx, l4, in.v.udp_len)) != 0xffff) {
			ctr->drop_checksum++;
			return XDP_DROP;
		}
		data = (void *)(long)ctx->data;
		end = (void *)(long)ctx->data_end;
		f = data + l4;
		if ((void *)(f + 1) > end)
			return XDP_DROP;
	}
	if (f->dh.ver_ext >> 4 != MR_WIRE_VERSION) {
		ctr->drop_version++;
		return XDP_DROP;
	}
	in.slot = slot;
	in.path = path;
	in.c = c;
	in.ctr = ctr;
	if (opcode == MR_OP_ACK) {
		struct mr_l4ack *a = (void *)f;

		if ((void *)(a + 1) > end)
			return XDP_DROP;
		return mr_ack_in(&in, a);
	}
	if (opcode == MR_OP_PROBE)
		return mr_rx_probe(ctx, &in, f);
	if ((void *)f + sizeof(struct mr_l4write) > end)
		return XDP_DROP;
	return mr_rx_write(ctx, &in, (void *)f);
}

#endif
