//! Opens a run before its first step: first what is quick to check, then the model and the policy.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;

use serde_json::Value;
use tch::{Device, Kind};

use super::inputs::{self, Inputs, Work};
use super::reuse;
use super::run_folder::Begin;
use super::session::{Model, Policy, RunPlan, Session, TrainingData};
use super::sources;
use super::splits;
use super::weights;
use crate::checkpoint;
use crate::config::{self, Dtype, Loaded, RankConfig, RunConfig, When};
use crate::model::adapter_file::AdapterShape;
use crate::model::experts;
use crate::model::lora::Adapters;
use crate::model::spec::{EXPERT_PROJECTIONS, Linear, Spec};
use crate::plan::{self, Plan, Room};
use crate::prompt::handoff::Keeping;
use crate::report::open_log;
use crate::runtime::failure::Failure;
use crate::runtime::memory::{MemorySpace, Purpose};
use crate::runtime::units::{as_index, from_index};
use crate::step::optimizer::{AdamW, Settings};
use crate::tensor::accumulation;
use crate::tensor::boundary::storage_bytes;
use crate::world::World;
use crate::world::devices;
use crate::world::exchange;

/// What is known of a run before its directory is touched.
pub(super) struct Prepared {
    /// The configuration with the rows of a micro-block that were chosen where it leaves them open.
    pub(super) loaded: Loaded,
    device: Device,
    spec: Spec,
    shape: AdapterShape,
    plan: RunPlan,
}

impl Prepared {
    /// Checks the configuration, chooses the device, opens the transport and plans the memory; all ranks fail together, with
    /// one message. Writes nothing.
    pub(super) fn new(loaded: &Loaded, begin: Begin, world: &mut World) -> Result<Prepared, Failure> {
        agree_on_config(loaded, world)?;
        let mut loaded = loaded.clone();
        let config = &loaded.run;
        let device = devices::choose(world, config.run.device, loaded.rank.share_device, config.run.deterministic)?;
        let spec = world.agree(read_spec(config))?;
        let earlier = splits::earlier(&loaded, begin, world)?;
        let shared = splits::share_out(&loaded, earlier, world, &spec, device)?;
        let split_note = shared.map(|(config, note)| {
            loaded.run = config;
            note
        });
        let config = &loaded.run;
        world.cut(as_index(config.cp_size(from_index(world.all.size()))), as_index(config.parallel.ep_size))?;
        let direct = open_transport(config, world, device)?;
        link_experts(config, world, &spec, device)?;
        let shape = world.agree(adapter_shape(config, &spec))?;
        world.tracker().set_layers(spec.layers);
        let (rows, rows_note) = splits::choose_rows(&loaded, earlier, world, &spec, device)?;
        loaded.run.memory.micro_block = rows;
        world.agree(reuse::check(&loaded.run, &spec, spreads(&shape, world)).map_err(Failure::from))?;
        let mut plan = agree_on_plan(&loaded.run, direct, world, &spec, device)?;
        plan.rows_note = rows_note;
        plan.split_note = split_note;
        Ok(Prepared { loaded, device, spec, shape, plan })
    }
}

impl Session {
    /// Opens the log and the watchdog in the run directory, which this run has locked, then data, model and policy; all ranks
    /// fail together, with one message.
    pub(super) fn load(prepared: Prepared, world: &mut World, work: Work) -> Result<Session, Failure> {
        let Prepared { loaded, device, spec, shape, plan } = prepared;
        let config = &loaded.run;
        let RankConfig { dir, log, stall_sec, .. } = &loaded.rank;
        world.agree(open_log(dir, world.all.rank(), world.all.size(), log).map_err(Failure::from))?;
        world.watch(dir, *stall_sec)?;
        // What is quick to check comes first: weights may take minutes.
        let inputs = inputs::read(&loaded, world, &spec, work)?;
        let model = open_model(&loaded, world, spec, device)?;
        let policy = open_policy(config, world, &model.spec, shape, device)?;
        let mut resolved = loaded.clone();
        resolved.run.grpo.reward_fn = Some(inputs.reward_fn.clone());
        Ok(Session {
            input_digests: input_digests(&model, &inputs, &policy, world),
            data: start_of_data(config, inputs),
            loaded: resolved,
            model,
            policy,
            plan,
        })
    }
}

/// Compares the configuration over ranks, and checks it for this many of them.
fn agree_on_config(loaded: &Loaded, world: &World) -> Result<(), Failure> {
    let config = &loaded.run;
    let ranks = from_index(world.all.size());
    world.require_equal("the configuration (digest)", &config.digest())?;
    let problems = config.check(Some(ranks));
    let checked = if problems.is_empty() { Ok(()) } else { Err(config::Error::Refused { problems }.into()) };
    world.agree(checked)?;
    world.agree(loaded.check_laptop_model().map_err(Failure::from))
}

