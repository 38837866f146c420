//! Heartbeats: each rank writes a small file in the run directory that says where the rank is and that it runs.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::runtime::failure::{Phase, Site};
use crate::runtime::units::{LayerIndex, Rank};

/// The folder of heartbeats in a run directory.
const FOLDER: &str = "heartbeat";
/// The report of the rank that ends the job. The file also tells the other ranks that the report is printed.
const REPORT: &str = "verdict.txt";

/// One heartbeat of a rank.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[expect(missing_docs, reason = "the other fields' names say everything")]
pub struct Heartbeat {
    /// The rank within the world.
    pub rank: Rank,
    pub host: String,
    pub pid: u32,
    /// The same number on all ranks of a job, another in every job.
    pub job: u64,
    pub phase: Phase,
    /// `None` between layers.
    pub layer: Option<LayerIndex>,
    /// Borders of phases and layers passed so far.
    pub borders: u64,
    /// Whether it waits for other ranks.
    pub waits: bool,
    /// Whether it may wait for other ranks inside its GPU, which `waits` does not show.
    pub linked: bool,
    /// Seconds since the last border, without those in which the process did not run.
    pub seconds_here: f64,
    /// Seconds that it may stay at its site.
    pub deadline_seconds: f64,
    /// Time of the last border, by its machine's clock (UTC).
    pub entered: String,
    /// Time of writing, by the same clock.
    pub written: String,
    /// Heartbeats written before.
    pub count: u64,
}

impl Heartbeat {
    /// The rank's site at the time of writing.
    #[must_use]
    pub fn site(&self) -> Site {
        Site { rank: self.rank, phase: self.phase, layer: self.layer }
    }
}

/// Result of reading a rank's file.
#[derive(Clone, Debug, PartialEq)]
pub enum Reading {
    /// The last heartbeat of the rank.
    Present(Heartbeat),
    /// No file: the rank has ended in order.
    Removed,
    /// The file cannot be read, or belongs to another job: nothing is known.
    Unreadable,
}

/// The heartbeat files of one job.
#[derive(Clone, Debug)]
pub struct HeartbeatFiles {
    folder: PathBuf,
    job: u64,
}

impl HeartbeatFiles {
    /// Files of the job with this number, in `run_dir`.
    #[must_use]
    pub fn new(run_dir: &Path, job: u64) -> HeartbeatFiles {
        HeartbeatFiles { folder: run_dir.join(FOLDER), job }
    }

    /// The number of the job.
    #[must_use]
    pub fn job(&self) -> u64 {
        self.job
    }

    /// Creates the folder, and removes files that a crashed job has left there. Rank 0 calls this before any rank
    /// writes.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn prepare(&self) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        fs::read_dir(&self.folder)?.try_for_each(|entry| removed_or_absent(fs::remove_file(entry?.path())))
    }

    /// Path of a rank's heartbeat.
    #[must_use]
    pub fn file(&self, rank: Rank) -> PathBuf {
        self.folder.join(format!("rank_{rank}.json"))
    }

    fn report_file(&self) -> PathBuf {
        self.folder.join(REPORT)
    }

    /// Writes a heartbeat: a temporary file is renamed. The file is not synced, because it need not survive a crash. A folder
    /// that somebody has removed is made again.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, heartbeat: &Heartbeat) -> io::Result<()> {
        let temporary = self.folder.join(format!(".rank_{}.json.new", heartbeat.rank));
        let text = serde_json::to_string(heartbeat)? + "\n";
        let write = || fs::write(&temporary, &text).and_then(|()| fs::rename(&temporary, self.file(heartbeat.rank)));
        match write() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                fs::create_dir(&self.folder)?;
                write()
            }
            written => written,
        }
    }

    /// Reads a rank's heartbeat.
    #[must_use]
    pub fn read(&self, rank: Rank) -> Reading {
        let bytes = fs::read(self.file(rank));
        let heartbeat = match &bytes {
            Ok(text) => serde_json::from_slice::<Heartbeat>(text).ok(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Reading::Removed,
            Err(_) => None,
        };
        let own = |heartbeat: &Heartbeat| heartbeat.job == self.job && heartbeat.rank == rank;
        heartbeat.filter(own).map_or(Reading::Unreadable, Reading::Present)
    }

    /// Stores `text` as the report of this job. Returns `false` if another rank was first. If the file cannot be
    /// created for another reason, this rank counts as the first: a report printed twice is better than none.
    #[must_use]
    pub fn claim_report(&self, text: &str) -> bool {
        let opened = OpenOptions::new().write(true).create_new(true).open(self.report_file());
        match opened {
            Ok(mut file) => {
                // The report is also on standard error and in the log.
                let _ = writeln!(file, "{text}");
                true
            }
            Err(error) => error.kind() != io::ErrorKind::AlreadyExists,
        }
    }

    /// Removes a rank's file, and the folder if the file was the last. A file that cannot be removed does no harm.
    pub fn remove(&self, rank: Rank) {
        let _ = removed_or_absent(fs::remove_file(self.file(rank))).and_then(|()| fs::remove_dir(&self.folder));
    }
}

/// A file that is not there counts as removed.
fn removed_or_absent(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn heartbeat(rank: usize, phase: Phase, layer: Option<usize>) -> Heartbeat {
        Heartbeat {
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
    fn a_heartbeat_is_read_as_written_and_only_by_its_own_job() {
        let run = tempfile::tempdir().unwrap();
        let files = HeartbeatFiles::new(run.path(), 7);
        files.prepare().unwrap();
        let beat = heartbeat(2, Phase::Capture, Some(3));
        files.write(&beat).unwrap();
        assert_eq!(files.read(Rank(2)), Reading::Present(beat));
        assert_eq!(HeartbeatFiles::new(run.path(), 8).read(Rank(2)), Reading::Unreadable);
        assert_eq!(files.read(Rank(0)), Reading::Removed);
        fs::write(files.file(Rank(1)), "{\"rank\": 1, ").unwrap();
        assert_eq!(files.read(Rank(1)), Reading::Unreadable);
    }

    #[test]
    fn one_rank_claims_the_report_and_the_last_one_removes_the_folder() {
        let run = tempfile::tempdir().unwrap();
        let files = HeartbeatFiles::new(run.path(), 7);
        assert!(files.claim_report("no folder"));
        files.prepare().unwrap();
        assert!(files.claim_report("rank 1 lags"));
        assert!(!files.claim_report("rank 1 lags, says another"));
        assert_eq!(fs::read_to_string(run.path().join("heartbeat/verdict.txt")).unwrap(), "rank 1 lags\n");
        files.write(&heartbeat(7, Phase::Start, None)).unwrap();
        files.prepare().unwrap();
        for rank in 0..2 {
            files.write(&heartbeat(rank, Phase::Start, None)).unwrap();
        }
        fs::remove_dir_all(run.path().join("heartbeat")).unwrap();
        for rank in 0..2 {
            files.write(&heartbeat(rank, Phase::Start, None)).unwrap();
        }
        files.remove(Rank(0));
        assert!(files.file(Rank(1)).exists());
        files.remove(Rank(1));
        assert_eq!(fs::read_dir(run.path()).unwrap().count(), 0);
    }
}
