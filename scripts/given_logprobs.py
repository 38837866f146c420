#!/usr/bin/env python3
"""Answers of an outside engine with their log-probabilities, and what a run should make of them, by transformers.

    given_logprobs.py draw MODEL OUT.jsonl     answers that transformers samples, with "logprobs" and rewards
    given_logprobs.py expect MODEL IN.jsonl    ratios, clipped tokens, weights and loss of one update, as one JSON object
    given_logprobs.py check EXPECTED RUN_DIR   compares that object with the first update of a run

The engine may draw at another temperature and in another number format than the run: then ratios differ from 1. One update
takes all records: optimizer.grad_accum = records / prompt groups of ranks, data.shuffle = false.
"""

import argparse
import json
import math
import sys

PROMPTS = [
    "Name an animal that lives in the sea, and one that lives in the desert.",
    "Write one short sentence about the weather in spring.",
    "What is the capital of France, and on which river does it lie?",
    "Give two reasons to read a book before sleeping.",
]
# Loss and ratio of a run in float32 against the same in float32 here: rounding of long sums.
TOLERANCE = 1e-5


def load(folder, dtype):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager")
    return model.eval()


def prompts(args, model):
    """Token ids of each prompt: the questions above through the chat template, or random ids for a model without texts."""
    import torch
    from transformers import AutoTokenizer

    if not args.random_prompts:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        turns = [[{"role": "user", "content": text}] for text in PROMPTS[: args.records]]
        ask = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        return [tokenizer.apply_chat_template(turn, **ask) for turn in turns]
    lengths = [args.random_prompts - 7 * index for index in range(args.records)]
    return [torch.randint(model.config.vocab_size, [length]).tolist() for length in lengths]


def draw(args):
    import torch

    torch.manual_seed(args.seed)
    model = load(args.model, args.dtype)
    with open(args.file, "w", encoding="utf-8") as out:
        for number, prompt in enumerate(prompts(args, model)):
            drawn = model.generate(
                torch.tensor([prompt] * args.answers),
                attention_mask=torch.ones([args.answers, len(prompt)], dtype=torch.long),
                do_sample=True,
                temperature=args.temperature,
                top_k=0,
                top_p=1.0,
                max_new_tokens=args.tokens,
                return_dict_in_generate=True,
                output_scores=True,
            )
            scores = torch.stack(drawn.scores, 1).double().log_softmax(-1)
            rows = drawn.sequences[:, len(prompt) :]
            ends = model.generation_config.eos_token_id
            ends = set(ends if isinstance(ends, list) else [ends]) - {None}
            answers = []
            for row, ids in enumerate(rows.tolist()):
                stop = next((at for at, token in enumerate(ids) if token in ends), len(ids) - 1)
                ids = ids[: stop + 1]
                logprobs = [round(scores[row, at, token].item(), 9) for at, token in enumerate(ids)]
                # Any rule will do that answers differ by.
                reward = sum(ids) % 4 / 4
                answers.append({"ids": ids, "logprobs": logprobs, "reward": reward})
            record = {"name": f"prompt {number}", "prompt_ids": prompt, "answers": answers}
            out.write(json.dumps(record) + "\n")


def advantages(rewards):
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [(reward - mean) / deviation if deviation > 0 else 0.0 for reward in rewards]


def expect(args):
    """The clipped objective of the papers, one token at a time; only the log-probabilities are the library's."""
    import torch

    model = load(args.model, args.dtype)
    with open(args.file, encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    ratios, weights, loss, clipped, capped, answers = [], [], 0.0, [0, 0], 0, 0
    for record in records:
        rewards = [answer["reward"] for answer in record["answers"]]
        for answer, advantage in zip(record["answers"], advantages(rewards)):
            answers += 1
            prompt, ids = record["prompt_ids"], answer["ids"]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            own = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / args.temperature).log_softmax(-1)
            own = own.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
            given = [old if drawn is None else drawn for old, drawn in zip(own, answer["logprobs"])]
            if max(rewards) == min(rewards):
                continue
            total = sum(now - drawn for now, drawn in zip(own, given))
            for now, drawn in zip(own, given):
                ratio, weight = math.exp(now - drawn), 1.0
                if args.importance != "none":
                    weight = math.exp(min(now - drawn if args.importance == "token" else total, 700.0))
                    capped += weight >= args.importance_max
                    ratio, weight = 1.0, min(weight, args.importance_max)
                bounded = min(max(ratio, 1 - args.clip), 1 + args.clip)
                loss -= weight * min(ratio * advantage, bounded * advantage) / len(ids)
                clipped[advantage > 0] += ratio * advantage > bounded * advantage
                ratios.append(ratio)
                weights.append(weight)
    tokens = len(ratios)
    print(json.dumps({
        "ratio": [min(ratios), max(ratios)],
        "tokens": tokens,
        "clipped_tokens": sum(clipped),
        "clip_low_share": clipped[0] / tokens,
        "clip_high_share": clipped[1] / tokens,
        "loss": loss / answers,
        "importance_mean": sum(weights) / tokens if args.importance != "none" else None,
        "importance_capped_share": capped / tokens if args.importance != "none" else None,
    }))


def check(args):
    with open(args.expected, encoding="utf-8") as file:
        expected = json.load(file)
    with open(f"{args.run_dir}/metrics.jsonl", encoding="utf-8") as file:
        found = json.loads(file.readline())
    worst = 0.0
    for key, value in expected.items():
        if key == "tokens" or value is None:
            continue
        pairs = zip(found[key], value) if isinstance(value, list) else [(found[key], value)]
        for one, other in pairs:
            distance = abs(one - other) / max(1.0, abs(other))
            worst = max(worst, distance)
            print(f"{key:24} run {one:.9g}  here {other:.9g}  distance {distance:.1e}")
    print(f"largest distance {worst:.1e}, limit {TOLERANCE:.0e}")
    sys.exit(worst > TOLERANCE)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    drawing = verbs.add_parser("draw")
    drawing.add_argument("--records", type=int, default=2, help=f"{len(PROMPTS)} at most without --random-prompts")
    drawing.add_argument("--answers", type=int, default=8, help="answers of a record")
    drawing.add_argument("--tokens", type=int, default=32, help="the most tokens of an answer")
    drawing.add_argument("--temperature", type=float, default=1.3)
    drawing.add_argument("--dtype", default="bfloat16")
    drawing.add_argument("--seed", type=int, default=0)
    drawing.add_argument("--random-prompts", type=int, help="prompts of so many random ids and a few less")
    expecting = verbs.add_parser("expect")
    expecting.add_argument("--temperature", type=float, default=1.0, help="grpo.temperature of the run")
    expecting.add_argument("--dtype", default="float32", help="model.dtype of the run")
    expecting.add_argument("--clip", type=float, default=0.2)
    expecting.add_argument("--importance", default="none", choices=["none", "token", "sequence"])
    expecting.add_argument("--importance-max", type=float, default=2.0)
    checking = verbs.add_parser("check")
    checking.add_argument("expected")
    checking.add_argument("run_dir")
    for verb, run in [(drawing, draw), (expecting, expect)]:
        verb.add_argument("model")
        verb.add_argument("file")
        verb.set_defaults(run=run)
    checking.set_defaults(run=check)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
