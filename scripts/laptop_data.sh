#!/usr/bin/env bash
# The prompts of `make run`: text of this folder, the same on every machine, with notes in it that give codes to places, and a
# question about one of them. The model samples its own answers. Each prompt also has candidate answers, one of them right, for the
# held-out margin. Training and held-out prompts come from different passages and have different codes.
set -euo pipefail
cd "$(dirname "$0")/.."
readonly OUT=data/codes
[ -s "$OUT/train.jsonl" ] && [ -s "$OUT/held_out.jsonl" ] && exit 0
# The decisions up to 0048 and no later ones, so that the prompts stay what they were when the results in the README were measured.
texts=$(mktemp -d)
trap 'rm -rf "$texts"' EXIT
cp docs/decisions/00[0-3]?-*.md docs/decisions/004[0-8]-*.md "$texts"
target/release/longstraw data keychain --model models/smollm2-135m-instruct --out "$OUT" \
  --text "$texts" --prompt-tokens 384 --keys 4 --answers 4 --short --train 64 --held-out 12
