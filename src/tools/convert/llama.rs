//! The llama architecture: config.json from header keys, tensor names, and the order of q and k rows.

use serde_json::{Value as Json, json};

use super::error::Error;
use super::gguf::{Gguf, StoredTensor};
use super::options::Weights;
use crate::runtime::units::{as_index, from_index};

/// The header's numbers.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub(super) layers: u64,
    width: u64,
    ffn_width: u64,
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
    vocabulary: u64,
    positions_max: u64,
    norm_eps: f64,
    rope_theta: f64,
    rope_scaling: Option<Json>,
}

/// A tensor of model.safetensors, and the stored tensor with its values.
#[derive(Debug)]
pub(super) struct MappedTensor<'gguf> {
    pub(super) stored: &'gguf StoredTensor,
    /// Name in model.safetensors.
    pub(super) name: String,
    /// Shape, outermost first.
    pub(super) shape: Vec<u64>,
    /// Rows of a head, if the file interleaves the two halves of each head; `None` if rows keep their order.
    pub(super) interleaved: Option<u64>,
}

impl Shape {
    /// Reads and checks the header's numbers.
    pub(super) fn read(gguf: &Gguf) -> Result<Shape, Error> {
        let architecture = gguf.required("general.architecture", Gguf::text)?;
        if architecture != "llama" {
            return Err(gguf.wrong("general.architecture", architecture, "llama, the only one that convert knows"));
        }
        let optional = |key: &str| gguf.unsigned(&format!("llama.{key}"));
        let number = |key: &str| {
            let key = format!("llama.{key}");
            let value = gguf.required(&key, Gguf::unsigned)?;
            if value == 0 { Err(gguf.wrong(&key, 0, "more than 0")) } else { Ok(value) }
        };
        let (width, heads) = (number("embedding_length")?, number("attention.head_count")?);
        let kv_heads = optional("attention.head_count_kv")?.unwrap_or(heads);
        if kv_heads == 0 || heads % kv_heads != 0 {
            return Err(gguf.wrong("llama.attention.head_count_kv", kv_heads, format!("a divisor of {heads} heads")));
        }
        let head_dim = match optional("attention.key_length")? {
            Some(length) => length,
            None if width % heads == 0 => width / heads,
            None => return Err(gguf.wrong("llama.attention.head_count", heads, format!("a divisor of width {width}"))),
        };
        if head_dim == 0 || head_dim % 2 != 0 {
            return Err(gguf.wrong("llama.attention.key_length", head_dim, "an even number above 0"));
        }
        for key in ["attention.value_length", "rope.dimension_count"] {
            if let Some(found) = optional(key)?.filter(|found| *found != head_dim) {
                return Err(gguf.wrong(&format!("llama.{key}"), found, format!("the head width {head_dim}")));
            }
        }
        if let Some(experts) = optional("expert_count")?.filter(|experts| *experts > 0) {
            return Err(gguf.wrong("llama.expert_count", experts, "0: a model with experts is not a llama"));
        }
        let tokens = gguf.required("tokenizer.ggml.tokens", Gguf::list)?;
        let rope_theta = gguf.float("llama.rope.freq_base")?.unwrap_or(10_000.0);
        Ok(Shape {
            layers: number("block_count")?,
            width,
            ffn_width: number("feed_forward_length")?,
            heads,
            kv_heads,
            head_dim,
            vocabulary: from_index(tokens.len()),
            positions_max: number("context_length")?,
            norm_eps: gguf.required("llama.attention.layer_norm_rms_epsilon", Gguf::float)?,
            rope_theta,
            rope_scaling: rope_scaling(gguf, rope_theta, head_dim)?,
        })
    }

