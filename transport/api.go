// SPDX-License-Identifier: Apache-2.0

// Package transport is what programs use: devices, memory, connections and
// completion queues, in the terms of verbs.
package transport
