// SPDX-License-Identifier: Apache-2.0

package lab

//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -go-package lab -cflags "-O2 -g -Wall -Wextra -Werror -mcpu=v3 -I/usr/include/x86_64-linux-gnu" -type lab_class -type lab_action -type lab_plane_flag lab ../../bpf/lab_switch.bpf.c
