//! A model's tensors: loaded from a checkpoint, or random for measurements.
//!
//! Each tensor is created once, in the target dtype on the target device, and filled straight from the mapped file; the
//! map of a file is dropped as soon as its tensors are filled. So host memory holds the model once, besides pages of the
//! file that the system can take back at any time.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use tch::{Device, Kind, Tensor};

use super::shards::{self, Checkpoint, Place};
use super::spec::{EMBEDDING, Expected, HEAD, NormForm, Spec};
use crate::runtime::digest::hex;
use crate::runtime::failure::{Classified, Exit};
use crate::runtime::random::{FACTORS, STEP, split_mix};
use crate::runtime::units::{Bytes, as_dim, as_index, float, from_dim, from_index};
use crate::tensor::boundary::storage_bytes;
use crate::tensor::bytes::{self, fill_from_bytes};
use crate::tensor::stored::kind_of;

/// Bytes at either end of a tensor that the digest reads.
const DIGEST_SAMPLE_BYTES: usize = 4096;

/// Tensors with values that are not finite that one message lists; further ones are counted.
const NOT_FINITE_MAX: usize = 8;

/// Elements that are looked at together when one that is not finite is searched, and that random values are made in.
const BLOCK_ELEMENTS: i64 = 1 << 20;

/// A tensor that holds NaN or infinite values.
#[derive(Clone, Debug, Eq, PartialEq)]
#[expect(missing_docs, reason = "the names say everything")]
pub struct NotFinite {
    pub name: String,
    pub file: String,
    pub nan: u64,
    pub infinite: u64,
    pub elements: u64,
    pub first: Vec<u64>,
}

/// Why weights could not be had.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what each is")]
pub enum Error {
    #[error(transparent)]
    Checkpoint(#[from] shards::Error),
    #[error("{}: {}; the checkpoint is damaged, or its values exceed dtype {kind:?}", folder.display(), list(tensors))]
    NotFinite { folder: PathBuf, kind: Kind, tensors: Vec<NotFinite> },
    #[error(
        "{}: {HEAD} differs from {EMBEDDING}, but the config says `tie_word_embeddings` true; correct the one or the other",
        folder.display()
    )]
    HeadNotTied { folder: PathBuf },
    #[error("{name} {shape:?} as {kind:?} on {device:?}: {source}")]
    Tensor { name: String, shape: Vec<u64>, kind: Kind, device: Device, source: Box<bytes::Error> },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Checkpoint(inner) => inner.exit(),
            Error::NotFinite { .. } | Error::HeadNotTied { .. } => Exit::Data,
            Error::Tensor { source, .. } => source.exit(),
        }
    }
}

fn list(tensors: &[NotFinite]) -> String {
    let mut parts: Vec<String> = tensors.iter().take(NOT_FINITE_MAX).map(describe).collect();
    if tensors.len() > NOT_FINITE_MAX {
        parts.push(format!("and {} more tensors", tensors.len() - NOT_FINITE_MAX));
    }
    parts.join("; ")
}

fn describe(one: &NotFinite) -> String {
    format!(
        "{}: {} has {} NaN and {} infinite of {} values, the first at {:?}",
        one.file, one.name, one.nan, one.infinite, one.elements, one.first
    )
}

/// The tensors of a model by name, all of one dtype on one device, none of them with a gradient.
#[derive(Debug)]
pub struct Weights {
    tensors: BTreeMap<String, Tensor>,
    digest: String,
    kind: Kind,
    device: Device,
}

