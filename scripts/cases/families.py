"""The table of reference cases. To add a family, add an entry to CASES (see CONTRIBUTING.md)."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    model_type: str  # as transformers names the family
    seed: int
    config: dict  # arguments of the family's config class in transformers
    adapters: list  # linear layers with an adapter, by the last part of the name
    prompt_tokens: int = 96
    answer_tokens: tuple = (12, 7)
    advantages: tuple = (1.0, -1.0)
    config_without: tuple = ()  # keys to remove from config.json
    config_with: dict = field(default_factory=dict)  # keys to add to config.json
    vision_wrapper: bool = False  # write config.json and the tensor names as vision-language checkpoints do
    fused_experts: bool = False  # write the experts of a layer as two 3-D tensors
    skipped_tensors: tuple = ()  # tensors that a loader must skip


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
DELTA_NET = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
DELTA_NET_FUSED = ["in_proj_qkvz", "in_proj_ba", "out_proj"]
LATENT_ATTENTION = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


def rope(theta, kind="default", **more):
    return {"rope_type": kind, "rope_theta": theta, **more}


DENSE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
}
LLAMA3_ROPE = rope(5e5, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)

GEMMA3 = {
    **DENSE,
    "head_dim": 16,
    "sliding_window": 16,
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "rope_parameters": {"full_attention": rope(1e6, "linear", factor=8.0), "sliding_attention": rope(1e4)},
}
# Cuts pages of 3 and of 64 tokens, and is shorter than the prompt.
WINDOW_37 = {"sliding_window": 37, "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]}
# The same in the keys of the published checkpoints: every third layer is full; the scaling belongs to full layers alone.
GEMMA3_OLD_KEYS = {
    "sliding_window_pattern": 3,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}

HYBRID = {
    **DENSE,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "rope_parameters": rope(1e7, partial_rotary_factor=0.25, mrope_section=[2, 1, 1], mrope_interleaved=True),
}
HYBRID_TINY = {
    **HYBRID,
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": rope(1e7, partial_rotary_factor=0.25, mrope_section=[1, 1, 0], mrope_interleaved=True),
}
# Three value heads a key head, as in the published 27B, and values wider than keys.
HYBRID_WIDE = {**HYBRID_TINY, "linear_num_value_heads": 6, "linear_value_head_dim": 12}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXTURE_TINY = {
    **DENSE,
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "head_dim": 16,
    "moe_intermediate_size": 12,
    "rope_parameters": rope(1e6),
}
SHARED_EXPERT = {"shared_expert_intermediate_size": 32}

LATENT = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 8,
    "index_topk_freq": 2,
    "index_skip_topk_offset": 2,
    "indexer_types": ["full", "full", "shared", "full", "shared"],
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "rope_parameters": rope(8e6),
}
LATENT_TINY = {
    **LATENT,
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "n_routed_experts": 4,
    "moe_intermediate_size": 8,
    "index_topk": 16,
    "index_topk_freq": 1,
    "indexer_types": None,
}
# Tiny, with shared layers, and with head widths that differ from each other.
LATENT_SHARED = {
    **LATENT_TINY,
    "num_hidden_layers": 3,
    "indexer_types": ["full", "shared", "full"],
    "n_routed_experts": 6,
    "moe_intermediate_size": 12,
    "v_head_dim": 12,
    "index_n_heads": 6,
}
LATENT_YARN = rope(
    1e4, "yarn", factor=4.0, original_max_position_embeddings=256, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=0.7
)

CASES = {
    "qwen3/base": Case("qwen3", 1000, {**DENSE, "head_dim": 16, "rope_parameters": rope(1e6)}, ATTENTION + MLP),
    "qwen2/base": Case("qwen2", 1001, {**DENSE, "rope_parameters": rope(1e6)}, ATTENTION + MLP),
    "llama/base": Case("llama", 1002, {**DENSE, "rope_parameters": LLAMA3_ROPE}, ATTENTION + MLP),
    # The head width is not width / heads.
    "mistral/base": Case(
        "mistral", 1003, {**DENSE, "head_dim": 24, "sliding_window": None, "rope_parameters": rope(1e6)}, ATTENTION + MLP
    ),
    "gemma3_text/base": Case("gemma3_text", 1010, GEMMA3, ATTENTION + MLP),
    "gemma3_text/old_keys": Case(
        "gemma3_text",
        1012,
        {**GEMMA3, **WINDOW_37, "tie_word_embeddings": False},
        ATTENTION + MLP,
        prompt_tokens=101,
        answer_tokens=(11, 7),
        config_without=("layer_types", "rope_parameters", "_sliding_window_pattern"),
        config_with=GEMMA3_OLD_KEYS,
    ),
    "qwen3_moe/base": Case(
        "qwen3_moe",
        1011,
        {**DENSE, **EXPERTS, "head_dim": 16, "norm_topk_prob": True, "rope_parameters": rope(1e6)},
        ATTENTION,
    ),
    # Layers 1 and 3 would have experts by the step; layer 1 is named as dense.
    "qwen3_moe/sparse_step": Case(
        "qwen3_moe",
        1013,
        {
            **MIXTURE_TINY,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
        },
        ATTENTION + MLP,
        prompt_tokens=45,
        answer_tokens=(9, 1, 4),
        advantages=(1.0, -0.5, -1.0),
    ),
    # The weight of the one expert is 1. config.json has the published key of the number of experts.
    "qwen3_moe/one_expert": Case(
        "qwen3_moe",
        1014,
        {**MIXTURE_TINY, "num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 1, "norm_topk_prob": True},
        ATTENTION,
        prompt_tokens=33,
        answer_tokens=(1, 8, 5),
        advantages=(-1.0, 1.0, -0.5),
        config_without=("num_local_experts",),
        config_with={"num_experts": 8},
    ),
    "qwen3_5/base": Case("qwen3_5_text", 1004, HYBRID, ATTENTION + DELTA_NET + MLP),
    "qwen3_5/composite": Case(
        "qwen3_5_text",
        1005,
        HYBRID_TINY,
        ATTENTION + DELTA_NET + MLP,
        prompt_tokens=33,
        answer_tokens=(5, 3),
        vision_wrapper=True,
        skipped_tensors=("mtp.fc.weight", "model.visual.blocks.0.norm1.weight"),
    ),
    # The prompt, and each answer, is shorter than the convolution. The published keys give the layers by an interval.
    "qwen3_5/short": Case(
        "qwen3_5_text",
        1018,
        {**HYBRID_WIDE, "layer_types": ["linear_attention", "full_attention"] * 2},
        ATTENTION + DELTA_NET + MLP,
        prompt_tokens=2,
        answer_tokens=(4, 1, 3),
        advantages=(1.0, -0.5, -1.0),
        config_without=("layer_types",),
        config_with={"full_attention_interval": 2},
    ),
    # Three chunks of 64 and answers on both sides of an edge; the first layer is full and the last is linear.
    "qwen3_5/chunks": Case(
        "qwen3_5_text",
        1419,
        {
            **HYBRID_TINY,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 2,
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
        ATTENTION + DELTA_NET + MLP,
        prompt_tokens=130,
        answer_tokens=(67, 5, 1),
        advantages=(-1.0, 1.0, 0.5),
    ),
    "qwen3_5_moe/base": Case(
        "qwen3_5_moe_text", 1106, {**HYBRID, **EXPERTS, **SHARED_EXPERT}, ATTENTION + DELTA_NET + MLP, fused_experts=True
    ),
    # As published: the text part of a vision-language checkpoint.
    "qwen3_5_moe/composite": Case(
        "qwen3_5_moe_text",
        1320,
        {
            **HYBRID_WIDE,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 20,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        },
        ATTENTION + DELTA_NET + MLP,
        prompt_tokens=45,
        answer_tokens=(9, 1, 4),
        advantages=(1.0, -0.5, -1.0),
        vision_wrapper=True,
        fused_experts=True,
        skipped_tensors=("mtp.fc.weight", "model.visual.blocks.0.norm1.weight"),
    ),
    "qwen3_next/base": Case(
        "qwen3_next",
        1007,
        {**HYBRID, **EXPERTS, **SHARED_EXPERT, "rope_parameters": rope(1e7, partial_rotary_factor=0.25)},
        ATTENTION + DELTA_NET_FUSED + MLP,
    ),
    # Layers 1 and 3 have experts by the step, the others a dense MLP. Taps of 3.
    "qwen3_next/sparse_step": Case(
        "qwen3_next",
        1021,
        {
            **HYBRID_WIDE,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 20,
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
            "linear_conv_kernel_dim": 3,
            "rope_parameters": rope(1e7, partial_rotary_factor=0.25),
        },
        ATTENTION + DELTA_NET_FUSED + MLP,
        prompt_tokens=51,
        answer_tokens=(7, 1, 4),
        advantages=(-1.0, 1.0, -0.5),
    ),
    "glm_moe_dsa/base": Case(
        "glm_moe_dsa",
        1208,
        LATENT,
        LATENT_ATTENTION + MLP,
        config_with={"num_nextn_predict_layers": 1},
        skipped_tensors=("model.layers.5.enorm.weight", "model.layers.5.eh_proj.weight"),
    ),
    # Every layer has an indexer of its own.
    "glm_moe_dsa/all_full": Case(
        "glm_moe_dsa",
        1009,
        LATENT_TINY,
        LATENT_ATTENTION + MLP,
        prompt_tokens=33,
        answer_tokens=(5, 3),
        config_without=("indexer_types",),
    ),
    # Groups of experts, two shared experts, biases in the attention. config.json has a head_dim that nothing may use.
    "glm_moe_dsa/groups": Case(
        "glm_moe_dsa",
        3115,
        {
            **LATENT_SHARED,
            "num_hidden_layers": 4,
            "indexer_types": ["full", "shared", "full", "shared"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": False,
            "attention_bias": True,
        },
        LATENT_ATTENTION + MLP,
        prompt_tokens=50,
        answer_tokens=(7, 1, 4),
        advantages=(1.0, -0.5, -1.0),
        config_with={"head_dim": 12},
    ),
    # Every causal key is selected.
    "glm_moe_dsa/short": Case(
        "glm_moe_dsa",
        1016,
        {
            **LATENT_SHARED,
            "qk_rope_head_dim": 16,
            "index_head_dim": 24,
            "index_topk": 64,
            "max_position_embeddings": 1024,
            "rope_parameters": LATENT_YARN,
        },
        LATENT_ATTENTION + MLP,
        prompt_tokens=39,
        answer_tokens=(5, 9, 1),
        advantages=(-1.0, 1.0, 0.5),
    ),
    # All keys are selected until position 35; from there on, in the answers, 36 of them.
    "glm_moe_dsa/border": Case(
        "glm_moe_dsa",
        1017,
        {**LATENT_SHARED, "indexer_types": ["full", "full", "shared"], "index_topk": 36},
        LATENT_ATTENTION + MLP,
        prompt_tokens=33,
        answer_tokens=(12, 6, 1),
        advantages=(1.0, -1.0, -0.5),
    ),
}
