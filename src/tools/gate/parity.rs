//! gate2's judge: adapter gradients of the paged step on all ranks against plain autograd over whole sequences on one.
//!
//! Same weights, same prompt, same answers (their first tokens: plain autograd keeps the scores of all of them), adapters
//! whose B is not zero. Rank 0 runs plain autograd while the others wait. A model of which that does not fit one device is
//! cut to its first layers; the check says to how many. Every schedule scores with its own forward, so all ratios are 1
//! and gradients differ by arithmetic alone.
//!
//! float64 and float32 are held to rounding. bfloat16 has 8 bits, so its own autograd is the measure: against autograd in
//! float32, the paged step may err little more than plain bfloat16 autograd does.

use std::rc::Rc;

use serde_json::json;
use tch::{Device, Kind, Tensor};

use super::Error;
use super::checks::check;
use crate::config::RunConfig;
use crate::data::Group;
use crate::model::decoder::Decoder;
use crate::model::head::Head;
use crate::model::lora::{Adapter, Adapters};
use crate::model::mixer::CpGroup;
use crate::model::pass::Pass;
use crate::model::spec::Spec;
use crate::plan;
use crate::prompt::handoff::{Keeping, PlacedGroup};
use crate::prompt::layout::PromptLayout;
use crate::report::Check;
use crate::runtime::failure::{Failure, Phase};
use crate::runtime::liveness::Tracker;
use crate::runtime::units::{Bytes, Rank, Tokens, as_dim, as_index, float, from_index};
use crate::step::conventional::{self, Target};
use crate::step::objective::{self, Aggregation, Counted, Objective};
use crate::step::replay::{self, ReplayTargets};
use crate::step::{capture, finalize, score};
use crate::tensor::{accumulation, gpu};
use crate::train::Session;
use crate::world::World;

const TERMS: Objective =
    Objective { clip_low: 0.2, clip_high: 0.2, kl_coef: 0.0, aggregation: Aggregation::SequenceMean };

/// Most tokens of an answer that are compared.
const ANSWER_TOKENS_MAX: usize = 512;
/// Share of a device's free memory that plain autograd may be planned to take.
const ROOM: f64 = 0.85;
/// How much larger than plain bfloat16 autograd's own error the paged step's may be.
const BFLOAT16_LIMIT: f64 = 1.1;

/// Largest relative L2 distance of an adapter tensor's gradient, where the dtype is its own measure.
fn limit(kind: Kind) -> f64 {
    if kind == Kind::Double { 1e-9 } else { 5e-5 }
}

/// How far two sets of gradients lie apart, in relative L2 distances.
#[derive(Clone, Debug, PartialEq)]
struct Apart {
    /// All tensors together.
    all: f64,
    /// The tensor that is furthest off.
    worst: f64,
    /// Its name.
    tensor: String,
}

/// One gradient mode's outcome.
#[derive(Clone, Debug, PartialEq)]
struct Outcome {
    gradient: &'static str,
    paged: Apart,
    /// Plain autograd in the model's dtype against float32, where the model has less.
    plain: Option<Apart>,
}

/// What was compared.
#[derive(Clone, Copy, Debug)]
struct Extent {
    layers: usize,
    of_layers: usize,
    prompt: usize,
    answer: usize,
}

/// Runs both gradient modes both ways; every rank takes part, and rank 0's checks are the outcome.
pub(super) fn checks(session: &Session, config: &RunConfig, world: &World) -> Result<Vec<Check>, Failure> {
    world.tracker().enter(Phase::Evaluate);
    let case = Case::of(session, config, world)?;
    let mut checks = Vec::new();
    for (gradient, tail) in [("response", Tokens(1)), ("exact", Tokens(from_index(case.group.prompt_ids.len())))] {
        let paged = case.paged(&*case.decoder, tail, world)?;
        // Plain autograd has no borders of its own: each of its passes is one place, and the paged step's last layer is none.
        world.tracker().enter(Phase::Evaluate);
        let judged = match world.all.rank() {
            Rank(0) => case.judged(gradient, tail, &paged, world.tracker()).map(Some),
            _ => Ok(None),
        };
        let outcome = world.agree(judged)?;
        checks.extend(outcome.map(|outcome| told(&outcome, case.kind, case.extent)));
    }
    world.tracker().rest();
    Ok(checks)
}

