//! The verb that evaluates without training.

use std::path::PathBuf;

use clap::Args;
use longstraw::config::{self, Environment, Overrides, WithoutFile};
use longstraw::report::{print_result, say};
use longstraw::runtime::failure::{Exit, Failure};
use longstraw::train::{self, EvalEnded, EvalOptions};
use longstraw::world::install_signal_handlers;

use super::output::print_json;
use super::start::{ConfigFlags, start_world};

#[derive(Args, Debug)]
pub(super) struct EvalFlags {
    /// Folder of adapters in PEFT's format, or of a checkpoint, or a run's file `best` or `latest`
    #[arg(value_name = "ADAPTERS", required_unless_present = "base", conflicts_with = "base")]
    adapters: Option<PathBuf>,
    /// Evaluate the base model alone
    #[arg(long)]
    base: bool,
    /// Where the results go (default: eval/NAME in the directory of the adapters' run, else in run.dir, with the name of their folder)
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Begin anew; results that are there move aside, into earlier/N
    #[arg(long)]
    anew: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn eval(config: ConfigFlags, flags: EvalFlags) -> Result<Exit, Failure> {
    install_signal_handlers()?;
    let environment = Environment::process();
    let mut world = start_world(&environment)?;
    let EvalFlags { adapters, out, anew, json, .. } = flags;
    let options = EvalOptions { adapters, out, anew };
    // No checkpoint is chosen, and the sets may be others than those of the run that it names.
    let overrides = Overrides { left_out: &["checkpoint.keep_best"], ..config.overrides(WithoutFile::Defaults) };
    let loaded = world.agree(config::load(&overrides).map_err(Failure::from));
    let ended = loaded.and_then(|loaded| train::evaluate(&loaded, &options, &mut world));
    let root = world.all.rank().0 == 0;
    match ended {
        Ok(EvalEnded::Finished { summary, out }) => {
            if root && json {
                print_json(&summary);
            } else if root {
                print_result(&summary.table());
                say(&format!("each prompt's answers are in {}", out.join("results.jsonl").display()));
            }
            Ok(Exit::Done)
        }
        Ok(EvalEnded::Stopped) => Ok(Exit::Requeue),
        Err(failure) => Ok(world.leave(failure)),
    }
}
