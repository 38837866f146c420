//! The verbs that measure: reference cases, one update at given lengths, gradient modes on real text.

use std::path::PathBuf;

use clap::Args;
use longstraw::config::{DeviceChoice, Dtype, Environment, Gradient, MICRO_BLOCK_DEFAULT, RunConfig};
use longstraw::model::shape::Shape;
use longstraw::plan;
use longstraw::prompt::handoff::Keeping;
use longstraw::prompt::pages::Residency;
use longstraw::runtime::failure::{Exit, Failure};
use longstraw::runtime::units::{Tokens, from_index};
use longstraw::tools::bench;
use longstraw::tools::parity;
use longstraw::tools::study;
use longstraw::world::World;
use longstraw::world::devices;
use longstraw::world::exchange;
use tch::Device;

use super::arguments::{at_least_one, at_least_two, device, dtype, gradient, length, residency, start};
use super::output::print_report;
use super::start::start_world;

/// What all verbs that measure have in common.
#[derive(Args, Clone, Copy, Debug)]
struct CommonFlags {
    /// Positions in a page
    #[arg(long, default_value = "64", value_parser = at_least_one)]
    page_size: u64,
    /// Maximum number of rows of a segment (default: 2048; in bench on a GPU as `memory.micro_block = 0` chooses)
    #[arg(long, value_parser = at_least_one)]
    micro_block: Option<u64>,
    /// auto, cpu or cuda; auto takes GPUs where every rank has one
    #[arg(long, default_value = "auto", value_parser = device)]
    device: DeviceChoice,
    /// Let several ranks use one GPU
    #[arg(long)]
    share_device: bool,
    /// Ranks over which the experts of a layer are spread; divides the number of ranks
    #[arg(long, default_value = "1", value_parser = at_least_one)]
    ep_size: u64,
    /// Send tensors between GPUs through host memory even if there is a transport from GPU to GPU
    #[arg(long)]
    through_host: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
pub(super) struct ParityFlags {
    /// The case's folder
    case_dir: PathBuf,
    /// Which prompt positions carry gradient: exact, response, last=N
    #[arg(long, default_value = "response", value_parser = gradient)]
    gradient: Gradient,
    /// float32, float64 or bfloat16
    #[arg(long, default_value = "float64", value_parser = dtype)]
    dtype: tch::Kind,
    #[command(flatten)]
    common: CommonFlags,
}

#[derive(Args, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "a command's switches")]
pub(super) struct BenchFlags {
    /// An HF folder, or just its config.json: only the shape is read
    model: PathBuf,
    /// Number of prompt positions
    #[arg(long, default_value = "4096", value_parser = at_least_one)]
    prompt: u64,
    /// Tokens of an answer
    #[arg(long, default_value = "64", value_parser = at_least_one)]
    answer: u64,
    /// Answers of a group; may be given again
    #[arg(long, default_values = ["2", "8"], value_parser = at_least_one)]
    group: Vec<u64>,
    /// exact, response or last=N; may be given again
    #[arg(long, default_values = ["exact", "response"], value_parser = gradient)]
    gradient: Vec<Gradient>,
    /// float32, float64 or bfloat16
    #[arg(long, default_value = "float32", value_parser = dtype)]
    dtype: tch::Kind,
    #[command(flatten)]
    common: CommonFlags,
    /// Also run the conventional schedule (one rank only): whole sequences, activation checkpointing
    #[arg(long)]
    conventional: bool,
    /// Where pages wait between phases: host or device
    #[arg(long, default_value = "host", value_parser = residency)]
    pages: Residency,
    /// Where the saved state of the tail waits: host or device
    #[arg(long, default_value = "host", value_parser = residency)]
    tail: Residency,
    /// Keep the attention outputs of the tail and of the answers too, instead of recomputing them
    #[arg(long)]
    keep_attention: bool,
    /// Do not keep the keys that indices chose for the prompt's rows: choose them again in the sweep
    #[arg(long)]
    choose_again: bool,
    /// Keep the tail's block inputs of every N-th layer, and recompute the others
    #[arg(long, default_value = "1", value_parser = at_least_one)]
    inputs_every: u64,
    /// Sample this many tokens of every answer instead: milliseconds a token, bytes read, share of the memory's rate
    #[arg(long, value_name = "TOKENS", value_parser = at_least_two)]
    draw: Option<u64>,
    /// Layers, the first ones, whose pages lie on the device while tokens are sampled (default: all)
    #[arg(long, value_name = "LAYERS", requires = "draw")]
    resident: Option<usize>,
    /// Run the update on 1, 2, 4 … ranks of this job, one number after another: strong and weak scaling in one table
    #[arg(long, conflicts_with_all = ["draw", "conventional", "rates"])]
    ranks_sweep: bool,
    /// Measure this machine's rates with this model instead (one rank only), for `plan --rates FILE`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["draw", "conventional"])]
    rates: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub(super) struct StudyFlags {
    /// An HF folder with weights and tokenizer
    #[arg(default_value = "models/smollm2-135m-instruct")]
    model: PathBuf,
    /// Positions of prompt and answer (64 of them are left to the answer), and how many prompts; may be given again
    #[arg(long, value_name = "POSITIONS[:PROMPTS]", default_values = ["512:8", "2048:4", "8192:1"], value_parser = length)]
    length: Vec<study::Length>,
    /// response, last=N or exact; may be given again
    #[arg(long, default_values = ["response", "last=64", "last=512"], value_parser = gradient)]
    gradient: Vec<Gradient>,
    /// start (B zero), drawn (B random) or a folder of saved adapters; may be given again
    #[arg(long, value_name = "start|drawn|FOLDER", default_values = ["drawn", "start"], value_parser = start)]
    adapters: Vec<study::Start>,
    /// Folders of text (default: texts that every Debian machine has)
    #[arg(long, value_name = "FOLDER")]
    text: Vec<PathBuf>,
    /// Answers of a prompt, one of them right
    #[arg(long, default_value_t = 4)]
    group_size: usize,
    /// Seed of prompts and adapters
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// float32, float64 or bfloat16
    #[arg(long, default_value = "float32", value_parser = dtype)]
    dtype: tch::Kind,
    #[command(flatten)]
    common: CommonFlags,
}

/// Starts MPI, selects this rank's device, measures, and prints the report.
fn measure_and_report<R>(
    common: CommonFlags,
    measure: impl FnOnce(&World, Device) -> Result<R, Failure>,
    report: impl FnOnce(&World, &R) -> Exit,
) -> Result<Exit, Failure> {
    let mut world = start_world(&Environment::process())?;
    if let Err(failure) = world.cut(world.all.size(), usize::try_from(common.ep_size).unwrap_or(usize::MAX)) {
        return Ok(world.leave(failure));
    }
    let device = devices::choose(&world, common.device, common.share_device, false);
    let connected = device.and_then(|device| {
        if !common.through_host {
            exchange::connect(&world.cp, device)?;
            exchange::connect(&world.ep, device)?;
        }
        Ok(device)
    });
    Ok(match connected.and_then(|device| measure(&world, device)) {
        Ok(measured) => report(&world, &measured),
        Err(failure) => world.leave(failure),
    })
}

pub(super) fn parity(flags: &ParityFlags) -> Result<Exit, Failure> {
    let options = |device| parity::Options {
        gradient: flags.gradient,
        kind: flags.dtype,
        page_size: Tokens(flags.common.page_size),
        micro_block: flags.common.micro_block.map_or(MICRO_BLOCK_DEFAULT, Tokens),
        device,
    };
    let measure = |world: &World, device| parity::run(world, &flags.case_dir, &options(device));
    measure_and_report(flags.common, measure, |world, report| {
        print_report(world, flags.common.json, report, &report.text());
        if report.passed { Exit::Done } else { Exit::Gate }
    })
}

/// Rows of a micro-block as a training run of these lengths would choose them, for the mode that takes fewest; equal on all
/// ranks.
fn micro_block(flags: &BenchFlags, world: &World, device: Device) -> Result<Tokens, Failure> {
    let total = devices::memory_least(world, device)?;
    let shape = Shape::read(&flags.model, None)?;
    let mut config = RunConfig::laptop();
    config.run.device = flags.common.device;
    config.parallel.ep_size = flags.common.ep_size;
    config.model.dtype = config_dtype(flags.dtype);
    let context = &mut config.context;
    (context.prompt_len, context.answer_len) = (Tokens(flags.prompt), Tokens(flags.answer));
    context.max_seq_len = Tokens(flags.prompt.saturating_add(flags.answer));
    context.page_size = Tokens(flags.common.page_size);
    let ranks = from_index(world.all.size());
    let rows = flags.gradient.iter().map(|&gradient| {
        config.grpo.gradient = gradient;
        if flags.rates.is_some() && gradient == Gradient::Exact {
            // Both prompts of a fit have tails longer than a micro-block.
            let shorter = bench::shorter_prompt(Tokens(flags.prompt));
            config.context.prompt_len = shorter;
            config.context.max_seq_len = Tokens(shorter.0.saturating_add(flags.answer));
        }
        plan::micro_block(&config, ranks, Some(&shape), total)
    });
    Ok(rows.min().unwrap_or(MICRO_BLOCK_DEFAULT))
}

fn config_dtype(kind: tch::Kind) -> Dtype {
    match kind {
        tch::Kind::BFloat16 => Dtype::Bfloat16,
        tch::Kind::Double => Dtype::Float64,
        _ => Dtype::Float32,
    }
}

pub(super) fn bench(flags: &BenchFlags) -> Result<Exit, Failure> {
    let common = flags.common;
    let rows = |world: &World, device| match flags.common.micro_block {
        Some(rows) => Ok(Tokens(rows)),
        None => micro_block(flags, world, device),
    };
    let options = |device, micro_block| bench::Options {
        model: flags.model.clone(),
        prompt: Tokens(flags.prompt),
        answer: Tokens(flags.answer),
        groups: flags.group.clone(),
        gradients: flags.gradient.clone(),
        kind: flags.dtype,
        page_size: Tokens(flags.common.page_size),
        micro_block,
        conventional: flags.conventional,
        draw: flags.draw.map(Tokens),
        resident: flags.resident,
        ranks_sweep: flags.ranks_sweep,
        through_host: flags.common.through_host,
        keeping: Keeping {
            pages: flags.pages,
            tail: flags.tail,
            every: usize::try_from(flags.inputs_every).unwrap_or(usize::MAX),
            attention: flags.keep_attention,
            answer_attention: flags.keep_attention,
            index_sets: !flags.choose_again,
        },
        device,
    };
    if let Some(file) = flags.rates.clone() {
        let measure = |world: &World, device| {
            let measured = bench::measure(world, &options(device, world.agree(rows(world, device))?))?;
            measured.write(&file)?;
            Ok(measured)
        };
        return measure_and_report(common, measure, |world, measured| {
            print_report(world, common.json, measured, &measured.text(&file));
            Exit::Done
        });
    }
    let measure = |world: &World, device| {
        let rows = world.agree(rows(world, device))?;
        bench::run(world, &options(device, rows))
    };
    measure_and_report(common, measure, |world, report| {
        print_report(world, common.json, report, &report.text());
        Exit::Done
    })
}

pub(super) fn study(flags: StudyFlags) -> Result<Exit, Failure> {
    let common = flags.common;
    let options = |device| study::Options {
        model: flags.model,
        lengths: flags.length,
        gradients: flags.gradient,
        starts: flags.adapters,
        text: flags.text,
        group_size: flags.group_size,
        seed: flags.seed,
        kind: flags.dtype,
        page_size: Tokens(flags.common.page_size),
        micro_block: flags.common.micro_block.map_or(MICRO_BLOCK_DEFAULT, Tokens),
        device,
    };
    let measure = |world: &World, device| study::run(world, &options(device));
    measure_and_report(common, measure, |world, report| {
        print_report(world, common.json, report, &report.text());
        Exit::Done
    })
}
