//! Qwen3 with experts (Qwen3-30B-A3B): attention as in Qwen3, a softmax router, no shared expert.

use super::differences::{BiasRule, Defaults, Differences, ExpertDefaults, Normalised, WindowRule};

pub(super) const QWEN3_MOE: Differences = Differences {
    model_type: "qwen3_moe",
    qk_norm: true,
    biases: BiasRule::Attention,
    windows: WindowRule::SwitchedOn,
    experts: Some(ExpertDefaults {
        count: 128,
        chosen: 8,
        width: 768,
        shared_width: None,
        normalised: Normalised::Stated(false),
        everywhere: false,
    }),
    defaults: Defaults { kv_heads: Some(4), ..Defaults::PLAIN },
    ..Differences::PLAIN
};