    /// config.json of `model_type` llama.
    pub(super) fn config(&self, gguf: &Gguf, weights: Weights) -> Result<Json, Error> {
        let mut config = json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.width,
            "intermediate_size": self.ffn_width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions_max,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "attention_bias": gguf.tensors.contains_key("blk.0.attn_q.bias"),
            "attention_dropout": 0.0,
            "mlp_bias": gguf.tensors.contains_key("blk.0.ffn_gate.bias"),
            "tie_word_embeddings": !gguf.tensors.contains_key("output.weight"),
            "torch_dtype": weights.name(),
            "use_cache": true,
        });
        for (field, key) in [
            ("bos_token_id", "tokenizer.ggml.bos_token_id"),
            ("eos_token_id", "tokenizer.ggml.eos_token_id"),
            ("pad_token_id", "tokenizer.ggml.padding_token_id"),
        ] {
            if let Some(id) = token_id(gguf, key)? {
                config[field] = id.into();
            }
        }
        Ok(config)
    }

    /// Every tensor of the model in the order of their new names; each stored tensor is used exactly once.
    pub(super) fn tensors<'gguf>(&self, gguf: &'gguf Gguf) -> Result<Vec<MappedTensor<'gguf>>, Error> {
        let mut tensors = Vec::new();
        let (width, ffn) = (self.width, self.ffn_width);
        let (q_width, kv_width) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let mut add = |old: String, name: String, shape: Vec<u64>, interleaved: Option<u64>, needed: bool| {
            let Some(stored) = gguf.tensors.get(&old) else {
                let (file, layers) = (gguf.path.clone(), self.layers);
                return if needed { Err(Error::TensorMissing { file, tensor: old, layers }) } else { Ok(()) };
            };
            gguf.check_dims(stored, shape.iter().rev().copied().collect())?;
            tensors.push(MappedTensor { stored, name, shape, interleaved });
            Ok(())
        };
        let vocabulary = vec![self.vocabulary, width];
        add("token_embd.weight".into(), "model.embed_tokens.weight".into(), vocabulary.clone(), None, true)?;
        add("output_norm.weight".into(), "model.norm.weight".into(), vec![width], None, true)?;
        add("output.weight".into(), "lm_head.weight".into(), vocabulary, None, false)?;
        for layer in 0..self.layers {
            let interleaved = Some(self.head_dim);
            for (old, new, rows, columns, order) in [
                ("attn_q", "self_attn.q_proj", q_width, width, interleaved),
                ("attn_k", "self_attn.k_proj", kv_width, width, interleaved),
                ("attn_v", "self_attn.v_proj", kv_width, width, None),
                ("attn_output", "self_attn.o_proj", width, q_width, None),
                ("ffn_gate", "mlp.gate_proj", ffn, width, None),
                ("ffn_up", "mlp.up_proj", ffn, width, None),
                ("ffn_down", "mlp.down_proj", width, ffn, None),
            ] {
                let (old, new) = (format!("blk.{layer}.{old}"), format!("model.layers.{layer}.{new}"));
                add(format!("{old}.weight"), format!("{new}.weight"), vec![rows, columns], order, true)?;
                let in_attention = new.contains("self_attn");
                let first = if in_attention { "blk.0.attn_q.bias" } else { "blk.0.ffn_gate.bias" };
                let biased = gguf.tensors.contains_key(first);
                add(format!("{old}.bias"), format!("{new}.bias"), vec![rows], order, biased)?;
            }
            for (old, new) in [("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")] {
                let (old, new) = (format!("blk.{layer}.{old}.weight"), format!("model.layers.{layer}.{new}.weight"));
                add(old, new, vec![width], None, true)?;
            }
        }
        let known = |name: &String| name == ROPE_FACTORS || tensors.iter().any(|tensor| tensor.stored.name == *name);
        if let Some(tensor) = gguf.tensors.keys().find(|name| !known(name)) {
            let (file, layers) = (gguf.path.clone(), self.layers);
            return Err(Error::TensorUnknown { file, tensor: tensor.clone(), layers });
        }
        tensors.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(tensors)
    }
}

/// llama.cpp's tensor of the llama3 rule's factors, one for each pair of a head's dimensions.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// A token id of the header, checked against the vocabulary.
pub(super) fn token_id(gguf: &Gguf, key: &str) -> Result<Option<u64>, Error> {
    let tokens = gguf.list("tokenizer.ggml.tokens")?.map_or(0, <[_]>::len);
    match gguf.unsigned(key)? {
        Some(id) if id >= from_index(tokens) => Err(gguf.wrong(key, id, format!("below the vocabulary's {tokens}"))),
        id => Ok(id),
    }
}

/// The `rope_scaling` object of config.json; `None` if positions are not scaled.
fn rope_scaling(gguf: &Gguf, theta: f64, head_dim: u64) -> Result<Option<Json>, Error> {
    if let Some(factors) = gguf.tensors.get(ROPE_FACTORS) {
        return llama3_scaling(gguf, factors, theta, head_dim).map(Some);
    }
    let factor = || gguf.required("llama.rope.scaling.factor", Gguf::float);
    let legacy = gguf.float("llama.rope.scale_linear")?.filter(|factor| (factor - 1.0).abs() > f64::EPSILON);
    match gguf.text("llama.rope.scaling.type")? {
        None | Some("none") => Ok(legacy.map(|factor| json!({ "rope_type": "linear", "factor": factor }))),
        Some("linear") => Ok(Some(json!({ "rope_type": "linear", "factor": factor()? }))),
        Some("yarn") => {
            let original = gguf.required("llama.rope.scaling.original_context_length", Gguf::unsigned);
            Ok(Some(json!({
                "rope_type": "yarn", "factor": factor()?, "original_max_position_embeddings": original?
            })))
        }
        Some(other) => Err(gguf.wrong("llama.rope.scaling.type", other, "none, linear or yarn")),
    }
}

/// Recovers the llama3 rule from its factors.
///
/// The file has only the factors. Every published llama3 model uses low factor 1, high factor 4 and 8,192 original
/// positions; then the largest entry is the rule's factor, and all others follow from it. Each entry is checked:
/// a wave shorter than 8192/4 positions has factor 1, one longer than 8192 the whole factor, and those between are
/// interpolated.
fn llama3_scaling(gguf: &Gguf, stored: &StoredTensor, theta: f64, head_dim: u64) -> Result<Json, Error> {
    gguf.check_dims(stored, vec![head_dim / 2])?;
    let factors = gguf.rows(stored, 0, 1)?;
    let largest = factors.iter().copied().fold(1.0, f32::max);
    let (factor, original, low, high) = (f64::from(largest), 8192.0, 1.0, 4.0);
    let mut exponent = 0.0;
    for (index, found) in factors.iter().enumerate().take(as_index(head_dim / 2)) {
        let wave = 2.0 * std::f64::consts::PI * theta.powf(exponent / f64::from(u32::try_from(head_dim).unwrap_or(1)));
        let rule = if wave < original / high {
            1.0
        } else if wave > original / low {
            factor
        } else {
            let smooth = (original / wave - low) / (high - low);
            1.0 / ((1.0 - smooth) / factor + smooth)
        };
        if (rule - f64::from(*found)).abs() > 1e-4 * rule {
            let (file, wanted) = (gguf.path.clone(), nearest(rule));
            return Err(Error::RopeFactors { file, index, found: *found, wanted, factor: largest });
        }
        exponent += 2.0;
    }
    Ok(json!({
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": 8192
    }))
}

/// A float64 as the nearest float32, for a message.
fn nearest(value: f64) -> f32 {
    value.to_string().parse().unwrap_or(f32::NAN)
}
