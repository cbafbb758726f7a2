/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Transmit: which connection, which path, which packet; then the packet. */
#ifndef MR_TX_H
#define MR_TX_H

enum mr_emitted {
	MR_SENT,
	MR_NOTHING, /* wait for an ACK, control or a post */
	MR_LATER,   /* paced */
	MR_AGAIN,   /* look once more: something was put in order */
};

enum mr_job {
	MR_JOB_DATA,
	MR_JOB_REPAIR,
	MR_JOB_PROBE,
};

/*
 * Stops the connection's sending at request msn, of which psn cannot be sent. Control
 * sees it and, once all below psn is acknowledged, ends the connection.
 */
static __always_inline void mr_tx_stop(struct mr_conn *c, struct mr_qpage *page, __u32 slot,
				       __u32 fault, __u32 msn, __u32 psn, struct mr_counters *ctr)
{
	bpf_spin_lock(&c->lock);
	if (!c->fault || mr_before(psn, c->fault_psn)) {
		c->fault = fault;
		c->fault_psn = psn;
		page->fault_msn = msn;
		__sync_lock_test_and_set(&page->fault, fault);
	}
	bpf_spin_unlock(&c->lock);
	ctr->tx_fault++;
	mr_notify(&page->arm_send, slot, c->qpn, ctr);
}

/*
 * Copies request msn out of the application's queue and checks the copy: what
 * the application writes there afterwards changes nothing. Only the pump calls it.
 */
static __always_inline __u32 mr_tx_load(struct mr_req *r, struct mr_qpage *page, __u32 msn,
					__u32 pd)
{
	struct mr_wqe *w = &page->sq[msn % MR_SQ_DEPTH];
	struct mr_region *region;
	__u64 laddr;
	__u32 index, lkey;

	r->op = MR_READ_ONCE(w->op);
	r->raddr = MR_READ_ONCE(w->raddr);
	r->rkey = MR_READ_ONCE(w->rkey);
	r->len = MR_READ_ONCE(w->len);
	r->imm = MR_READ_ONCE(w->imm);
	r->stream = 0;
	r->msn = msn;
	laddr = MR_READ_ONCE(w->laddr);
	lkey = MR_READ_ONCE(w->lkey);
	if (r->op != MR_WR_WRITE && r->op != MR_WR_WRITE_IMM)
		return MR_FAULT_LOC_QP_OP;
	index = lkey >> 8;
	r->lkey = lkey;
	r->local = 0;
	if (!r->len)
		return MR_FAULT_NONE;
	region = bpf_map_lookup_elem(&mr_region, &index);
	if (!region || !region->key || region->key != lkey || region->pd != pd ||
	    laddr < region->base || laddr - region->base > region->len ||
	    r->len > region->len - (laddr - region->base))
		return MR_FAULT_LOC_PROT;
	r->local = laddr - region->base;
	return MR_FAULT_NONE;
}

struct mr_choice {
	__u32 job, path, source;
	__u32 idle, full; /* a probe: mr_tx's own; padded to the longest frame */
	__u64 paced_ns;
};

/*
 * Paths whose next repair was lost there twice: another is to take it. None if no other can, or
 * they would wait for each other.
 */
static __always_inline __u32 mr_tx_exiles(__u32 active, __u32 exile)
{
	return active & ~exile ? active & exile : 0;
}

/*
 * The next path in turn that may send something that waits: its own repairs,
 * those of a path that may not send, new data. Without the lock: only this
 * program takes packets out, so windows stay open; the state is looked at again
 * under the lock.
 */
static __always_inline int mr_tx_pick(struct mr_conn *c, __u64 now, int data, __u32 shut,
				      struct mr_choice *choice)
{
	__u32 n = c->npaths, first = c->rr, repairs = MR_READ_ONCE(c->repairs), i;
	__u32 active = MR_READ_ONCE(c->active);
	__u32 exiles = mr_tx_exiles(active, MR_READ_ONCE(c->exile) & repairs);
	__u32 orphans = repairs & (~active | exiles);

