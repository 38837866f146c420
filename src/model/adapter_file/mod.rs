//! Adapters on disk in PEFT's format: `adapter_model.safetensors` (float32) and `adapter_config.json`.
//!
//! An adapter of rank r on a linear layer W is the pair A [r, inputs], B [outputs, r]: y = Wx + (alpha / r)·B·A·x. Both files
//! are written beside their final names, brought to the disk, and renamed, weights first: a reader sees a whole file or none.

mod error;
mod readers;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use safetensors::{SafeTensors, serialize_to_file};
use serde_json::{Map, Value, json};
use tch::{Device, Kind, Tensor};

pub use self::error::{CONFIG, Error, Problem, VALUES};
pub use self::readers::note as readers_note;
use super::lora::Adapter;
use super::problems::Problems;
use super::spec::{self, Linear, Spec};
use crate::runtime::reading;
use crate::runtime::units::{as_dim, from_dim, from_index};
use crate::tensor::bytes::{self, fill_from_bytes, map_file};
use crate::tensor::stored::{StoredTensor, kind_of};

/// Prefix of every name in the file: PEFT's wrapper around the model.
const NAME_PREFIX: &str = "base_model.model.";

/// What all adapters of a model have in common.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterShape {
    /// Rank of each pair.
    pub rank: u64,
    /// Numerator of the scale alpha / rank.
    pub alpha: f64,
    /// Projections that carry a pair, in the family's order.
    pub targets: Vec<String>,
    /// Where the base model came from, as the run names it.
    pub base_model: String,
    /// Rotary scaling that the run put in the place of the model's, with the keys of config.json. It stands in the metadata of
    /// the values, since readers refuse keys of the config that they do not know; [`load`] reads it, [`shape_of`] does not.
    pub rope_scaling: Option<Value>,
}

/// Name of the scaling in the metadata.
const ROPE_SCALING: &str = "rope_scaling";

/// Saves `entries` into `folder`, which is made if it is not there. Values are stored as float32.
///
/// # Errors
/// When a file cannot be written; what was begun is removed, and files of an earlier save stay as they were.
pub fn save(folder: &Path, shape: &AdapterShape, entries: &[Adapter]) -> Result<(), Error> {
    let mut views = Vec::with_capacity(2 * entries.len());
    for entry in entries {
        for (half, tensor) in [("lora_A", &entry.a_ri), ("lora_B", &entry.b_or)] {
            let name = format!("{NAME_PREFIX}{}.{half}.weight", entry.module);
            let value = StoredTensor::float32(tensor).map_err(|source| Error::Tensor { name: name.clone(), source })?;
            views.push((name, value));
        }
    }
    fs::create_dir_all(folder).map_err(|source| Error::Write { file: folder.to_owned(), source })?;
    let values = Begun::beside(folder, VALUES);
    serialize_to_file(views, Some(metadata(shape)), &values.partial)
        .map_err(|source| Error::WriteValues { file: values.target.clone(), source })?;
    let config = Begun::beside(folder, CONFIG);
    let text = format!("{:#}\n", config_of(shape));
    config.step(|partial| File::create(partial)?.write_all(text.as_bytes()))?;
    for file in [&values, &config] {
        file.step(|partial| File::open(partial)?.sync_all())?;
    }
    for file in [&values, &config] {
        file.step(|partial| fs::rename(partial, &file.target))?;
    }
    values.step(|_| File::open(folder)?.sync_all())
}

/// What stands in the header of the values besides their names. The map is written in its own order, which differs from map to
/// map; one in the order of its keys is taken, so that equal adapters are equal files.
#[expect(clippy::disallowed_types, reason = "the library takes no other, and its order is looked at")]
fn metadata(shape: &AdapterShape) -> std::collections::HashMap<String, String> {
    let scaling = shape.rope_scaling.as_ref().map(|table| (ROPE_SCALING.to_owned(), table.to_string()));
    loop {
        let format = ("format".to_owned(), "pt".to_owned());
        let map: std::collections::HashMap<String, String> = [format].into_iter().chain(scaling.clone()).collect();
        if map.keys().is_sorted() {
            return map;
        }
    }
}

/// Loads the adapters in `folder` for the model `spec`, as `kind` on `device`, in canonical order.
///
/// `wanted` is what the run asks for: rank, alpha and targets must then be the same (the base model's name is not compared,
/// since it may have been moved).
///
/// # Errors
/// When a file is absent or damaged, or anything does not match: everything wrong in one message.
pub fn load(
    folder: &Path,
    spec: &Spec,
    wanted: Option<&AdapterShape>,
    kind: Kind,
    device: Device,
) -> Result<(AdapterShape, Vec<Adapter>), Error> {
    load_where(|_| true, folder, spec, wanted, kind, device)
}

