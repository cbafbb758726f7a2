#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs Go tests on the kernels that the project promises to work on, each in a virtual machine (scripts/vm.sh).
#   KERNEL_TEST_PACKAGES  Go packages whose tests run there (those that exist and have tests)
#   KERNEL_TEST_RUN       -test.run, all by default
#   KERNEL_TEST_TIMEOUT   -test.timeout of each package
#   METAROCE_KERNELS      kernel packages instead of Debian's newest 6.1 and 6.12
# The tests are static binaries run with -test.short and METAROCE_KERNEL=short: emulated, a machine is some 20
# times slower, so tests choose smaller sizes by that variable. Each runs in its package's folder below /src,
# where every testdata folder of the repository is; METAROCE_BIN names bin/metaroce.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${KERNEL_TEST_PACKAGES:=./bpf/... ./loader/... ./transport/xdp/... ./fabric/lab/... ./e2e/...}"
: "${KERNEL_TEST_RUN:=.}" "${KERNEL_TEST_TIMEOUT:=700s}"
: "${VM_CACHE:=${XDG_CACHE_HOME:-/var/tmp}/metaroce-kernels}"
export VM_CACHE

# newest REGEX prints the newest kernel package whose whole name matches.
newest() { apt-cache pkgnames linux-image- | { grep -xE "$1" || true; } | sort -V | tail -n 1; }

find_kernels() { # fills kernels; fails, naming it, if one is unknown to apt or not in the cache
	local regex found
	kernels=()
	for regex in 'linux-image-6\.1\.0-[0-9]+-amd64' 'linux-image-6\.12\.[0-9]+\+deb[0-9]+-amd64'; do
		found=$(newest "$regex")
		if [[ -z $found ]]; then
			problem="apt-cache knows no package $regex (Debian 12 has it); METAROCE_KERNELS can name others"
			return 1
		fi
		kernels+=("$found")
		[[ -d $VM_CACHE/$found ]] || problem="$found is not in $VM_CACHE"
	done
	[[ -z $problem ]]
}

problem=''
read -ra kernels <<<"${METAROCE_KERNELS:-}"
if ((${#kernels[@]} == 0)) && ! find_kernels; then
	# Something is to be downloaded: old package lists would name versions that are no longer there.
	echo "test-kernels: $problem: renewing apt's package lists"
	DEBIAN_FRONTEND=noninteractive timeout 300 apt-get -q -y -o DPkg::Lock::Timeout=120 -o Acquire::Retries=2 update >/dev/null || true
	problem=''
	find_kernels || ((${#kernels[@]} == 2)) || { echo "test-kernels: $problem" >&2 && exit 1; }
fi

work=$(mktemp -d "${TMPDIR:-/tmp}/metaroce-kernels.XXXXXX")
trap 'rm -rf "$work"' EXIT
overlay=$work/overlay
mkdir -p "$overlay/src" "$overlay/usr/bin"
export CGO_ENABLED=0 GOARCH=amd64 GOOS=linux
cp go.mod "$overlay/src/"
find . -name testdata -type d -not -path './.git/*' -print0 | tar --null -T - -cf - | tar -xf - -C "$overlay/src"
if [[ -d cmd/metaroce ]]; then go build -trimpath -ldflags='-s -w' -o "$overlay/usr/bin/metaroce" ./cmd/metaroce; fi

# Folders that do not exist are left out, packages without tests too.
patterns=()
for pattern in $KERNEL_TEST_PACKAGES; do
	if [[ -d ${pattern%/...} ]]; then patterns+=("$pattern"); fi
done
if ((${#patterns[@]} == 0)); then
	echo "test-kernels: none of these folders exists: $KERNEL_TEST_PACKAGES" >&2
	exit 1
fi
module=$(go list -m)
list='{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}'
for path in $(go list -f "$list" "${patterns[@]}"); do
	folder=${path#"$module"/}
	binary=${folder//\//-}.test
	mkdir -p "$overlay/src/$folder"
	echo "test-kernels: building the tests of $folder"
	go test -c -trimpath -ldflags='-s -w' -o "$overlay/src/$folder/$binary" "$path"
	echo "$binary $folder $path" >>"$overlay/src/tests"
done
if [[ ! -e $overlay/src/tests ]]; then
	echo "test-kernels: no package with tests among $KERNEL_TEST_PACKAGES" >&2
	exit 1
fi
echo "-test.timeout=$KERNEL_TEST_TIMEOUT -test.run=$KERNEL_TEST_RUN" >"$overlay/src/options"

# The end-to-end tests find these (e2e/virtio_test.go).
export VM_PAIRS="${VM_PAIRS-plain jumbo queues offloads}"

# All machines at once: an emulated one takes one processor of this machine (scripts/vm.sh says why).
failed=() pids=()
for kernel in "${kernels[@]}"; do
	echo "test-kernels: $kernel: starting"
	(
		start=$SECONDS status=0
		scripts/vm.sh "$kernel" "$overlay" scripts/kernel-tests.sh || status=$?
		echo "test-kernels: $kernel: status $status after $((SECONDS - start)) s"
		exit "$status"
	) >"$work/$kernel.log" 2>&1 &
	pids+=($!)
done
trap 'kill "${pids[@]}" 2>/dev/null || true; wait; rm -rf "$work"' EXIT
for i in "${!kernels[@]}"; do
	status=0
	wait "${pids[i]}" || status=$?
	cat "$work/${kernels[i]}.log"
	if ((status)); then failed+=("${kernels[i]} (status $status)"); fi
done
if ((${#failed[@]})); then
	echo "test-kernels: failed on ${failed[*]}" >&2
	exit 1
fi
echo "test-kernels: passed on ${kernels[*]}"
