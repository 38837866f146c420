//! Qwen3.5 and Qwen3.6, text: 1 + w norms, a gated delta rule in most layers, gated attention with partial rotation in the
//! others; dense, or with experts and a gated shared one in every layer. Positions of text are equal on all axes of `mrope`.

use super::differences::{BiasRule, Defaults, DeltaInputs, Differences, ExpertDefaults, Normalised, RopeRule};
use crate::model::spec::NormForm;

pub(super) const QWEN3_5: Differences = Differences {
    model_type: "qwen3_5_text",
    wrapper: Some("qwen3_5"),
    norm: NormForm::OnePlusWeight,
    qk_norm: true,
    biases: BiasRule::Attention,
    ropes: RopeRule::Partial(0.25),
    delta: Some(DeltaInputs::Apart),
    gated_attention: true,
    defaults: Defaults {
        vocabulary: Some(248_320),
        ffn_width: Some(12_288),
        query_heads: Some(16),
        kv_heads: Some(4),
        head_dim: Some(256),
        eos_of_wrapper: true,
        ..Defaults::PLAIN
    },
    ..Differences::PLAIN
};

pub(super) const QWEN3_5_MOE: Differences = Differences {
    model_type: "qwen3_5_moe_text",
    wrapper: Some("qwen3_5_moe"),
    experts: Some(ExpertDefaults {
        count: 256,
        chosen: 8,
        width: 512,
        shared_width: Some(512),
        normalised: Normalised::Always,
        everywhere: true,
    }),
    defaults: Defaults { ffn_width: None, kv_heads: Some(2), ..QWEN3_5.defaults },
    ..QWEN3_5
};
