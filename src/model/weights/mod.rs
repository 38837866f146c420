//! A model's tensors: loaded from a checkpoint, or random for measurements.
//!
//! Loading has three steps, so that the ranks of a machine can share the digests of the bytes: [`Opening`] maps and checks
//! the files, [`Loading`] holds the tensors and the digests that this rank has made, [`Weights`] know their digest.
//!
//! Each tensor is created once, in the target dtype on the target device, and filled straight from the mapped file; the
//! map of a file is dropped as soon as its tensors are filled. So host memory holds the model once, besides pages of the
//! file that the system can take back at any time.

mod blocks;
mod error;
mod experts;
mod loader;
mod random;
mod recent;
mod share;
mod whole;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use tch::{Device, Kind, Tensor};

use self::blocks::Value;
use self::error::failed;
pub use self::error::{AllZero, Error, NotFinite};
use self::experts::{Held, has_sigmoid_router, joined, kind_of_tensor};
use self::loader::Loader;
use self::random::fill_random;
use self::recent::Recent;
pub use self::share::{ExpertShare, Form, Share};
use super::digests::{self, TensorDigests};
use super::shards::{Checkpoint, Place};
use super::spec::{EMBEDDING, Expected, HEAD, Spec};
use crate::runtime::digest::{hex, sha256_hex};
use crate::runtime::file_state::FileState;
use crate::runtime::random::split_mix;
use crate::runtime::units::{Bytes, from_index};

/// Digests of smaller files are not kept: to read the file again takes less than a moment.
pub const KEPT_FILE_BYTES_MIN: u64 = 64 << 20;

/// What to do with weights that are all zero.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(missing_docs, reason = "the names say what each variant does")]
pub enum ZeroWeights {
    Refuse,
    Allow,
}

/// A checkpoint whose files are mapped and checked; nothing is loaded yet.
#[derive(Debug)]
pub struct Opening {
    folder: PathBuf,
    checkpoint: Checkpoint,
    /// State of each file, in the order of the checkpoint's.
    states: Vec<FileState>,
    /// Digests that were kept when a file was read before.
    kept: TensorDigests,
    /// Files without kept digests that are large enough to keep theirs.
    to_keep: Vec<usize>,
    /// Where digests are kept if not beside the weights.
    elsewhere: Option<PathBuf>,
    notes: Vec<String>,
    /// How weights that the files hold in fp8 are held in memory.
    form: Form,
}

impl Opening {
    /// Maps the files in `folder`, checks every tensor's presence, shape and dtype, and reads kept digests. `elsewhere` is
    /// the folder for digests of files in a folder that cannot be written.
    ///
    /// # Errors
    /// When files are absent or damaged, or tensors do not match the spec.
    pub fn open(folder: &Path, spec: &Spec, elsewhere: Option<&Path>) -> Result<Opening, Error> {
        let mut checkpoint = Checkpoint::open(folder, spec)?;
        drop_tied_head(&mut checkpoint, folder, spec)?;
        let (mut states, mut kept, mut to_keep) = (Vec::new(), TensorDigests::new(), Vec::new());
        for (number, shard) in checkpoint.shards.iter().enumerate() {
            let file = &shard.file;
            let state = FileState::of(file).map_err(|source| Error::Unreadable { file: file.clone(), source })?;
            let found = digests::kept(file, &state, elsewhere);
            if checkpoint.in_file_order(number).iter().all(|(name, _)| found.contains_key(*name)) {
                kept.extend(found);
            } else if state.bytes >= KEPT_FILE_BYTES_MIN {
                to_keep.push(number);
            }
            states.push(state);
        }
        let notes = checkpoint.notes();
        let (folder, elsewhere) = (folder.to_owned(), elsewhere.map(Path::to_owned));
        Ok(Opening { folder, checkpoint, states, kept, to_keep, elsewhere, notes, form: Form::Plain })
    }

    /// The same, to be held as `form` says.
    ///
    /// # Errors
    /// When weights are to be in fp8 and the checkpoint holds none that are.
    pub fn held_as(mut self, form: Form) -> Result<Opening, Error> {
        if form == Form::Fp8 && !self.checkpoint.places.values().any(Place::is_fp8) {
            return Err(Error::NoFp8 { folder: self.folder });
        }
        self.form = form;
        Ok(self)
    }

    /// What was opened, as a short text: ranks with the same text read the same files and know the same digests.
    #[must_use]
    pub fn identity(&self) -> String {
        sha256_hex(format!("{:?} {:?}", self.states, self.kept))
    }