impl Weights {
    /// Loads the checkpoint in `folder` as `kind` on `device`.
    ///
    /// A head that is tied, or that the checkpoint does not hold, shares the embedding's storage.
    ///
    /// # Errors
    /// When files are absent or damaged, tensors do not match the spec, values are not finite, or memory does not suffice.
    pub fn load(folder: &Path, spec: &Spec, kind: Kind, device: Device) -> Result<Weights, Error> {
        let mut checkpoint = Checkpoint::open(folder, spec)?;
        let digest = digest_of(spec, &checkpoint);
        drop_tied_head(&mut checkpoint, folder, spec)?;
        if !spec.tied_embeddings && !checkpoint.places.contains_key(HEAD) {
            tracing::info!(folder = %folder.display(), "no {HEAD}: the head is the embedding");
        }
        let mut loader = Loader { tensors: BTreeMap::new(), not_finite: Vec::new(), kind, device };
        for shard in 0..checkpoint.shards.len() {
            loader.load_shard(&checkpoint, shard)?;
            checkpoint.release(shard);
        }
        if !loader.not_finite.is_empty() {
            return Err(Error::NotFinite { folder: folder.to_owned(), kind, tensors: loader.not_finite });
        }
        Ok(Weights::with_head(loader.tensors, digest, kind, device))
    }

    /// Random weights for measurements: the same numbers for the same seed, on every device and rank.
    ///
    /// Matrices are uniform with standard deviation 1/√inputs, norms keep their input's scale, biases are 0.
    ///
    /// # Errors
    /// When memory does not suffice.
    pub fn random(spec: &Spec, seed: u64, kind: Kind, device: Device) -> Result<Weights, Error> {
        let mut tensors = BTreeMap::new();
        for (number, expected) in spec.tensors().iter().enumerate() {
            let stream = split_mix(seed ^ split_mix(from_index(number)));
            let tensor = create(expected, kind, device)
                .and_then(|mut tensor| fill_random(&mut tensor, expected, spec.norm, stream).map(|()| tensor))
                .map_err(|source| failed(&expected.name, &expected.shape, kind, device, source))?;
            tensors.insert(expected.name.clone(), tensor);
        }
        let mut hash = Sha256::new();
        hash.update(spec.canonical());
        hash.update(format!("\nrandom {seed}\n"));
        Ok(Weights::with_head(tensors, hex(hash), kind, device))
    }

    /// The tensor `name`.
    ///
    /// # Panics
    /// When the model has no such tensor: names come from the spec, whose tensors are all there after loading.
    pub fn get(&self, name: &str) -> &Tensor {
        self.try_get(name).unwrap_or_else(|| panic!("the spec names no tensor {name}"))
    }

    /// The tensor `name`, if the model has it (a bias, say).
    #[must_use]
    pub fn try_get(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// Names and tensors, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// The digest of the model, as 64 hexadecimal digits.
    ///
    /// A SHA-256 over the canonical spec and, by name, each tensor's name, dtype in the file, shape, and first and last
    /// 4 KiB in the file. It depends neither on how the checkpoint is cut into files nor on the dtype loaded into. It tells
    /// models apart; it is no proof against damage in the middle of a tensor.
    #[must_use]
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// The same values in another dtype; those that it cannot hold are rounded. The digest stays.
    #[must_use]
    pub fn converted(&self, kind: Kind) -> Weights {
        let tensors = self.tensors.iter().map(|(name, tensor)| (name.clone(), tensor.to_kind(kind))).collect();
        Weights { tensors, digest: self.digest.clone(), kind, device: self.device }
    }

    /// The tensors that `spec` names, which is of this model with fewer layers, in another dtype; those in this dtype are
    /// shared. The digest stays.
    #[must_use]
    pub fn part(&self, spec: &Spec, kind: Kind) -> Weights {
        let named = spec.tensors().into_iter().map(|expected| expected.name);
        let found = named.filter_map(|name| self.try_get(&name).map(|tensor| (name, tensor.to_kind(kind))));
        Weights::with_head(found.collect(), self.digest.clone(), kind, self.device)
    }

    /// Bytes of all tensors; a tied head is one with the embedding.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        let each: BTreeMap<usize, Bytes> =
            self.tensors.values().map(|tensor| (tensor.data_ptr().addr(), storage_bytes(tensor))).collect();
        each.into_values().sum()
    }

    /// The dtype of all tensors.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The device of all tensors.
    #[must_use]
    pub fn device(&self) -> Device {
        self.device
    }

