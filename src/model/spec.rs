//! What a decoder is, in our own names, read from a published `config.json`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Map, Value};

use super::family::{self, Family};
use super::keys::{Keys, Problem};
use super::problems::Problems;
use super::rope::RopeSpec;
use super::shape;
use crate::runtime::failure::{Classified, Exit};
use crate::runtime::units::{LayerIndex, Tokens};

/// Why a config gives no spec.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file is not there or cannot be read.
    #[error("{}: {source}; give the folder of a checkpoint, or its config.json", file.display())]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The file is no JSON object.
    #[error("{}: not a JSON object: {source}", file.display())]
    NotJson {
        /// The file.
        file: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// Values that cannot be computed.
    #[error("{}: {problems}", file.display())]
    Refused {
        /// The file.
        file: PathBuf,
        /// Everything that is wrong.
        problems: Problems<Problem>,
    },
    /// An adapter target that the family does not have.
    #[error(
        "adapter target \"{target}\" is no linear layer of {model_type}; these are {known}, the nearest is \"{nearest}\""
    )]
    Target {
        /// The unknown name.
        target: String,
        /// The family.
        model_type: &'static str,
        /// Names that exist.
        known: String,
        /// The one spelled most alike.
        nearest: &'static str,
    },
    /// No adapter target at all.
    #[error("the list of adapter targets is empty; leave it out to adapt all linear layers of {model_type}: {known}")]
    NoTarget {
        /// The family.
        model_type: &'static str,
        /// Names that exist.
        known: String,
    },
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

/// Which projections carry a bias.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
#[expect(clippy::struct_excessive_bools, reason = "five independent facts of a checkpoint, not a state")]
pub struct Biases {
    /// Query projection.
    pub q: bool,
    /// Key projection.
    pub k: bool,
    /// Value projection.
    pub v: bool,
    /// Output projection.
    pub o: bool,
    /// The three feed-forward projections.
    pub mlp: bool,
}

/// A dense decoder. Sizes are counts of elements; every head has the same width.
///
/// Equality of two specs is equality of [`Spec::canonical`].
#[derive(Clone, Debug, Serialize)]
pub struct Spec {
    /// The family's name in the config (`qwen3`, …).
    pub model_type: &'static str,
    /// Tokens of the vocabulary: rows of the embedding and of the head.
    pub vocabulary: u64,
    /// Width of the residual stream.
    pub width: u64,
    /// Width of the feed-forward's inner layer.
    pub ffn_width: u64,
    /// Decoder layers.
    pub layers: usize,
    /// Query heads.
    pub query_heads: u64,
    /// Key and value heads; divides `query_heads`.
    pub kv_heads: u64,
    /// Width of a head; `query_heads · head_dim` need not be `width`.
    pub head_dim: u64,
    /// Epsilon of every norm.
    pub norm_eps: f64,
    /// Rotary position embedding.
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
    /// The rules of the family.
    #[serde(skip)]
    pub family: &'static dyn Family,
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
    /// The shape.
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
    /// Reads the spec of a checkpoint folder, or of the path of a bare config.json.
    ///
    /// `rope_scaling`, in the spelling of published configs, replaces the file's scaling; `null` in it removes the scaling.
    ///
    /// # Errors
    /// When the file cannot be read, or holds anything whose maths is not built: everything wrong in one message.
    pub fn read(path: &Path, rope_scaling: Option<&Value>) -> Result<Spec, Error> {
        let (file, config) = parsed(path)?;
        Spec::from_config(&config, rope_scaling, &file)
    }

    /// The spec of a parsed config; `file` is the name that messages give it.
    ///
    /// # Errors
    /// When it holds anything whose maths is not built: everything wrong in one message.
    pub fn from_config(config: &Map<String, Value>, rope_scaling: Option<&Value>, file: &Path) -> Result<Spec, Error> {
        let mut keys = Keys::of_text_model(config);
        let refused = |problems| Error::Refused { file: file.to_owned(), problems: Problems(problems) };
        let Some(family) = find_family(&mut keys) else { return Err(refused(keys.problems)) };
        if let Some(value) = keys.value_here_or_outside("quantization_config") {
            keys.unsupported("quantization_config", value, "float32, float16, bfloat16 and float64 weights");
        }
        let spec = family.read(&mut keys, rope_scaling);
        if keys.problems.is_empty() { Ok(spec) } else { Err(refused(keys.problems)) }
    }

    /// Every linear layer that an adapter may target: layer by layer, within a layer in the family's order.
    #[must_use]
    pub fn linear_layers(&self) -> Vec<Linear> {
        (0..self.layers).flat_map(|layer| self.family.linear_layers(self, LayerIndex(layer))).collect()
    }