/// Opens the transport from GPU to GPU among the ranks of a prompt, where it is wanted and there; returns whether it is open.
fn open_transport(config: &RunConfig, world: &World, device: Device) -> Result<bool, Failure> {
    let wanted = config.run.direct;
    let open = wanted != When::Never && exchange::connect(&world.cp, device)?;
    let missed = wanted == When::Always && !open && device != Device::Cpu && world.cp.size() > 1;
    world.agree(if missed { Err(devices::Error::NoTransport.into()) } else { Ok(open) })
}

/// Refuses experts that cannot be spread, and opens the transport from GPU to GPU among the ranks that hold them together.
fn link_experts(config: &RunConfig, world: &World, spec: &Spec, device: Device) -> Result<(), Failure> {
    let Some(experts) = &spec.experts else { return Ok(()) };
    let spread = experts::check_spread(experts, spec.model_type, config.parallel.ep_size);
    world.agree(spread.map_err(Failure::from))?;
    if config.run.direct != When::Never {
        exchange::connect(&world.ep, device)?;
    }
    Ok(())
}

pub(super) fn read_spec(config: &RunConfig) -> Result<Spec, Failure> {
    Ok(Spec::read(config.model_path()?, rope_scaling(config).as_ref())?)
}

/// The table of `model.rope_scaling`.
fn rope_scaling(config: &RunConfig) -> Option<Value> {
    config.model.rope_scaling.as_ref().map(|table| serde_json::json!(table))
}

fn adapter_shape(config: &RunConfig, spec: &Spec) -> Result<AdapterShape, Failure> {
    let mut targets: Vec<String> = Vec::new();
    for linear in spec.adapted(config.lora.targets.as_deref())? {
        if !targets.iter().any(|known| known == linear.projection) {
            targets.push(linear.projection.to_owned());
        }
    }
    let base_model = base_model(config.model_path()?);
    let (rank, alpha) = (config.lora.rank, config.lora.alpha);
    Ok(AdapterShape { rank, alpha, targets, base_model, rope_scaling: rope_scaling(config) })
}

/// The name of a base model in a downloaded snapshot of the hub, whose folders are `models--OWNER--NAME/snapshots/COMMIT`; of
/// any other the absolute path, so that adapters are opened from anywhere on this machine.
fn base_model(folder: &Path) -> String {
    let parts: Vec<&str> = folder.iter().filter_map(|part| part.to_str()).collect();
    let snapshot = parts.windows(2).find(|pair| pair[0].starts_with("models--") && pair[1] == "snapshots");
    if let Some(pair) = snapshot {
        return pair[0].trim_start_matches("models--").replacen("--", "/", 1);
    }
    std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned()).display().to_string()
}

/// Plans this rank's memory, with the transport actually used, and agrees over ranks on what is kept where; refuses what does
/// not fit. Without a GPU the model computes in the machine's own memory, so everything counts there.
fn agree_on_plan(
    config: &RunConfig,
    direct: bool,
    world: &World,
    spec: &Spec,
    device: Device,
) -> Result<RunPlan, Failure> {
    let mut config = config.clone();
    config.run.direct = if direct { When::Always } else { When::Never };
    let ranks = from_index(world.all.size());
    let room = Room {
        ranks_here: from_index(world.machine().size()),
        device: splits::device_room(world, device)?,
        host_only: device == Device::Cpu,
        host: plan::available_memory(),
    };
    let mut plan = plan::of(&config, ranks, Some(spec), &room);
    // Pages of as many layers stay on every rank's device, so that no rank waits for the others at each token.
    let resident = plan.rollout.map_or(usize::MAX, |rollout| rollout.resident_layers);
    let fewest = world.all.gather_numbers(from_index(resident)).into_iter().min().map_or(resident, as_index);
    if fewest < resident {
        plan = plan::of_at_most(&config, ranks, Some(spec), &room, fewest);
    }
    world.agree(plan.refuse(&room).map_err(Failure::from))?;
    let keeping = agree_on_keeping(&plan, world);
    Ok(RunPlan { plan, keeping, direct, rows_note: None, split_note: None })
}

/// Machines may have different room. Every rank takes part in what is recomputed, so the tightest rank decides.
fn agree_on_keeping(plan: &Plan, world: &World) -> Keeping {
    let every = world.all.gather_numbers(from_index(plan.keeping.every)).into_iter().max().unwrap_or(1);
    let attention = !world.any(!plan.keeping.attention);
    let answer_attention = !world.any(!plan.keeping.answer_attention);
    let index_sets = !world.any(!plan.keeping.index_sets);
    Keeping { every: as_index(every), attention, answer_attention, index_sets, ..plan.keeping }
}

