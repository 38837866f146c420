//! A stopped or stuck rank is named and ends the job; a slow rank does not.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::json;

use super::job::{Job, nothing_passed, random_model};
use super::room::{Call, LONGSTRAW};

/// A job that lives longer hangs; no claim is about the time itself.
const END: Duration = Duration::from_mins(15);
const STALL: [&str; 2] = ["--set", "run.stall_sec=5"];

#[test]
fn a_rank_stopped_in_capture_is_named_and_every_process_of_the_job_ends() {
    let room = random_model(8192, 64, 2, "steps = 100\n");
    room.write("run/receipt.json", "{\"passed\": true}");
    let mut job = Job::start(&room, 3, "run", &STALL);
    // The message names the site of the last heartbeat.
    job.until("a heartbeat in capture", |job| job.heartbeat(1).filter(|beat| beat["phase"] == "capture"));
    let last = job.signal_at(1, libc::SIGSTOP, "capture, layer", 2);
    assert!(last.contains("capture, layer"), "it was stopped elsewhere: {last}");
    let process = job.process(1).to_owned();
    let said = job.ends_within(END);
    let who = format!("process {process}) has not moved for ");
    said.refused(4, &["rank 1, capture", &who, "it is stopped or dead, or its machine is", "longstraw train --resume"]);
    nothing_passed(&room, "run");
    let verdict = room.read("run/heartbeat/verdict.txt");
    assert!(verdict.starts_with("rank 1, capture") && said.err.contains(verdict.trim()), "{verdict}");
    let logs = [0, 2].map(|rank| room.read(&format!("run/logs/rank_{rank}.log")));
    assert!(logs.iter().any(|log| log.contains("ERROR rank 1, capture")), "{logs:?}");
}

#[test]
fn a_rank_stopped_in_save_is_named_and_the_run_continues_from_the_complete_checkpoint() {
    let more = "steps = 3\n[lora]\nrank = 64\n[checkpoint]\nevery = 1\n";
    let room = random_model(256, 32, 2, more);
    let mut job = Job::start(&room, 3, "run", &STALL);
    // Only rank 0 writes; the others wait for it.
    let last = job.signal_at(0, libc::SIGSTOP, "DEBUG save", 2);
    assert!(last.contains("DEBUG save"), "it was stopped elsewhere: {last}");
    let said = job.ends_within(END);
    said.refused(4, &["rank 0, ", "it is stopped or dead, or its machine is"]);
    nothing_passed(&room, "run");
    // The signal may come after the save has ended.
    let complete = if room.path().join("run/checkpoints/step_2").exists() { 2 } else { 1 };
    let said = room.ranks(3, &["train", "--resume"]);
    said.ended(0, &[&format!("going on from run/checkpoints/step_{complete}: update {} is next", complete + 1)]);
    assert_eq!(room.read_json("run/receipt.json")["passed"], true);
    assert!(!room.path().join("run/heartbeat").exists(), "a run that ends in order leaves no heartbeats");
}

#[test]
fn a_refused_second_start_touches_nothing_of_the_first_one_whose_watchdog_goes_on() {
    let room = random_model(2048, 64, 2, "steps = 100000\n");
    let mut job = Job::start(&room, 3, "run", &STALL);
    job.until("a heartbeat", |job| job.heartbeat(1));
    room.write("run/requeue", "of the first one");
    let logs = || (0..3).map(|rank| room.read(&format!("run/logs/rank_{rank}.log"))).collect::<String>();
    let processes = |text: &str| text.matches("process ").count();
    let (job_number, lines) = (job.heartbeat(1).unwrap()["job"].clone(), processes(&logs()));
    for flag in ["--resume", "--anew", "--json"] {
        let said = room.ranks(3, &["train", "--run-dir", "run", flag]);
        said.refused(2, &["another run is writing to run (job ", "process ", "choose another place with --run-dir"]);
    }
    assert_eq!(room.read("run/requeue"), "of the first one");
    assert_eq!(processes(&logs()), lines, "the second one has opened no log");
    // Whoever takes the folder away: the writers make it again. A rename, since they may write while files are removed.
    std::fs::rename(room.path().join("run/heartbeat"), room.path().join("run/heartbeat_before")).unwrap();
    let again = job.until("a heartbeat", |job| job.heartbeat(1));
    assert_eq!(again["job"], job_number);
    job.until("a heartbeat in a phase with layers", |job| job.heartbeat(1).filter(|beat| !beat["layer"].is_null()));
    job.signal_at(1, libc::SIGSTOP, "layer", 1);
    let said = job.ends_within(END);
    said.refused(4, &["rank 1, ", "it is stopped or dead, or its machine is"]);
}

