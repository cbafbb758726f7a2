#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what a purpose needs and the machine lacks.
#   scripts/deps.sh PURPOSE...     go | run | build | test | kernels
# Each tool is looked for as a command or a file, so a machine that has it from elsewhere is left
# alone. What is missing comes from apt, and only as root; else this says what to install.
# CLANG, STRIP and CLANG_FORMAT name other binaries than clang-19, llvm-strip-19, clang-format-19.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PATH:/usr/sbin:/sbin

# purpose, probe (command, or file with a slash), Debian package, what for
table() {
	cat <<-EOF
	run      ip                               iproute2           lab networks: namespaces, veth, routes
	run      ethtool                          ethtool            looks at an interface's features
	run      iperf3                           iperf3             the TCP that results are compared to
	run      bpftool                          bpftool            dumps the state maps by field name
	run      ps                               procps             looks at running processes
	build    ${CLANG:-clang-19}               clang-19           compiles the BPF programs and native C tests
	build    ${STRIP:-llvm-strip-19}          llvm-19            strips DWARF from BPF objects
	build    ${CLANG_FORMAT:-clang-format-19} clang-format-19    checks the style of C
	build    /usr/include/bpf/bpf_helpers.h   libbpf-dev         headers for BPF programs
	build    /usr/include/linux/bpf.h         linux-libc-dev     kernel headers for BPF programs
	test     git                              git                check-generated compares with the index
	build    python3                          python3            writes the golden vectors
	test     shellcheck                       shellcheck         checks the scripts
	test     ${CC:-gcc}                       gcc                cgo, which the race detector needs
	test     /usr/include/stdlib.h            libc6-dev          C library headers, for the race detector
	test     $(sanitizers)                    libclang-rt-19-dev ASan, UBSan and libFuzzer for native C tests
	kernels  qemu-system-x86_64               qemu-system-x86    runs other kernels, emulated
	kernels  ip                               iproute2           taps that join the virtual machine's interfaces
	kernels  unshare                          util-linux         a network namespace for these
	kernels  busybox                          busybox-static     user space of the virtual machine
	kernels  depmod                           kmod               finds a kernel's modules and their order
	kernels  cpio                             cpio               packs the initial file system
	kernels  xz                               xz-utils           unpacks the modules of 6.12
	kernels  dash                             dash               shell of the virtual machine
	kernels  dpkg-deb                         dpkg               unpacks kernel packages
	EOF
}

# sanitizers prints a file of clang's run-time libraries, or where Debian puts it.
sanitizers() {
	local dir file
	if command -v "${CLANG:-clang-19}" >/dev/null; then
		dir=$("${CLANG:-clang-19}" -print-resource-dir)
		for file in "$dir"/lib/*/libclang_rt.fuzzer*.a; do
			if [[ -e $file ]]; then echo "$file" && return; fi
		done
	fi
	echo /usr/lib/llvm-19/lib/clang/19/lib/linux/libclang_rt.fuzzer-x86_64.a
}

# at_least FOUND WANTED compares versions like 1.26.8.
at_least() { [[ $(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1) == "$2" ]]; }

check_go() {
	local wanted found
	wanted=$(awk '$1 == "go" { print $2 }' go.mod)
	found=$(timeout 120 go env GOVERSION 2>/dev/null || true)
	found=${found#go}
	if [[ -z $found ]] || ! at_least "${found%% *}" "$wanted"; then
		echo "deps: Go: found ${found:-none}, want $wanted or later; it comes from https://go.dev/dl/" \
			"(unpack it and put its bin folder on PATH)" >&2
		exit 1
	fi
}

# absent prints package and reason of what the purposes given as arguments lack.
absent() {
	local purpose probe package reason
	while read -r purpose probe package reason; do
		[[ " $* " == *" $purpose "* ]] || continue
		if [[ $probe == */* ]]; then
			[[ ! -e $probe ]] || continue
		else
			! command -v "$probe" >/dev/null || continue
		fi
		echo "$package $probe is missing ($purpose: $reason)"
	done < <(table)
}

check_go
missing=()
while read -r package what; do
	echo "deps: $package: $what"
	missing+=("$package")
done < <(absent "$@")
((${#missing[@]})) || exit 0

if ! command -v apt-get >/dev/null; then
	echo "deps: no apt-get here: install these (Debian's names) another way: ${missing[*]}" >&2
	exit 1
fi
if ((EUID != 0)); then
	echo "deps: not root: run as root: apt-get install --no-install-recommends ${missing[*]}" >&2
	exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt=(apt-get -q -y -o DPkg::Lock::Timeout=120 -o Acquire::Retries=2)
echo "deps: apt-get update"
# A third-party list that fails to update must not stop us: the install below decides.
timeout 300 "${apt[@]}" update >/dev/null || echo "deps: apt-get update failed: going on with the lists that are here" >&2
echo "deps: apt-get install --no-install-recommends ${missing[*]}"
if ! timeout 600 "${apt[@]}" install --no-install-recommends "${missing[@]}" >/dev/null; then
	echo "deps: apt-get could not install ${missing[*]} (for another clang set CLANG, STRIP and CLANG_FORMAT)" >&2
	exit 1
fi
hash -r
still=$(absent "$@")
if [[ -n $still ]]; then
	echo "deps: installed, but still: $still" >&2
	exit 1
fi
