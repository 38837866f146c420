//! What a decoder is, in our own names, read from a published `config.json`.

use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Map, Value};
use tch::{Device, Kind};

use super::config_reader::Problem;
pub use super::parts::{Activation, Biases, BlockNorms, EXPERT_PROJECTIONS, NormForm, expert_of};
use super::parts::{DeltaSpec, ExpertSpec, LatentSpec, Router};
use super::problems::Problems;
use super::rope::{Rope, RopeSpec};
use crate::runtime::digest::sha256_hex;
use crate::runtime::failure::{Classified, Exit};
use crate::runtime::units::{LayerIndex, Tokens};
use crate::runtime::{names, reading};
use crate::tensor::views;

/// Why a config gives no spec.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what each is")]
pub enum Error {
    #[error("{}: {source}; give the folder of a checkpoint, or its config.json", file.display())]
    Unreadable { file: PathBuf, source: io::Error },
    #[error("{}: not a JSON object: {source}", file.display())]
    NotJson { file: PathBuf, source: serde_json::Error },
    #[error("{}: {problems}", file.display())]
    Refused { file: PathBuf, problems: Problems<Problem> },
    #[error(
        "adapter target \"{target}\" is no linear layer of {model_type}; these are {known}, the nearest is \"{nearest}\""
    )]
    Target { target: String, model_type: &'static str, known: String, nearest: &'static str },
    #[error("the list of adapter targets is empty; leave it out to adapt all linear layers of {model_type}: {known}")]
    NoTarget { model_type: &'static str, known: String },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Refused { problems, .. } if problems.0.iter().all(Problem::is_of_the_run) => Exit::Config,
            Error::Unreadable { .. } | Error::NotJson { .. } | Error::Refused { .. } => Exit::Data,
            Error::Target { .. } | Error::NoTarget { .. } => Exit::Config,
        }
    }
}

/// A decoder. Sizes are counts of elements; every head has the same width.
///
/// Equality of two specs is equality of [`Spec::canonical`]. A field after `eos` stands in it only where it is not the
/// default, so that a difference of one family changes no digest of another's models.
#[derive(Clone, Debug, Serialize)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts of a checkpoint, not a state")]
pub struct Spec {
    /// The family's name in the config (`qwen3`, …).
    pub model_type: &'static str,
    /// Tokens of the vocabulary: rows of the embedding and of the head.
    pub vocabulary: u64,
    /// Width of the residual stream.
    pub width: u64,
    /// Width of the feed-forward's inner layer.
    pub ffn_width: u64,
    /// How many decoder layers.
    pub layers: usize,
    /// How many query heads.
    pub query_heads: u64,
    /// Key and value heads; divides `query_heads`.
    pub kv_heads: u64,
    /// Width of a head; `query_heads · head_dim` need not be `width`.
    pub head_dim: u64,
    /// Epsilon of every norm.
    pub norm_eps: f64,
    /// Rotary position embedding; with `sliding_rope` that of the layers without a window.
    pub rope: RopeSpec,
    /// Whether the head is the embedding.
    pub tied_embeddings: bool,
    /// Whether queries and keys are normalised per head before rotation.
    pub qk_norm: bool,
    /// Which projections carry a bias.
    pub biases: Biases,
    /// Per layer: how many keys a query sees, itself included; `None` sees all.
    pub window: Vec<Option<u64>>,
    /// Positions of the native context.
    pub max_positions: u64,
    /// Token that opens a text, if there is one.
    pub bos: Option<u64>,
    /// Tokens that end a text.
    pub eos: Vec<u64>,
    /// Formula of every norm.
    #[serde(skip_serializing_if = "is_default")]
    pub norm: NormForm,
    /// Norms around a block's two parts.
    #[serde(skip_serializing_if = "is_default")]
    pub block_norms: BlockNorms,
    /// Activation of the gate.
    #[serde(skip_serializing_if = "is_default")]
    pub activation: Activation,
    /// Scores are multiplied by 1/√ of this; `None`: of `head_dim`.
    #[serde(skip_serializing_if = "is_default")]
    pub score_scalar: Option<f64>,
    /// Rotary position embedding of the layers with a window; `None`: as in the others.
    #[serde(skip_serializing_if = "is_default")]
    pub sliding_rope: Option<RopeSpec>,
    /// Whether embedding rows are multiplied by √width.
    #[serde(skip_serializing_if = "is_default")]
    pub scaled_embeddings: bool,
    /// Logits z become cap · tanh(z / cap).
    #[serde(skip_serializing_if = "is_default")]
    pub logit_cap: Option<f64>,
    /// Attention over latents; `None`: over keys and values of its own. With it `head_dim` is the width of a whole key.
    #[serde(skip_serializing_if = "is_default")]
    pub latent: Option<LatentSpec>,
    /// Feed-forwards of experts; `None`: no layer has them.
    #[serde(skip_serializing_if = "is_default")]
    pub experts: Option<ExpertSpec>,
    /// Gated delta rules; `None`: no layer has one.
    #[serde(skip_serializing_if = "is_default")]
    pub delta: Option<DeltaSpec>,
    /// Whether the query projection yields a gate with each query, whose sigmoid multiplies the head's output.
    #[serde(skip_serializing_if = "is_default")]
    pub gated_attention: bool,
}