/// Rank, alpha and targets of the adapters in `folder`, for the model `spec`.
///
/// # Errors
/// When the config is absent, is no plain LoRA, or does not fit the model.
pub fn shape_of(folder: &Path, spec: &Spec) -> Result<AdapterShape, Error> {
    let mut problems = Vec::new();
    match read_config(folder, spec, &mut problems)? {
        Some((shape, _)) if problems.is_empty() => Ok(shape),
        _ => Err(Error::Refused { folder: folder.to_owned(), problems: Problems(problems) }),
    }
}

/// As [`load`], the adapters of the linear layers for which `holds`; the whole folder is checked, but values that are not loaded.
///
/// # Errors
/// As [`load`].
pub fn load_where(
    holds: impl Fn(&Linear) -> bool,
    folder: &Path,
    spec: &Spec,
    wanted: Option<&AdapterShape>,
    kind: Kind,
    device: Device,
) -> Result<(AdapterShape, Vec<Adapter>), Error> {
    let refused = |problems| Error::Refused { folder: folder.to_owned(), problems: Problems(problems) };
    let mut problems = Vec::new();
    let read = read_config(folder, spec, &mut problems)?;
    let Some((mut shape, linears)) = read.filter(|_| problems.is_empty()) else { return Err(refused(problems)) };
    compare_with_run(&shape, wanted, &mut problems);
    let file = folder.join(VALUES);
    let map = map_file(&file).map_err(|source| Error::File { file: file.clone(), source })?;
    let broken = |source| Error::Values { file: file.clone(), source };
    let (_, header) = SafeTensors::read_metadata(&map).map_err(broken)?;
    let scaling = header.metadata().as_ref().and_then(|metadata| metadata.get(ROPE_SCALING));
    if let Some(found) = scaling {
        shape.rope_scaling = serde_json::from_str(found).ok().filter(Value::is_object);
        if shape.rope_scaling.is_none() {
            problems.push(Problem::Scaling { found: found.clone() });
        }
    }
    let tensors = SafeTensors::deserialize(&map).map_err(broken)?;
    compare_tensors(&tensors.tensors().into_iter().collect(), &shape, &linears, &mut problems);
    if !problems.is_empty() {
        return Err(refused(problems));
    }
    let mut entries = Vec::with_capacity(linears.len());
    for linear in linears.into_iter().filter(holds) {
        let [(a_name, a_shape), (b_name, b_shape)] = pair(&linear, shape.rank);
        let mut read = |name: String, size: [u64; 2]| {
            let filled = read_tensor(&tensors, &name, size, kind, device);
            let tensor = filled.map_err(|source| Error::Tensor { name: name.clone(), source })?;
            let finite = tensor.isfinite().sum(Kind::Int64).int64_value(&[]);
            let (elements, finite) = (from_index(tensor.numel()), from_dim(finite));
            if finite != elements {
                problems.push(Problem::NotFinite { name, count: elements - finite, elements });
            }
            Ok(tensor)
        };
        let (a_ri, b_or) = (read(a_name, a_shape)?, read(b_name, b_shape)?);
        entries.push(Adapter { module: linear.module, a_ri, b_or });
    }
    if problems.is_empty() { Ok((shape, entries)) } else { Err(refused(problems)) }
}

/// A file being written beside its final name; removed again unless it was renamed.
struct Begun {
    partial: PathBuf,
    target: PathBuf,
}

impl Begun {
    fn beside(folder: &Path, name: &str) -> Begun {
        Begun { partial: folder.join(format!(".{name}.partial")), target: folder.join(name) }
    }

    fn step(&self, action: impl FnOnce(&Path) -> io::Result<()>) -> Result<(), Error> {
        action(&self.partial).map_err(|source| Error::Write { file: self.target.clone(), source })
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        // After a rename nothing is left to remove, and a failed removal changes nothing about the failure that led here.
        let _ = fs::remove_file(&self.partial);
    }
}

/// PEFT's config of plain LoRA, with the keys of its other variants switched off.
fn config_of(shape: &AdapterShape) -> Value {
    // PEFT states alpha as a whole number where it is one.
    let alpha =
        if shape.alpha.fract() == 0.0 { json!(format!("{:.0}", shape.alpha).parse::<i64>().ok()) } else { Value::Null };
    let alpha = if alpha.is_null() { json!(shape.alpha) } else { alpha };
    json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": shape.base_model,
        "r": shape.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": shape.targets,
        "bias": "none",
        "fan_in_fan_out": false,
        "init_lora_weights": true,
        "inference_mode": true,
        "layers_pattern": null,
        "layers_to_transform": null,
        "modules_to_save": null,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_dora": false,
        "use_rslora": false,
    })
}

