//! A checkpoint with adapters added to its weights, W + (alpha / rank) · B A, for programs that know no adapters.
//!
//! Every file of the model's folder is copied; of the weights only the bytes of adapted layers differ, since names, shapes and
//! dtypes stay. A sum is computed in float64 and rounded once to the dtype in which the weight is stored. Adapters that were
//! trained under another rotary scaling than the model's bring it with them, and config.json gets it.

mod error;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write as _};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tch::{Device, Kind, Tensor};

pub use self::error::Error;
use crate::checkpoint;
use crate::model::adapter_file::{self, CONFIG};
use crate::model::lora::Adapter;
use crate::model::shards::{Checkpoint, Place};
use crate::model::spec::Spec;
use crate::runtime::file_error::FileError;
use crate::runtime::units::{Bytes, as_dim, float, from_index};
use crate::tensor::bytes::{bytes_of, fill_from_bytes};
use crate::tensor::stored::kind_of;

/// What is merged, and where to.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// A folder with adapters in PEFT's format, a checkpoint, a run directory with a folder `adapter`, or its file `best` or
    /// `latest`, which names a checkpoint.
    pub adapter: &'a Path,
    /// The base model's folder; absent: what the adapters name.
    pub model: Option<&'a Path>,
    /// A folder that does not exist.
    pub destination: &'a Path,
}

/// What a merge made.
#[derive(Debug)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Summary {
    pub model: PathBuf,
    /// Weights that adapters were added to.
    pub layers: usize,
    pub files: usize,
    pub bytes: Bytes,
    /// What config.json has, where the run had another scaling than the model.
    pub rope_scaling: Option<Value>,
    /// Whether nothing tells what scaling the adapters were trained with: there is a bare folder of them.
    pub is_scaling_unknown: bool,
}

/// Merges adapters into a copy of the model's folder, which appears whole or not at all.
///
/// # Errors
/// When the destination exists, the adapters do not fit the model, adapted weights are in fp8, or a file cannot be read or
/// written.
pub fn merge(options: &Options) -> Result<Summary, Error> {
    let destination = options.destination;
    if destination.symlink_metadata().is_ok() {
        return Err(Error::Exists { destination: destination.to_owned() });
    }
    let adapter = adapter_folder(options.adapter)?;
    let model = match options.model {
        Some(model) => model.to_owned(),
        None => base_of(&adapter)?,
    };
    let spec = Spec::read(&model, None)?;
    let (shape, entries) = adapter_file::load(&adapter, &spec, None, Kind::Float, Device::Cpu)?;
    let checkpoint = Checkpoint::open(&model, &spec)?;
    let scale = shape.alpha / float(shape.rank);
    let adapted = adapted_places(&checkpoint, &entries)?;
    let parent = destination.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(parent).map_err(FileError::at(parent, "create the folder"))?;
    let failed = FileError::at(parent, "create a temporary folder in it");
    let temporary = tempfile::Builder::new().prefix(".merge-").tempdir_in(parent).map_err(&failed)?;
    let folder = temporary.path().join("new");
    fs::create_dir(&folder).map_err(&failed)?;
    let (mut files, mut bytes) = copy_others(&model, &folder, &checkpoint)?;
    let stored = if shape.rope_scaling.is_none() { stored_scaling(&adapter)? } else { None };
    let is_scaling_unknown = shape.rope_scaling.is_none() && stored.is_none();
    let rope_scaling = shape.rope_scaling.or(stored).filter(Value::is_object);
    if let Some(table) = &rope_scaling {
        let [before, after] = write_scaling(&model, &folder, table)?;
        bytes.0 = bytes.0 - before + after;
    }
    for (shard, places) in adapted {
        bytes.0 += write_shard(&checkpoint, shard, &places, scale, &folder)?;
        files += 1;
    }
    fs::rename(&folder, destination).map_err(FileError::at(destination, "rename the new folder to it"))?;
    Ok(Summary { model, layers: entries.len(), files, bytes, rope_scaling, is_scaling_unknown })
}

