//! Mistral: no biases; every layer has the window that `sliding_window` states (later releases state none).

use super::differences::{Defaults, Differences, WindowRule};

pub(super) const MISTRAL: Differences = Differences {
    model_type: "mistral",
    windows: WindowRule::Always,
    defaults: Defaults { kv_heads: Some(8), max_positions: 131_072, bos: &[1], eos: &[2], ..Defaults::PLAIN },
    ..Differences::PLAIN
};
