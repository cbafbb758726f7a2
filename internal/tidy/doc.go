// SPDX-License-Identifier: Apache-2.0

// Package tidy holds the repository to its own rules by tests: which folder may import which,
// licence headers, names that the kernel would cut short, nothing left unfinished. CONTRIBUTING.md
// says what the rules are for.
package tidy