/// Reads the config; `None` when a problem leaves rank, alpha or targets unknown.
fn read_config(
    folder: &Path,
    spec: &Spec,
    problems: &mut Vec<Problem>,
) -> Result<Option<(AdapterShape, Vec<Linear>)>, Error> {
    let file = folder.join(CONFIG);
    let text = reading::text(&file).map_err(|source| Error::File { file: file.clone(), source })?;
    let config: Map<String, Value> = serde_json::from_str(&text).map_err(|source| Error::NotJson { file, source })?;
    refuse_variants(&config, problems);
    let mut refuse = |key: &str, wanted: &str| problems.push(key_problem(&config, key, wanted));
    let rank = config.get("r").and_then(Value::as_u64).filter(|rank| (1..1 << 31).contains(rank));
    if rank.is_none() {
        refuse("r", "a rank of 1 or more");
    }
    let alpha = config.get("lora_alpha").and_then(Value::as_f64).filter(|alpha| alpha.is_finite());
    if alpha.is_none() {
        refuse("lora_alpha", "a finite number");
    }
    let linears = match read_targets(config.get("target_modules"), spec) {
        Ok(linears) => linears,
        Err(wanted) => {
            refuse("target_modules", &wanted);
            return Ok(None);
        }
    };
    let (Some(rank), Some(alpha)) = (rank, alpha) else { return Ok(None) };
    let base_model = config.get("base_model_name_or_path").and_then(Value::as_str).unwrap_or_default().to_owned();
    let in_order =
        spec.projections().into_iter().filter(|name| linears.iter().any(|linear| linear.projection == *name));
    let targets = in_order.map(str::to_owned).collect();
    Ok(Some((AdapterShape { rank, alpha, targets, base_model, rope_scaling: None }, linears)))
}

fn key_problem(config: &Map<String, Value>, key: &str, wanted: &str) -> Problem {
    let found = config.get(key).map_or_else(|| "absent".to_owned(), Value::to_string);
    Problem::Key { key: key.to_owned(), found, wanted: wanted.to_owned() }
}

/// Refuses what makes the file's pairs mean something other than y = Wx + (alpha / r)·B·A·x on the model's own W.
fn refuse_variants(config: &Map<String, Value>, problems: &mut Vec<Problem>) {
    /// Keys of variants, besides every `use_…` and `…_config`.
    const VARIANT_KEYS: [&str; 11] = [
        "fan_in_fan_out",
        "lora_bias",
        "rank_pattern",
        "alpha_pattern",
        "modules_to_save",
        "layers_to_transform",
        "layer_replication",
        "exclude_modules",
        "target_parameters",
        "trainable_token_indices",
        "alora_invocation_tokens",
    ];
    let mut refuse = |key: &str, wanted: &str| problems.push(key_problem(config, key, wanted));
    if config.get("peft_type").and_then(Value::as_str) != Some("LORA") {
        refuse("peft_type", "\"LORA\"");
    }
    if config.get("bias").is_some_and(|bias| bias != "none") {
        refuse("bias", "\"none\"");
    }
    // Other starts (PiSSA, OLoRA, LoftQ, …) change W itself, and the pair is relative to the changed one.
    let start = config.get("init_lora_weights").unwrap_or(&Value::Null);
    if !(start.is_null() || start.is_boolean() || start == "gaussian") {
        refuse("init_lora_weights", "true, false or \"gaussian\": other starts change the model's own weights");
    }
    for (key, value) in config {
        let is_variant = VARIANT_KEYS.contains(&key.as_str()) || key.starts_with("use_") || key.ends_with("_config");
        let is_off = match value {
            Value::Null | Value::Bool(false) => true,
            Value::Object(table) => table.is_empty(),
            Value::Array(list) => list.is_empty(),
            _ => false,
        };
        if is_variant && !is_off {
            refuse(key, "absent or off: plain LoRA on whole linear layers is computed");
        }
    }
}

