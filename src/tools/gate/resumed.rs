//! A gate of several updates with a checkpoint after each: the whole run, and the same run again, stopped in the middle and
//! resumed.
//!
//! The resumed run must be the run that was never stopped, to the bit: adapters, moments and data position come out of the
//! checkpoint, and nothing else of the first half may matter.

use std::fs;
use std::io;
use std::path::Path;

use serde_json::json;

use super::attempt::Attempt;
use super::checks::{self, check};
use super::error::Error;
use super::memory;
use crate::config::Loaded;
use crate::report::{Check, Receipt};
use crate::runtime::failure::Failure;
use crate::runtime::units::Rank;
use crate::train::{Begin, Finished, Run, RunOptions};
use crate::world::World;

/// Runs once through, once with a stop, and compares.
pub(super) fn stopped_and_resumed(attempt: &mut Attempt<'_>, world: &mut World) -> Result<Receipt, Failure> {
    let gradient = attempt.loaded.run.grpo.gradient;
    let whole = attempt.within("whole", gradient);
    let parted = attempt.within("parted", gradient);
    for loaded in [&whole, &parted] {
        let removed = if world.all.rank() == Rank(0) { without_checkpoints(&loaded.rank.dir) } else { Ok(()) };
        world.agree(removed.map_err(Failure::from))?;
    }
    let through = RunOptions { begin: Begin::New, stop_after: None, keeps_progress: true };
    let run = Run::open(&whole, through, world)?;
    attempt.admit(Some(&run), world)?;
    let mut finished = run.train(world)?;
    finished.write(world)?;
    let Finished { mut receipt, session, .. } = finished;
    let expected = attempt.expected(session.spec());
    drop(session);
    let stop_after = whole.run.run.steps / 2;
    let first = ran(&parted, RunOptions { stop_after: Some(stop_after), ..through }, world)?;
    let second = ran(&parted, RunOptions { begin: Begin::Resume, ..through }, world)?;
    let of_whole = checks::of_run(&receipt, &expected).into_iter().chain(memory::against_plan(&receipt));
    let mut all: Vec<Check> = of_whole.map(|check| checks::prefixed("whole", check)).collect();
    all.extend(checks::of_run(&second, &expected).into_iter().map(|check| checks::prefixed("resumed", check)));
    all.extend(resumed(&receipt, &first, &second, stop_after));
    receipt.checks = all;
    Ok(receipt)
}

fn ran(loaded: &Loaded, options: RunOptions, world: &mut World) -> Result<Receipt, Failure> {
    let mut finished = Run::open(loaded, options, world)?.train(world)?;
    finished.write(world)?;
    Ok(finished.receipt)
}

/// Removes the gate's own earlier checkpoints: a new run does not start among them.
fn without_checkpoints(dir: &Path) -> Result<(), Error> {
    let gone = |file: &Path, outcome: io::Result<()>| match outcome {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(Error::File { file: file.into(), source }),
        _ => Ok(()),
    };
    let folder = dir.join("checkpoints");
    let latest = dir.join("latest");
    gone(&folder, fs::remove_dir_all(&folder))?;
    gone(&latest, fs::remove_file(&latest))
}

/// The stopped run and its second half against the run that was never stopped.
fn resumed(whole: &Receipt, first: &Receipt, second: &Receipt, stop_after: u64) -> Vec<Check> {
    let means = "the run did not stop after the update that it should, so nothing is known about going on from there";
    let stopped = first.stopped && first.steps == stop_after;
    let at = check("stopped_after", json!(first.steps), format!("exactly {stop_after}"), stopped, means);
    let means = "the resumed run made other updates than the ones that were left: a checkpoint's count or data position is \
                 wrong";
    let steps = second.steps == whole.steps && !second.stopped;
    let count = check("resumed_steps", json!(second.steps), format!("exactly {}", whole.steps), steps, means);
    let means = "a resumed run is not the run that was never stopped: a checkpoint lacks part of the state, or kernels do not \
                 repeat (run.deterministic)";
    let same = !whole.adapter_digest.is_empty() && whole.adapter_digest == second.adapter_digest;
    let value = json!([whole.adapter_digest.first(), second.adapter_digest.first()]);
    let equal = check("resumed_adapters", value, "the same bits with and without the stop", same, means);
    vec![at, count, equal]
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{failed, good};
    use super::*;

    /// Four updates, of which the first part made two.
    fn runs() -> [Receipt; 3] {
        let whole = || Receipt { steps: 4, ..good() };
        [whole(), Receipt { steps: 2, stopped: true, ..good() }, whole()]
    }

    /// A check's name, a fault in one of the three receipts that should fail it, and words of what that means.
    type Planted = (&'static str, fn(&mut [Receipt; 3]), &'static str);

    #[test]
    fn a_resumed_run_that_is_another_one_fails() {
        let judged = |runs: &[Receipt; 3]| resumed(&runs[0], &runs[1], &runs[2], 2);
        assert_eq!(failed(&judged(&runs())), Vec::<&str>::new());
        let rows: [Planted; 5] = [
            ("stopped_after", |r| r[1].steps = 3, "did not stop"),
            ("stopped_after", |r| r[1].stopped = false, "did not stop"),
            ("resumed_steps", |r| r[2].steps = 3, "data position"),
            ("resumed_adapters", |r| r[2].adapter_digest = vec!["cd".into(); 2], "run.deterministic"),
            (
                "resumed_adapters",
                |r| {
                    r[0].adapter_digest.clear();
                    r[2].adapter_digest.clear();
                },
                "lacks part of the state",
            ),
        ];
        for (name, plant, words) in rows {
            let mut runs = runs();
            plant(&mut runs);
            let checks = judged(&runs);
            assert_eq!(failed(&checks), [name]);
            assert!(checks.iter().any(|check| !check.passed && check.means.contains(words)), "{name}");
        }
    }

    #[test]
    fn only_checkpoints_are_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = folder.path();
        fs::create_dir_all(dir.join("checkpoints/step_1")).expect("a folder");
        fs::write(dir.join("latest"), "step_1").expect("written");
        fs::write(dir.join("metrics.jsonl"), "").expect("written");
        without_checkpoints(dir).expect("removed");
        assert!(
            !dir.join("checkpoints").exists() && !dir.join("latest").exists() && dir.join("metrics.jsonl").exists()
        );
        without_checkpoints(dir).expect("there is nothing to remove");
    }
}