/// The rotary scaling in the configuration of the run whose folder `adapter` is, or of the checkpoint that it is: adapters of
/// earlier versions do not carry it. `null` where the model's was left; `None` where there is no configuration.
fn stored_scaling(adapter: &Path) -> Result<Option<Value>, Error> {
    let state = adapter.join("state.json");
    let failed = |file: &Path, problem: String| Error::Stored { file: file.to_owned(), problem };
    if state.is_file() {
        let text = fs::read_to_string(&state).map_err(FileError::at(&state, "read it"))?;
        let read: Value = serde_json::from_str(&text).map_err(|error| failed(&state, error.to_string()))?;
        return Ok(Some(read.pointer("/state/config/model/rope_scaling").cloned().unwrap_or_default()));
    }
    let resolved = adapter.join("../config.resolved.toml");
    if resolved.is_file() {
        let text = fs::read_to_string(&resolved).map_err(FileError::at(&resolved, "read it"))?;
        let read: toml::Table = text.parse().map_err(|error: toml::de::Error| failed(&resolved, error.to_string()))?;
        let table = read.get("model").and_then(|model| model.get("rope_scaling"));
        return Ok(Some(json!(table)));
    }
    Ok(None)
}

/// Keys of a scaling; whatever else stands beside them in its table is of other things, such as the axes of positions.
const SCALING_KEYS: [&str; 14] = [
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "high_freq_factor",
    "long_factor",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "rope_type",
    "short_factor",
    "truncate",
    "type",
];

/// Puts the rotary scaling of a run in the place of that in config.json, in the spelling that stands there, unless it is that.
/// Bytes of the file before and after.
fn write_scaling(model: &Path, folder: &Path, scaling: &Value) -> Result<[u64; 2], Error> {
    let trained = Spec::read(model, Some(scaling))?.canonical();
    let file = folder.join("config.json");
    let read = |source: io::Error| FileError::at(&file, "read it")(source);
    let text = fs::read_to_string(&file).map_err(read)?;
    let before = from_index(text.len());
    if Spec::read(model, None)?.canonical() == trained {
        return Ok([before, before]);
    }
    let mut config: Value = serde_json::from_str(&text).map_err(|error| read(error.into()))?;
    let inner = if config["text_config"].is_object() { &mut config["text_config"] } else { &mut config };
    let own: Map<String, Value> = scaling.as_object().cloned().unwrap_or_default();
    if let Some(found) = inner.get_mut("rope_parameters").and_then(Value::as_object_mut) {
        // Some families have a table for each kind of layers, and only the layers that see everything are stretched.
        let is_by_kind = found.get("full_attention").is_some_and(Value::is_object);
        let table =
            if is_by_kind { found.get_mut("full_attention").and_then(Value::as_object_mut) } else { Some(found) };
        if let Some(table) = table {
            replace_scaling(table, own);
        }
        if let Some(table) = inner.as_object_mut() {
            table.remove("rope_scaling");
        }
    } else {
        let mut table = inner.get("rope_scaling").and_then(Value::as_object).cloned().unwrap_or_default();
        replace_scaling(&mut table, own);
        inner["rope_scaling"] = Value::Object(table);
    }
    let text = format!("{config:#}\n");
    // A copy has the mode of its original, which may be write-protected.
    let written = fs::remove_file(&file).and_then(|()| fs::write(&file, &text));
    written.map_err(FileError::at(&file, "write it"))?;
    // What was written must be what the run has trained with.
    if Spec::read(folder, None)?.canonical() == trained {
        Ok([before, from_index(text.len())])
    } else {
        Err(Error::Scaling { file: model.join("config.json"), scaling: scaling.to_string() })
    }
}

/// Puts the keys of a scaling in the place of those in a table.
fn replace_scaling(table: &mut Map<String, Value>, scaling: Map<String, Value>) {
    table.retain(|key, _| !SCALING_KEYS.contains(&key.as_str()));
    table.extend(scaling);
}

/// The folder of adapters that `given` is, or has. A run directory has those of its last whole end, which must be its newest.
fn adapter_folder(given: &Path) -> Result<PathBuf, Error> {
    let given = checkpoint::folder_of(given)?;
    let inside = given.join("adapter");
    let text = |name: &str| fs::read_to_string(given.join(name)).unwrap_or_default();
    if given.join(CONFIG).is_file() || !inside.join(CONFIG).is_file() {
        let is_unfinished_run = !given.join(CONFIG).is_file() && !text("latest").is_empty();
        return if is_unfinished_run { Err(Error::NotEnded { run: given }) } else { Ok(given) };
    }
    let receipt: serde_json::Value = serde_json::from_str(&text("receipt.json")).unwrap_or_default();
    let latest = text("latest").trim().to_owned();
    let has_ended = receipt["stopped"] != true && receipt["steps"].as_u64().is_some_and(|steps| is_of(&latest, steps));
    if latest.is_empty() || has_ended {
        return Ok(inside);
    }
    Err(Error::NotNewest { adapter: inside, newest: given.join(latest) })
}

