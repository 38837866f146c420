//! What computes the mixers of a model, and the layers that show all of it.

use crate::model::decoder::Decoder;
use crate::model::spec::Spec;
use crate::runtime::failure::Failure;
use crate::runtime::units::LayerIndex;
use crate::world::World;

/// Names of what computes the mixers of a model; none where no layer has such a mixer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernels {
    pub(super) attention: &'static str,
    pub(super) index_scores: Option<&'static str>,
    pub(super) delta_rule: Option<&'static str>,
}

impl Kernels {
    /// Those of `decoder`, if they are the same on all ranks.
    pub(super) fn agreed(decoder: &dyn Decoder, world: &World) -> Result<Kernels, Failure> {
        let kernels = Kernels {
            attention: decoder.attention_name(),
            index_scores: decoder.index_scores_name(),
            delta_rule: decoder.delta_rule_name(),
        };
        world.require_equal("the attention kernel", kernels.attention)?;
        world.require_equal("what computes index scores", kernels.index_scores.unwrap_or("none"))?;
        world.require_equal("what computes delta rules", kernels.delta_rule.unwrap_or("none"))?;
        Ok(kernels)
    }
}

/// Layers of the warm-up: two, or as many as have every kind of mixer.
pub(super) fn warm_layers(spec: &Spec) -> usize {
    let is_delta = |layer: &usize| spec.delta_of(LayerIndex(*layer)).is_some();
    let first = |kind: bool| (0..spec.layers).find(|layer| is_delta(layer) == kind).unwrap_or(0);
    (1 + first(true).max(first(false))).clamp(2.min(spec.layers), spec.layers)
}