    /// The names that a list of adapter targets may hold, in the family's order.
    #[must_use]
    pub fn projections(&self) -> Vec<&'static str> {
        let mut names: Vec<&'static str> = Vec::new();
        for linear in self.linear_layers() {
            if !names.contains(&linear.projection) {
                names.push(linear.projection);
            }
        }
        names
    }

    /// The linear layers that `targets` name (all of them for `None`), in canonical order.
    ///
    /// # Errors
    /// When a target names no linear layer of the family, or the list is empty.
    pub fn adapted(&self, targets: Option<&[String]>) -> Result<Vec<Linear>, Error> {
        let Some(targets) = targets else { return Ok(self.linear_layers()) };
        check_targets(self.model_type, &self.projections(), Some(targets))?;
        let mut linears = self.linear_layers();
        linears.retain(|linear| targets.iter().any(|target| target == linear.projection));
        Ok(linears)
    }

    /// Every tensor that a checkpoint must hold, in the order of the computation; without the head where it is tied.
    #[must_use]
    pub fn tensors(&self) -> Vec<Expected> {
        let mut tensors = vec![Expected::new(EMBEDDING.to_owned(), &[self.vocabulary, self.width])];
        for layer in 0..self.layers {
            tensors.extend(self.family.tensors(self, LayerIndex(layer)));
        }
        tensors.push(Expected::new(FINAL_NORM.to_owned(), &[self.width]));
        if !self.tied_embeddings {
            tensors.push(Expected::new(HEAD.to_owned(), &[self.vocabulary, self.width]));
        }
        tensors
    }

    /// Elements of all tensors; a tied head counts once.
    #[must_use]
    pub fn parameter_count(&self) -> u64 {
        self.tensors().iter().map(Expected::elements).sum()
    }

    /// The spec as one line of JSON with fixed order: what digests of the model are taken over.
    ///
    /// # Panics
    /// Never: the fields are plain values.
    #[must_use]
    pub fn canonical(&self) -> String {
        serde_json::to_string(self).expect("plain fields have a JSON form")
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
    let text = match fs::read(&file) {
        Ok(text) => text,
        Err(source) => return Err(Error::Unreadable { file, source }),
    };
    match serde_json::from_slice(&text) {
        Ok(config) => Ok((file, config)),
        Err(source) => Err(Error::NotJson { file, source }),
    }
}

/// Refuses targets that are not among the `names` of a family's linear layers, and an empty list of them.
pub(super) fn check_targets(
    model_type: &'static str,
    names: &[&'static str],
    targets: Option<&[String]>,
) -> Result<(), Error> {
    let Some(targets) = targets else { return Ok(()) };
    let known = || names.join(", ");
    if targets.is_empty() {
        return Err(Error::NoTarget { model_type, known: known() });
    }
    match targets.iter().find(|target| !names.contains(&target.as_str())) {
        None => Ok(()),
        Some(target) => {
            let nearest = nearest(target, names).unwrap_or_default();
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

/// The entry of `known` that is spelled most like `word`.
pub(super) fn nearest(word: &str, known: &[&'static str]) -> Option<&'static str> {
    let likeness = |name: &&&'static str| strsim::jaro_winkler(word, name);
    known.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b))).copied()
}

fn find_family(keys: &mut Keys<'_>) -> Option<&'static dyn Family> {
    if keys.value_here_or_outside("model_type").is_none() {
        keys.problems.push(Problem::Missing { key: keys.name("model_type") });
        return None;
    }
    let found = keys.word("model_type", "");
    let family = family::find(found);
    let known: Vec<&'static str> = family::model_types();
    // A wrapper names the family outside where the text model's own table does not.
    let outside = keys.value_here_or_outside("model_type").and_then(Value::as_str).unwrap_or(found);
    if family.is_none() && keys.problems.is_empty() && shape::only_planned(outside) {
        let (key, found) = (keys.name("model_type"), outside.to_owned());
        keys.problems.push(Problem::OnlyPlanned { key, found, known: known.join(", ") });
    } else if family.is_none() && keys.problems.is_empty() {
        keys.problems.push(Problem::ModelType {
            key: keys.name("model_type"),
            found: found.to_owned(),
            nearest: nearest(found, &known).unwrap_or_default().to_owned(),
            known: known.join(", "),
        });
    }
    family
}

/// Positions as a number to compare with; beyond 2³² they exceed every context there is.
fn count_as_number(positions: u64) -> f64 {
    u32::try_from(positions).map_or(f64::INFINITY, f64::from)
}
