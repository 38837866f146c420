#!/usr/bin/env python3
"""Greedy answers of saved adapters by transformers and PEFT, so that a result does not hang on the project's own sampler.

    scripts/outside_eval.py MODEL ADAPTER HELD_OUT.jsonl...

MODEL and ADAPTER are folders; `-` as ADAPTER is the model alone. Of each file the mean of `contains` is printed, as one JSON object:
an answer counts 1 if it contains the record's "expected" with no letter or digit beside it, else 0. Prompts are texts and are tokenised
as they are. --yarn is the factor of model.rope_scaling, where the run had one.
"""

import argparse
import json
import re
import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("adapter")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=32, help="most tokens of an answer")
    parser.add_argument("--yarn", type=float, help="factor over --window")
    parser.add_argument("--window", type=int, default=8192, help="positions that the model was trained for")
    return parser.parse_args()


def opened(flags):
    config = AutoConfig.from_pretrained(flags.model)
    if flags.yarn:
        scaling = {"rope_type": "yarn", "factor": flags.yarn, "original_max_position_embeddings": flags.window}
        if getattr(config, "rope_parameters", None) is not None:
            config.rope_parameters = {**config.rope_parameters, **scaling}
        else:
            config.rope_scaling = scaling
        config.max_position_embeddings = int(flags.yarn * flags.window)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(flags.model, config=config, dtype=getattr(torch, flags.dtype))
    if flags.adapter != "-":
        model = PeftModel.from_pretrained(model, flags.adapter)
    return model.to(device).eval(), device


def contains(answer, expected):
    wanted = [expected] if isinstance(expected, str) else [str(one) for one in expected]
    return any(re.search(rf"(?<!\w){re.escape(one)}(?!\w)", answer) for one in wanted)


def main():
    flags = parse()
    tokenizer = AutoTokenizer.from_pretrained(flags.model)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model, device = opened(flags)
    for file in flags.files:
        right, cut, answers = 0, 0, []
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        for record in records:
            ids = tokenizer(record["prompt"], return_tensors="pt", add_special_tokens=False).input_ids.to(device)
            with torch.inference_mode():
                drawn = model.generate(
                    input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=flags.tokens,
                    eos_token_id=end, pad_token_id=end,
                )[0, ids.shape[1] :]
            answer = tokenizer.decode(drawn, skip_special_tokens=True)
            right += contains(answer, record["reward_data"]["expected"])
            cut += int(drawn[-1] != end)
            answers.append(answer)
        result = {"adapter": flags.adapter, "file": str(file), "prompts": len(records), "greedy": right / len(records)}
        result |= {"cut": cut / len(records), "answers": answers}
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
