//! GLM-5, 5.1 and 5.2 (`glm_moe_dsa`): attention over latents, an index of keys that some layers own and the others borrow, and
//! experts behind a sigmoid router. Absent keys have the values of the published config class.

use serde_json::Value;

use crate::model::config_reader::ConfigReader;
use crate::model::parts::{ExpertSpec, IndexSpec, LatentSpec, Router};
use crate::model::rope::{RopeKeys, RopeSpec, yarn_score_gain};
use crate::model::spec::{Activation, Biases, BlockNorms, NormForm, Spec};
use crate::runtime::units::{as_index, float, from_index};

pub(super) const MODEL_TYPE: &str = "glm_moe_dsa";

/// Epsilon of the norms of compressed queries and latents, whatever `rms_norm_eps` says: so do the published models.
const LATENT_NORM_EPS: f64 = 1e-6;

/// The spec of a config. What is wrong is left in `keys`, and the spec is then not used. `rope_scaling` replaces the file's.
pub(super) fn read(keys: &mut ConfigReader<'_>, rope_scaling: Option<&Value>) -> Spec {
    let layers = keys.layers("num_hidden_layers");
    let activation = keys.word("hidden_act", Activation::Silu.name());
    if activation != Activation::Silu.name() {
        keys.unsupported("hidden_act", &Value::from(activation), Activation::Silu.in_quotes());
    }
    let max_positions = keys.count("max_position_embeddings", Some(202_752));
    let latent = latent(keys, layers);
    let rope = RopeSpec::read(keys, rope_scaling, &RopeKeys::ONE, latent.rotated, max_positions);
    let score_gain = yarn_score_gain(keys, rope_scaling, &rope);
    let head_dim = latent.plain + latent.rotated;
    let attention_bias = keys.flag("attention_bias", false);
    let query_heads = keys.size("num_attention_heads", Some(64));
    Spec {
        model_type: MODEL_TYPE,
        vocabulary: keys.count("vocab_size", Some(154_880)),
        width: keys.size("hidden_size", Some(6144)),
        ffn_width: keys.size("intermediate_size", Some(12_288)),
        layers,
        query_heads,
        kv_heads: query_heads,
        head_dim,
        norm_eps: keys.positive("rms_norm_eps", Some(1e-5)),
        rope,
        tied_embeddings: keys.flag_here_or_outside("tie_word_embeddings", false),
        qk_norm: false,
        biases: Biases { q: attention_bias, k: attention_bias, v: false, o: attention_bias, mlp: false },
        window: vec![None; layers],
        max_positions,
        bos: keys.tokens("bos_token_id", &[0]).first().copied(),
        eos: keys.tokens("eos_token_id", &[1]),
        norm: NormForm::Weight,
        block_norms: BlockNorms::Two,
        activation: Activation::Silu,
        // Scores are multiplied by head_dim^-1/2 · gain.
        score_scalar: score_gain.map(|gain| float(head_dim) / (gain * gain)),
        sliding_rope: None,
        scaled_embeddings: false,
        logit_cap: None,
        latent: Some(latent),
        experts: Some(experts(keys, layers)),
        delta: None,
        gated_attention: false,
    }
}

fn latent(keys: &mut ConfigReader<'_>, layers: usize) -> LatentSpec {
    let rotated = keys.size("qk_rope_head_dim", Some(64));
    let dim = keys.size("index_head_dim", Some(128));
    if !rotated.is_multiple_of(2) {
        keys.refuse("qk_rope_head_dim", &Value::from(rotated), "even, since rotation takes dimensions in pairs");
    }
    if dim < rotated && keys.problems.is_empty() {
        keys.refuse("index_head_dim", &Value::from(dim), "at least `qk_rope_head_dim`");
    }
    for key in ["rope_interleave", "indexer_rope_interleave"] {
        if !keys.flag(key, true) {
            keys.unsupported(key, &Value::Bool(false), "rotation of neighbouring dimensions (true)");
        }
    }
    let owners = owners(keys, layers);
    if owners.first() == Some(&false) && keys.problems.is_empty() {
        keys.refuse(
            "indexer_types",
            &Value::from("shared"),
            "\"full\" for layer 0, since no layer below it chooses keys",
        );
    }
    LatentSpec {
        query_rank: keys.size("q_lora_rank", Some(2048)),
        latent: keys.size("kv_lora_rank", Some(512)),
        plain: keys.size("qk_nope_head_dim", Some(192)),
        rotated,
        value_dim: keys.size("v_head_dim", Some(256)),
        norm_eps: LATENT_NORM_EPS,
        index: IndexSpec {
            heads: keys.size("index_n_heads", Some(32)),
            dim,
            top: keys.size("index_topk", Some(2048)),
            owners,
        },
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

fn experts(keys: &mut ConfigReader<'_>, layers: usize) -> ExpertSpec {
    let count = keys.size("n_routed_experts", Some(256));
    let chosen = keys.size("num_experts_per_tok", Some(8));
    let groups = keys.size("n_group", Some(1));
    let kept_groups = keys.size("topk_group", Some(1));
    let width = keys.size("moe_intermediate_size", Some(2048));
    // Groups are judged by their two best experts.
    let whole = count.is_multiple_of(groups) && (groups == 1 || count / groups >= 2) && kept_groups <= groups;
    if !whole {
        keys.refuse(
            "n_group",
            &Value::from(groups),
            "a divisor of `n_routed_experts` with at least `topk_group` groups",
        );
    }
    if whole && chosen > count / groups * kept_groups {
        keys.refuse("num_experts_per_tok", &Value::from(chosen), "at most the experts of the groups that are kept");
    }
    ExpertSpec {
        count,
        chosen,
        width,
        shared_width: keys.size("n_shared_experts", Some(1)) * width,
        shared_gate: false,
        router: Router::Sigmoid,
        normalised: keys.flag("norm_topk_prob", true),
        scaling: keys.positive("routed_scaling_factor", Some(2.5)),
        groups,
        kept_groups,
        sparse: sparse(keys, layers),
    }
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
