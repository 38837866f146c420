//! What a plan needs to know of a decoder: layer by layer, how wide its rows are, what it leaves behind for later
//! positions, how many weights it has, and how much work a position is.
//!
//! For a family that is trained the shape follows from its [`Spec`]; for one that is only planned it is read from the
//! published config, by the file of that family here. Nothing else in the program takes a shape for a model.

mod hybrid;
mod latent;

use std::path::Path;

use super::keys::Keys;
use super::problems::Problems;
use super::spec::{self, Error, Spec};
use crate::runtime::units::{LayerIndex, Tokens, float, from_index};

/// A family that is planned and not trained.
struct Planned {
    /// Its `model_type` values.
    model_types: &'static [&'static str],
    /// Reads a config; what is wrong is left in the keys, and the shape is then not used.
    read: fn(&mut Keys<'_>) -> Shape,
}

const PLANNED: &[Planned] = &[
    Planned { model_types: &["qwen3_5", "qwen3_5_text"], read: hybrid::read },
    Planned { model_types: &["glm_moe_dsa"], read: latent::read },
];

/// Whether `model_type` names a family that is planned and not trained.
#[must_use]
pub fn only_planned(model_type: &str) -> bool {
    find(model_type).is_some()
}

fn find(model_type: &str) -> Option<&'static Planned> {
    PLANNED.iter().find(|planned| planned.model_types.contains(&model_type))
}

/// The part of a layer in which positions meet. Counts of heads, widths in elements.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Mix {
    /// Attention over keys and values of its own, heads in groups.
    Grouped {
        /// Query heads.
        query_heads: u64,
        /// Key and value heads.
        kv_heads: u64,
        /// Width of a head.
        head_dim: u64,
        /// Keys that a query sees, itself included; all where there is none.
        window: Option<u64>,
        /// Whether a gate as wide as the queries multiplies the output.
        gated: bool,
    },
    /// A gated delta rule behind a short convolution: a state at a border instead of rows.
    Delta {
        /// Query and key heads.
        key_heads: u64,
        /// Value heads.
        value_heads: u64,
        /// Width of a query or key.
        key_dim: u64,
        /// Width of a value.
        value_dim: u64,
        /// Inputs of the convolution.
        taps: u64,
    },
    /// Attention over one latent a position, shared by all heads (absorbed form), over the keys that an index chooses.
    Latent {
        /// Query heads.
        heads: u64,
        /// Width of the latent.
        latent: u64,
        /// Width of the rotated part of a key.
        rotated: u64,
        /// How keys are chosen.
        index: Index,
    },
}

/// How a sparse layer chooses keys.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Index {
    /// Index heads.
    pub heads: u64,
    /// Width of an index key.
    pub dim: u64,
    /// Most keys that are chosen for a query.
    pub top: u64,
    /// Whether the layer chooses; the others take the choice of the nearest such layer below.
    pub owner: bool,
}

/// Bytes of one entry of an index set.
pub const INDEX_BYTES: u64 = 4;

/// Elements of one position's rows in a mixer.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Widths {
    /// What a row asks with.
    pub ask: u64,
    /// What segment A hands to segment B past the mixer.
    pub handed: u64,
    /// The mixer's output.
    pub output: u64,
    /// What is saved beside the output, in the accumulation dtype (log-sum-exp).
    pub beside: u64,
    /// What a position leaves on its page.
    pub state: u64,
    /// Of that: what carries gradient.
    pub carries: u64,
}

impl Mix {
    /// Widths of a position's rows.
    #[must_use]
    pub fn widths(&self) -> Widths {
        match *self {
            Mix::Grouped { query_heads, kv_heads, head_dim, gated, .. } => Widths {
                ask: query_heads * head_dim,
                handed: if gated { query_heads * head_dim } else { 0 },
                output: query_heads * head_dim,
                beside: query_heads,
                state: 2 * kv_heads * head_dim,
                carries: 2 * kv_heads * head_dim,
            },
            Mix::Delta { key_heads, value_heads, key_dim, value_dim, .. } => Widths {
                ask: 2 * key_heads * key_dim + value_heads * value_dim + 2 * value_heads,
                handed: value_heads * value_dim,
                output: value_heads * value_dim,
                ..Widths::default()
            },
            Mix::Latent { heads, latent, rotated, index } => Widths {
                ask: heads * (latent + rotated),
                handed: 0,
                output: heads * latent,
                beside: heads,
                state: latent + rotated + if index.owner { index.dim } else { 0 },
                carries: latent + rotated,
            },
        }
    }

