//! Errors of checkpoints.

use std::io;
use std::path::PathBuf;

use safetensors::SafeTensorError;

use super::state::Difference;
use crate::model::adapter_file;
use crate::runtime::failure::{Classified, Exit};
use crate::tensor::bytes;

/// Why a checkpoint cannot be written, read or resumed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what each variant is and hold every field")]
pub enum Error {
    #[error("cannot write {}: {source}; the checkpoints before it stand as they were", file.display())]
    Write { file: PathBuf, source: io::Error },
    #[error("cannot write {}: {source}; the checkpoints before it stand as they were", file.display())]
    WriteTensors { file: PathBuf, source: SafeTensorError },
    #[error(transparent)]
    Adapter(#[from] adapter_file::Error),
    #[error("cannot read {}: {source}", file.display())]
    Read { file: PathBuf, source: io::Error },
    #[error("{} is of another version of longstraw: {source}", file.display())]
    Schema { file: PathBuf, source: serde_json::Error },
    #[error("{} is damaged: it is no JSON: {source}", file.display())]
    Torn { file: PathBuf, source: serde_json::Error },
    /// The newest checkpoint, or the newest that is not damaged, cannot be read now, or not by this version.
    #[error(
        "{source}; nothing is changed. {}. To go on from an older checkpoint, and lose the updates after it, rename {} to \
         {}.unused",
        if matches!(**source, Error::Read { .. }) {
            "Start again once the file can be read"
        } else {
            "Go on with the version that wrote it"
        },
        folder.display(),
        folder.display()
    )]
    Unusable { folder: PathBuf, source: Box<Error> },
    #[error(
        "no checkpoint in {} can be used: {}; nothing is changed. Bring one back from a copy, or begin anew with `longstraw \
         train --anew`, which moves what is there into a folder beside",
        folder.display(),
        passed_over.iter().map(|(_, error)| error.to_string()).collect::<Vec<_>>().join("; ")
    )]
    NoneUsable { folder: PathBuf, passed_over: Vec<(PathBuf, Error)> },
    #[error(
        "{} names {named}, and {} holds no checkpoint: is its disk there? Nothing is changed. Bring the folder back, or begin \
         anew with `longstraw train --anew`, which moves what is there into a folder beside",
        file.display(),
        folder.display()
    )]
    NoneThere { file: PathBuf, named: String, folder: PathBuf },
    #[error("{} names {}, which is not there: name another checkpoint", file.display(), folder.display())]
    NamesNone { file: PathBuf, folder: PathBuf },
    #[error(
        "{} is not there: a run writes best after an evaluation that checkpoint.keep_best has compared, in which every answer has a \
         reward, and latest with its first checkpoint; name a folder of checkpoints/",
        file.display()
    )]
    NotNamed { file: PathBuf },
    #[error(
        "the adapters of experts are spread over {ranks} ranks (parallel.ep_size), and one rank cannot save them after a \
         failure; go on from the last checkpoint (checkpoint.every, checkpoint.every_sec)"
    )]
    Spread { ranks: usize },
    #[error("the checkpoint's answers and scores between two updates of a group cannot be read: {reason}")]
    Round { reason: String },
    #[error(
        "the checkpoint was written between two updates of {groups} groups (grpo.updates_per_group), which cannot be dealt to \
         {side_by_side} prompt groups of ranks: go on with a number of ranks and a parallel.cp_size that divide them"
    )]
    OtherRanks { groups: usize, side_by_side: usize },
    #[error("{} is damaged: its SHA-256 is {found}, and {wanted} was written", file.display())]
    Damaged { file: PathBuf, found: String, wanted: String },
    #[error("{} names no digest of {name}", file.display())]
    Unlisted { file: PathBuf, name: &'static str },
    #[error("{}: {source}", file.display())]
    Tensors { file: PathBuf, source: SafeTensorError },
    #[error("{}: {name} is {found}, this run has {wanted}", file.display())]
    Misfit { file: PathBuf, name: String, found: String, wanted: String },
    #[error("{name}: {source}")]
    Bytes { name: String, source: bytes::Error },
    #[error(
        "{} is of another run: {}; go on with what it was saved with, or start elsewhere with --run-dir, or begin anew here with \
         --anew, which moves what is there into a folder beside",
        folder.display(),
        differences.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    )]
    OtherRun { folder: PathBuf, differences: Vec<Difference> },
    #[error("run.steps should be at least {updates}: {} has made so many (it is {steps})", folder.display())]
    Beyond { folder: PathBuf, updates: u64, steps: u64 },
    #[error(
        "{} holds checkpoints of an earlier run; go on from the newest with `longstraw train --resume`, begin anew with \
         `longstraw train --anew`, which moves what is there into a folder beside, or choose another place with --run-dir",
        folder.display()
    )]
    Earlier { folder: PathBuf },
    #[error(
        "{}: the {schedule} decay of the learning rate was over {saved} updates and would be over {now}: the rate of update \
         {next} would change from {rate_saved:e} to {rate_now:e}. Say which: --set optimizer.schedule_steps={saved} keeps the \
         decay, --set optimizer.schedule_steps={now} stretches it",
        folder.display()
    )]
    Horizon { folder: PathBuf, schedule: &'static str, saved: u64, now: u64, next: u64, rate_saved: f64, rate_now: f64 },
}

impl Error {
    /// Whether the content of a file is not what was written, so that no later attempt can read it.
    pub(super) fn is_damage(&self) -> bool {
        matches!(self, Error::Damaged { .. } | Error::Torn { .. })
    }
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::OtherRun { .. } | Error::Beyond { .. } | Error::Earlier { .. } | Error::Horizon { .. } => {
                Exit::Config
            }
            Error::Bytes { source, .. } => source.exit(),
            Error::Adapter(source) => source.exit(),
            _ => Exit::Data,
        }
    }
}
