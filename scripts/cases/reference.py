"""One GRPO step on a small model, computed with transformers: logits, losses and adapter gradients.

The arithmetic is float64: the float32 weights are widened, and the float32 casts inside transformers (norms, softmax,
rotary angles) are replaced by float64 casts.
"""

import contextlib
import copy
import sys

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

ADAPTER_RANK = 4
ADAPTER_ALPHA = 8.0
CLIP = 0.2
KL_COEF = 0.04
LOSSES = {"grpo": 0.0, "grpo_kl": KL_COEF}
FLOAT32 = torch.float32  # within float64_arithmetic, x.float() gives float64


# --- float64 everywhere ----------------------------------------------------------------------------------------------


class TorchInFloat64:
    """Replaces the name `torch` in transformers' files, so that torch.float32 means float64 there."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextlib.contextmanager
def float64_arithmetic(model_type):
    models = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    model_class = models[type(AutoConfig.for_model(model_type))]
    files = [sys.modules[model_class.__module__], transformers.modeling_rope_utils]
    cast = torch.Tensor.float
    for file in files:
        file.torch = TorchInFloat64()
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.Tensor.float = cast
        for file in files:
            file.torch = torch


# --- the cache of linear attention -----------------------------------------------------------------------------------
# transformers updates these states in place. Autograd still needs the old ones, so each update makes a new tensor.


def replace_recurrent_state(self, recurrent_states, state_idx=0, **_):
    self.recurrent_states[state_idx] = recurrent_states
    self.is_recurrent_states_initialized[state_idx] = True
    return recurrent_states


def replace_convolution_state(self, conv_states, state_idx=0, conv_kernel_size=None, **_):
    first = not self.has_previous_state[state_idx]
    if first:
        past = conv_states.new_zeros(*conv_states.shape[:-1], conv_kernel_size)
    else:
        past = self.conv_states[state_idx]
    inputs = torch.cat([past, conv_states], dim=-1)
    self.conv_states[state_idx] = inputs[..., -conv_kernel_size:].clone()
    self.has_previous_state[state_idx] = True
    self.is_conv_states_initialized[state_idx] = True
    self.dtype, self.device = inputs.dtype, inputs.device
    return inputs[..., conv_kernel_size:] if first else inputs


LinearAttentionLayer.update_recurrent_state = replace_recurrent_state
LinearAttentionLayer.update_conv_state = replace_convolution_state


# --- model and adapters ----------------------------------------------------------------------------------------------


def build(case, dtype):
    config = AutoConfig.for_model(case.model_type, **copy.deepcopy(case.config))
    options = {"attn_implementation": "eager"}
    if any(hasattr(config, key) for key in ("num_experts", "n_routed_experts")):
        options["experts_implementation"] = "eager"
    return AutoModelForCausalLM.from_config(config, dtype=dtype, **options).to(dtype).eval()


@torch.no_grad()
def randomize(model, generator):
    """Sets random weights that are so large that attention, routing and gates are far from uniform."""

    def normal(shape, deviation, mean=0.0):
        return torch.empty(shape).normal_(mean, deviation, generator=generator)

    tensors = dict(model.named_parameters())
    tensors.update({name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")})
    for name, tensor in tensors.items():
        shape = tensor.shape
        if name.endswith("A_log"):
            random = torch.empty(shape).uniform_(0.02, 1.5, generator=generator).log()
        elif name.endswith("dt_bias"):
            random = normal(shape, 0.5, -0.5)
        elif name.endswith("e_score_correction_bias"):
            random = normal(shape, 0.1)
        elif "conv1d" in name:
            random = normal(shape, 0.5)
        elif "embed_tokens" in name:
            # A tied embedding is the head too: the logits should have the order of 1.
            random = normal(shape, 1.5 * shape[1] ** -0.5 if model.config.tie_word_embeddings else 1.0)
        elif tensor.dim() >= 2:
            random = normal(shape, shape[-1] ** -0.5 * (1.5 if "lm_head" in name else 1.0))
        elif name.endswith("bias"):
            random = normal(shape, 0.2)
        else:
            # A norm: around 1, or around 0 where the model adds the 1.
            random = normal(shape, 0.2, float(tensor.flatten()[0]))
        tensor.copy_(random)


class AdaptedLinear(nn.Module):
    def __init__(self, base, a, b):
        super().__init__()
        self.base, self.a, self.b = base, nn.Parameter(a), nn.Parameter(b)

    def forward(self, x):
        return self.base(x) + ADAPTER_ALPHA / ADAPTER_RANK * (x @ self.a.t() @ self.b.t())


def random_adapters(model, layers, generator):
    """{"lora.MODULE.lora_A": [rank, inputs], "lora.MODULE.lora_B": [outputs, rank]} in float32; B is not zero."""
    adapters = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or name.split(".")[-1] not in layers or ".indexer." in name:
            continue
        outputs, inputs = module.weight.shape
        adapters[f"lora.{name}.lora_A"] = torch.randn(ADAPTER_RANK, inputs, generator=generator) * inputs**-0.5
        adapters[f"lora.{name}.lora_B"] = torch.randn(outputs, ADAPTER_RANK, generator=generator) * 0.05
    return adapters


def attach(model, adapters):
    """Adds the adapters to the model and freezes everything else; returns their parameters by name."""
    parameters = {}
    dtype = next(model.parameters()).dtype
    for name in sorted({name.removeprefix("lora.").rsplit(".", 1)[0] for name in adapters}):
        a, b = (adapters[f"lora.{name}.lora_{matrix}"].to(dtype).clone() for matrix in "AB")
        parent, leaf = name.rsplit(".", 1)
        adapted = AdaptedLinear(model.get_submodule(name), a, b)
        setattr(model.get_submodule(parent), leaf, adapted)
        parameters[f"lora.{name}.lora_A"] = adapted.a
        parameters[f"lora.{name}.lora_B"] = adapted.b
    model.requires_grad_(False)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    return parameters


# --- three ways to an answer's logits --------------------------------------------------------------------------------
# Row t predicts token t of the answer. The ways differ in the positions that the gradient flows through.


def forward(model, tokens, cache=None):
    return model(input_ids=tokens[None], cache=cache, use_cache=cache is not None).logits[0]


@torch.no_grad()
def fill_cache(model, tokens):
    cache = DynamicCache(config=model.config)
    logits = forward(model, tokens, cache) if len(tokens) else None
    return cache, logits


def logits_full(model, prompt, answer):
    """One pass over prompt and answer."""
    return forward(model, torch.cat([prompt, answer[:-1]]))[len(prompt) - 1 :]


def logits_response(model, prompt, answer):
    """The prompt but for its last token is cached without gradient."""
    cache, _ = fill_cache(model, prompt[:-1])
    return forward(model, torch.cat([prompt[-1:], answer[:-1]]), cache)


def logits_response_strict(model, prompt, answer):
    """The whole prompt is cached without gradient, so row 0 is a constant."""
    cache, prompt_logits = fill_cache(model, prompt)
    if len(answer) == 1:
        return prompt_logits[-1:]
    return torch.cat([prompt_logits[-1:], forward(model, answer[:-1], cache)])


WAYS = {"full": logits_full, "resp": logits_response, "resp_strict": logits_response_strict}


# --- the loss --------------------------------------------------------------------------------------------------------


class Group:
    """A prompt, its answers, and what the loss is given about each answer token."""

    def __init__(self, prompt, answers, advantages):
        self.prompt, self.answers, self.advantages = prompt, answers, advantages
        self.old_logprobs, self.ref_logprobs = [], []

    def logits(self, model, way):
        return [WAYS[way](model, self.prompt, answer) for answer in self.answers]

    def logprobs(self, model, way):
        return [token_logprobs(logits, answer) for logits, answer in zip(self.logits(model, way), self.answers)]

    def loss(self, logprobs, kl_coef):
        """The mean over answers of the mean over the answer's tokens."""
        losses = []
        for new, old, ref, advantage in zip(logprobs, self.old_logprobs, self.ref_logprobs, self.advantages):
            old, ref = old.to(new.dtype), ref.to(new.dtype)
            ratio = (new - old).exp()
            tokens = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            if kl_coef:
                gap = ref - new
                tokens = tokens + kl_coef * (gap.exp() - gap - 1)
            losses.append(tokens.mean())
        return torch.stack(losses).mean()

    def gradients(self, model, way, kl_coef, parameters):
        """The loss and the gradient of every adapter; no gradients where the loss is a constant."""
        loss = self.loss(self.logprobs(model, way), kl_coef)
        if not loss.requires_grad:
            return loss, {}
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        filled = {
            name: torch.zeros_like(parameters[name]) if gradient is None else gradient
            for name, gradient in zip(parameters, gradients)
        }
        return loss.detach(), filled


