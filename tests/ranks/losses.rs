//! Every loss and correction against plain autograd: each formula is written once more here, over whole answers with a graph,
//! and shares nothing with the objective.

use std::cell::RefCell;
use std::rc::Rc;

use longstraw::config::{KlEstimator, Loss};
use longstraw::prompt::handoff::{Logprobs, Scores};
use longstraw::runtime::memory::Ledger;
use longstraw::runtime::units::{Tokens, float, from_dim, from_index};
use longstraw::step::conventional::{self, Target};
use longstraw::step::extremes::Range;
use longstraw::step::objective::{Aggregation, Importance, Objective};
use longstraw::step::replay::{FrozenScores, Replayed, TrainedAnswer};
use longstraw::step::transaction::Transaction;
use longstraw::tools::parity::distance::Distance;
use longstraw::world::World;
use longstraw::world::exchange::sum_number;
use serde_json::json;
use tch::{Kind, Tensor};

use crate::fixture::{
    Group, HEAD, How, Model, PLAIN, config, device, distance, observer, own, reduced, run, transaction,
};

/// Rounding only: both sides are float64.
const LIMIT: f64 = 1e-9;

/// The objectives of the claim: every loss, estimate and correction at least once, and those together that meet.
fn objectives() -> Vec<Objective> {
    let plain = Objective { clip_low: 0.1, clip_high: 0.15, ..Objective::DEFAULT };
    let sequence = Objective { loss: Loss::Gspo, clip_low: 0.02, clip_high: 0.03, ..plain };
    let cispo = Objective { loss: Loss::Cispo, clip_low: 1.0, clip_high: 0.2, ..plain };
    let with_kl = |kl_estimator, from: Objective| Objective { kl_coef: 0.3, kl_estimator, ..from };
    let token = Importance::Token { most: 1.3 };
    let whole = Importance::Sequence { most: 2.0 };
    vec![
        Objective { clip_dual: Some(1.2), aggregation: Aggregation::TokenMean, ..with_kl(KlEstimator::K1, plain) },
        Objective { clip_dual: Some(1.4), importance: token, ..with_kl(KlEstimator::K2, plain) },
        with_kl(KlEstimator::K3Ratio, plain),
        with_kl(KlEstimator::K3, sequence),
        Objective { clip_dual: Some(1.04), aggregation: Aggregation::TokenMean, importance: token, ..sequence },
        Objective { aggregation: Aggregation::Constant(7.0), importance: whole, ..with_kl(KlEstimator::K2, sequence) },
        Objective { aggregation: Aggregation::TokenMean, ..with_kl(KlEstimator::K3Ratio, cispo) },
        Objective { clip_low: 0.2, importance: token, ..cispo },
        Objective { importance: whole, ..with_kl(KlEstimator::K3, cispo) },
    ]
}

/// Which of the numbers a token gets.
#[derive(Clone, Copy)]
enum Of {
    Old,
    Reference,
    Importance,
}

/// A number for a token, the same on every rank. The old policy lies so that the ratios of the first and the fourth answer are
/// above 1 as a whole, beyond every bound.
fn noise(of: Of, answer: usize, token: usize) -> f64 {
    let (turn, most, drift) = match of {
        Of::Old => (0, 0.3, [-0.09, 0.0, 0.0, -0.1, 0.0][answer]),
        Of::Reference => (5, 0.5, 0.0),
        Of::Importance => (3, 1.0, 0.0),
    };
    let steps = [0.9, -0.35, 0.1, -1.0, 0.6, -0.05, 0.3];
    most * steps[(3 * answer + 2 * token + turn) % 7] + drift
}

/// Tensors of one answer, [trained tokens] each; only `logprobs` has a graph.
struct Plain {
    logprobs: Tensor,
    old: Tensor,
    reference: Tensor,
    importance: Tensor,
    advantage: f64,
}

/// The loss of each trained token, straight from the papers' formulas.
fn token_losses(answer: &Plain, terms: &Objective) -> Tensor {
    let Plain { logprobs, old, reference, importance, advantage } = answer;
    let ratio = (logprobs - old).exp();
    let (least, most) = (1.0 - terms.clip_low, 1.0 + terms.clip_high);
    let bounded = |ratio: &Tensor| ratio.clamp(least, most);
    let clipped = |ratio: &Tensor| {
        let smaller = Tensor::stack(&[ratio * *advantage, bounded(ratio) * *advantage], 0).amin(0, false);
        match terms.clip_dual {
            Some(dual) if *advantage < 0.0 => {
                Tensor::stack(&[smaller.shallow_clone(), smaller.full_like(dual * advantage)], 0).amax(0, false)
            }
            _ => smaller,
        }
    };
    let gain = match terms.loss {
        Loss::Grpo => clipped(&ratio),
        // The geometric mean of the ratios, as one number for the answer.
        Loss::Gspo => {
            let log_ratio = logprobs.sum(Kind::Double) - old.sum(Kind::Double);
            clipped(&(log_ratio / float(from_dim(old.size()[0]))).exp()).expand([old.size()[0]], false)
        }
        Loss::Cispo => bounded(&ratio).detach() * logprobs * *advantage,
    };
    let estimate = match terms.kl_estimator {
        KlEstimator::K1 => logprobs - reference,
        KlEstimator::K2 => (logprobs - reference).pow_tensor_scalar(2) / 2.0,
        KlEstimator::K3 => (reference - logprobs).expm1() - reference + logprobs,
        KlEstimator::K3Ratio => ((reference - logprobs).expm1() - reference + logprobs) * ratio,
    };
    estimate * terms.kl_coef - gain * importance
}

