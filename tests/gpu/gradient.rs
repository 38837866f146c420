//! The paged step's gradient against autograd over whole sequences, on one GPU, at lengths where blocks merge.
//!
//! Every schedule scores with its own forward, so all ratios are 1 and the three gradients differ by arithmetic alone.

use std::path::Path;
use std::rc::Rc;

use longstraw::config::Gradient;
use longstraw::model::decoder::Decoder;
use longstraw::model::head::Head;
use longstraw::model::lora::Adapters;
use longstraw::model::mixer::CpGroup;
use longstraw::model::pass::Pass;
use longstraw::model::spec::Spec;
use longstraw::model::weights::{ExpertShare, Weights};
use longstraw::prompt::handoff::Keeping;
use longstraw::runtime::memory::Ledger;
use longstraw::runtime::units::{Tokens, as_dim, from_index};
use longstraw::step::conventional::{self, Target};
use longstraw::step::extremes::Range;
use longstraw::step::finalize;
use longstraw::step::objective::Objective;
use longstraw::step::observer::Observer;
use longstraw::step::replay::TrainedAnswer;
use longstraw::step::transaction::Transaction;
use longstraw::tensor::bytes::bytes_of;
use longstraw::tools::parity::distance::Distance;
use longstraw::tools::parity::random::RandomAdapters;
use longstraw::world::World;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

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
    let drawn = |device| {
        Weights::random(&spec, 3, Kind::BFloat16, device, ExpertShare::ALL).unwrap_or_else(|error| panic!("{error}"))
    };
    let (here, there) = (drawn(device), drawn(Device::Cpu));
    for ((name, one), (_, two)) in here.iter().zip(there.iter()) {
        let (one, two) = (bytes_of(&one).expect("copied"), bytes_of(&two).expect("copied"));
        assert!(one == two, "{name} differs between GPU and processor");
    }
    vec![json!({"tensors": here.iter().count()})]
}

/// One group on one model, in one dtype.
struct Case {
    decoder: Box<dyn Decoder>,
    adapters: Adapters,
    prompt_ids: Vec<i64>,
    answer_ids: Vec<Vec<i64>>,
    answers: Vec<TrainedAnswer>,
}

/// What the paged schedule leaves.
struct Paged {
    gradients: Vec<Tensor>,
    ratio: Option<Range>,
}

impl Case {
    /// Weights of bfloat16 in either dtype, so that both compute with the same numbers.
    fn new(spec: &Spec, kind: Kind, prompt: u64, device: Device) -> Case {
        let weights = Weights::random(spec, 5, Kind::BFloat16, device, ExpertShare::ALL)
            .unwrap_or_else(|error| panic!("{error}"));
        let decoder = spec.decoder(Rc::new(weights.converted(kind)), kind);
        let random = RandomAdapters {
            rank: 16,
            alpha: 32.0,
            a_deviation: 0.02,
            b_deviation: 0.01,
            seed: 7,
            sampled_in: Kind::Float,
            kind: Kind::Float,
            device,
        };
        let adapters = random.sample(spec.linear_layers());
        let draw = |count: u64| {
            let ids = Tensor::randint(as_dim(spec.vocabulary), [as_dim(count)], (Kind::Int64, Device::Cpu));
            Vec::<i64>::try_from(ids).expect("integers")
        };
        let answer_ids: Vec<Vec<i64>> = ANSWERS.iter().map(|&length| draw(from_index(length))).collect();
        let answer = |(ids, advantage): (&Vec<i64>, f64)| TrainedAnswer {
            ids: ids.clone(),
            mask: None,
            given: None,
            advantage: Some(advantage),
            weight: WEIGHT,
        };
        let answers = answer_ids.iter().zip([-1.0, 1.0]).map(answer).collect();
        Case { decoder, adapters, prompt_ids: draw(prompt), answer_ids, answers }
    }

