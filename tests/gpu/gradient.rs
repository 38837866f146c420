//! The paged step's gradient against autograd over whole sequences, on one GPU, at lengths where blocks merge.
//!
//! Every schedule scores with its own forward, so all ratios are 1 and the three gradients differ by arithmetic alone.

use std::path::Path;
use std::rc::Rc;

use longstraw::model::decoder::Decoder;
use longstraw::model::head::Head;
use longstraw::model::lora::{Adapter, Adapters};
use longstraw::model::mixer::CpGroup;
use longstraw::model::pass::Pass;
use longstraw::model::spec::Spec;
use longstraw::model::weights::Weights;
use longstraw::prompt::handoff::{Keeping, PlacedGroup};
use longstraw::prompt::layout::PromptLayout;
use longstraw::runtime::memory::Ledger;
use longstraw::runtime::units::{Tokens, as_dim, from_index};
use longstraw::step::conventional::{self, Target};
use longstraw::step::objective::{Aggregation, Objective};
use longstraw::step::replay::{self, ReplayTargets};
use longstraw::step::{capture, finalize, score};
use longstraw::tensor::bytes::bytes_of;
use longstraw::world::World;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

const TERMS: Objective =
    Objective { clip_low: 0.2, clip_high: 0.2, kl_coef: 0.0, aggregation: Aggregation::SequenceMean };
const HEAD: Head = Head { rows_max: 512, temperature: 1.0 };
const ANSWERS: [usize; 2] = [129, 77];
const WEIGHT: f64 = 1.0 / 256.0;

/// Largest relative L2 distance of an adapter tensor's gradient in float32, TF32 off.
const FLOAT32_LIMIT: f64 = 5e-5;
/// How much larger than plain bfloat16 autograd's own the whole gradient's bfloat16 error may be.
const BFLOAT16_LIMIT: f64 = 1.1;

fn spec(shape: &str) -> Spec {
    Spec::read(Path::new("configs/shapes").join(shape).as_path(), None).unwrap_or_else(|error| panic!("{error}"))
}

pub(crate) fn random_weights(_world: &World, device: Device) -> Vec<Value> {
    let spec = Spec { layers: 1, window: vec![None], ..spec("smollm2-135m") };
    let drawn = |device| Weights::random(&spec, 3, Kind::BFloat16, device).unwrap_or_else(|error| panic!("{error}"));
    let (here, there) = (drawn(device), drawn(Device::Cpu));
    for ((name, one), (_, two)) in here.iter().zip(there.iter()) {
        let (one, two) = (bytes_of(one).expect("copied"), bytes_of(two).expect("copied"));
        assert!(one == two, "{name} differs between GPU and processor");
    }
    vec![json!({"tensors": here.iter().count()})]
}

/// One group on one model, in one dtype.
struct Case {
    decoder: Box<dyn Decoder>,
    adapters: Adapters,
    prompt_ids: Vec<i64>,
    answers: Vec<Vec<i64>>,
}

/// What a schedule leaves.
struct Taken {
    gradients: Vec<Tensor>,
    ratio: Option<(f64, f64)>,
}

impl Case {
    /// Weights of bfloat16 in either dtype, so that both compute with the same numbers.
    fn new(spec: &Spec, kind: Kind, prompt: u64, device: Device) -> Case {
        let weights = Weights::random(spec, 5, Kind::BFloat16, device).unwrap_or_else(|error| panic!("{error}"));
        let decoder = spec.decoder(Rc::new(weights.converted(kind)), kind);
        tch::manual_seed(7);
        let drawn = |rows: u64, columns: u64, scale: f64| {
            let values = Tensor::randn([as_dim(rows), as_dim(columns)], (Kind::Float, Device::Cpu)) * scale;
            values.to_device(device)
        };
        let pairs = spec.linear_layers().into_iter().map(|linear| Adapter {
            a_ri: drawn(16, linear.inputs, 0.02),
            b_or: drawn(linear.outputs, 16, 0.01),
            module: linear.module,
        });
        let adapters = Adapters::new(pairs.collect(), 2.0, "policy");
        let draw = |count: u64| {
            let ids = Tensor::randint(as_dim(spec.vocabulary), [as_dim(count)], (Kind::Int64, Device::Cpu));
            Vec::<i64>::try_from(ids).expect("integers")
        };
        let answers = ANSWERS.iter().map(|&length| draw(from_index(length))).collect();
        Case { decoder, adapters, prompt_ids: draw(prompt), answers }
    }

