// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The three programs of the device. What they decide stands in the headers, by role. */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "mr_wire.h"
#include "mr_types.h"
#include "mr_maps.h"
#include "mr_btf.h"
#include "mr_core.h"
#include "mr_egress.h"
#include "mr_util.h"
#include "mr_parse.h"
#include "mr_csum.h"
#include "mr_copy.h"
#include "mr_ready.h"
#include "mr_gate.h"
#include "mr_ack.h"
#include "mr_rx.h"
#include "mr_tx.h"
#include "mr_ctl.h"

/*
 * Every packet that comes in: ours are placed or digested, the rest passes. With
 * frags, so that drivers take it at any MTU: somebody else's jumbo frames pass.
 */
SEC("xdp.frags")
int mr_rx(struct xdp_md *ctx)
{
	return mr_rx_main(ctx);
}

/* Run with live frames by the pump: each run emits at most one packet. */
SEC("xdp")
int mr_tx(struct xdp_md *ctx)
{
	return mr_tx_main(ctx);
}

/* Run once by control: changes locked state for Go. */
SEC("xdp")
int mr_ctl(struct xdp_md *ctx)
{
	return mr_ctl_main(ctx);
}

char _license[] SEC("license") = "Dual BSD/GPL";
