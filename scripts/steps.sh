#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the targets given, one after the other, stops at the first that fails and says how long each took.
set -euo pipefail
cd "$(dirname "$0")/.."
took=()
for target; do
	echo "==> $target"
	start=$SECONDS
	if ! make --no-print-directory "$target" </dev/null; then
		echo "==> $target failed after $((SECONDS - start)) s; done before: ${took[*]:-nothing}" >&2
		exit 1
	fi
	took+=("$target $((SECONDS - start)) s;")
done
echo "==> all done in $SECONDS s: ${took[*]}"
