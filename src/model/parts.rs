//! Parts in which decoders differ: biases, norms and activations; attention over latents with an index of keys; feed-forwards of
//! experts.

use serde::Serialize;

use crate::runtime::units::{LayerIndex, as_dim};
use crate::tensor::delta::DeltaHeads;

/// Which projections carry a bias.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
#[expect(clippy::struct_excessive_bools, reason = "five independent facts of a checkpoint, not a state")]
#[expect(missing_docs, reason = "the names say everything")]
pub struct Biases {
    pub q: bool,
    pub k: bool,
    pub v: bool,
    pub o: bool,
    pub mlp: bool,
}

/// Formula of a norm: x / √(mean(x²) + eps), then the weight.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NormForm {
    /// Cast to the model's dtype, then times w.
    #[default]
    Weight,
    /// Times 1 + w in the accumulation dtype, then cast.
    OnePlusWeight,
}

/// Norms around a block's two parts, attention and feed-forward.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockNorms {
    /// One before each part.
    #[default]
    Two,
    /// One before and one after each part.
    Four,
}

/// Activation of the gate in the feed-forward.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// z · sigmoid(z).
    #[default]
    Silu,
    /// GELU by its tanh formula.
    GeluTanh,
}

impl Activation {
    /// The name in published configs.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.in_quotes().trim_matches('"')
    }

    /// The name in quotes, for messages.
    #[must_use]
    pub fn in_quotes(self) -> &'static str {
        match self {
            Activation::Silu => "\"silu\"",
            Activation::GeluTanh => "\"gelu_pytorch_tanh\"",
        }
    }
}

/// Attention over one latent a position, shared by all heads (MLA), over the keys that an index chooses (DSA). Widths are
/// counts of elements.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LatentSpec {
    /// Width of the compressed queries.
    pub query_rank: u64,
    /// Width of the latent.
    pub latent: u64,
    /// Width of a head's key that is not rotated.
    pub plain: u64,
    /// Width of the rotated part of a key, one for all heads.
    pub rotated: u64,
    /// Width of a head's value.
    pub value_dim: u64,
    /// Epsilon of the norms of compressed queries and latents.
    pub norm_eps: f64,
    /// How keys are chosen.
    pub index: IndexSpec,
}

/// How keys are chosen: each query's `top` keys by index score.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct IndexSpec {
    /// How many index heads.
    pub heads: u64,
    /// Width of an index key.
    pub dim: u64,
    /// Most keys of a query.
    pub top: u64,
    /// Per layer: whether it chooses. The others take what the nearest such layer below has chosen for the same rows.
    pub owners: Vec<bool>,
}

impl IndexSpec {
    /// The layer whose choice `layer` uses: itself, or the nearest owner below.
    #[must_use]
    pub fn owner_of(&self, layer: LayerIndex) -> LayerIndex {
        let below = self.owners[..=layer.0].iter().rposition(|&owner| owner);
        LayerIndex(below.unwrap_or(0))
    }
}

/// A gated delta rule behind a short convolution, in some layers, in the place of attention. Widths are counts of elements.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeltaSpec {
    /// How many heads queries and keys have.
    pub key_heads: u64,
    /// How many heads values have; a multiple of `key_heads`.
    pub value_heads: u64,
    /// Width of a head's query and key.
    pub key_dim: u64,
    /// Width of a head's value.
    pub value_dim: u64,
    /// Inputs of the convolution.
    pub taps: u64,
    /// Whether a checkpoint joins the input projections: `in_proj_qkvz` and `in_proj_ba`, rows by key head.
    pub joined: bool,
    /// Per layer: whether it has the rule. The others have attention.
    pub layers: Vec<bool>,
}

impl DeltaSpec {
    /// Names and widths of the input projections, in the order of the computation.
    #[must_use]
    pub fn inputs(&self) -> Vec<(&'static str, u64)> {
        let heads = self.value_heads;
        if self.joined {
            return vec![("in_proj_qkvz", self.channels() + self.values()), ("in_proj_ba", 2 * heads)];
        }
        vec![("in_proj_qkv", self.channels()), ("in_proj_z", self.values()), ("in_proj_b", heads), ("in_proj_a", heads)]
    }

