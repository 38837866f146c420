//! Ranks that are killed or stopped at random, in every phase, and at exact calls while they read and save; disks that are
//! full, read-only, without locks or that do not read; a second start beside the first. The job ends, nothing says that it
//! passed, nothing that was saved is lost, and the run goes on to the adapters of one that nobody disturbed.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::faults::{Fault, train_under, variables};
use super::job::{Job, nothing_passed, random_model};
use super::resume::{arguments, quick, signal, start, train, updates};
use super::room::{Call, LONGSTRAW, Room, Said};

const RANKS: usize = 3;
const PHASES: [&str; 7] = ["capture", "score", "replay", "sweep", "finalize", "update", "save"];
/// The patience of these jobs: a healthy rank on a busy machine has to stay below it.
const STALL: &str = "run.stall_sec=10";
/// A job that lives longer hangs; no claim is about the time itself.
const END: Duration = Duration::from_mins(15);
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
            let count = 1 + draws.below(if ["replay", "finalize", "update", "save"].contains(&phase) { 2 } else { 9 });
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

/// What befalls a run besides random signals: the fault, and the flags of the start that meets it.
#[derive(Clone, Copy)]
struct Upset {
    what: &'static str,
    fault: Fault,
    /// Updates of an earlier start that ended well; 0 for none.
    before: u64,
}

const fn upset(what: &'static str, call: &'static str, errno: libc::c_int, path: &'static str) -> Upset {
    Upset { what, fault: Fault { call, errno, path, rank: Some(0), skip: 0 }, before: 0 }
}

const fn at_second_start(upset: Upset) -> Upset {
    Upset { before: 2, ..upset }
}

const fn of_rank_1(upset: Upset) -> Upset {
    Upset { fault: Fault { rank: Some(1), ..upset.fault }, ..upset }
}

/// Kills and stops at one exact call, and faults of the disk. Rank 0 writes checkpoints; both ranks read data.
const UPSETS: [Upset; 17] = [
    upset("killed as it writes the adapters", "write", -libc::SIGKILL, "/.step_2.partial/"),
    upset("killed as it writes the masters", "write", -libc::SIGKILL, "/.step_2.partial/masters"),
    upset("killed as it writes the state", "write", -libc::SIGKILL, "/.step_3.partial/state.json"),
    upset("killed as it names the checkpoint", "create", -libc::SIGKILL, "/checkpoints/step_2"),
    upset("killed as it points to it", "create", -libc::SIGKILL, "/latest"),
    upset("killed as it removes an older one", "create", -libc::SIGKILL, "/.step_1.removed"),
    upset("SIGTERM as it writes the masters", "write", -libc::SIGTERM, "/.step_2.partial/masters"),
    upset("SIGINT as it writes the state", "write", -libc::SIGINT, "/.step_2.partial/state.json"),
    upset("SIGHUP as it writes the metrics", "write", -libc::SIGHUP, "/metrics.jsonl"),
    of_rank_1(upset("killed as it reads the data", "read", -libc::SIGKILL, "/train.jsonl")),
    of_rank_1(at_second_start(upset("SIGINT as it reads the data", "read", -libc::SIGINT, "/train.jsonl"))),
    at_second_start(upset("killed as it reads the state", "read", -libc::SIGKILL, "/step_2/state.json")),
    upset("disk full for a checkpoint", "write", libc::ENOSPC, "/.step_3.partial/masters"),
    at_second_start(upset("disk full for the metrics", "write", libc::ENOSPC, "/metrics.jsonl")),
    upset("checkpoints become read-only", "create", libc::EROFS, "/.step_3.partial"),
    at_second_start(upset("a checkpoint does not read", "read", libc::EIO, "/step_2/masters")),
    at_second_start(upset("no locks, and then killed", "flock", libc::ENOLCK, "/.lock")),
];

/// Updates that `latest` of a run directory names.
fn saved(room: &Room, run_dir: &str) -> u64 {
    let latest = room.try_read(&format!("{run_dir}/latest")).unwrap_or_default();
    latest.trim().rsplit('_').next().and_then(|updates| updates.parse().ok()).unwrap_or(0)
}

/// One upset, the start after it, and what is held of them: nothing says that it passed, nothing that was saved is lost, and
/// the adapters are those of the run that nobody disturbed. Returns a line of the table.
#[track_caller]
fn upset_and_resumed(room: &Room, number: usize, upset: &Upset, whole: &str) -> String {
    let run_dir = format!("upset_{number}");
    let sets = ["run.steps=4", "checkpoint.every=1", "checkpoint.keep=1"];
    if upset.before > 0 {
        let steps = format!("run.steps={}", upset.before);
        train(room, &run_dir, &[], &[&steps, sets[1], sets[2]]).ended(0, &[]);
    }
    let (said, rows) = if upset.fault.call == "flock" {
        // The fault itself ends nothing: a signal comes later.
        let (said, rows) = killed_without_locks(room, &run_dir, upset.fault, &sets);
        (said, rows)
    } else {
        let said = train_under(room, upset.fault, &run_dir, &["--resume"], &sets);
        (said, updates(room, &run_dir))
    };
    let kept = saved(room, &run_dir);
    assert!(kept >= upset.before, "{}: what was saved is there: {kept}\n{said}", upset.what);
    nothing_passed_since(room, &run_dir, upset.before, &said);
    let again = train(room, &run_dir, &["--resume"], &sets);
    again.ended(0, &[]);
    let next =
        again.err.lines().find_map(|line| line.split_once(": update ")?.1.split_once(" is next")?.0.parse().ok());
    let from: u64 = next.map_or(0, |next: u64| next - 1);
    assert!(from >= kept, "{}: from {from}, {kept} were saved\n{again}", upset.what);
    assert!(from + 1 >= rows as u64, "{}: from {from} of {rows}: one update at most is lost\n{again}", upset.what);
    let receipt = room.read_json(&format!("{run_dir}/receipt.json"));
    assert_eq!((&receipt["passed"], &receipt["steps"]), (&json!(true), &json!(4)), "{}", upset.what);
    assert_eq!(receipt["adapter_digest"][0], whole, "{}", upset.what);
    format!("{:<34} exit {:>3}  {rows} made, {kept} saved, on from {from}", upset.what, said.code)
}

