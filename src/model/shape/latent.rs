//! `glm_moe_dsa`: attention over latents, keys chosen by an index that some layers own and others borrow, and experts.

use serde_json::Value;

use super::layers::{Index, Layer, Mix, Projection, Segment, Shape, feed_forward, size, weights};
use crate::model::config_reader::ConfigReader;
use crate::runtime::units::{as_index, from_index};

/// Sizes that all layers share.
struct Sizes {
    width: u64,
    ffn_width: u64,
    heads: u64,
    /// Width of the compressed queries.
    query_rank: u64,
    /// Width of the latent.
    latent: u64,
    /// Width of a key's part that is not rotated.
    plain: u64,
    rotated: u64,
    value_dim: u64,
    index_heads: u64,
    index_dim: u64,
    top: u64,
    expert_width: u64,
    experts: u64,
    chosen: u64,
    shared: u64,
}

/// Reads a config; absent keys have the defaults of the published config class.
pub(super) fn read(keys: &mut ConfigReader<'_>) -> Shape {
    let vocabulary = keys.count("vocab_size", Some(154_880));
    let layers = keys.layers("num_hidden_layers");
    let sizes = Sizes {
        width: size(keys, "hidden_size", Some(6144)),
        ffn_width: size(keys, "intermediate_size", Some(12_288)),
        heads: size(keys, "num_attention_heads", Some(64)),
        query_rank: size(keys, "q_lora_rank", Some(2048)),
        latent: size(keys, "kv_lora_rank", Some(512)),
        plain: size(keys, "qk_nope_head_dim", Some(192)),
        rotated: size(keys, "qk_rope_head_dim", Some(64)),
        value_dim: size(keys, "v_head_dim", Some(256)),
        index_heads: size(keys, "index_n_heads", Some(32)),
        index_dim: size(keys, "index_head_dim", Some(128)),
        top: size(keys, "index_topk", Some(2048)),
        expert_width: size(keys, "moe_intermediate_size", Some(2048)),
        experts: size(keys, "n_routed_experts", Some(256)),
        chosen: size(keys, "num_experts_per_tok", Some(8)),
        shared: size(keys, "n_shared_experts", Some(1)),
    };
    let (owners, sparse) = (owners(keys, layers), sparse(keys, layers));
    let tied = keys.flag_here_or_outside("tie_word_embeddings", false);
    Shape {
        model_type: "glm_moe_dsa",
        trained: false,
        vocabulary,
        width: sizes.width,
        max_positions: keys.count("max_position_embeddings", Some(202_752)),
        stretched_positions: None,
        outside: vocabulary * sizes.width * if tied { 1 } else { 2 } + sizes.width,
        layers: owners.into_iter().zip(sparse).map(|(owner, sparse)| sizes.layer(owner, sparse)).collect(),
    }
}

/// Which layers choose keys: as listed, else by the pattern, else every so many from an offset on.
fn owners(keys: &mut ConfigReader<'_>, layers: usize) -> Vec<bool> {
    let wanted = "\"full\" and \"shared\"";
    if let Some(types) = keys.layer_words("indexer_types", layers, &["shared", "full"], wanted) {
        return types.into_iter().map(|kind| kind == 1).collect();
    }
    let pattern = keys.value("index_topk_pattern");
    if pattern.is_some_and(Value::is_array)
        && let Some(types) = keys.layer_words("index_topk_pattern", layers, &["shared", "full"], wanted)
    {
        return types.into_iter().map(|kind| kind == 1).collect();
    }
    if let Some(pattern) = pattern.filter(|pattern| !pattern.is_array()) {
        let letters = pattern.as_str().unwrap_or_default();
        if letters.len() == layers && letters.chars().all(|letter| "FS".contains(letter)) {
            return letters.chars().map(|letter| letter == 'F').collect();
        }
        keys.refuse("index_topk_pattern", pattern, "a word of one letter a layer, F or S");
    }
    let every = keys.count("index_topk_freq", Some(1));
    let offset = keys.value("index_skip_topk_offset").and_then(Value::as_u64).unwrap_or(2);
    (0..layers).map(|layer| (from_index(layer) + 1).saturating_sub(offset).is_multiple_of(every)).collect()
}

/// Which layers have experts: as listed, else all after the first dense ones.
fn sparse(keys: &mut ConfigReader<'_>, layers: usize) -> Vec<bool> {
    let wanted = "\"dense\" and \"sparse\"";
    if let Some(types) = keys.layer_words("mlp_layer_types", layers, &["dense", "sparse"], wanted) {
        return types.into_iter().map(|kind| kind == 1).collect();
    }
    let dense = keys.value("first_k_dense_replace").and_then(Value::as_u64).unwrap_or(3);
    (0..layers).map(|layer| layer >= as_index(dense)).collect()
}

impl Sizes {
    fn layer(&self, owner: bool, sparse: bool) -> Layer {
        let linear = |name, segment, inputs, outputs| Projection { name, segment, inputs, outputs };
        let shared_width = if sparse { self.shared * self.expert_width } else { self.ffn_width };
        // In absorbed form the key half of `kv_b_proj` belongs to segment A and its value half to B; it counts as A's.
        let own = [
            linear("q_a_proj", Segment::A, self.width, self.query_rank),
            linear("q_b_proj", Segment::A, self.query_rank, self.heads * (self.plain + self.rotated)),
            linear("kv_a_proj_with_mqa", Segment::A, self.width, self.latent + self.rotated),
            linear("kv_b_proj", Segment::A, self.latent, self.heads * (self.plain + self.value_dim)),
            linear("o_proj", Segment::B, self.heads * self.value_dim, self.width),
        ];
        let projections = [&own[..], &feed_forward(self.width, shared_width)].concat();
        let expert = 3 * self.width * self.expert_width;
        let index =
            self.query_rank * self.index_heads * self.index_dim + self.width * (self.index_dim + self.index_heads);
        let index = if owner { index } else { 0 };
        // Two norms of the layer, two of the compressed rows, weight and bias of the index keys' norm.
        let norms = 2 * self.width + self.query_rank + self.latent + if owner { 2 * self.index_dim } else { 0 };
        let router = if sparse { self.experts * (self.width + 1) } else { 0 };
        let chosen = if sparse { self.chosen } else { 0 };
        Layer {
            mix: Mix::Latent {
                heads: self.heads,
                latent: self.latent,
                rotated: self.rotated,
                index: Index { heads: self.index_heads, dim: self.index_dim, top: self.top, owner },
            },
            ffn_width: shared_width + chosen * self.expert_width,
            chosen,
            parameters: weights(&projections) + index + norms + router,
            experts: if sparse { self.experts * expert } else { 0 },
            projections,
            further: chosen * expert + if sparse { self.experts * self.width } else { 0 },
            constant: index,
        }
    }
}