pub(crate) fn as_autograd(world: &mut World) {
    let model = Model::random(&config("qwen3", &json!({})), Kind::Double);
    let mut group = Group::random(31, 61, 30, &[9, 2, 1, 12, 7]);
    group.masks[3] = Some((0..12).map(|token| token % 3 != 1).collect());
    // The second answer was cut off and is masked: it is in no denominator.
    group.advantages[1] = None;
    for (turn, objective) in objectives().into_iter().enumerate() {
        let tail = [1, u64::MAX, 0][turn % 3].min(from_index(group.prompt_ids.len()));
        compare(world, &model, &group, How { tail, micro_block: 16, ..PLAIN }, &objective);
    }
}

/// Distances of the old and the reference policy from the scores of each answer's tokens, nats, and importance weights.
struct Numbers {
    old: Vec<Vec<f64>>,
    reference: Vec<Vec<f64>>,
    importance: Vec<Vec<f64>>,
}

impl Numbers {
    fn new(group: &Group, rule: Importance) -> Numbers {
        let tokens = |of: Of, index: usize| -> Vec<f64> {
            (0..group.answers[index].len()).map(|token| noise(of, index, token)).collect()
        };
        let all = |of: Of| (0..group.answers.len()).map(|index| tokens(of, index)).collect::<Vec<_>>();
        let weigh = |numbers: Vec<f64>| match rule {
            Importance::Sequence { .. } | Importance::SequenceMask { .. } => {
                vec![rule.bounded(numbers[0].exp()); numbers.len()]
            }
            rule => numbers.into_iter().map(|number| rule.bounded(number.exp())).collect(),
        };
        let importance = all(Of::Importance).into_iter().map(weigh).collect();
        Numbers { old: all(Of::Old), reference: all(Of::Reference), importance }
    }
}

fn tensor(numbers: &[f64]) -> Tensor {
    Tensor::from_slice(numbers).to_device(device())
}

/// Paged and conventional step against the formulas above.
fn compare(world: &World, model: &Model, group: &Group, how: How, objective: &Objective) {
    let numbers = Numbers::new(group, objective.importance);
    let answers = trained(group, objective.aggregation);
    let whole = conventional::Group {
        prompt_ids: &group.prompt_ids,
        answers: &group.answers,
        tail: Tokens(how.tail),
        temperature: HEAD.temperature,
    };
    let logprobs = |index| whole.logprobs(&*model.decoder, &model.adapters, index);
    let with_graph: Vec<Tensor> = (0..answers.len()).map(logprobs).collect();
    let target = |(index, answer): (usize, &TrainedAnswer)| {
        let scored = with_graph[index].detach();
        let importance = tensor(&numbers.importance[index]);
        Target {
            reference: &scored + tensor(&numbers.reference[index]),
            importance: (objective.importance != Importance::Ratio).then_some(importance),
            ..Target::new(answer, scored + tensor(&numbers.old[index]))
        }
    };
    let targets: Vec<Target> = answers.iter().enumerate().map(target).collect();
    let mut loss = 0.0;
    for ((logprobs, answer), target) in with_graph.iter().zip(&answers).zip(&targets) {
        let total = answer_loss(logprobs, answer, target, objective);
        if total.requires_grad() {
            total.backward();
        }
        loss += total.double_value(&[]);
    }
    let expected = own(&model.adapters);
    let judge = |found: &[Tensor], found_loss: f64, what: &str| {
        let Distance { worst, worst_tensor, .. } = distance(&model.adapters, found, &expected);
        assert!(worst <= LIMIT, "{what}, {objective:?}, tail {}: {worst_tensor} is {worst:.1e} off", how.tail);
        assert!((found_loss - loss).abs() <= LIMIT, "{what}, {objective:?}: loss {found_loss} for {loss}");
    };
    // The conventional schedule knows no ranks.
    if world.all.size() == 1 {
        let found = whole.backward(&*model.decoder, &model.adapters, &targets, objective);
        judge(&own(&model.adapters), found, "conventional");
    }
    let replayed = paged(world, model, group, how, objective, &numbers);
    judge(reduced(world, &model.adapters).gradients(), sum_number(&world.cp, replayed.loss), "paged");
    let all = |count: u64| world.cp.gather_numbers(count).iter().sum::<u64>();
    let stats = replayed.stats;
    assert!(all(stats.clipped_low + stats.clipped_high) > 0, "{objective:?}: a clip acts");
    assert_eq!(all(stats.clipped_dual) > 0, objective.clip_dual.is_some(), "{objective:?}");
    assert_eq!(all(stats.tokens), 9 + 1 + 8 + 7, "the masked answer is not counted");
}

