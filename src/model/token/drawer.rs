//! Who draws answers: the kernels of a decode step, or single operations, and then why.

use std::fmt;

use serde::{Serialize, Serializer};
use tch::Kind;

use crate::model::decoder::Decoder;
use crate::model::shape::{Layer, Mix, Shape};
use crate::runtime::units::{as_dim, from_dim};
use crate::tensor::decode::{self, ANSWERS_MAX, RANK_MAX, Sizes};

/// What computes a token of a group's answers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Drawer {
    /// The kernels of a decode step.
    Kernels,
    /// Single operations, many launches for each layer.
    Operations(Reason),
}

/// Why single operations draw.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Reason {
    /// Kernels are a GPU's.
    Cpu,
    /// The family has layers of another kind, or biases where the kernels add none.
    Model,
    /// Blocks of fp8 are no tensors of the model's dtype.
    Weights,
    /// A dtype without kernels.
    Dtype(Kind),
    /// Widths without kernels.
    Widths,
    /// More answers than rows of a step.
    Answers(u64),
    /// A wider adapter than the kernels multiply.
    Rank(u64),
    /// The GPU has too little shared memory.
    Device,
    /// Kernels that could not be compiled; the log has the error.
    Compiler,
    /// Replies to calls come in the place of drawn tokens, and kernels draw ahead of who finds the calls.
    Calls,
}

/// What decides who draws.
#[derive(Clone, Copy, Debug)]
pub struct DrawnWith {
    /// The model's dtype.
    pub kind: Kind,
    /// Whether weights are tensors of that dtype, not blocks of fp8.
    pub plain_weights: bool,
    /// Highest rank of an adapter.
    pub rank: u64,
    /// Answers of a group.
    pub answers: u64,
}

impl Drawer {
    /// Who draws on a GPU with enough shared memory.
    #[must_use]
    pub fn of(shape: &Shape, with: &DrawnWith) -> Drawer {
        Drawer::reason(shape, with).map_or(Drawer::Kernels, Drawer::Operations)
    }

    fn reason(shape: &Shape, with: &DrawnWith) -> Option<Reason> {
        let DrawnWith { kind, plain_weights, rank, answers } = *with;
        let sizes = |layer: &Layer| match layer.mix {
            Mix::Grouped { query_heads, kv_heads, head_dim, gated: false, .. } if layer.experts == 0 => Some(Sizes {
                head_dim: as_dim(head_dim),
                heads_each: as_dim(query_heads / kv_heads.max(1)),
                width: as_dim(shape.width),
                ffn_width: as_dim(layer.ffn_width),
            }),
            _ => None,
        };
        let sizes: Option<Vec<Sizes>> = shape.layers.iter().map(sizes).collect();
        let Some(sizes) = sizes.filter(|_| !shape.ffn_biases) else { return Some(Reason::Model) };
        let rules = [
            (!plain_weights, Reason::Weights),
            (!decode::has_dtype(kind), Reason::Dtype(kind)),
            (!sizes.iter().all(|sizes| decode::covers(kind, sizes)), Reason::Widths),
            (rank > from_dim(RANK_MAX), Reason::Rank(rank)),
            (answers > from_dim(ANSWERS_MAX), Reason::Answers(answers)),
        ];
        rules.into_iter().find(|(broken, _)| *broken).map(|(_, reason)| reason)
    }

    /// Who draws `answers` answers with this decoder and adapters of this `rank`, on this process's device.
    #[must_use]
    pub fn here(decoder: &dyn Decoder, rank: u64, answers: u64) -> Drawer {
        if !decoder.device().is_cuda() {
            return Drawer::Operations(Reason::Cpu);
        }
        let Some(dense) = decoder.dense() else { return Drawer::Operations(Reason::Model) };
        let with = DrawnWith { kind: decoder.kind(), plain_weights: true, rank, answers };
        match Drawer::of(&Shape::of(dense.spec), &with) {
            Drawer::Kernels if !decode::device_suffices(decoder.kind()) => Drawer::Operations(Reason::Device),
            drawer => drawer,
        }
    }

    /// The name in reports and plans.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Drawer::Kernels => "fused kernels",
            Drawer::Operations(_) => "single operations",
        }
    }

    /// A sentence where single operations draw on a GPU.
    #[must_use]
    pub fn note(&self) -> Option<String> {
        match self {
            Drawer::Kernels | Drawer::Operations(Reason::Cpu) => None,
            Drawer::Operations(reason) => {
                Some(format!("answers are drawn by single operations, several times slower than by kernels: {reason}"))
            }
        }
    }
}

impl fmt::Display for Drawer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Drawer {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Cpu => write!(f, "kernels are a GPU's"),
            Reason::Model => write!(f, "there are none for layers of this kind, or for these weights"),
            Reason::Weights => write!(f, "there are none for model.weights = \"fp8\""),
            Reason::Dtype(kind) => write!(f, "there are none for {kind:?} (model.dtype)"),
            Reason::Widths => write!(f, "there are none for these widths"),
            Reason::Answers(answers) => {
                write!(f, "a group has {answers} answers, and they take {ANSWERS_MAX} (grpo.group_size)")
            }
            Reason::Rank(rank) => write!(f, "an adapter has rank {rank}, and they take {RANK_MAX} (lora.rank)"),
            Reason::Device => write!(f, "this GPU has too little shared memory for them"),
            Reason::Compiler => write!(f, "they cannot be compiled here"),
            Reason::Calls => write!(f, "they do not wait for the replies of tools.command"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn dtype_rank_answers_and_weights_decide_who_draws() {
        let shape = Shape::read(&Path::new("configs/shapes").join("qwen3-8b"), None).unwrap();
        let with = DrawnWith { kind: Kind::BFloat16, plain_weights: true, rank: 16, answers: 64 };
        let operations = Drawer::Operations;
        assert_eq!(Drawer::of(&shape, &with), Drawer::Kernels);
        assert_eq!(Drawer::of(&shape, &DrawnWith { answers: 65, ..with }), operations(Reason::Answers(65)));
        assert_eq!(Drawer::of(&shape, &DrawnWith { rank: 257, ..with }), operations(Reason::Rank(257)));
        assert_eq!(Drawer::of(&shape, &DrawnWith { plain_weights: false, ..with }), operations(Reason::Weights));
        let double = DrawnWith { kind: Kind::Double, ..with };
        assert_eq!(Drawer::of(&shape, &double), operations(Reason::Dtype(Kind::Double)));
        let hybrid = Shape::read(&Path::new("configs/shapes").join("qwen3.6-27b"), None).unwrap();
        assert_eq!(Drawer::of(&hybrid, &with), operations(Reason::Model));
        assert!(operations(Reason::Answers(65)).note().unwrap().contains("65 answers, and they take 64"));
        assert_eq!(Drawer::Kernels.note(), None);
    }
}
