//! Llama 2 and 3, SmolLM2 and others of that shape: biases only if the config asks for them, no window.

use super::differences::{BiasRule, Defaults, Differences};

pub(super) const LLAMA: Differences = Differences {
    model_type: "llama",
    biases: BiasRule::AttentionAndMlp,
    defaults: Defaults { max_positions: 2048, bos: &[1], eos: &[2], ..Defaults::PLAIN },
    ..Differences::PLAIN
};