/// Loss of one answer by the formulas; nothing of an answer that takes no part.
fn answer_loss(logprobs: &Tensor, answer: &TrainedAnswer, target: &Target, objective: &Objective) -> Tensor {
    let Some(advantage) = answer.advantage else { return Tensor::zeros([], (Kind::Double, device())) };
    let all = vec![true; answer.ids.len()];
    let mask = answer.mask.as_ref().unwrap_or(&all);
    let kept: Vec<i64> = (0i64..).zip(mask).filter_map(|(at, on)| on.then_some(at)).collect();
    let of = |x: &Tensor| x.index_select(0, &Tensor::from_slice(&kept).to_device(device()));
    let plain = Plain {
        importance: target.importance.as_ref().map_or_else(|| of(&target.old.ones_like()), of),
        old: of(&target.old),
        reference: of(&target.reference),
        logprobs: of(logprobs),
        advantage,
    };
    token_losses(&plain, objective).sum(Kind::Double) * answer.weight
}

/// The paged step against log-probabilities at the given distances from its own scores.
fn paged(world: &World, model: &Model, group: &Group, how: How, objective: &Objective, numbers: &Numbers) -> Replayed {
    let ledger = Ledger::default();
    let paged = Transaction { objective: *objective, ..transaction(world, model, how, &ledger) };
    let scored = run(paged.score(&group.prompt_ids, None, group.answers.clone(), &mut observer(world)));
    let placed = &scored.group;
    // This rank's part of numbers of all tokens: of its rows, and of the first token where it has it.
    let deal = |numbers: &[Vec<f64>]| -> Vec<Logprobs> {
        let part = |(index, own): (usize, &Logprobs)| Logprobs {
            rows: tensor(&placed.own_tokens(&placed.answers[index], world.cp.rank(), &numbers[index])),
            first: own.first.as_ref().map(|_| tensor(&numbers[index][..1])),
        };
        scored.scores.0.iter().enumerate().map(part).collect()
    };
    let away = |numbers: &[Vec<f64>]| {
        let add = |(own, by): (&Logprobs, Logprobs)| Logprobs {
            rows: &own.rows + by.rows,
            first: own.first.as_ref().zip(by.first).map(|(own, by)| own + by),
        };
        Scores(scored.scores.0.iter().zip(deal(numbers)).map(add).collect())
    };
    let frozen = FrozenScores {
        old: away(&numbers.old),
        reference: Some(away(&numbers.reference)),
        importance: (objective.importance != Importance::Ratio).then(|| Scores(deal(&numbers.importance))),
        choices: RefCell::default(),
    };
    let answers = trained(group, objective.aggregation);
    let (captured, frozen) = (Some(scored.captured), Some(Rc::new(frozen)));
    run(paged.train(&group.prompt_ids, captured, &answers, frozen, &mut observer(world))).replayed
}

/// The answers as a batch of their own: denominators are of those that take part.
fn trained(group: &Group, aggregation: Aggregation) -> Vec<TrainedAnswer> {
    let tokens = |index: usize| -> f64 {
        let masked = group.masks[index].as_ref().map(|mask| mask.iter().filter(|on| **on).count());
        float(from_index(masked.unwrap_or(group.answers[index].len())))
    };
    let takes_part = || (0..group.answers.len()).filter(|&index| group.advantages[index].is_some());
    let (count, total) = (float(from_index(takes_part().count())), takes_part().map(tokens).sum::<f64>());
    let weight = |index: usize| match aggregation {
        Aggregation::SequenceMean => 1.0 / (count * tokens(index)),
        Aggregation::TokenMean => 1.0 / total,
        Aggregation::Constant(divisor) => 1.0 / (count * divisor),
    };
    let answer = |index: usize| TrainedAnswer {
        ids: group.answers[index].clone(),
        mask: group.masks[index].clone(),
        given: None,
        advantage: group.advantages[index],
        weight: weight(index),
    };
    (0..group.answers.len()).map(answer).collect()
}

/// The ratio of a sequence to its own scores is exactly 1, wherever its tokens lie.
pub(crate) fn first_ratio(world: &mut World) {
    let model = Model::random(&config("qwen3", &json!({})), Kind::Float);
    let group = Group::random(8, 61, 40, &[9, 2, 1, 5]);
    let ledger = Ledger::default();
    let objective = Objective { loss: Loss::Gspo, clip_low: 3e-4, clip_high: 4e-4, ..Objective::DEFAULT };
    let transaction = Transaction { objective, ..transaction(world, &model, PLAIN, &ledger) };
    let answers = group.trained(&group.batch());
    let done = run(transaction.train(&group.prompt_ids, None, &answers, None, &mut observer(world)));
    let ratio = done.replayed.ratio;
    assert!(ratio.is_none_or(|range| range == Range::at(1.0)), "{ratio:?}");
    assert!(reduced(world, &model.adapters).norm() > 0.0);
}