    /// Names and shapes of a layer's tensors that are no linear layers.
    #[must_use]
    pub fn tensors(&self) -> [(&'static str, Vec<u64>); 4] {
        [
            ("conv1d.weight", vec![self.channels(), 1, self.taps]),
            ("A_log", vec![self.value_heads]),
            ("dt_bias", vec![self.value_heads]),
            ("norm.weight", vec![self.value_dim]),
        ]
    }

    /// Width of all queries, and of all keys.
    #[must_use]
    pub fn keys(&self) -> u64 {
        self.key_heads * self.key_dim
    }

    /// Width of all values.
    #[must_use]
    pub fn values(&self) -> u64 {
        self.value_heads * self.value_dim
    }

    /// Heads and widths as computations take them.
    #[must_use]
    pub fn heads(&self) -> DeltaHeads {
        DeltaHeads {
            key_heads: as_dim(self.key_heads),
            value_heads: as_dim(self.value_heads),
            key_dim: as_dim(self.key_dim),
            value_dim: as_dim(self.value_dim),
        }
    }

    /// Channels of the convolution: queries, keys and values.
    #[must_use]
    pub fn channels(&self) -> u64 {
        2 * self.keys() + self.values()
    }
}

/// How scores of experts follow from the router's logits.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Router {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each, with a bias for the choice only.
    Sigmoid,
}

/// Names that target lists use for the linear layers of experts.
pub const EXPERT_PROJECTIONS: [&str; 3] = ["experts.gate_proj", "experts.up_proj", "experts.down_proj"];
/// Number in its layer of the expert that the linear layer `module` belongs to.
#[must_use]
pub fn expert_of(module: &str) -> Option<u64> {
    let (_, expert) = module.split_once(".mlp.experts.")?;
    expert.split_once('.')?.0.parse().ok()
}

/// Feed-forwards of experts in some layers: a router gives each row to a few of them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExpertSpec {
    /// How many experts a layer has.
    pub count: u64,
    /// Experts of a row.
    pub chosen: u64,
    /// Width of an expert's inner layer.
    pub width: u64,
    /// Width of the inner layer of the feed-forward that every row passes besides; 0 without one.
    pub shared_width: u64,
    /// Whether a gate of one number a row, sigmoid of a product with `shared_expert_gate`, multiplies the output of that
    /// feed-forward.
    #[serde(skip_serializing_if = "is_false")]
    pub shared_gate: bool,
    /// How scores follow from logits.
    pub router: Router,
    /// Whether the scores of a row's experts are divided by their sum.
    pub normalised: bool,
    /// Factor on the weights of a row's experts.
    pub scaling: f64,
    /// Experts are chosen within the best `kept_groups` of so many equal groups.
    pub groups: u64,
    /// Groups that a row may choose from.
    pub kept_groups: u64,
    /// Per layer: whether its feed-forward has experts.
    pub sparse: Vec<bool>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands a reference")]
fn is_false(flag: &bool) -> bool {
    !flag
}

impl ExpertSpec {
    /// Name in a layer of the feed-forward that every row passes besides.
    #[must_use]
    pub fn shared_name(&self) -> &'static str {
        if self.shared_gate { "mlp.shared_expert" } else { "mlp.shared_experts" }
    }

    /// Name of the tensor of a layer's gate and up weights, [experts, 2 · width, inputs], gate rows first. Of experts that
    /// are spread over ranks a rank holds its own.
    #[must_use]
    pub fn gate_up_name(layer: LayerIndex) -> String {
        format!("model.layers.{layer}.mlp.experts.gate_up_proj")
    }

    /// Name of the tensor of a layer's down weights, [experts, outputs, width].
    #[must_use]
    pub fn down_name(layer: LayerIndex) -> String {
        format!("model.layers.{layer}.mlp.experts.down_proj")
    }
}
