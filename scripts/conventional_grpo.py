#!/usr/bin/env python3
"""One GRPO update on one GPU as trainers usually make it, to be compared with `longstraw bench`.

PyTorch and transformers; random weights of a given shape in bfloat16; LoRA of rank 16 on the attention projections. Prompt and
answer are one sequence under autograd, one answer at a time; every layer is checkpointed; only the answer's rows have logits.
The script measures seconds and bytes.

    conventional_grpo.py CONFIG.json PROMPT ANSWER RUN...

A RUN is a group size, `2`, or `2:noscore`. With `noscore` the old log-probabilities are the policy's own, detached, as in
trainers with one update a batch. Each run prints one JSON object. A short prompt runs first and is not measured.
"""

import json
import sys
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

WARM_UP_POSITIONS = 4096
RANK = 16


class Adapted(torch.nn.Module):
    """A frozen linear layer with a low-rank adapter."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        like = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.down = torch.nn.Parameter(torch.randn(RANK, base.in_features, **like) * 0.01)
        self.up = torch.nn.Parameter(torch.randn(base.out_features, RANK, **like) * 0.01)

    def forward(self, x):
        return self.base(x) + torch.nn.functional.linear(torch.nn.functional.linear(x, self.down), self.up)


def build(path):
    with open(path) as file:
        config = AutoConfig.for_model(**json.load(file))
    config._attn_implementation = "sdpa"
    config.use_cache = False
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    return model.train()


def logprobs(model, prompt, answer):
    rows = answer.numel()
    sequence = torch.cat([prompt, answer]).unsqueeze(0)
    logits = model(input_ids=sequence, logits_to_keep=rows + 1).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, answer.unsqueeze(1)).squeeze(1)


def update(model, prompt_len, answer_len, group, scored):
    vocabulary = model.config.vocab_size
    prompt = torch.randint(0, vocabulary, (prompt_len,), device="cuda")
    answers = [torch.randint(0, vocabulary, (answer_len,), device="cuda") for _ in range(group)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    old = []
    if scored:
        with torch.no_grad():
            old = [logprobs(model, prompt, answer) for answer in answers]
    for index, answer in enumerate(answers):
        new = logprobs(model, prompt, answer)
        ratio = (new - (old[index] if scored else new.detach())).exp()
        advantage = 1.0 if index % 2 else -1.0
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean() / group
        loss.backward()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    model.zero_grad()
    return seconds, torch.cuda.max_memory_allocated()


def main():
    path, prompt_len, answer_len, *runs = sys.argv[1:]
    torch.manual_seed(0)
    model = build(path)
    update(model, min(int(prompt_len), WARM_UP_POSITIONS), int(answer_len), 1, True)
    for run in runs:
        group, _, option = run.partition(":")
        seconds, peak = update(model, int(prompt_len), int(answer_len), int(group), option != "noscore")
        found = {
            "schedule": "transformers",
            "scored": option != "noscore",
            "prompt": int(prompt_len),
            "answer": int(answer_len),
            "group": int(group),
            "total_seconds": round(seconds, 3),
            "peak_device_bytes": peak,
        }
        print(json.dumps(found), flush=True)


main()
