//! Qwen3: norms on queries and keys, a head width of its own, biases only if the config asks for them.

use super::differences::{BiasRule, Defaults, Differences, WindowRule};

pub(super) const QWEN3: Differences = Differences {
    model_type: "qwen3",
    qk_norm: true,
    biases: BiasRule::Attention,
    windows: WindowRule::SwitchedOn,
    defaults: Defaults { head_dim: Some(128), kv_heads: Some(32), ..Defaults::PLAIN },
    ..Differences::PLAIN
};
