#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Native C tests of the BPF programs' decisions, under AddressSanitizer and UBSan.
#   scripts/native.sh test              builds and runs every test_*.c below bpf/
#   scripts/native.sh fuzz [SECONDS]    builds and runs every fuzz_*.c below bpf/ (libFuzzer)
# They run in the repository's root. A fuzz target's seeds are in testdata/fuzz/NAME, if it has any.
set -euo pipefail
cd "$(dirname "$0")/.."
mode=${1:?test or fuzz} seconds=${2:-5}
clang=${CLANG:-clang-19}
flags=(-std=gnu11 -O1 -g -Wall -Wextra -Werror -Wno-address-of-packed-member -fno-omit-frame-pointer -fno-sanitize-recover=all -Ibpf)
# Headers in a frame lie at any address; BPF has no alignment to keep on the machines that it runs on.
flags+=(-fno-sanitize=alignment)
case $mode in
test) prefix=test sanitize=address,undefined limit=240 ;;
fuzz) prefix=fuzz sanitize=fuzzer,address,undefined limit=$((seconds + 120)) ;;
*) echo "native: found $mode, want test or fuzz" >&2 && exit 2 ;;
esac
mkdir -p build/native
count=0
for source in $(git ls-files -co --exclude-standard -- ":(glob)bpf/**/${prefix}_*.c"); do
	name=$(basename "$source" .c)
	binary=build/native/$name
	"$clang" "-fsanitize=$sanitize" "${flags[@]}" -I"$(dirname "$source")" -o "$binary" "$source"
	arguments=()
	if [[ $mode == fuzz ]]; then
		seeds=testdata/fuzz/$name corpus=build/native/corpus-$name
		mkdir -p "$corpus"
		arguments=(-max_total_time="$seconds" -max_len=4096 -verbosity=0 -print_final_stats=1
			-artifact_prefix="build/native/$name-" "$corpus")
		if [[ -d $seeds ]]; then arguments+=("$seeds"); fi
	fi
	echo "native: $name"
	timeout "$limit" "$binary" "${arguments[@]}"
	count=$((count + 1))
done
if ((count == 0)); then
	echo "native: found no ${prefix}_*.c below bpf/, want some" >&2
	exit 1
fi
echo "native: $count programs ${prefix}_*.c, no finding"
