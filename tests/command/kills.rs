//! Ranks that are killed or stopped at random, in every phase: the job ends, the rank is named, nothing says that it
//! passed, and the run goes on to the adapters of one that nobody disturbed.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use serde_json::json;

use super::job::{Job, nothing_passed, random_model};
use super::room::Room;

const RANKS: usize = 3;
const PHASES: [&str; 7] = ["capture", "score", "replay", "sweep", "finalize", "update", "save"];
/// The patience of these jobs, and what the launcher needs to end one on a busy machine.
const STALL: &str = "run.stall_sec=4";
const END: Duration = Duration::from_secs(14);
/// Some phases last milliseconds, so that a signal may come after them; it is then sent anew, to another job.
const AIMS_MAX: usize = 5;

/// Numbers that look random and are the same in every run (xorshift).
struct Draws(u64);

impl Draws {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).unwrap() % bound
    }
}

fn room() -> Room {
    random_model(256, 32, 2, "steps = 3\n[lora]\nrank = 32\n[checkpoint]\nevery = 1\n")
}

/// The digest of the adapters that a run has ended with.
#[track_caller]
fn passed(room: &Room, run_dir: &str) -> String {
    let receipt = room.read_json(&format!("{run_dir}/receipt.json"));
    assert_eq!((&receipt["passed"], &receipt["steps"]), (&json!(true), &json!(3)), "{receipt}");
    receipt["adapter_digest"][0].as_str().unwrap().to_owned()
}

/// What came of one signal.
struct Hit {
    /// The rank's last log line.
    line: String,
    seconds: f64,
    resumed: String,
}

/// Sends one signal, and checks all that must come of it.
#[track_caller]
fn hit(room: &Room, run_dir: &str, (rank, signal): (usize, libc::c_int), (phase, count): (&str, usize)) -> Hit {
    let mut job = Job::start(room, RANKS, run_dir, &["--set", STALL]);
    let line = job.signal_at(rank, signal, &format!("DEBUG {phase}"), count);
    let start = Instant::now();
    let said = job.ends_within(END);
    let seconds = start.elapsed().as_secs_f64();
    if signal == libc::SIGSTOP {
        said.refused(4, &[&format!("longstraw: rank {rank}, "), "it is stopped or dead, or its machine is"]);
    } else {
        assert!(said.code != 0 && said.err.contains("signal 9"), "{said}");
        assert!(said.err.contains(&format!("process rank {rank} ")), "{said}");
    }
    nothing_passed(room, run_dir);
    let said = room.ranks(RANKS, &["train", "--run-dir", run_dir, "--resume"]);
    said.ended(0, &[]);
    let from = said.err.lines().find_map(|line| line.split_once(": update ").map(|(_, next)| next.to_owned()));
    assert!(from.is_some() || said.err.contains("to go on from: starting anew"), "{said}");
    Hit { line, seconds, resumed: from.unwrap_or_else(|| "starting anew".into()) }
}

/// So many signals, phase after phase, each until it has met its phase: one line for each that was sent.
fn hits(seed: u64, signals: usize) -> String {
    let (room, mut draws) = (room(), Draws(seed));
    room.ranks(RANKS, &["train", "--run-dir", "whole"]).ended(0, &[]);
    let whole = passed(&room, "whole");
    let mut table = String::new();
    for number in 0..signals {
        let phase = PHASES[number % PHASES.len()];
        let met = (0..AIMS_MAX).any(|aim| {
            // Only rank 0 writes when a checkpoint is saved, so only it can be met there.
            let rank = if phase == "save" { 0 } else { draws.below(RANKS) };
            let signal = if draws.below(2) == 0 { libc::SIGKILL } else { libc::SIGSTOP };
            let count = 1 + draws.below(if ["finalize", "update", "save"].contains(&phase) { 2 } else { 9 });
            let run_dir = format!("run_{number}_{aim}");
            let Hit { line, seconds, resumed } = hit(&room, &run_dir, (rank, signal), (phase, count));
            assert_eq!(passed(&room, &run_dir), whole, "{phase}, rank {rank}, signal {signal}");
            let place = line.split_once("DEBUG ").map_or("after a step", |(_, place)| place);
            let who = format!("{phase:<9} rank {rank} signal {signal:>2}");
            writeln!(table, "{who}  {place:<18} {seconds:>5.1} s  {resumed}").unwrap();
            place.starts_with(phase)
        });
        assert!(met, "{phase} was never met:\n{table}");
    }
    table
}

#[test]
fn a_rank_killed_or_stopped_in_any_phase_is_named_and_the_run_goes_on_to_the_same_adapters() {
    println!("{}", hits(0x5eed_0001, PHASES.len()));
}

#[test]
#[ignore = "minutes: `make test-kill` runs it"]
fn so_do_twenty_one_of_them() {
    println!("{}", hits(0x5eed_0002, 3 * PHASES.len()));
}
