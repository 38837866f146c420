//! Saved adapters in PEFT's format.

use std::path::{Path, PathBuf};

use tch::{Device, Kind};

use crate::failure::Failure;
use crate::model::adapter_file::{self, AdapterShape};
use crate::model::lora::{Adapter, Adapters};
use crate::model::spec::Spec;
use crate::units::float;

/// Writes the adapters into `folder`, each file beside and renamed. Rank 0 calls it; the others wait for its outcome.
///
/// # Errors
/// When the folder cannot be written.
pub fn save(folder: &Path, adapters: &Adapters, shape: &AdapterShape) -> Result<PathBuf, Failure> {
    let entries: Vec<Adapter> = adapters
        .entries()
        .iter()
        .map(|adapter| Adapter {
            module: adapter.module.clone(),
            a_ri: adapter.a_ri.detach(),
            b_or: adapter.b_or.detach(),
        })
        .collect();
    adapter_file::save(folder, shape, &entries)?;
    Ok(folder.into())
}

/// Adapters from a PEFT folder, which must be of `shape`.
///
/// # Errors
/// When a file is missing or does not fit the model or the shape.
pub fn load(folder: &Path, spec: &Spec, shape: &AdapterShape, kind: Kind, device: Device) -> Result<Adapters, Failure> {
    let (found, entries) = adapter_file::load(folder, spec, Some(shape), kind, device)?;
    Ok(Adapters::new(entries, found.alpha / float(found.rank), "policy"))
}
