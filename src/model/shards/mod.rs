//! The files of a checkpoint: which tensors stand where, checked against what the spec expects, before anything is loaded.

mod error;
mod experts;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensorError, SafeTensors};
use serde_json::{Map, Value};

pub use self::error::{Damage, Error, INDEX, Problem, SINGLE};
use super::problems::Problems;
use super::spec::{EMBEDDING, Expected, HEAD, Spec};
use crate::runtime::reading;
use crate::runtime::units::{as_index, from_index};
use crate::tensor::bytes::map_file;
use crate::tensor::stored::kind_of;

/// Prefixes of the text model's tensors in composite checkpoints, and what they stand for.
const COMPOSITE_PREFIXES: [(&str, &str); 3] =
    [("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.lm_head.", "lm_head.")];

/// Prefixes of tensors that published checkpoints hold and a text model does not read: vision, multi-token prediction.
const FOREIGN_PREFIXES: [&str; 6] = [
    "model.visual.",
    "vision_tower.",
    "model.vision_tower.",
    "multi_modal_projector.",
    "model.multi_modal_projector.",
    "mtp.",
];

/// What is added to the name of a weight in fp8 for that of its factors.
const SCALES: &str = "_scale_inv";

/// Rows and columns of a block of fp8 weights.
const BLOCK: u64 = 128;

/// Name of the factors of the weight `name`, where that is in fp8.
#[must_use]
pub fn scales_of(name: &str) -> String {
    format!("{name}{SCALES}")
}

/// Name of the weight whose factors `name` are, if they are any.
#[must_use]
pub fn scaled_by(name: &str) -> Option<&str> {
    name.strip_suffix(SCALES)
}

/// One mapped file.
#[derive(Debug)]
pub struct Shard {
    /// The whole path.
    pub file: PathBuf,
    /// The file name, for messages.
    pub name: String,
    /// The mapped bytes, until they are released.
    map: Option<Mmap>,
    /// Where the tensors' bytes begin.
    data_start: usize,
}

/// Where a tensor's bytes lie, and what they are.
#[derive(Clone, Debug)]
pub struct Place {
    /// The shard's number.
    pub shard: usize,
    /// As the file states it.
    pub shape: Vec<u64>,
    /// The dtype, as the file names it.
    pub dtype: Dtype,
    /// First byte, and the one after the last, within the shard's data.
    range: (usize, usize),
}

/// The mapped files of a checkpoint and the place of each tensor of the model, by its stripped name.
#[derive(Debug)]
pub struct Checkpoint {
    /// All files, in the order of their names.
    pub shards: Vec<Shard>,
    /// The tensors; a tied head may be among them.
    pub places: BTreeMap<String, Place>,
    /// Tensors that the files hold and nothing reads, counted by what they belong to.
    unread: BTreeMap<String, u64>,
    /// File and name of the tensors of each layer beyond the last one that the config asks for.
    beyond: BTreeMap<usize, Vec<(String, String)>>,
    /// Files of weights beside those that are read.
    other_files: Vec<String>,
}

impl Place {
    /// Whether the values are fp8, which factors of their blocks belong to.
    #[must_use]
    pub fn is_fp8(&self) -> bool {
        self.dtype == Dtype::F8_E4M3
    }
}

impl Checkpoint {
    /// Maps the files in `folder` and checks every tensor's presence, shape and dtype against `spec`.
    ///
    /// # Errors
    /// When a file is absent or damaged, or tensors do not match: everything wrong in one message.
    pub fn open(folder: &Path, spec: &Spec) -> Result<Checkpoint, Error> {
        let refused = |problems| Error::Refused { folder: folder.to_owned(), problems: Problems(problems) };
        let mut problems = Vec::new();
        let listing = Listing::read(folder, &mut problems)?;
        listing.check_files(folder, &mut problems);
        if !problems.is_empty() {
            return Err(refused(problems));
        }
        let mut checkpoint = Checkpoint {
            shards: Vec::new(),
            places: BTreeMap::new(),
            unread: BTreeMap::new(),
            beyond: BTreeMap::new(),
            other_files: other_files(folder, &listing.files),
        };
        for name in &listing.files {
            checkpoint.add_shard(folder, name, &listing, spec, &mut problems)?;
        }
        checkpoint.judge_layers_beyond(spec, &mut problems);
        checkpoint.split_experts(spec, &mut problems);
        checkpoint.compare(&spec.tensors(), &mut problems);
        checkpoint.judge_mixed_experts(spec, &mut problems);
        if problems.is_empty() { Ok(checkpoint) } else { Err(refused(problems)) }
    }

