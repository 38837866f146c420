//! The parts of a shape: layers, their mixers and linear layers, as numbers.

use crate::runtime::units::{float, from_index};

/// The part of a layer in which positions meet. Counts of heads, widths in elements.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(missing_docs, reason = "the names of the sizes say everything")]
pub enum Mix {
    /// Attention over keys and values of its own, heads in groups.
    Grouped {
        query_heads: u64,
        kv_heads: u64,
        head_dim: u64,
        /// Keys that a query sees, itself included; all where there is none.
        window: Option<u64>,
        /// Whether a gate as wide as the queries multiplies the output.
        gated: bool,
    },
    /// A gated delta rule after a short convolution: a state at a border instead of rows.
    Delta {
        key_heads: u64,
        value_heads: u64,
        key_dim: u64,
        value_dim: u64,
        /// Inputs of the convolution.
        taps: u64,
    },
    /// Attention over one latent a position, shared by all heads (absorbed form), over the keys that an index chooses.
    Latent {
        heads: u64,
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
    /// How many index heads.
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
    /// A row's queries.
    pub ask: u64,
    /// What segment A hands to segment B past the mixer.
    pub handed: u64,
    /// The mixer's output.
    pub output: u64,
    /// What is saved with the output, in the accumulation dtype (log-sum-exp).
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
    /// Output projection and feed-forward after it.
    B,
}

/// A linear layer that an adapter may target.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Projection {
    /// The name that target lists use.
    pub name: &'static str,
    /// Where it is.
    pub segment: Segment,
    /// Columns of the weight.
    pub inputs: u64,
    /// Rows of the weight.
    pub outputs: u64,
}

/// One decoder layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// Where positions meet.
    pub mix: Mix,
    /// Width of the feed-forward's inner layer, for one row: all experts that a row goes to.
    pub ffn_width: u64,
    /// Routed experts that a row goes to; 0 for a dense feed-forward.
    pub chosen: u64,
    /// Elements of its tensors, without routed experts.
    pub parameters: u64,
    /// Elements of its routed experts, which are spread over ranks.
    pub experts: u64,
    /// How many routed experts it has.
    pub expert_count: u64,
    /// Width of a routed expert's inner layer.
    pub expert_width: u64,
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
    /// Rows of the embedding and of the head.
    pub vocabulary: u64,
    /// Width of the residual stream.
    pub width: u64,
    /// Positions of the native context.
    pub max_positions: u64,
    /// Positions that a stretched rotary embedding was made for.
    pub stretched_positions: Option<f64>,
    /// Whether projections of the feed-forward layers have biases.
    pub ffn_biases: bool,
    /// Elements of the embedding, the last norm and the head; a tied head counts once.
    pub outside: u64,
    /// Its layers, from the bottom up.
    pub layers: Vec<Layer>,
}

impl Shape {
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
}
