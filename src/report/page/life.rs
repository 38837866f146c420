//! Whether the processes of a run are there, and where its ranks were last. Nothing is locked: a reader disturbs no start.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::runtime::liveness::Heartbeat;

/// A heartbeat that is not older shows that its run goes on; ranks write theirs every two seconds at least.
const FRESH: Duration = Duration::from_mins(1);
/// The clocks of a machine and of its files' server lie no further apart.
const CLOCKS: Duration = Duration::from_mins(10);
/// Units of times in /proc, a second.
const TICKS: u64 = 100;
/// Most ranks whose places are shown.
const PLACES_MAX: usize = 16;

/// Whether a run that has no receipt goes on.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) enum Life {
    /// Its process is there, stuck or not, or its ranks have just written.
    Running,
    /// Its process was on this machine and is not there any more, or another program has its number.
    Gone,
    /// Nothing tells: it ran on another machine, or left nothing.
    #[default]
    Unknown,
}

/// What a run directory tells of its processes.
#[derive(Clone, Debug, Default)]
pub(super) struct Signs {
    pub(super) life: Life,
    /// Where each rank was when it last wrote; a rank that ended in order has no entry.
    pub(super) places: Vec<String>,
}

impl Signs {
    pub(super) fn read(run_dir: &Path) -> Signs {
        let mut beats: Vec<(Heartbeat, Duration)> = Vec::new();
        for entry in fs::read_dir(run_dir.join("heartbeat")).into_iter().flatten().flatten() {
            // Beside them lie the watchdog's verdict and files that are being written.
            if entry.path().extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let age = entry.metadata().and_then(|about| about.modified()).ok().map(age);
            let beat = fs::read(entry.path()).ok().and_then(|text| serde_json::from_slice(&text).ok());
            beats.extend(beat.zip(age));
        }
        beats.sort_by_key(|(beat, _)| beat.rank);
        let is_fresh = beats.iter().any(|(_, age)| *age <= FRESH);
        let holder = fs::read_to_string(run_dir.join(".lock")).ok();
        let taken = fs::metadata(run_dir.join(".lock")).and_then(|about| about.modified()).ok();
        let life = match holder.as_deref().and_then(|lock| process_here(lock, taken)) {
            Some(true) => Life::Running,
            Some(false) => Life::Gone,
            None if is_fresh => Life::Running,
            None => Life::Unknown,
        };
        let mut places: Vec<String> = beats.iter().take(PLACES_MAX).map(|(beat, _)| place(beat)).collect();
        if beats.len() > PLACES_MAX {
            places.push(format!("and {} ranks more, in heartbeat/", beats.len() - PLACES_MAX));
        }
        Signs { life, places }
    }
}

/// How long ago a file was written; nothing where the clock was set back since.
fn age(written: SystemTime) -> Duration {
    SystemTime::now().duration_since(written).unwrap_or_default()
}

/// Whether the process that took the lock at `taken` runs; absent where it ran on another machine.
fn process_here(lock: &str, taken: Option<SystemTime>) -> Option<bool> {
    let of = |name: &str| lock.lines().find_map(|line| line.strip_prefix(name));
    let (host, process) = (of("host ")?, of("process ")?);
    let here = rustix::system::uname();
    if here.nodename().to_string_lossy() != host {
        return None;
    }
    // A process that has ended and whose parent has not noticed has no command line.
    let folder = Path::new("/proc").join(process.trim());
    let is_there = fs::read(folder.join("cmdline")).is_ok_and(|line| !line.is_empty());
    // A program that began after the lock was taken has only got the process's number.
    let is_other = || taken.zip(started(&folder)).is_some_and(|(taken, started)| started > taken + CLOCKS);
    Some(is_there && !is_other())
}

/// When the process of a folder in /proc began.
fn started(folder: &Path) -> Option<SystemTime> {
    let stat = fs::read_to_string(folder.join("stat")).ok()?;
    // The second field is a name in brackets that may hold anything; the start is the twenty-second.
    let ticks: u64 = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()?;
    let system = fs::read_to_string("/proc/stat").ok()?;
    let boot: u64 = system.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    Some(SystemTime::UNIX_EPOCH + Duration::from_secs(boot + ticks / TICKS))
}

fn place(beat: &Heartbeat) -> String {
    let waits = if beat.waits { ", waiting for other ranks" } else { "" };
    format!("{} ({}, process {}){waits}, at {}", beat.site(), beat.host, beat.pid, beat.written)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_is_not_there_is_gone_and_one_of_another_machine_unknown() {
        let room = tempfile::tempdir().unwrap();
        assert_eq!(Signs::read(room.path()).life, Life::Unknown);
        let lock = |host: &str, process: u32| {
            fs::write(room.path().join(".lock"), format!("job 1\nhost {host}\nprocess {process}\n")).unwrap();
            Signs::read(room.path()).life
        };
        let name = rustix::system::uname();
        let here = name.nodename().to_string_lossy();
        assert_eq!(lock(&here, std::process::id()), Life::Running);
        assert_eq!(lock(&here, 4_194_304), Life::Gone, "above the largest number of a process");
        assert_eq!(lock("elsewhere", 1), Life::Unknown);
        let beat = r#"{"rank":1,"host":"elsewhere","pid":7,"job":1,"phase":"replay","layer":3,"borders":1,"waits":true,
            "linked":false,"seconds_here":0.5,"deadline_seconds":9.0,"entered":"then","written":"now","count":2}"#;
        fs::create_dir(room.path().join("heartbeat")).unwrap();
        fs::write(room.path().join("heartbeat/rank_1.json"), beat).unwrap();
        assert_eq!(lock("elsewhere", 1), Life::Running, "it has just written");
        assert_eq!(lock(&here, std::process::id()), Life::Running);
        let old = SystemTime::now() - 2 * FRESH;
        fs::File::options()
            .write(true)
            .open(room.path().join("heartbeat/rank_1.json"))
            .unwrap()
            .set_modified(old)
            .unwrap();
        assert_eq!(lock(&here, std::process::id()), Life::Running, "it is stuck, and there");
        let long_ago = SystemTime::now() - Duration::from_hours(1000);
        let held = fs::File::options().write(true).open(room.path().join(".lock")).unwrap();
        held.set_modified(long_ago).unwrap();
        assert_eq!(Signs::read(room.path()).life, Life::Gone, "another program has its number");
        let places = Signs::read(room.path()).places;
        assert_eq!(places, ["rank 1, replay, layer 3 (elsewhere, process 7), waiting for other ranks, at now"]);
    }
}
