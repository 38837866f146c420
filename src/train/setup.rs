//! Everything a run opens before its first step: checks, weights, adapters, data.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use tch::{Device, Kind, Tensor};

use super::inputs::{self, Inputs};
use super::rate::LearningRate;
use super::rewards;
use super::round::Round;
use super::step::Sampler;
use crate::checkpoint;
use crate::config::{
    self, Aggregation as Rule, Dtype, Gradient, Loaded, RankConfig, RewardFn, RewardName, RunConfig, When,
};
use crate::data::{Cursor, Dataset, Group, Tokenizer};
use crate::model::adapter_file::AdapterShape;
use crate::model::decoder::Decoder;
use crate::model::head::Head;
use crate::model::lora::Adapters;
use crate::model::mixer::CpGroup;
use crate::model::pass::Pass;
use crate::model::spec::Spec;
use crate::model::weights::Weights;
use crate::plan::{self, Plan, Room};
use crate::prompt::handoff::Keeping;
use crate::report::{AdapterForm, open_log};
use crate::reward::Scorer;
use crate::runtime::failure::Failure;
use crate::runtime::memory::{Held, MemorySpace, Purpose};
use crate::runtime::units::{Bytes, Rank, Tokens, as_index, from_index};
use crate::step::objective::{Aggregation, Objective};
use crate::step::optimizer::{AdamW, Settings};
use crate::step::rollout::{Sampling, Stream};
use crate::step::transaction::Transaction;
use crate::tensor::boundary::storage_bytes;
use crate::tensor::{accumulation, gpu};
use crate::world::World;
use crate::world::devices;
use crate::world::exchange;

/// A run that is ready to step.
#[expect(clippy::struct_excessive_bools, reason = "separate facts of a run, not states")]
pub struct Session {
    pub(super) decoder: Box<dyn Decoder>,
    pub(super) adapters: Adapters,
    pub(super) reference: Option<Adapters>,
    pub(super) optimizer: AdamW,
    pub(super) data: Dataset,
    pub(super) held_out: Option<Dataset>,
    pub(super) cursor: Cursor,
    pub(super) head: Head,
    pub(super) terms: Objective,
    pub(super) gradient: Gradient,
    pub(super) keeping: Keeping,
    /// The paged schedule, or whole sequences under autograd.
    pub(super) paged: bool,
    /// What rank 0 scores answers with.
    pub(super) scorer: Option<Scorer>,
    /// What makes texts of answers, where there is one.
    pub(super) tokenizer: Option<Tokenizer>,
    /// Whether answers are written down: they are the policy's own, or somebody judges what they say.
    pub(super) tells_answers: bool,
    /// Positions of the longest answer.
    pub(super) answer_len: Tokens,
    /// The largest share of an update's answers that may lack a reward.
    pub(super) missing_share_max: f64,
    /// Beyond this distance between drawing and scoring a user is warned.
    pub(super) gap_warn: f64,
    /// Each answer's advantage is its reward, from which no mean is taken.
    pub(super) advantage_is_reward: bool,
    /// How the policy answers; `None`: answers come with the data.
    pub(super) sampler: Option<Sampler>,
    /// The groups of the current round, between two of its updates.
    pub(super) round: Option<Round>,
    /// Updates of a round.
    pub(super) updates_per_group: u64,
    pub(super) normalize: bool,
    pub(super) max_grad_norm: f64,
    pub(super) grad_accum: usize,
    pub(super) model_digest: String,
    pub(super) spec: Spec,
    /// What the decoder reads; a judge may read them too.
    weights: Rc<Weights>,
    pub(super) shape: AdapterShape,
    /// Digests of what the run reads, by name: a checkpoint is of this run where they are the same.
    pub(super) inputs: BTreeMap<String, String>,
    /// What the plan says of this rank.
    pub(super) plan: Plan,
    /// Whether tensors go from GPU to GPU.
    pub(super) direct: bool,
    /// Weights, adapters and optimizer, counted for as long as they live.
    _held: Vec<Held>,
    /// The adapters' gradients, which the first backward makes and which stay.
    gradients: OnceCell<Held>,
    page_size: Tokens,
    micro_block: Tokens,
    schedule: LearningRate,
}

