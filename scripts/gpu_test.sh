#!/usr/bin/env bash
# The tests that need a GPU: the claims of tests/ranks.rs with the model on the GPU, on one rank and on two that share it,
# and the claims of tests/gpu.rs. Writes one JSON object.
#
#   scripts/gpu_test.sh [FILE]      (gpu_test.json)
#
# PROGRAMS=FOLDER takes the test programs `ranks` and `gpu` from there instead of building them, for a machine without a
# compiler. LIMIT_S bounds each run. libtorch's GPU build must be found: LD_LIBRARY_PATH, or beside the CPU's.
set -euo pipefail
cd "$(dirname "$0")/.."
result=${1:-gpu_test.json}
limit_s=${LIMIT_S:-600}

programs=${PROGRAMS:-}
if [ -z "$programs" ]; then
    programs=$(mktemp -d)
    trap 'rm -rf "$programs"' EXIT
    cargo test --release --locked --no-run --message-format=json --test ranks --test gpu | python3 -c '
import json, os, sys
for line in sys.stdin:
    message = json.loads(line) if line.startswith("{") else {}
    if message.get("reason") == "compiler-artifact" and message.get("executable"):
        os.symlink(message["executable"], os.path.join(sys.argv[1], message["target"]["name"]))
' "$programs"
fi

lines=$(mktemp)
status=0
# run NAME RANKS PROGRAM ARGUMENT...: what it prints goes to the terminal and, with its outcome, into the result.
run() {
    local name=$1 ranks=$2 start=$SECONDS exit=0
    shift 2
    CLAIMS_DEVICE=cuda timeout --kill-after=10 "$limit_s" scripts/mpirun.sh "$ranks" "$@" 2>&1 | tee -a "$lines" || exit=$?
    printf '{"run": "%s", "ranks": %s, "exit": %s, "seconds": %s}\n' "$name" "$ranks" "$exit" "$((SECONDS - start))" | tee -a "$lines"
    [ "$exit" = 0 ] || status=1
}
run gpu 1 "$programs/gpu"
run ranks 1 "$programs/ranks"
run ranks 2 "$programs/ranks"

python3 - "$lines" "$result" <<'PYTHON'
import json
import sys

runs, claims, words = [], [], []
for line in open(sys.argv[1]):
    try:
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ValueError
    except ValueError:
        words.append(line.rstrip())
        continue
    (runs if "run" in found else claims).append(found)
with open(sys.argv[2], "w") as file:
    json.dump({"passed": all(run["exit"] == 0 for run in runs), "runs": runs, "claims": claims, "output": words}, file, indent=1)
PYTHON
rm -f "$lines"
exit "$status"
