//! What is saved: adapters in PEFT's format, and checkpoints, which hold all that a run needs to go on.
//!
//! A checkpoint is a folder. It is written under another name, brought to the disk, and renamed. So `checkpoints/step_N` is
//! whole, or a digest does not match:
//!
//! ```text
//!   <run directory>/latest                          the name of the newest checkpoint that all ranks agreed on
//!   <run directory>/best                            the name of the best one, with `checkpoint.keep_best`
//!   <run directory>/checkpoints/step_N/
//!     state.json                                    counts, data position, digests of what must be the same again
//!     masters.safetensors                           masters and both moments in their own dtype: the run goes on from these
//!     adapter_model.safetensors, adapter_config.json   the adapters in PEFT's format, float32, for other programs
//! ```

mod error;
mod reading;
mod state;
mod store;

use std::path::{Path, PathBuf};

use tch::{Device, Kind};

pub use error::Error;
pub use reading::{Saved, is_checkpoint, read_folder, state_of};
pub use state::{Difference, State, value_differences};
pub use store::{Newest, Store, Tensors, folder_of};

use crate::model::adapter_file::{self, AdapterShape};
use crate::model::lora::{Adapter, Adapters};
use crate::model::spec::{Linear, Spec};
use crate::runtime::failure::Failure;
use crate::runtime::units::float;

/// Writes the adapters into `folder`; each file is written under another name and renamed. Rank 0 alone calls it.
///
/// # Errors
/// When the folder cannot be written.
pub fn save(folder: &Path, adapters: &Adapters, shape: &AdapterShape) -> Result<PathBuf, Failure> {
    save_adapters(folder, adapters, shape)?;
    Ok(folder.into())
}

fn save_adapters(folder: &Path, adapters: &Adapters, shape: &AdapterShape) -> Result<(), adapter_file::Error> {
    let entries: Vec<Adapter> = adapters
        .entries()
        .iter()
        .map(|adapter| Adapter {
            module: adapter.module.clone(),
            a_ri: adapter.a_ri.detach(),
            b_or: adapter.b_or.detach(),
        })
        .collect();
    adapter_file::save(folder, shape, &entries)
}

/// Reads adapters from a PEFT folder, which must be of `shape`: those of the linear layers for which `holds`.
///
/// # Errors
/// When a file is missing or does not fit the model or the shape.
pub fn load(
    folder: &Path,
    spec: &Spec,
    shape: &AdapterShape,
    holds: impl Fn(&Linear) -> bool,
    kind: Kind,
    device: Device,
) -> Result<Adapters, Failure> {
    let (found, entries) = adapter_file::load_where(holds, folder, spec, Some(shape), kind, device)?;
    Ok(Adapters::new(entries, found.alpha / float(found.rank), "policy"))
}
