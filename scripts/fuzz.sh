#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs every Go fuzz target for some seconds.   scripts/fuzz.sh [SECONDS]
# A finding is written to the package's testdata/fuzz: commit it, it is a test from then on.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-5}
count=0
while IFS=: read -r file target; do
	package=./$(dirname "$file")
	echo "fuzz: $package $target, $seconds s"
	# -run '^$': the seeds have run among the unit tests already.
	timeout $((seconds + 180)) go test -run '^$' -fuzz "^$target\$" -fuzztime "${seconds}s" "$package" </dev/null
	count=$((count + 1))
done < <(git ls-files -co --exclude-standard -- '*_test.go' |
	xargs -r grep -HoE '^func Fuzz[A-Za-z0-9_]+' | sed 's/:func /:/')
if ((count == 0)); then
	echo "fuzz: found no func Fuzz… in any _test.go, want one a parser" >&2
	exit 1
fi
echo "fuzz: $count Go targets, no finding"
