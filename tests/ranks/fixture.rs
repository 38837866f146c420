//! Small models, prompts and answers, and one whole step over them.

use std::path::Path;
use std::rc::Rc;
use std::sync::OnceLock;

use longstraw::config::DeviceChoice;
use longstraw::model::decoder::Decoder;
use longstraw::model::head::Head;
use longstraw::model::lora::{Adapter, Adapters};
use longstraw::model::mixer::CpGroup;
use longstraw::model::pass::Pass;
use longstraw::model::spec::Spec;
use longstraw::model::weights::Weights;
use longstraw::prompt::handoff::{Captured, Keeping, PlacedGroup, ReducedGrads, Scores};
use longstraw::prompt::layout::PromptLayout;
use longstraw::runtime::memory::Ledger;
use longstraw::runtime::units::{Tokens, from_index};
use longstraw::step::conventional;
use longstraw::step::objective::{Aggregation, Batch, Counted, Objective};
use longstraw::step::replay::{self, ReplayTargets, Replayed};
use longstraw::step::{capture, finalize, score};
use longstraw::tensor::accumulation;
use longstraw::world::World;
use longstraw::world::devices;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

pub(crate) const TERMS: Objective =
    Objective { clip_low: 0.2, clip_high: 0.2, kl_coef: 0.04, aggregation: Aggregation::SequenceMean };

/// Where claims compute: the CPU, or with `CLAIMS_DEVICE=cuda` a GPU, which ranks share.
static DEVICE: OnceLock<Device> = OnceLock::new();

pub(crate) fn choose_device(world: &World) {
    let wanted = std::env::var("CLAIMS_DEVICE").is_ok_and(|wanted| wanted == "cuda");
    let wanted = if wanted { DeviceChoice::Cuda } else { DeviceChoice::Cpu };
    let device = run(devices::choose(world, wanted, true, false));
    longstraw::world::exchange::connect(&world.cp, device).expect("ranks are connected");
    DEVICE.set(device).expect("chosen once");
}

pub(crate) fn device() -> Device {
    *DEVICE.get().expect("chosen at the start")
}

/// A random model of a family, with adapters whose B is not zero.
pub(crate) struct Model {
    pub(crate) decoder: Box<dyn Decoder>,
    pub(crate) adapters: Adapters,
}

/// A small config of `family`; `extra` keys replace its own.
pub(crate) fn config(family: &str, extra: &Value) -> Value {
    let mut config = json!({
        "model_type": family, "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 40, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": true, "hidden_act": "silu"
    });
    if let (Some(config), Some(extra)) = (config.as_object_mut(), extra.as_object()) {
        config.extend(extra.iter().map(|(key, value)| (key.clone(), value.clone())));
    }
    config
}

impl Model {
    pub(crate) fn random(config: &Value, kind: Kind) -> Model {
        let table = config.as_object().expect("a config is an object");
        let spec = Spec::from_config(table, None, Path::new("config.json")).unwrap_or_else(|error| panic!("{error}"));
        let weights = Weights::random(&spec, 7, kind, device()).unwrap_or_else(|error| panic!("{error}"));
        tch::manual_seed(11);
        let acc = accumulation(kind);
        let drawn = |rows, columns| {
            Tensor::randn([rows, columns], (Kind::Double, Device::Cpu)).to_kind(acc).to_device(device()) * 0.2
        };
        let pairs = spec.linear_layers().into_iter().map(|linear| Adapter {
            module: linear.module,
            a_ri: drawn(3, longstraw::runtime::units::as_dim(linear.inputs)),
            b_or: drawn(longstraw::runtime::units::as_dim(linear.outputs), 3),
        });
        let adapters = Adapters::new(pairs.collect(), 2.0, "policy");
        Model { decoder: spec.decoder(Rc::new(weights), kind), adapters }
    }
}

/// A prompt and its answers, the same on every rank.
pub(crate) struct Group {
    pub(crate) prompt_ids: Vec<i64>,
    pub(crate) answers: Vec<Vec<i64>>,
    pub(crate) advantages: Vec<Option<f64>>,
    /// Which tokens of each answer are trained.
    pub(crate) masks: Vec<Option<Vec<bool>>>,
}

impl Group {
    pub(crate) fn random(seed: i64, vocabulary: i64, prompt: usize, lengths: &[usize]) -> Group {
        tch::manual_seed(seed);
        let draw = |count: usize| -> Vec<i64> {
            let shape = [longstraw::runtime::units::as_dim(from_index(count))];
            let drawn = Tensor::randint(vocabulary, shape, (Kind::Int64, Device::Cpu));
            Vec::<i64>::try_from(drawn).expect("integers")
        };
        let advantages = (0..lengths.len()).map(|i| Some([1.0, -1.0, 0.4, -0.7, 0.2][i % 5])).collect();
        let answers = lengths.iter().map(|&length| draw(length)).collect();
        Group { prompt_ids: draw(prompt), answers, advantages, masks: vec![None; lengths.len()] }
    }

    pub(crate) fn batch(&self) -> Batch {
        Batch::of(self.answers.iter().map(|answer| Counted { tokens: from_index(answer.len()), scored: true }))
    }
}

/// How a step is run.
#[derive(Clone, Copy)]
pub(crate) struct How {
    pub(crate) page_size: u64,
    pub(crate) tail: u64,
    pub(crate) micro_block: u64,
    pub(crate) keeping: Keeping,
}

