#!/usr/bin/env python3
"""Samples answers to one long prompt with transformers, to be compared with `[rollout]`. The weights are random, of the shape
of a config.json. The prompt runs once, its key/value cache is repeated for the group, and each step samples one token of every
answer.

    python3 scripts/conventional_generate.py CONFIG_JSON PROMPT TOKENS GROUP... [--cache dynamic|static] [--compile]

`dynamic` appends to the cache at each token; `static` writes into one of fixed size, as `cache_implementation="static"` does;
without `--cache` both are measured. `--compile` passes the step with the static cache to torch.compile, mode "reduce-overhead".

Prints one JSON object for each cache and group: seconds of the prompt, seconds a token (median and mean after ten tokens of
warm-up), peak bytes of the device, or `does_not_fit`.
"""
import argparse
import copy
import json
import statistics
import time

import torch
import transformers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WARM_TOKENS = 10


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def prefill(model, ids, chunk=8192):
    """The prompt's cache and the logits after its last position. Chunks keep temporary memory independent of the prompt."""
    cache = transformers.DynamicCache()
    for start in range(0, ids.shape[1], chunk):
        out = model(ids[:, start : start + chunk], past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache, out.logits[:, -1]


def dynamic_cache(prompt, group):
    """The prompt's cache once for each answer."""
    cache = copy.deepcopy(prompt)
    cache.batch_repeat_interleave(group)
    return cache


def static_cache(model, prompt, group, positions):
    """The same with room for `positions` positions, at addresses that do not change."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=positions)
    for layer, held in zip(cache.layers, prompt.layers):
        rows = held.keys.shape[2]
        filled = {"cache_position": torch.arange(rows, device=held.keys.device)}
        keys, values = (x.expand(group, -1, -1, -1) for x in (held.keys, held.values))
        layer.update(keys, values, filled)
    return cache


def decode(forward, cache, logits, tokens):
    """Samples `tokens` tokens from the whole distribution; returns the seconds of each."""
    seconds = []
    for _ in range(tokens):
        synchronize()
        start = time.perf_counter()
        sampled = torch.multinomial(torch.softmax(logits.float(), -1), 1)
        # A copy: a compiled step may write its result to the same place again.
        logits = forward(sampled, past_key_values=cache, use_cache=True).logits[:, -1].clone()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def measured(model, prompt, logits, group, tokens, kind, compiled):
    """Seconds a token with one kind of cache."""
    if kind == "dynamic":
        cache, forward = dynamic_cache(prompt, group), model
    else:
        cache = static_cache(model, prompt, group, prompt.get_seq_length() + tokens)
        forward = torch.compile(model, mode="reduce-overhead") if compiled else model
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    seconds = decode(forward, cache, logits.repeat(group, 1), tokens)[WARM_TOKENS:]
    return {"token_seconds_median": statistics.median(seconds), "token_seconds_mean": statistics.mean(seconds)}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("prompt", type=int)
    parser.add_argument("tokens", type=int)
    parser.add_argument("group", type=int, nargs="+")
    parser.add_argument("--cache", action="append", choices=["dynamic", "static"])
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    if given.tokens <= WARM_TOKENS:
        parser.error(f"TOKENS should be above {WARM_TOKENS}: so many are warm-up")
    return given


def main():
    given = arguments()
    config = transformers.AutoConfig.from_pretrained(given.config)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    torch.set_default_dtype(torch.float32)
    ids = torch.randint(config.vocab_size, (1, given.prompt), device=DEVICE)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    about = {**versions, "prompt": given.prompt, "tokens": given.tokens}
    with torch.no_grad():
        start = time.perf_counter()
        prompt, logits = prefill(model, ids)
        synchronize()
        about["prompt_seconds"] = time.perf_counter() - start
        for kind in given.cache or ["dynamic", "static"]:
            for group in given.group:
                if DEVICE == "cuda":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                compiled = given.compile and kind == "static"
                try:
                    found = measured(model, prompt, logits, group, given.tokens, kind, compiled)
                except torch.OutOfMemoryError:
                    found = {"does_not_fit": True}
                peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else None
                row = {**about, "cache": kind, "compiled": compiled, "group": group, **found, "peak_device_bytes": peak}
                print(json.dumps(row), flush=True)


main()
