//! The log of each rank, `logs/rank_N.log` in the run directory: phases and layers at debug, updates, notes and failures
//! at info. It shows where a rank was when the launcher's output is lost.

use std::fs::{self, OpenOptions};
use std::path::Path;
use std::sync::Arc;

use tracing_subscriber::EnvFilter;

use super::error::Error;
use crate::runtime::terminal::VisibleLog;
use crate::runtime::units::Rank;

/// Opens this rank's log and sends every event of the process there that passes `filter` (a level, or `module=level,…`).
/// A log of an earlier run is continued, since its last lines may say why there is another run. The log of a process is
/// opened once; later calls change nothing.
///
/// # Errors
/// When the filter cannot be parsed, or the file cannot be written.
pub fn open_log(folder: &Path, rank: Rank, ranks: usize, filter: &str) -> Result<(), Error> {
    let wrong = |error: &dyn std::fmt::Display| Error::Filter { filter: filter.to_owned(), reason: error.to_string() };
    let chosen = EnvFilter::try_new(filter).map_err(|error| wrong(&error))?;
    let logs = folder.join("logs");
    let file = logs.join(format!("rank_{rank}.log"));
    let opened = fs::create_dir_all(&logs).and_then(|()| OpenOptions::new().create(true).append(true).open(&file));
    let opened = opened.map_err(|source| Error::Write { file: file.clone(), source })?;
    let opened = Arc::new(VisibleLog::new(file.display().to_string(), opened));
    let lines = tracing_subscriber::fmt().with_env_filter(chosen).with_ansi(false).with_target(false);
    // A process has one subscriber: a second run in it goes on with the first one's.
    let _ = lines.with_writer(opened).try_init();
    let (version, process) = (env!("CARGO_PKG_VERSION"), std::process::id());
    tracing::info!("longstraw {version}, rank {rank} of {ranks}, process {process}");
    Ok(())
}