fn open_model(loaded: &Loaded, world: &World, spec: Spec, device: Device) -> Result<Model, Failure> {
    let kind = kind_of(loaded.run.model.dtype);
    let weights = Rc::new(weights::open(loaded, world, &spec, kind, device)?);
    let held = world.ledger().hold(Purpose::Weights, MemorySpace::Device, weights.bytes());
    let digest = weights.digest().to_owned();
    world.require_equal("the checkpoint (digest)", &digest)?;
    // Each rank forms them with its own machine's power function.
    world.require_equal("the rotary frequencies (digest)", &spec.rotary_digest(accumulation(kind)))?;
    let decoder = spec.decoder(weights.clone(), kind);
    devices::agree_on_kernels(world, kind);
    let kernel = decoder.attention_name();
    world.require_equal("the attention kernel", kernel)?;
    tracing::info!("attention kernel: {kernel}");
    if let Some(scores) = decoder.index_scores_name() {
        world.require_equal("what computes index scores", scores)?;
        tracing::info!("index scores: {scores}");
    }
    if let Some(rule) = decoder.delta_rule_name() {
        world.require_equal("what computes delta rules", rule)?;
        tracing::info!("delta rules: {rule}");
    }
    Ok(Model { spec, weights, decoder, digest, _held: held })
}

fn open_policy(
    config: &RunConfig,
    world: &World,
    spec: &Spec,
    shape: AdapterShape,
    device: Device,
) -> Result<Policy, Failure> {
    let adapters = world.agree(start_adapters(config, world, spec, &shape, device))?;
    world.require_equal("the adapters (digest)", &experts::adapters::digest(&adapters, &world.ep))?;
    let reference = (config.grpo.kl_coef > 0.0).then(|| adapters.frozen("reference"));
    let optimizer = &config.optimizer;
    let settings = Settings { betas: optimizer.betas, eps: optimizer.eps, weight_decay: optimizer.weight_decay };
    let optimizer = AdamW::new(&adapters, settings);
    let masters = adapters.tensors().chain(reference.iter().flat_map(Adapters::tensors));
    let adapter_bytes = masters.map(storage_bytes).sum();
    let hold = |purpose, bytes| world.ledger().hold(purpose, MemorySpace::Device, bytes);
    let held = [hold(Purpose::Adapters, adapter_bytes), hold(Purpose::Optimizer, optimizer.bytes())];
    Ok(Policy { adapters, shape, reference, optimizer, _held: held, gradients: OnceCell::new() })
}

fn start_adapters(
    config: &RunConfig,
    world: &World,
    spec: &Spec,
    shape: &AdapterShape,
    device: Device,
) -> Result<Adapters, Failure> {
    let acc = accumulation(kind_of(config.model.dtype));
    let holds = |linear: &Linear| experts::adapters::is_held(spec, linear, &world.ep);
    let adapters = if let Some(folder) = &config.lora.init_from {
        checkpoint::load(&checkpoint::folder_of(folder)?, spec, shape, holds, acc, device)?
    } else {
        let linears = spec.adapted(config.lora.targets.as_deref())?;
        let seed = i64::try_from(config.run.seed).unwrap_or(i64::MAX);
        Adapters::starting_where(holds, &linears, config.lora.rank, config.lora.alpha, seed, acc, device)
    };
    Ok(if spreads(shape, world) { adapters.spread() } else { adapters })
}

/// Whether ranks hold adapters of other experts each.
fn spreads(shape: &AdapterShape, world: &World) -> bool {
    let of_experts = shape.targets.iter().any(|target| EXPERT_PROJECTIONS.contains(&target.as_str()));
    of_experts && world.ep.size() > 1
}

fn start_of_data(config: &RunConfig, inputs: Inputs) -> TrainingData {
    let Inputs { train, sources, held_out, tokenizer, end_ids, tools, scorer, .. } = inputs;
    let cursor = sources::start_of_order(config, &train, &sources);
    let reward_is_named = config.grpo.reward_fn.is_some();
    TrainingData { train, sources, held_out, tokenizer, end_ids, tools, reward_is_named, scorer, cursor, round: None }
}

/// Digests of what the run reads, under the names that checkpoints and messages use.
fn input_digests(model: &Model, inputs: &Inputs, policy: &Policy, world: &World) -> BTreeMap<String, String> {
    let digests = [
        ("the model", model.digest.clone()),
        ("the data", inputs.train_digest.clone()),
        ("the starting adapters", experts::adapters::digest(&policy.adapters, &world.ep)),
    ];
    let mut digests: BTreeMap<String, String> =
        digests.into_iter().map(|(name, digest)| (name.to_owned(), digest)).collect();
    digests.extend(inputs.rubric_digests.clone());
    if inputs.held_out.is_empty() {
        digests.insert("the held-out data".to_owned(), String::new());
    }
    for set in &inputs.held_out {
        // One without a name of its own is called as the key is, and has always been written without it.
        let name = set.key.strip_prefix("data.held_out.").map(|name| format!(" {name}")).unwrap_or_default();
        digests.insert(format!("the held-out data{name}"), set.data.digest().to_owned());
    }
    digests
}

/// The libtorch name of a configured dtype.
fn kind_of(dtype: Dtype) -> Kind {
    match dtype {
        Dtype::Bfloat16 => Kind::BFloat16,
        Dtype::Float32 => Kind::Float,
        Dtype::Float64 => Kind::Double,
    }
}
