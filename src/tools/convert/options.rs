//! How `convert` writes the HF folder.

/// The dtype of the written weights.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Weights {
    /// float32: every stored value exactly.
    #[default]
    Float32,
    /// bfloat16, rounded to nearest even: half the size.
    Bfloat16,
}

impl Weights {
    /// The name in config.json.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Weights::Float32 => "float32",
            Weights::Bfloat16 => "bfloat16",
        }
    }
}

/// Which pre-tokenizer to write, if transformers' GGUF loader differs from the model's own tokenizer.
///
/// It does for two families: `smollm` (training split every digit off first, so spaces before a number stay together) and
/// `llama-bpe` (whole words of the vocabulary take precedence over merges).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Splits {
    /// The ids that transformers gives for the GGUF file.
    #[default]
    AsTransformers,
    /// The ids that the model saw in training.
    AsTrained,
}

/// Options of `convert`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// The dtype of the written weights.
    pub weights: Weights,
    /// The pre-tokenizer in tokenizer.json.
    pub splits: Splits,
    /// Replace the destination even if it is not an earlier conversion.
    pub force: bool,
}
