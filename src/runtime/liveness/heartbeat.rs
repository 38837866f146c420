//! Heartbeats: a small file of each rank in the run directory that says where the rank is and that it runs.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::runtime::failure::{Phase, Site};
use crate::runtime::units::{LayerIndex, Rank};

/// The folder of heartbeats in a run directory.
const FOLDER: &str = "heartbeat";
/// What the rank that ends a job for good has said; also what tells the others that it is said.
const VERDICT: &str = "verdict.txt";

/// One heartbeat of a rank.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Beat {
    /// The rank within the world.
    pub rank: Rank,
    /// Its machine.
    pub host: String,
    /// Its process on that machine.
    pub pid: u32,
    /// Which job it is of: ranks of one job have the same number.
    pub job: u64,
    /// The phase it is in.
    pub phase: Phase,
    /// The layer, where the phase goes through layers.
    pub layer: Option<LayerIndex>,
    /// Borders of phases and layers that it has passed.
    pub borders: u64,
    /// Whether it waits for other ranks.
    pub waits: bool,
    /// Whether it may wait for other ranks inside its GPU, which `waits` does not tell.
    pub linked: bool,
    /// Seconds since it passed the last border, without those in which the process did not run.
    pub seconds_here: f64,
    /// Seconds that it may stay there.
    pub deadline_seconds: f64,
    /// When it passed the last border, by its machine's clock (UTC).
    pub entered: String,
    /// When this was written, by the same clock.
    pub written: String,
    /// Heartbeats written before.
    pub count: u64,
}

impl Beat {
    /// Where it is.
    #[must_use]
    pub fn site(&self) -> Site {
        Site { rank: self.rank, phase: self.phase, layer: self.layer }
    }
}

/// What is found in a rank's place.
#[derive(Clone, Debug, PartialEq)]
pub enum Heard {
    /// Its last heartbeat.
    Beat(Beat),
    /// No file: it has ended, in order.
    Gone,
    /// Something that cannot be read, or is of another job: no news.
    Unclear,
}

/// The folder of heartbeats of one job.
#[derive(Clone, Debug)]
pub struct Hearts {
    folder: PathBuf,
    job: u64,
}

impl Hearts {
    /// Heartbeats of the job with this number, in `run_dir`.
    #[must_use]
    pub fn of(run_dir: &Path, job: u64) -> Hearts {
        Hearts { folder: run_dir.join(FOLDER), job }
    }

    /// The job's number.
    #[must_use]
    pub fn job(&self) -> u64 {
        self.job
    }

    /// Makes the folder, and removes what a job that did not end in order has left there: heartbeats, perhaps of ranks
    /// that this one has not, and the verdict. Rank 0 does so, before any rank writes.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn prepare(&self) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        fs::read_dir(&self.folder)?.try_for_each(|entry| absent(fs::remove_file(entry?.path())))
    }

    /// A rank's file.
    #[must_use]
    pub fn file(&self, rank: Rank) -> PathBuf {
        self.folder.join(format!("rank_{rank}.json"))
    }

    fn verdict_file(&self) -> PathBuf {
        self.folder.join(VERDICT)
    }

    /// Writes a heartbeat, beside and renamed. Nothing is brought to the disk: it is to be seen, not to last.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, beat: &Beat) -> io::Result<()> {
        let beside = self.folder.join(format!(".rank_{}.json.new", beat.rank));
        fs::write(&beside, serde_json::to_string(beat)? + "\n")?;
        fs::rename(beside, self.file(beat.rank))
    }

    /// What is found in a rank's place.
    #[must_use]
    pub fn hear(&self, rank: Rank) -> Heard {
        let read = fs::read(self.file(rank));
        let beat = match &read {
            Ok(text) => serde_json::from_slice::<Beat>(text).ok(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Heard::Gone,
            Err(_) => None,
        };
        beat.filter(|beat| beat.job == self.job && beat.rank == rank).map_or(Heard::Unclear, Heard::Beat)
    }

    /// Leaves `words` as this job's verdict; `false` where another rank was first. Whoever cannot ask counts as the first:
    /// said twice is better than not at all.
    #[must_use]
    pub fn first_to_say(&self, words: &str) -> bool {
        let opened = OpenOptions::new().write(true).create_new(true).open(self.verdict_file());
        match opened {
            Ok(mut file) => {
                // The words stand on standard error and in a log as well.
                let _ = writeln!(file, "{words}");
                true
            }
            Err(error) => error.kind() != io::ErrorKind::AlreadyExists,
        }
    }

    /// Removes a rank's file, and the folder with the last of them. What cannot be removed stays: it does no harm.
    pub fn remove(&self, rank: Rank) {
        let _ = absent(fs::remove_file(self.file(rank))).and_then(|()| fs::remove_dir(&self.folder));
    }
}

/// What is not there is removed.
fn absent(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn beat(rank: usize, phase: Phase, layer: Option<usize>) -> Beat {
        Beat {
            rank: Rank(rank),
            host: "node".into(),
            pid: 100 + u32::try_from(rank).unwrap(),
            job: 7,
            phase,
            layer: layer.map(LayerIndex),
            borders: 5,
            waits: true,
            linked: false,
            seconds_here: 0.0,
            deadline_seconds: 600.0,
            entered: "2026-01-02T03:04:05Z".into(),
            written: "2026-01-02T03:04:06Z".into(),
            count: 0,
        }
    }

    #[test]
    fn a_heartbeat_comes_back_as_it_was_written_and_only_to_its_own_job() {
        let run = tempfile::tempdir().unwrap();
        let hearts = Hearts::of(run.path(), 7);
        hearts.prepare().unwrap();
        let beat = beat(2, Phase::Capture, Some(3));
        hearts.write(&beat).unwrap();
        assert_eq!(hearts.hear(Rank(2)), Heard::Beat(beat));
        assert_eq!(Hearts::of(run.path(), 8).hear(Rank(2)), Heard::Unclear);
        assert_eq!(hearts.hear(Rank(0)), Heard::Gone);
        fs::write(hearts.file(Rank(1)), "{\"rank\": 1, ").unwrap();
        assert_eq!(hearts.hear(Rank(1)), Heard::Unclear);
    }

    #[test]
    fn one_rank_speaks_and_the_last_one_removes_the_folder() {
        let run = tempfile::tempdir().unwrap();
        let hearts = Hearts::of(run.path(), 7);
        assert!(hearts.first_to_say("nowhere to ask"));
        hearts.prepare().unwrap();
        assert!(hearts.first_to_say("rank 1 lags"));
        assert!(!hearts.first_to_say("rank 1 lags, says another"));
        assert_eq!(fs::read_to_string(run.path().join("heartbeat/verdict.txt")).unwrap(), "rank 1 lags\n");
        hearts.write(&beat(7, Phase::Start, None)).unwrap();
        hearts.prepare().unwrap();
        for rank in 0..2 {
            hearts.write(&beat(rank, Phase::Start, None)).unwrap();
        }
        hearts.remove(Rank(0));
        assert!(hearts.file(Rank(1)).exists());
        hearts.remove(Rank(1));
        assert_eq!(fs::read_dir(run.path()).unwrap().count(), 0);
    }
}