/// The linear layers that the config's targets name, or what the value must be.
fn read_targets(value: Option<&Value>, spec: &Spec) -> Result<Vec<Linear>, String> {
    let listed = value.and_then(Value::as_array);
    let names: Option<Vec<String>> =
        listed.and_then(|list| list.iter().map(|name| name.as_str().map(str::to_owned)).collect());
    let names = names.ok_or_else(|| "a list of projection names".to_owned())?;
    spec.adapted(Some(&names)).map_err(|error| match error {
        spec::Error::Target { known, .. } | spec::Error::NoTarget { known, .. } => format!("a list out of {known}"),
        other => other.to_string(),
    })
}

fn compare_with_run(found: &AdapterShape, wanted: Option<&AdapterShape>, problems: &mut Vec<Problem>) {
    let Some(wanted) = wanted else { return };
    let mut differ = |key: &str, found: String, wanted: String| {
        if found != wanted {
            let wanted = format!("{wanted}, as this run's [lora] asks");
            problems.push(Problem::Key { key: key.to_owned(), found, wanted });
        }
    };
    differ("r", found.rank.to_string(), wanted.rank.to_string());
    differ("lora_alpha", found.alpha.to_string(), wanted.alpha.to_string());
    let sorted = |names: &[String]| {
        let mut names = names.to_vec();
        names.sort();
        names.join(", ")
    };
    differ("target_modules", sorted(&found.targets), sorted(&wanted.targets));
}

/// Names in the file and shapes of a linear layer's A and B.
fn pair(linear: &Linear, rank: u64) -> [(String, [u64; 2]); 2] {
    [("lora_A", [rank, linear.inputs]), ("lora_B", [linear.outputs, rank])]
        .map(|(half, shape)| (format!("{NAME_PREFIX}{}.{half}.weight", linear.module), shape))
}

fn compare_tensors(
    found: &BTreeMap<String, TensorView<'_>>,
    shape: &AdapterShape,
    linears: &[Linear],
    problems: &mut Vec<Problem>,
) {
    let expected: BTreeMap<String, [u64; 2]> = linears.iter().flat_map(|linear| pair(linear, shape.rank)).collect();
    for (name, wanted) in &expected {
        if !found.contains_key(name) {
            problems.push(Problem::Missing { name: name.clone(), shape: *wanted });
        }
    }
    for (name, view) in found {
        let found: Vec<u64> = view.shape().iter().map(|size| from_index(*size)).collect();
        let name = name.clone();
        match expected.get(&name) {
            None => problems.push(Problem::Extra { name, shape: found }),
            Some(wanted) if found != wanted => problems.push(Problem::Shape { name, found, wanted: *wanted }),
            Some(_) if kind_of(view.dtype()).is_none() => {
                problems.push(Problem::Dtype { name, dtype: view.dtype().to_string() });
            }
            Some(_) => {}
        }
    }
}

fn read_tensor(
    tensors: &SafeTensors<'_>,
    name: &str,
    shape: [u64; 2],
    kind: Kind,
    device: Device,
) -> Result<Tensor, bytes::Error> {
    let view = tensors.tensor(name).expect("presence was checked");
    let source_kind = kind_of(view.dtype()).expect("dtypes were checked");
    let mut tensor = Tensor::f_empty(shape.map(as_dim), (kind, device))?;
    fill_from_bytes(&mut tensor, view.data(), source_kind)?;
    Ok(tensor)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(rope_scaling: Option<Value>) -> AdapterShape {
        let targets = vec!["q_proj".to_owned()];
        AdapterShape { rank: 2, alpha: 4.0, targets, base_model: "some".to_owned(), rope_scaling }
    }

    /// The header had its two entries now in one order, now in the other.
    #[test]
    fn equal_adapters_are_equal_files() {
        let scaling = shape(Some(json!({"rope_type": "yarn", "factor": 4.0})));
        let bytes = || {
            let room = tempfile::tempdir().unwrap();
            save(room.path(), &scaling, &[]).unwrap();
            fs::read(room.path().join(VALUES)).unwrap()
        };
        let first = bytes();
        assert!((0..16).all(|_| bytes() == first));
    }

    #[test]
    fn a_scaling_that_is_no_table_is_refused_and_not_forgotten() {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/shapes/qwen3-8b");
        let spec = Spec::read(&model, None).unwrap();
        let refusal = |scaling: Value| {
            let room = tempfile::tempdir().unwrap();
            save(room.path(), &shape(Some(scaling)), &[]).unwrap();
            load(room.path(), &spec, None, Kind::Float, Device::Cpu).unwrap_err().to_string()
        };
        let words = "`rope_scaling` in its metadata is \"yarn\"";
        let said = refusal(json!("yarn"));
        assert!(said.contains(words), "{said}");
        assert!(!refusal(json!({"rope_type": "yarn"})).contains("in its metadata"));
    }
}
