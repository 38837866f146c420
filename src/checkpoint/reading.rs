//! Reads a checkpoint's folder, wherever it stands.

use std::fs;
use std::path::Path;

use safetensors::SafeTensors;
use serde_json::error::Category;
use tch::{Device, Kind, Tensor};

use super::error::Error;
use super::state::{Sealed, State};
use crate::model::adapter_file::{CONFIG, VALUES};
use crate::model::lora::Adapters;
use crate::prompt::handoff::Moments;
use crate::runtime::digest::sha256_hex;
use crate::runtime::units::{as_index, from_dim};
use crate::tensor::bytes::{fill_from_bytes, map_file};
use crate::tensor::stored::kind_of;

pub(super) const STATE: &str = "state.json";
pub(super) const MASTERS: &str = "masters.safetensors";
/// The files whose digests stand in [`STATE`].
pub(super) const LISTED: [&str; 3] = [MASTERS, VALUES, CONFIG];
/// First parts of the tensors' names; a dot and the adapter's name follow.
pub(super) const PARTS: [&str; 3] = ["master", "mean", "square"];
/// The same of adapters that captured what a further update reuses.
pub(super) const CAPTURED: &str = "captured";

/// A checkpoint that was read.
#[derive(Debug)]
#[expect(missing_docs, reason = "the names and types say everything")]
pub struct Saved {
    pub state: State,
    /// In the adapters' order.
    pub masters: Vec<Tensor>,
    pub moments: Moments,
    /// The adapters that captured what the next update reuses; none where it captures.
    pub captured: Vec<Tensor>,
    /// Digest of the whole checkpoint; compared over ranks, which may have read different files.
    pub digest: String,
}

/// Whether `folder` holds a checkpoint, and not adapters alone.
#[must_use]
pub fn is_checkpoint(folder: &Path) -> bool {
    folder.join(STATE).is_file()
}

/// The state of the checkpoint in `folder`, without tensors.
///
/// # Errors
/// When `state.json` is not what was written.
pub fn state_of(folder: &Path) -> Result<State, Error> {
    Ok(sealed_in(folder)?.state)
}

/// Reads the checkpoint in `folder` for a run that has `adapters`, as [`super::Store::read`] does.
///
/// # Errors
/// As [`super::Store::read`].
pub fn read_folder(folder: &Path, adapters: &Adapters) -> Result<Saved, Error> {
    let sealed = sealed_in(folder)?;
    let file = folder.join(MASTERS);
    let map = map_file(&file).map_err(|source| Error::Read { file: file.clone(), source })?;
    compare(&file, sha256_hex(&map), &sealed.files[MASTERS])?;
    let tensors = SafeTensors::deserialize(&map).map_err(|source| Error::Tensors { file: file.clone(), source })?;
    let part = |part: &str| {
        let names = adapters.names().map(|name| format!("{part}.{name}"));
        names.zip(adapters.tensors()).map(|(name, like)| tensor(&tensors, &file, name, like)).collect()
    };
    let [masters, mean, square]: [Result<Vec<Tensor>, Error>; 3] = PARTS.map(part);
    let is_captured = tensors.names().iter().any(|name| name.starts_with(&format!("{CAPTURED}.")));
    let captured = if is_captured { part(CAPTURED)? } else { Vec::new() };
    let Sealed { state, seal, .. } = sealed;
    let (masters, mean, square) = (masters?, mean?, square?);
    let moments = Moments { steps: state.optimizer_steps, mean, square };
    Ok(Saved { masters, moments, captured, digest: seal, state })
}

/// The state in `folder` with its digests; the seal is checked, and every file is listed.
pub(super) fn sealed_in(folder: &Path) -> Result<Sealed, Error> {
    let file = folder.join(STATE);
    let text = fs::read(&file).map_err(|source| Error::Read { file: file.clone(), source })?;
    let no_state = |source: serde_json::Error| match source.classify() {
        Category::Data => Error::Schema { file: file.clone(), source },
        Category::Io | Category::Syntax | Category::Eof => Error::Torn { file: file.clone(), source },
    };
    let sealed: Sealed = serde_json::from_slice(&text).map_err(no_state)?;
    compare(&file, sealed.digest().map_err(no_state)?, &sealed.seal)?;
    match LISTED.into_iter().find(|name| !sealed.files.contains_key(*name)) {
        Some(name) => Err(Error::Unlisted { file, name }),
        None => Ok(sealed),
    }
}

/// A tensor of the file, which must have the dtype and shape of `like`: nothing is converted.
fn tensor(tensors: &SafeTensors<'_>, file: &Path, name: String, like: &Tensor) -> Result<Tensor, Error> {
    let view = tensors.tensor(&name).map_err(|source| Error::Tensors { file: file.to_owned(), source })?;
    let (found, wanted) = ((kind_of(view.dtype()), view.shape().to_vec()), (Some(like.kind()), sizes(like)));
    if found != wanted {
        let words = |(kind, shape): (Option<Kind>, Vec<usize>)| {
            kind.map_or_else(|| "of a dtype that is not read".to_owned(), |kind| format!("{kind:?} {shape:?}"))
        };
        let file = file.to_owned();
        return Err(Error::Misfit { file, name, found: words(found), wanted: words(wanted) });
    }
    let filled = || {
        let mut tensor = Tensor::f_empty(like.size(), (like.kind(), Device::Cpu))?;
        fill_from_bytes(&mut tensor, view.data(), like.kind())?;
        Ok(tensor.f_to_device(like.device())?)
    };
    filled().map_err(|source| Error::Bytes { name, source })
}

fn sizes(tensor: &Tensor) -> Vec<usize> {
    tensor.size().into_iter().map(|size| as_index(from_dim(size))).collect()
}

/// Refuses a file whose digest is another one.
pub(super) fn compare(file: &Path, found: String, wanted: &str) -> Result<(), Error> {
    if found == wanted {
        return Ok(());
    }
    Err(Error::Damaged { file: file.to_owned(), found, wanted: wanted.to_owned() })
}
