// SPDX-License-Identifier: Apache-2.0

// Package bench measures: workloads over package transport, the baselines that
// they are compared with, and reports. Only commands and tests import it.
package bench