/// Whether `latest` names the checkpoint after `steps` updates.
fn is_of(latest: &str, steps: u64) -> bool {
    latest.ends_with(&format!("step_{steps}"))
}

/// The base model's folder, as the adapters name it.
fn base_of(adapter: &Path) -> Result<PathBuf, Error> {
    let file = adapter.join(CONFIG);
    let text = fs::read_to_string(&file).map_err(FileError::at(&file, "read it"))?;
    let config: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    let named = config["base_model_name_or_path"].as_str().unwrap_or_default().to_owned();
    if Path::new(&named).join("config.json").is_file() {
        return Ok(named.into());
    }
    Err(Error::NoBase { file, named })
}

/// Places of one shard that adapters are added to, in the order of their bytes.
type AdaptedPlaces<'a> = Vec<(Range<usize>, &'a Place, &'a Adapter)>;

/// The adapted places of every shard, those without any included.
fn adapted_places<'a>(
    checkpoint: &'a Checkpoint,
    entries: &'a [Adapter],
) -> Result<BTreeMap<usize, AdaptedPlaces<'a>>, Error> {
    let mut places: BTreeMap<usize, AdaptedPlaces> = (0..checkpoint.shards.len()).map(|at| (at, Vec::new())).collect();
    for adapter in entries {
        let name = format!("{}.weight", adapter.module);
        let Some(place) = checkpoint.places.get(&name) else { return Err(Error::NoWeight { name }) };
        if place.is_fp8() {
            return Err(Error::Fp8 { name });
        }
        places.entry(place.shard).or_default().push((checkpoint.span(place), place, adapter));
    }
    for places in places.values_mut() {
        places.sort_by_key(|(span, ..)| span.start);
    }
    Ok(places)
}

/// Copies what is no file of the model's weights; number and bytes of the files. Folders within are left out, and what other
/// runs have noted of the base: hidden files, and the mark of a conversion.
fn copy_others(model: &Path, folder: &Path, checkpoint: &Checkpoint) -> Result<(usize, Bytes), Error> {
    let weights: BTreeSet<&str> = checkpoint.shards.iter().map(|shard| shard.name.as_str()).collect();
    let (mut files, mut bytes) = (0, 0);
    let failed = FileError::at(model, "list it");
    for entry in fs::read_dir(model).map_err(&failed)? {
        let entry = entry.map_err(&failed)?;
        let (from, name) = (entry.path(), entry.file_name());
        let is_weights = name.to_str().is_some_and(|name| weights.contains(name) || is_other_weights(name));
        let is_note = name.to_str().is_some_and(|name| name.starts_with('.') || name == "conversion.json");
        if from.is_file() && !is_weights && !is_note {
            bytes += fs::copy(&from, folder.join(&name)).map_err(FileError::at(&from, "copy it"))?;
            files += 1;
        }
    }
    Ok((files, Bytes(bytes)))
}

/// Weights in other formats beside those that are read would not be those of the merged model.
fn is_other_weights(name: &str) -> bool {
    let extension = Path::new(name).extension().and_then(|extension| extension.to_str());
    matches!(extension, Some("safetensors" | "bin" | "pt" | "pth" | "gguf" | "h5" | "msgpack" | "onnx"))
        || name.ends_with(".bin.index.json")
}

/// Writes one file of weights; its bytes.
fn write_shard(
    checkpoint: &Checkpoint,
    shard: usize,
    places: &AdaptedPlaces,
    scale: f64,
    folder: &Path,
) -> Result<u64, Error> {
    let file = folder.join(&checkpoint.shards[shard].name);
    let io = FileError::at(&file, "write the weights");
    let whole = checkpoint.file_bytes(shard);
    let mut out = BufWriter::new(File::create(&file).map_err(&io)?);
    let mut written = 0;
    for (span, place, adapter) in places {
        out.write_all(&whole[written..span.start]).map_err(&io)?;
        out.write_all(&merged(checkpoint, place, adapter, scale)?).map_err(&io)?;
        written = span.end;
    }
    out.write_all(&whole[written..]).map_err(&io)?;
    let out = out.into_inner().map_err(|cause| io(cause.into_error()))?;
    out.sync_all().map_err(&io)?;
    Ok(from_index(whole.len()))
}