/// The libtorch name of a configured dtype.
#[must_use]
fn kind_of(dtype: Dtype) -> Kind {
    match dtype {
        Dtype::Bfloat16 => Kind::BFloat16,
        Dtype::Float32 => Kind::Float,
        Dtype::Float64 => Kind::Double,
    }
}

impl Session {
    /// Opens a run; all ranks fail together, with one message.
    ///
    /// # Errors
    /// When the configuration, the checkpoint or the data is wrong, ranks differ, or memory is short.
    pub fn open(loaded: &Loaded, world: &mut World) -> Result<Session, Failure> {
        let config = &loaded.run;
        shared_out(loaded, world)?;
        let device = devices::choose(world, config.run.device, loaded.rank.share_device, config.run.deterministic)?;
        let direct = linked(config, world, device)?;
        let spec = world.agree(read_spec(config))?;
        let shape = world.agree(shape_of(config, &spec))?;
        world.tracker().set_layers(spec.layers);
        let (plan, keeping) = planned(&with_transport(config, direct), world, &spec, device)?;
        let RankConfig { dir, log, .. } = &loaded.rank;
        world.agree(open_log(dir, world.all.rank(), world.all.size(), log).map_err(Failure::from))?;
        world.watch(dir, loaded.rank.stall_sec)?;
        // What is quick to check comes first: weights may take minutes.
        let (inputs, digests, scorer) = inputs::read(config, world, &spec)?;
        let Inputs { data, held_out, tokenizer, ends } = inputs;
        let weights = world.agree(load_weights(config, &spec, device))?;
        let mut held = vec![world.ledger().hold(Purpose::Weights, MemorySpace::Device, weights.bytes())];
        let model_digest = weights.digest().to_owned();
        world.require_equal("the checkpoint (digest)", &model_digest)?;
        let kind = kind_of(config.model.dtype);
        let weights = Rc::new(weights);
        let decoder = spec.family.decoder(&spec, weights.clone(), kind);
        world.require_equal("the attention kernel", decoder.kernel().name())?;
        tracing::info!("attention kernel: {}", decoder.kernel().name());
        let adapters = world.agree(start_adapters(config, &spec, &shape, kind, device))?;
        let start = same_start(world, &adapters)?;
        let optimizer = adam_w(config, &adapters);
        let reference = (config.grpo.kl_coef > 0.0).then(|| adapters.frozen("reference"));
        held.extend(trained(world, &adapters, reference.as_ref(), &optimizer));
        Ok(Session {
            optimizer,
            reference,
            cursor: cursor(config, data.len()),
            head: Head { rows_max: config.memory.head_block.dim(), temperature: config.grpo.temperature },
            terms: terms(config),
            gradient: config.grpo.gradient,
            keeping,
            paged: config.memory.prompt_no_grad,
            scorer,
            tells_answers: config.rollout.sample || rewards::judges(config).is_some(),
            answer_len: if plan.rollout.is_some() { config.sampled_len() } else { config.context.answer_len },
            missing_share_max: config.reward.missing_share_max,
            gap_warn: gap_warn(config),
            advantage_is_reward: config.grpo.reward_fn == RewardFn::only(RewardName::One),
            sampler: plan.rollout.map(|rollout| sampler(config, ends, rollout.pages_on_device)),
            round: None,
            updates_per_group: config.grpo.updates_per_group,
            normalize: config.grpo.normalize_adv,
            max_grad_norm: config.optimizer.max_grad_norm,
            grad_accum: as_index(config.optimizer.grad_accum),
            page_size: config.context.page_size,
            micro_block: config.memory.micro_block,
            schedule: LearningRate::of(config),
            plan,
            direct,
            _held: held,
            gradients: OnceCell::new(),
            decoder,
            adapters,
            data,
            held_out,
            tokenizer,
            inputs: names([&model_digest, &digests[0], &digests[1], &start]),
            model_digest,
            spec,
            weights,
            shape,
        })
    }

