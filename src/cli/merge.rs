//! The verb that merges adapters into a checkpoint.

use std::path::PathBuf;

use clap::Args;
use longstraw::report::say;
use longstraw::runtime::failure::{Exit, Failure};
use longstraw::tools::merge;

#[derive(Args, Debug)]
pub(super) struct MergeFlags {
    /// A folder of adapters, a checkpoint, a run directory that has ended, or its file `best` or `latest`
    pub(super) adapter: PathBuf,
    /// The folder to make; it must not exist
    destination: PathBuf,
    /// The base model's folder [default: the one that the adapters name]
    #[arg(long)]
    model: Option<PathBuf>,
}

pub(super) fn merge(flags: &MergeFlags) -> Result<Exit, Failure> {
    let MergeFlags { adapter, destination, model } = flags;
    let options = merge::Options { adapter, model: model.as_deref(), destination };
    let summary = merge::merge(&options)?;
    let scaling = match &summary.rope_scaling {
        Some(table) => format!("; config.json has the run's rope_scaling, {table}"),
        None if summary.is_scaling_unknown => {
            "; config.json is the model's: nothing beside the adapters says whether they had a rope_scaling of their own".into()
        }
        None => String::new(),
    };
    say(&format!(
        "{}: {} with adapters added to {} layers, {} files, {}{}",
        destination.display(),
        summary.model.display(),
        summary.layers,
        summary.files,
        summary.bytes,
        scaling
    ));
    Ok(Exit::Done)
}
