//! Small models, prompts and answers, and one whole step over them.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::sync::OnceLock;

use longstraw::config::{DeviceChoice, Gradient};
use longstraw::model::decoder::Decoder;
use longstraw::model::head::Head;
use longstraw::model::lora::Adapters;
use longstraw::model::mixer::CpGroup;
use longstraw::model::pass::Pass;
use longstraw::model::spec::Spec;
use longstraw::model::weights::{ExpertShare, Weights};
use longstraw::prompt::handoff::{Keeping, Logprobs, PlacedGroup, ReducedGrads, Scores};
use longstraw::runtime::memory::Ledger;
use longstraw::runtime::units::{Tokens, as_dim, from_dim, from_index};
use longstraw::step::conventional::{self, Target};
use longstraw::step::finalize;
use longstraw::step::objective::{Batch, Counted, Objective};
use longstraw::step::observer::Observer;
use longstraw::step::replay::{FrozenScores, Replayed, TrainedAnswer};
use longstraw::step::transaction::Transaction;
use longstraw::tensor::accumulation;
use longstraw::tools::parity::distance::Distance;
use longstraw::tools::parity::random::RandomAdapters;
use longstraw::world::World;
use longstraw::world::devices;
use longstraw::world::exchange::{gather_rows, sum_number};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

pub(crate) const OBJECTIVE: Objective = Objective { kl_coef: 0.04, ..Objective::DEFAULT };

/// Where claims compute: the CPU, or with `CLAIMS_DEVICE=cuda` a GPU, which ranks share.
static DEVICE: OnceLock<Device> = OnceLock::new();

pub(crate) fn choose_device(world: &World) {
    #[expect(clippy::disallowed_methods, reason = "a test program chooses its device by a variable")]
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
    let own = json!({
        "model_type": family, "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 40, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": true, "hidden_act": "silu"
    });
    with(own, extra)
}

fn with(mut config: Value, extra: &Value) -> Value {
    if let (Some(config), Some(extra)) = (config.as_object_mut(), extra.as_object()) {
        config.extend(extra.iter().map(|(key, value)| (key.clone(), value.clone())));
    }
    config
}

impl Model {
    pub(crate) fn random(config: &Value, kind: Kind) -> Model {
        Self::of(config, kind, ExpertShare::ALL, &|_| {})
    }

    /// The same model with this rank's share of the experts; `change` may write other numbers into the weights.
    pub(crate) fn of(config: &Value, kind: Kind, share: ExpertShare, change: &dyn Fn(&Weights)) -> Model {
        let table = config.as_object().expect("a config is an object");
        let spec = Spec::from_config(table, None, Path::new("config.json")).unwrap_or_else(|error| panic!("{error}"));
        let weights = Weights::random(&spec, 7, kind, device(), share).unwrap_or_else(|error| panic!("{error}"));
        change(&weights);
        let random = RandomAdapters {
            rank: 3,
            alpha: 6.0,
            a_deviation: 0.2,
            b_deviation: 0.2,
            seed: 11,
            sampled_in: Kind::Double,
            kind: accumulation(kind),
            device: device(),
        };
        let adapters = random.sample(spec.adapted(None).expect("the default targets"));
        Model { decoder: spec.decoder(Rc::new(weights), kind), adapters }
    }
}

/// A small `glm_moe_dsa`: three of five layers choose their keys, four have experts; `extra` keys replace its own.
pub(crate) fn glm(extra: &Value) -> Value {
    let own = json!({
        "num_hidden_layers": 5, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4, "v_head_dim": 7, "index_head_dim": 8, "index_n_heads": 3, "index_topk": 6,
        "indexer_types": ["full", "full", "shared", "full", "shared"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse"], "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 9, "tie_word_embeddings": false
    });
    with(config("glm_moe_dsa", &own), extra)
}

/// A small `qwen3_moe` with experts in every layer; `extra` keys replace its own.
pub(crate) fn mixture(extra: &Value) -> Value {
    let own = json!({
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 9, "mlp_only_layers": [],
        "decoder_sparse_step": 1, "norm_topk_prob": true
    });
    with(config("qwen3_moe", &own), extra)
}

/// A small `qwen3_5_text`: gated delta rules in layers 0 and 2 with three value heads a key head, gated attention with partial
/// rotation in layer 1; `extra` keys replace its own.
pub(crate) fn hybrid(extra: &Value) -> Value {
    with(config("qwen3_5_text", &delta_keys()), extra)
}

/// A small `qwen3_next`: as [`hybrid`], with experts and a gated shared one in every layer; `extra` keys replace its own.
pub(crate) fn hybrid_mixture(extra: &Value) -> Value {
    let own = json!({
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 9, "shared_expert_intermediate_size": 7,
        "mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": true
    });
    with(with(config("qwen3_next", &delta_keys()), &own), extra)
}

fn delta_keys() -> Value {
    json!({
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 5, "linear_value_head_dim": 3,
        "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "rope_parameters": { "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5 },
        "attention_bias": false
    })
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
            let shape = [as_dim(from_index(count))];
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

    /// The answers as a part of `batch`.
    pub(crate) fn trained(&self, batch: &Batch) -> Vec<TrainedAnswer> {
        let trained = |index: usize| TrainedAnswer {
            ids: self.answers[index].clone(),
            mask: self.masks[index].clone(),
            given: None,
            advantage: self.advantages[index],
            weight: batch.weight(OBJECTIVE.aggregation, from_index(self.answers[index].len())),
        };
        (0..self.answers.len()).map(trained).collect()
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

/// The transaction under the model's own adapters.
pub(crate) fn transaction<'a>(world: &'a World, model: &'a Model, how: How, ledger: &'a Ledger) -> Transaction<'a> {
    let cp_group = CpGroup { axis: &world.cp, ep: &world.ep, ledger };
    let micro_block = Tokens(how.micro_block);
    Transaction {
        policy: Pass { decoder: &*model.decoder, adapters: &model.adapters, cp_group, micro_block },
        reference: None,
        head: HEAD,
        objective: OBJECTIVE,
        gradient: Gradient::Last(Tokens(how.tail)),
        page_size: Tokens(how.page_size),
        keeping: how.keeping,
        pins_memory: false,
    }
}

