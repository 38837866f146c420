//! The table in which families with keys and values by head differ. One layer is attention with grouped heads, or in some
//! families a gated delta rule, then a gated feed-forward or experts.
//!
//! A family is one constant: what it shares with [`Differences::PLAIN`] is left out. A field that a family leaves out
//! stands in no spec, so a new field changes no model's digest.

use crate::model::spec::{Activation, BlockNorms, NormForm};

/// What tells one family from the others.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts of a family, not a state")]
pub struct Differences {
    /// The `model_type` of published configs.
    pub model_type: &'static str,
    /// The `model_type` of composite models with this one as `text_config`, where that table may leave its own name out.
    pub wrapper: Option<&'static str>,
    /// Formula of every norm.
    pub norm: NormForm,
    /// Norms around a block's two parts.
    pub block_norms: BlockNorms,
    /// Whether queries and keys are normalised per head before rotation.
    pub qk_norm: bool,
    /// Which projections carry a bias.
    pub biases: BiasRule,
    /// The key that names the activation.
    pub activation_key: &'static str,
    /// The one activation that the family has.
    pub activation: Activation,
    /// What attention scores are multiplied by.
    pub score_scale: ScoreScale,
    /// Which layers have a window.
    pub windows: WindowRule,
    /// Rotary embeddings by layer kind.
    pub ropes: RopeRule,
    /// Whether embedding rows are multiplied by √width.
    pub scaled_embeddings: bool,
    /// Feed-forwards of experts, where the family has them.
    pub experts: Option<ExpertDefaults>,
    /// Input projections of gated delta rules, where the family has such layers.
    pub delta: Option<DeltaInputs>,
    /// Whether the query projection yields a gate with each query.
    pub gated_attention: bool,
    /// Whether the config may cap logits (`final_logit_softcapping`); caps of attention scores are refused.
    pub soft_caps: bool,
    /// What stands in for absent keys.
    pub defaults: Defaults,
}

/// Which projections carry a bias.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub enum BiasRule {
    Never,
    /// Queries, keys and values, always.
    QueryKeyValue,
    /// All four of attention if `attention_bias` says so.
    Attention,
    /// As `Attention`, and the feed-forward if `mlp_bias` says so.
    AttentionAndMlp,
}

/// What attention scores are multiplied by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ScoreScale {
    /// One over √`head_dim`.
    HeadDim,
    /// One over √`query_pre_attn_scalar`, which has this default.
    Scalar(f64),
}

/// Which layers have a window.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum WindowRule {
    /// No layer; a config that says otherwise is refused.
    Never,
    /// If `use_sliding_window`: where `layer_types` says so, else from layer `max_window_layers` on.
    SwitchedOn,
    /// Every layer, unless `sliding_window` is null.
    Always,
    /// Where `layer_types` says so, else all but every n-th, n from `sliding_window_pattern` with this default.
    ByLayerKind(u64),
}

/// Rotary embeddings by layer kind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeRule {
    /// One for all layers.
    One,
    /// One for full layers with its scaling, and one for sliding layers, never scaled; each with the default of its base.
    #[expect(missing_docs, reason = "the names say everything")]
    ByLayerKind { full_theta: f64, sliding_theta: f64 },
    /// One for all layers; the share of a head's dimensions that `partial_rotary_factor` states rotates, with this default.
    Partial(f64),
}

/// Input projections of a gated delta rule in a checkpoint.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum DeltaInputs {
    /// Queries, keys and values together; gates, strengths and decays each by themselves.
    Apart,
    /// Two projections, whose rows go by key head.
    Joined,
}

/// Whether the scores of a row's experts are divided by their sum.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Normalised {
    /// Whatever the config says.
    Always,
    /// If `norm_topk_prob` says so, which has this default.
    Stated(bool),
}

/// What stands in for absent keys of a softmax mixture.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the names say what is not described")]
pub struct ExpertDefaults {
    pub count: u64,
    pub chosen: u64,
    pub width: u64,
    /// Width of the gated feed-forward that every row passes besides; `None`: the family has none.
    pub shared_width: Option<u64>,
    pub normalised: Normalised,
    /// Whether all layers have experts, with no key about layers without them or about the width of those.
    pub everywhere: bool,
}

/// What stands in for a key that a config leaves out.
#[derive(Debug)]
pub struct Defaults {
    /// `None`: the config must state it.
    pub vocabulary: Option<u64>,
    /// `None`: the config must state it.
    pub ffn_width: Option<u64>,
    /// `None`: the config must state them.
    pub query_heads: Option<u64>,
    /// `None`: as many as query heads.
    pub kv_heads: Option<u64>,
    /// `None`: width / query heads.
    pub head_dim: Option<u64>,
    /// Positions of the native context.
    pub max_positions: u64,
    /// Whether the head is the embedding.
    pub tied_embeddings: bool,
    /// Token that opens a text.
    pub bos: &'static [u64],
    /// Tokens that end a text.
    pub eos: &'static [u64],
    /// Whether a wrapper's `eos_token_id` counts where the text model's table has none.
    pub eos_of_wrapper: bool,
}

impl Differences {
    /// What most families have.
    pub const PLAIN: Differences = Differences {
        model_type: "",
        wrapper: None,
        norm: NormForm::Weight,
        block_norms: BlockNorms::Two,
        qk_norm: false,
        biases: BiasRule::Never,
        activation_key: "hidden_act",
        activation: Activation::Silu,
        score_scale: ScoreScale::HeadDim,
        windows: WindowRule::Never,
        ropes: RopeRule::One,
        scaled_embeddings: false,
        soft_caps: false,
        experts: None,
        delta: None,
        gated_attention: false,
        defaults: Defaults::PLAIN,
    };
}

impl Defaults {
    /// What most families have.
    pub const PLAIN: Defaults = Defaults {
        vocabulary: None,
        ffn_width: None,
        query_heads: None,
        kv_heads: None,
        head_dim: None,
        max_positions: 32_768,
        tied_embeddings: false,
        bos: &[],
        eos: &[],
        eos_of_wrapper: false,
    };
}