/// A gradient mode's check.
fn told(outcome: &Outcome, kind: Kind, extent: Extent) -> Check {
    let Extent { layers, of_layers, prompt, answer } = extent;
    let over = format!("{layers} of {of_layers} layers, prompt {prompt}, {answer} tokens of each answer");
    let means = "the paged step's gradient is not that of plain autograd over whole sequences: nothing that is trained with \
                 it can be trusted; `longstraw parity` on a small case tells which adapter differs first";
    let name = format!("parity.{}", outcome.gradient);
    let Apart { all, worst, tensor } = &outcome.paged;
    let value =
        json!({"all": all, "worst": worst, "tensor": tensor, "plain": outcome.plain.as_ref().map(|one| one.all)});
    let (limit, held) = match &outcome.plain {
        Some(plain) => (
            format!(
                "at most {BFLOAT16_LIMIT} times plain autograd's own distance from float32, {:.3e}; {over}",
                plain.all
            ),
            *all <= BFLOAT16_LIMIT * plain.all,
        ),
        None => (format!("at most {:e} in every adapter tensor; {over}", limit(kind)), *worst <= limit(kind)),
    };
    check(&name, value, limit, held, means)
}

/// The group, the adapters and the layers that are compared.
struct Case<'a> {
    session: &'a Session,
    spec: Spec,
    kind: Kind,
    decoder: Box<dyn Decoder>,
    adapters: Adapters,
    group: Group,
    advantages: Vec<Option<f64>>,
    weights: Vec<f64>,
    head: Head,
    page_size: Tokens,
    micro_block: Tokens,
    extent: Extent,
}