/// A start that was upset has left no receipt of its own that says passed.
#[track_caller]
fn nothing_passed_since(room: &Room, run_dir: &str, before: u64, said: &Said) {
    let Ok(text) = room.try_read(&format!("{run_dir}/receipt.json")) else { return };
    let receipt: Value = serde_json::from_str(&text).unwrap();
    assert!(receipt["passed"] != json!(true) || receipt["steps"] == json!(before), "{receipt}\n{said}");
}

/// A run on a file system without locks, of which rank 1 is killed after its third update.
#[track_caller]
fn killed_without_locks(room: &Room, run_dir: &str, fault: Fault, sets: &[&str]) -> (Said, usize) {
    let variables = variables(room, fault);
    let variables: Vec<(&str, &str)> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let call = arguments(run_dir, &["--resume"], sets);
    let mut running = room.start(&Call { ranks: 2, program: LONGSTRAW, arguments: &call, variables: &variables });
    signal(room, &mut running, run_dir, 3, 1, "-9");
    (running.end(), updates(room, run_dir))
}

/// A second start beside a running one is refused; then the first is killed, or stopped in order, and goes on.
#[track_caller]
fn second_start_beside(room: &Room, run_dir: &str, name: &str) -> String {
    let endless = ["run.steps=100000", "checkpoint.every=1"];
    let mut running = start(room, run_dir, &[], &endless);
    running.until("an update", || (updates(room, run_dir) > 0).then_some(()));
    let second = train(room, run_dir, &["--resume"], &endless);
    second.refused(2, &["another run is writing to"]);
    signal(room, &mut running, run_dir, 1, 1, name);
    let said = running.end();
    let (rows, kept) = (updates(room, run_dir), saved(room, run_dir));
    assert!(kept + 1 >= rows as u64, "{kept} of {rows} were saved\n{said}");
    let steps = format!("run.steps={}", kept + 2);
    train(room, run_dir, &["--resume"], &[&steps, endless[1]]).ended(0, &[&format!("update {} is next", kept + 1)]);
    let whole = format!("whole_{run_dir}");
    train(room, &whole, &[], &[&steps]).ended(0, &[]);
    let digest = |run: &str| room.read_json(&format!("{run}/receipt.json"))["adapter_digest"][0].clone();
    assert_eq!(digest(run_dir), digest(&whole));
    let what = format!("a second start, then {name}");
    format!("{what:<34} exit {:>3}  {rows} made, {kept} saved, on from {kept}", said.code)
}

/// So many of the upsets; one line for each.
fn upsets(chosen: impl Fn(usize) -> bool) -> Vec<String> {
    let room = quick();
    train(&room, "whole", &[], &["run.steps=4"]).ended(0, &[]);
    let whole = room.read_json("whole/receipt.json")["adapter_digest"][0].as_str().unwrap().to_owned();
    let numbered = UPSETS.iter().enumerate().filter(|(number, _)| chosen(*number));
    let mut table: Vec<String> =
        numbered.map(|(number, upset)| upset_and_resumed(&room, number, upset, &whole)).collect();
    for (number, name) in ["-9", "-TERM"].into_iter().enumerate() {
        if chosen(UPSETS.len() + number) {
            table.push(second_start_beside(&room, &format!("second_{number}"), name));
        }
    }
    table
}

#[test]
fn a_rank_killed_or_stopped_in_any_phase_is_named_and_the_run_goes_on_to_the_same_adapters() {
    println!("{}", hits(0x5eed_0001, PHASES.len()));
}

#[test]
fn a_run_killed_while_it_saves_or_with_a_full_disk_loses_nothing_that_was_saved() {
    println!("{}", upsets(|number| [1, 3, 5, 7, 9, 13, 17, 18].contains(&number)).join("\n"));
}

#[test]
#[ignore = "minutes: `make test-kill` runs it"]
fn forty_of_forty() {
    let random = hits(0x5eed_0002, 3 * PHASES.len());
    // A signal that met another phase than it was meant for was sent anew, and its run goes on as well.
    let table: Vec<String> = random.lines().map(String::from).chain(upsets(|_| true)).collect();
    let count = table.len();
    for (number, line) in table.iter().enumerate() {
        println!("{:>2}  {line}", number + 1);
    }
    println!("{count} of {count}: nothing that was saved is lost, and every run goes on to the same adapters");
    assert!(count >= 40, "{count}");
}