    /// What the model is.
    #[must_use]
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// The model's frozen weights.
    #[must_use]
    pub fn weights(&self) -> &Rc<Weights> {
        &self.weights
    }

    /// What computes attention.
    #[must_use]
    pub fn attention_kernel(&self) -> &'static str {
        self.decoder.kernel().name()
    }

    /// Digest of the checkpoint.
    #[must_use]
    pub fn model_digest(&self) -> &str {
        &self.model_digest
    }

    /// What is trained.
    #[must_use]
    pub fn adapter_form(&self) -> AdapterForm {
        let AdapterShape { rank, alpha, targets, .. } = &self.shape;
        AdapterForm { rank: *rank, alpha: *alpha, targets: targets.clone() }
    }

    /// The first group of the data.
    #[must_use]
    pub fn first_group(&self) -> &Group {
        self.data.group(0)
    }

    /// What a user should know before the first step.
    pub(super) fn notes(&self, loaded: &Loaded) -> Vec<String> {
        let endless = self.sampler.as_ref().is_some_and(|sampler| sampler.ends.is_empty());
        let endless = endless.then(|| {
            "the model's folder names no token that ends an answer (eos_token_id of generation_config.json or config.json, \
             eos_token of tokenizer_config.json): every answer runs to its longest length"
                .to_owned()
        });
        let cut = |key: &str, data: &Dataset| data.cuts().map(|cuts| format!("{key}: {cuts}"));
        let held_out = self.held_out.as_ref().and_then(|data| cut("data.held_out", data));
        let cuts = cut("data.path", &self.data).into_iter().chain(held_out);
        loaded
            .notes()
            .into_iter()
            .chain(plan::context_note(&loaded.run, &self.spec))
            .chain(cuts)
            .chain(endless)
            .collect()
    }

    /// What every group of an update goes through, under the run's settings.
    pub(super) fn transaction<'a>(&'a self, world: &'a World) -> Transaction<'a> {
        let cp_group = CpGroup { axis: &world.cp, ledger: world.ledger() };
        Transaction {
            policy: Pass { decoder: &*self.decoder, adapters: &self.adapters, cp_group, micro_block: self.micro_block },
            reference: self.reference.as_ref(),
            head: self.head,
            objective: self.terms,
            gradient: self.gradient,
            page_size: self.page_size,
            keeping: self.keeping,
            pins_memory: true,
        }
    }

    /// Counts the adapters' gradients, which are there after the first backward.
    pub(super) fn count_gradients(&self, world: &World) {
        let gradients = self.adapters.tensors().map(Tensor::grad).filter(Tensor::defined);
        let _ = self.gradients.get_or_init(|| {
            let bytes = gradients.map(|gradient| storage_bytes(&gradient)).sum();
            world.ledger().hold(Purpose::Adapters, MemorySpace::Device, bytes)
        });
    }

    /// Learning rate of step 1, 2, ….
    pub(super) fn learning_rate(&self, step: u64) -> f64 {
        self.schedule.at(step)
    }

    /// Writes the adapters into the run directory; rank 0 writes, all ranks agree that it is done.
    pub(super) fn save(&self, loaded: &Loaded, world: &World) -> Result<(), Failure> {
        let written = match world.all.rank() {
            Rank(0) => checkpoint::save(&loaded.rank.dir.join("adapter"), &self.adapters, &self.shape).map(|_| ()),
            _ => Ok(()),
        };
        world.agree(written)
    }
}

/// The configuration is the same on all ranks and passes for them, which are cut into prompt groups.
fn shared_out(loaded: &Loaded, world: &mut World) -> Result<(), Failure> {
    let (config, ranks) = (&loaded.run, from_index(world.all.size()));
    world.require_equal("the configuration (digest)", &config.digest())?;
    world.agree(checked(config, ranks))?;
    world.cut(as_index(config.cp_size(ranks)))?;
    world.agree(loaded.check_laptop_model().map_err(Failure::from))
}

