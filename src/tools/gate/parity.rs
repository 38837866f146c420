//! gate2's judge: adapter gradients of the paged step on all ranks against plain autograd over whole sequences on one.
//!
//! Same weights, same prompt, same answers (their first tokens: plain autograd keeps the scores of all of them), adapters
//! whose B is not zero. Rank 0 runs plain autograd while the others wait. A model of which that does not fit one device is
//! cut to its first layers; the check says to how many. Experts that are spread over ranks are gathered for it on every
//! rank. Every schedule scores with its own forward, so all ratios are 1 and gradients differ by arithmetic alone.
//!
//! float64 and float32 are held to rounding. bfloat16 has 8 bits, so its own autograd is the measure: against autograd in
//! float32, the paged step may err little more than plain bfloat16 autograd does.

use std::rc::Rc;

use serde_json::json;
use tch::{Device, Kind, Tensor};

use super::checks::check;
use super::error::Error;
use crate::config::{Gradient, RunConfig};
use crate::model::decoder::Decoder;
use crate::model::head::Head;
use crate::model::lora::Adapters;
use crate::model::mixer::CpGroup;
use crate::model::pass::Pass;
use crate::model::spec::Spec;
use crate::model::weights::Weights;
use crate::plan;
use crate::prompt::handoff::Keeping;
use crate::report::Check;
use crate::runtime::failure::{Failure, Phase};
use crate::runtime::liveness::Tracker;
use crate::runtime::units::{Bytes, LayerIndex, Rank, Tokens, as_index, float, from_index};
use crate::step::conventional::{self, Target};
use crate::step::finalize;
use crate::step::objective::{self, Objective, Scaling};
use crate::step::observer::Observer;
use crate::step::replay::TrainedAnswer;
use crate::step::transaction::Transaction;
use crate::tensor::{accumulation, gpu};
use crate::tools::parity::distance::Distance;
use crate::tools::parity::random::RandomAdapters;
use crate::train::Session;
use crate::world::World;

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

/// One gradient mode's outcome.
#[derive(Clone, Debug, PartialEq)]
struct Outcome {
    gradient: Gradient,
    paged: Distance,
    /// Plain autograd in the model's dtype against float32, where the model has less.
    plain: Option<Distance>,
}

/// What was compared.
#[derive(Clone, Copy, Debug)]
struct Extent {
    layers: usize,
    of_layers: usize,
    prompt: usize,
    answer: usize,
}

/// Runs both schedules in both gradient modes. Every rank takes part; rank 0 returns the checks.
pub(super) fn checks(session: &Session, config: &RunConfig, world: &World) -> Result<Vec<Check>, Failure> {
    world.tracker().enter(Phase::Evaluate);
    let case = Case::open(session, config, world)?;
    let mut checks = Vec::new();
    for gradient in [Gradient::Response, Gradient::Exact] {
        let paged = case.paged(gradient, world)?;
        // Plain autograd passes no layer borders: each of its passes counts as one place.
        world.tracker().enter(Phase::Evaluate);
        let judged = match world.all.rank() {
            Rank(0) => case.judged(gradient, &paged, world.tracker()).map(Some),
            _ => Ok(None),
        };
        let outcome = world.agree(judged)?;
        checks.extend(outcome.map(|outcome| verdict(&outcome, case.kind, case.extent)));
    }
    world.tracker().end_step();
    Ok(checks)
}

