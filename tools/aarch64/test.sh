#!/bin/bash
# CPU tests in the emulated AArch64 Python: the suite as A64FX beside a smoke set as the Neoverse cores, one per host core.
# What runs where, and what is left out and why: tests.txt.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
env=${AARCH64_ENV:-$here/../../.aarch64}
"$here/setup.sh" "$env"
cd "$here/../.."
export NUMBA_CACHE_DIR=${NUMBA_CACHE_DIR:-$PWD/.aarch64/cache}

chosen() { awk -v set="$1" '$1 == set { print $2 }' "$here/tests.txt"; }

run() {                                              # CPU TEST...
    local cpu=$1; shift
    echo "== $cpu"
    GUEST_CPU=$cpu "$env/guest-python" -m pytest -q -p no:cacheprovider -o timeout=1500 "$@"
}

smoke() {
    for cpu in neoverse-v1 neoverse-v2 neoverse-n1; do NUMBA_NUM_THREADS=1 run "$cpu" $(chosen smoke); done
}

log=$(mktemp); trap 'rm -f "$log"' EXIT
smoke > "$log" 2>&1 & other=$!
failed=0
run a64fx $(chosen suite) $(chosen smoke) || failed=1
wait "$other" || failed=1
cat "$log"
exit "$failed"