/// Names of what a run reads, in the order of `digests`.
fn names(digests: [&str; 4]) -> BTreeMap<String, String> {
    let names = ["the model", "the data", "the held-out data", "the starting adapters"];
    names.into_iter().zip(digests).map(|(name, digest)| (name.to_owned(), digest.to_owned())).collect()
}

fn checked(config: &RunConfig, ranks: u64) -> Result<(), Failure> {
    let problems = config.check(Some(ranks));
    if problems.is_empty() { Ok(()) } else { Err(config::Error::Refused { problems }.into()) }
}

fn read_spec(config: &RunConfig) -> Result<Spec, Failure> {
    let scaling = config.model.rope_scaling.as_ref().map(|table| serde_json::json!(table));
    Ok(Spec::read(config.model_path()?, scaling.as_ref())?)
}

/// The configuration with the transport between ranks that there is in the place of the one that was wished for.
fn with_transport(config: &RunConfig, direct: bool) -> RunConfig {
    let mut config = config.clone();
    config.run.direct = if direct { When::Always } else { When::Never };
    config
}

/// This rank's plan, and what is kept where, agreed over all ranks; refuses what does not fit. Without a GPU the model computes in the
/// machine's own memory, so everything counts there.
fn planned(config: &RunConfig, world: &World, spec: &Spec, device: Device) -> Result<(Plan, Keeping), Failure> {
    let here = world.machine().size();
    let (ranks, here) = (from_index(world.all.size()), from_index(here));
    let room = Room {
        ranks_here: here,
        device: device_room(world, device)?,
        host_only: device == Device::Cpu,
        host: plan::available_memory(),
    };
    let mut plan = plan::of(config, ranks, Some(spec), &room);
    // Pages of all layers come to every rank's device or to none, so that no rank waits for the others at each token.
    let staged = plan.rollout.is_some_and(|rollout| !rollout.pages_on_device);
    let any_staged = world.all.gather_numbers(u64::from(staged)).contains(&1);
    if any_staged && !staged {
        let mut by_layer = config.clone();
        by_layer.rollout.pages_on_device = When::Never;
        plan = plan::of(&by_layer, ranks, Some(spec), &room);
    }
    world.agree(plan.refuse(&room).map_err(Failure::from))?;
    // Machines may have different room; what is computed again takes every rank's part, so the tightest one decides.
    let every = world.all.gather_numbers(from_index(plan.keeping.every)).into_iter().max().unwrap_or(1);
    let kept = world.all.gather_numbers(u64::from(plan.keeping.attention));
    let keeping = Keeping { every: as_index(every), attention: kept.iter().all(|&kept| kept == 1), ..plan.keeping };
    Ok((plan, keeping))
}

/// Opens the transport from GPU to GPU among the ranks that share a prompt, as far as it is wanted and there.
fn linked(config: &RunConfig, world: &World, device: Device) -> Result<bool, Failure> {
    let wanted = config.run.direct;
    let open = wanted != When::Never && exchange::connect(&world.cp, device)?;
    let missed = wanted == When::Always && !open && device != Device::Cpu && world.cp.size() > 1;
    world.agree(if missed { Err(devices::Error::NoTransport.into()) } else { Ok(open) })
}

fn adam_w(config: &RunConfig, adapters: &Adapters) -> AdamW {
    let optimizer = &config.optimizer;
    let settings = Settings { betas: optimizer.betas, eps: optimizer.eps, weight_decay: optimizer.weight_decay };
    AdamW::new(adapters, settings)
}

/// This rank's share of what its GPU can still give to tensors.
fn device_room(world: &World, device: Device) -> Result<Option<Bytes>, Failure> {
    let sharers = devices::sharers(world, device);
    if device == Device::Cpu {
        return Ok(None);
    }
    let (free, _) = world.agree(gpu::memory().map_err(Failure::from))?;
    // Some goes to what libraries load later, and to the gaps between tensors.
    Ok(Some(Bytes((free.0 - free.0 / 32) / sharers)))
}

