//! The verb that plans: one configuration, or all gates.

use std::path::{Path, PathBuf};

use clap::Args;
use longstraw::config::{self, DataSource, Gradient, HeldOutFiles, Loaded, RunConfig, WithoutFile};
use longstraw::data::size_note;
use longstraw::model::shape::Shape;
use longstraw::plan::measured::MeasuredRates;
use longstraw::plan::seconds::Rates;
use longstraw::plan::{self, Advice, Counted, Forecast, Lengths, Pace, Room, SplitBecause, Splits, ladder};
use longstraw::report::{print_result, say};
use longstraw::reward;
use longstraw::runtime::failure::{Exit, Failure};
use longstraw::runtime::units::{Tokens, from_index};

use super::arguments::{at_least_one, gradient, rate, share};
use super::output::print_json;
use super::start::ConfigFlags;

/// Key of the held-out sets; that of one with a name has the name behind it.
const HELD_OUT: &str = "data.held_out";

/// Default of `--ranks-per-node`: a node of eight GPUs.
const RANKS_PER_NODE: u64 = 8;

#[derive(Args, Debug)]
pub(super) struct PlanFlags {
    /// Ranks of the world (default: `parallel.cp_size`, else 1)
    #[arg(long, value_parser = at_least_one)]
    ranks: Option<u64>,
    /// Ranks that share a machine's host memory (default: 8, or all if they are fewer)
    #[arg(long, value_name = "RANKS", value_parser = at_least_one)]
    ranks_per_node: Option<u64>,
    /// An HF folder, or just its config.json
    #[arg(long, value_name = "FOLDER")]
    model: Option<PathBuf>,
    /// Refuse what does not fit a device of this size
    #[arg(long, value_name = "GIB")]
    device_gib: Option<u64>,
    /// Refuse what does not fit this much host memory of a node, all its ranks together
    #[arg(long, value_name = "GIB")]
    host_gib: Option<u64>,
    /// Open the configuration's data sets and use their real lengths: the longest for memory, all of them for seconds
    #[arg(long, conflicts_with = "gates")]
    data: bool,
    /// Seconds that a judge takes for one reply: adds the waits for judges to the seconds of updates and to the run's hours
    #[arg(long, value_name = "SECONDS", value_parser = rate, conflicts_with = "gates")]
    judge_sec: Option<f64>,
    /// One row for each gate from gate2 to gate7, at its own length and group, instead of the configuration's
    #[arg(long)]
    gates: bool,
    /// The gates' gradient mode: exact, response or last=N
    #[arg(long, requires = "gates", value_parser = gradient, default_value = "response")]
    gradient: Gradient,
    #[command(flatten)]
    rates: RateFlags,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Rates behind the predicted seconds; the defaults are published ones, measured on one NVIDIA H200.
#[derive(Args, Debug)]
struct RateFlags {
    /// Rates of this machine, as `bench MODEL --rates FILE` has written them
    #[arg(long, value_name = "FILE", conflicts_with_all = [
        "rate_matmul", "rate_attention_forward", "rate_attention_backward", "rate_host", "rate_memory", "efficiency",
    ])]
    rates: Option<PathBuf>,
    /// Matrix products of a GPU
    #[arg(long, value_name = "TFLOP/S", value_parser = rate)]
    rate_matmul: Option<f64>,
    /// Causal attention of a GPU, forward
    #[arg(long, value_name = "TFLOP/S", value_parser = rate)]
    rate_attention_forward: Option<f64>,
    /// Its backward, counted as 2.5 forwards
    #[arg(long, value_name = "TFLOP/S", value_parser = rate)]
    rate_attention_backward: Option<f64>,
    /// Copies between host and device, each way, for each rank
    #[arg(long, value_name = "GB/S", value_parser = rate)]
    rate_host: Option<f64>,
    /// A GPU's own memory
    #[arg(long, value_name = "GB/S", value_parser = rate)]
    rate_memory: Option<f64>,
    /// Share of the kernels' and the memory's rates that a phase reaches
    #[arg(long, value_name = "SHARE", value_parser = share)]
    efficiency: Option<f64>,
}

impl RateFlags {
    /// What predictions follow: the machine's own rates, or published ones and those of the flags.
    fn pace(&self, config: &config::RunConfig, shape: &Shape, long_tail: bool) -> Result<Pace, Failure> {
        if let Some(file) = &self.rates {
            let measured = MeasuredRates::read(file, config, shape)?;
            measured.require(long_tail)?;
            return Ok(Pace::Measured(Box::new(measured)));
        }
        let known = Rates::h200(config, shape);
        Ok(Pace::Published(Rates {
            matmul: self.rate_matmul.unwrap_or(known.matmul),
            attention_forward: self.rate_attention_forward.unwrap_or(known.attention_forward),
            attention_backward: self.rate_attention_backward.unwrap_or(known.attention_backward),
            host: self.rate_host.unwrap_or(known.host),
            memory: self.rate_memory.unwrap_or(known.memory),
            efficiency: self.efficiency.unwrap_or(known.efficiency),
            ..known
        }))
    }