pub(crate) const PLAIN: How = How { page_size: 7, tail: 1, micro_block: 5, keeping: Keeping::HOST };
pub(crate) const HEAD: Head = Head { rows_max: 3, temperature: 0.9 };

/// What a step leaves.
pub(crate) struct Done {
    pub(crate) replayed: Replayed,
    pub(crate) ledger: Ledger,
    pub(crate) pages_have_graph: bool,
}

/// Captures, scores and replays one group over the world's prompt group; gradients stay in the adapters. Old scores are
/// the step's own, shifted a little, so that ratios lie on both sides of 1; the reference is another shift.
pub(crate) fn step(world: &World, model: &Model, group: &Group, how: How, batch: &Batch) -> Done {
    let ledger = Ledger::default();
    let work = work(world, group, how);
    let cp_group = CpGroup { axis: &world.cp, ledger: &ledger };
    let pass =
        Pass { decoder: &*model.decoder, adapters: &model.adapters, cp_group, micro_block: Tokens(how.micro_block) };
    let captured = run(capture::run(&pass, &work, how.keeping, world.tracker()));
    let pages_have_graph = captured.pages.has_graph();
    let frozen = run(score::run(&pass, &HEAD, &work, &captured, world.tracker()));
    let replayed = replay(world, &pass, group, &work, &captured, &frozen, batch);
    Done { replayed, ledger, pages_have_graph }
}

pub(crate) fn work(world: &World, group: &Group, how: How) -> PlacedGroup {
    let prompt = Tokens(from_index(group.prompt_ids.len()));
    let tail = Tokens(how.tail.min(prompt.0));
    let layout = PromptLayout::new(prompt, Tokens(how.page_size), world.cp.size(), tail);
    PlacedGroup::new(layout, group.prompt_ids.clone(), group.answers.clone()).masked(group.masks.clone())
}

fn replay(
    world: &World,
    pass: &Pass,
    group: &Group,
    work: &PlacedGroup,
    captured: &Captured,
    frozen: &Scores,
    batch: &Batch,
) -> Replayed {
    let shifted = |by: f64| {
        let logprobs = frozen.0.iter().map(|one| longstraw::prompt::handoff::Logprobs {
            rows: &one.rows + by,
            first: one.first.as_ref().map(|first| first + by),
        });
        Scores(logprobs.collect())
    };
    let (old, reference) = (shifted(OLD), shifted(REFERENCE));
    let weights: Vec<f64> =
        group.answers.iter().map(|answer| batch.weight(TERMS.aggregation, from_index(answer.len()))).collect();
    let goal = ReplayTargets {
        old: &old,
        reference: Some(&reference),
        advantages: &group.advantages,
        weights: &weights,
        terms: &TERMS,
    };
    run(replay::run(pass, &HEAD, work, captured, goal, world.tracker()))
}

const OLD: f64 = 0.05;
const REFERENCE: f64 = -0.3;

/// The same step on the conventional schedule; gradients stay in the adapters. Returns the loss.
pub(crate) fn conventional_step(model: &Model, group: &Group, tail: u64, batch: &Batch) -> f64 {
    let prompt = Tokens(from_index(group.prompt_ids.len()));
    let whole = conventional::Group {
        prompt_ids: &group.prompt_ids,
        answers: &group.answers,
        tail: Tokens(tail.min(prompt.0)),
        temperature: HEAD.temperature,
    };
    let targets: Vec<conventional::Target> = (0..group.answers.len())
        .map(|index| {
            let logprobs = tch::no_grad(|| whole.logprobs(&*model.decoder, &model.adapters, index)).detach();
            conventional::Target {
                trained: group.masks[index].as_ref().map(|mask| {
                    let numbers: Vec<f32> = mask.iter().map(|&trained| f32::from(u8::from(trained))).collect();
                    Tensor::from_slice(&numbers).to_device(device())
                }),
                old: &logprobs + OLD,
                reference: logprobs + REFERENCE,
                advantage: group.advantages[index].expect("every answer has an advantage"),
                weight: batch.weight(TERMS.aggregation, from_index(group.answers[index].len())),
            }
        })
        .collect();
    whole.backward(&*model.decoder, &model.adapters, &targets, &TERMS)
}

/// Sums what all ranks of the world have left in the adapters.
pub(crate) fn reduced(world: &World, adapters: &Adapters) -> ReducedGrads {
    run(finalize::run(&world.all, finalize::take(adapters), adapters, 0.0))
}

/// Takes this rank's own gradients, without a sum.
pub(crate) fn own(adapters: &Adapters) -> Vec<Tensor> {
    finalize::take(adapters).0
}

/// Largest relative L2 distance of two sets of gradients, and the tensor it belongs to.
pub(crate) fn apart(adapters: &Adapters, one: &[Tensor], two: &[Tensor]) -> (f64, String) {
    let norm = |x: &Tensor| x.to_kind(Kind::Double).square().sum(Kind::Double).sqrt().double_value(&[]);
    adapters
        .names()
        .zip(one.iter().zip(two))
        .map(|(name, (one, two))| {
            let (distance, size) = (norm(&(one - two)), norm(two));
            let error = if size < 1e-12 { distance } else { distance / size };
            (if error.is_nan() { f64::INFINITY } else { error }, name)
        })
        .fold((0.0, String::new()), |worst, next| if next.0 > worst.0 { next } else { worst })
}

/// The value, or a panic with the failure's own words.
pub(crate) fn run<T>(outcome: Result<T, longstraw::runtime::failure::Failure>) -> T {
    outcome.unwrap_or_else(|failure| panic!("{failure}"))
}
