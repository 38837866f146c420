//! What a plan needs to know of a decoder: layer by layer, how wide its rows are, what it leaves behind for later
//! positions, how many weights it has, and how much work a position is.
//!
//! It follows from the model's [`Spec`]. Nothing else in the program takes a shape for a model.

pub mod layers;

use std::path::Path;

pub use self::layers::{INDEX_BYTES, Index, Layer, Mix, Projection, Segment, Shape, Widths};
use super::parts::DeltaSpec;
use super::spec::{self, Error, Spec};
use crate::runtime::units::{LayerIndex, Tokens};

impl Shape {
    /// The shape of a model.
    #[must_use]
    pub fn of(spec: &Spec) -> Shape {
        let layers: Vec<Layer> = (0..spec.layers).map(|layer| layer_of(spec, LayerIndex(layer))).collect();
        let inside: u64 = layers.iter().map(|layer| layer.parameters + layer.experts).sum();
        Shape {
            model_type: spec.model_type,
            vocabulary: spec.vocabulary,
            width: spec.width,
            max_positions: spec.max_positions,
            stretched_positions: spec.rope.stretched_positions(),
            ffn_biases: spec.biases.mlp,
            outside: spec.parameter_count() - inside,
            layers,
        }
    }

    /// Reads the shape of a checkpoint folder, or of the path of a bare config.json. `rope_scaling` is as in [`Spec::read`].
    ///
    /// # Errors
    /// As [`Spec::read`].
    pub fn read(path: &Path, rope_scaling: Option<&serde_json::Value>) -> Result<Shape, Error> {
        Ok(Shape::of(&Spec::read(path, rope_scaling)?))
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

    /// A sentence for the user when `positions` lie beyond what the checkpoint was made for, else nothing.
    #[must_use]
    pub fn context_note(&self, positions: Tokens) -> Option<String> {
        spec::context_note(self.max_positions, self.stretched_positions, positions)
    }
}

fn layer_of(spec: &Spec, layer: LayerIndex) -> Layer {
    let experts = spec.experts_of(layer);
    let expert = experts.map_or(0, |experts| 3 * spec.width * experts.width);
    let chosen = experts.map_or(0, |experts| experts.chosen);
    Layer {
        mix: mix(spec, layer),
        ffn_width: experts.map_or(spec.ffn_width, |own| own.shared_width + own.chosen * own.width),
        chosen,
        parameters: spec.tensors_of(layer).iter().map(spec::Expected::elements).sum(),
        experts: experts.map_or(0, |experts| experts.count * expert),
        expert_count: experts.map_or(0, |experts| experts.count),
        expert_width: experts.map_or(0, |experts| experts.width),
        projections: projections(spec, layer),
        further: chosen * expert + experts.map_or(0, |own| (own.count + u64::from(own.shared_gate)) * spec.width),
        constant: index_products(spec, layer),
    }
}

fn mix(spec: &Spec, layer: LayerIndex) -> Mix {
    if let Some(&DeltaSpec { key_heads, value_heads, key_dim, value_dim, taps, .. }) = spec.delta_of(layer) {
        return Mix::Delta { key_heads, value_heads, key_dim, value_dim, taps };
    }
    let Some(latent) = &spec.latent else {
        return Mix::Grouped {
            query_heads: spec.query_heads,
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim,
            window: spec.window[layer.0],
            gated: spec.gated_attention,
        };
    };
    let index = &latent.index;
    let index = Index { heads: index.heads, dim: index.dim, top: index.top, owner: index.owners[layer.0] };
    Mix::Latent { heads: spec.query_heads, latent: latent.latent, rotated: latent.rotated, index }
}

/// Multiply-adds of a position in the projections of the layer's index.
fn index_products(spec: &Spec, layer: LayerIndex) -> u64 {
    let owner = spec.latent.as_ref().filter(|latent| latent.index.owners[layer.0]);
    owner.map_or(0, |latent| {
        let index = &latent.index;
        latent.query_rank * index.heads * index.dim + spec.width * (index.dim + index.heads)
    })
}

/// The linear layers of a layer that every row passes. Of attention over latents in absorbed form the key half of
/// `kv_b_proj` belongs to segment A and its value half to B; it counts as A's.
fn projections(spec: &Spec, layer: LayerIndex) -> Vec<Projection> {
    const BEFORE: [&str; 7] = ["q_proj", "k_proj", "v_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"];
    let is_before = |name: &str| BEFORE.contains(&name) || name.starts_with("in_proj_");
    let linears = spec.linear_layers_of(layer).into_iter();
    linears
        .map(|linear| Projection {
            name: linear.projection,
            segment: if is_before(linear.projection) { Segment::A } else { Segment::B },
            inputs: linear.inputs,
            outputs: linear.outputs,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};

    use super::*;
    use crate::model::config_reader::SIZE_MAX;

    fn config(text: &str) -> Map<String, Value> {
        serde_json::from_str(text).unwrap()
    }

    fn read(config: &Map<String, Value>) -> Result<Shape, Vec<super::super::config_reader::Problem>> {
        match Spec::from_config(config, None, Path::new("config.json")) {
            Ok(spec) => Ok(Shape::of(&spec)),
            Err(Error::Refused { problems, .. }) => Err(problems.0),
            Err(other) => panic!("{other}"),
        }
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
        // Counted over the parameters of transformers 5.24.0 for these configs.
        let hybrid_mixture = config(include_str!("../../../configs/shapes/qwen3.6-35b-a3b/config.json"));
        assert_eq!(read(&hybrid_mixture).unwrap().parameter_count(), 34_660_610_688);
        let joined = config(include_str!("../../../configs/shapes/qwen3-next-80b-a3b/config.json"));
        assert_eq!(read(&joined).unwrap().parameter_count(), 79_674_391_296);
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
        let mut widest =
            config(r#"{ "model_type": "qwen3_next", "num_hidden_layers": 16384, "vocab_size": 2147483648 }"#);
        for key in [
            "hidden_size",
            "head_dim",
            "num_attention_heads",
            "num_key_value_heads",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "num_experts",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
        ] {
            widest.insert(key.into(), json!(SIZE_MAX));
        }
        assert!(read(&widest).unwrap().parameter_count() > 1 << 60);
    }

    #[test]
    fn a_layer_is_a_delta_rule_or_gated_attention_as_the_spec_says() {
        let whole = read(&config(HYBRID)).unwrap();
        let rule = Mix::Delta { key_heads: 16, value_heads: 48, key_dim: 128, value_dim: 128, taps: 4 };
        let attention = Mix::Grouped { query_heads: 24, kv_heads: 4, head_dim: 256, window: None, gated: true };
        assert!(
            whole.layers.iter().enumerate().all(|(i, layer)| layer.mix == if i % 4 == 3 { attention } else { rule })
        );
        let of = |layer: &Layer, segment| {
            let own = layer.projections.iter().filter(|projection| projection.segment == segment);
            own.map(|projection| (projection.name, projection.outputs)).collect::<Vec<_>>()
        };
        let inputs = [("in_proj_qkv", 10_240), ("in_proj_z", 6144), ("in_proj_b", 48), ("in_proj_a", 48)];
        assert_eq!(of(&whole.layers[0], Segment::A), inputs);
        let after = [("out_proj", 5120), ("gate_proj", 17_408), ("up_proj", 17_408), ("down_proj", 5120)];
        assert_eq!(of(&whole.layers[0], Segment::B), after);
        assert_eq!(of(&whole.layers[3], Segment::A), [("q_proj", 12_288), ("k_proj", 1024), ("v_proj", 1024)]);
        // Experts: what a row's eight do, the router, and the gate of the shared one.
        let mixture = read(&config(include_str!("../../../configs/shapes/qwen3.6-35b-a3b/config.json"))).unwrap();
        assert!(mixture.layers.iter().all(|layer| layer.further == 8 * 3 * 2048 * 512 + (256 + 1) * 2048));
        assert!(mixture.layers.iter().all(|layer| layer.ffn_width == 512 + 8 * 512));
    }
}