    /// The bytes of a tensor, where they lie in the map.
    ///
    /// # Panics
    /// When the shard has been released.
    #[must_use]
    pub fn bytes(&self, place: &Place) -> &[u8] {
        let shard = &self.shards[place.shard];
        let map = shard.map.as_ref().expect("a shard is released only after its tensors are read");
        &map[shard.data_start + place.range.0..shard.data_start + place.range.1]
    }

    /// Where a tensor's bytes lie in its file.
    #[must_use]
    pub fn span(&self, place: &Place) -> Range<usize> {
        let start = self.shards[place.shard].data_start;
        start + place.range.0..start + place.range.1
    }

    /// All bytes of a shard's file.
    ///
    /// # Panics
    /// When the shard has been released.
    #[must_use]
    pub fn file_bytes(&self, shard: usize) -> &[u8] {
        self.shards[shard].map.as_ref().expect("a shard is released only after its tensors are read")
    }

    /// Names and places of the tensors of one shard, in the order of their bytes.
    #[must_use]
    pub fn in_file_order(&self, shard: usize) -> Vec<(&str, &Place)> {
        let here = self.places.iter().filter(|(_, place)| place.shard == shard);
        let mut places: Vec<(&str, &Place)> = here.map(|(name, place)| (name.as_str(), place)).collect();
        places.sort_by_key(|(_, place)| place.range);
        places
    }

    /// Gives a shard's map back to the system; the bytes of its tensors can no longer be read.
    pub fn release(&mut self, shard: usize) {
        self.shards[shard].map = None;
    }

    /// What the folder holds and the run does not read: for the user, a sentence each.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if !self.unread.is_empty() {
            let parts: Vec<String> = self.unread.iter().map(|(part, count)| format!("{part} ({count})")).collect();
            notes.push(format!("tensors of the checkpoint that are not read: {}", parts.join(", ")));
        }
        if let Some(first) = self.other_files.first() {
            let count = self.other_files.len();
            notes.push(format!(
                "files of weights in the model's folder that are not read: {count}, the first is {first}"
            ));
        }
        notes
    }

    fn add_shard(
        &mut self,
        folder: &Path,
        name: &str,
        listing: &Listing,
        spec: &Spec,
        problems: &mut Vec<Problem>,
    ) -> Result<(), Error> {
        let file = folder.join(name);
        let map = match map_file(&file) {
            Ok(map) => map,
            Err(source) => return Err(Error::Unreadable { file, source }),
        };
        let (header_bytes, metadata) = match SafeTensors::read_metadata(&map) {
            Ok(read) => read,
            Err(error) => return Err(Error::Damaged { file, damage: explain(&map, error) }),
        };
        let tensors = metadata.tensors();
        for (tensor, _) in
            listing.index.iter().filter(|(tensor, shard)| *shard == name && !tensors.contains_key(*tensor))
        {
            problems.push(Problem::Misplaced { file: name.to_owned(), name: tensor.clone() });
        }
        let number = self.shards.len();
        // The names come in the order of a hash map; sorted, the messages are the same on every run.
        for (tensor, info) in tensors.into_iter().collect::<BTreeMap<_, _>>() {
            let stripped = strip(&tensor);
            if let Some(part) = foreign_part(&stripped) {
                *self.unread.entry(format!("{part}*")).or_default() += 1;
                continue;
            }
            if is_rotary_buffer(&stripped) {
                continue;
            }
            if let Some(layer) = layer_of(&stripped).filter(|layer| *layer >= spec.layers) {
                self.beyond.entry(layer).or_default().push((name.to_owned(), stripped));
                continue;
            }
            if index_layer_of(&stripped).is_some_and(|layer| borrows_index(spec, layer)) {
                *self.unread.entry("indexers of layers that use another layer's choice".to_owned()).or_default() += 1;
                continue;
            }
            let shape = info.shape.iter().map(|size| from_index(*size)).collect();
            let place = Place { shard: number, shape, dtype: info.dtype, range: info.data_offsets };
            if let Some(first) = self.places.insert(stripped, place) {
                let first = self.shards.get(first.shard).map_or(name, |shard| &shard.name).to_owned();
                problems.push(Problem::Twice { name: tensor, first, second: name.to_owned() });
            }
        }
        self.shards.push(Shard { file, name: name.to_owned(), map: Some(map), data_start: header_bytes + 8 });
        Ok(())
    }

    /// Layers beyond the last that the config asks for. Some families keep their multi-token prediction there, which a text
    /// model does not read; any other layer is one that the config leaves out.
    fn judge_layers_beyond(&mut self, spec: &Spec, problems: &mut Vec<Problem>) {
        let is_decoder = |names: &&Vec<(String, String)>| !names.iter().any(|(_, name)| is_of_prediction(name));
        let first = self.beyond.values().find(is_decoder).and_then(|names| names.first());
        let found = self.beyond.keys().next_back().map_or(0, |last| last + 1);
        if let Some((file, first)) = first {
            let (file, first) = (file.clone(), first.clone());
            problems.push(Problem::MoreLayers { file, layers: spec.layers, found, first });
        } else if !self.beyond.is_empty() {
            let count = self.beyond.values().map(|names| from_index(names.len())).sum();
            self.unread.insert("layers of multi-token prediction".to_owned(), count);
        }
    }

    /// Compares what is there with what is expected. A tied head may be present (its values are compared on loading).
    fn compare(&self, expected: &[Expected], problems: &mut Vec<Problem>) {
        let mut known: BTreeMap<String, Vec<u64>> =
            expected.iter().map(|tensor| (tensor.name.clone(), tensor.shape.clone())).collect();
        known.extend(self.expected_scales(expected, problems));
        let mut index_lacks: BTreeMap<usize, Vec<String>> = BTreeMap::new();
        for tensor in expected {
            if self.places.contains_key(&tensor.name) {
                continue;
            }
            if let Some(layer) = index_layer_of(&tensor.name) {
                index_lacks.entry(layer).or_default().push(tensor.name.clone());
            } else {
                let (name, shape) = (tensor.name.clone(), tensor.shape.clone());
                let is_head = name == HEAD;
                problems.push(if is_head { Problem::NoHead { shape } } else { Problem::Missing { name, shape } });
            }
        }
        problems
            .extend(index_lacks.into_iter().map(|(layer, names)| Problem::NoIndex { layer, names: names.join(", ") }));
        if let Some(shape) = known.get(EMBEDDING).cloned() {
            known.insert(HEAD.to_owned(), shape);
        }
        for (name, place) in &self.places {
            let (name, file) = (name.clone(), self.shards[place.shard].name.clone());
            let found = place.shape.clone();
            match known.get(&name) {
                None => problems.push(Problem::Extra { file, name, shape: found }),
                Some(wanted) if *wanted != found => {
                    problems.push(Problem::Shape { file, name, found, wanted: wanted.clone() });
                }
                Some(_) if !is_read(&name, place) => {
                    problems.push(Problem::Dtype { file, name, dtype: place.dtype.to_string() });
                }
                Some(_) => {}
            }
        }
    }

    /// Names and shapes of the factors that belong to weights in fp8; those that are absent are a problem of the weight.
    fn expected_scales(&self, expected: &[Expected], problems: &mut Vec<Problem>) -> BTreeMap<String, Vec<u64>> {
        let mut scales = BTreeMap::new();
        for tensor in expected {
            let Some(place) = self.places.get(&tensor.name).filter(|place| place.is_fp8()) else { continue };
            let [rows, columns] = tensor.shape[..] else { continue };
            let (name, shape) = (scales_of(&tensor.name), vec![rows.div_ceil(BLOCK), columns.div_ceil(BLOCK)]);
            if !self.places.contains_key(&name) {
                let (file, weight, shape) = (self.shards[place.shard].name.clone(), tensor.name.clone(), shape.clone());
                problems.push(Problem::NoScales { file, weight, scales: name.clone(), shape });
            }
            scales.insert(name, shape);
        }
        scales
    }
}

