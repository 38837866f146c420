#!/usr/bin/env bash
# Does `make run` hold? Its configuration with several seeds, evaluated after 0, 20, 80 and 200 updates, and a table. A run that was
# stopped goes on where it was.
#
#   scripts/laptop_seeds.sh [SEED...]         seeds 0, 1 and 3 without arguments
#
#   RANKS=2    ranks of a run        ENDS="20 80 200"   updates after which a run is evaluated
#   OUT=runs/laptop_seeds            folder of the runs
#   ARGS=''    more arguments of `longstraw train`; other arguments want another folder
set -euo pipefail
cd "$(dirname "$0")/.."
readonly RANKS=${RANKS:-2} OUT=${OUT:-runs/laptop_seeds}
read -r -a ends <<<"${ENDS:-20 80 200}"
read -r -a more <<<"${ARGS:-}"
[ "$#" -gt 0 ] || set -- 0 1 3
for seed in "$@"; do
    dir=$OUT/seed_$seed
    for end in "${ends[@]}"; do
        # An evaluation follows the last update of each start.
        grep -q "^{\"evaluation\":{\"step\":$end," "$dir/metrics.jsonl" 2>/dev/null && continue
        go_on=()
        [ -s "$dir/latest" ] && go_on=(--resume)
        scripts/mpirun.sh "$RANKS" target/release/longstraw train --config configs/laptop.toml --run-dir "$dir" \
            --set "run.seed=$seed" --set "run.steps=$end" "${go_on[@]}" "${more[@]}" >&2
    done
done
python3 - "$OUT" "$@" <<'PYTHON'
import json
import sys

print("| seed | updates | reward of the 20 updates before | held-out reward, sampled | greedy | cut off, sampled | greedy | tokens, sampled | seconds of the updates |")
print("|---|---|---|---|---|---|---|---|---|")
for seed in sys.argv[2:]:
    with open(f"{sys.argv[1]}/seed_{seed}/metrics.jsonl") as file:
        lines = [json.loads(line) for line in file]
    updates = [line for line in lines if "step" in line]
    for evaluation in (line["evaluation"] for line in lines if "evaluation" in line):
        step, held_out = evaluation["step"], evaluation["sets"]["held_out"]
        before = [update["reward_mean"] for update in updates if step - 20 < update["step"] <= step]
        reward = f"{sum(before) / len(before):.2f}" if before else ""
        seconds = sum(update["seconds"]["total"] for update in updates if update["step"] <= step)
        print(
            f"| {seed} | {step} | {reward} | {held_out['reward']:.2f} | {held_out['greedy']:.2f} | "
            f"{100 * held_out['truncated_share']:.0f} % | {100 * held_out['greedy_truncated_share']:.0f} % | "
            f"{held_out['tokens']:.1f} | {seconds:.0f} |"
        )
PYTHON
