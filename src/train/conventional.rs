//! `memory.prompt_no_grad = false`: a group on the conventional schedule, the built-in comparison.
//!
//! Whole sequences under autograd with activation checkpointing, one answer at a time, on one rank a prompt. There are no
//! pages, so the receipt has losses, seconds and adapters only.

use tch::Tensor;

use super::round::FrozenGroup;
use super::session::{Policy, Session};
use crate::model::lora::Adapters;
use crate::runtime::failure::{Failure, Phase};
use crate::runtime::units::{Tokens, from_index};
use crate::step::conventional::{Group, Target};
use crate::step::importance;
use crate::step::observer::Observer;

/// Scores and trains one group; its gradient adds up in the adapters. Returns the group's loss before the batch's denominator.
pub(super) fn train_group(session: &Session, frozen: &FrozenGroup, observer: &mut Observer) -> Result<f64, Failure> {
    let decoder = &*session.model.decoder;
    let Policy { adapters, reference, .. } = &session.policy;
    let objective = session.objective();
    let prompt_ids = &*session.data.train.prompt_ids(frozen.place.index)?;
    let prompt_tokens = Tokens(from_index(prompt_ids.len()));
    let answers = frozen.ids();
    let temperature = session.head().temperature;
    let group = Group { prompt_ids, answers: &answers, tail: prompt_tokens, temperature };
    let score = |adapters: &Adapters, index| group.score(decoder, adapters, index);
    let target = |index: usize| {
        let scored = score(adapters, index);
        let reference = reference.as_ref().map_or_else(|| scored.shallow_clone(), |reference| score(reference, index));
        let advantage = frozen.advantages[index];
        let answer = &frozen.answers[index];
        // Weight 0 leaves nothing of an answer without a reward.
        let weight = advantage.map_or(0.0, |_| objective.aggregation.share(answer.trained_tokens()));
        let numbers = |mask: &Vec<bool>| {
            let numbers: Vec<f32> = mask.iter().map(|&trained| f32::from(u8::from(trained))).collect();
            Tensor::from_slice(&numbers).to_device(scored.device())
        };
        let trained = answer.mask.as_ref().map(numbers);
        let missing = vec![None; answer.ids.len()];
        let given = importance::fill(&scored, answer.given_logprobs.as_ref().unwrap_or(&missing));
        let log_weight = importance::log_weight(&scored, &given, trained.as_ref());
        let (old, importance) = importance::split(objective.importance, &scored, &given, log_weight);
        Target { trained, reference, importance, advantage: advantage.unwrap_or(0.0), old, weight }
    };
    let targets: Vec<Target> = observer.host_phase(Phase::Score, || (0..answers.len()).map(target).collect());
    let replay = || group.backward_checkpointed(decoder, adapters, &targets, &objective);
    Ok(observer.host_phase(Phase::Replay, replay)?)
}
