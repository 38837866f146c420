//! What an earlier run left in a run directory, moved aside before a run starts from its beginning.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::error::Error;

/// Folder of earlier runs in a run directory; each has a folder of its own there, 1, 2, ….
const FOLDER: &str = "earlier";
/// What shows that there was a run: none of these is there, or all are empty, where a run has made no update.
const PROGRESS: [&str; 4] = ["checkpoints", "metrics.jsonl", "answers.jsonl", "receipt.json"];
/// Everything that is moved, checkpoints last: until then `train --resume` goes on from them.
const MOVED: [&str; 14] = [
    "answers.dropped.jsonl",
    "metrics.dropped.jsonl",
    "summary.md",
    "replay.jsonl",
    "report.html",
    "trace",
    "tensorboard",
    "config.resolved.toml",
    "receipt.json",
    "adapter",
    "answers.jsonl",
    "metrics.jsonl",
    "latest",
    "checkpoints",
];

/// Moves what an earlier run has left in `folder` into `earlier/N`, and returns that folder; `None` where no run has left
/// anything. The logs stay, and are continued. Rank 0 alone calls it.
///
/// # Errors
/// When something cannot be moved. What was moved before stays where it is.
pub fn set_aside(folder: &Path) -> Result<Option<PathBuf>, Error> {
    if !PROGRESS.iter().any(|name| holds_something(&folder.join(name))) {
        return Ok(None);
    }
    let mut number = 1_u64;
    while folder.join(FOLDER).join(number.to_string()).exists() {
        number += 1;
    }
    let place = folder.join(FOLDER).join(number.to_string());
    fs::create_dir_all(&place).map_err(|source| Error::Write { file: place.clone(), source })?;
    for name in MOVED {
        match fs::rename(folder.join(name), place.join(name)) {
            Err(source) if source.kind() != ErrorKind::NotFound => {
                return Err(Error::Write { file: folder.join(name), source });
            }
            _ => {}
        }
    }
    Ok(Some(place))
}

/// Whether there is a file with bytes or a folder with entries. A pipe or a device holds nothing.
fn holds_something(path: &Path) -> bool {
    let entries = || -> io::Result<bool> { Ok(fs::read_dir(path)?.next().is_some()) };
    match fs::metadata(path) {
        Ok(about) if about.is_dir() => entries().unwrap_or(true),
        Ok(about) => about.is_file() && about.len() > 0,
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_earlier_run_has_a_folder_of_its_own_and_logs_stay() {
        let room = tempfile::tempdir().unwrap();
        let run = room.path();
        assert!(set_aside(run).unwrap().is_none());
        for number in ["1", "2"] {
            fs::create_dir_all(run.join("logs")).unwrap();
            fs::create_dir_all(run.join("checkpoints/step_3")).unwrap();
            fs::write(run.join("metrics.jsonl"), number).unwrap();
            let place = set_aside(run).unwrap().unwrap();
            assert_eq!(place, run.join("earlier").join(number));
            assert!(place.join("checkpoints/step_3").is_dir() && run.join("logs").is_dir());
            assert_eq!(fs::read_to_string(place.join("metrics.jsonl")).unwrap(), number);
            assert!(!run.join("metrics.jsonl").exists() && !run.join("checkpoints").exists());
        }
        fs::write(run.join("metrics.jsonl"), "").unwrap();
        assert!(set_aside(run).unwrap().is_none(), "a run without an update leaves nothing");
    }
}