    /// Loads the tensors as `kind` on `device`, and makes the digests of this rank's `share` while their bytes are read.
    /// Kept digests are not made again. Of experts only those of the share `experts` are loaded; bytes of the others are read
    /// for digests alone.
    ///
    /// # Errors
    /// When values are not finite, weights are all zero, or memory does not suffice.
    pub fn load(
        mut self,
        spec: &Spec,
        kind: Kind,
        device: Device,
        zeros: ZeroWeights,
        share: Share,
        experts: ExpertShare,
    ) -> Result<Loading, Error> {
        let in_file = self.checkpoint.places.iter().filter(|(_, place)| place.is_fp8());
        let in_file: BTreeSet<String> = in_file.map(|(name, _)| name.clone()).collect();
        self.notes.extend(self.form.note(in_file.len(), kind));
        let fp8 = if self.form == Form::Fp8 { in_file } else { BTreeSet::new() };
        let held = Held::new(spec, experts, fp8, kind, device)
            .map_err(|(expected, source)| failed(&expected, kind, device, source))?;
        let mut loader = Loader::new(held, spec.norm, kind, device);
        loader.read_scales(&self.checkpoint)?;
        for shard in 0..self.checkpoint.shards.len() {
            loader.load_shard(&self.checkpoint, shard, &self.kept, share)?;
            self.checkpoint.release(shard);
        }
        let folder = self.folder.clone();
        if !loader.not_finite.is_empty() {
            return Err(Error::NotFinite { folder, kind, tensors: loader.not_finite });
        }
        if zeros == ZeroWeights::Refuse && !loader.all_zero.is_empty() {
            return Err(Error::AllZero { folder, tensors: loader.all_zero });
        }
        Ok(Loading {
            opening: self,
            spec: spec.canonical(),
            tensors: loader.held.tensors,
            digests: loader.digests,
            kind,
            device,
        })
    }
}

/// Tensors that are loaded, and the digests of this rank's share of them.
#[derive(Debug)]
pub struct Loading {
    opening: Opening,
    /// The canonical spec, which is part of the model's digest.
    spec: String,
    tensors: BTreeMap<String, Value>,
    digests: TensorDigests,
    kind: Kind,
    device: Device,
}

impl Loading {
    /// The digests that this rank has made.
    #[must_use]
    pub fn own_digests(&self) -> &TensorDigests {
        &self.digests
    }

    /// The weights, with the digests of all shares together. Where `keeps`, digests of large files are written for the next
    /// start; a place that cannot be written is noted in the log.
    ///
    /// # Panics
    /// When a tensor has no digest: the shares together must cover the checkpoint.
    #[must_use]
    pub fn finish(self, shares: impl IntoIterator<Item = TensorDigests>, keeps: bool) -> Weights {
        let Loading { opening, spec, tensors, digests: mut all, kind, device } = self;
        all.extend(opening.kept.clone());
        all.extend(shares.into_iter().flatten());
        if keeps {
            opening.keep(&all);
        }
        let digest = digest_of(&spec, &opening.checkpoint, &all);
        Weights::with_head(tensors, digest, opening.notes, kind, device)
    }
}

impl Opening {
    fn keep(&self, all: &TensorDigests) {
        for &number in &self.to_keep {
            let file = &self.checkpoint.shards[number].file;
            let names = self.checkpoint.in_file_order(number).into_iter().map(|(name, _)| name);
            let own = names.filter_map(|name| Some((name.to_owned(), all.get(name)?.clone()))).collect();
            match digests::keep(file, &self.states[number], own, self.elsewhere.as_deref()) {
                Ok(place) => tracing::info!("digests of {} are kept in {}", file.display(), place.display()),
                Err(error) => tracing::warn!("digests of {} are not kept: {error}", file.display()),
            }
        }
    }
}

/// The tensors of a model by name, all on one device, none of them with a gradient. All are given out in one dtype, but for
/// those of a sigmoid router, of an index's heads and of a gated delta rule that are no projections nor its convolution, which
/// have the accumulation dtype. Experts of a layer are two tensors,
/// [`ExpertSpec::gate_up_name`](super::parts::ExpertSpec::gate_up_name) and
/// [`ExpertSpec::down_name`](super::parts::ExpertSpec::down_name), of the experts that the rank holds.
#[derive(Debug)]
pub struct Weights {
    tensors: BTreeMap<String, Value>,
    /// Weights in fp8 of the layer that was asked for last, dequantised.
    recent: RefCell<Recent>,
    digest: String,
    notes: Vec<String>,
    kind: Kind,
    device: Device,
}