    /// Elements of a sequence's state at a border: raw inputs of the convolution in the model's dtype, and the recurrent
    /// state in the accumulation dtype.
    #[must_use]
    pub fn border(&self) -> (u64, u64) {
        match *self {
            Mix::Delta { key_heads, value_heads, key_dim, value_dim, taps } => {
                let channels = 2 * key_heads * key_dim + value_heads * value_dim;
                (channels * taps.saturating_sub(1), value_heads * key_dim * value_dim)
            }
            _ => (0, 0),
        }
    }

    /// Whether state travels to rows that stay, run by run.
    #[must_use]
    pub fn travels(&self) -> bool {
        matches!(self, Mix::Grouped { .. })
    }

    /// The index of a layer that chooses keys.
    #[must_use]
    pub fn chooses(&self) -> Option<Index> {
        match *self {
            Mix::Latent { index, .. } if index.owner => Some(index),
            _ => None,
        }
    }
}

/// The two parts of a layer around its mixer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Segment {
    /// Norm and projections before it.
    A,
    /// Output projection and feed-forward behind it.
    B,
}

/// A linear layer that an adapter may target.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Projection {
    /// The name that target lists use.
    pub name: &'static str,
    /// Where it is.
    pub segment: Segment,
    /// Inputs.
    pub inputs: u64,
    /// Outputs.
    pub outputs: u64,
}

/// One decoder layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// Its mixer.
    pub mix: Mix,
    /// Width of the feed-forward's inner layer, for one row: all experts that a row goes to.
    pub ffn_width: u64,
    /// Routed experts that a row goes to; 0 for a dense feed-forward.
    pub chosen: u64,
    /// Elements of its tensors, without routed experts.
    pub parameters: u64,
    /// Elements of its routed experts, which are spread over ranks.
    pub experts: u64,
    /// Linear layers that an adapter may target.
    pub projections: Vec<Projection>,
    /// Multiply-adds a position in weights of segment B that no adapter targets and that gradient passes through.
    pub further: u64,
    /// Multiply-adds a position in weights that no gradient passes through (the index's projections).
    pub constant: u64,
}

impl Layer {
    /// Multiply-adds of a position in the weights of one segment that gradient passes through.
    #[must_use]
    pub fn products(&self, segment: Segment) -> f64 {
        let own = self.projections.iter().filter(|projection| projection.segment == segment);
        let further = if segment == Segment::B { float(self.further) } else { 0.0 };
        own.map(|projection| float(projection.inputs) * float(projection.outputs)).sum::<f64>() + further
    }
}

/// A decoder as a plan sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// The family's name in the config.
    pub model_type: &'static str,
    /// Whether this build trains the family, or only plans it.
    pub trained: bool,
    /// Rows of the embedding and of the head.
    pub vocabulary: u64,
    /// Width of the residual stream.
    pub width: u64,
    /// Positions of the native context.
    pub max_positions: u64,
    /// Positions that a stretched rotary embedding was made for.
    pub stretched_positions: Option<f64>,
    /// Elements of the embedding, the last norm and the head; a tied head counts once.
    pub outside: u64,
    /// Its layers, from the bottom up.
    pub layers: Vec<Layer>,
}

impl Shape {
    /// The shape of a family that is trained.
    #[must_use]
    pub fn of(spec: &Spec) -> Shape {
        let tensors = |layer| spec.family.tensors(spec, layer).iter().map(spec::Expected::elements).sum();
        let layers: Vec<Layer> = spec
            .window
            .iter()
            .enumerate()
            .map(|(layer, &window)| Layer {
                mix: Mix::Grouped {
                    query_heads: spec.query_heads,
                    kv_heads: spec.kv_heads,
                    head_dim: spec.head_dim,
                    window,
                    gated: false,
                },
                ffn_width: spec.ffn_width,
                chosen: 0,
                parameters: tensors(LayerIndex(layer)),
                experts: 0,
                projections: projections(spec, LayerIndex(layer)),
                further: 0,
                constant: 0,
            })
            .collect();
        let inside: u64 = layers.iter().map(|layer| layer.parameters).sum();
        Shape {
            model_type: spec.model_type,
            trained: true,
            vocabulary: spec.vocabulary,
            width: spec.width,
            max_positions: spec.max_positions,
            stretched_positions: spec.rope.stretched_positions(),
            outside: spec.parameter_count() - inside,
            layers,
        }
    }

