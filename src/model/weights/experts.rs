//! Where each of a checkpoint's tensors goes in memory.
//!
//! ```text
//!   one by one, as the spec names them      in memory, of n experts from `range.start` on
//!   experts.E.gate_proj.weight  [f, w]   →  gate_up_proj [n, 2f, w], rows 0..f of E
//!   experts.E.up_proj.weight    [f, w]   →  gate_up_proj [n, 2f, w], rows f..2f of E
//!   experts.E.down_proj.weight  [w, f]   →  down_proj    [n, w, f]
//! ```

use std::collections::BTreeMap;

use tch::{Device, Kind, Tensor};

use super::share::ExpertShare;
use crate::model::parts::ExpertSpec;
use crate::model::spec::{Expected, Spec};
use crate::runtime::units::{LayerIndex, as_dim};
use crate::tensor::accumulation;
use crate::tensor::bytes;

/// End of the name of the router's bias for the choice of experts.
const CORRECTION_BIAS: &str = ".mlp.gate.e_score_correction_bias";

/// The dtype in memory of the tensor `name` of a model of dtype `kind`: the router's correction bias decides between scores
/// that lie close together, so it has the accumulation dtype.
pub(super) fn kind_of_tensor(name: &str, kind: Kind) -> Kind {
    if name.ends_with(CORRECTION_BIAS) { accumulation(kind) } else { kind }
}

/// Names and shapes in memory of the tensors of all layers' experts, of which a rank holds `share`.
pub(super) fn joined(spec: &Spec, share: ExpertShare) -> Vec<Expected> {
    let of = |layer: LayerIndex| {
        let experts = spec.experts_of(layer)?;
        let range = share.range(experts.count);
        let held = range.end - range.start;
        let gate_up = Expected::new(ExpertSpec::gate_up_name(layer), &[held, 2 * experts.width, spec.width]);
        Some([gate_up, Expected::new(ExpertSpec::down_name(layer), &[held, spec.width, experts.width])])
    };
    (0..spec.layers).map(LayerIndex).filter_map(of).flatten().collect()
}

/// A model's tensors in memory while they are filled one by one.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) tensors: BTreeMap<String, Tensor>,
    share: ExpertShare,
    /// Experts of a layer.
    count: u64,
    kind: Kind,
    device: Device,
}

impl Held {
    /// Room for the experts of `share`; other tensors are created when they are filled.
    ///
    /// # Errors
    /// When memory does not suffice: the tensor, and what libtorch says.
    pub(super) fn new(
        spec: &Spec,
        share: ExpertShare,
        kind: Kind,
        device: Device,
    ) -> Result<Held, (Expected, bytes::Error)> {
        let mut held = Held {
            tensors: BTreeMap::new(),
            share,
            count: spec.experts.as_ref().map_or(0, |experts| experts.count),
            kind,
            device,
        };
        for expected in joined(spec, share) {
            match held.create(&expected) {
                Ok(tensor) => held.tensors.insert(expected.name, tensor),
                Err(error) => return Err((expected, error)),
            };
        }
        Ok(held)
    }

    /// Where the values of `expected` go, contiguous and of its shape; `None` for an expert that another rank holds.
    pub(super) fn target(&mut self, expected: &Expected) -> Result<Option<Tensor>, bytes::Error> {
        let Some(address) = Address::of(&expected.name) else {
            let tensor = self.create(expected)?;
            self.tensors.insert(expected.name.clone(), tensor.shallow_clone());
            return Ok(Some(tensor));
        };
        let range = self.share.range(self.count);
        if !range.contains(&address.expert) {
            return Ok(None);
        }
        let rows = as_dim(expected.shape[0]);
        let joined = self.tensors.get(&address.joined).map(|tensor| {
            let expert = tensor.f_select(0, as_dim(address.expert - range.start))?;
            Ok(expert.f_narrow(0, address.part * rows, rows)?)
        });
        joined.transpose()
    }

    fn create(&self, expected: &Expected) -> Result<Tensor, bytes::Error> {
        let shape: Vec<i64> = expected.shape.iter().copied().map(as_dim).collect();
        Ok(Tensor::f_empty(shape, (kind_of_tensor(&expected.name, self.kind), self.device))?)
    }
}

/// The place of one expert's tensor in memory.
struct Address {
    /// Name of the tensor of all experts.
    joined: String,
    /// Global number of the expert.
    expert: u64,
    /// How many matrices of the same shape stand above it.
    part: i64,
}

impl Address {
    /// That of `name`, if it is a tensor of an expert.
    fn of(name: &str) -> Option<Address> {
        let (layer, rest) = name.strip_prefix("model.layers.")?.split_once(".mlp.experts.")?;
        let (expert, projection) = rest.split_once('.')?;
        let layer = LayerIndex(layer.parse().ok()?);
        let (joined, part) = match projection {
            "gate_proj.weight" => (ExpertSpec::gate_up_name(layer), 0),
            "up_proj.weight" => (ExpertSpec::gate_up_name(layer), 1),
            "down_proj.weight" => (ExpertSpec::down_name(layer), 0),
            _ => return None,
        };
        Some(Address { joined, expert: expert.parse().ok()?, part })
    }
}