impl Weights {
    /// Loads the checkpoint in `folder` as `kind` on `device`, of experts those of the share `experts`; keeps no digest. A
    /// tied head shares the embedding's storage.
    ///
    /// # Errors
    /// When files are absent or damaged, tensors do not match the spec, values are not finite, weights are all zero, or
    /// memory does not suffice.
    pub fn load(
        folder: &Path,
        spec: &Spec,
        kind: Kind,
        device: Device,
        experts: ExpertShare,
    ) -> Result<Weights, Error> {
        let opening = Opening::open(folder, spec, None)?;
        let loading = opening.load(spec, kind, device, ZeroWeights::Refuse, Share::ALL, experts)?;
        Ok(loading.finish([], false))
    }

    /// Random weights for measurements: the same numbers for the same seed, on every device and rank. Of experts those of
    /// the share `experts`, whose numbers are the same in any share.
    ///
    /// Matrices and convolutions are uniform with standard deviation 1/√inputs, norms keep their input's scale, biases are 0,
    /// heads of a gated delta rule remember from one position to a thousand.
    ///
    /// # Errors
    /// When memory does not suffice.
    pub fn random(spec: &Spec, seed: u64, kind: Kind, device: Device, experts: ExpertShare) -> Result<Weights, Error> {
        Weights::random_as(spec, seed, kind, device, experts, Form::Plain)
    }

    /// As [`Weights::random`], held as `form` says: in fp8 the weights of all linear layers, rounded from those of `kind`.
    ///
    /// # Errors
    /// When memory does not suffice.
    pub fn random_as(
        spec: &Spec,
        seed: u64,
        kind: Kind,
        device: Device,
        experts: ExpertShare,
        form: Form,
    ) -> Result<Weights, Error> {
        let refused = |expected: &Expected, source| failed(expected, kind, device, source);
        let linears = spec.linear_layers().into_iter().filter(|_| form == Form::Fp8);
        let fp8 = linears.map(|linear| format!("{}.weight", linear.module)).collect();
        let mut held =
            Held::new(spec, experts, fp8, kind, device).map_err(|(expected, source)| refused(&expected, source))?;
        // The ordinal counts the tensors of all experts, so the stream of one does not depend on the share.
        for (number, expected) in spec.tensors().iter().enumerate() {
            let stream = split_mix(seed ^ split_mix(from_index(number)));
            let target = held.target(expected).map_err(|source| refused(expected, source))?;
            if let Some(target) = target {
                fill_random(target, expected, spec.norm, stream).map_err(|source| refused(expected, source))?;
            }
        }
        let mut hash = Sha256::new();
        hash.update(spec.canonical());
        hash.update(format!("\nrandom {seed}\n{}", if form == Form::Fp8 { "fp8\n" } else { "" }));
        Ok(Weights::with_head(held.tensors, hex(hash), Vec::new(), kind, device))
    }

    /// The tensor `name` in the model's dtype: its storage, or for a weight in fp8 a tensor of its dequantised values. That
    /// is kept until a weight of another layer is asked for, so that the micro-blocks of a layer share it.
    ///
    /// # Panics
    /// When the model has no such tensor: names come from the spec, whose tensors are all there after loading.
    pub fn get(&self, name: &str) -> Tensor {
        self.try_get(name).unwrap_or_else(|| panic!("the spec names no tensor {name}"))
    }

    /// The tensor `name` as [`Weights::get`] gives it, if the model has it (a bias, say).
    #[must_use]
    pub fn try_get(&self, name: &str) -> Option<Tensor> {
        Some(match self.tensors.get(name)? {
            Value::Plain(tensor) => tensor.shallow_clone(),
            Value::Blocks(blocks) => self.recent.borrow_mut().get(name, blocks),
        })
    }

    /// Of the experts' tensor `name` ([`ExpertSpec::gate_up_name`](super::parts::ExpertSpec::gate_up_name), …) the experts
    /// `range`, [range, rows, columns] in the model's dtype; 0 is the first expert that this rank holds. Those in fp8 are
    /// dequantised each time.
    ///
    /// # Panics
    /// When the model has no such tensor, or this rank holds fewer experts.
    pub fn experts(&self, name: &str, range: Range<i64>) -> Tensor {
        self.tensors.get(name).unwrap_or_else(|| panic!("the spec names no tensor {name}")).range(range)
    }

