//! Tensors filled from the bytes of a checkpoint's files, and their values judged.

use std::collections::BTreeMap;

use tch::{Device, Kind, Tensor};

use super::blocks::{Value, dequantise_into};
use super::error::{AllZero, Error, NotFinite, failed};
use super::experts::{DELTA_NORM, Held};
use super::share::Share;
use crate::model::digests::{self, TensorDigests};
use crate::model::shards::{Checkpoint, Place, scaled_by, scales_of};
use crate::model::spec::{Expected, NormForm};
use crate::runtime::units::{as_dim, from_dim, from_index};
use crate::tensor::bytes::{self, fill_from_bytes};
use crate::tensor::stored::kind_of;

/// Elements that are looked at together when one that is not finite is searched.
const BLOCK_ELEMENTS: i64 = 1 << 20;

/// Fills tensors shard by shard, and gathers what is wrong with their values.
pub(super) struct Loader {
    pub(super) held: Held,
    /// Factors of the weights in fp8 that this rank holds, by their names in the file.
    scales: BTreeMap<String, Tensor>,
    /// Digests of this rank's share.
    pub(super) digests: TensorDigests,
    pub(super) not_finite: Vec<NotFinite>,
    pub(super) all_zero: Vec<AllZero>,
    norm: NormForm,
    kind: Kind,
    device: Device,
}

impl Loader {
    pub(super) fn new(held: Held, norm: NormForm, kind: Kind, device: Device) -> Loader {
        let (not_finite, all_zero) = (Vec::new(), Vec::new());
        Loader {
            held,
            scales: BTreeMap::new(),
            digests: TensorDigests::new(),
            not_finite,
            all_zero,
            norm,
            kind,
            device,
        }
    }

    /// Loads the tensors of one shard in the order of their bytes, so that the file is read from front to back.
    pub(super) fn load_shard(
        &mut self,
        checkpoint: &Checkpoint,
        shard: usize,
        kept: &TensorDigests,
        share: Share,
    ) -> Result<(), Error> {
        for (number, (name, place)) in checkpoint.in_file_order(shard).into_iter().enumerate() {
            let bytes = checkpoint.bytes(place);
            // All cores read the bytes that one of them then copies.
            if number % share.ranks == share.rank && !kept.contains_key(name) {
                self.digests.insert(name.to_owned(), digests::digest(bytes));
            }
            if scaled_by(name).is_some() {
                continue;
            }
            let expected = Expected::new(name.to_owned(), &place.shape);
            let file = &checkpoint.shards[shard].name;
            self.fill(&expected, place, bytes, file)
                .map_err(|source| failed(&expected, self.kind, self.device, source))?;
        }
        Ok(())
    }

    /// Reads the factors of all weights in fp8 that this rank holds, into host memory: a weight and its factors may lie in
    /// different files.
    ///
    /// # Errors
    /// When memory does not suffice. Factors that are not finite are gathered with the weights that are not.
    pub(super) fn read_scales(&mut self, checkpoint: &Checkpoint) -> Result<(), Error> {
        let held = &self.held;
        let of_held = |name: &str| scaled_by(name).is_some_and(|weight| held.holds(weight));
        let scales: Vec<_> = checkpoint.places.iter().filter(|(name, _)| of_held(name)).collect();
        for (name, place) in scales {
            let expected = Expected::new(name.clone(), &place.shape);
            let refused = |source| failed(&expected, Kind::Float, Device::Cpu, source);
            let shape: Vec<i64> = place.shape.iter().copied().map(as_dim).collect();
            let mut tensor =
                Tensor::f_empty(shape, (Kind::Float, Device::Cpu)).map_err(|error| refused(error.into()))?;
            // Published files hold factors in float32 or bfloat16.
            let stored = kind_of(place.dtype).unwrap_or(Kind::Float);
            fill_from_bytes(&mut tensor, checkpoint.bytes(place), stored).map_err(refused)?;
            let finite = tensor.f_isfinite().map_err(|error| refused(error.into()))?;
            if finite.all().int64_value(&[]) == 0 {
                let file = &checkpoint.shards[place.shard].name;
                self.not_finite.push(find_not_finite(&tensor, name, file).map_err(refused)?);
            }
            self.scales.insert(name.clone(), tensor);
        }
        Ok(())
    }

