//! Training, in the order of a run: `open`, then the loop in `trainer`, in which `step` makes an update of `groups`.

mod answer;
mod checkpoints;
mod conventional;
mod evaluate;
mod groups;
mod inputs;
mod memory;
mod metrics;
mod open;
mod outcome;
mod rate;
mod records;
mod rewards;
mod round;
mod round_state;
mod run;
mod session;
mod signal;
mod stop_files;
mod stop_policy;
mod totals;
mod trace;
mod trainer;
mod update;
mod weights;

pub use run::{Finished, Run, RunOptions};
pub use session::Session;

use crate::config::Loaded;
use crate::report::Receipt;
use crate::runtime::failure::Failure;
use crate::world::World;

/// Trains as the configuration says, from the start, or with `resume` from the newest checkpoint, to the last update or until
/// a stop is requested. Leaves receipt and adapters, or receipt and checkpoint.
///
/// # Errors
/// When something cannot be loaded or saved, does not fit, or is not finite; and where no update of a whole run had a gradient.
pub fn run(loaded: &Loaded, resume: bool, world: &mut World) -> Result<Receipt, Failure> {
    let options = RunOptions { resume, stop_after: None };
    let mut finished = Run::open(loaded, options, world)?.train(world)?;
    finished.write(world)?;
    let Finished { receipt, .. } = finished;
    let learnt = receipt.stopped || receipt.steps == 0 || receipt.updates_with_gradient > 0;
    if learnt { Ok(receipt) } else { Err(signal::NothingTrained { updates: receipt.steps }.into()) }
}