fn is_default<T: Default + PartialEq>(field: &T) -> bool {
    *field == T::default()
}

/// A linear layer that an adapter may target.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Linear {
    /// The layer it is in.
    pub layer: LayerIndex,
    /// The name that target lists use (`q_proj`).
    pub projection: &'static str,
    /// The full name without `.weight` (`model.layers.0.self_attn.q_proj`).
    pub module: String,
    /// Inputs: columns of the weight.
    pub inputs: u64,
    /// Outputs: rows of the weight.
    pub outputs: u64,
}

/// A tensor that a checkpoint must hold.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Expected {
    /// The name, after the prefix of composite models is stripped.
    pub name: String,
    /// Sizes of all dimensions.
    pub shape: Vec<u64>,
}

impl Expected {
    /// The tensor `name` of `shape`.
    #[must_use]
    pub fn new(name: String, shape: &[u64]) -> Expected {
        Expected { name, shape: shape.to_vec() }
    }

    /// Elements of the tensor.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }
}

/// Name of the embedding.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// Name of the last norm.
pub const FINAL_NORM: &str = "model.norm.weight";
/// Name of the head; absent where it is the embedding.
pub const HEAD: &str = "lm_head.weight";

impl Spec {
    /// Every linear layer that an adapter may target: layer by layer, within a layer in the order of the computation.
    #[must_use]
    pub fn linear_layers(&self) -> Vec<Linear> {
        let of = |layer| [self.linear_layers_of(layer), self.expert_layers_of(layer)].concat();
        (0..self.layers).map(LayerIndex).flat_map(of).collect()
    }

    /// The linear layers of one layer that every row passes, in the order of the computation.
    #[must_use]
    pub fn linear_layers_of(&self, layer: LayerIndex) -> Vec<Linear> {
        let of = |part: &str, projection, inputs, outputs| {
            let module = format!("model.layers.{layer}.{part}.{projection}");
            Linear { layer, projection, module, inputs, outputs }
        };
        let mut linears: Vec<Linear> = match (self.delta_of(layer), &self.latent) {
            (Some(delta), _) => {
                let inputs =
                    delta.inputs().into_iter().map(|(name, outputs)| of("linear_attn", name, self.width, outputs));
                inputs.chain([of("linear_attn", "out_proj", delta.values(), self.width)]).collect()
            }
            (None, None) => {
                let (query_width, kv_width) = (self.query_heads * self.head_dim, self.kv_heads * self.head_dim);
                let gates = if self.gated_attention { query_width } else { 0 };
                vec![
                    of("self_attn", "q_proj", self.width, query_width + gates),
                    of("self_attn", "k_proj", self.width, kv_width),
                    of("self_attn", "v_proj", self.width, kv_width),
                    of("self_attn", "o_proj", query_width, self.width),
                ]
            }
            (None, Some(latent)) => vec![
                of("self_attn", "q_a_proj", self.width, latent.query_rank),
                of("self_attn", "q_b_proj", latent.query_rank, self.query_heads * self.head_dim),
                of("self_attn", "kv_a_proj_with_mqa", self.width, latent.latent + latent.rotated),
                of("self_attn", "kv_b_proj", latent.latent, self.query_heads * (latent.plain + latent.value_dim)),
                of("self_attn", "o_proj", self.query_heads * latent.value_dim, self.width),
            ],
        };
        match self.experts_of(layer) {
            None => linears.extend(self.feed_forward(layer, "mlp", self.ffn_width)),
            Some(experts) if experts.shared_width == 0 => {}
            Some(experts) => linears.extend(self.feed_forward(layer, experts.shared_name(), experts.shared_width)),
        }
        linears
    }

