#!/bin/bash
# CPU tests in the emulated AArch64 Python, two jobs at a time. What runs where, and what is left out and why: tests.txt.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
export ENV_FOLDER=${AARCH64_ENV:-$here/../../.aarch64}
"$here/setup.sh" "$ENV_FOLDER"
cd "$here/../.."
export NUMBA_CACHE_DIR=${NUMBA_CACHE_DIR:-$PWD/.aarch64/cache} TESTS=$here/tests.txt

run() {                                              # JOB
    local log status=0 begin=$SECONDS
    log=$(mktemp)
    # the study kernels are many, and what counts is that they run: fewer optimisations, and a cache of their own
    if [ "$1" = a64fx:study ]; then export NUMBA_OPT=1 NUMBA_CACHE_DIR=$NUMBA_CACHE_DIR-study; fi
    awk -v job="$1" '$1 == job { print $2 }' "$TESTS" | GUEST_CPU=${1%%:*} NUMBA_NUM_THREADS=2 xargs \
        "$ENV_FOLDER/guest-python" -m pytest -q -p no:cacheprovider -o timeout=1500 > "$log" 2>&1 || status=$?
    echo "== $1: $((SECONDS - begin)) s"; cat "$log"; rm "$log"
    return "$status"
}
export -f run
awk '/^[a-z]/ && $1 != "none" && !seen[$1]++ { print $1 }' "$TESTS" | xargs -P 2 -I JOB bash -c 'run JOB'