    fn paged(&self, world: &World, tail: Tokens) -> Taken {
        let prompt = Tokens(from_index(self.prompt_ids.len()));
        let layout = PromptLayout::new(prompt, Tokens(64), world.cp.size(), tail);
        let work = PlacedGroup::new(layout, self.prompt_ids.clone(), self.answers.clone());
        let ledger = Ledger::default();
        let cp_group = CpGroup { axis: &world.cp, ledger: &ledger };
        let pass = Pass { decoder: &*self.decoder, adapters: &self.adapters, cp_group, micro_block: Tokens(4096) };
        let tracker = world.tracker();
        let captured = run(capture::run(&pass, &work, Keeping::HOST, tracker));
        let old = run(score::run(&pass, &HEAD, &work, &captured, tracker));
        let goal = ReplayTargets {
            old: &old,
            reference: None,
            advantages: &[Some(-1.0), Some(1.0)],
            weights: &[WEIGHT; 2],
            terms: &TERMS,
        };
        let done = run(replay::run(&pass, &HEAD, &work, &captured, goal, tracker));
        let local = finalize::take(&self.adapters);
        let reduced = run(finalize::run(&world.cp, local, &self.adapters, 0.0));
        Taken { gradients: reduced.gradients().iter().map(Tensor::copy).collect(), ratio: done.ratio }
    }

    /// Plain autograd with the library's own attention.
    fn autograd(&self, tail: Tokens) -> Vec<Tensor> {
        let group = conventional::Group {
            prompt_ids: &self.prompt_ids,
            answers: &self.answers,
            tail,
            temperature: HEAD.temperature,
        };
        let exact = tail.0 == from_index(self.prompt_ids.len());
        let targets: Vec<Target> = [-1.0, 1.0]
            .into_iter()
            .enumerate()
            .map(|(index, advantage)| {
                let old = if exact {
                    group.score(&*self.decoder, &self.adapters, index)
                } else {
                    tch::no_grad(|| group.logprobs(&*self.decoder, &self.adapters, index))
                };
                Target { reference: old.shallow_clone(), old, advantage, weight: WEIGHT, trained: None }
            })
            .collect();
        if exact {
            let done = group.backward_checkpointed(&*self.decoder, &self.adapters, &targets, &TERMS);
            let _loss = done.unwrap_or_else(|error| panic!("{error}"));
        } else {
            let _loss = group.backward(&*self.decoder, &self.adapters, &targets, &TERMS);
        }
        finalize::take(&self.adapters).0
    }
}

/// Relative L2 distance of all tensors together, and the largest of one tensor.
fn apart(one: &[Tensor], two: &[Tensor]) -> (f64, f64) {
    let square = |x: &Tensor| x.to_kind(Kind::Double).square().sum(Kind::Double).double_value(&[]);
    let pairs: Vec<(f64, f64)> = one.iter().zip(two).map(|(one, two)| (square(&(one - two)), square(two))).collect();
    let (apart, size) = pairs.iter().fold((0.0, 0.0), |sum, pair| (sum.0 + pair.0, sum.1 + pair.1));
    let worst = pairs.iter().map(|(apart, size)| (apart / size).sqrt()).fold(0.0, f64::max);
    ((apart / size).sqrt(), worst)
}

pub(crate) fn judged(world: &World, device: Device) -> Vec<Value> {
    let mut found = Vec::new();
    for (shape, prompt) in [("qwen3-0.6b", 8192), ("qwen2.5-0.5b", 8192), ("qwen2.5-0.5b", 32_768)] {
        let spec = spec(shape);
        for tail in [Tokens(1), Tokens(prompt)] {
            let (reference, float) = {
                let case = Case::new(&spec, Kind::Float, prompt, device);
                (case.autograd(tail), case.paged(world, tail))
            };
            let case = Case::new(&spec, Kind::BFloat16, prompt, device);
            let (plain, half) = (case.autograd(tail), case.paged(world, tail));
            let of_float = apart(&float.gradients, &reference);
            let (of_half, of_plain) = (apart(&half.gradients, &reference), apart(&plain, &reference));
            let gradient = if tail == Tokens(1) { "response" } else { "exact" };
            let numbers = json!({
                "shape": shape, "prompt": prompt, "gradient": gradient,
                "float32": {"all": of_float.0, "worst": of_float.1},
                "bfloat16": {"all": of_half.0, "worst": of_half.1},
                "bfloat16_autograd": {"all": of_plain.0, "worst": of_plain.1},
                "ratio": [float.ratio, half.ratio],
            });
            let what = numbers.to_string();
            assert!(of_float.1 <= FLOAT32_LIMIT, "float32 is too far from autograd: {what}");
            assert!(of_half.0 <= BFLOAT16_LIMIT * of_plain.0, "bfloat16 errs more than autograd: {what}");
            let one = |taken: &Taken| taken.ratio.is_none_or(|range| range == (1.0, 1.0));
            assert!(one(&float) && one(&half), "the first replay's ratio is not 1: {what}");
            found.push(numbers);
        }
    }
    found
}

fn run<T>(outcome: Result<T, longstraw::runtime::failure::Failure>) -> T {
    outcome.unwrap_or_else(|failure| panic!("{failure}"))
}
