//! What an earlier run left in a run directory, moved aside before a run starts from its beginning.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::error::Error;

/// Folder of earlier runs in a run directory; each has a folder of its own there, 1, 2, ….
const FOLDER: &str = "earlier";
/// What shows that there was a run: none of these is there, or all are empty, where a run has made no update.
const PROGRESS: [&str; 5] = ["checkpoints", "metrics.jsonl", "answers.jsonl", "receipt.json", "evaluation.json"];
/// Stands in the folder of an earlier run from before the first move until after the last one.
const MOVING: &str = ".moving";
/// First parts of the names of receipts of earlier starts.
const RECEIPTS: [&str; 2] = ["receipt.step_", "receipt.earlier"];
/// Everything that is moved, with the receipts of earlier starts.
const MOVED: [&str; 17] = [
    "results.jsonl",
    "evaluation.json",
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
    "best",
    "checkpoints",
];

/// Moves what an earlier run has left in `folder` into `earlier/N`, and returns that folder; `None` where no run has left
/// anything. The logs stay, and are continued. Rank 0 alone calls it.
///
/// # Errors
/// When something cannot be moved. What was moved before stays where it is, and [`finish_set_aside`] moves the rest.
pub fn set_aside(folder: &Path) -> Result<Option<PathBuf>, Error> {
    if !PROGRESS.iter().any(|name| holds_something(&folder.join(name))) {
        return Ok(None);
    }
    let mut number = 1_u64;
    while folder.join(FOLDER).join(number.to_string()).exists() {
        number += 1;
    }
    let place = folder.join(FOLDER).join(number.to_string());
    let marker = place.join(MOVING);
    let marked = fs::create_dir_all(&place).and_then(|()| File::create(&marker)).and_then(|file| file.sync_all());
    let marked = marked.and_then(|()| File::open(&place)?.sync_all());
    marked.map_err(|source| Error::Write { file: marker, source })?;
    move_all(folder, &place)?;
    Ok(Some(place))
}

/// Finishes a move that was interrupted, so that no start meets half of an earlier run; returns where it now is. `None` where
/// none was. Rank 0 alone calls it, before it looks at anything in `folder`.
///
/// # Errors
/// When something cannot be read or moved.
pub fn finish_set_aside(folder: &Path) -> Result<Option<PathBuf>, Error> {
    let earlier = folder.join(FOLDER);
    let entries = match fs::read_dir(&earlier) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        entries => entries.and_then(Iterator::collect::<io::Result<Vec<_>>>),
    };
    let entries = entries.map_err(|source| Error::Write { file: earlier, source })?;
    let Some(place) = entries.iter().map(fs::DirEntry::path).find(|place| place.join(MOVING).exists()) else {
        return Ok(None);
    };
    move_all(folder, &place)?;
    Ok(Some(place))
}

/// Moves everything of a run from `folder` to `place`, and removes the marker there.
fn move_all(folder: &Path, place: &Path) -> Result<(), Error> {
    let write = |file: PathBuf| move |source| Error::Write { file, source };
    let entries = fs::read_dir(folder).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    let names = entries.map_err(write(folder.into()))?.into_iter().map(|entry| entry.file_name());
    let names = names.filter_map(|name| name.into_string().ok());
    let receipts = names.filter(|name| RECEIPTS.iter().any(|start| name.starts_with(start)));
    for name in MOVED.into_iter().map(String::from).chain(receipts) {
        match fs::rename(folder.join(&name), place.join(&name)) {
            Err(source) if source.kind() != ErrorKind::NotFound => return Err(write(folder.join(name))(source)),
            _ => {}
        }
    }
    let synced = [folder, place].into_iter().try_for_each(|folder| File::open(folder)?.sync_all());
    synced.map_err(write(place.into()))?;
    let marker = place.join(MOVING);
    fs::remove_file(&marker).map_err(write(marker))
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
        assert!(finish_set_aside(run).unwrap().is_none(), "no move was interrupted");
        fs::write(run.join("metrics.jsonl"), "").unwrap();
        assert!(set_aside(run).unwrap().is_none(), "a run without an update leaves nothing");
    }

    #[test]
    fn a_move_that_was_interrupted_is_finished_into_the_same_folder() {
        let room = tempfile::tempdir().unwrap();
        let (run, place) = (room.path(), room.path().join("earlier/1"));
        assert!(finish_set_aside(run).unwrap().is_none());
        // A folder in the way refuses the last move, as a kill before it would leave things.
        fs::create_dir_all(run.join("checkpoints/step_3")).unwrap();
        fs::write(run.join("metrics.jsonl"), "3").unwrap();
        fs::write(run.join("receipt.step_2.json"), "2").unwrap();
        fs::create_dir_all(place.join("checkpoints/in_the_way")).unwrap();
        fs::write(place.join(MOVING), "").unwrap();
        assert!(finish_set_aside(run).is_err());
        assert!(place.join("metrics.jsonl").exists() && run.join("checkpoints").exists(), "half of it is moved");
        fs::remove_dir_all(place.join("checkpoints")).unwrap();
        assert_eq!(finish_set_aside(run).unwrap(), Some(place.clone()));
        assert!(place.join("checkpoints/step_3").is_dir() && place.join("receipt.step_2.json").exists());
        assert!(!run.join("checkpoints").exists() && !place.join(MOVING).exists());
        assert!(finish_set_aside(run).unwrap().is_none());
    }
}
