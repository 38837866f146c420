//! A training job that is followed from outside: where its ranks are, by their logs, and signals to them.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::room::{Call, LONGSTRAW, Room, Running, Said};

/// A model of random weights in `shape/`, and a configuration for a prompt and `group` answers of these lengths.
pub(crate) fn random_model(prompt: usize, answer: usize, group: usize, more: &str) -> Room {
    let shape = json!({
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true
    });
    let config = format!(
        "[context]\nmax_seq_len = {}\nprompt_len = {prompt}\nanswer_len = {answer}\n\
         [grpo]\ngroup_size = {group}\nreward_fn = \"synthetic\"\ngradient = \"response\"\n\
         [model]\npath = \"shape\"\ndtype = \"float32\"\nrandom_init = true\n\
         [run]\ndir = \"run\"\nlog_level = \"debug\"\n{more}",
        prompt + answer
    );
    Room::with(&[("shape/config.json", &shape.to_string()), ("config.toml", &config)])
}

/// Whether a process still runs longstraw; one that has ended and waits to be collected does not.
fn is_ours(process: &str) -> bool {
    fs::read(Path::new("/proc").join(process).join("cmdline")).is_ok_and(|line| line.starts_with(LONGSTRAW.as_bytes()))
}

/// Waits until none of these processes runs any more, which a launcher may not do; fails once `start` is `limit` ago.
#[track_caller]
pub(crate) fn all_end(processes: &[String], start: Instant, limit: Duration) {
    while let Some(process) = processes.iter().find(|process| is_ours(process)) {
        assert!(start.elapsed() < limit, "process {process} lives on");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A job that goes on.
pub(crate) struct Job<'a> {
    room: &'a Room,
    run_dir: &'a str,
    running: Running,
    processes: Vec<String>,
}

impl<'a> Job<'a> {
    /// Starts `train` on so many ranks into a run directory that has no logs yet, and waits until all ranks have
    /// theirs.
    pub(crate) fn start(room: &'a Room, ranks: usize, run_dir: &'a str, arguments: &[&str]) -> Job<'a> {
        let arguments = [&["train", "--run-dir", run_dir], arguments].concat();
        let running = room.start(&Call { ranks, program: LONGSTRAW, arguments: &arguments, variables: &[] });
        let mut job = Job { room, run_dir, running, processes: Vec::new() };
        for rank in 0..ranks {
            let process = job.until("a rank's log", |job| process(&job.log(rank)));
            job.processes.push(process);
        }
        job
    }

    /// What a rank has logged.
    pub(crate) fn log(&self, rank: usize) -> String {
        let file = self.room.path().join(self.run_dir).join(format!("logs/rank_{rank}.log"));
        fs::read_to_string(file).unwrap_or_default()
    }

    /// A rank's last heartbeat; `None` before the first and after the last.
    pub(crate) fn heartbeat(&self, rank: usize) -> Option<Value> {
        let file = self.room.path().join(self.run_dir).join(format!("heartbeat/rank_{rank}.json"));
        Some(serde_json::from_str(&fs::read_to_string(file).ok()?).unwrap())
    }

    /// A rank's process.
    pub(crate) fn process(&self, rank: usize) -> &str {
        &self.processes[rank]
    }

    /// Waits until `ready`.
    #[track_caller]
    pub(crate) fn until<T>(&mut self, what: &str, ready: impl Fn(&Job) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            if let Some(found) = ready(self) {
                return found;
            }
            let (ended, late) = (self.running.has_ended(), start.elapsed() > Duration::from_mins(15));
            assert!(!ended && !late, "{what} did not come; ended: {ended}\n{}", self.running.said());
            std::thread::sleep(Duration::from_micros(500));
        }
    }

    /// Sends a signal to a rank as soon as its log has `words` for the `count`-th time; returns the last line that it
    /// wrote, which a rank that has stopped or ended leaves as it is.
    #[track_caller]
    pub(crate) fn signal_at(&mut self, rank: usize, signal: libc::c_int, words: &str, count: usize) -> String {
        self.until(words, |job| (job.log(rank).matches(words).count() >= count).then_some(()));
        let process = self.process(rank).parse().unwrap();
        #[expect(unsafe_code, reason = "sends a signal")]
        // SAFETY: the call takes two numbers and touches no memory of this process.
        let outcome = unsafe { libc::kill(process, signal) };
        assert_eq!(outcome, 0, "rank {rank} was there");
        // The signal may come a moment after the call has returned.
        std::thread::sleep(Duration::from_millis(20));
        self.log(rank).lines().last().unwrap().to_owned()
    }

    /// The job ends within `limit` from now, and with it each of its processes.
    #[track_caller]
    pub(crate) fn ends_within(self, limit: Duration) -> Said {
        let start = Instant::now();
        let said = self.running.end();
        all_end(&self.processes, start, limit);
        let took = start.elapsed();
        assert!(took < limit, "it took {took:?}\n{said}");
        said
    }
}

/// The process that a log names.
fn process(log: &str) -> Option<String> {
    let (process, _) = log.split_once("process ")?.1.split_once('\n')?;
    Some(process.trim().to_owned())
}

/// The run directory has no receipt that says passed.
#[track_caller]
pub(crate) fn nothing_passed(room: &Room, run_dir: &str) {
    let receipt = fs::read(room.path().join(run_dir).join("receipt.json"));
    let receipt = receipt.map(|text| serde_json::from_slice::<Value>(&text).unwrap());
    assert!(receipt.as_ref().map_or(true, |receipt| receipt["passed"] != json!(true)), "{receipt:?}");
}
