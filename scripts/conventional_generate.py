#!/usr/bin/env python3
"""Samples answers to one long prompt with transformers, to be compared with `[rollout]`. The weights are random, of the shape
of a config.json. The prompt runs once, its key/value cache is repeated for the group, and each step samples one token of every
answer.

    python3 scripts/conventional_generate.py CONFIG_JSON PROMPT TOKENS GROUP...

Prints one JSON object a group: seconds of the prompt, seconds a token (median and mean after ten tokens of warm-up), peak bytes
of the device, or `does_not_fit`.
"""
import copy
import json
import statistics
import sys
import time

import torch
import transformers


def prefill(model, ids, chunk=8192):
    """The prompt's cache and the logits after its last position. Chunks keep temporary memory independent of the prompt."""
    cache = transformers.DynamicCache()
    for start in range(0, ids.shape[1], chunk):
        out = model(ids[:, start : start + chunk], past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache, out.logits[:, -1]


def decode(model, cache, logits, tokens):
    """Samples `tokens` tokens from the whole distribution; returns the seconds of each."""
    seconds = []
    for _ in range(tokens):
        torch.cuda.synchronize()
        start = time.perf_counter()
        sampled = torch.multinomial(torch.softmax(logits.float(), -1), 1)
        logits = model(sampled, past_key_values=cache, use_cache=True).logits[:, -1]
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def main():
    path, prompt, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    config = transformers.AutoConfig.from_pretrained(path)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    torch.set_default_dtype(torch.float32)
    ids = torch.randint(config.vocab_size, (1, prompt), device="cuda")
    about = {"transformers": transformers.__version__, "torch": torch.__version__, "prompt": prompt, "tokens": tokens}
    with torch.no_grad():
        start = time.perf_counter()
        cache, logits = prefill(model, ids)
        torch.cuda.synchronize()
        about["prompt_seconds"] = time.perf_counter() - start
        for group in map(int, sys.argv[4:]):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            try:
                own = copy.deepcopy(cache)
                own.batch_repeat_interleave(group)
                torch.cuda.empty_cache()
                seconds = decode(model, own, logits.repeat(group, 1), tokens)[10:]
                found = {"token_seconds_median": statistics.median(seconds), "token_seconds_mean": statistics.mean(seconds)}
            except torch.cuda.OutOfMemoryError:
                found = {"does_not_fit": True}
            own = None
            peak = torch.cuda.max_memory_allocated()
            print(json.dumps({**about, "group": group, **found, "peak_device_bytes": peak}), flush=True)


main()