    /// The linear layers of one layer's experts, expert by expert.
    #[must_use]
    pub fn expert_layers_of(&self, layer: LayerIndex) -> Vec<Linear> {
        let Some(experts) = self.experts_of(layer) else { return Vec::new() };
        let of = |expert: u64| {
            let own = self.feed_forward(layer, &format!("mlp.experts.{expert}"), experts.width);
            own.into_iter().zip(EXPERT_PROJECTIONS).map(|(linear, projection)| Linear { projection, ..linear })
        };
        (0..experts.count).flat_map(of).collect()
    }

    fn feed_forward(&self, layer: LayerIndex, part: &str, ffn_width: u64) -> [Linear; 3] {
        [("gate_proj", self.width, ffn_width), ("up_proj", self.width, ffn_width), ("down_proj", ffn_width, self.width)]
            .map(|(projection, inputs, outputs)| {
                let module = format!("model.layers.{layer}.{part}.{projection}");
                Linear { layer, projection, module, inputs, outputs }
            })
    }

    /// The layer's gated delta rule; `None` where it has attention.
    #[must_use]
    pub fn delta_of(&self, layer: LayerIndex) -> Option<&DeltaSpec> {
        self.delta.as_ref().filter(|delta| delta.layers[layer.0])
    }

    /// What the layer's experts are; `None` where its feed-forward has none.
    #[must_use]
    pub fn experts_of(&self, layer: LayerIndex) -> Option<&ExpertSpec> {
        self.experts.as_ref().filter(|experts| experts.sparse[layer.0])
    }

