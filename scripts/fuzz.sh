#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs every Go fuzz target for some seconds.   scripts/fuzz.sh [SECONDS]
# A finding is written to the package's testdata/fuzz: commit it, it is a test from then on.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-5}
count=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
while IFS=: read -r file target; do
	package=./$(dirname "$file")
	echo "fuzz: $package $target, $seconds s"
	# -run '^$': the seeds have run among the unit tests already.
	status=0
	timeout $((seconds + 180)) go test -run '^$' -fuzz "^$target\$" -fuzztime "${seconds}s" "$package" </dev/null >"$log" 2>&1 || status=$?
	# When time ends while a worker is starting an input, go test may report its own deadline as a
	# failure. A finding is told from that by the input that is written down for it; a worker that
	# hangs gets one too.
	if ((status == 1)) && grep -qx ' *context deadline exceeded' "$log" &&
		! grep -qE 'Failing input|panic:|hung or terminated|_test\.go:' "$log"; then
		grep -E '^fuzz: elapsed' "$log" | tail -n 1
		status=0
	else
		cat "$log"
	fi
	if ((status)); then
		echo "fuzz: $package $target failed (status $status)" >&2
		exit 1
	fi
	count=$((count + 1))
done < <(git ls-files -co --exclude-standard -- '*_test.go' |
	xargs -r grep -HoE '^func Fuzz[A-Za-z0-9_]+' | sed 's/:func /:/')
if ((count == 0)); then
	echo "fuzz: found no func Fuzz… in any _test.go, want one a parser" >&2
	exit 1
fi
echo "fuzz: $count Go targets, no finding"