    fn with_head(mut tensors: BTreeMap<String, Tensor>, digest: String, kind: Kind, device: Device) -> Weights {
        if !tensors.contains_key(HEAD) {
            let head = tensors.get(EMBEDDING).map(Tensor::shallow_clone);
            tensors.extend(head.map(|head| (HEAD.to_owned(), head)));
        }
        Weights { tensors, digest, kind, device }
    }
}

struct Loader {
    tensors: BTreeMap<String, Tensor>,
    not_finite: Vec<NotFinite>,
    kind: Kind,
    device: Device,
}

impl Loader {
    /// Loads the tensors of one shard in the order of their bytes, so that the file is read from front to back.
    fn load_shard(&mut self, checkpoint: &Checkpoint, shard: usize) -> Result<(), Error> {
        for (name, place) in checkpoint.in_file_order(shard) {
            let source_kind = kind_of(place.dtype).expect("dtypes were checked when the checkpoint was opened");
            let expected = Expected::new(name.to_owned(), &place.shape);
            let tensor = create(&expected, self.kind, self.device)
                .and_then(|mut tensor| {
                    fill_from_bytes(&mut tensor, checkpoint.bytes(place), source_kind).map(|()| tensor)
                })
                .map_err(|source| failed(name, &place.shape, self.kind, self.device, source))?;
            let file = &checkpoint.shards[shard].name;
            let found = find_not_finite(&tensor, name, file)
                .map_err(|source| failed(name, &place.shape, self.kind, self.device, source))?;
            self.not_finite.extend(found);
            self.tensors.insert(name.to_owned(), tensor);
        }
        Ok(())
    }
}

fn failed(name: &str, shape: &[u64], kind: Kind, device: Device, source: bytes::Error) -> Error {
    Error::Tensor { name: name.to_owned(), shape: shape.to_vec(), kind, device, source: Box::new(source) }
}

fn create(expected: &Expected, kind: Kind, device: Device) -> Result<Tensor, bytes::Error> {
    let shape: Vec<i64> = expected.shape.iter().copied().map(as_dim).collect();
    Ok(Tensor::f_empty(shape, (kind, device))?)
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

/// Looks for NaN and infinite values: least and largest value in one pass without a temporary of the tensor's size, and
/// block by block only where those tell of one.
fn find_not_finite(tensor: &Tensor, name: &str, file: &str) -> Result<Option<NotFinite>, bytes::Error> {
    let elements = tensor.numel();
    if elements == 0 {
        return Ok(None);
    }
    let (least, largest) = tensor.f_aminmax(None, false)?;
    if [least, largest].iter().all(|bound| bound.double_value(&[]).is_finite()) {
        return Ok(None);
    }
    let flat = tensor.f_view([-1])?;
    let (mut nan, mut infinite, mut first) = (0, 0, None);
    let mut start = 0;
    while start < as_dim(from_index(elements)) {
        let block = flat.narrow(0, start, BLOCK_ELEMENTS.min(flat.size()[0] - start));
        let (is_nan, is_infinite) = (block.f_isnan()?, block.f_isinf()?);
        nan += from_dim(is_nan.sum(Kind::Int64).int64_value(&[]));
        infinite += from_dim(is_infinite.sum(Kind::Int64).int64_value(&[]));
        if first.is_none() && nan + infinite > 0 {
            let here = is_nan.logical_or(&is_infinite).to_kind(Kind::Uint8).argmax(0, false).int64_value(&[]);
            first = Some(from_dim(start + here));
        }
        start += BLOCK_ELEMENTS;
    }
    let shape: Vec<u64> = tensor.size().into_iter().map(from_dim).collect();
    let first = unravel(first.unwrap_or(0), &shape);
    let (name, file) = (name.to_owned(), file.to_owned());
    Ok(Some(NotFinite { name, file, nan, infinite, elements: from_index(elements), first }))
}

/// The index per dimension of an element of a row-major tensor.
fn unravel(mut element: u64, shape: &[u64]) -> Vec<u64> {
    let mut index: Vec<u64> = shape
        .iter()
        .rev()
        .map(|size| {
            let here = element % size;
            element /= size;
            here
        })
        .collect();
    index.reverse();
    index
}

fn digest_of(spec: &Spec, checkpoint: &Checkpoint) -> String {
    let mut hash = Sha256::new();
    hash.update(spec.canonical());
    // A tied head may stand in the file or not; it is the embedding either way.
    let is_read = |name: &str| !(spec.tied_embeddings && name == HEAD);
    for (name, place) in checkpoint.places.iter().filter(|(name, _)| is_read(name)) {
        hash.update(format!("\n{name} {} {:?}\n", place.dtype, place.shape));
        for sample in ends(checkpoint, place) {
            hash.update(sample);
        }
    }
    hex(hash)
}

/// The first and the last bytes of a tensor; all of them if it is small.
fn ends<'a>(checkpoint: &'a Checkpoint, place: &Place) -> [&'a [u8]; 2] {
    let bytes = checkpoint.bytes(place);
    if bytes.len() <= 2 * DIGEST_SAMPLE_BYTES {
        return [bytes, &[]];
    }
    [&bytes[..DIGEST_SAMPLE_BYTES], &bytes[bytes.len() - DIGEST_SAMPLE_BYTES..]]
}

