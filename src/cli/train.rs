//! The verbs that train: `train` and the gates with ranks.

use std::time::Duration;

use longstraw::config::{self, Environment, Gate, Loaded, WithoutFile};
use longstraw::report::say;
use longstraw::runtime::failure::{Exit, Failure, Phase};
use longstraw::tools::gate;
use longstraw::tools::review;
use longstraw::train::{self, Begin, Ended};
use longstraw::world::{World, install_signal_handlers, time_left};

use super::output::print_json;
use super::start::{ConfigFlags, start_world};

/// Time left for the end of MPI before the signals' deadline.
const MPI_END: Duration = Duration::from_secs(5);

pub(super) fn train(flags: ConfigFlags, begin: Begin, json: bool) -> Result<Exit, Failure> {
    install_signal_handlers()?;
    let environment = Environment::process();
    let mut world = start_world(&environment)?;
    let loaded = match world.agree(config::load(&flags.overrides(WithoutFile::LaptopRun)).map_err(Failure::from)) {
        Ok(loaded) => loaded,
        Err(failure) => return Ok(world.leave(failure)),
    };
    let root = world.all.rank().0 == 0;
    match train::run(&loaded, begin, &mut world) {
        Ok(Ended::Before { receipt, words }) => {
            if root {
                say(&words);
            }
            if root && json {
                print_json(&receipt);
            }
            Ok(Exit::Done)
        }
        Ok(Ended::Ran(receipt)) => {
            if root && json {
                print_json(&receipt);
            }
            let ended = if receipt.stopped { review::Ended::Stopped } else { review::Ended::Finished };
            review(&loaded, &environment, &world, ended);
            Ok(if receipt.stopped_by_alarm { Exit::Alarm } else { Exit::Done })
        }
        Err(failure) => {
            // A run that failed before its first step has no numbers, and the folder may hold an earlier run's files.
            if world.tracker().site().phase != Phase::Start {
                review(&loaded, &environment, &world, review::Ended::Failed(&failure.to_string()));
            }
            Ok(world.leave(failure))
        }
    }
}

/// Rank 0 lets the endpoint review the run. The other ranks wait for it, so the review must end before the signals'
/// deadline, and within half of the time after which a watchdog would report a stall.
fn review(loaded: &Loaded, environment: &Environment, world: &World, ended: review::Ended<'_>) {
    if world.all.rank().0 != 0 {
        return;
    }
    let rank = &loaded.rank;
    let stall = (rank.stall_sec > 0).then(|| Duration::from_secs(rank.stall_sec) / 2);
    let stop = time_left(Duration::from_secs(rank.grace_sec)).map(|left| left.saturating_sub(MPI_END));
    let left = [stall, stop].into_iter().flatten().min();
    review::after(&rank.dir, &loaded.run, environment, ended, left);
}

/// A gate has nothing to save: after a stop it runs again from its start.
pub(super) fn gate(flags: ConfigFlags, name: &Gate, force: bool, json: bool) -> Result<Exit, Failure> {
    install_signal_handlers()?;
    let environment = Environment::process();
    let mut world = start_world(&environment)?;
    let loaded = world.agree(config::load_gate(&flags.overrides(WithoutFile::Defaults), name).map_err(Failure::from));
    let outcome = loaded.and_then(|loaded| {
        let receipt = gate::run(name, &loaded, force || environment.force(), &mut world)?;
        if json && world.all.rank().0 == 0 {
            print_json(&receipt);
        }
        world.agree(gate::verdict(&receipt, &loaded.rank.dir).map_err(Failure::from))
    });
    Ok(outcome.map_or_else(|failure| world.leave(failure), |()| Exit::Done))
}
