//! Reads a config by a family's row of the table.

use serde_json::Value;

use super::delta;
use super::differences::{BiasRule, Differences, ExpertDefaults, Normalised, RopeRule, ScoreScale, WindowRule};
use crate::model::config_reader::{ConfigReader, Problem};
use crate::model::parts::{ExpertSpec, Router};
use crate::model::rope::{RopeKeys, RopeSpec};
use crate::model::spec::{Biases, Spec};
use crate::runtime::units::from_index;

/// The spec of a config. What is wrong is left in `keys`, and the spec is then not used. `rope_scaling` replaces the file's.
pub(super) fn read(keys: &mut ConfigReader<'_>, rope_scaling: Option<&Value>, own: &Differences) -> Spec {
    let vocabulary = keys.count("vocab_size", own.defaults.vocabulary);
    let width = size(keys, own, "hidden_size", None);
    let layers = keys.layers("num_hidden_layers");
    let experts = own.experts.map(|defaults| experts(keys, &defaults, layers));
    let ffn_width = match &experts {
        Some(experts) if !experts.sparse.contains(&false) && own.experts.is_some_and(|own| own.everywhere) => {
            experts.shared_width + experts.chosen * experts.width
        }
        _ => size(keys, own, "intermediate_size", own.defaults.ffn_width),
    };
    let (query_heads, kv_heads, head_dim) = heads(keys, width, own);
    refuse_other_maths(keys, own);
    let max_positions = keys.count("max_position_embeddings", Some(own.defaults.max_positions));
    let norm_eps = keys.positive("rms_norm_eps", Some(1e-6));
    let rope_keys = match own.ropes {
        RopeRule::One => RopeKeys::ONE,
        RopeRule::Partial(share) => RopeKeys::partial(share),
        RopeRule::ByLayerKind { full_theta, .. } => RopeKeys::full_layers(full_theta),
    };
    let rope = RopeSpec::read(keys, rope_scaling, &rope_keys, head_dim, max_positions);
    let sliding_rope = match own.ropes {
        RopeRule::One | RopeRule::Partial(_) => None,
        RopeRule::ByLayerKind { sliding_theta, .. } => {
            let sliding = RopeKeys::sliding_layers(sliding_theta);
            Some(RopeSpec::read(keys, None, &sliding, head_dim, max_positions))
        }
    };
    Spec {
        model_type: own.model_type,
        vocabulary,
        width,
        ffn_width,
        layers,
        query_heads,
        kv_heads,
        head_dim,
        norm_eps,
        rope,
        tied_embeddings: keys.flag_here_or_outside("tie_word_embeddings", own.defaults.tied_embeddings),
        qk_norm: own.qk_norm,
        biases: biases(keys, own.biases),
        window: if own.delta.is_some() { vec![None; layers] } else { windows(keys, own.windows, layers) },
        max_positions,
        bos: keys.tokens("bos_token_id", own.defaults.bos).first().copied(),
        eos: if own.defaults.eos_of_wrapper {
            keys.tokens_here_or_outside("eos_token_id", own.defaults.eos)
        } else {
            keys.tokens("eos_token_id", own.defaults.eos)
        },
        norm: own.norm,
        block_norms: own.block_norms,
        activation: own.activation,
        score_scalar: match own.score_scale {
            ScoreScale::HeadDim => None,
            ScoreScale::Scalar(default) => Some(keys.positive("query_pre_attn_scalar", Some(default))),
        },
        sliding_rope,
        scaled_embeddings: own.scaled_embeddings,
        logit_cap: logit_cap(keys, own.soft_caps),
        latent: None,
        experts,
        delta: own.delta.map(|inputs| delta::read(keys, layers, inputs)),
        gated_attention: own.gated_attention,
    }
}

/// Refuses another activation than the family's, attention that is not causal, and capped scores.
fn refuse_other_maths(keys: &mut ConfigReader<'_>, own: &Differences) {
    let activation = keys.word(own.activation_key, own.activation.name());
    if activation != own.activation.name() {
        keys.unsupported(own.activation_key, &Value::from(activation), own.activation.in_quotes());
    }
    for key in ["use_bidirectional_attention", "attn_logit_softcapping"] {
        if let Some(value) =
            keys.value(key).filter(|value| **value != Value::Bool(false) && value.as_f64() != Some(0.0))
        {
            keys.unsupported(key, value, "causal attention without a cap on scores");
        }
    }
}

/// A width or a number of heads, bounded where layers are many times it.
fn size(keys: &mut ConfigReader<'_>, own: &Differences, key: &str, default: Option<u64>) -> u64 {
    if own.experts.is_some() || own.delta.is_some() { keys.size(key, default) } else { keys.count(key, default) }
}