    fn is_given(&self) -> bool {
        let rates = [self.rate_matmul, self.rate_attention_forward, self.rate_attention_backward, self.rate_host];
        self.rates.is_some() || rates.into_iter().chain([self.rate_memory, self.efficiency]).any(|rate| rate.is_some())
    }
}

pub(super) fn plan(flags: ConfigFlags, plan_flags: &PlanFlags) -> Result<Exit, Failure> {
    // The gates bring their own lengths.
    let without_file = if plan_flags.gates { WithoutFile::DefaultsInPart } else { WithoutFile::Defaults };
    let loaded = config::load(&flags.overrides(without_file))?;
    let config = &loaded.run;
    let ranks = plan_flags.ranks.or(config.parallel.cp_size).unwrap_or(1);
    let problems = config.check(Some(ranks));
    if !problems.is_empty() {
        return Err(config::Error::Refused { problems }.into());
    }
    if plan_flags.data {
        reward::check_rubrics(config)?;
    }
    let model = plan_flags.model.as_deref().or(config.model.path.as_deref());
    let scaling = config.model.rope_scaling.as_ref().map(|table| serde_json::json!(table));
    let shape = model.map(|folder| Shape::read(folder, scaling.as_ref())).transpose()?;
    if let Some(shape) = &shape {
        shape.check_targets(config.lora.targets.as_deref())?;
    }
    let room = Room {
        ranks_here: plan_flags.ranks_per_node.unwrap_or(RANKS_PER_NODE).min(ranks),
        device: plan_flags.device_gib.map(plan::gib),
        host: plan_flags.host_gib.map(plan::gib),
        host_only: config.run.device == config::DeviceChoice::Cpu,
    };
    // The default rates are a GPU's: without one, seconds are predicted only from given rates.
    let timed = !room.host_only || plan_flags.rates.is_given();
    let prompt = config.context.prompt_len;
    let long_tail = if plan_flags.gates { plan_flags.gradient.tail(prompt) } else { config.tail(prompt) }
        > config.memory.micro_rows();
    let pace =
        shape.as_ref().filter(|_| timed).map(|shape| plan_flags.rates.pace(config, shape, long_tail)).transpose()?;
    if plan_flags.gates {
        return gates(config, ranks, shape.as_ref(), &room, plan_flags, pace.as_ref());
    }
    let Some(shape) = shape else {
        let plan = plan::of_shape(config, ranks, None, &room);
        if plan_flags.json {
            print_json(&plan);
        } else {
            print_result(&plan.text(config));
        }
        notes(&loaded, config, None, &[]);
        return Ok(Exit::Done);
    };
    let folder = model.map(plan::model_folder).filter(|_| plan_flags.data);
    let (config, advice) = advise(config, ranks, &shape, &room, pace.as_ref(), folder, plan_flags.judge_sec)?;
    if plan_flags.json {
        print_json(&advice);
    } else {
        print_result(&advice.text(&config));
    }
    notes(&loaded, &config, Some(&shape), &advice.lengths);
    if plan_flags.judge_sec.is_some() && config.named_judges().is_empty() {
        say("--judge-sec changes nothing: grpo.reward_fn names no judge");
    }
    advice.plan.refuse(&room)?;
    Ok(Exit::Done)
}

/// The plan with everything that it advises: ways to share the ranks out, lengths of the data where a model's `folder` is given,
/// and the whole run with `judge_sec` seconds for a judge's reply; and the configuration that it is of.
fn advise(
    config: &RunConfig,
    ranks: u64,
    shape: &Shape,
    room: &Room,
    pace: Option<&Pace>,
    folder: Option<&Path>,
    judge_sec: Option<f64>,
) -> Result<(RunConfig, Advice), Failure> {
    let mut config = config.clone();
    let open = plan::is_open(&config);
    let lengths = folder.map(|folder| lengths(&config, shape, folder)).transpose()?.unwrap_or_default();
    if let Some(longest) = lengths.iter().map(|(_, lengths)| lengths.taken_longest).max() {
        // Memory is that of the longest prompt there is, held-out ones among them.
        config.context.prompt_len = longest;
        config.context.max_seq_len = Tokens(longest.0.saturating_add(config.context.answer_len.0));
        config.context.cp_pages_per_gpu = None;
    }
    let chosen = if open { plan::choose(&config, ranks, shape, room, room.device) } else { None };
    let because = match (open, &chosen) {
        (false, _) => SplitBecause::Configured,
        (true, Some(_)) => SplitBecause::Fastest,
        (true, None) => SplitBecause::All,
    };
    config = chosen.map_or(config, |(config, _)| config);
    let splits = (ranks > 1 && config.memory.prompt_no_grad).then(|| {
        let splits = plan::splits(&config, ranks, shape, room, room.device, pace);
        Splits { because, ..splits }
    });
    let rows = plan::planned_rows(&config, ranks, Some(shape), room.device, room.host_only);
    config.memory.micro_block = rows.rows;
    let mut plan = plan::of_shape(&config, ranks, Some(shape), room);
    plan.micro_block = Some(rows);
    if let Some(pace) = pace {
        plan.time(&config, shape, pace);
    }
    let of = |key: &str| lengths.iter().find(|(known, _)| *known == key).map(|(_, lengths)| lengths);
    let counted = Counted {
        update_seconds: of(config.data.train_key())
            .zip(pace)
            .and_then(|(train, pace)| train.update_seconds(&config, &plan, shape, pace)),
        held_out: held_out_records(&lengths),
        judge_sec,
    };
    let forecast = Forecast::new(&config, &plan, shape, pace, counted);
    Ok((config, Advice { plan, splits, lengths, forecast }))
}

