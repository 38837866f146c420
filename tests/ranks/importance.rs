//! Log-probabilities that came with the answers: ratio and importance weights against plain autograd, with the weights
//! computed number by number.

use longstraw::runtime::memory::Ledger;
use longstraw::runtime::units::{Tokens, from_index};
use longstraw::step::conventional::{self, Target};
use longstraw::step::extremes::Range;
use longstraw::step::objective::{Importance, Objective};
use longstraw::step::replay::TrainedAnswer;
use longstraw::step::transaction::Transaction;
use longstraw::tools::parity::distance::Distance;
use longstraw::world::World;
use longstraw::world::exchange::sum_number;
use serde_json::json;
use tch::{Kind, Tensor};

use crate::fixture::{Group, HEAD, How, Model, PLAIN, config, distance, observer, own, reduced, run, transaction};

/// Rounding only: both sides are float64.
const LIMIT: f64 = 1e-9;

/// How far the drawing policy lay from the scored one, nats; a token in four has no log-probability.
fn offset(answer: usize, token: usize) -> Option<f64> {
    let steps = [0.4, -0.7, 0.05, -0.2, 0.9, -0.05, 0.25];
    (token % 4 != 3).then(|| steps[(3 * answer + 2 * token) % 7])
}

/// A weight, or 0 where it lies outside.
fn within(weight: f64, least: f64, most: f64) -> f64 {
    if weight < least || weight > most { 0.0 } else { weight }
}

/// Old log-probabilities and importance weights of one answer, from its scores, one token at a time.
fn expected(rule: Importance, scored: &[f64], given: &[Option<f64>], mask: Option<&Vec<bool>>) -> [Vec<f64>; 2] {
    let given: Vec<f64> = given.iter().zip(scored).map(|(given, scored)| given.unwrap_or(*scored)).collect();
    let is_trained = |token: usize| mask.is_none_or(|mask| mask[token]);
    let sum: f64 = (0..scored.len()).filter(|&token| is_trained(token)).map(|token| scored[token] - given[token]).sum();
    let weight = |token: usize| match rule {
        Importance::Ratio => 1.0,
        Importance::Token { most } => (scored[token] - given[token]).exp().min(most),
        Importance::Sequence { most } => sum.exp().min(most),
        Importance::TokenMask { least, most } => within((scored[token] - given[token]).exp(), least, most),
        Importance::SequenceMask { least, most } => within(sum.exp(), least, most),
    };
    let weights = (0..scored.len()).map(weight).collect();
    [if rule == Importance::Ratio { given } else { scored.to_vec() }, weights]
}

pub(crate) fn weights(world: &mut World) {
    let model = Model::random(&config("qwen3", &json!({})), Kind::Double);
    let mut group = Group::random(12, 61, 65, &[9, 2, 1, 12, 7]);
    group.masks[3] = Some((0..12).map(|token| token % 3 != 1).collect());
    let prompt = Tokens(from_index(group.prompt_ids.len()));
    for tail in [1, u64::MAX] {
        let how = How { tail: tail.min(prompt.0), ..PLAIN };
        let whole = conventional::Group {
            prompt_ids: &group.prompt_ids,
            answers: &group.answers,
            tail: Tokens(how.tail),
            temperature: HEAD.temperature,
        };
        let score = |index| tch::no_grad(|| whole.logprobs(&*model.decoder, &model.adapters, index)).detach();
        let scored: Vec<Vec<f64>> =
            (0..group.answers.len()).map(|index| Vec::try_from(score(index)).expect("numbers")).collect();
        let given = |answer: usize| -> Vec<Option<f64>> {
            scored[answer].iter().enumerate().map(|(token, logprob)| Some(logprob - offset(answer, token)?)).collect()
        };
        let mut answers: Vec<TrainedAnswer> = group.trained(&group.batch());
        for (index, answer) in answers.iter_mut().enumerate() {
            // The third answer came without log-probabilities.
            answer.given = (index != 2).then(|| given(index));
        }
        let rules = [
            Importance::Ratio,
            Importance::Token { most: 1.3 },
            Importance::Sequence { most: 2.0 },
            Importance::TokenMask { least: 0.6, most: 1.3 },
            Importance::SequenceMask { least: 0.1, most: 2.0 },
        ];
        // A mask changes the weights alone, so one tail is enough for it.
        for &rule in &rules[..if tail == 1 { rules.len() } else { 3 }] {
            let objective = Objective { importance: rule, ..Objective::DEFAULT };
            let ledger = Ledger::default();
            let paged = Transaction { objective, ..transaction(world, &model, how, &ledger) };
            let trained = run(paged.train(&group.prompt_ids, None, &answers, None, &mut observer(world)));
            let found = reduced(world, &model.adapters);
            let target = |(index, answer): (usize, &TrainedAnswer)| {
                let missing = vec![None; answer.ids.len()];
                let given = answer.given.as_ref().unwrap_or(&missing);
                let [old, weights] = expected(rule, &scored[index], given, answer.mask.as_ref());
                let tensor = |numbers: &[f64]| Tensor::from_slice(numbers).to_device(crate::fixture::device());
                Target { importance: Some(tensor(&weights)), ..Target::new(answer, tensor(&old)) }
            };
            let targets: Vec<Target> = answers.iter().enumerate().map(target).collect();
            let loss = whole.backward(&*model.decoder, &model.adapters, &targets, &objective);
            let judged = own(&model.adapters);
            let what = format!("{rule:?}, tail {tail}");
            let Distance { worst, worst_tensor, .. } = distance(&model.adapters, found.gradients(), &judged);
            assert!(worst <= LIMIT, "{what}: {worst_tensor} is {worst:.1e} off");
            let paged_loss = sum_number(&world.cp, trained.replayed.loss);
            assert!((paged_loss - loss).abs() <= LIMIT, "{what}: loss {paged_loss} for {loss}");
            let stats = trained.replayed.stats;
            let clipped: u64 = world.cp.gather_numbers(stats.clipped_low + stats.clipped_high).iter().sum();
            let ratio = trained.replayed.ratio;
            if rule == Importance::Ratio {
                assert!(clipped > 0, "{what}: ratios from e^-0.7 to e^0.9 are clipped at 0.8 and 1.2");
                assert!(ratio.is_none_or(|range| range != Range::at(1.0)), "{what}: {ratio:?}");
            } else {
                assert_eq!(clipped, 0, "{what}: the ratio is to the scored policy");
                assert!(ratio.is_none_or(|range| range == Range::at(1.0)), "{what}: {ratio:?}");
                let capped: u64 = world.cp.gather_numbers(stats.importance_capped).iter().sum();
                assert!(capped > 0 && sum_number(&world.cp, stats.importance) > 0.0, "{what}");
            }
        }
    }
}
