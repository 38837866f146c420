//! The verbs, their flags, and what each calls.

mod arguments;
mod data;
mod measure;
mod page;
mod plan;
mod service;

use std::path::PathBuf;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory as _, Parser, Subcommand};
use longstraw::config::{self, Environment, Gate, Loaded, Overrides};
use longstraw::report::{print_result, say};
use longstraw::runtime::failure::{Exit, Failure, Phase};
use longstraw::runtime::liveness::Tracker;
use longstraw::tensor::boundary::count_allocations;
use longstraw::tools::convert::{self, convert};
use longstraw::tools::gate;
use longstraw::tools::review::{self, Ended};
use longstraw::train;
use longstraw::world::{Launcher, World, heed_signals, time_left};

pub(crate) use arguments::hoist;
use arguments::{gate_name, gate_names};
use data::{DataVerb, generate, keychain};
use measure::{BenchFlags, ParityFlags, StudyFlags, bench, parity, study};
use page::{ReportFlags, report};
use plan::{PlanFlags, plan};
use service::{doctor, key_gate, ping};

/// What the end of MPI is left of the time after a signal.
const LEAVING: Duration = Duration::from_secs(5);

/// GRPO training on prompts of up to millions of tokens, on a fixed handful of GPUs.
#[derive(Debug, Parser)]
#[command(name = "longstraw", version)]
pub(crate) struct Command {
    #[command(flatten)]
    config: ConfigFlags,
    #[command(subcommand)]
    verb: Option<Verb>,
}

/// Where the configuration comes from.
#[derive(Args, Clone, Debug)]
struct ConfigFlags {
    /// The configuration (default: ./config.toml where it exists, else the built-in laptop run)
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The settings (default: ./settings.json where it exists)
    #[arg(long, global = true, value_name = "FILE")]
    settings: Option<PathBuf>,
    /// One key's value; may be given again
    #[arg(long, global = true, value_name = "table.key=value")]
    set: Vec<String>,
    /// Where the run writes (default: run.dir)
    #[arg(long, global = true, value_name = "DIR")]
    run_dir: Option<PathBuf>,
}

