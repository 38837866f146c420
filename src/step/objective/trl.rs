//! Loss and gradient against those of TRL's own code on one random batch, which `scripts/trl_losses.py` has written.

use serde_json::{Map, Value};
use tch::{Kind, Tensor};

use super::*;
use crate::config::KlEstimator;
use crate::runtime::units::{float, from_index};

const BATCH: &str = include_str!("../../../tests/trl_losses/losses.json");
/// Rounding only: both sides are float64.
const LIMIT: f64 = 1e-14;

struct Answer {
    logprobs: Tensor,
    old: Tensor,
    reference: Tensor,
    drawn: Tensor,
    advantage: Option<f64>,
    tokens: u64,
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

fn answers(batch: &Value, masks: bool) -> Vec<Answer> {
    let truncated = batch["truncated"].as_u64().unwrap();
    let advantages = numbers(&batch["advantages"]);
    let answer = |(index, &advantage): (usize, &f64)| {
        let of = |key: &str| Tensor::from_slice(&numbers(&batch[key][index]));
        Answer {
            logprobs: of("logprobs"),
            old: of("old"),
            reference: of("ref"),
            drawn: of("drawn"),
            advantage: (!masks || from_index(index) != truncated).then_some(advantage),
            tokens: from_index(numbers(&batch["old"][index]).len()),
        }
    };
    advantages.iter().enumerate().map(answer).collect()
}

fn objective(ours: &Map<String, Value>, batch: &Value) -> Objective {
    let word = |key: &str| ours.get(key).and_then(Value::as_str).unwrap_or("default");
    let number = |key: &str, default: f64| ours.get(key).and_then(Value::as_f64).unwrap_or(default);
    let most = batch["weight_max"].as_f64().unwrap();
    Objective {
        loss: match word("loss") {
            "gspo" => Loss::Gspo,
            "cispo" => Loss::Cispo,
            _ => Loss::Grpo,
        },
        clip_low: number("clip_low", 0.2),
        clip_high: number("clip_high", 0.2),
        clip_dual: ours.get("clip_dual").and_then(Value::as_f64),
        kl_coef: number("kl_coef", 0.0),
        kl_estimator: if word("kl_estimator") == "k3_ratio" { KlEstimator::K3Ratio } else { KlEstimator::K3 },
        aggregation: match word("aggregation") {
            "token_mean" => Aggregation::TokenMean,
            "constant" => Aggregation::Constant(batch["longest"].as_f64().unwrap()),
            _ => Aggregation::SequenceMean,
        },
        importance: match word("importance") {
            "token" => Importance::Token { most },
            "sequence" => Importance::Sequence { most },
            _ => Importance::Ratio,
        },
    }
}

/// Loss, and the gradient of each answer's tokens; zeros for an answer that takes no part.
fn ours(answers: &[Answer], terms: &Objective) -> (f64, Vec<Tensor>) {
    let batch = Batch::of(answers.iter().map(|a| Counted { tokens: a.tokens, scored: a.advantage.is_some() }));
    let (mut loss, mut gradients) = (0.0, Vec::new());
    for answer in answers {
        let Answer { logprobs, old, reference, drawn, advantage, tokens: count } = answer;
        let Some(advantage) = *advantage else {
            gradients.push(logprobs.zeros_like());
            continue;
        };
        let sum = |x: &Tensor| x.sum(Kind::Double).double_value(&[]);
        let importance = match terms.importance {
            Importance::Ratio => None,
            rule @ (Importance::Token { .. } | Importance::TokenMask { .. }) => {
                Some(rule.all_bounded(&(old - drawn).exp()))
            }
            rule => Some(old.full_like(rule.bounded(sum(&(old - drawn)).exp()))),
        };
        let means = SequenceMeans {
            log_ratio: sum(&(logprobs - old)) / float(*count),
            importance: importance.as_ref().map_or(1.0, |weights| sum(weights) / float(*count)),
        };
        let given = AnswerTokens {
            logprobs,
            old,
            reference: Some(reference),
            importance: importance.as_ref(),
            advantage,
            weight: batch.weight(terms.aggregation, *count),
            trained: None,
            means: Some(means),
        };
        let added = tokens(&given, terms);
        loss += added.loss;
        gradients.push(added.dlogprobs);
    }
    (loss, gradients)
}

#[test]
fn losses_and_gradients_are_those_of_trl_in_every_mode_that_both_have() {
    let batch: Value = serde_json::from_str(BATCH).unwrap();
    let mut worst_of: Vec<(&str, f64)> = Vec::new();
    for mode in batch["modes"].as_array().unwrap() {
        let name = mode["name"].as_str().unwrap();
        let keys = mode["longstraw"].as_object().unwrap();
        let masks = keys.contains_key("mask_truncated");
        let (loss, gradients) = ours(&answers(&batch, masks), &objective(keys, &batch));
        // TRL counts a masked answer in the mean over answers, and not in the mean over tokens.
        let factor = if name == "mask, grpo" { 3.0 / 4.0 } else { 1.0 };
        let mut worst = (loss * factor - mode["loss"].as_f64().unwrap()).abs();
        for (found, expected) in gradients.iter().zip(mode["gradient"].as_array().unwrap()) {
            let off = (found * factor - Tensor::from_slice(&numbers(expected))).abs().max().double_value(&[]);
            worst = worst.max(off);
        }
        worst_of.push((name, worst));
    }
    let (apart, same): (Vec<_>, Vec<_>) = worst_of.into_iter().partition(|(name, _)| *name == DIFFERENT);
    assert!(same.len() == 15 && same.iter().all(|(_, worst)| *worst <= LIMIT), "{same:?}");
    assert!(apart.len() == 1 && apart[0].1 > 1e-3, "TRL multiplies k3 by the sequence's ratio there: {apart:?}");
}

/// The one mode that differs: TRL takes the ratio of the sequence for the divergence, longstraw that of the token.
const DIFFERENT: &str = "sequence level, beta, bias correction";
