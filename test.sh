#!/usr/bin/env bash
# Checks everything that needs no GPU and no browser: ./test.sh [arguments of pytest]. Makes .venv first, like start.sh.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/start.sh"
make_environment dev
cd "$root"

failed=()
check() {
    printf '\n== %s\n' "$*"
    "$venv/bin/python" -m "$@" || failed+=("$1")
}

check ruff format --check .
check ruff check .
check mypy
check pytest "$@"

[[ ${#failed[@]} == 0 ]] || die "failed: ${failed[*]}"