impl ConfigFlags {
    fn given(&self) -> bool {
        let files = [&self.config, &self.settings, &self.run_dir];
        files.into_iter().any(Option::is_some) || !self.set.is_empty()
    }
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Train (what `longstraw` alone does)
    Train {
        /// Print the receipt as one JSON object
        #[arg(long)]
        json: bool,
        /// Go on from the newest checkpoint in the run directory that is whole; without one, start anew
        #[arg(long)]
        resume: bool,
    },
    /// A validation run that is held to checks and leaves a receipt; each gate runs after another one has passed
    Gate {
        #[arg(value_name = "NAME", value_parser = gate_name, help = format!("One of {}", gate_names()))]
        gate: Gate,
        /// Run although the gate before has not passed (`LONGSTRAW_FORCE=1` does the same)
        #[arg(long)]
        force: bool,
        /// Print the receipt as one JSON object
        #[arg(long)]
        json: bool,
    },
    /// The rank layout, page counts, memory of a rank and predicted seconds; needs no MPI and no GPU
    Plan(PlanFlags),
    /// Whether the endpoint and its key answer: the list of models and one tiny message; needs no MPI and no GPU
    Ping {
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Look at MPI, devices, memory, model, run directory and key before anything long; one line each, with what to do
    Doctor {
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Run a reference case at this world size and compare every number
    Parity(ParityFlags),
    /// One update on random weights and tokens at given lengths: time by phase, bytes, and the conventional schedule beside
    Bench(BenchFlags),
    /// How far gradient modes lie from the exact gradient, on real text, by length and projection; nothing is learned
    Study(StudyFlags),
    /// One page of HTML about one run or several: curves, seconds and bytes by phase, gates, answers; needs no network
    Report(ReportFlags),
    /// A GGUF file, with its tokenizer, to an HF folder
    Convert {
        /// The GGUF file
        source: PathBuf,
        /// The folder to make
        destination: PathBuf,
        /// Write bfloat16 instead of float32
        #[arg(long)]
        bf16: bool,
        /// Replace the destination, whatever it is
        #[arg(long)]
        force: bool,
    },
    /// Make datasets
    Data {
        #[command(subcommand)]
        kind: DataVerb,
    },
}

/// Runs the verb; `set` are the pairs of all `--set`.
pub(crate) fn run(command: Command, set: Vec<String>) -> Result<Exit, Failure> {
    let Command { mut config, verb } = command;
    config.set = set;
    let verb = verb.unwrap_or(Verb::Train { json: false, resume: false });
    let reads = matches!(
        verb,
        Verb::Train { .. }
            | Verb::Gate { .. }
            | Verb::Plan(_)
            | Verb::Ping { .. }
            | Verb::Doctor { .. }
            | Verb::Data { kind: DataVerb::Generate(_) }
    );
    if !reads && config.given() {
        let words = "this verb reads no configuration: --config, --settings, --set and --run-dir change nothing here";
        say_once(&Command::command().error(ErrorKind::ArgumentConflict, words));
        return Ok(Exit::Config);
    }
    match verb {
        Verb::Train { json, resume } => train(config, resume, json),
        Verb::Gate { gate, json, .. } if gate.is_endpoint() => key_gate(config, &gate, json),
        Verb::Gate { gate, force, json } => pass(config, &gate, force, json),
        Verb::Plan(flags) => plan(config, &flags),
        Verb::Ping { json } => ping(config, json),
        Verb::Doctor { json } => Ok(doctor(config, json)),
        Verb::Parity(flags) => parity(&flags),
        Verb::Bench(flags) => bench(flags),
        Verb::Study(flags) => study(flags),
        Verb::Report(flags) => report(&flags),
        Verb::Convert { source, destination, bf16, force } => {
            let weights = if bf16 { convert::Weights::Bfloat16 } else { convert::Weights::Float32 };
            let summary = convert(&source, &destination, &convert::Options { weights, force, ..Default::default() })?;
            say(&format!(
                "{}: {} layers, {} tensors, {} parameters, {}",
                summary.destination.display(),
                summary.layers,
                summary.tensors,
                summary.parameters,
                summary.bytes
            ));
            Ok(Exit::Done)
        }
        Verb::Data { kind: DataVerb::Keychain(flags) } => keychain(flags),
        Verb::Data { kind: DataVerb::Generate(flags) } => generate(config, flags),
    }
}

fn overrides(flags: ConfigFlags) -> Overrides {
    Overrides { config: flags.config, settings: flags.settings, set: flags.set, run_dir: flags.run_dir }
}

/// Starts MPI with this process's share of the machine's cores.
fn world(environment: &Environment) -> Result<World, Failure> {
    count_allocations();
    let launcher = environment.launcher_tasks().map(|told| Launcher { variable: told.variable, tasks: told.tasks });
    let world = World::start(launcher, Tracker::default())?;
    // Asked on every rank, since it is a collective; variables may differ from host to host.
    let (_, here) = world.on_this_machine();
    if environment.omp_num_threads().is_none() {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        tch::set_num_threads(i32::try_from((cores / here).max(1)).unwrap_or(1));
    }
    Ok(world)
}

/// Prints clap's own words, once however many ranks were started with this command line.
pub(crate) fn say_once(usage: &clap::Error) {
    let several = Environment::process().launcher_tasks().is_some_and(|told| told.tasks > 1);
    let world = several.then(|| World::start(None, Tracker::default()).ok()).flatten();
    if world.as_ref().is_none_or(|world| world.all.rank().0 == 0) {
        // Nowhere to print it leaves nowhere to complain to; the exit code still tells.
        let _ = usage.print();
    }
    if let Some(world) = world {
        // A launcher ends a job at its first non-zero exit, so nobody leaves before the words are out.
        world.all.barrier();
    }
}

fn train(flags: ConfigFlags, resume: bool, json: bool) -> Result<Exit, Failure> {
    heed_signals()?;
    let environment = Environment::process();
    let mut world = world(&environment)?;
    let loaded = match world.agree(config::load(&overrides(flags)).map_err(Failure::from)) {
        Ok(loaded) => loaded,
        Err(failure) => return Ok(world.leave(failure)),
    };
    match train::run(&loaded, resume, &mut world) {
        Ok(receipt) => {
            if json && world.all.rank().0 == 0 {
                print_json(&receipt);
            }
            review(&loaded, &environment, &world, if receipt.stopped { Ended::Stopped } else { Ended::Finished });
            Ok(Exit::Done)
        }
        Err(failure) => {
            // A run that was refused before its first step has no numbers, and an earlier one's files may lie there.
            if world.tracker().site().phase != Phase::Start {
                review(&loaded, &environment, &world, Ended::Failed(&failure.to_string()));
            }
            Ok(world.leave(failure))
        }
    }
}

/// What the endpoint is asked after a run, by rank 0. The others wait for it, so it keeps within what signals leave, and
/// within half the time after which a watchdog would take it for a stall.
fn review(loaded: &Loaded, environment: &Environment, world: &World, ended: Ended<'_>) {
    if world.all.rank().0 != 0 {
        return;
    }
    let rank = &loaded.rank;
    let stall = (rank.stall_sec > 0).then(|| Duration::from_secs(rank.stall_sec) / 2);
    let stop = time_left(Duration::from_secs(rank.grace_sec)).map(|left| left.saturating_sub(LEAVING));
    let left = [stall, stop].into_iter().flatten().min();
    review::after(&rank.dir, &loaded.run, environment, ended, left);
}

/// Signals end a gate at once: it has nothing to save, and is run again from its start.
fn pass(flags: ConfigFlags, gate: &Gate, force: bool, json: bool) -> Result<Exit, Failure> {
    heed_signals()?;
    let environment = Environment::process();
    let mut world = world(&environment)?;
    let loaded = world.agree(config::load_gate(&overrides(flags), gate).map_err(Failure::from));
    let outcome = loaded.and_then(|loaded| {
        let receipt = gate::run(gate, &loaded, force || environment.force(), &mut world)?;
        if json && world.all.rank().0 == 0 {
            print_json(&receipt);
        }
        world.agree(gate::verdict(&receipt, &loaded.rank.dir).map_err(Failure::from))
    });
    Ok(outcome.map_or_else(|failure| world.leave(failure), |()| Exit::Done))
}

fn print_json<T: serde::Serialize>(value: &T) {
    match serde_json::to_string(value) {
        Ok(text) => print_result(&text),
        Err(error) => say(&format!("longstraw: the result has no JSON form: {error}")),
    }
}

/// Rank 0 prints a report, as one JSON object or in words.
fn print_report<T: serde::Serialize>(world: &World, json: bool, report: &T, text: &str) {
    match (world.all.rank().0, json) {
        (0, true) => print_json(report),
        (0, false) => print_result(text),
        _ => {}
    }
}