/// Bytes of W + scale · B A, in the dtype of W.
fn merged(checkpoint: &Checkpoint, place: &Place, adapter: &Adapter, scale: f64) -> Result<Vec<u8>, Error> {
    let name = || format!("{}.weight", adapter.module);
    let tensor_error = |source| Error::Tensor { name: name(), source };
    let Some(kind) = kind_of(place.dtype) else { return Err(Error::NoWeight { name: name() }) };
    let shape: Vec<i64> = place.shape.iter().map(|&size| as_dim(size)).collect();
    let mut weight = Tensor::empty(shape, (Kind::Double, Device::Cpu));
    fill_from_bytes(&mut weight, checkpoint.bytes(place), kind).map_err(tensor_error)?;
    let [a_ri, b_or] = adapter.pair().map(|x| x.detach().to_kind(Kind::Double));
    let _itself = weight.addmm_(&(b_or * scale), &a_ri);
    let rounded = weight.to_kind(kind);
    if rounded.isfinite().all().int64_value(&[]) == 0 {
        return Err(Error::NotFinite { name: name(), dtype: place.dtype.to_string() });
    }
    bytes_of(&rounded).map_err(tensor_error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scaling() -> Value {
        json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262_144})
    }

    /// A merged model of pictures and texts lost the axes of its positions.
    #[test]
    fn a_scaling_takes_the_place_of_its_own_keys_alone_also_where_the_file_is_write_protected() {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/shapes/qwen3.6-27b");
        let room = tempfile::tempdir().unwrap();
        let file = room.path().join("config.json");
        fs::copy(model.join("config.json"), &file).unwrap();
        let mut mode = fs::metadata(&file).unwrap().permissions();
        mode.set_readonly(true);
        fs::set_permissions(&file, mode).unwrap();
        let [before, after] = write_scaling(&model, room.path(), &scaling()).unwrap();
        assert_eq!(before, fs::metadata(model.join("config.json")).unwrap().len());
        assert_eq!(after, fs::metadata(&file).unwrap().len());
        let read = |file: &Path| serde_json::from_str::<Value>(&fs::read_to_string(file).unwrap()).unwrap();
        let table = |config: &Value| config["text_config"]["rope_parameters"].clone();
        let (old, new) = (table(&read(&model.join("config.json"))), table(&read(&file)));
        for key in ["mrope_section", "mrope_interleaved", "rope_theta", "partial_rotary_factor"] {
            assert!(!old[key].is_null() && old[key] == new[key], "{key}: {new}");
        }
        assert_eq!((&new["rope_type"], &new["factor"]), (&json!("yarn"), &json!(4.0)));
        // A model that has the scaling stays as it is.
        let text = fs::read_to_string(&file).unwrap();
        let copy = tempfile::tempdir().unwrap();
        fs::write(copy.path().join("config.json"), &text).unwrap();
        assert_eq!(write_scaling(room.path(), copy.path(), &scaling()).unwrap(), [after, after]);
        assert_eq!(fs::read_to_string(copy.path().join("config.json")).unwrap(), text);
    }

    #[test]
    fn the_other_spelling_keeps_what_is_no_scaling_too() {
        let mut table: Map<String, Value> =
            serde_json::from_str(r#"{"type": "mrope", "mrope_section": [16, 24, 24]}"#).unwrap();
        replace_scaling(&mut table, scaling().as_object().unwrap().clone());
        assert_eq!(table["mrope_section"], json!([16, 24, 24]));
        assert!(!table.contains_key("type") && table["rope_type"] == "yarn", "{table:?}");
    }

    #[test]
    fn adapters_without_a_scaling_have_that_of_their_run_or_checkpoint() {
        let room = tempfile::tempdir().unwrap();
        let adapter = room.path().join("adapter");
        fs::create_dir(&adapter).unwrap();
        assert_eq!(stored_scaling(&adapter).unwrap(), None, "a bare folder tells nothing");
        let resolved = room.path().join("config.resolved.toml");
        fs::write(&resolved, "[model]\npath = 'm'\n").unwrap();
        assert_eq!(stored_scaling(&adapter).unwrap(), Some(Value::Null));
        fs::write(&resolved, "[model.rope_scaling]\nrope_type = 'yarn'\nfactor = 4.0\n").unwrap();
        let table = json!({"rope_type": "yarn", "factor": 4.0});
        assert_eq!(stored_scaling(&adapter).unwrap(), Some(table.clone()));
        let state = json!({"state": {"config": {"model": {"rope_scaling": table}}}});
        fs::write(adapter.join("state.json"), state.to_string()).unwrap();
        assert_eq!(stored_scaling(&adapter).unwrap(), Some(table));
        fs::write(adapter.join("state.json"), "{").unwrap();
        assert!(matches!(stored_scaling(&adapter), Err(Error::Stored { .. })));
    }
}
