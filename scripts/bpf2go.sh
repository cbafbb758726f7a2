#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What go generate runs, in the package's folder: bpf2go with this project's compiler and flags.
#   BPF2GO_CC, BPF2GO_STRIP  other binaries than Debian's clang-19 and llvm-strip-19; make sets them
#                            from CLANG and STRIP
set -eu
: "${BPF2GO_CC:=clang-19}" "${BPF2GO_STRIP:=llvm-strip-19}"
export BPF2GO_CC BPF2GO_STRIP
exec go tool bpf2go -target bpfel -go-package "$GOPACKAGE" \
	-cflags "-O2 -g -mcpu=v3 -Wall -Wextra -Werror -I/usr/include/x86_64-linux-gnu" "$@"
