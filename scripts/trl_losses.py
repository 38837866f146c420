#!/usr/bin/env python3
"""Loss and gradient of TRL's own GRPO loss on one random batch, in each mode that longstraw has too.

    trl_losses.py OUT.json

Written with TRL 1.16.0 (pip install trl). Log-probabilities are numbers, not a model's: the trainer's method is called on an
object that has only what the method reads. Everything is float64. A unit test of src/step/objective compares.
"""

import collections
import json
import sys
import types

import torch
import trl
from trl import GRPOTrainer

LENGTHS = [6, 3, 1, 5]
LONGEST = max(LENGTHS)
ADVANTAGES = [1.0, -1.0, 0.4, -0.7]
TRUNCATED = 1  # the answer that is masked in modes with a mask

# A mode's name, TRL's settings, and longstraw's.
MODES = [
    ("grpo", {"loss_type": "grpo"}, {}),
    ("dapo", {"loss_type": "dapo", "epsilon_high": 0.28}, {"aggregation": "token_mean", "clip_high": 0.28}),
    ("bnpo", {"loss_type": "bnpo"}, {"aggregation": "token_mean"}),
    ("dr_grpo", {"loss_type": "dr_grpo"}, {"aggregation": "constant"}),
    ("delta", {"loss_type": "grpo", "delta": 1.3}, {"clip_dual": 1.3}),
    ("beta", {"loss_type": "grpo", "beta": 0.1, "bias_correction": False}, {"kl_coef": 0.1}),
    ("beta, bias correction", {"loss_type": "dapo", "beta": 0.1},
     {"aggregation": "token_mean", "kl_coef": 0.1, "kl_estimator": "k3_ratio"}),
    ("sequence level", {"loss_type": "grpo", "level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03},
     {"loss": "gspo", "clip_low": 0.02, "clip_high": 0.03}),
    ("sequence level, beta", {"loss_type": "grpo", "level": "sequence", "beta": 0.1, "bias_correction": False},
     {"loss": "gspo", "kl_coef": 0.1}),
    ("sequence level, token weights", {"loss_type": "grpo", "level": "sequence", "weights": "token"},
     {"loss": "gspo", "importance": "token"}),
    ("cispo", {"loss_type": "cispo", "epsilon_high": 1.2},
     {"loss": "cispo", "aggregation": "token_mean", "clip_low": 1.0, "clip_high": 0.2}),
    ("token weights", {"loss_type": "dapo", "weights": "token"}, {"aggregation": "token_mean", "importance": "token"}),
    ("sequence weights", {"loss_type": "grpo", "weights": "sequence"}, {"importance": "sequence"}),
    ("mask, dapo", {"loss_type": "dapo", "mask": True}, {"aggregation": "token_mean", "mask_truncated": True}),
    ("mask, grpo", {"loss_type": "grpo", "mask": True}, {"mask_truncated": True}),
    ("sequence level, beta, bias correction", {"loss_type": "grpo", "level": "sequence", "beta": 0.1},
     {"loss": "gspo", "kl_coef": 0.1, "kl_estimator": "k3_ratio"}),
]
WEIGHT_MAX = 1.5


def batch():
    torch.manual_seed(5)
    shape = (len(LENGTHS), LONGEST)
    logprobs = -2 * torch.rand(shape, dtype=torch.float64) - 0.1
    noise = lambda size: size * torch.randn(shape, dtype=torch.float64)
    mask = torch.tensor([[int(token < length) for token in range(LONGEST)] for length in LENGTHS])
    return {"logprobs": logprobs, "old": logprobs + noise(0.3), "ref": logprobs + noise(0.5),
            "drawn": logprobs + noise(0.4), "mask": mask}


def trl_loss(numbers, mode):
    """Loss, and its gradient with respect to the log-probabilities."""
    logprobs = numbers["logprobs"].clone().requires_grad_()
    mask = numbers["mask"].clone()
    if mode.get("mask"):
        mask[TRUNCATED] = 0
    difference = (numbers["old"] - numbers["drawn"]) * numbers["mask"]
    if mode.get("weights") == "sequence":
        difference = difference.sum(-1, keepdim=True)
    trainer = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, _entropy_bonus_enabled=False,
        importance_sampling_level=mode.get("level", "token"), beta=mode.get("beta", 0.0), loss_type=mode["loss_type"],
        epsilon_low=mode.get("epsilon", 0.2), epsilon_high=mode.get("epsilon_high", mode.get("epsilon", 0.2)),
        use_vllm="weights" in mode, vllm_importance_sampling_correction=True, max_completion_length=LONGEST,
        current_gradient_accumulation_steps=1, _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        model=types.SimpleNamespace(training=True),
        args=types.SimpleNamespace(delta=mode.get("delta"), steps_per_generation=1,
                                   use_bias_correction_kl=mode.get("bias_correction", True)),
        accelerator=types.SimpleNamespace(num_processes=1, sync_gradients=True, gather=lambda x: x,
                                          reduce=lambda x, **_: x),
    )
    none = torch.zeros((len(LENGTHS), 0), dtype=torch.long)
    inputs = {
        "prompt_ids": none, "prompt_mask": none, "completion_ids": torch.zeros_like(mask), "completion_mask": mask,
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64), "old_per_token_logps": numbers["old"],
        "ref_per_token_logps": numbers["ref"], "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": torch.exp(difference).clamp(max=WEIGHT_MAX),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.item(), logprobs.grad


def rows(tensor):
    return [row[:length].tolist() for row, length in zip(tensor, LENGTHS)]


def main():
    numbers = batch()
    modes = []
    for name, theirs, ours in MODES:
        loss, gradient = trl_loss(numbers, theirs)
        modes.append({"name": name, "longstraw": ours, "loss": loss, "gradient": rows(gradient)})
    found = {"trl": trl.__version__, "advantages": ADVANTAGES, "truncated": TRUNCATED, "weight_max": WEIGHT_MAX,
             "longest": LONGEST, **{key: rows(numbers[key]) for key in ["logprobs", "old", "ref", "drawn"]}, "modes": modes}
    with open(sys.argv[1], "w", encoding="utf-8") as out:
        json.dump(found, out)
        out.write("\n")


if __name__ == "__main__":
    main()
