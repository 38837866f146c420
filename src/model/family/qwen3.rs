//! Qwen3: norms on queries and keys, a head width of its own, biases only if the config asks for them.

use std::rc::Rc;

use serde_json::Value;
use tch::Kind;

use super::{Family, dense};
use crate::model::decoder::Decoder;
use crate::model::dense::Dense;
use crate::model::keys::Keys;
use crate::model::spec::{Biases, Expected, Linear, Spec};
use crate::model::weights::Weights;
use crate::runtime::units::LayerIndex;

/// The family `qwen3`.
#[derive(Debug)]
pub(super) struct Qwen3;

impl Family for Qwen3 {
    fn model_types(&self) -> &'static [&'static str] {
        &["qwen3"]
    }

    fn read(&self, keys: &mut Keys<'_>, rope_scaling: Option<&Value>) -> Spec {
        let biased = keys.flag("attention_bias", false);
        let own = dense::Differences {
            family: &Qwen3,
            model_type: "qwen3",
            qk_norm: true,
            biases: Biases { q: biased, k: biased, v: biased, o: biased, mlp: false },
            head_dim: Some(128),
            kv_heads: Some(32),
            max_positions: 32_768,
            bos: &[],
            eos: &[],
            window: dense::qwen_window,
        };
        dense::read(keys, rope_scaling, &own)
    }

    fn linear_layers(&self, spec: &Spec, layer: LayerIndex) -> Vec<Linear> {
        dense::linear_layers(spec, layer)
    }

    fn tensors(&self, spec: &Spec, layer: LayerIndex) -> Vec<Expected> {
        dense::tensors(spec, layer)
    }

    fn decoder(&self, spec: &Spec, weights: Rc<Weights>, kind: Kind) -> Box<dyn Decoder> {
        Box::new(Dense::new(spec, weights, kind))
    }
}