/// Records of all held-out sets that were read; `None` where none was.
fn held_out_records(lengths: &[(String, Lengths)]) -> Option<u64> {
    let held_out = lengths.iter().filter(|(key, _)| key.starts_with(HELD_OUT));
    let mut records = held_out.map(|(_, held_out)| from_index(held_out.records));
    let first = records.next()?;
    Some(first + records.sum::<u64>())
}

/// Real lengths of the data sets, by key; of several files to train on those of the mix first.
pub(super) fn lengths(config: &RunConfig, shape: &Shape, folder: &Path) -> Result<Vec<(String, Lengths)>, Failure> {
    if !config.data.names_files() {
        return Err(config::Error::Unset {
            key: "data.path",
            how: "--data reads the data sets that the configuration names",
        }
        .into());
    }
    let read = sets(config).into_iter().map(|(key, path)| Ok((key, Lengths::read(config, shape, path, folder)?)));
    let mut lengths: Vec<(String, Lengths)> = read.collect::<Result<_, longstraw::data::Error>>()?;
    let weights = config.data.sources().iter().map(DataSource::weight_parts);
    let mix: Vec<(u64, &Lengths)> = weights.zip(lengths.iter().map(|(_, lengths)| lengths)).collect();
    if !mix.is_empty() {
        let joined = Lengths::joined(&mix);
        lengths.insert(0, (config.data.train_key().to_owned(), joined));
    }
    Ok(lengths)
}

/// Files of the data sets, with the key of each.
fn sets(config: &RunConfig) -> Vec<(String, &Path)> {
    let key = |name: &str| match config.data.held_out {
        Some(HeldOutFiles::Named(_)) => format!("{HELD_OUT}.{name}"),
        _ => HELD_OUT.to_owned(),
    };
    let held_out = config.data.held_out.iter().flat_map(HeldOutFiles::sets);
    let held_out = held_out.map(|(name, file)| (key(name), file));
    config.data.train_files().into_iter().chain(held_out).collect()
}

/// Lines beside the plan.
fn notes(loaded: &Loaded, config: &RunConfig, shape: Option<&Shape>, lengths: &[(String, Lengths)]) {
    let context = shape.and_then(|shape| shape.context_note(config.context.max_seq_len));
    let data = sets(config).into_iter().filter_map(|(key, path)| size_note(&key, path, config.context.prompt_len));
    let limit = loaded.run.context.prompt_len;
    let longest = (!lengths.is_empty() && config.context.prompt_len < limit).then(|| {
        let longest = config.context.prompt_len;
        format!(
            "the plan is for the longest prompt of the data, {longest}; a run takes memory for context.prompt_len = {limit}. \
             Optional: with context.prompt_len = {longest} a run takes what the plan says"
        )
    });
    let refused = lengths.iter().flat_map(|(key, lengths)| lengths.refusals(config, key));
    let judges = loaded.run.judges_notes();
    for note in loaded.notes().into_iter().chain(context).chain(data).chain(longest).chain(refused).chain(judges) {
        say(&note);
    }
}

fn gates(
    config: &config::RunConfig,
    ranks: u64,
    shape: Option<&Shape>,
    room: &Room,
    flags: &PlanFlags,
    pace: Option<&Pace>,
) -> Result<Exit, Failure> {
    let Some(shape) = shape else {
        // Its error names the missing key and how to set it.
        config.model_path()?;
        return Err(
            config::Error::Unset { key: "model.path", how: "name a folder that is there with --model FOLDER" }.into()
        );
    };
    let gradient = flags.gradient;
    let table = ladder::table(config, ranks, shape, room, gradient, pace);
    if flags.json {
        print_json(&table);
    } else {
        print_result(&table.text());
    }
    if config.grpo.gradient != gradient {
        say(&format!(
            "the table is for gradient {gradient}, whatever the configuration says ({}); --gradient takes another",
            config.grpo.gradient
        ));
    }
    if config.gate.scale > 1 {
        say("the table is for the gates' full lengths; gate.scale is left out");
    }
    table.refuse()?;
    Ok(Exit::Done)
}
