#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs make generate on a copy of the work tree and compares: the tree itself stays as it is, so
# that the check does not hide what it finds by mending it.
set -euo pipefail
cd "$(dirname "$0")/.."
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -z -co --exclude-standard | while IFS= read -r -d '' file; do
	if [[ -e $file ]]; then printf '%s\0' "$file"; fi
done | tar --null -T - -cf - | tar -xf - -C "$copy"
cp -r "$copy" "$copy.want"
trap 'rm -rf "$copy" "$copy.want"' EXIT
make --no-print-directory -C "$copy" generate
if ! diff -rq "$copy.want" "$copy"; then
	echo "check-generated: these differ from what make generate makes: run make generate and commit (here: $("${CLANG:-clang-19}" --version | head -n 1))" >&2
	diff -ru "$copy.want" "$copy" | grep -aE '^[-+]' | head -n 40 >&2 || true
	exit 1
fi
echo "check-generated: nothing differs"
