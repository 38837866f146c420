//! `memory.prompt_no_grad = false`: a group on the conventional schedule, the built-in comparison.
//!
//! Whole sequences under autograd with activation checkpointing, one answer at a time, on one rank a prompt. No pages, so
//! nothing of the paged schedule's receipt but losses, seconds and adapters.

use super::Session;
use super::groups::{Batch, Scored};
use super::tally::Tally;
use crate::conventional::{Group, Target};
use crate::failure::{Failure, Phase};
use crate::model::lora::Adapters;
use crate::world::World;

/// Scores one group and pulls it back; gradients add up in the adapters.
pub(super) fn one_group(
    session: &Session,
    world: &World,
    batch: &Batch,
    group: &Scored,
    tally: &mut Tally,
) -> Result<(), Failure> {
    let prompt = crate::units::Tokens(crate::units::from_index(group.prompt_ids.len()));
    let whole = Group {
        prompt_ids: &group.prompt_ids,
        answers: &group.answers,
        tail: prompt,
        temperature: session.head.temperature,
    };
    world.board().enter(Phase::Score);
    let targets = tally.clock.time("score", || {
        let scored = |adapters: &Adapters, index| whole.score(&*session.decoder, adapters, index);
        let target = |index: usize| {
            let old = scored(&session.adapters, index);
            let reference = session.reference.as_ref().map(|reference| scored(reference, index));
            // An answer without a reward takes no part: weight 0 leaves nothing of it.
            let scored = group.advantages[index];
            let weight = scored.map_or(0.0, |_| batch.weight(&session.terms, group.answers[index].len()));
            Target {
                reference: reference.unwrap_or_else(|| old.shallow_clone()),
                advantage: scored.unwrap_or(0.0),
                old,
                weight,
            }
        };
        (0..group.answers.len()).map(target).collect::<Vec<Target>>()
    });
    world.board().enter(Phase::Replay);
    let loss = tally.clock.time("replay", || {
        whole.backward_checkpointed(&*session.decoder, &session.adapters, &targets, &session.terms)
    })?;
    session.count_gradients(world);
    tally.conventional(loss, group);
    Ok(())
}