#[test]
fn ranks_with_own_run_directories_write_heartbeats_to_rank_0s() {
    let room = random_model(256, 32, 2, "steps = 1\n");
    let other = [":", "-n", "1", LONGSTRAW, "train", "--run-dir", "two"];
    let arguments = [&["train", "--run-dir", "one"][..], &other].concat();
    let said = room.run(&Call { ranks: 1, program: LONGSTRAW, arguments: &arguments, variables: &[] });
    said.ended(0, &[]);
    assert!(!said.err.contains("does not share"), "{said}");
    assert!(room.path().join("two/logs/rank_1.log").exists(), "rank 1 logs to its own run directory");
    assert!(!room.path().join("two/heartbeat").exists());
}

#[test]
fn a_rank_blocked_by_its_disk_is_distinguished_from_a_stopped_one() {
    let room = random_model(256, 32, 2, "steps = 100\n");
    let metrics = room.path().join("run/metrics.jsonl");
    room.write("run/keep", "");
    assert!(Command::new("mkfifo").arg(&metrics).status().unwrap().success());
    // A write to a full pipe blocks, as a write to a disk that is gone does.
    let mut pipe = OpenOptions::new().read(true).write(true).open(&metrics).unwrap();
    pipe.write_all(&vec![b' '; 65_536]).unwrap();
    let said = Job::start(&room, 3, "run", &STALL).ends_within(END);
    said.refused(4, &["rank 0, update (host ", "; 5 s were allowed. It runs and waits for no other rank: its disk"]);
    nothing_passed(&room, "run");
}

#[test]
fn heartbeats_show_sites_and_a_moving_run_exceeds_the_stall_limit_many_times() {
    let room = random_model(2048, 64, 2, "steps = 100000\n");
    let mut job = Job::start(&room, 3, "run", &STALL);
    let start = Instant::now();
    let mut seen = Vec::new();
    let number = |beat: &serde_json::Value, key: &str| beat[key].as_f64().unwrap();
    let moved = |seen: &[serde_json::Value]| match seen {
        [first, .., last] => number(last, "borders") - number(first, "borders"),
        _ => 0.0,
    };
    // At least twice the limit, and as long as a slow machine needs.
    while start.elapsed() < Duration::from_secs(12) || moved(&seen) <= 20.0 || seen.len() < 10 {
        let before = job.heartbeat(2);
        let beat = job.until("the next heartbeat", |job| job.heartbeat(2).filter(|beat| Some(beat) != before.as_ref()));
        seen.push(beat);
    }
    for beat in &seen {
        assert_eq!((&beat["rank"], beat["pid"].to_string().as_str()), (&json!(2), job.process(2)), "{beat}");
        assert_eq!(beat["job"], seen[0]["job"]);
        let phases = ["start", "capture", "reward", "score", "replay", "sweep", "finalize", "update"];
        assert!(phases.iter().any(|phase| beat["phase"] == *phase), "{beat}");
        assert!(beat["layer"].is_null() || number(beat, "layer") < 6.0, "{beat}");
        assert!(
            number(beat, "seconds_here") <= number(beat, "deadline_seconds") && number(beat, "deadline_seconds") >= 5.0,
            "{beat}"
        );
        assert!(beat["waits"].is_boolean() && beat["host"].as_str().is_some_and(|host| !host.is_empty()), "{beat}");
        let times = ["entered", "written"].map(|key| beat[key].as_str().unwrap());
        assert!(times[0] <= times[1] && times[1].ends_with('Z'), "{beat}");
    }
    for pair in seen.windows(2) {
        assert!(number(&pair[0], "count") < number(&pair[1], "count"), "{pair:?}");
        assert!(number(&pair[0], "borders") <= number(&pair[1], "borders"), "{pair:?}");
    }
    room.write("run/stop", "");
    job.ends_within(END).ended(0, &["as requested; go on with"]);
    assert!(!room.path().join("run/heartbeat").exists(), "a run that ends in order leaves no heartbeats");
}
