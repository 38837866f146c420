#!/usr/bin/env bash
# How far pages drift that 1, 2, 4 and 8 updates have left behind: one run for each age on the model and data of `make run`, and a
# table of what their last updates measured. Runs that are complete are not repeated.
#
#   scripts/reuse_drift.sh [ARGUMENT...]      arguments go to `longstraw train`: --set optimizer.lr=1e-3, --set run.seed=1
#
#   RANKS=1    ranks of a run        ROUNDS=2    prompts of a run, each with its own capture
#   OUT=runs/reuse_drift             folder of the runs; other arguments want another folder
#   CONFIG=configs/laptop.toml       model and data; the gradient is `response`
set -euo pipefail
cd "$(dirname "$0")/.."
readonly RANKS=${RANKS:-1} ROUNDS=${ROUNDS:-2} OUT=${OUT:-runs/reuse_drift} CONFIG=${CONFIG:-configs/laptop.toml}
mkdir -p "$OUT"
# Nothing is evaluated: the drift is measured on the answers that are trained.
grep -v '^held_out' "$CONFIG" >"$OUT/config.toml"
for age in 1 2 4 8; do
    updates=$((age + 1))
    dir=$OUT/age_$age
    [ -s "$dir/receipt.json" ] && continue
    scripts/mpirun.sh "$RANKS" target/release/longstraw train --config "$OUT/config.toml" --run-dir "$dir" --anew \
        --set grpo.gradient=response --set "grpo.updates_per_group=$updates" --set "run.reuse_capture=$updates" \
        --set grpo.reuse_drift_max=inf --set "run.steps=$((ROUNDS * updates))" "$@" >&2
done
python3 - "$OUT" <<'PYTHON'
import json
import sys

print("| updates since the capture | drift: mean, largest | k3, nats | largest gap, nats | seconds saved | seconds of the measurement |")
print("|---|---|---|---|---|---|")
for age in (1, 2, 4, 8):
    with open(f"{sys.argv[1]}/age_{age}/metrics.jsonl") as lines:
        reuses = [step["reuse"] for step in map(json.loads, lines) if step.get("reuse")]
    measured = [reuse for reuse in reuses if reuse["drift"] is not None]
    if not measured:
        print(f"| {age} | no answers differed in their reward | | | | |")
        continue
    mean = lambda key: sum(reuse[key] for reuse in measured) / len(measured)
    largest = lambda key: max(reuse[key] for reuse in measured)
    saved = sum(reuse["saved_s"] for reuse in reuses) / len(measured)
    print(
        f"| {age} | {100 * mean('drift'):.3f} %, {100 * largest('drift'):.3f} % of {len(measured)} | {mean('k3'):.2e} | "
        f"{largest('gap'):.3f} | {saved:.1f} | {mean('measured_s'):.1f} |"
    )
PYTHON
