//! Qwen2 and Qwen2.5: biases on queries, keys and values always, on the output never.

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

/// The family `qwen2`.
#[derive(Debug)]
pub(super) struct Qwen2;

impl Family for Qwen2 {
    fn model_types(&self) -> &'static [&'static str] {
        &["qwen2"]
    }

    fn read(&self, keys: &mut Keys<'_>, rope_scaling: Option<&Value>) -> Spec {
        let own = dense::Differences {
            family: &Qwen2,
            model_type: "qwen2",
            qk_norm: false,
            biases: Biases { q: true, k: true, v: true, o: false, mlp: false },
            head_dim: None,
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