/// A gradient mode's check.
fn verdict(outcome: &Outcome, kind: Kind, extent: Extent) -> Check {
    let Extent { layers, of_layers, prompt, answer } = extent;
    let over = format!("{layers} of {of_layers} layers, prompt {prompt}, {answer} tokens of each answer");
    let means = "the paged step's gradient is not that of plain autograd over whole sequences: nothing that is trained with \
                 it can be trusted; `longstraw parity` on a small case tells which adapter differs first";
    let name = format!("parity.{}", outcome.gradient);
    let Distance { all, worst, worst_tensor } = &outcome.paged;
    let value =
        json!({"all": all, "worst": worst, "tensor": worst_tensor, "plain": outcome.plain.as_ref().map(|one| one.all)});
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
struct Case {
    spec: Spec,
    kind: Kind,
    /// Of the layers that are compared, with all experts: plain autograd has them on one rank.
    weights: Rc<Weights>,
    decoder: Box<dyn Decoder>,
    adapters: Adapters,
    prompt_ids: Vec<i64>,
    answer_ids: Vec<Vec<i64>>,
    answers: Vec<TrainedAnswer>,
    head: Head,
    page_size: Tokens,
    micro_block: Tokens,
    extent: Extent,
}

impl Case {
    fn open(session: &Session, config: &RunConfig, world: &World) -> Result<Case, Failure> {
        let (whole, weights) = (session.spec(), session.weights());
        let kind = weights.kind();
        let group = session.first_group();
        let prompt_ids = session.first_prompt_ids()?;
        let shortened = |ids: &Vec<i64>| ids.iter().copied().take(ANSWER_TOKENS_MAX).collect();
        let answer_ids: Vec<Vec<i64>> = group.answers.iter().map(|answer| shortened(&answer.ids)).collect();
        let answer = answer_ids.iter().map(Vec::len).max().unwrap_or(0);
        let extent = Extent { layers: 0, of_layers: whole.layers, prompt: prompt_ids.len(), answer };
        let layers = agreed_layers(session, extent, world)?;
        let spec = whole.first_layers(layers);
        let rewards: Vec<Option<f64>> =
            (0..answer_ids.len()).map(|index| Some(if index % 2 == 0 { 0.0 } else { 1.0 })).collect();
        let advantages = objective::advantages(&rewards, Scaling::DEFAULT);
        let seed = i64::try_from(config.run.seed).unwrap_or(i64::MAX);
        let lora = &config.lora;
        let linears = spec.adapted(lora.targets.as_deref())?;
        let random = RandomAdapters {
            rank: lora.rank,
            alpha: lora.alpha,
            a_deviation: 0.02,
            b_deviation: 0.01,
            seed,
            sampled_in: Kind::Double,
            kind: accumulation(kind),
            device: weights.device(),
        };
        let weights = Rc::new(weights.part(&spec, kind).with_all_experts(&spec, &world.ep));
        Ok(Case {
            kind,
            decoder: spec.decoder(weights.clone(), kind),
            weights,
            adapters: random.sample(linears),
            prompt_ids,
            answers: TrainedAnswer::whole_batch(&answer_ids, &advantages, Objective::DEFAULT.aggregation),
            answer_ids,
            head: Head { rows_max: config.memory.head_block.dim(), temperature: config.grpo.temperature },
            page_size: config.context.page_size,
            micro_block: config.memory.micro_block,
            extent: Extent { layers, ..extent },
            spec,
        })
    }

    /// The paged step on all ranks.
    fn paged(&self, gradient: Gradient, world: &World) -> Result<Vec<Tensor>, Failure> {
        let cp_group = CpGroup { axis: &world.cp, ep: &world.ep, ledger: world.ledger() };
        let transaction = Transaction {
            policy: Pass { decoder: &*self.decoder, adapters: &self.adapters, cp_group, micro_block: self.micro_block },
            reference: None,
            head: self.head,
            objective: Objective::DEFAULT,
            gradient,
            page_size: self.page_size,
            keeping: Keeping::HOST,
            pins_memory: false,
        };
        let mut observer = Observer::within(Phase::Evaluate, world.tracker(), self.decoder.device());
        transaction.train(&self.prompt_ids, None, &self.answers, None, &mut observer)?;
        // The ranks of one prompt have the whole gradient among them. Without a clip, lengths are compared too.
        let reduced = finalize::run(&world.cp, finalize::take(&self.adapters), &self.adapters, 0.0)?;
        Ok(reduced.gradients().iter().map(Tensor::copy).collect())
    }

    /// Plain autograd on this rank alone, and how far the paged gradient lies from it.
    fn judged(&self, gradient: Gradient, paged: &[Tensor], tracker: &Tracker) -> Result<Outcome, Failure> {
        let distance =
            |found: &[Tensor], expected: &[Tensor]| Distance::between(self.adapters.names(), found, expected);
        let own = self.plain(&*self.decoder, gradient, tracker)?;
        let acc = accumulation(self.kind);
        if acc == self.kind {
            return Ok(Outcome { gradient, paged: distance(paged, &own), plain: None });
        }
        let weights = Rc::new(self.weights.part(&self.spec, acc));
        let reference = self.plain(&*self.spec.decoder(weights, acc), gradient, tracker)?;
        Ok(Outcome { gradient, paged: distance(paged, &reference), plain: Some(distance(&own, &reference)) })
    }

    fn plain(&self, decoder: &dyn Decoder, gradient: Gradient, tracker: &Tracker) -> Result<Vec<Tensor>, Failure> {
        let group = conventional::Group {
            prompt_ids: &self.prompt_ids,
            answers: &self.answer_ids,
            tail: gradient.tail(Tokens(from_index(self.prompt_ids.len()))),
            temperature: self.head.temperature,
        };
        let exact = gradient == Gradient::Exact;
        let target = |(index, answer)| {
            tracker.enter(Phase::Evaluate);
            let old = if exact {
                group.score(decoder, &self.adapters, index)
            } else {
                tch::no_grad(|| group.logprobs(decoder, &self.adapters, index))
            };
            Target::new(answer, old)
        };
        let targets: Vec<Target> = self.answers.iter().enumerate().map(target).collect();
        tracker.enter(Phase::Evaluate);
        let _loss = if exact {
            group.backward_checkpointed(decoder, &self.adapters, &targets, &Objective::DEFAULT)?
        } else {
            group.backward(decoder, &self.adapters, &targets, &Objective::DEFAULT)
        };
        Ok(finalize::take(&self.adapters).0)
    }
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
    let needed = |layers: usize| {
        // Experts of other ranks come here, and lie twice for a moment.
        let experts = if world.ep.size() > 1 { 2.0 * expert_bytes(spec, weights.kind(), layers) } else { 0.0 };
        experts + needed(spec, weights.kind(), weights.device(), layers, extent)
    };
    let fits = |layers: usize| needed(layers) <= available;
    let layers = (1..=spec.layers).rev().find(|&layers| fits(layers)).unwrap_or(0);
    // Rank 0 runs it; the others only have to know.
    let layers = as_index(world.all.gather_numbers(from_index(layers)).first().copied().unwrap_or(0));
    if layers > 0 {
        return Ok(layers);
    }
    let whole = |bytes: f64| Bytes(f64_bytes(bytes));
    let needed = whole(needed(1)).0;
    world.agree(Err(Error::NoLayerFits { needed, available: whole(available).0 }.into()))
}

/// Bytes of all experts of the first layers.
fn expert_bytes(spec: &Spec, kind: Kind, layers: usize) -> f64 {
    let element = match kind {
        Kind::Double => 8.0,
        Kind::Float => 4.0,
        _ => 2.0,
    };
    let of = |layer| spec.experts_of(LayerIndex(layer)).map_or(0.0, |own| float(own.count) * float(own.width));
    3.0 * float(spec.width) * element * (0..layers).map(of).sum::<f64>()
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
        let distance = |all, worst| Distance { all, worst, worst_tensor: "layers.1.q_proj.lora_A".into() };
        Outcome { gradient: Gradient::Exact, paged: distance(all, worst), plain: plain.map(|all| distance(all, all)) }
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
            let found = verdict(&outcome, kind, EXTENT);
            assert_eq!((found.passed, found.name.as_str()), (held, "parity.exact"), "{kind:?} {outcome:?}");
            assert!(found.limit.contains("3 of 64 layers, prompt 384, 128 tokens"), "{}", found.limit);
            assert!(found.means.contains("plain autograd"));
        }
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