	choice->paced_ns = 0;
	for (i = 0; i < MR_MAX_PATHS; i++) {
		__u32 path = first + i, own, repair;
		struct mr_tx_path *p;
		enum mr_open open;

		if (i >= n)
			break;
		if (path >= n)
			path -= n;
		path &= MR_MAX_PATHS - 1;
		if (exiles >> path & 1)
			continue; /* its next slot may be taken by that very repair */
		own = repairs >> path & 1;
		repair = own || orphans;
		if ((!repair && !data) || (shut >> path & 1))
			continue;
		p = &c->tx[path];
		open = mr_core_tx_open(p, now, repair);
		if (open == MR_PACED && (!choice->paced_ns || p->next_ns < choice->paced_ns))
			choice->paced_ns = p->next_ns;
		if (open != MR_OPEN)
			continue;
		choice->path = path;
		choice->source = own || !orphans ? path : mr_ctz(orphans);
		choice->job = repair ? MR_JOB_REPAIR : MR_JOB_DATA;
		return 1;
	}
	return 0;
}

/* What the frame will be, decided under the lock. */
struct mr_packet {
	struct mr_desc d;
	__u32 pseq, sport, flags, ask;
	__u32 cut, peer_qpn, token, ts;
	__u8 gen, job, path, pad;
};

/* A suspect path has at most so much unanswered; then it counts as lost, and makes room. */
#define MR_SUSPECT_WINDOW 64

/* No probe is due on this path any more. */
static __always_inline void mr_tx_unask(struct mr_conn *c, __u32 path)
{
	c->probe &= ~(1u << path);
	c->probe_full &= ~(1u << path);
	c->unasked &= ~(1u << path);
}

static __always_inline int mr_tx_commit(struct mr_conn *c, struct mr_path *pp, struct mr_path *sp,
					struct mr_choice *choice, const struct mr_req *fresh,
					__u64 now, __u32 tail, struct mr_packet *k,
					struct mr_pump *pump, struct mr_egress *e)
{
	__u32 path = choice->path & (MR_MAX_PATHS - 1),
	      source = choice->source & (MR_MAX_PATHS - 1);
	__u32 job = choice->job, frame, idx, left, again, needed;
	struct mr_tx_path *p = &c->tx[path], *s;

