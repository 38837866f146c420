//! Training, in the order of a run: `open`, then the loop in `trainer`, in which `step` makes an update of `groups`.

mod alarms;
mod answer;
mod calls;
mod checkpoints;
mod conventional;
mod eval;
mod evaluate;
mod evaluations;
mod groups;
mod inputs;
mod memory;
mod metrics;
mod open;
mod outcome;
mod progress;
mod rate;
mod records;
mod rescue;
mod reuse;
mod rewards;
mod round;
mod round_state;
mod run;
mod run_folder;
mod session;
mod signal;
mod sources;
mod splits;
mod stop_files;
mod stop_policy;
mod totals;
mod trace;
mod trainer;
mod update;
mod weights;

pub use eval::{EvalEnded, EvalOptions, evaluate};
pub use run::{Finished, Run, RunOptions};
pub use run_folder::{Begin, RunFolder};
pub use session::Session;

use crate::config::Loaded;
use crate::report::Receipt;
use crate::runtime::failure::Failure;
use crate::world::World;

/// How a call of [`run`] has ended.
#[derive(Debug)]
pub enum Ended {
    /// Updates were made, up to the last one or a stop.
    Ran(Box<Receipt>),
    /// An earlier start has made all of them, and nothing was done.
    Before {
        /// What that start has left.
        receipt: serde_json::Value,
        /// A sentence for the user.
        words: String,
    },
}

/// Trains as the configuration says, from the start or where `begin` says, to the last update or until a stop is requested.
/// Leaves receipt, adapters and checkpoint, or receipt and checkpoint.
///
/// # Errors
/// When something cannot be loaded or saved, does not fit, or is not finite; and where no update of a whole run had a gradient.
pub fn run(loaded: &Loaded, begin: Begin, world: &mut World) -> Result<Ended, Failure> {
    let options = RunOptions { begin, stop_after: None, keeps_progress: true };
    let run = Run::open(loaded, options, world)?;
    if let Some(receipt) = run.finished_before(world)? {
        return Ok(Ended::Before { receipt, words: run.finished_words() });
    }
    let mut finished = run.train(world)?;
    finished.write(world)?;
    let Finished { receipt, .. } = finished;
    let learnt = receipt.stopped || receipt.steps == 0 || receipt.updates_with_gradient > 0;
    if learnt {
        Ok(Ended::Ran(Box::new(receipt)))
    } else {
        world.agree(Err(signal::NothingTrained { updates: receipt.steps }.into()))
    }
}