/// Whether values of the tensor's dtype are read: factors are float32, only matrices are in fp8.
fn is_read(name: &str, place: &Place) -> bool {
    if scaled_by(name).is_some() {
        return matches!(place.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16);
    }
    kind_of(place.dtype).is_some() || (place.is_fp8() && place.shape.len() == 2)
}

/// Which files a checkpoint consists of.
struct Listing {
    files: BTreeSet<String>,
    /// Tensor name to file name; empty for a checkpoint in one piece.
    index: BTreeMap<String, String>,
}

impl Listing {
    fn read(folder: &Path, problems: &mut Vec<Problem>) -> Result<Listing, Error> {
        let (single, file) = (folder.join(SINGLE).is_file(), folder.join(INDEX));
        if !file.is_file() {
            if single {
                return Ok(Listing { files: BTreeSet::from([SINGLE.to_owned()]), index: BTreeMap::new() });
            }
            return Err(Error::NoWeights { folder: folder.to_owned(), hint: hint(folder) });
        }
        let text = match reading::text(&file) {
            Ok(text) => text,
            Err(source) => return Err(Error::Unreadable { file, source }),
        };
        let content: Map<String, Value> = match serde_json::from_str(&text) {
            Ok(content) => content,
            Err(error) => return Err(Error::Index { file, reason: error.to_string() }),
        };
        let Some(map) = content.get("weight_map").and_then(Value::as_object).filter(|map| !map.is_empty()) else {
            return Err(Error::Index { file, reason: "it has no `weight_map` with entries".to_owned() });
        };
        let mut index = BTreeMap::new();
        for (tensor, place) in map {
            match place.as_str().filter(|name| Path::new(name).file_name().is_some_and(|plain| plain == *name)) {
                Some(name) => {
                    index.insert(tensor.clone(), name.to_owned());
                }
                None => problems.push(Problem::Place { name: tensor.clone(), place: place.to_string() }),
            }
        }
        let files: BTreeSet<String> = index.values().cloned().collect();
        // An index may place every tensor in the one file. Otherwise there are two checkpoints in one folder.
        match files.iter().find(|name| *name != SINGLE) {
            Some(first) if single && !files.contains(SINGLE) => {
                let (shards, first) = (files.len(), first.clone());
                Err(Error::TwoCheckpoints { folder: folder.to_owned(), shards, first })
            }
            _ => Ok(Listing { files, index }),
        }
    }