impl<'a> Case<'a> {
    fn of(session: &'a Session, config: &RunConfig, world: &World) -> Result<Case<'a>, Failure> {
        let whole = session.spec();
        let kind = session.weights().kind();
        let mut group = session.first_group().clone();
        group.answers.iter_mut().for_each(|answer| answer.ids.truncate(ANSWER_TOKENS_MAX));
        let answer = group.answers.iter().map(|answer| answer.ids.len()).max().unwrap_or(0);
        let extent = Extent { layers: 0, of_layers: whole.layers, prompt: group.prompt_ids.len(), answer };
        let layers = agreed_layers(session, extent, world)?;
        let spec = whole.first_layers(layers);
        let decoder = spec.decoder(Rc::new(session.weights().part(&spec, kind)), kind);
        let adapters = drawn(&spec, config, accumulation(kind), session.weights().device())?;
        let rewards: Vec<Option<f64>> =
            (0..group.answers.len()).map(|index| Some(if index % 2 == 0 { 0.0 } else { 1.0 })).collect();
        let counts = group.answers.iter().map(|answer| from_index(answer.ids.len()));
        let batch = objective::Batch::of(counts.clone().map(|tokens| Counted { tokens, scored: true }));
        Ok(Case {
            session,
            kind,
            decoder,
            adapters,
            advantages: objective::advantages(&rewards, true),
            weights: counts.map(|tokens| batch.weight(TERMS.aggregation, tokens)).collect(),
            head: Head { rows_max: config.memory.head_block.dim(), temperature: config.grpo.temperature },
            page_size: config.context.page_size,
            micro_block: config.memory.micro_block,
            extent: Extent { layers, ..extent },
            spec,
            group,
        })
    }

    fn answers(&self) -> Vec<Vec<i64>> {
        self.group.answers.iter().map(|answer| answer.ids.clone()).collect()
    }

    /// The paged step on all ranks.
    fn paged(&self, decoder: &dyn Decoder, tail: Tokens, world: &World) -> Result<Vec<Tensor>, Failure> {
        let prompt = Tokens(from_index(self.group.prompt_ids.len()));
        let layout = PromptLayout::new(prompt, self.page_size, world.cp.size(), tail);
        let work = PlacedGroup::new(layout, self.group.prompt_ids.clone(), self.answers());
        let cp_group = CpGroup { axis: &world.cp, ledger: world.ledger() };
        let pass = Pass { decoder, adapters: &self.adapters, cp_group, micro_block: self.micro_block };
        let captured = capture::run(&pass, &work, Keeping::HOST, world.tracker())?;
        let old = score::run(&pass, &self.head, &work, &captured, world.tracker())?;
        let (advantages, weights) = (&self.advantages, &self.weights);
        let goal = ReplayTargets { old: &old, reference: None, advantages, weights, terms: &TERMS };
        let _done = replay::run(&pass, &self.head, &work, &captured, goal, world.tracker())?;
        // One prompt's ranks have the whole gradient among them; no clip, so that lengths are compared too.
        let reduced = finalize::run(&world.cp, finalize::take(&self.adapters), &self.adapters, 0.0)?;
        Ok(reduced.gradients().iter().map(Tensor::copy).collect())
    }

    /// Plain autograd on this rank alone, and how far the paged gradient lies from it.
    fn judged(
        &self,
        gradient: &'static str,
        tail: Tokens,
        paged: &[Tensor],
        tracker: &Tracker,
    ) -> Result<Outcome, Failure> {
        let own = || self.plain(&*self.decoder, tail, tracker);
        if accumulation(self.kind) == self.kind {
            return Ok(Outcome { gradient, paged: self.apart(paged, &own()?), plain: None });
        }
        let plain = own()?;
        let kind = accumulation(self.kind);
        let weights = Rc::new(self.session.weights().part(&self.spec, kind));
        let reference = self.plain(&*self.spec.decoder(weights, kind), tail, tracker)?;
        let plain = Some(self.apart(&plain, &reference));
        Ok(Outcome { gradient, paged: self.apart(paged, &reference), plain })
    }

    fn plain(&self, decoder: &dyn Decoder, tail: Tokens, tracker: &Tracker) -> Result<Vec<Tensor>, Failure> {
        let answers = self.answers();
        let (prompt_ids, temperature) = (&self.group.prompt_ids, self.head.temperature);
        let group = conventional::Group { prompt_ids, answers: &answers, tail, temperature };
        let exact = tail == Tokens(from_index(prompt_ids.len()));
        let targets: Vec<Target> = (0..answers.len())
            .map(|index| {
                tracker.enter(Phase::Evaluate);
                let old = if exact {
                    group.score(decoder, &self.adapters, index)
                } else {
                    tch::no_grad(|| group.logprobs(decoder, &self.adapters, index))
                };
                let (advantage, weight) = (self.advantages[index].unwrap_or(0.0), self.weights[index]);
                Target { reference: old.shallow_clone(), old, advantage, weight, trained: None }
            })
            .collect();
        tracker.enter(Phase::Evaluate);
        if exact {
            let _loss = group.backward_checkpointed(decoder, &self.adapters, &targets, &TERMS)?;
        } else {
            let _loss = group.backward(decoder, &self.adapters, &targets, &TERMS);
        }
        Ok(finalize::take(&self.adapters).0)
    }

    fn apart(&self, one: &[Tensor], two: &[Tensor]) -> Apart {
        apart(self.adapters.names(), one, two)
    }
}

fn apart(names: impl Iterator<Item = String>, one: &[Tensor], two: &[Tensor]) -> Apart {
    let square = |x: &Tensor| x.to_kind(Kind::Double).square().sum(Kind::Double).double_value(&[]);
    let (mut distance, mut size) = (0.0, 0.0);
    let (mut worst, mut worst_name) = (0.0, String::new());
    for (name, (one, two)) in names.zip(one.iter().zip(two)) {
        let (apart, norm) = (square(&(one.to_kind(Kind::Double) - two.to_kind(Kind::Double))), square(two));
        distance += apart;
        size += norm;
        // Where nothing is expected, what is found is the error; a NaN is the largest of all.
        let error = if norm.sqrt() < 1e-12 { apart.sqrt() } else { (apart / norm).sqrt() };
        let error = if error.is_nan() { f64::INFINITY } else { error };
        if error > worst || worst_name.is_empty() {
            (worst, worst_name) = (error, name);
        }
    }
    Apart { all: (distance / size).sqrt(), worst, tensor: worst_name }
}

/// Adapters like the run's, neither half zero: with B = 0 the gradient of A would be 0 whatever the code does.
fn drawn(spec: &Spec, config: &RunConfig, acc: Kind, device: Device) -> Result<Adapters, Failure> {
    let lora = &config.lora;
    tch::manual_seed(i64::try_from(config.run.seed).unwrap_or(i64::MAX));
    let draw = |rows: u64, columns: u64, scale: f64| {
        let values = Tensor::randn([as_dim(rows), as_dim(columns)], (Kind::Double, Device::Cpu)) * scale;
        values.to_kind(acc).to_device(device)
    };
    let pairs = spec.adapted(lora.targets.as_deref())?.into_iter().map(|linear| Adapter {
        a_ri: draw(lora.rank, linear.inputs, 0.02),
        b_or: draw(linear.outputs, lora.rank, 0.01),
        module: linear.module,
    });
    Ok(Adapters::new(pairs.collect(), lora.alpha / float(lora.rank), "policy"))
}

/// Layers that plain autograd fits on rank 0's device, the same on every rank.
fn agreed_layers(session: &Session, extent: Extent, world: &World) -> Result<usize, Failure> {
    let (spec, weights) = (session.spec(), session.weights());
    gpu::empty_cache();
    let room = match weights.device() {
        Device::Cpu => Ok(plan::available_memory().unwrap_or(Bytes(u64::MAX))),
        _ => gpu::memory().map(|(free, _)| free).map_err(Failure::from),
    };
    let room = world.agree(room)?;
    let available = float(room.0) * ROOM;
    let fits = |layers: usize| needed(spec, weights.kind(), weights.device(), layers, extent) <= available;
    let layers = (1..=spec.layers).rev().find(|&layers| fits(layers)).unwrap_or(0);
    // Rank 0 runs it; the others only have to know.
    let layers = as_index(world.all.gather_numbers(from_index(layers)).first().copied().unwrap_or(0));
    if layers > 0 {
        return Ok(layers);
    }
    let whole = |bytes: f64| Bytes(f64_bytes(bytes));
    let needed = whole(needed(spec, weights.kind(), weights.device(), 1, extent)).0;
    world.agree(Err(Error::NoLayerFits { needed, available: whole(available).0 }.into()))
}

/// Bytes that plain autograd takes on one device, beside the model that lies there already: the larger of its two forms.
fn needed(spec: &Spec, kind: Kind, device: Device, layers: usize, extent: Extent) -> f64 {
    let element = if kind == Kind::Double { 8.0 } else { 4.0 };
    let (prompt, answer) = (float(from_index(extent.prompt)), float(from_index(extent.answer)));
    let positions = prompt + answer;
    let count = float(from_index(layers));
    let (width, ffn, heads) = (float(spec.width), float(spec.ffn_width), float(spec.query_heads));
    let inner = heads * float(spec.head_dim);
    // bfloat16 is judged by a float32 copy.
    let copy = if kind == Kind::BFloat16 { float(spec.first_layers(layers).parameter_count()) * 4.0 } else { 0.0 };
    let graph = |rows: f64| rows * (3.0 * ffn + 8.0 * width + 6.0 * inner) * element;
    let logits = answer * float(spec.vocabulary) * 4.0 * element;
    let exact = positions * width * (count + 1.0) * element + graph(positions);
    // Scores of the answer's rows stay in every layer's graph; those of constant rows pass, and on a CPU are written out.
    let scores = 3.0 * heads * answer * positions * element * count;
    let passing = if device == Device::Cpu { 3.0 * heads * prompt * prompt * element } else { 0.0 };
    let response = scores + passing + graph(answer) * count + graph(prompt);
    copy + logits + exact.max(response)
}

/// Bytes as a whole number, for a message.
fn f64_bytes(bytes: f64) -> u64 {
    format!("{bytes:.0}").parse().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXTENT: Extent = Extent { layers: 3, of_layers: 64, prompt: 384, answer: 128 };

    fn outcome(all: f64, worst: f64, plain: Option<f64>) -> Outcome {
        let apart = |all, worst| Apart { all, worst, tensor: "layers.1.q_proj.lora_A".into() };
        Outcome { gradient: "exact", paged: apart(all, worst), plain: plain.map(|all| apart(all, all)) }
    }

    #[test]
    fn a_gradient_beyond_its_dtypes_limit_fails_and_one_within_passes() {
        let rows = [
            (Kind::Double, outcome(1e-12, 9.9e-10, None), true),
            (Kind::Double, outcome(1e-12, 1.1e-9, None), false),
            (Kind::Float, outcome(1e-6, 4.9e-5, None), true),
            (Kind::Float, outcome(1e-6, 5.1e-5, None), false),
            (Kind::Float, outcome(f64::NAN, f64::INFINITY, None), false),
            (Kind::BFloat16, outcome(0.0109, 0.9, Some(0.01)), true),
            (Kind::BFloat16, outcome(0.0111, 0.0, Some(0.01)), false),
            (Kind::BFloat16, outcome(f64::NAN, 0.0, Some(0.01)), false),
        ];
        for (kind, outcome, held) in rows {
            let found = told(&outcome, kind, EXTENT);
            assert_eq!((found.passed, found.name.as_str()), (held, "parity.exact"), "{kind:?} {outcome:?}");
            assert!(found.limit.contains("3 of 64 layers, prompt 384, 128 tokens"), "{}", found.limit);
            assert!(found.means.contains("plain autograd"));
        }
    }

    #[test]
    fn distances_are_relative_and_one_value_that_is_none_is_the_worst() {
        let tensor = |values: &[f64]| Tensor::from_slice(values);
        let names = || ["a", "b", "c"].map(String::from).into_iter();
        let two = [tensor(&[3.0, 4.0]), tensor(&[0.0]), tensor(&[1.0])];
        let near = apart(names(), &[tensor(&[3.0, 4.5]), tensor(&[1e-3]), tensor(&[1.0])], &two);
        assert!((near.worst - 0.1).abs() < 1e-12 && near.tensor == "a", "{near:?}");
        assert!((near.all - ((0.25 + 1e-6) / 26.0_f64).sqrt()).abs() < 1e-12);
        let none = apart(names(), &[tensor(&[3.0, 4.0]), tensor(&[0.0]), tensor(&[f64::NAN])], &two);
        assert_eq!((none.worst, none.tensor.as_str()), (f64::INFINITY, "c"));
    }

    #[test]
    fn more_layers_need_more_and_a_large_model_is_cut() {
        let path = std::path::Path::new("configs/shapes/qwen3-8b");
        let spec = Spec::read(path, None).expect("a shape of this project");
        let extent = Extent { layers: 0, of_layers: spec.layers, prompt: 24_576, answer: 512 };
        let of = |layers| needed(&spec, Kind::BFloat16, Device::Cuda(0), layers, extent);
        assert!((1..spec.layers).all(|layers| of(layers) < of(layers + 1)));
        // A float32 copy of 8 billion weights alone.
        assert!(of(spec.layers) > 32e9 && of(1) < 30e9, "{} {}", of(1), of(spec.layers));
    }
}
