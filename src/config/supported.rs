//! Values of the configuration that this build does not support yet. Each has a row, so that no key is ignored in silence;
//! the row is removed when its part is built.

use super::RunConfig;
use super::choices::ActivationCkpt;

/// One thing that is refused for now.
#[derive(Debug)]
pub struct Supported {
    /// Dotted path of the key.
    pub key: &'static str,
    /// What it should be instead.
    pub be: &'static str,
    /// What this build does not do yet.
    pub what: &'static str,
    /// Whether a configuration needs it.
    pub lacks: fn(&RunConfig) -> bool,
}

/// All of them.
pub const SUPPORTED: &[Supported] = &[
    Supported {
        key: "memory.activation_ckpt",
        be: "\"layer\"",
        what: "keep all activations of a layer",
        lacks: |run| run.memory.activation_ckpt == ActivationCkpt::None,
    },
    Supported {
        key: "memory.layer_wise_transfer",
        be: "true",
        what: "stage all layers at once",
        lacks: |run| !run.memory.layer_wise_transfer,
    },
];
