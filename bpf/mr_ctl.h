/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Control's hand in locked state: a syscall program may not take a lock on 6.1,
 * an XDP program may. The "frame" is a struct mr_ctl.
 */
#ifndef MR_CTL_H
#define MR_CTL_H

static __always_inline void mr_ctl_rescue(struct mr_conn *c, struct mr_tx_path *p, __u32 path,
					  __u32 *lost)
{
	*lost = mr_core_tx_all_lost(p);
	p->lost += *lost;
	if (*lost)
		c->repairs |= 1u << path;
	c->unasked &= ~(1u << path);
}

static __always_inline int mr_ctl_main(struct xdp_md *ctx)
{
	struct mr_ctl *cmd = (void *)(long)ctx->data;
	struct mr_counters *ctr = mr_counters();
	__u32 op, slot, path, value, full, cwnd, pace, tolerance, lost = 0, ready = 0;
	int result = MR_CTL_OK;
	struct mr_tx_path *p;
	struct mr_conn *c;

	if (!ctr || (void *)(cmd + 1) > (void *)(long)ctx->data_end)
		return MR_CTL_BAD;
	op = cmd->op;
	slot = cmd->slot;
	path = cmd->path;
	value = cmd->value;
	full = cmd->full;
	cwnd = cmd->cwnd;
	pace = cmd->pace;
	tolerance = cmd->tolerance;
	if (path >= MR_MAX_PATHS)
		return MR_CTL_BAD;
	c = bpf_map_lookup_elem(&mr_conn, &slot);
	if (!c || c->qpn != cmd->qpn)
		return MR_CTL_NO_CONN;
	/* 6.1 forgets the comparison above when the register is spilled */
	MR_OPAQUE(path);
	path &= MR_MAX_PATHS - 1;
	p = &c->tx[path];

	bpf_spin_lock(&c->lock);
	switch (op) {
	case MR_CTL_STATE:
		c->state = value;
		break;
	case MR_CTL_PATH:
		p->cwnd = cwnd;
		p->pace = pace;
		p->pace_max = 2 * pace;
		p->tolerance = tolerance;
		ready = 1;
		break;
	case MR_CTL_PROBE:
		c->probe |= value;
		c->probe_full |= full;
		c->held &= ~(value | full);
		ready = 1;
		break;
	case MR_CTL_SUSPECT:
		p->state = value;
		c->exile &= ~(1u << path);
		if (value == MR_PATH_ACTIVE) {
			c->active |= 1u << path;
		} else {
			c->active &= ~(1u << path);
			mr_ctl_rescue(c, p, path, &lost);
			if (!c->active) { /* nobody takes repairs over: they are the probes */
				c->probe |= c->held;
				c->held = 0;
			}
		}
		ready = 1;
		break;
	case MR_CTL_REROLL:
		/* never so far ahead of what the peer has heard that it takes new for old */
		if ((__u8)(p->gen - p->acked_gen) >= MR_GEN_AHEAD) {
			result = MR_CTL_LIMIT;
		} else {
			p->gen++;
			p->sport = value;
			p->peer_pkts = 0;
			p->peer_ce = 0;
			p->peer_dups = 0;
			p->first = p->next;
			p->heard = p->next - 1;
		}
		/* in any case: the slots that unanswered probes have taken are free again */
		mr_ctl_rescue(c, p, path, &lost);
		ready = 1;
		break;
	case MR_CTL_TIMEOUT:
		mr_ctl_rescue(c, p, path, &lost);
		p->one = 1;
		ready = 1;
		break;
	case MR_CTL_KICK:
		ready = 1;
		break;
	case MR_CTL_CUT:
		if (c->msn_next || !value || value > c->payload)
			result = MR_CTL_LIMIT;
		else
			c->cut = value;
		ready = 1;
		break;
	default:
		result = MR_CTL_BAD;
	}
	bpf_spin_unlock(&c->lock);
	ctr->packet_seq_err += lost;
	if (op == MR_CTL_TIMEOUT)
		ctr->local_ack_timeout_err++;
	if (ready)
		mr_make_ready(slot);
	return result;
}

#endif
