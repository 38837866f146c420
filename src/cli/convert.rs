//! The verb that converts a GGUF file.

use std::path::PathBuf;

use clap::Args;
use longstraw::report::say;
use longstraw::runtime::failure::{Exit, Failure};
use longstraw::tools::convert;

#[derive(Args, Debug)]
pub(super) struct ConvertFlags {
    /// The GGUF file
    pub(super) source: PathBuf,
    /// The folder to make
    destination: PathBuf,
    /// Write bfloat16 instead of float32
    #[arg(long)]
    bf16: bool,
    /// Replace the destination, whatever it is
    #[arg(long)]
    force: bool,
}

pub(super) fn convert(flags: &ConvertFlags) -> Result<Exit, Failure> {
    let weights = if flags.bf16 { convert::Weights::Bfloat16 } else { convert::Weights::Float32 };
    let options = convert::Options { weights, force: flags.force, ..Default::default() };
    let summary = convert::convert(&flags.source, &flags.destination, &options)?;
    say(&format!(
        "{}: {} layers, {} tensors, {} parameters, {}",
        summary.destination.display(),
        summary.layers,
        summary.tensors,
        summary.parameters,
        summary.bytes
    ));
    Ok(Exit::Done)
}
