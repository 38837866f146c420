#!/usr/bin/env bash
# The prompts of `make run`: real text found on this machine, a question whose answer stands in it, one right answer
# and three wrong ones; training and held-out prompts from different passages.
set -euo pipefail
cd "$(dirname "$0")/.."
readonly OUT=data/laptop
[ -s "$OUT/train.jsonl" ] && [ -s "$OUT/held_out.jsonl" ] && exit 0
exec target/release/longstraw data keychain --model models/smollm2-135m-instruct --out "$OUT"