    /// The names that a list of adapter targets may hold, in the order of the computation.
    #[must_use]
    pub fn projections(&self) -> Vec<&'static str> {
        let mut names = Vec::new();
        for linear in (0..self.layers).flat_map(|layer| self.linear_layers_of(LayerIndex(layer))) {
            if !names.contains(&linear.projection) {
                names.push(linear.projection);
            }
        }
        if self.experts.is_some() {
            names.extend(EXPERT_PROJECTIONS);
        }
        names
    }

    /// The linear layers that `targets` name, in canonical order; for `None` all but those of experts. A row trains only the
    /// experts that it goes to, so their adapters see a fraction of the rows, and take as much memory for each expert as the
    /// others take for a layer.
    ///
    /// # Errors
    /// When a target names no linear layer of the family, or the list is empty.
    pub fn adapted(&self, targets: Option<&[String]>) -> Result<Vec<Linear>, Error> {
        let mut linears = self.linear_layers();
        let Some(targets) = targets else {
            linears.retain(|linear| !EXPERT_PROJECTIONS.contains(&linear.projection));
            return Ok(linears);
        };
        check_targets(self.model_type, &self.projections(), Some(targets))?;
        linears.retain(|linear| targets.iter().any(|target| target == linear.projection));
        Ok(linears)
    }

    /// Every tensor that a checkpoint must hold, in the order of the computation; without the head where it is tied.
    #[must_use]
    pub fn tensors(&self) -> Vec<Expected> {
        let mut tensors = vec![Expected::new(EMBEDDING.to_owned(), &[self.vocabulary, self.width])];
        for layer in 0..self.layers {
            tensors.extend(self.tensors_of(LayerIndex(layer)));
            let weight =
                |linear: Linear| Expected::new(format!("{}.weight", linear.module), &[linear.outputs, linear.inputs]);
            tensors.extend(self.expert_layers_of(LayerIndex(layer)).into_iter().map(weight));
        }
        tensors.push(Expected::new(FINAL_NORM.to_owned(), &[self.width]));
        if !self.tied_embeddings {
            tensors.push(Expected::new(HEAD.to_owned(), &[self.vocabulary, self.width]));
        }
        tensors
    }

    /// The tensors of one layer without those of its experts, in the order of the computation.
    #[must_use]
    pub fn tensors_of(&self, layer: LayerIndex) -> Vec<Expected> {
        let norm = |name: &str, width: u64| Expected::new(format!("model.layers.{layer}.{name}.weight"), &[width]);
        let mut tensors = vec![norm("input_layernorm", self.width)];
        let mut before_feed_forward = true;
        for linear in self.linear_layers_of(layer) {
            if before_feed_forward && linear.module.contains(".mlp.") {
                before_feed_forward = false;
                tensors.extend(self.before_feed_forward(layer));
            }
            tensors.push(Expected::new(format!("{}.weight", linear.module), &[linear.outputs, linear.inputs]));
            if self.is_biased(linear.projection) {
                tensors.push(Expected::new(format!("{}.bias", linear.module), &[linear.outputs]));
            }
            if self.qk_norm && linear.projection == "k_proj" {
                tensors.push(norm("self_attn.q_norm", self.head_dim));
                tensors.push(norm("self_attn.k_norm", self.head_dim));
            }
            match (&self.latent, linear.projection) {
                (Some(latent), "q_a_proj") => tensors.push(norm("self_attn.q_a_layernorm", latent.query_rank)),
                (Some(latent), "kv_a_proj_with_mqa") => tensors.push(norm("self_attn.kv_a_layernorm", latent.latent)),
                _ => {}
            }
            if let Some(delta) =
                self.delta_of(layer).filter(|_| matches!(linear.projection, "in_proj_a" | "in_proj_ba"))
            {
                let named = |(name, shape): (&str, Vec<u64>)| {
                    Expected::new(format!("model.layers.{layer}.linear_attn.{name}"), &shape)
                };
                tensors.extend(delta.tensors().map(named));
            }
        }
        if before_feed_forward {
            tensors.extend(self.before_feed_forward(layer));
        }
        if self.block_norms == BlockNorms::Four {
            tensors.push(norm("post_feedforward_layernorm", self.width));
        }
        tensors
    }

    /// The tensors between attention and feed-forward: those of the index, of the norms and of the router.
    fn before_feed_forward(&self, layer: LayerIndex) -> Vec<Expected> {
        let named = |name: &str, shape: &[u64]| Expected::new(format!("model.layers.{layer}.{name}"), shape);
        let mut tensors = self.index_tensors(layer);
        tensors.push(named("post_attention_layernorm.weight", &[self.width]));
        if self.block_norms == BlockNorms::Four {
            tensors.push(named("pre_feedforward_layernorm.weight", &[self.width]));
        }
        if let Some(experts) = self.experts_of(layer) {
            tensors.push(named("mlp.gate.weight", &[experts.count, self.width]));
            if experts.router == Router::Sigmoid {
                tensors.push(named("mlp.gate.e_score_correction_bias", &[experts.count]));
            }
            if experts.shared_gate {
                tensors.push(named("mlp.shared_expert_gate.weight", &[1, self.width]));
            }
        }
        tensors
    }

    /// The tensors of a layer's index; none where it does not choose keys.
    fn index_tensors(&self, layer: LayerIndex) -> Vec<Expected> {
        let Some(latent) = self.latent.as_ref().filter(|latent| latent.index.owners[layer.0]) else {
            return Vec::new();
        };
        let index = &latent.index;
        let named =
            |name: &str, shape: &[u64]| Expected::new(format!("model.layers.{layer}.self_attn.indexer.{name}"), shape);
        vec![
            named("wq_b.weight", &[index.heads * index.dim, latent.query_rank]),
            named("wk.weight", &[index.dim, self.width]),
            named("k_norm.weight", &[index.dim]),
            named("k_norm.bias", &[index.dim]),
            named("weights_proj.weight", &[index.heads, self.width]),
        ]
    }

    fn is_biased(&self, projection: &str) -> bool {
        match projection {
            "q_proj" | "q_a_proj" => self.biases.q,
            "k_proj" | "kv_a_proj_with_mqa" => self.biases.k,
            "v_proj" => self.biases.v,
            "o_proj" => self.biases.o,
            "gate_proj" | "up_proj" | "down_proj" => self.biases.mlp,
            _ => false,
        }
    }

    /// The same model with its first layers only.
    #[must_use]
    pub fn first_layers(&self, layers: usize) -> Spec {
        let layers = layers.min(self.layers);
        let mut first = Spec { layers, ..self.clone() };
        first.window.truncate(layers);
        first.latent.iter_mut().for_each(|latent| latent.index.owners.truncate(layers));
        first.experts.iter_mut().for_each(|experts| experts.sparse.truncate(layers));
        first.delta.iter_mut().for_each(|delta| delta.layers.truncate(layers));
        first
    }

    /// Elements of all tensors; a tied head counts once.
    #[must_use]
    pub fn parameter_count(&self) -> u64 {
        let ends = self.width * (1 + self.vocabulary * if self.tied_embeddings { 1 } else { 2 });
        let layers = (0..self.layers).map(LayerIndex).map(|layer| {
            let experts = self.experts_of(layer).map_or(0, |experts| 3 * experts.count * experts.width * self.width);
            experts + self.tensors_of(layer).iter().map(Expected::elements).sum::<u64>()
        });
        ends + layers.sum::<u64>()
    }

    /// The spec as one line of JSON with fixed order: what digests of the model are taken over.
    ///
    /// # Panics
    /// Never: the fields are plain values.
    #[must_use]
    pub fn canonical(&self) -> String {
        serde_json::to_string(self).expect("plain fields have a JSON form")
    }

    /// SHA-256 in hexadecimal of the rotary frequencies in the accumulation dtype `acc`. Ranks must agree on it: in float32 the
    /// frequencies come from the machine's own power function.
    #[must_use]
    pub fn rotary_digest(&self, acc: Kind) -> String {
        let ropes = [Some(&self.rope), self.sliding_rope.as_ref()].into_iter().flatten();
        let frequencies = ropes.map(|rope| Rope::new(rope).frequencies(acc, Device::Cpu));
        sha256_hex(frequencies.flat_map(|tensor| views::view(&tensor).to_vec()).collect::<Vec<u8>>())
    }

    /// A sentence for the user when `positions` lie beyond what the checkpoint was made for, else nothing.
    #[must_use]
    pub fn context_note(&self, positions: Tokens) -> Option<String> {
        context_note(self.max_positions, self.rope.stretched_positions(), positions)
    }
}

