//! Llama 2 and 3, SmolLM2 and others of that shape: biases only if the config asks for them, no window.

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

/// The family `llama`.
#[derive(Debug)]
pub(super) struct Llama;

impl Family for Llama {
    fn model_types(&self) -> &'static [&'static str] {
        &["llama"]
    }

    fn read(&self, keys: &mut Keys<'_>, rope_scaling: Option<&Value>) -> Spec {
        let biased = keys.flag("attention_bias", false);
        let mlp = keys.flag("mlp_bias", false);
        let own = dense::Differences {
            family: &Llama,
            model_type: "llama",
            qk_norm: false,
            biases: Biases { q: biased, k: biased, v: biased, o: biased, mlp },
            head_dim: None,
            kv_heads: None,
            max_positions: 2048,
            bos: &[1],
            eos: &[2],
            window: dense::no_window,
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
