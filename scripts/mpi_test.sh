#!/usr/bin/env bash
# Runs the MPI test programs, tests/ranks*.rs, at several world sizes.
#
#   scripts/mpi_test.sh [RANKS...]      (1 2 3 4 8)
#
# Such a program is a test target with `harness = false`: it ends with 0 when its claims hold. A last line of the form
# `12 passed, 0 failed` is added up; a run without one counts as one. LIMIT_S bounds each run.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$#" -gt 0 ] || set -- 1 2 3 4 8
limit_s=${LIMIT_S:-900}

shopt -s nullglob
targets=()
for file in tests/ranks*.rs tests/ranks*/main.rs; do
    name=${file#tests/}
    name=${name%/main.rs}
    targets+=(--test "${name%.rs}")
done
if [ "${#targets[@]}" = 0 ]; then
    echo "mpi_test: there is no tests/ranks*.rs to run" >&2
    exit 1
fi

# Built once, run often: cargo says where the programs are. Its own messages go to standard error.
programs=$(cargo test --release --locked --no-run --message-format=json "${targets[@]}" | python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line) if line.startswith("{") else {}
    if message.get("reason") == "compiler-artifact" and message.get("executable") and message["target"]["kind"] == ["test"]:
        print(message["executable"])
    elif message.get("reason") == "compiler-message":
        print(message["message"]["rendered"], file=sys.stderr)
')

export OMP_NUM_THREADS=1
output=$(mktemp)
trap 'rm -f "$output"' EXIT
passed=0
failed=0
for program in $programs; do
    for ranks in "$@"; do
        name=${program##*/}
        name=${name%-*}
        status=0
        start=$SECONDS
        timeout --kill-after=10 "$limit_s" scripts/mpirun.sh "$ranks" "$program" 2>&1 | tee "$output" || status=$?
        counts=$(sed -n 's/^\([0-9]\+\) passed, \([0-9]\+\) failed.*/\1 \2/p' "$output" | tail -n 1)
        if [ "$status" = 0 ]; then
            read -r good bad <<<"${counts:-1 0}"
        else
            # However many claims it printed before, a run that ends badly has failed.
            read -r good bad <<<"${counts:-0 1}"
            [ "$bad" -gt 0 ] || bad=1
        fi
        case $status in
        0) how="exit 0" ;;
        124 | 137) how="stopped at its limit of $limit_s s (LIMIT_S)" ;;
        *) how="exit $status" ;;
        esac
        printf '%s at %s ranks: %s passed, %s failed, %s s, %s\n' "$name" "$ranks" "$good" "$bad" "$((SECONDS - start))" "$how"
        passed=$((passed + good))
        failed=$((failed + bad))
    done
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
