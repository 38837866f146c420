//! Where each of a checkpoint's tensors goes in memory.
//!
//! ```text
//!   one by one, as the spec names them      in memory, of n experts from `range.start` on
//!   experts.E.gate_proj.weight  [f, w]   →  gate_up_proj [n, 2f, w], rows 0..f of E
//!   experts.E.up_proj.weight    [f, w]   →  gate_up_proj [n, 2f, w], rows f..2f of E
//!   experts.E.down_proj.weight  [w, f]   →  down_proj    [n, w, f]
//! ```
//!
//! Matrices in fp8 go there with their factors, so blocks never reach from one matrix into the next.

use std::collections::{BTreeMap, BTreeSet};

use tch::{Device, Kind, Tensor};

use super::blocks::{Blocks, Value};
use super::share::ExpertShare;
use crate::model::parts::{ExpertSpec, Router};
use crate::model::spec::{Expected, Spec};
use crate::runtime::units::{LayerIndex, as_dim};
use crate::tensor::accumulation;
use crate::tensor::bytes;

/// End of the name of the bias that a sigmoid router has for its choice.
const CHOICE_BIAS: &str = ".mlp.gate.e_score_correction_bias";
/// Ends of names of tensors that have the accumulation dtype in memory: those with which scores of a sigmoid router and of the
/// heads of an index are formed, and the small ones of a gated delta rule, which checkpoints in bfloat16 may hold in float32.
const WIDE: [&str; 5] =
    [CHOICE_BIAS, ".indexer.weights_proj.weight", ".linear_attn.A_log", ".linear_attn.dt_bias", DELTA_NORM];
/// End of the name of the weight of a gated delta rule's output norm: a factor, whatever the form of the other norms.
pub(super) const DELTA_NORM: &str = ".linear_attn.norm.weight";
/// End of the name of a router's matrix.
const ROUTER: &str = ".mlp.gate.weight";

/// The dtype in memory of the tensor `name` of a model of dtype `kind`. What decides between scores that lie close together, and
/// what decays follow from, has the accumulation dtype where the published models keep it in float32; a softmax router computes
/// in the model's.
pub(super) fn kind_of_tensor(name: &str, kind: Kind, sigmoid: bool) -> Kind {
    let wide = WIDE.iter().any(|end| name.ends_with(end)) || sigmoid && name.ends_with(ROUTER);
    if wide { accumulation(kind) } else { kind }
}

/// Whether tensors of these names are of a sigmoid router: only such a one has a bias.
pub(super) fn has_sigmoid_router<'a>(mut names: impl Iterator<Item = &'a String>) -> bool {
    names.any(|name| name.ends_with(CHOICE_BIAS))
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
    pub(super) tensors: BTreeMap<String, Value>,
    /// Names of the matrices that are held in fp8, as the spec has them.
    fp8: BTreeSet<String>,
    share: ExpertShare,
    /// Experts of a layer.
    count: u64,
    /// Whether routers are sigmoid ones.
    sigmoid: bool,
    kind: Kind,
    device: Device,
}

impl Held {
    /// Room for the experts of `share`; other tensors are created when they are filled. The matrices that `fp8` names are
    /// held in fp8: of experts that memory joins all or none.
    ///
    /// # Errors
    /// When memory does not suffice: the tensor, and what libtorch says.
    pub(super) fn new(
        spec: &Spec,
        share: ExpertShare,
        fp8: BTreeSet<String>,
        kind: Kind,
        device: Device,
    ) -> Result<Held, (Expected, bytes::Error)> {
        let count = spec.experts.as_ref().map_or(0, |experts| experts.count);
        let sigmoid = spec.experts.as_ref().is_some_and(|experts| experts.router == Router::Sigmoid);
        let mut held = Held { tensors: BTreeMap::new(), fp8, share, count, sigmoid, kind, device };
        let mut joined_fp8 = BTreeMap::new();
        for address in held.fp8.iter().filter_map(|name| Address::of(name)) {
            let parts: &mut i64 = joined_fp8.entry(address.joined).or_default();
            *parts = (*parts).max(address.part + 1);
        }
        for expected in joined(spec, share) {
            match held.create(&expected, joined_fp8.get(&expected.name).copied()) {
                Ok(value) => held.tensors.insert(expected.name, value),
                Err(error) => return Err((expected, error)),
            };
        }
        Ok(held)
    }

    /// Whether this rank holds the tensor `name`: all but the experts of other ranks.
    pub(super) fn holds(&self, name: &str) -> bool {
        Address::of(name).is_none_or(|address| self.share.range(self.count).contains(&address.expert))
    }

    /// Where the values of `expected` go, contiguous and of its shape; `None` for an expert that another rank holds.
    pub(super) fn target(&mut self, expected: &Expected) -> Result<Option<Value>, bytes::Error> {
        let Some(address) = Address::of(&expected.name) else {
            let parts = self.fp8.contains(&expected.name).then_some(1);
            let value = self.create(expected, parts)?;
            self.tensors.insert(expected.name.clone(), value.shallow_clone());
            return Ok(Some(value));
        };
        let range = self.share.range(self.count);
        if !range.contains(&address.expert) {
            return Ok(None);
        }
        let (expert, part, rows) = (as_dim(address.expert - range.start), address.part, as_dim(expected.shape[0]));
        Ok(match self.tensors.get(&address.joined) {
            None => None,
            Some(Value::Plain(tensor)) => {
                Some(Value::Plain(tensor.f_select(0, expert)?.f_narrow(0, part * rows, rows)?))
            }
            Some(Value::Blocks(blocks)) => Some(Value::Blocks(blocks.matrix(expert, part, rows)?)),
        })
    }

    /// A tensor of `expected`'s shape without values; in fp8 if each entry of its first dimension is so many matrices.
    fn create(&self, expected: &Expected, fp8_parts: Option<i64>) -> Result<Value, bytes::Error> {
        let shape: Vec<i64> = expected.shape.iter().copied().map(as_dim).collect();
        let kind = kind_of_tensor(&expected.name, self.kind, self.sigmoid);
        Ok(match fp8_parts {
            Some(parts) => Value::Blocks(Blocks::empty(&shape, parts, kind, self.device)?),
            None => Value::Plain(Tensor::f_empty(shape, (kind, self.device))?),
        })
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