    /// Reads the shape of a checkpoint folder, or of the path of a bare config.json, of any family that is planned.
    /// `rope_scaling` is as in [`Spec::read`].
    ///
    /// # Errors
    /// As [`Spec::read`].
    pub fn read(path: &Path, rope_scaling: Option<&serde_json::Value>) -> Result<Shape, Error> {
        let (file, config) = spec::parsed(path)?;
        let mut keys = Keys::of_text_model(&config);
        let named = keys.value_here_or_outside("model_type").and_then(serde_json::Value::as_str);
        let Some(planned) = named.and_then(find) else {
            return Ok(Shape::of(&Spec::from_config(&config, rope_scaling, &file)?));
        };
        let shape = (planned.read)(&mut keys);
        if keys.problems.is_empty() {
            return Ok(shape);
        }
        Err(Error::Refused { file, problems: Problems(keys.problems) })
    }

    /// Elements of all tensors.
    #[must_use]
    pub fn parameter_count(&self) -> u64 {
        self.outside + self.layers.iter().map(|layer| layer.parameters + layer.experts).sum::<u64>()
    }

    /// Elements of all routed experts.
    #[must_use]
    pub fn experts(&self) -> u64 {
        self.layers.iter().map(|layer| layer.experts).sum()
    }

    /// How many layers there are.
    #[must_use]
    pub fn depth(&self) -> u64 {
        from_index(self.layers.len())
    }

    /// The largest of a number of every layer.
    #[must_use]
    pub fn most(&self, of: impl Fn(&Layer) -> u64) -> u64 {
        self.layers.iter().map(of).max().unwrap_or(0)
    }

    /// The sum of a number of every layer.
    #[must_use]
    pub fn sum(&self, of: impl Fn(&Layer) -> u64) -> u64 {
        self.layers.iter().map(of).sum()
    }

    /// Refuses adapter targets that the family does not have.
    ///
    /// # Errors
    /// When a target names no linear layer, or the list is empty.
    pub fn check_targets(&self, targets: Option<&[String]>) -> Result<(), Error> {
        let mut names: Vec<&'static str> = Vec::new();
        for projection in self.layers.iter().flat_map(|layer| &layer.projections) {
            if !names.contains(&projection.name) {
                names.push(projection.name);
            }
        }
        spec::check_targets(self.model_type, &names, targets)
    }

    /// Sum of inputs and outputs of the adapted linear layers of one layer, by segment: with the adapters' rank it is
    /// their elements, and their multiply-adds a position.
    #[must_use]
    pub fn adapted(layer: &Layer, segment: Segment, targets: Option<&[String]>) -> u64 {
        let named = |projection: &&Projection| {
            let target = |target: &String| target == projection.name;
            projection.segment == segment && targets.is_none_or(|targets| targets.iter().any(target))
        };
        layer.projections.iter().filter(named).map(|projection| projection.inputs + projection.outputs).sum()
    }

    /// A sentence for the user when `positions` lie beyond what the checkpoint was made for, else nothing.
    #[must_use]
    pub fn context_note(&self, positions: Tokens) -> Option<String> {
        spec::context_note(self.max_positions, self.stretched_positions, positions)
    }
}

/// The linear layers of a dense layer. Queries, keys and values come before the mixer.
fn projections(spec: &Spec, layer: LayerIndex) -> Vec<Projection> {
    let before = |name: &str| ["q_proj", "k_proj", "v_proj"].contains(&name);
    let linears = spec.family.linear_layers(spec, layer).into_iter();
    linears
        .map(|linear| Projection {
            name: linear.projection,
            segment: if before(linear.projection) { Segment::A } else { Segment::B },
            inputs: linear.inputs,
            outputs: linear.outputs,
        })
        .collect()
}

/// The three linear layers of a gated feed-forward.
fn feed_forward(width: u64, ffn_width: u64) -> [Projection; 3] {
    let linear = |name, inputs, outputs| Projection { name, segment: Segment::B, inputs, outputs };
    [linear("gate_proj", width, ffn_width), linear("up_proj", width, ffn_width), linear("down_proj", ffn_width, width)]
}

/// Elements of linear layers' weights.
fn weights(projections: &[Projection]) -> u64 {
    projections.iter().map(|projection| projection.inputs * projection.outputs).sum()
}

/// The largest width or number of heads or experts that is read: with it no sum of all layers comes near 2⁶⁴.
const SIZE_MAX: u64 = 1 << 15;

