/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Types that user space needs by name although no map's value mentions them:
 * clang describes in BTF what a global can reach, and constant pointers in
 * .rodata cost nothing. A map or program of the same name would hide two of them
 * from bpf2go, so they have a second name here.
 */
#ifndef MR_BTF_H
#define MR_BTF_H

typedef struct mr_event mr_event_record;
typedef struct mr_ctl mr_ctl_frame;

#define MR_EMIT_TYPE(type, name) type *const mr_type_##name = 0

MR_EMIT_TYPE(struct mr_qpage, qpage);
MR_EMIT_TYPE(mr_event_record, event);
MR_EMIT_TYPE(mr_ctl_frame, ctl);
MR_EMIT_TYPE(enum mr_conn_state, conn_state);
MR_EMIT_TYPE(enum mr_path_state, path_state);
MR_EMIT_TYPE(enum mr_access, access);
MR_EMIT_TYPE(enum mr_wr_op, wr_op);
MR_EMIT_TYPE(enum mr_fault, fault);
MR_EMIT_TYPE(enum mr_ctl_op, ctl_op);
MR_EMIT_TYPE(enum mr_ctl_result, ctl_result);

#undef MR_EMIT_TYPE

#endif