	if (c->state != MR_CONN_OPEN)
		return MR_NOTHING;
	if (p->state != MR_PATH_ACTIVE) {
		if (choice->job != MR_JOB_PROBE || choice->idle || p->state == MR_PATH_DOWN) {
			mr_tx_unask(c, path); /* control took the path away meanwhile */
			return MR_AGAIN;
		}
		if (mr_core_next_is_repair(p) && c->active) {
			/* the others take the repair over first; then the probe leaves */
			mr_tx_unask(c, path);
			c->held |= 1u << path;
			return MR_AGAIN;
		}
		/* a suspect path can always be asked: what was not answered is given up */
		if (mr_core_inflight(p) >= MR_SUSPECT_WINDOW && mr_core_tx_all_lost(p))
			c->repairs |= 1u << path;
	}
	if (mr_core_next_is_repair(p)) {
		/* its descriptor would be overwritten: it goes first, and asks if a probe was due */
		job = MR_JOB_REPAIR;
		source = path;
		sp = pp;
	}
	if (mr_core_inflight(p) >=
	    (choice->job == MR_JOB_PROBE ? MR_PATH_RING - 1 : MR_PATH_WINDOW)) {
		if (choice->job != MR_JOB_PROBE)
			return MR_NOTHING;
		/* so many unanswered that no more fit: it must not stand in the way of data */
		mr_tx_unask(c, path);
		return MR_AGAIN;
	}
	if (choice->job == MR_JOB_PROBE) {
		if (choice->full)
			c->probe_full &= ~(1u << path);
		else
			c->probe &= ~(1u << path);
		c->unasked &= ~(1u << path);
		p->probes++;
		k->ask = 1;
	}
	if (job == MR_JOB_REPAIR) {
		s = &c->tx[source];
		if (!mr_core_any_repair(s)) {
			c->repairs &= ~(1u << source);
			return MR_AGAIN;
		}
		idx = mr_core_first_repair(s);
		k->d.psn = sp->desc[idx & 255].psn;
		k->d.offset = sp->desc[idx & 255].offset;
		k->d.len = sp->desc[idx & 255].len;
		k->d.slot = sp->desc[idx & 255].slot;
		needed = !mr_before(k->d.psn, c->psn_cum) &&
			 !(c->nak_syndrome && !mr_before(k->d.psn, c->nak_psn)) &&
			 !(c->fault && !mr_before(k->d.psn, c->fault_psn));
		if (needed && source == path && (k->d.len & MR_DESC_AGAIN) &&
		    choice->job != MR_JOB_PROBE &&
		    (mr_tx_exiles(c->active, c->exile | 1u << path) >> path & 1)) {
			c->exile |= 1u << path;
			return MR_AGAIN;
		}
		k->d.len &= ~MR_DESC_AGAIN;
		s->repair[idx / 64 & 3] &= ~(1ull << (idx & 63));
		if (!mr_core_any_repair(s))
			c->repairs &= ~(1u << source);
		c->exile &= ~(1u << source);
		if (c->held >> source & 1) { /* its next slot may be free now */
			c->held &= ~(1u << source);
			c->probe |= 1u << source;
			c->probe_full |= 1u << source;
		}
		if (!needed) {
			if (choice->job == MR_JOB_PROBE)
				c->probe |= 1u << path; /* the slot is free now: next time */
			return MR_AGAIN;
		}
		k->flags = MR_F_RETX;
		again = source == path;
		p->one = 0;
		p->retx++;
	} else if (job == MR_JOB_DATA) {
		if (!mr_before(c->psn_next, c->psn_limit))
			return MR_NOTHING;
		if (fresh) {
			c->msn_next++;
			c->busy = 1;
			c->cur_off = 0;
			c->cur_len = fresh->len;
			if (fresh->op == MR_WR_WRITE_IMM) {
				c->ordinal++;
				c->no_credit = 0;
			}
		}
		again = 0;
		left = c->cur_len - c->cur_off;
		k->d.psn = c->psn_next++;
		k->d.offset = c->cur_off;
		k->d.slot = (c->msn_next - 1) % MR_SQ_DEPTH;
		if (left <= c->cut) {
			k->d.len = left;
			c->busy = 0;
		} else {
			k->d.len = c->cut;
			c->cur_off += c->cut;
		}
	} else {
		again = 0;
		k->d.psn = c->psn_next;
		k->d.len = choice->full ? MR_DESC_FULL : MR_DESC_PROBE;
		k->d.offset = 0;
		k->d.slot = 0;
	}
	k->job = job;
	if (c->busy || c->msn_next != tail)
		k->flags |= MR_F_MORE;
	k->pseq = p->next++;
	if (choice->idle)
		p->idle_pseq = k->pseq;
	pp->desc[k->pseq & 255] = k->d;
	if (again)
		pp->desc[k->pseq & 255].len = k->d.len | MR_DESC_AGAIN;
	mr_core_mark_probe(p, k->pseq & 255, job == MR_JOB_PROBE);
	/*
	 * Repairs ask; so does the packet that closes a window; so does the last one of a
	 * message, which is acknowledged at once anyway: no probe need follow it.
	 */
	if (job == MR_JOB_REPAIR || (job == MR_JOB_DATA && !c->busy) ||
	    mr_core_inflight(p) >= p->cwnd || mr_core_inflight(p) >= MR_PATH_WINDOW ||
	    !mr_before(c->psn_next, c->psn_limit))
		k->ask = 1;
	mr_gate_sent(pump, e, p->egress, now, &k->ask);
	if (k->ask)
		c->unasked &= ~(1u << path);
	else
		c->unasked |= 1u << path;
	k->cut = c->cut;
	k->gen = p->gen;
	k->path = path;
	k->sport = p->sport;
	frame = pp->l4_off + sizeof(struct mr_l4write);
	if (job != MR_JOB_PROBE)
		frame += k->d.len;
	else if (choice->full)
		frame += c->cut;
	mr_core_pace(p, now, frame);
	p->sent++;
	p->sent_bytes += frame;
	c->rr = path + 1 < c->npaths ? path + 1 : 0;
	return MR_SENT;
}

/* Fills len bytes of the frame from `at` on with zeros. Global, so that it is verified once. */
__attribute__((noinline)) int mr_tx_pad(struct xdp_md *ctx, __u32 at, __u32 len)
{
	__u32 key = 0;
	struct mr_zero *zero = bpf_map_lookup_elem(&mr_zero, &key);

	if (!zero || !len || len > 4096 || at > 256)
		return -1;
	return bpf_xdp_store_bytes(ctx, at, zero->b, MR_BOUND4K(len));
}

/*
 * Writes the frame: every byte of every header, since pages come back as others left them.
 * Global, so that it is verified once and not behind each way through mr_tx_commit.
 */
__attribute__((noinline)) int mr_tx_build(struct xdp_md *ctx, struct mr_path *pp, struct mr_req *r,
					  struct mr_packet *k)
{
	__u32 l4, l3, len, hdr, ext, flags, udp_len;
	volatile __u64 *from;
	struct mr_l4dh *f;
	void *data, *end;
	__u64 *to;
	__u32 i;
	int have;

