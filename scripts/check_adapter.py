#!/usr/bin/env python3
"""Loads a run's adapter with peft and compares the log-probabilities of the run's sampled answers with transformers'.

    check_adapter.py MODEL ADAPTER DATA.jsonl RUN_DIR

RUN_DIR is a run of one update that began with the adapter (`--set lora.init_from=ADAPTER`), so that the answers in
answers.jsonl were sampled with it. Needs torch, transformers and peft; float32 on the CPU. Prints one JSON object: answers,
tokens, the largest difference of an answer's summed log-probability divided by its tokens, and of the sum itself.
"""
import json
import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


def main():
    folder, adapter, data, run = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = PeftModel.from_pretrained(model, adapter).eval()
    prompts = {}
    with open(data) as lines:
        for line in lines:
            record = json.loads(line)
            prompts[record["name"]] = record["prompt"]
    answers = tokens = 0
    worst_token = worst_sum = 0.0
    with open(f"{run}/answers.jsonl") as lines:
        for line in lines:
            sampled = json.loads(line)
            ids = sampled["ids"]
            prompt = tokenizer(prompts[sampled["prompt"]], add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double()
            logprobs = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids).unsqueeze(1))
            difference = abs(logprobs.sum().item() - sampled["logprob"])
            worst_sum, worst_token = max(worst_sum, difference), max(worst_token, difference / len(ids))
            answers, tokens = answers + 1, tokens + len(ids)
    found = {"answers": answers, "tokens": tokens}
    print(json.dumps({**found, "worst_sum": worst_sum, "worst_by_token": worst_token}))


main()
