//! What a plan needs to know of a decoder: layer by layer, how wide its rows are, what it leaves behind for later
//! positions, how many weights it has, and how much work a position is.
//!
//! For a family that is trained the shape follows from its [`Spec`]; for one that is only planned it is read from the
//! published config, by the file of that family here. Nothing else in the program takes a shape for a model.

mod hybrid;
pub mod layers;
pub mod planned;

use std::path::Path;

pub use self::layers::{INDEX_BYTES, Index, Layer, Mix, Projection, Segment, Shape, Widths};
use super::config_reader::ConfigReader;
use super::problems::Problems;
use super::spec::{self, Error, Spec};
use crate::runtime::units::{LayerIndex, Tokens};

impl Shape {
    /// The shape of a family that is trained.
    #[must_use]
    pub fn of(spec: &Spec) -> Shape {
        let layers: Vec<Layer> = (0..spec.layers).map(|layer| layer_of(spec, LayerIndex(layer))).collect();
        let inside: u64 = layers.iter().map(|layer| layer.parameters + layer.experts).sum();
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
        let mut keys = ConfigReader::of_text_model(&config);
        let named = keys.value_here_or_outside("model_type").and_then(serde_json::Value::as_str);
        let Some(planned) = named.and_then(planned::find) else {
            return Ok(Shape::of(&Spec::from_config(&config, rope_scaling, &file)?));
        };
        let shape = (planned.read)(&mut keys);
        if keys.problems.is_empty() {
            return Ok(shape);
        }
        Err(Error::Refused { file, problems: Problems(keys.problems) })
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

/// One layer of a family that is trained.
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
        further: chosen * expert + experts.map_or(0, |experts| experts.count * spec.width),
        constant: index_products(spec, layer),
    }
}

fn mix(spec: &Spec, layer: LayerIndex) -> Mix {
    let Some(latent) = &spec.latent else {
        return Mix::Grouped {
            query_heads: spec.query_heads,
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim,
            window: spec.window[layer.0],
            gated: false,
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
    let linears = spec.linear_layers_of(layer).into_iter();
    linears
        .map(|linear| Projection {
            name: linear.projection,
            segment: if BEFORE.contains(&linear.projection) { Segment::A } else { Segment::B },
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
        let mut keys = ConfigReader::of_text_model(config);
        let named = keys.value_here_or_outside("model_type").and_then(Value::as_str).unwrap();
        if planned::find(named).is_none() {
            return match Spec::from_config(config, None, Path::new("config.json")) {
                Ok(spec) => Ok(Shape::of(&spec)),
                Err(Error::Refused { problems, .. }) => Err(problems.0),
                Err(other) => panic!("{other}"),
            };
        }
        let shape = (planned::find(named).unwrap().read)(&mut keys);
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