	if (!pp || !r || !k)
		return -1;
	have = bpf_xdp_get_buff_len(ctx);
	l4 = pp->l4_off & 63;
	l3 = pp->l3_off & 31;
	flags = k->flags;
	if (k->job == MR_JOB_PROBE) {
		ext = MR_EXT_PROBE;
		hdr = sizeof(struct mr_l4dh);
		len = 0;
		if (k->d.len == MR_DESC_FULL) /* as long as the longest data packet */
			len = sizeof(struct mr_l4imm) - hdr + k->cut;
	} else {
		len = k->d.len;
		ext = MR_EXT_WRITE;
		hdr = sizeof(struct mr_l4write);
		if (k->d.offset + len >= r->len) {
			flags |= MR_F_LAST;
			if (r->op == MR_WR_WRITE_IMM) {
				flags |= MR_F_IMM;
				ext = MR_EXT_WRITE_IMM;
				hdr = sizeof(struct mr_l4imm);
			}
		}
	}
	/* the frame's length reaches the driver only if the program changes it, each time */
	if (bpf_xdp_adjust_tail(ctx, (int)(l4 + hdr + len) - have))
		return -1;
	if (ext == MR_EXT_PROBE) {
		if (len && mr_tx_pad(ctx, l4 + hdr, len))
			return -1;
	} else if (len) {
		/* the region may be gone, its index another one's: the key tells */
		__u32 index = r->lkey >> 8;
		struct mr_region *region = bpf_map_lookup_elem(&mr_region, &index);

		if (!region || region->key != r->lkey ||
		    mr_fetch(ctx, l4 + hdr, len, index, r->local + k->d.offset))
			return -MR_FAULT_LOC_PROT;
	}
	data = (void *)(long)ctx->data;
	end = (void *)(long)ctx->data_end;
	if (data + sizeof(pp->tmpl) > end)
		return -1;
	to = data;
	from = (void *)pp->tmpl;
#pragma unroll
	for (i = 0; i < sizeof(pp->tmpl) / 8; i++)
		to[i] = from[i]; /* by words: control may be writing it */
	udp_len = hdr + len;
	if (!pp->v6) {
		struct iphdr *ip = data + l3;

		if ((void *)(ip + 1) > end)
			return -1;
		ip->tot_len = bpf_htons(sizeof(*ip) + udp_len);
		ip->check = ~mr_fold((__u64)pp->l3_sum + ip->tot_len);
	} else {
		struct ipv6hdr *ip = data + l3;

		if ((void *)(ip + 1) > end)
			return -1;
		ip->payload_len = bpf_htons(udp_len);
	}
	f = data + l4;
	if ((void *)(f + 1) > end)
		return -1;
	f->udp.source = bpf_htons(k->sport);
	f->udp.dest = bpf_htons(mr_port);
	f->udp.len = bpf_htons(udp_len);
	f->udp.check = 0;
	f->bth.opcode = k->job == MR_JOB_PROBE ? MR_OP_PROBE : MR_OP_WRITE;
	f->bth.flags = 0;
	f->bth.pkey = bpf_htons(MR_PKEY_DEFAULT);
	f->bth.qpn = bpf_htonl(k->peer_qpn);
	f->bth.apsn = bpf_htonl((k->d.psn & MR_PSN24) | (k->ask ? MR_BTH_ACKREQ : 0));
	f->dh.path = k->path;
	f->dh.gen = k->gen;
	f->dh.flags = flags;
	f->dh.ver_ext = MR_VER_EXT(ext);
	f->dh.token = bpf_htonl(k->token);
	f->dh.pseq = bpf_htonl(k->pseq);
	f->dh.psn = bpf_htonl(k->d.psn);
	f->dh.ts = bpf_htonl(k->ts);
	f->dh.stream = 0;
	f->dh.backlog = 0;
	f->dh.msn = 0;
	f->dh.offset = 0;
	if (ext != MR_EXT_PROBE) {
		struct mr_l4write *w = (void *)f;

		if ((void *)(w + 1) > end)
			return -1;
		w->dh.msn = bpf_htonl(r->msn);
		w->dh.offset = bpf_htonl(k->d.offset);
		w->reth.addr = bpf_cpu_to_be64(r->raddr + k->d.offset);
		w->reth.rkey = bpf_htonl(r->rkey);
		w->reth.len = bpf_htonl(r->len);
	}
	if (ext == MR_EXT_WRITE_IMM) {
		struct mr_l4imm *i = (void *)f;

		if ((void *)(i + 1) > end)
			return -1;
		i->imm.imm = bpf_htonl(r->imm);
		i->imm.ordinal = bpf_htonl(r->ordinal);
	}
	return udp_len;
}