    fn paged(&self, world: &World, gradient: Gradient) -> Paged {
        let ledger = Ledger::default();
        let cp_group = CpGroup { axis: &world.cp, ep: &world.ep, ledger: &ledger };
        let transaction = Transaction {
            policy: Pass { decoder: &*self.decoder, adapters: &self.adapters, cp_group, micro_block: Tokens(4096) },
            reference: None,
            head: HEAD,
            objective: Objective::DEFAULT,
            gradient,
            page_size: Tokens(64),
            keeping: Keeping::HOST,
            pins_memory: false,
        };
        let mut observer = Observer::new(world.tracker(), self.decoder.device());
        let done = run(transaction.train(&self.prompt_ids, None, &self.answers, None, &mut observer));
        let local = finalize::take(&self.adapters);
        let reduced = run(finalize::run(&world.cp, local, &self.adapters, 0.0));
        Paged { gradients: reduced.gradients().iter().map(Tensor::copy).collect(), ratio: done.replayed.ratio }
    }

    /// Plain autograd with the library's own attention.
    fn autograd(&self, gradient: Gradient) -> Vec<Tensor> {
        let group = conventional::Group {
            prompt_ids: &self.prompt_ids,
            answers: &self.answer_ids,
            tail: gradient.tail(Tokens(from_index(self.prompt_ids.len()))),
            temperature: HEAD.temperature,
        };
        let exact = gradient == Gradient::Exact;
        let target = |(index, answer)| {
            let old = if exact {
                group.score(&*self.decoder, &self.adapters, index)
            } else {
                tch::no_grad(|| group.logprobs(&*self.decoder, &self.adapters, index))
            };
            Target::new(answer, old)
        };
        let targets: Vec<Target> = self.answers.iter().enumerate().map(target).collect();
        if exact {
            let done = group.backward_checkpointed(&*self.decoder, &self.adapters, &targets, &Objective::DEFAULT);
            let _loss = done.unwrap_or_else(|error| panic!("{error}"));
        } else {
            let _loss = group.backward(&*self.decoder, &self.adapters, &targets, &Objective::DEFAULT);
        }
        finalize::take(&self.adapters).0
    }

    fn distance(&self, found: &[Tensor], expected: &[Tensor]) -> Distance {
        Distance::between(self.adapters.names(), found, expected)
    }
}

pub(crate) fn judged(world: &World, device: Device) -> Vec<Value> {
    let mut found = Vec::new();
    for (shape, prompt) in [("qwen3-0.6b", 8192), ("qwen2.5-0.5b", 8192), ("qwen2.5-0.5b", 32_768)] {
        let spec = spec(shape);
        for gradient in [Gradient::Response, Gradient::Exact] {
            let (reference, paged_float32) = {
                let case = Case::new(&spec, Kind::Float, prompt, device);
                (case.autograd(gradient), case.paged(world, gradient))
            };
            let case = Case::new(&spec, Kind::BFloat16, prompt, device);
            let plain_bfloat16 = case.distance(&case.autograd(gradient), &reference);
            let paged = case.paged(world, gradient);
            let bfloat16 = case.distance(&paged.gradients, &reference);
            let float32 = case.distance(&paged_float32.gradients, &reference);
            let ends = |ratio: Option<Range>| ratio.map(|range| [range.least, range.most]);
            let numbers = json!({
                "shape": shape, "prompt": prompt, "gradient": gradient.to_string(),
                "float32": {"all": float32.all, "worst": float32.worst},
                "bfloat16": {"all": bfloat16.all, "worst": bfloat16.worst},
                "bfloat16_autograd": {"all": plain_bfloat16.all, "worst": plain_bfloat16.worst},
                "ratio": [ends(paged_float32.ratio), ends(paged.ratio)],
            });
            let what = numbers.to_string();
            assert!(float32.worst <= FLOAT32_LIMIT, "float32 is too far from autograd: {what}");
            assert!(bfloat16.all <= BFLOAT16_LIMIT * plain_bfloat16.all, "bfloat16 errs more than autograd: {what}");
            let is_one = |ratio: Option<Range>| ratio.is_none_or(|range| range == Range::at(1.0));
            assert!(is_one(paged_float32.ratio) && is_one(paged.ratio), "the first replay's ratio is not 1: {what}");
            found.push(numbers);
        }
    }
    found
}

fn run<T>(outcome: Result<T, longstraw::runtime::failure::Failure>) -> T {
    outcome.unwrap_or_else(|failure| panic!("{failure}"))
}