pub(crate) fn observer(world: &World) -> Observer {
    Observer::new(world.tracker(), device())
}

/// One group's transaction over the world's prompt group; gradients stay in the adapters. Old scores are the step's own,
/// shifted a little, so that ratios lie on both sides of 1; the reference is another shift.
pub(crate) fn step(world: &World, model: &Model, group: &Group, how: How, batch: &Batch) -> Done {
    let ledger = Ledger::default();
    let transaction = transaction(world, model, how, &ledger);
    let mut observer = observer(world);
    let scored = run(transaction.score(&group.prompt_ids, None, group.answers.clone(), &mut observer));
    let pages_have_graph = scored.captured.pages.has_graph();
    let shifted = |by: f64| {
        let logprobs = scored
            .scores
            .0
            .iter()
            .map(|one| Logprobs { rows: &one.rows + by, first: one.first.as_ref().map(|first| first + by) });
        Scores(logprobs.collect())
    };
    let scores = Rc::new(FrozenScores {
        old: shifted(OLD),
        reference: Some(shifted(REFERENCE)),
        importance: None,
        choices: RefCell::default(),
    });
    let answers = group.trained(batch);
    let captured = Some(scored.captured);
    let done = run(transaction.train(&group.prompt_ids, captured, &answers, Some(scores), &mut observer));
    Done { replayed: done.replayed, ledger, pages_have_graph }
}

/// The group dealt to ranks.
pub(crate) fn placed(world: &World, model: &Model, group: &Group, how: How) -> PlacedGroup {
    transaction(world, model, how, &Ledger::default()).placed(&group.prompt_ids, group.answers.clone())
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
    let target = |(index, answer): (usize, &TrainedAnswer)| {
        let logprobs = tch::no_grad(|| whole.logprobs(&*model.decoder, &model.adapters, index)).detach();
        Target { reference: &logprobs + REFERENCE, ..Target::new(answer, logprobs + OLD) }
    };
    let targets: Vec<Target> = group.trained(batch).iter().enumerate().map(target).collect();
    whole.backward(&*model.decoder, &model.adapters, &targets, &OBJECTIVE)
}

/// [`conventional_step`] on rank 0 while the other ranks sleep: the loss and the adapters' gradients, on all ranks.
pub(crate) fn judged_step(world: &World, model: &Model, group: &Group, tail: u64, batch: &Batch) -> (f64, Vec<Tensor>) {
    let mut gradients = Vec::new();
    let loss = run(world.on_root_long(|| {
        let loss = conventional_step(model, group, tail, batch);
        gradients = own(&model.adapters);
        Ok(loss)
    }));
    let shapes: Vec<Vec<i64>> = model.adapters.tensors().map(Tensor::size).collect();
    let sizes: Vec<i64> = shapes.iter().map(|shape| shape.iter().product()).collect();
    let kind = model.adapters.tensors().next().expect("a model has adapters").kind();
    let none = Tensor::zeros([0], (kind, device()));
    let flat = std::iter::once(none).chain(gradients.iter().map(|gradient| gradient.flatten(0, -1)));
    let flat = Tensor::cat(&flat.collect::<Vec<_>>(), 0);
    let counts = |rank: usize| Tokens(if rank == 0 { from_dim(sizes.iter().sum()) } else { 0 });
    let all = gather_rows(&world.all, &flat, &(0..world.all.size()).map(counts).collect::<Vec<_>>());
    let parts = all.split_with_sizes(&sizes, 0);
    (sum_number(&world.all, loss), parts.iter().zip(&shapes).map(|(part, shape)| part.view(shape.as_slice())).collect())
}

/// Sums what all ranks of the world have left in the adapters.
pub(crate) fn reduced(world: &World, adapters: &Adapters) -> ReducedGrads {
    run(finalize::run(&world.all, finalize::take(adapters), adapters, 0.0))
}

/// Takes this rank's own gradients, without a sum.
pub(crate) fn own(adapters: &Adapters) -> Vec<Tensor> {
    finalize::take(adapters).0
}

/// Relative L2 distance of two sets of gradients.
pub(crate) fn distance(adapters: &Adapters, found: &[Tensor], expected: &[Tensor]) -> Distance {
    Distance::between(adapters.names(), found, expected)
}

/// Whether every ratio of a replay on this rank was exactly 1.
pub(crate) fn ratio_is_one(replayed: &Replayed) -> bool {
    let one = |ratio: f64| ratio.to_bits() == 1f64.to_bits();
    replayed.ratio.is_none_or(|ratio| one(ratio.least) && one(ratio.most))
}

/// The value, or a panic with the failure's own words.
pub(crate) fn run<T>(outcome: Result<T, longstraw::runtime::failure::Failure>) -> T {
    outcome.unwrap_or_else(|failure| panic!("{failure}"))
}