/*
 * The time of a packet. In a train the clock is read for every fourth one only: it costs
 * 30 ns, and three packets take about 2 us, far below what pacing and round trips resolve.
 */
static __always_inline __u64 mr_tx_now(struct mr_pump *pump)
{
	if (!pump->now_ns || !(pump->sent & 3))
		pump->now_ns = bpf_ktime_get_ns();
	return pump->now_ns;
}

static __always_inline int mr_tx_conn(struct xdp_md *ctx, struct mr_pump *pump, __u32 slot,
				      struct mr_counters *ctr, __u32 *out)
{
	struct mr_reqs *reqs = bpf_map_lookup_elem(&mr_req, &slot);
	struct mr_conn *c = bpf_map_lookup_elem(&mr_conn, &slot);
	struct mr_qpage *page = mr_qpage(slot);
	struct mr_choice choice = {};
	struct mr_req *r = 0, *fresh = 0;
	struct mr_packet k = {};
	struct mr_path *pp, *sp;
	__u32 tail, index, fault, data = 0, unasked, probe, shut;
	struct mr_egress *e;
	int done, udp_len;
	__u64 now;

	if (!c || !page || !reqs || MR_READ_ONCE(c->state) != MR_CONN_OPEN)
		return MR_NOTHING;
	now = mr_tx_now(pump);
	tail = MR_READ_ONCE(page->sq_tail);

	if (!MR_READ_ONCE(c->nak_syndrome) && !c->fault &&
	    mr_before(c->psn_next, MR_READ_ONCE(c->psn_limit))) {
		if (c->busy) {
			data = 1;
		} else if (tail != c->msn_next) {
			/* a fetch orders what follows behind it: the entry is read after the tail */
			tail = __sync_fetch_and_add(&page->sq_tail, 0);
			fresh = &reqs->req[c->msn_next % MR_SQ_DEPTH];
			fault = mr_tx_load(fresh, page, c->msn_next, c->pd);
			if (fault) {
				mr_tx_stop(c, page, slot, fault, c->msn_next, c->psn_next, ctr);
				fresh = 0;
			} else if (fresh->op == MR_WR_WRITE_IMM &&
				   !mr_before(c->ordinal, MR_READ_ONCE(c->credit))) {
				if (!c->no_credit)
					ctr->tx_no_credit++;
				MR_WRITE_ONCE(c->no_credit, 1);
				fresh = 0;
			} else {
				fresh->ordinal = c->ordinal;
				data = 1;
			}
		}
	}

	shut = pump->held ? mr_gate_shut(slot, now) : 0;
	unasked = MR_READ_ONCE(c->unasked) & ~shut;
	probe = MR_READ_ONCE(c->probe) & ~shut;
	choice.full = !probe;
	if (!probe)
		probe = MR_READ_ONCE(c->probe_full) & ~shut;
	if (probe) {
		choice.job = MR_JOB_PROBE;
		choice.path = mr_ctz(probe);
		choice.source = choice.path;
	} else if (!(data || MR_READ_ONCE(c->repairs)) ||
		   !mr_tx_pick(c, now, data, shut, &choice)) {
		if (shut && (data | c->repairs | c->unasked | c->probe | c->probe_full)) {
			ctr->tx_held++;
			MR_WRITE_ONCE(pump->paced_ns, now + MR_HOLD_NS);
			return MR_LATER;
		}
		if (choice.paced_ns) {
			MR_WRITE_ONCE(pump->paced_ns, choice.paced_ns);
			ctr->tx_paced++;
			return MR_LATER;
		}
		if (!unasked)
			return MR_NOTHING;
		/* nothing left to send, or all windows shut: learn the fate of each path's last packets */
		choice.job = MR_JOB_PROBE;
		choice.path = mr_ctz(unasked);
		choice.source = choice.path;
		choice.idle = 1;
		choice.full = 0;
	}
	choice.path &= MR_MAX_PATHS - 1;
	choice.source &= MR_MAX_PATHS - 1;
	MR_OPAQUE(choice.path);
	MR_OPAQUE(choice.source);
	/* or mr_tx_commit is walked once for each way of choosing */
	MR_OPAQUE(choice.job);
	MR_OPAQUE(choice.idle);
	MR_OPAQUE(choice.full);
	choice.path &= MR_MAX_PATHS - 1;
	choice.source &= MR_MAX_PATHS - 1;
	index = c->path_base + choice.path;
	pp = bpf_map_lookup_elem(&mr_path, &index);
	index = c->path_base + choice.source;
	sp = bpf_map_lookup_elem(&mr_path, &index);
	e = mr_gate(pump, &c->tx[choice.path]);
	if (!pp || !sp)
		return MR_NOTHING;

