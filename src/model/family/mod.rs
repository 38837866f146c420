//! The families of decoders: one file each, one entry each in [`FAMILIES`], and no other place that knows their names.
//!
//! A new family adds a file and an entry. What a family decides is how its config is read, which tensors a layer holds and
//! which of its linear layers an adapter may target.

mod dense;
mod llama;
mod mistral;
mod qwen2;
mod qwen3;

use std::fmt;
use std::rc::Rc;

use serde_json::Value;
use tch::Kind;

use super::decoder::Decoder;
use super::keys::Keys;
use super::spec::{Expected, Linear, Spec};
use super::weights::Weights;
use crate::runtime::units::LayerIndex;

/// The rules of one family.
pub trait Family: fmt::Debug + Send + Sync {
    /// The `model_type` values of published configs that this family reads, the plain one first.
    fn model_types(&self) -> &'static [&'static str];

    /// Reads a config of this family; what is wrong is left in `keys`, and the spec is then not used.
    ///
    /// `rope_scaling` replaces the file's scaling.
    fn read(&self, keys: &mut Keys<'_>, rope_scaling: Option<&Value>) -> Spec;

    /// The linear layers of one layer that an adapter may target, in the order of the computation.
    fn linear_layers(&self, spec: &Spec, layer: LayerIndex) -> Vec<Linear>;

    /// The tensors of one layer, in the order of the computation.
    fn tensors(&self, spec: &Spec, layer: LayerIndex) -> Vec<Expected>;

    /// A decoder of this family over loaded weights, computing in `kind`.
    fn decoder(&self, spec: &Spec, weights: Rc<Weights>, kind: Kind) -> Box<dyn Decoder>;
}

/// Every family that is built.
pub static FAMILIES: &[&dyn Family] = &[&qwen3::Qwen3, &qwen2::Qwen2, &llama::Llama, &mistral::Mistral];

/// The family that reads `model_type`.
#[must_use]
pub fn find(model_type: &str) -> Option<&'static dyn Family> {
    FAMILIES.iter().copied().find(|family| family.model_types().contains(&model_type))
}

/// All `model_type` values that are read, in the order of the registry.
#[must_use]
pub fn model_types() -> Vec<&'static str> {
    FAMILIES.iter().flat_map(|family| family.model_types()).copied().collect()
}
