//! The verbs, their flags, and the tool that each calls.

mod arguments;
mod convert;
mod data;
mod eval;
mod measure;
mod merge;
mod mix;
mod output;
mod plan;
mod report;
mod service;
mod start;
mod train;

use anyhow::Context as _;
use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser, Subcommand};
use longstraw::config::Gate;
use longstraw::runtime::failure::Exit;
use longstraw::train::Begin;

pub(crate) use arguments::take_set_flags;
use arguments::{gate_name, gate_names};
use convert::{ConvertFlags, convert};
use data::{DataVerb, generate, keychain};
use eval::{EvalFlags, eval};
use measure::{BenchFlags, ParityFlags, StudyFlags, bench, parity, study};
use merge::{MergeFlags, merge};
use mix::mix;
pub(crate) use output::print_usage;
use plan::{PlanFlags, plan};
use report::{ReportFlags, report};
use service::{doctor, key_gate, ping};
use start::ConfigFlags;
use train::{gate, train};

/// GRPO training on prompts of up to millions of tokens, on a fixed handful of GPUs.
#[derive(Debug, Parser)]
#[command(name = "longstraw", version)]
pub(crate) struct Command {
    #[command(flatten)]
    config: ConfigFlags,
    #[command(subcommand)]
    verb: Option<Verb>,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Train (what `longstraw` alone does)
    Train {
        /// Print the receipt as one JSON object
        #[arg(long)]
        json: bool,
        /// Continue from the newest complete checkpoint in the run directory; without one, start from the beginning
        #[arg(long)]
        resume: bool,
        /// Start from the beginning; what an earlier run left in the run directory is moved aside, into earlier/N
        #[arg(long, conflicts_with = "resume")]
        anew: bool,
    },
    /// Evaluate adapters, a checkpoint or the base model on held-out prompts, without training; goes on where it was stopped
    Eval(EvalFlags),
    /// A validation run with checks and a receipt; each gate runs after another one has passed
    Gate {
        #[arg(value_name = "NAME", value_parser = gate_name, help = format!("One of {}", gate_names()))]
        gate: Gate,
        /// Run even if the gate before has not passed (`LONGSTRAW_FORCE=1` does the same)
        #[arg(long)]
        force: bool,
        /// Print the receipt as one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Print the rank layout, page counts, memory of a rank and predicted seconds; needs no MPI and no GPU
    Plan(PlanFlags),
    /// Check that the endpoint answers: the list of models and one tiny message; needs no MPI and no GPU
    Ping {
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Check MPI, devices, memory, model, run directory and key before a long run; one line each, with what to do
    Doctor {
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Run a reference case at this world size and compare every number
    Parity(ParityFlags),
    /// Measure one update on random weights and tokens: time by phase, bytes, and the conventional schedule to compare
    Bench(BenchFlags),
    /// Compare gradient modes with the exact gradient on real text, by length and projection; nothing is trained
    Study(StudyFlags),
    /// Write one HTML page about one or several runs: curves, seconds and bytes by phase, gates, answers; needs no
    /// network
    Report(ReportFlags),
    /// Convert a GGUF file, with its tokenizer, to an HF folder
    Convert(ConvertFlags),
    /// Copy a model's folder with adapters added to its weights, for programs that know no adapters
    Merge(MergeFlags),
    /// Make data sets for training, or show what a run will draw from its own
    Data {
        #[command(subcommand)]
        kind: DataVerb,
    },
}

impl Verb {
    fn reads_configuration(&self) -> bool {
        match self {
            Verb::Train { .. }
            | Verb::Eval(_)
            | Verb::Gate { .. }
            | Verb::Plan(_)
            | Verb::Ping { .. }
            | Verb::Doctor { .. } => true,
            Verb::Data { kind } => matches!(kind, DataVerb::Generate(_) | DataVerb::Mix(_)),
            Verb::Parity(_) | Verb::Bench(_) | Verb::Study(_) | Verb::Report(_) | Verb::Convert(_) | Verb::Merge(_) => {
                false
            }
        }
    }
}

/// Runs the verb; `set` holds the pairs of all `--set` flags.
pub(crate) fn run(command: Command, set: Vec<String>) -> anyhow::Result<Exit> {
    let Command { mut config, verb } = command;
    config.set = set;
    let verb = verb.unwrap_or(Verb::Train { json: false, resume: false, anew: false });
    if !verb.reads_configuration() && config.is_given() {
        let message = "this verb reads no configuration: --config, --settings, --set and --run-dir change nothing here";
        print_usage(&Command::command().error(ErrorKind::ArgumentConflict, message));
        return Ok(Exit::Config);
    }
    let exit = match verb {
        Verb::Train { json, resume, anew } => {
            let begin = match (resume, anew) {
                (true, _) => Begin::Resume,
                (false, true) => Begin::Anew,
                (false, false) => Begin::New,
            };
            train(config, begin, json)?
        }
        Verb::Eval(flags) => eval(config, flags)?,
        Verb::Gate { gate, json, .. } if gate.is_endpoint() => key_gate(config, &gate, json)?,
        Verb::Gate { gate: chosen, force, json } => gate(config, &chosen, force, json)?,
        Verb::Plan(flags) => plan(config, &flags)?,
        Verb::Ping { json } => ping(config, json)?,
        Verb::Doctor { json } => doctor(config, json),
        Verb::Parity(flags) => parity(&flags)?,
        Verb::Bench(flags) => bench(&flags)?,
        Verb::Study(flags) => study(flags)?,
        Verb::Report(flags) => report(&flags).context("writing the report")?,
        Verb::Convert(flags) => convert(&flags).with_context(|| format!("converting {}", flags.source.display()))?,
        Verb::Merge(flags) => merge(&flags).with_context(|| format!("merging {}", flags.adapter.display()))?,
        Verb::Data { kind: DataVerb::Keychain(flags) } => keychain(flags).context("making the data set")?,
        Verb::Data { kind: DataVerb::Generate(flags) } => generate(config, flags)?,
        Verb::Data { kind: DataVerb::Mix(flags) } => mix(config, &flags)?,
    };
    Ok(exit)
}
