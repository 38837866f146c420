//! `longstraw gate NAME`: a run of known lengths that is held to checks with numbers and leaves a receipt.
//!
//! A gate runs only after the gate that its file names as `after` has passed, for the same model, ranks, adapters and
//! scale. An earlier receipt of its own is moved away first. `passed` is written true only when all ranks have come to the
//! end and agreed on it. Rank 0 alone reads earlier receipts and judges; the others receive the outcome.
//!
//! `configs/gates` says what each gate runs and what judges it. `attempt` is what all gates have in common, `runs` and
//! `resumed` are the kinds of run. `checks` and `memory` look at receipts, `parity` compares gradients with plain autograd.

mod attempt;
mod checks;
mod earlier_receipt;
mod error;
#[cfg(test)]
mod fixture;
mod memory;
mod parity;
mod resumed;
mod runs;

use std::path::Path;

pub use attempt::move_away;
pub use error::Error;

pub use crate::report::Check;

use crate::config::{Gate, Loaded, RunConfig, Runs};
use crate::report::{self, Receipt, open_log, say, write_receipt};
use crate::runtime::failure::Failure;
use crate::runtime::units::Rank;
use crate::train::RunFolder;
use crate::world::World;
use attempt::Attempt;

/// Runs `gate` as `loaded` says (made by [`crate::config::load_gate`]) and judges it. The receipt is written; it says
/// whether the gate has passed, on every rank the same. `force` lets it run out of order.
///
/// # Errors
/// When the gate before it has not passed, or the run fails.
pub fn run(gate: &Gate, loaded: &Loaded, force: bool, world: &mut World) -> Result<Receipt, Failure> {
    if gate.is_endpoint() {
        return world.agree(Err(Error::NoRanks { gate: gate.name() }.into()));
    }
    let mut attempt = Attempt { gate, loaded, force: world.any(force), forced: false };
    attempt.admit(None, world)?;
    let dir = &loaded.rank.dir;
    // Before anything in the folder is touched: another start of the gate may be running.
    let folder = RunFolder::take(dir, world)?;
    let moved = if world.all.rank() == Rank(0) { move_away(dir) } else { Ok(()) };
    world.agree(moved.map_err(Failure::from))?;
    world.agree(open_log(dir, world.all.rank(), world.all.size(), &loaded.rank.log).map_err(Failure::from))?;
    // The lock is held until the receipt is written.
    let (receipt, _folder) = match gate.runs() {
        Runs::BothGradients => (runs::both_gradients(&mut attempt, world)?, folder),
        Runs::StoppedAndResumed => (resumed::stopped_and_resumed(&mut attempt, world)?, folder),
        Runs::Once | Runs::Endpoint => runs::once(&mut attempt, folder, world)?,
    };
    attempt.end(receipt, world)
}

/// The failure of a gate that has not passed, on every rank.
///
/// # Errors
/// [`Error::NotPassed`], unless the gate has passed or was asked to stop before its end.
pub fn verdict(receipt: &Receipt, dir: &Path) -> Result<(), Error> {
    if receipt.passed || receipt.stopped {
        return Ok(());
    }
    let failed = receipt.checks.iter().filter(|check| !check.passed);
    let failed = failed.map(|check| format!("{}: {}", check.name, check.means)).collect();
    Err(Error::NotPassed { gate: receipt.gate.unwrap_or_default(), file: dir.join("receipt.json"), failed })
}

/// Writes the receipt of a gate without ranks and model into `dir`; it passes where every check holds. Move an earlier
/// receipt away with [`move_away`] before the first check.
///
/// # Errors
/// When it cannot be written.
pub fn end_alone(gate: &Gate, config: &RunConfig, dir: &Path, checks: Vec<Check>) -> Result<Receipt, Failure> {
    let receipt = Receipt {
        gate: Some(gate.name()),
        passed: !checks.is_empty() && checks.iter().all(|check| check.passed),
        checks,
        scale: config.gate.scale,
        finished: attempt::finished(),
        commit: attempt::commit(),
        config_digest: config.digest(),
        ..Receipt::default()
    };
    write_receipt(dir, &receipt)?;
    say(&report::checks(&receipt));
    Ok(receipt)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::checks::check;
    use super::earlier_receipt::Now;
    use super::*;

    fn read(dir: &Path) -> serde_json::Value {
        let text = fs::read_to_string(dir.join("receipt.json")).expect("written");
        serde_json::from_str(&text).expect("JSON")
    }

    #[test]
    fn a_gate_without_ranks_leaves_a_receipt_that_the_next_one_reads() {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = folder.path().join("gate1_key");
        let config = RunConfig::laptop();
        let gate = Gate::endpoint();
        let one = |passed| vec![check("endpoint", serde_json::json!(200), "200", passed, "the key is refused")];
        let failed = end_alone(&gate, &config, &dir, one(false)).expect("written");
        assert!(verdict(&failed, &dir).expect_err("failed").to_string().contains("endpoint: the key is refused"));
        assert_eq!(read(&dir)["passed"], false);
        move_away(&dir).expect("moved");
        assert!(!dir.join("receipt.json").exists() && dir.join("receipt.earlier.json").exists());
        assert!(end_alone(&gate, &config, &dir, one(true)).expect("written").passed);
        let now = Now { ranks: 8, cp_size: 8, scale: 64, dtype: "bfloat16".into(), model: None };
        assert!(earlier_receipt::check(&fixture::gate("gate2_32k"), &folder.path().join("gate2_32k"), &now).is_ok());
        assert!(!end_alone(&gate, &config, &dir, Vec::new()).expect("written").passed, "nothing was looked at");
    }
}
