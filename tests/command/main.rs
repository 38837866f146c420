//! The command as a user meets it: the real binary in a folder of its own, alone and under mpirun, judged by its words,
//! its exit code and the files it leaves.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on says so by its panic")]

#[path = "../loading/checkpoints.rs"]
#[allow(dead_code, reason = "shared with the tests of loading, which use all of it")]
mod checkpoints;
#[path = "../../src/data/test_tokenizer.rs"]
#[allow(dead_code, reason = "shared with the unit tests of data, which use all of it")]
mod test_tokenizer;

mod abort;
mod advice;
mod alarms;
mod choices;
mod convert;
mod data;
mod dialects;
mod doctor;
mod eval;
mod experts;
mod faults;
mod fp8;
mod gate;
mod generate;
mod job;
mod judge;
mod kills;
mod launch;
mod lines;
mod memory;
mod merge;
mod mix;
mod objective;
mod online;
mod paper;
mod parity;
mod ping;
mod plan;
mod programs;
mod rates;
mod refusals;
mod report;
mod resume;
mod reuse;
mod review;
mod room;
mod sampling;
mod secret;
mod service;
mod study;
mod tools;
mod training;
mod users;
mod verdicts;
mod watchdog;
