//! Mistral: no biases; every layer has the window that `sliding_window` states (later releases state none).

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

/// The family `mistral`.
#[derive(Debug)]
pub(super) struct Mistral;

impl Family for Mistral {
    fn model_types(&self) -> &'static [&'static str] {
        &["mistral"]
    }

    fn read(&self, keys: &mut Keys<'_>, rope_scaling: Option<&Value>) -> Spec {
        let own = dense::Differences {
            family: &Mistral,
            model_type: "mistral",
            qk_norm: false,
            biases: Biases::default(),
            head_dim: None,
            kv_heads: Some(8),
            max_positions: 131_072,
            bos: &[1],
            eos: &[2],
            window,
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

/// A config without the key has the window of the first release, one with `null` has none.
fn window(keys: &mut Keys<'_>, layers: usize) -> Vec<Option<u64>> {
    let none = keys.states("sliding_window") && keys.value("sliding_window").is_none();
    let size = if none { None } else { Some(keys.count("sliding_window", Some(4096))) };
    let window = vec![size; layers];
    dense::check_layer_types(keys, &window);
    window
}