    /// Names and tensors, by name, in the model's dtype; one in fp8 is dequantised for as long as the caller holds it.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Tensor)> {
        self.tensors.iter().map(|(name, value)| (name.as_str(), value.tensor()))
    }

    /// The digest of the model, as 64 hexadecimal digits.
    ///
    /// A SHA-256 over the canonical spec and, by name, each tensor's name, dtype in the file, shape, and the BLAKE3 digest of
    /// all its bytes in the file. It depends neither on how the checkpoint is cut into files, on whether a file joins the
    /// experts of a layer, on the experts that this rank holds, nor on the dtype or form in memory.
    #[must_use]
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// What a user should know of the checkpoint's folder, a sentence each.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The same values in another dtype, none of them in fp8; those that it cannot hold are rounded. The digest stays.
    #[must_use]
    pub fn converted(&self, kind: Kind) -> Weights {
        let sigmoid = has_sigmoid_router(self.tensors.keys());
        let convert = |(name, value): (&String, &Value)| {
            (name.clone(), Value::Plain(value.tensor().to_kind(kind_of_tensor(name, kind, sigmoid))))
        };
        let tensors = self.tensors.iter().map(convert).collect();
        Weights::with_head(tensors, self.digest.clone(), Vec::new(), kind, self.device)
    }

    /// The tensors that `spec` names, which is of this model with fewer layers, in another dtype; in the same dtype they are
    /// shared, in another one none of them is in fp8. The digest stays.
    #[must_use]
    pub fn part(&self, spec: &Spec, kind: Kind) -> Weights {
        let sigmoid = has_sigmoid_router(self.tensors.keys());
        let named = spec.tensors().into_iter().chain(joined(spec, ExpertShare::ALL)).map(|expected| expected.name);
        let found = named.filter_map(|name| {
            let value = self.tensors.get(&name)?;
            let value = if kind == self.kind {
                value.shallow_clone()
            } else {
                Value::Plain(value.tensor().to_kind(kind_of_tensor(&name, kind, sigmoid)))
            };
            Some((name, value))
        });
        Weights::with_head(found.collect(), self.digest.clone(), Vec::new(), kind, self.device)
    }

    /// Whether every tensor lies in memory in the dtype in which it is given out, none of them in fp8.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.tensors.values().all(|value| matches!(value, Value::Plain(_)))
    }

    /// Bytes of all tensors as memory holds them; a tied head is one with the embedding.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        let each: BTreeMap<usize, Bytes> = self.tensors.values().flat_map(Value::storages).collect();
        each.into_values().sum()
    }

    /// The dtype of the tensors as they are given out, but for those that have the accumulation dtype.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The device of all tensors.
    #[must_use]
    pub fn device(&self) -> Device {
        self.device
    }

    fn with_head(
        mut tensors: BTreeMap<String, Value>,
        digest: String,
        notes: Vec<String>,
        kind: Kind,
        device: Device,
    ) -> Weights {
        if !tensors.contains_key(HEAD) {
            let head = tensors.get(EMBEDDING).map(Value::shallow_clone);
            tensors.extend(head.map(|head| (HEAD.to_owned(), head)));
        }
        Weights { tensors, recent: RefCell::default(), digest, notes, kind, device }
    }
}

/// A tied head in the file must be the embedding; it is then not loaded a second time.
fn drop_tied_head(checkpoint: &mut Checkpoint, folder: &Path, spec: &Spec) -> Result<(), Error> {
    if !spec.tied_embeddings {
        return Ok(());
    }
    let Some(head) = checkpoint.places.remove(HEAD) else { return Ok(()) };
    let same = checkpoint.places.get(EMBEDDING).is_some_and(|embedding| {
        embedding.dtype == head.dtype && checkpoint.bytes(embedding) == checkpoint.bytes(&head)
    });
    if same { Ok(()) } else { Err(Error::HeadNotTied { folder: folder.to_owned() }) }
}

fn digest_of(spec: &str, checkpoint: &Checkpoint, digests: &TensorDigests) -> String {
    let mut hash = Sha256::new_with_prefix(spec);
    for (name, place) in &checkpoint.places {
        let bytes = digests.get(name).unwrap_or_else(|| panic!("no rank has made the digest of {name}"));
        hash.update(format!("\n{name} {} {:?}\n{bytes}", place.dtype, place.shape));
    }
    hex(hash)
}
