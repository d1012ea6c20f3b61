#!/bin/bash
# CPU tests with the emulated AArch64 Python, two jobs at a time. What runs where, and what is left out and why: tests.txt.
#
#   PYTHON     the host's Python with numflash: makes the environment, runs LLVM for the emulated one, and the jobs "host"
#   TABLE      "whole": all of the option table, where a run has one of 12 parts by the date
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
export PYTHON=${PYTHON:-$PWD/.venv/bin/python} AARCH64_ENV=${AARCH64_ENV:-$PWD/.aarch64}
"$here/setup.sh" "$AARCH64_ENV"
export NUMBA_CACHE_DIR=${NUMBA_CACHE_DIR:-$PWD/.aarch64/cache} TESTS=$here/tests.txt NUMBA_NUM_THREADS=2
export OUTSIDE_PYTHON=$PYTHON

run() {                                              # JOB
    local log status=0 begin=$SECONDS
    local -a command
    log=$(mktemp)
    case $1 in
        host*) command=("$PYTHON" -m pytest -m "slow or not slow") ;;
        *) command=("$AARCH64_ENV/guest-python" -m pytest -p compile_outside)
           export GUEST_CPU=${1%%:*} PYTHONPATH=$PWD/tools/aarch64 ;;
    esac
    awk -v job="$1" '$1 == job { sub(/^[^ ]+/, ""); print }' "$TESTS" | \
        xargs "${command[@]}" -q -p no:cacheprovider -o timeout=1500 > "$log" 2>&1 || status=$?
    echo "== $1: $((SECONDS - begin)) s"; cat "$log"; rm "$log"
    return "$status"
}
export -f run
awk '/^[a-z]/ && $1 != "none" && !seen[$1]++ { print $1 }' "$TESTS" | xargs -P 2 -I JOB bash -c 'run JOB'