    fn check_files(&self, folder: &Path, problems: &mut Vec<Problem>) {
        for file in self.files.iter().filter(|file| !folder.join(file).is_file()) {
            let mut placed = self.index.iter().filter(|(_, place)| *place == file).map(|(tensor, _)| tensor);
            let first = placed.next().cloned().unwrap_or_default();
            problems.push(Problem::AbsentShard { file: file.clone(), tensors: placed.count() + 1, first });
        }
    }
}

/// What stands in a folder without safetensors, and what to do about it.
fn hint(folder: &Path) -> &'static str {
    if !folder.is_dir() {
        return "; the path is no folder";
    }
    let names: Vec<String> = fs::read_dir(folder)
        .map(|entries| entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
        .unwrap_or_default();
    if names.iter().any(|name| name.starts_with("pytorch_model")) {
        "; the folder holds pytorch_model files, save the model again as safetensors"
    } else if names.iter().any(|name| Path::new(name).extension().is_some_and(|extension| extension == "gguf")) {
        "; the folder holds a GGUF file, `longstraw convert` makes a checkpoint of it"
    } else {
        ""
    }
}

/// The name without the prefix of composite models.
fn strip(name: &str) -> String {
    let plain = |(composite, plain): &(&str, &str)| Some(format!("{plain}{}", name.strip_prefix(composite)?));
    COMPOSITE_PREFIXES.iter().find_map(plain).unwrap_or_else(|| name.to_owned())
}

/// The part of a composite model that a tensor belongs to, if a text model does not read that part.
fn foreign_part(name: &str) -> Option<&'static str> {
    FOREIGN_PREFIXES.iter().find(|prefix| name.starts_with(**prefix)).copied()
}

/// Rotary frequencies in the file; they follow from the config, and older checkpoints store them.
fn is_rotary_buffer(name: &str) -> bool {
    name.ends_with(".rotary_emb.inv_freq")
}

fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("model.layers.")?.split('.').next()?.parse().ok()
}

/// The layer whose choice of keys a tensor serves.
fn index_layer_of(name: &str) -> Option<usize> {
    layer_of(name).filter(|_| name.split('.').skip(3).take(2).eq(["self_attn", "indexer"]))
}

/// Whether the layer takes its keys as another layer has chosen them.
fn borrows_index(spec: &Spec, layer: usize) -> bool {
    spec.latent.as_ref().is_some_and(|latent| latent.index.owners.get(layer) == Some(&false))
}

/// Whether a tensor stands in layers of multi-token prediction only.
fn is_of_prediction(name: &str) -> bool {
    let parts = ["enorm", "hnorm", "eh_proj", "shared_head", "embed_tokens"];
    name.split('.').skip(3).any(|part| parts.contains(&part))
}

/// Files of weights in the folder that are not among `read`, sorted by name.
fn other_files(folder: &Path, read: &BTreeSet<String>) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut others: Vec<String> = names
        .filter(|name| name.starts_with("model") && name.ends_with(".safetensors") && !read.contains(name))
        .collect();
    others.sort();
    others
}

/// Says with numbers what the header's reader only names.
fn explain(map: &[u8], error: SafeTensorError) -> Damage {
    let found = from_index(map.len());
    let Some((length, rest)) = map.split_first_chunk::<8>() else { return Damage::NoHeader { found } };
    let header_bytes = u64::from_le_bytes(*length);
    if header_bytes > from_index(rest.len()) {
        return Damage::HeaderBeyondEnd { wanted: header_bytes.saturating_add(8), found };
    }
    let header = rest.get(..as_index(header_bytes)).unwrap_or_default();
    let Ok(tensors) = serde_json::from_slice::<Map<String, Value>>(header) else { return Damage::Header(error) };
    let ends = tensors.values().filter_map(|info| info.get("data_offsets")?.get(1)?.as_u64());
    let wanted = ends.max().unwrap_or(0).saturating_add(8).saturating_add(header_bytes);
    if wanted == found { Damage::Header(error) } else { Damage::Length { wanted, found } }
}