/// A width, or a number of heads or experts.
fn size(keys: &mut Keys<'_>, key: &str, default: Option<u64>) -> u64 {
    let size = keys.count(key, default);
    if size > SIZE_MAX {
        keys.refuse(key, &serde_json::Value::from(size), "a whole number from 1 to 32768");
    }
    size.min(SIZE_MAX)
}

/// Reads a list with one word a layer, where the config has one: for each layer, which of `known` it is.
fn words(keys: &mut Keys<'_>, key: &str, layers: usize, known: &[&str], wanted: &'static str) -> Option<Vec<usize>> {
    let value = keys.value(key)?;
    let Some(list) = value.as_array() else {
        keys.refuse(key, value, wanted);
        return None;
    };
    if list.len() != layers {
        let (key, found) = (keys.name(key), list.len());
        keys.problems.push(super::keys::Problem::Layers { key, found, layers });
        return None;
    }
    let mut found = Vec::with_capacity(layers);
    for word in list {
        let Some(place) = known.iter().position(|known| word == known) else {
            keys.unsupported(key, word, wanted);
            return None;
        };
        found.push(place);
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};

    use super::*;

    fn config(text: &str) -> Map<String, Value> {
        serde_json::from_str(text).unwrap()
    }

    fn read(config: &Map<String, Value>) -> Result<Shape, Vec<super::super::keys::Problem>> {
        let mut keys = Keys::of_text_model(config);
        let named = keys.value_here_or_outside("model_type").and_then(Value::as_str).unwrap();
        let shape = (find(named).unwrap().read)(&mut keys);
        if keys.problems.is_empty() { Ok(shape) } else { Err(keys.problems) }
    }

    const SPARSE: &str = include_str!("../../../configs/shapes/glm-5.2/config.json");
    const HYBRID: &str = include_str!("../../../configs/shapes/qwen3.6-27b/config.json");

    #[test]
    fn lists_of_layers_follow_from_the_other_keys_where_they_are_absent() {
        let stated = config(SPARSE);
        let whole = read(&stated).unwrap();
        let owners = |shape: &Shape| -> Vec<usize> {
            let owns = |(layer, what): (usize, &Layer)| what.mix.chooses().map(|_| layer);
            shape.layers.iter().enumerate().filter_map(owns).collect()
        };
        let expected: Vec<usize> = [0, 1].into_iter().chain((2..78).step_by(4)).collect();
        assert_eq!(owners(&whole), expected);
        let mut bare = stated.clone();
        bare.retain(|key, _| !["indexer_types", "mlp_layer_types", "first_k_dense_replace"].contains(&key.as_str()));
        assert_eq!(read(&bare).unwrap(), whole);
        bare.insert("index_topk_pattern".into(), json!("F".repeat(78)));
        assert_eq!(owners(&read(&bare).unwrap()).len(), 78);

        let mut hybrid = config(HYBRID);
        let whole = read(&hybrid).unwrap();
        assert_eq!(whole.layers.iter().filter(|layer| layer.mix.travels()).count(), 16);
        hybrid["text_config"].as_object_mut().unwrap().remove("layer_types");
        assert_eq!(read(&hybrid).unwrap(), whole);
    }

    #[test]
    fn parameters_are_those_of_the_published_models() {
        assert_eq!(read(&config(SPARSE)).unwrap().parameter_count(), 743_377_019_904);
        assert_eq!(read(&config(HYBRID)).unwrap().parameter_count(), 26_895_998_464);
        let dense = config(include_str!("../../../configs/shapes/qwen3-8b/config.json"));
        let spec = Spec::from_config(&dense, None, Path::new("config.json")).unwrap();
        assert_eq!(Shape::of(&spec).parameter_count(), spec.parameter_count());
        assert_eq!(spec.parameter_count(), 8_190_735_360);
    }

    #[test]
    fn a_list_that_does_not_fit_its_layers_is_refused_and_the_largest_sizes_do_not_overflow() {
        let mut sparse = config(SPARSE);
        sparse.insert("num_hidden_layers".into(), json!(77));
        let problems = read(&sparse).unwrap_err();
        assert!(
            problems.iter().any(|problem| problem.to_string().contains("78 entries for 77 layers")),
            "{problems:?}"
        );
        let mut widest = config(r#"{ "model_type": "glm_moe_dsa", "num_hidden_layers": 16384 }"#);
        for key in ["hidden_size", "intermediate_size", "moe_intermediate_size", "n_routed_experts", "kv_lora_rank"] {
            widest.insert(key.into(), json!(SIZE_MAX));
        }
        assert!(read(&widest).unwrap().parameter_count() > 1 << 60);
    }
}