fn load_weights(config: &RunConfig, spec: &Spec, device: Device) -> Result<Weights, Failure> {
    let kind = kind_of(config.model.dtype);
    if config.model.random_init {
        return Ok(Weights::random(spec, config.run.seed, kind, device)?);
    }
    Ok(Weights::load(config.model_path()?, spec, kind, device)?)
}

fn shape_of(config: &RunConfig, spec: &Spec) -> Result<AdapterShape, Failure> {
    let linears = spec.adapted(config.lora.targets.as_deref())?;
    let mut targets: Vec<String> = Vec::new();
    for linear in linears {
        if !targets.iter().any(|known| known == linear.projection) {
            targets.push(linear.projection.to_owned());
        }
    }
    let base_model = config.model_path()?.display().to_string();
    Ok(AdapterShape { rank: config.lora.rank, alpha: config.lora.alpha, targets, base_model })
}

fn start_adapters(
    config: &RunConfig,
    spec: &Spec,
    shape: &AdapterShape,
    kind: Kind,
    device: Device,
) -> Result<Adapters, Failure> {
    let acc = accumulation(kind);
    if let Some(folder) = &config.lora.init_from {
        return checkpoint::load(folder, spec, shape, acc, device);
    }
    let linears = spec.adapted(config.lora.targets.as_deref())?;
    let seed = i64::try_from(config.run.seed).unwrap_or(i64::MAX);
    Ok(Adapters::starting(&linears, config.lora.rank, config.lora.alpha, seed, acc, device))
}

/// The digest of the adapters that a run starts from, the same on all ranks.
fn same_start(world: &World, adapters: &Adapters) -> Result<String, Failure> {
    let digest = adapters.digest();
    world.require_equal("the adapters (digest)", &digest)?;
    Ok(digest)
}

/// Counts what is trained, and what it is compared with.
fn trained(world: &World, adapters: &Adapters, reference: Option<&Adapters>, optimizer: &AdamW) -> [Held; 2] {
    let masters = adapters.tensors().chain(reference.into_iter().flat_map(Adapters::tensors));
    let masters = masters.map(storage_bytes).sum();
    let hold = |purpose, bytes| world.ledger().hold(purpose, MemorySpace::Device, bytes);
    [hold(Purpose::Adapters, masters), hold(Purpose::Optimizer, optimizer.bytes())]
}

/// The distance between drawing and scoring beyond which a user is warned.
fn gap_warn(config: &RunConfig) -> f64 {
    config.rollout.gap_warn.unwrap_or(match config.model.dtype {
        Dtype::Float64 => 1e-8,
        Dtype::Float32 => 1e-4,
        Dtype::Bfloat16 => 0.5,
    })
}

fn sampler(config: &RunConfig, ends: Vec<i64>, pages_on_device: bool) -> Sampler {
    Sampler {
        answers: as_index(config.grpo.group_size),
        longest: config.sampled_len(),
        ends,
        sampling: Sampling { top_p: config.rollout.top_p, top_k: config.rollout.top_k },
        stream: Stream::of_seed(config.run.seed),
        pages_on_device,
    }
}

fn terms(config: &RunConfig) -> Objective {
    let aggregation = match config.grpo.aggregation {
        Rule::SequenceMean => Aggregation::SequenceMean,
        Rule::TokenMean => Aggregation::TokenMean,
        Rule::Constant => Aggregation::Constant(config.grpo.constant_divisor.unwrap_or(1.0)),
    };
    Objective {
        clip_low: config.grpo.clip_low,
        clip_high: config.grpo.clip_high,
        kl_coef: config.grpo.kl_coef,
        aggregation,
    }
}

fn cursor(config: &RunConfig, groups: usize) -> Cursor {
    Cursor::new(config.data.shuffle.then_some(config.run.seed), groups)
}
