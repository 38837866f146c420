#!/usr/bin/env python3
"""Questions for configs/calculator.toml: products that a small model cannot compute, after turns that show how a calculator is
called. Writes train.jsonl and held_out.jsonl, the same on every machine, into the folder that is named."""

import json
import random
import sys
from pathlib import Path

SHOWN = [(14, 23), (38, 6)]
WORDS = ["What is {} times {}?", "Please multiply {} by {}.", "{} boxes hold {} nails each. How many nails are there?"]


def question(words, one, other):
    return {"role": "user", "content": words.format(one, other)}


def record(name, words, one, other):
    messages = []
    for number, (a, b) in enumerate(SHOWN):
        call = f"<tool_call>{a} * {b}</tool_call> <tool_response>{a * b}</tool_response>"
        messages += [question(WORDS[number], a, b), {"role": "assistant", "content": f"{call} It is {a * b}."}]
    messages.append(question(words, one, other))
    return {"name": name, "messages": messages, "reward_data": {"expected": str(one * other)}}


def write(file, name, seed, count):
    chance = random.Random(seed)
    lines = []
    for number in range(1, count + 1):
        words = WORDS[chance.randrange(len(WORDS))]
        one, other = chance.randint(21, 999), chance.randint(21, 99)
        lines.append(json.dumps(record(f"{name} {number}", words, one, other)))
    file.write_text("\n".join(lines) + "\n")


folder = Path(sys.argv[1] if len(sys.argv) > 1 else "data/calculator")
folder.mkdir(parents=True, exist_ok=True)
write(folder / "train.jsonl", "product", 1, 96)
write(folder / "held_out.jsonl", "held-out product", 2, 12)