/// A config.json as it stands in a file, and the file's name. `path` is that of a folder or of the file.
pub(super) fn parsed(path: &Path) -> Result<(PathBuf, Map<String, Value>), Error> {
    let file = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
    let text = match reading::text(&file) {
        Ok(text) => text,
        Err(source) => return Err(Error::Unreadable { file, source }),
    };
    match serde_json::from_str(&text) {
        Ok(config) => Ok((file, config)),
        Err(source) => Err(Error::NotJson { file, source }),
    }
}

/// Refuses targets that are not among a family's `projections`, and an empty list of them.
pub(super) fn check_targets(
    model_type: &'static str,
    projections: &[&'static str],
    targets: Option<&[String]>,
) -> Result<(), Error> {
    let Some(targets) = targets else { return Ok(()) };
    let known = || projections.join(", ");
    if targets.is_empty() {
        return Err(Error::NoTarget { model_type, known: known() });
    }
    match targets.iter().find(|target| !projections.contains(&target.as_str())) {
        None => Ok(()),
        Some(target) => {
            let nearest = names::nearest(target, projections).unwrap_or_default();
            Err(Error::Target { target: target.clone(), model_type, known: known(), nearest })
        }
    }
}

/// A sentence for the user when `positions` lie beyond the `native` context and the one it was stretched to.
pub(super) fn context_note(native: u64, stretched: Option<f64>, positions: Tokens) -> Option<String> {
    let positions = positions.0;
    if positions <= native {
        return None;
    }
    match stretched {
        Some(stretched) if count_as_number(positions) <= stretched => None,
        Some(stretched) => Some(format!(
            "{positions} positions: the checkpoint's native context ends at {native} and its rope scaling at \
             {stretched:.0}; the run is exact, but the model was never trained there"
        )),
        None => Some(format!(
            "{positions} positions: the checkpoint's native context ends at {native}; the run is exact, but the model \
             was never trained there ([model] rope_scaling can stretch it)"
        )),
    }
}

/// Positions as a number to compare with; beyond 2³² they exceed every context there is.
fn count_as_number(positions: u64) -> f64 {
    u32::try_from(positions).map_or(f64::INFINITY, f64::from)
}