def token_logprobs(logits, answer):
    return torch.log_softmax(logits, -1).gather(-1, answer[:, None])[:, 0]


# --- observers -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def topk_gaps(gaps):
    """Appends, for every top-k, the smallest gap between the last value that is kept and the first that is not."""
    topk = torch.topk

    def observed(x, k, dim=-1, **options):
        if k < x.shape[-1]:
            values = topk(x.detach(), k + 1, dim=-1).values
            allowed = values[..., k] > -1e30
            if allowed.any():
                gaps.append(float((values[..., k - 1] - values[..., k])[allowed].min()))
        return topk(x, k, dim=dim, **options)

    torch.topk = torch.Tensor.topk = observed
    try:
        yield
    finally:
        torch.topk = topk
        del torch.Tensor.topk


@contextlib.contextmanager
def forward_hooks(modules_and_hooks):
    handles = [module.register_forward_hook(hook) for module, hook in modules_and_hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def hidden_states(model, states):
    """Appends the residual stream after each layer to `states`."""

    def hook(_module, _inputs, output):
        states.append((output[0] if isinstance(output, tuple) else output)[0].detach())

    return forward_hooks([(layer, hook) for layer in model.model.layers])


def selections(model, chosen):
    """Fills `chosen` with the keys that indexers choose and the experts that routers choose, by layer."""

    def keep(name, output_of):
        return lambda _module, _inputs, output: chosen.__setitem__(name, output_of(output).long())

    hooks = []
    for index, layer in enumerate(model.model.layers):
        indexer = getattr(getattr(layer, "self_attn", None), "indexer", None)
        if indexer is not None:
            hooks.append((indexer, keep(f"topk.layers.{index}", lambda output: output[0])))
        router = getattr(layer.mlp, "gate", None)
        if router is not None:
            hooks.append((router, keep(f"experts.layers.{index}", lambda output: output[2])))
    return forward_hooks(hooks)


def causal_keys(keys, prompt_tokens):
    """[positions, k] to [rows of the answer, k]: ascending, without future positions, filled up with -1."""
    rows = torch.full((len(keys) - prompt_tokens + 1, keys.shape[1]), -1)
    for row, query in enumerate(range(prompt_tokens - 1, len(keys))):
        kept = keys[query][keys[query] <= query].sort().values
        rows[row, : len(kept)] = kept
    return rows


def cached_states(model, prompt):
    """What the cache holds after the prompt, by name, in float32."""
    cache, _ = fill_cache(model, prompt)
    states = {}
    for index, layer in enumerate(cache.layers):
        prefix = f"state.layers.{index}"
        if isinstance(layer, LinearAttentionLayer):
            states[f"{prefix}.conv"] = layer.conv_states[0][0]
            states[f"{prefix}.recurrent"] = layer.recurrent_states[0][0]
            continue
        if hasattr(model.config, "kv_lora_rank"):
            states[f"{prefix}.latent"] = layer.keys[0, 0]
            states[f"{prefix}.k_rope"] = layer.values[0, 0]
        else:
            states[f"{prefix}.key"] = layer.keys[0]
            states[f"{prefix}.value"] = layer.values[0]
        if getattr(layer, "indexer_keys", None) is not None:
            states[f"{prefix}.index_key"] = layer.indexer_keys[0]
    return {name: state.to(FLOAT32) for name, state in states.items()}
