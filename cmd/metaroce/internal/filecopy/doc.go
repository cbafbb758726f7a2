// SPDX-License-Identifier: Apache-2.0

// Package filecopy copies files from one host to another by RDMA Write.
//
// The receiver has a ring of chunks. The sender writes each chunk, and with it an
// immediate that says what the chunk is; the receiver answers every chunk, once it
// has used it, by a write with immediate into the sender's memory, and with that
// the chunk's place is free again.
//
//	sender                          receiver
//	open (name, size, ...) -------->
//	data, data, ...        -------->  into a temporary file
//	                       <--------  credit for each
//	end (SHA-256)          -------->  compared, synced, renamed
//	                       <--------  done (SHA-256)
//
// Either end may say that it gave up, and why.
package filecopy
