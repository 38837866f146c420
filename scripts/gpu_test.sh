#!/usr/bin/env bash
# The tests that need a GPU: the claims of tests/gpu.rs, and those of tests/ranks.rs with the model on the GPU, on one rank
# and on two that share it. Writes one JSON object.
#
#   scripts/gpu_test.sh [FILE]      (gpu_test.json)
#
# PROGRAMS=FOLDER takes the test programs `gpu` and `ranks` from there, for a machine without a compiler. LIMIT_S bounds each
# run. libtorch's GPU build must be found: in LD_LIBRARY_PATH or next to the CPU build.
set -euo pipefail
cd "$(dirname "$0")/.."
result=${1:-gpu_test.json}
# shellcheck source=scripts/claims.sh
. scripts/claims.sh

[ -n "${PROGRAMS:-}" ] || build_programs gpu ranks
export CLAIMS_DEVICE=cuda
for run in "gpu 1" "ranks 1" "ranks 2"; do
    read -r program ranks <<<"$run"
    run_program "${PROGRAMS:-$work}/$program" "$ranks" "${LIMIT_S:-600}"
    cat "$work/output" >>"$work/lines"
    printf '{"run": "%s", "ranks": %s, "exit": %s, "seconds": %s}\n' "$program" "$ranks" "$claim_exit" "$claim_seconds" >>"$work/lines"
done

python3 - "$work/lines" "$result" <<'PYTHON'
import json
import sys

runs, claims, output = [], [], []
for line in open(sys.argv[1]):
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        output.append(line.rstrip())
    elif "run" in record:
        runs.append(record)
    else:
        claims.append(record)
passed = all(run["exit"] == 0 for run in runs)
with open(sys.argv[2], "w") as file:
    json.dump({"passed": passed, "runs": runs, "claims": claims, "output": output}, file, indent=1)
PYTHON
claims_end
