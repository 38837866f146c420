//! `memory.prompt_no_grad = false`: a group on the conventional schedule, the built-in comparison.
//!
//! Whole sequences under autograd with activation checkpointing, one answer at a time, on one rank a prompt. No pages, so
//! nothing of the paged schedule's receipt but losses, seconds and adapters.

use super::Session;
use super::round::Frozen;
use tch::Tensor;

use crate::model::lora::Adapters;
use crate::runtime::failure::{Failure, Phase};
use crate::step::conventional::{Group, Target};
use crate::step::observer::Observer;

/// Scores and trains one group; its gradient adds up in the adapters. Returns the group's loss.
pub(super) fn one_group(session: &Session, frozen: &Frozen, observer: &mut Observer) -> Result<f64, Failure> {
    let prompt_ids = &session.data.group(frozen.place.index).prompt_ids;
    let prompt = crate::runtime::units::Tokens(crate::runtime::units::from_index(prompt_ids.len()));
    let answers = frozen.ids();
    let whole = Group { prompt_ids, answers: &answers, tail: prompt, temperature: session.head.temperature };
    let targets = observer.host_phase(Phase::Score, || {
        let scored = |adapters: &Adapters, index| whole.score(&*session.decoder, adapters, index);
        let target = |index: usize| {
            let old = scored(&session.adapters, index);
            let reference = session.reference.as_ref().map(|reference| scored(reference, index));
            // An answer without a reward takes no part: weight 0 leaves nothing of it.
            let scored = frozen.advantages[index];
            let answer = &frozen.answers[index];
            let weight = scored.map_or(0.0, |_| session.terms.aggregation.share(answer.trained()));
            let of = |mask: &Vec<bool>| mask.iter().map(|&trained| f32::from(u8::from(trained))).collect::<Vec<f32>>();
            let trained = answer.mask.as_ref().map(|mask| Tensor::from_slice(&of(mask)).to_device(old.device()));
            Target {
                trained,
                reference: reference.unwrap_or_else(|| old.shallow_clone()),
                advantage: scored.unwrap_or(0.0),
                old,
                weight,
            }
        };
        (0..answers.len()).map(target).collect::<Vec<Target>>()
    });
    let loss = observer.host_phase(Phase::Replay, || {
        whole.backward_checkpointed(&*session.decoder, &session.adapters, &targets, &session.terms)
    })?;
    Ok(loss)
}
