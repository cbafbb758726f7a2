#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs inside the virtual machine of scripts/test-kernels.sh: each test binary that /src/tests lists
# ("binary folder import-path" a line), in its package's folder. Options for them come from /src/options.
export METAROCE_KERNEL=short METAROCE_BIN=/usr/bin/metaroce
failed=0
while read -r binary folder path; do
	cd "/src/$folder" || exit 1
	begin=$(date +%s)
	# shellcheck disable=SC2046 # options are words
	if "./$binary" -test.v -test.short $(cat /src/options) </dev/null; then
		verdict='ok  '
	else
		verdict=FAIL failed=1
		echo "--- last kernel messages"
		dmesg | tail -n 15
	fi
	printf '%s\t%s\t%s.0s\n' "$verdict" "$path" "$(($(date +%s) - begin))"
done </src/tests
exit $failed