/// A softmax mixture: every `decoder_sparse_step`-th layer has experts, but for those that `mlp_only_layers` lists.
fn experts(keys: &mut ConfigReader<'_>, defaults: &ExpertDefaults, layers: usize) -> ExpertSpec {
    // Published files name the first key, newer releases of transformers write the second.
    let count_key = if keys.value("num_experts").is_some() { "num_experts" } else { "num_local_experts" };
    let count = keys.size(count_key, Some(defaults.count));
    let chosen = keys.size("num_experts_per_tok", Some(defaults.chosen));
    if chosen > count && keys.problems.is_empty() {
        keys.refuse("num_experts_per_tok", &Value::from(chosen), "at most the number of experts");
    }
    let (step, dense) = if defaults.everywhere {
        (1, Vec::new())
    } else {
        (keys.count("decoder_sparse_step", Some(1)), keys.tokens("mlp_only_layers", &[]))
    };
    let is_sparse = |layer: usize| {
        let layer = from_index(layer);
        !dense.contains(&layer) && (layer + 1).is_multiple_of(step)
    };
    ExpertSpec {
        count,
        chosen,
        width: keys.size("moe_intermediate_size", Some(defaults.width)),
        shared_width: defaults
            .shared_width
            .map_or(0, |default| keys.size("shared_expert_intermediate_size", Some(default))),
        shared_gate: defaults.shared_width.is_some(),
        router: Router::Softmax,
        normalised: match defaults.normalised {
            Normalised::Always => true,
            Normalised::Stated(default) => keys.flag("norm_topk_prob", default),
        },
        scaling: 1.0,
        groups: 1,
        kept_groups: 1,
        sparse: (0..layers).map(is_sparse).collect(),
    }
}

/// Query heads, key and value heads, and their width.
fn heads(keys: &mut ConfigReader<'_>, width: u64, own: &Differences) -> (u64, u64, u64) {
    let query_heads = size(keys, own, "num_attention_heads", own.defaults.query_heads);
    let kv_default = if keys.states("num_key_value_heads") { None } else { own.defaults.kv_heads };
    let kv_heads = size(keys, own, "num_key_value_heads", Some(kv_default.unwrap_or(query_heads)));
    let sound = keys.problems.is_empty();
    if sound && !query_heads.is_multiple_of(kv_heads) {
        keys.problems.push(Problem::Heads { query_heads, kv_heads });
    }
    let head_dim_default = if keys.states("head_dim") { None } else { own.defaults.head_dim };
    if sound && keys.value("head_dim").is_none() && head_dim_default.is_none() && !width.is_multiple_of(query_heads) {
        keys.problems.push(Problem::HeadDim { width, query_heads });
    }
    let head_dim = size(keys, own, "head_dim", Some(head_dim_default.unwrap_or(width / query_heads).max(1)));
    if sound && !head_dim.is_multiple_of(2) {
        keys.refuse("head_dim", &Value::from(head_dim), "even, since rotation takes dimensions in pairs");
    }
    (query_heads, kv_heads, head_dim)
}

fn biases(keys: &mut ConfigReader<'_>, rule: BiasRule) -> Biases {
    match rule {
        BiasRule::Never => Biases::default(),
        BiasRule::QueryKeyValue => Biases { q: true, k: true, v: true, o: false, mlp: false },
        BiasRule::Attention | BiasRule::AttentionAndMlp => {
            let attention = keys.flag("attention_bias", false);
            let mlp = rule == BiasRule::AttentionAndMlp && keys.flag("mlp_bias", false);
            Biases { q: attention, k: attention, v: attention, o: attention, mlp }
        }
    }
}

/// For each layer how many keys a query sees; `None` sees all.
fn windows(keys: &mut ConfigReader<'_>, rule: WindowRule, layers: usize) -> Vec<Option<u64>> {
    let null = keys.states("sliding_window") && keys.value("sliding_window").is_none();
    let slides = layer_slides(keys, layers);
    let slides_or = |by_default: &dyn Fn(usize) -> bool| -> Vec<bool> {
        (0..layers).map(|layer| slides.as_ref().map_or_else(|| by_default(layer), |slides| slides[layer])).collect()
    };
    match rule {
        WindowRule::Never | WindowRule::Always => {
            let size =
                if rule == WindowRule::Never || null { None } else { Some(keys.count("sliding_window", Some(4096))) };
            if size.is_none() && slides.is_some_and(|slides| slides.contains(&true)) {
                let found = Value::from("sliding_attention");
                keys.unsupported("layer_types", &found, "full attention where the family's other keys give no window");
            }
            vec![size; layers]
        }
        WindowRule::SwitchedOn => {
            let switched_on = keys.flag("use_sliding_window", false);
            let size = if null { None } else { Some(keys.count("sliding_window", Some(4096))) };
            let first = match keys.value("max_window_layers").map(Value::as_u64) {
                Some(Some(first)) => first,
                Some(None) => keys.count("max_window_layers", None),
                None => 28,
            };
            let window = |slides| if switched_on && slides { size } else { None };
            slides_or(&|layer| from_index(layer) >= first).into_iter().map(window).collect()
        }
        WindowRule::ByLayerKind(pattern) => {
            let size = keys.count("sliding_window", Some(4096));
            let pattern = keys.count("sliding_window_pattern", Some(pattern));
            let slides = slides_or(&|layer| !(from_index(layer) + 1).is_multiple_of(pattern));
            slides.into_iter().map(|slides| slides.then_some(size)).collect()
        }
    }
}

/// Which layers `layer_types` calls sliding; `None` without a (sound) list.
fn layer_slides(keys: &mut ConfigReader<'_>, layers: usize) -> Option<Vec<bool>> {
    let wanted = "\"full_attention\" and \"sliding_attention\" for this family";
    let kinds = keys.layer_words("layer_types", layers, &["full_attention", "sliding_attention"], wanted)?;
    Some(kinds.into_iter().map(|kind| kind == 1).collect())
}

fn logit_cap(keys: &mut ConfigReader<'_>, soft_caps: bool) -> Option<f64> {
    let stated = soft_caps && keys.value("final_logit_softcapping").is_some();
    stated.then(|| keys.positive("final_logit_softcapping", None))
}