	bpf_spin_lock(&c->lock);
	done = mr_tx_commit(c, pp, sp, &choice, fresh, now, tail, &k, pump, e);
	bpf_spin_unlock(&c->lock);
	if (done != MR_SENT) {
		if (done == MR_AGAIN)
			ctr->tx_skipped++;
		return done;
	}

	r = &reqs->req[k.d.slot % MR_SQ_DEPTH];
	/* a request's last packet: now its completion can be told */
	if (k.job == MR_JOB_DATA && !c->busy) {
		struct mr_scqe *e = &page->scq[k.d.slot % MR_SQ_DEPTH];

		e->last_psn = k.d.psn;
		__sync_lock_test_and_set(&e->valid, MR_VALID(r->msn));
	}
	/* what cannot be built is lost on the way: the path's order shows it */
	k.peer_qpn = c->peer_qpn;
	k.token = c->tx_token;
	k.ts = now;
	udp_len = mr_tx_build(ctx, pp, r, &k);
	if (udp_len < 0) {
		ctr->tx_error++;
		if (udp_len == -MR_FAULT_LOC_PROT)
			mr_tx_stop(c, page, slot, MR_FAULT_LOC_PROT, r->msn, k.d.psn, ctr);
		return MR_AGAIN;
	}
	if (c->checksum) {
		__u32 l4 = pp->l4_off & 63;
		struct udphdr *udp;
		__u64 sum = (__u64)pp->pseudo_sum + bpf_htons(udp_len) + mr_csum(ctx, l4, udp_len);

		udp = (void *)(long)ctx->data + l4;
		if ((void *)(udp + 1) > (void *)(long)ctx->data_end)
			return MR_AGAIN;
		udp->check = mr_udp_check(sum);
	}
	if (k.job == MR_JOB_PROBE) {
		ctr->sent_probes++;
	} else {
		ctr->sent_pkts++;
		ctr->sent_bytes += k.d.len;
		if (k.job == MR_JOB_REPAIR)
			ctr->retransmits++;
	}
	*out = pp->ifindex;
	return MR_SENT;
}

static __always_inline int mr_tx_main(struct xdp_md *ctx)
{
	struct mr_counters *ctr = mr_counters();
	struct mr_pump *pump = mr_the_pump();
	__u32 head, slot, entry, out = 0;
	int done, shift = 0;

	if (!ctr || !pump)
		return XDP_ABORTED;
	head = pump->head;
	entry = MR_READ_ONCE(pump->ring[head % MR_RING]);
	if (head == MR_READ_ONCE(pump->tail) || !entry) {
		pump->idle++;
		pump->now_ns = 0;
		return XDP_DROP;
	}
	slot = entry - 1;
	if (slot >= mr_max_conns) {
		ctr->bad_ready++;
		MR_WRITE_ONCE(pump->ring[head % MR_RING], 0);
		pump->head = head + 1;
		return XDP_DROP;
	}
	/*
	 * Not ready any more, then look: whoever publishes work from here on finds 0 and
	 * queues the connection anew, so nothing is overlooked.
	 */
	__sync_lock_test_and_set(&pump->ready[slot % MR_MAX_CONNS], 0);
	done = mr_tx_conn(ctx, pump, slot, ctr, &out);
	if (done == MR_NOTHING) {
		shift = 1;
	} else if (__sync_lock_test_and_set(&pump->ready[slot % MR_MAX_CONNS], 1)) {
		shift = 1; /* queued anew meanwhile, behind the others */
	} else if (done == MR_LATER || ++pump->burst >= mr_quantum) {
		if (MR_READ_ONCE(pump->tail) - head > 1)
			shift = 2; /* the others' turn */
	}
	if (shift) {
		MR_WRITE_ONCE(pump->ring[head % MR_RING], 0);
		pump->head = head + 1;
		pump->burst = 0;
		if (shift == 2)
			mr_ring_push(pump, slot);
	}
	if (done != MR_SENT) {
		pump->now_ns = 0;
		return XDP_DROP;
	}
	pump->sent++;
	return bpf_redirect(out, 0);
}

#endif
