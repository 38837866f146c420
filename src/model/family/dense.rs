//! What the dense families share: one layer is attention with grouped heads, then a gated feed-forward.

use serde_json::Value;

use super::Family;
use crate::model::keys::{Keys, Problem};
use crate::model::rope::RopeSpec;
use crate::model::spec::{Biases, Expected, Linear, Spec};
use crate::runtime::units::LayerIndex;

/// Where dense families differ; a default stands in for a key that a config leaves out.
pub(super) struct Differences {
    pub(super) family: &'static dyn Family,
    pub(super) model_type: &'static str,
    pub(super) qk_norm: bool,
    pub(super) biases: Biases,
    /// Head width of a config without `head_dim`; `None` is width / query heads.
    pub(super) head_dim: Option<u64>,
    /// Key and value heads of a config without them; `None` is as many as query heads.
    pub(super) kv_heads: Option<u64>,
    pub(super) max_positions: u64,
    pub(super) bos: &'static [u64],
    pub(super) eos: &'static [u64],
    /// The window of each layer, given their number.
    pub(super) window: fn(&mut Keys<'_>, usize) -> Vec<Option<u64>>,
}

/// Reads the keys that all dense configs have.
pub(super) fn read(keys: &mut Keys<'_>, rope_scaling: Option<&Value>, own: &Differences) -> Spec {
    let vocabulary = keys.count("vocab_size", None);
    let width = keys.count("hidden_size", None);
    let ffn_width = keys.count("intermediate_size", None);
    let layers = keys.layers("num_hidden_layers");
    let query_heads = keys.count("num_attention_heads", None);
    let kv_default = if keys.states("num_key_value_heads") { None } else { own.kv_heads };
    let kv_heads = keys.count("num_key_value_heads", Some(kv_default.unwrap_or(query_heads)));
    let sound = keys.problems.is_empty();
    if sound && !query_heads.is_multiple_of(kv_heads) {
        keys.problems.push(Problem::Heads { query_heads, kv_heads });
    }
    let head_dim_default = if keys.states("head_dim") { None } else { own.head_dim };
    if sound && keys.value("head_dim").is_none() && head_dim_default.is_none() && !width.is_multiple_of(query_heads) {
        keys.problems.push(Problem::HeadDim { width, query_heads });
    }
    let head_dim = keys.count("head_dim", Some(head_dim_default.unwrap_or(width / query_heads).max(1)));
    if sound && !head_dim.is_multiple_of(2) {
        keys.refuse("head_dim", &Value::from(head_dim), "even, since rotation takes dimensions in pairs");
    }
    if keys.word("hidden_act", "silu") != "silu" {
        let found = Value::from(keys.word("hidden_act", "silu"));
        keys.unsupported("hidden_act", &found, "\"silu\"");
    }
    let max_positions = keys.count("max_position_embeddings", Some(own.max_positions));
    Spec {
        model_type: own.model_type,
        vocabulary,
        width,
        ffn_width,
        layers,
        query_heads,
        kv_heads,
        head_dim,
        norm_eps: keys.positive("rms_norm_eps", Some(1e-6)),
        rope: RopeSpec::read(keys, rope_scaling, head_dim, max_positions),
        tied_embeddings: keys.flag_here_or_outside("tie_word_embeddings", false),
        qk_norm: own.qk_norm,
        biases: own.biases,
        window: (own.window)(keys, layers),
        max_positions,
        bos: keys.tokens("bos_token_id", own.bos).first().copied(),
        eos: keys.tokens("eos_token_id", own.eos),
        family: own.family,
    }
}

/// Every layer sees all keys; a config that says otherwise is refused.
pub(super) fn no_window(keys: &mut Keys<'_>, layers: usize) -> Vec<Option<u64>> {
    let window = vec![None; layers];
    check_layer_types(keys, &window);
    window
}

/// The window of the Qwen families: only if switched on, and then where `layer_types` says so, else from layer
/// `max_window_layers` on.
pub(super) fn qwen_window(keys: &mut Keys<'_>, layers: usize) -> Vec<Option<u64>> {
    let switched_on = keys.flag("use_sliding_window", false);
    let size = if keys.states("sliding_window") && keys.value("sliding_window").is_none() {
        None
    } else {
        Some(keys.count("sliding_window", Some(4096)))
    };
    let first = match keys.value("max_window_layers").map(Value::as_u64) {
        Some(Some(first)) => first,
        Some(None) => keys.count("max_window_layers", None),
        None => 28,
    };
    let slides = layer_slides(keys, layers);
    let window = |layer: usize| {
        let by_default = u64::try_from(layer).is_ok_and(|layer| layer >= first);
        let slides = slides.as_ref().map_or(by_default, |slides| slides.get(layer).copied().unwrap_or(false));
        if switched_on && slides { size } else { None }
    };
    (0..layers).map(window).collect()
}

/// Refuses a `layer_types` list that contradicts `window`.
pub(super) fn check_layer_types(keys: &mut Keys<'_>, window: &[Option<u64>]) {
    let Some(slides) = layer_slides(keys, window.len()) else { return };
    if slides.iter().zip(window).any(|(slides, window)| *slides && window.is_none()) {
        let found = Value::from("sliding_attention");
        keys.unsupported("layer_types", &found, "full attention where the family's other keys give no window");
    }
}

/// Which layers `layer_types` calls sliding; `None` without a (sound) list.
fn layer_slides(keys: &mut Keys<'_>, layers: usize) -> Option<Vec<bool>> {
    let value = keys.value("layer_types")?;
    let Some(types) = value.as_array() else {
        keys.refuse("layer_types", value, "a list with one entry per layer");
        return None;
    };
    if types.len() != layers {
        let key = keys.name("layer_types");
        keys.problems.push(Problem::Layers { key, found: types.len(), layers });
        return None;
    }
    let mut slides = Vec::with_capacity(layers);
    for kind in types {
        let known = ["full_attention", "sliding_attention"].iter().position(|known| kind == known);
        let Some(known) = known else {
            keys.unsupported("layer_types", kind, "\"full_attention\" and \"sliding_attention\" for this family");
            return None;
        };
        slides.push(known == 1);
    }
    Some(slides)
}

/// The seven linear layers of a dense layer, in the order of the computation.
pub(super) fn linear_layers(spec: &Spec, layer: LayerIndex) -> Vec<Linear> {
    let (width, ffn_width) = (spec.width, spec.ffn_width);
    let (query_width, kv_width) = (spec.query_heads * spec.head_dim, spec.kv_heads * spec.head_dim);
    [
        ("self_attn", "q_proj", width, query_width),
        ("self_attn", "k_proj", width, kv_width),
        ("self_attn", "v_proj", width, kv_width),
        ("self_attn", "o_proj", query_width, width),
        ("mlp", "gate_proj", width, ffn_width),
        ("mlp", "up_proj", width, ffn_width),
        ("mlp", "down_proj", ffn_width, width),
    ]
    .into_iter()
    .map(|(part, projection, inputs, outputs)| {
        let module = format!("model.layers.{layer}.{part}.{projection}");
        Linear { layer, projection, module, inputs, outputs }
    })
    .collect()
}

/// The tensors of a dense layer, in the order of the computation.
pub(super) fn tensors(spec: &Spec, layer: LayerIndex) -> Vec<Expected> {
    let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
    let mut tensors = vec![Expected::new(name("input_layernorm"), &[spec.width])];
    for linear in linear_layers(spec, layer) {
        let biased = match linear.projection {
            "q_proj" => spec.biases.q,
            "k_proj" => spec.biases.k,
            "v_proj" => spec.biases.v,
            "o_proj" => spec.biases.o,
            _ => spec.biases.mlp,
        };
        if linear.projection == "gate_proj" {
            tensors.push(Expected::new(name("post_attention_layernorm"), &[spec.width]));
        }
        tensors.push(Expected::new(format!("{}.weight", linear.module), &[linear.outputs, linear.inputs]));
        if biased {
            tensors.push(Expected::new(format!("{}.bias", linear.module), &[linear.outputs]));
        }
        if spec.qk_norm && linear.projection == "k_proj" {
            tensors.push(Expected::new(name("self_attn.q_norm"), &[spec.head_dim]));
            tensors.push(Expected::new(name("self_attn.k_norm"), &[spec.head_dim]));
        }
    }
    tensors
}
