// SPDX-License-Identifier: Apache-2.0

// Package transport is what programs use: devices, memory, connections and
// completion queues, in the terms of verbs.
//
// A program opens a Device on its interfaces, allocates Memory in it and sets up
// a Conn, by Dial on one end and by Listen and Accept on the other. What the
// ends need to know of each other's memory, address and key, they tell in the
// private data of set-up or by means of their own. PostWrite puts bytes into the
// peer's memory without its program's doing; PostWriteImm tells that program,
// too. Requests complete in a CQ, which is polled or waited for.
//
// Requests, keys and statuses are those of the InfiniBand specification,
// chapters 9 to 11, and carry the values of libibverbs. Lengths and offsets are
// in bytes. Whatever waits takes a context, and is bounded without a deadline too,
// save CQ.Wait and Listener.Accept, which wait for others to act.
package transport