    /// Fills the tensor from its bytes and judges its values; an expert that another rank holds is left out.
    fn fill(&mut self, expected: &Expected, place: &Place, bytes: &[u8], file: &str) -> Result<(), bytes::Error> {
        let Some(target) = self.held.target(expected)? else { return Ok(()) };
        let source_kind = if place.is_fp8() { Some(Kind::Float8e4m3fn) } else { kind_of(place.dtype) };
        let source_kind = source_kind.expect("dtypes were checked when the checkpoint was opened");
        let tensor = match target {
            Value::Plain(mut tensor) if place.is_fp8() => {
                let mut values = Tensor::f_empty(tensor.size(), (source_kind, self.device))?;
                fill_from_bytes(&mut values, bytes, source_kind)?;
                let scales = self.scales_of(expected)?.f_to_device(self.device)?;
                dequantise_into(&mut tensor, &values, &scales)?;
                tensor
            }
            Value::Plain(mut tensor) => {
                fill_from_bytes(&mut tensor, bytes, source_kind)?;
                tensor
            }
            Value::Blocks(mut blocks) => {
                fill_from_bytes(&mut blocks.values, bytes, source_kind)?;
                blocks.scales.f_copy_(&self.scales_of(expected)?)?;
                blocks.f_dequantised()?
            }
        };
        self.judge(&tensor, expected, file)
    }

    /// The factors of a weight in fp8, [1, ⌈o/128⌉, ⌈i/128⌉], in host memory.
    fn scales_of(&self, expected: &Expected) -> Result<Tensor, bytes::Error> {
        let scales = self.scales.get(&scales_of(&expected.name));
        Ok(scales.expect("a weight in fp8 without factors is refused when the checkpoint is opened").f_unsqueeze(0)?)
    }

    /// Looks for values that cannot be right: the least and the largest value in one pass without a temporary of the
    /// tensor's size, and block by block only where those tell of one that is not finite.
    fn judge(&mut self, tensor: &Tensor, expected: &Expected, file: &str) -> Result<(), bytes::Error> {
        if tensor.numel() == 0 {
            return Ok(());
        }
        let (least, largest) = tensor.f_aminmax(None, false)?;
        let bounds = [least, largest].map(|bound| bound.double_value(&[]));
        if bounds.iter().any(|bound| !bound.is_finite()) {
            self.not_finite.push(find_not_finite(tensor, &expected.name, file)?);
        } else if bounds.iter().all(|bound| bound.abs() < f64::MIN_POSITIVE) && must_not_be_zero(expected, self.norm) {
            let (name, shape) = (expected.name.clone(), expected.shape.clone());
            self.all_zero.push(AllZero { name, file: file.to_owned(), shape });
        }
        Ok(())
    }
}

/// Whether a tensor of zeros leaves nothing of the signal: a matrix, and a norm whose weight is a factor. Biases, logarithms of
/// decays, and norms that add 1 to their weight, may be zero.
fn must_not_be_zero(expected: &Expected, norm: NormForm) -> bool {
    match expected.shape.len() {
        1 if norm == NormForm::OnePlusWeight => expected.name.ends_with(DELTA_NORM),
        1 => expected.name.ends_with("norm.weight"),
        _ => true,
    }
}

/// Counts NaN and infinite values block by block, and finds the first.
fn find_not_finite(tensor: &Tensor, name: &str, file: &str) -> Result<NotFinite, bytes::Error> {
    let elements = tensor.numel();
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
    Ok(NotFinite { name, file, nan, infinite, elements: from_index(elements), first })
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
