//! Gemma 3, text: 1 + w norms, four a block, two rotary embeddings, a window in all but every sixth layer.

use super::differences::{BiasRule, Defaults, Differences, RopeRule, ScoreScale, WindowRule};
use crate::model::spec::{Activation, BlockNorms, NormForm};

pub(super) const GEMMA3: Differences = Differences {
    model_type: "gemma3_text",
    norm: NormForm::OnePlusWeight,
    block_norms: BlockNorms::Four,
    qk_norm: true,
    biases: BiasRule::Attention,
    activation_key: "hidden_activation",
    activation: Activation::GeluTanh,
    score_scale: ScoreScale::Scalar(256.0),
    windows: WindowRule::ByLayerKind(6),
    ropes: RopeRule::ByLayerKind { full_theta: 1_000_000.0, sliding_theta: 10_000.0 },
    scaled_embeddings: true,
    soft_caps: true,
    defaults: Defaults {
        vocabulary: Some(262_208),
        query_heads: Some(8),
        kv_heads: Some(4),
        head_dim: Some(256),
        max_positions: 131_072,
        tied_embeddings: true,
        bos: &[2],
        eos: &[1],
        eos_of_wrapper: true,
        ..Defaults::PLAIN
    },
    ..Differences::PLAIN
};

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use crate::model::rope::Scaling;
    use crate::model::spec::Spec;

    fn read(config: &Value) -> Result<Spec, String> {
        let config = config.as_object().unwrap();
        Spec::from_config(config, None, Path::new("config.json")).map_err(|error| error.to_string())
    }

    /// A small model with these keys besides its sizes.
    fn small(keys: &Value) -> Value {
        let mut config = json!({"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 7, "sliding_window": 16});
        config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        config
    }

    #[test]
    fn old_and_new_spellings_give_one_spec() {
        let old = small(&json!({"sliding_window_pattern": 3, "rope_theta": 500_000.0, "rope_local_base_freq": 5_000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0}}));
        let kind = |layer: u64| if layer.is_multiple_of(3) { "full_attention" } else { "sliding_attention" };
        let new = small(&json!({"layer_types": (1..=7).map(kind).collect::<Vec<_>>(), "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0}}}));
        let (old, new) = (read(&old).unwrap(), read(&new).unwrap());
        assert_eq!(old.canonical(), new.canonical());
        assert_eq!(old.rope.scaling, Scaling::Linear { factor: 8.0 });
        assert_eq!(old.sliding_rope.map(|rope| (rope.theta, rope.scaling)), Some((5_000.0, Scaling::Default)));
        let window = [Some(16), Some(16), None, Some(16), Some(16), None, Some(16)];
        assert_eq!(old.window, window);
    }

    #[test]
    fn absent_keys_have_the_defaults_of_the_family() {
        let spec = read(&small(&json!({}))).unwrap();
        assert_eq!((spec.vocabulary, spec.query_heads, spec.kv_heads, spec.head_dim), (262_208, 8, 4, 256));
        assert_eq!((spec.rope.theta, spec.sliding_rope.unwrap().theta), (1e6, 1e4));
        assert_eq!((spec.score_scalar, spec.tied_embeddings), (Some(256.0), true));
        assert_eq!(spec.window.iter().filter(|window| window.is_none()).count(), 1, "one full layer of seven");
        let untied = read(&small(&json!({"tie_word_embeddings": false}))).unwrap();
        assert_eq!(untied.tensors().len(), spec.tensors().len() + 1);
        let wrapped = json!({"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": small(&json!({}))});
        assert_eq!(read(&wrapped).unwrap().eos, [1, 106]);
    }

    #[test]
    fn capped_scores_and_ropes_of_unknown_kind_are_refused() {
        let says = |keys: &Value, part: &str| {
            let words = read(&small(keys)).unwrap_err();
            assert!(words.contains(part), "{part} is not in: {words}");
        };
        says(&json!({"attn_logit_softcapping": 50.0}), "`attn_logit_softcapping` is 50.0");
        says(&json!({"use_bidirectional_attention": true}), "`use_bidirectional_attention` is true");
        says(&json!({"hidden_activation": "relu"}), "gelu_pytorch_tanh");
        says(&json!({"rope_parameters": {"rope_theta": 1e6}}), "a table for each kind of layers");
        assert_eq!(read(&small(&json!({"final_logit_softcapping": 30.0}))).unwrap().logit_cap, Some(30.0));
    }
}