/// Fills a norm with what leaves its input's scale as it is, a bias with 0, and a matrix with uniform values of standard deviation 1/√inputs.
fn fill_random(tensor: &mut Tensor, expected: &Expected, norm: NormForm, stream: u64) -> Result<(), bytes::Error> {
    let [_, inputs] = expected.shape[..] else {
        let is_bias = expected.name.rsplit('.').next() == Some("bias");
        let constant = if is_bias || norm == NormForm::OnePlusWeight { 0.0 } else { 1.0 };
        let _itself = tensor.f_fill_(constant)?;
        return Ok(());
    };
    let half_width = (3.0 / float(inputs)).sqrt();
    let value = |counter: u64| {
        let [_, _, _, _, a, b, c, d] = split_mix(stream.wrapping_add(counter)).to_le_bytes();
        (f64::from(u32::from_le_bytes([a, b, c, d])) / 2_147_483_648.0 - 1.0) * half_width
    };
    let flat = tensor.f_view([-1])?;
    let elements = as_dim(expected.elements());
    let mut start = 0;
    while start < elements {
        let length = BLOCK_ELEMENTS.min(elements - start);
        let mut part = flat.f_narrow(0, start, length)?;
        if tensor.device() == Device::Cpu {
            let mut buffer = Vec::with_capacity(8 * as_index(from_dim(length)));
            for counter in from_dim(start)..from_dim(start + length) {
                buffer.extend_from_slice(&value(counter).to_le_bytes());
            }
            fill_from_bytes(&mut part, &buffer, Kind::Double)?;
        } else {
            part.copy_(&(uniform_on(tensor.device(), stream, start..start + length) * half_width));
        }
        start += length;
    }
    Ok(())
}

/// What [`split_mix`] makes of `stream` + counter, as numbers in [−1, 1): the same bits as on the processor. Additions and
/// products of signed integers wrap as unsigned ones do; shifts to the right bring the sign along, which is masked.
fn uniform_on(device: Device, stream: u64, counters: Range<i64>) -> Tensor {
    let signed = |x: u64| i64::from_ne_bytes(x.to_ne_bytes());
    let shifted = |z: &Tensor, bits: i64| z.bitwise_right_shift_tensor_scalar(bits).bitwise_and(i64::MAX >> (bits - 1));
    let start = signed(stream.wrapping_add(STEP));
    let z = Tensor::arange_start(counters.start, counters.end, (Kind::Int64, device)) + start;
    let z = z.bitwise_xor_tensor(&shifted(&z, 30)) * signed(FACTORS[0]);
    let z = z.bitwise_xor_tensor(&shifted(&z, 27)) * signed(FACTORS[1]);
    let z = z.bitwise_xor_tensor(&shifted(&z, 31));
    shifted(&z, 32).to_kind(Kind::Double) / 2_147_483_648.0 - 1.0
}
