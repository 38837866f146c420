//! Qwen2 and Qwen2.5: biases on queries, keys and values always, on the output never.

use super::differences::{BiasRule, Defaults, Differences, WindowRule};

pub(super) const QWEN2: Differences = Differences {
    model_type: "qwen2",
    biases: BiasRule::QueryKeyValue,
    windows: WindowRule::SwitchedOn,
    defaults: Defaults { kv_heads: Some(32), ..Defaults::PLAIN },
    ..Differences::PLAIN
};
