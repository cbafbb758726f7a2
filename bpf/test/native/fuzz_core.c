// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Sender and receiver of one path and one stream, joined by a network that the
 * fuzzer plays: it loses, delays, repeats, re-rolls. Whatever it does, no psn is
 * placed twice, no descriptor that waits for its repair is overwritten, and once
 * the network behaves, everything arrives.
 */
#include "native.h"

#define TOTAL 600
#define WIRE 64

struct frame {
	__u32 psn, pseq;
	__u8 gen;
};

static struct mr_rx_stream stream;
static struct mr_rx_path rx;
static struct mr_tx_path tx;
static struct mr_desc ring[256];
static struct frame wire[WIRE];
static __u32 on_wire, psn_next, psn_cum, start;
static __u8 placed[TOTAL];

static void put_on_wire(__u32 psn)
{
	__u32 pseq = tx.next++;

	ring[pseq & 255].psn = psn;
	if (on_wire < WIRE)
		wire[on_wire++] = (struct frame){ psn, pseq, tx.gen };
	/* else the network drops it */
}

static void send(void)
{
	__u32 slot;

	if (mr_core_inflight(&tx) >= MR_PATH_WINDOW)
		return;
	if (mr_core_any_repair(&tx)) {
		slot = mr_core_first_repair(&tx);
		tx.repair[slot / 64] &= ~(1ull << (slot & 63));
		if (!mr_before(ring[slot].psn, psn_cum))
			put_on_wire(ring[slot].psn);
		return;
	}
	assert(!mr_core_next_is_repair(&tx));
	if (psn_next - start < TOTAL)
		put_on_wire(psn_next++);
}

static void acknowledge(void)
{
	if (mr_before(psn_cum, stream.cum))
		psn_cum = stream.cum;
	if (rx.gen == tx.gen && mr_before(rx.max, tx.next))
		mr_core_tx_ack(&tx, rx.max, rx.vec, 0);
}

static void receive(__u32 i)
{
	struct frame f = wire[i];
	enum mr_gen gen = mr_core_gen(rx.gen, f.gen);

	if (gen == MR_GEN_STALE)
		return;
	switch (mr_core_claim(&stream, f.psn)) {
	case MR_NEW:
		assert(!placed[f.psn - start]++);
		mr_core_arrive(&stream, f.psn);
		break;
	case MR_DUP:
		assert(placed[f.psn - start] == 1);
		break;
	default:
		assert(0);
	}
	if (gen == MR_GEN_NEW)
		mr_core_rx_newgen(&rx, f.gen, f.pseq);
	if (gen != MR_GEN_PREVIOUS)
		mr_core_rx_pseq(&rx, f.pseq);
}

static void take_off(__u32 i)
{
	memmove(&wire[i], &wire[i + 1], (--on_wire - i) * sizeof(wire[0]));
}

int LLVMFuzzerTestOneInput(const __u8 *data, size_t size)
{
	__u32 i, k;

	if (size < 4)
		return 0;
	memset(&stream, 0, sizeof(stream));
	memset(&rx, 0, sizeof(rx));
	memset(&tx, 0, sizeof(tx));
	memset(placed, 0, sizeof(placed));
	on_wire = 0;
	memcpy(&start, data, 4);
	psn_next = psn_cum = stream.cum = tx.next = tx.una = tx.first = start;
	mr_core_rx_newgen(&rx, 0, start);
	tx.acked_gen = 0;
	for (i = 4; i < size; i++) {
		__u8 op = data[i] >> 5, arg = data[i] & 31;

		switch (op) {
		case 0:
		case 1:
			for (k = 0; k <= arg; k++)
				send();
			break;
		case 2: /* in order */
			for (k = 0; k <= arg && on_wire; k++) {
				receive(0);
				take_off(0);
			}
			break;
		case 3: /* one overtakes */
			if (arg < on_wire) {
				receive(arg);
				take_off(arg);
			}
			break;
		case 4: /* twice */
			if (arg < on_wire)
				receive(arg);
			break;
		case 5: /* lost */
			for (k = 0; k <= arg / 4 && on_wire; k++)
				take_off(arg % on_wire);
			break;
		case 6:
			acknowledge();
			break;
		case 7: /* timeout, or a new generation that the peer is not too far behind */
			mr_core_tx_all_lost(&tx);
			if (arg & 1 && (__u8)(tx.gen - rx.gen) < 64) {
				tx.gen++;
				tx.first = tx.next;
			}
			break;
		}
	}
	for (i = 0; i < 20 * TOTAL && psn_cum - start < TOTAL; i++) {
		send();
		while (on_wire) {
			receive(0);
			take_off(0);
		}
		acknowledge();
		if (i % 64 == 63)
			mr_core_tx_all_lost(&tx);
	}
	assert(psn_cum - start == TOTAL && stream.cum == start + TOTAL);
	return 0;
}
