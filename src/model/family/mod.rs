//! The families of decoders: one file each, one entry each in [`FAMILIES`], and no other place that knows their names.

mod delta;
pub mod differences;
mod gemma3;
mod glm;
mod llama;
mod mistral;
mod qwen2;
mod qwen3;
mod qwen3_5;
mod qwen3_moe;
mod qwen3_next;
mod read;

use std::path::Path;

use serde_json::{Map, Value};

use self::differences::Differences;
use super::config_reader::{ConfigReader, Problem};
use super::problems::Problems;
use super::spec::{Error, Spec, parsed};
use crate::runtime::names;

/// Every family with keys and values by head.
pub static FAMILIES: &[&Differences] = &[
    &qwen3::QWEN3,
    &qwen2::QWEN2,
    &llama::LLAMA,
    &mistral::MISTRAL,
    &gemma3::GEMMA3,
    &qwen3_moe::QWEN3_MOE,
    &qwen3_5::QWEN3_5,
    &qwen3_5::QWEN3_5_MOE,
    &qwen3_next::QWEN3_NEXT,
];

/// All `model_type` values that are read.
#[must_use]
pub fn model_types() -> Vec<&'static str> {
    FAMILIES.iter().map(|family| family.model_type).chain([glm::MODEL_TYPE]).collect()
}

impl Spec {
    /// Reads the spec of a checkpoint folder, or of the path of a bare config.json.
    ///
    /// `rope_scaling`, in the spelling of published configs, replaces the file's scaling; `null` in it removes the scaling.
    ///
    /// # Errors
    /// When the file cannot be read, or holds anything whose maths is not built: everything wrong in one message.
    pub fn read(path: &Path, rope_scaling: Option<&Value>) -> Result<Spec, Error> {
        let (file, config) = parsed(path)?;
        Spec::from_config(&config, rope_scaling, &file)
    }

    /// The spec of a parsed config; `file` is the name that messages give it.
    ///
    /// # Errors
    /// When it holds anything whose maths is not built: everything wrong in one message.
    pub fn from_config(config: &Map<String, Value>, rope_scaling: Option<&Value>, file: &Path) -> Result<Spec, Error> {
        let mut keys = ConfigReader::of_text_model(config);
        let refused = |problems| Error::Refused { file: file.to_owned(), problems: Problems(problems) };
        let Some(family) = find(&mut keys) else { return Err(refused(keys.problems)) };
        if let Some(value) = keys.value_here_or_outside("quantization_config").filter(|value| !is_fp8_in_blocks(value))
        {
            let supported = "float32, float16, bfloat16 and float64 weights, and fp8 with `quant_method` \"fp8\", \
                             `weight_block_size` [128, 128], `activation_scheme` \"dynamic\"";
            keys.unsupported("quantization_config", value, supported);
        }
        let spec = match family {
            Family::Grouped(own) => read::read(&mut keys, rope_scaling, own),
            Family::Latent => glm::read(&mut keys, rope_scaling),
        };
        if keys.problems.is_empty() { Ok(spec) } else { Err(refused(keys.problems)) }
    }
}

/// Whether a `quantization_config` describes weights in fp8 with a factor for each block of 128 by 128. Which weights are
/// so, the files say.
fn is_fp8_in_blocks(value: &Value) -> bool {
    let is_or_absent = |key: &str, word: &str| value.get(key).is_none_or(|found| found.is_null() || found == word);
    value.get("quant_method").is_some_and(|method| method == "fp8")
        && value.get("weight_block_size") == Some(&serde_json::json!([128, 128]))
        && is_or_absent("activation_scheme", "dynamic")
        && is_or_absent("fmt", "e4m3")
        && is_or_absent("expert_dtype", "fp8")
}

/// What reads a family's config.
enum Family {
    /// Keys and values by head: a row of the table of differences.
    Grouped(&'static Differences),
    /// Attention over latents.
    Latent,
}

/// The family that the config names; else a problem.
fn find(keys: &mut ConfigReader<'_>) -> Option<Family> {
    // A wrapper names the family outside where the text model's own table does not.
    let Some(outside) = keys.value_here_or_outside("model_type") else {
        keys.problems.push(Problem::Missing { key: keys.name("model_type") });
        return None;
    };
    let found = keys.word("model_type", "");
    if found == glm::MODEL_TYPE {
        return Some(Family::Latent);
    }
    let wraps = |family: &Differences| {
        keys.value("model_type").is_none() && family.wrapper.is_some_and(|wrapper| outside == wrapper)
    };
    let mut families = FAMILIES.iter().copied();
    let family = families.find(|family| family.model_type == found || wraps(family)).map(Family::Grouped);
    if family.is_some() || !keys.problems.is_empty() {
        return family;
    }
    let key = keys.name("model_type");
    let known = model_types();
    let wrapped = FAMILIES.iter().find(|family| family.wrapper == Some(found)).map(|family| family.model_type);
    let nearest = wrapped.or_else(|| names::nearest(found, &known)).unwrap_or_default().to_owned();
    keys.problems.push(Problem::ModelType { key, found: found.to_owned(), nearest, known: known.join(", ") });
    None
}
