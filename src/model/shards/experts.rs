//! Experts that a file holds joined, layer by layer, as places of their own.
//!
//! ```text
//!   gate_up_proj [e, 2f, w]   expert 0: gate [f, w], up [f, w] · expert 1: gate [f, w], up [f, w] · …
//!   down_proj    [e, w, f]    expert 0 [w, f] · expert 1 [w, f] · …
//! ```
//!
//! The bytes of an expert lie together in either, so each of its matrices is a part of the range. From here on a checkpoint
//! is the same in both layouts: names, digests and messages are those of single experts.

use super::{Checkpoint, Place, Problem};
use crate::model::parts::ExpertSpec;
use crate::model::spec::Spec;
use crate::runtime::units::{LayerIndex, as_index, from_index};
use crate::tensor::stored::kind_of;

/// A tensor of all experts of a layer, and which matrices of an expert it consists of.
struct Joined {
    name: String,
    shape: [u64; 3],
    /// Names of an expert's matrices, without the part before the expert's number.
    parts: &'static [&'static str],
    /// Shape of each.
    part_shape: [u64; 2],
}

fn joined_of(layer: LayerIndex, experts: &ExpertSpec, width: u64) -> [Joined; 2] {
    let inner = experts.width;
    [
        Joined {
            name: ExpertSpec::gate_up_name(layer),
            shape: [experts.count, 2 * inner, width],
            parts: &["gate_proj", "up_proj"],
            part_shape: [inner, width],
        },
        Joined {
            name: ExpertSpec::down_name(layer),
            shape: [experts.count, width, inner],
            parts: &["down_proj"],
            part_shape: [width, inner],
        },
    ]
}

impl Checkpoint {
    /// Puts the places of single experts in the place of joined ones.
    pub(super) fn split_experts(&mut self, spec: &Spec, problems: &mut Vec<Problem>) {
        for layer in (0..spec.layers).map(LayerIndex) {
            let Some(experts) = spec.experts_of(layer) else { continue };
            for joined in joined_of(layer, experts, spec.width) {
                let Some(place) = self.places.remove(&joined.name) else { continue };
                self.split(layer, &joined, &place, problems);
            }
        }
    }

    /// The matrices that memory joins must all be in fp8, or none of them.
    pub(super) fn judge_mixed_experts(&self, spec: &Spec, problems: &mut Vec<Problem>) {
        for layer in (0..spec.layers).map(LayerIndex) {
            let Some(experts) = spec.experts_of(layer) else { continue };
            for joined in joined_of(layer, experts, spec.width) {
                let matrices = (0..experts.count).flat_map(|expert| {
                    joined
                        .parts
                        .iter()
                        .map(move |part| format!("model.layers.{layer}.mlp.experts.{expert}.{part}.weight"))
                });
                let found = matrices.filter_map(|name| Some((self.places.get(&name)?.is_fp8(), name)));
                let (inside, outside): (Vec<_>, Vec<_>) = found.partition(|(is_fp8, _)| *is_fp8);
                if let ([(_, fp8), ..], [(_, other), ..]) = (&inside[..], &outside[..]) {
                    problems.push(Problem::MixedExperts { fp8: fp8.clone(), other: other.clone() });
                }
            }
        }
    }

    /// Places the matrices of each expert within the bytes of `place`. Those of a tensor that cannot be used have no bytes,
    /// so that one problem does not become one of each expert.
    fn split(&mut self, layer: LayerIndex, joined: &Joined, place: &Place, problems: &mut Vec<Problem>) {
        let (file, name) = (self.shards[place.shard].name.clone(), joined.name.clone());
        let before = problems.len();
        if place.shape != joined.shape {
            let (found, wanted) = (place.shape.clone(), joined.shape.to_vec());
            problems.push(Problem::Shape { file, name, found, wanted });
        } else if kind_of(place.dtype).is_none() {
            problems.push(Problem::Dtype { file, name, dtype: place.dtype.to_string() });
        }
        let sound = problems.len() == before;
        let matrices = joined.shape[0] * from_index(joined.parts.len());
        let bytes = if sound { (place.range.1 - place.range.0) / as_index(matrices.max(1)) } else { 0 };
        let mut start = place.range.0;
        let mut single = None;
        for expert in 0..joined.shape[0] {
            for part in joined.parts {
                let matrix = format!("model.layers.{layer}.mlp.experts.{expert}.{part}.weight");
                let here = Place {
                    shard: place.shard,
                    shape: joined.part_shape.to_vec(),
                    dtype: if sound { place.dtype } else { safetensors::Dtype::F32 },
                    range: (start, start + bytes),
                };
                start += bytes;
                if self.places.insert(matrix.clone(), here).is_some() {
                    single.get_or_insert(matrix);
                }
            }
        }
        if let Some(single) = single {
            problems.push(Problem::ExpertsTwice { joined: joined.name.clone(), single });
        }
    }
}
