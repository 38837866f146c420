//! A round in a checkpoint: whole and not by rank, so that the run may go on with another number of ranks.

use std::cell::RefCell;
use std::rc::Rc;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::{Kind, Tensor};

use super::answer::{Answer, GroupPlace};
use super::reuse::EarlierAdapters;
use super::round::{FrozenGroup, GroupSummary, Round};
use super::session::Session;
use crate::checkpoint;
use crate::prompt::handoff::{self, Logprobs, PlacedGroup, Scores};
use crate::runtime::units::Rank;
use crate::step::objective;
use crate::step::replay::FrozenScores;
use crate::tensor::accumulation;
use crate::world::World;
use crate::world::exchange::gather_rows;

/// What `state.json` holds of a round; its keys are those of earlier versions.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct RoundState {
    made: u64,
    #[serde(rename = "known")]
    summaries: Vec<GroupSummary>,
    counts: objective::Batch,
    groups: Vec<GroupState>,
    /// Version of the adapters that captured the prompts, where a further update reuses the capture; a part of the checkpoint's
    /// tensors are their values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    captured_version: Option<u64>,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct GroupState {
    place: GroupPlace,
    answers: Vec<Answer>,
    advantages: Vec<Option<f64>>,
    /// Log-probabilities of each answer's tokens.
    old: Option<Vec<Vec<f64>>>,
    reference: Option<Vec<Vec<f64>>>,
    /// Importance weights of each answer's tokens; none where an earlier version wrote the checkpoint.
    #[serde(default)]
    importance: Option<Vec<Vec<f64>>>,
}

/// The current round for `state.json`, the same on every rank; null between rounds. Every rank takes part.
pub(super) fn save(session: &Session, world: &World) -> Value {
    let Some(round) = &session.data.round else { return Value::Null };
    let mine: Vec<GroupState> = round.mine.iter().map(|frozen| save_group(frozen, session, world)).collect();
    // Every rank of a prompt has the same; the first one tells it.
    let sent = if world.cp.rank() == Rank(0) { mine } else { Vec::new() };
    let mut groups: Vec<GroupState> = world.gather(&sent).into_iter().flatten().collect();
    groups.sort_by_key(|group| group.place.number);
    let captured_version = round.earlier.as_ref().map(|earlier| earlier.version);
    let (made, summaries, counts) = (round.made, round.groups.clone(), round.counts);
    serde_json::json!(RoundState { made, summaries, counts, groups, captured_version })
}

/// Gathers the scores of a group from the ranks of its prompt.
fn save_group(frozen: &FrozenGroup, session: &Session, world: &World) -> GroupState {
    let placed = session.place_frozen(frozen, world);
    let gather = |scores: &Scores| -> Vec<Vec<f64>> {
        scores.0.iter().enumerate().map(|(index, own)| gather_logprobs(own, index, &placed, world)).collect()
    };
    GroupState {
        place: frozen.place,
        answers: frozen.answers.clone(),
        advantages: frozen.advantages.clone(),
        old: frozen.scores.as_ref().map(|scores| gather(&scores.old)),
        reference: frozen.scores.as_ref().and_then(|scores| scores.reference.as_ref()).map(gather),
        importance: frozen.scores.as_ref().and_then(|scores| scores.importance.as_ref()).map(gather),
    }
}

/// Log-probabilities of all tokens of the answer at `index`, on every rank of the prompt.
pub(super) fn gather_logprobs(own: &Logprobs, index: usize, placed: &PlacedGroup, world: &World) -> Vec<f64> {
    let first = own.first.as_ref().map_or_else(|| own.rows.narrow(0, 0, 0), Tensor::shallow_clone);
    let first = gather_rows(&world.cp, &first, &placed.layout.last_row_counts());
    let rows = gather_rows(&world.cp, &own.rows, &placed.answers[index].span.counts());
    let all = Tensor::cat(&[first, rows], 0).to_kind(Kind::Double);
    Vec::<f64>::try_from(all).unwrap_or_default()
}

/// The round of a checkpoint, dealt to these ranks; `None` where the checkpoint lies between rounds.
/// `captured`: the adapters of a reused capture; none without one.
pub(super) fn restore(
    value: Value,
    captured: &[Tensor],
    session: &Session,
    world: &World,
) -> Result<Option<Round>, checkpoint::Error> {
    if value.is_null() {
        return Ok(None);
    }
    let RoundState { made, summaries, counts, groups, captured_version } =
        serde_json::from_value(value).map_err(|source| checkpoint::Error::Round { reason: source.to_string() })?;
    if session.keeps_choices() && groups.iter().any(|group| group.old.is_some()) {
        let left = session.config().grpo.updates_per_group.saturating_sub(made);
        world.warn_user(&format!(
            "the checkpoint lies within a round, and the experts and keys chosen in sampling are not saved: the {left} updates \
             left of the round choose again, so ratio and KL of their tokens differ from those of a run that was not interrupted"
        ));
    }
    let side_by_side = world.dp_size;
    if groups.len() != summaries.len() || groups.is_empty() || !groups.len().is_multiple_of(side_by_side) {
        return Err(checkpoint::Error::OtherRanks { groups: groups.len(), side_by_side });
    }
    let places: Vec<GroupPlace> = groups.iter().map(|group| group.place).collect();
    let own = groups.into_iter().zip(&summaries).skip(world.dp_index).step_by(side_by_side);
    let mine = own.map(|(group, summary)| restore_group(group, summary, session, world)).collect();
    let cursor_before = session.data.cursor.clone();
    let earlier = captured_version.map(|version| Rc::new(EarlierAdapters::new(version, captured.iter(), world)));
    let (saved_s, measured_s) = (0.0, 0.0);
    Ok(Some(Round { places, made, mine, groups: summaries, counts, cursor_before, earlier, saved_s, measured_s }))
}

fn restore_group(group: GroupState, summary: &GroupSummary, session: &Session, world: &World) -> FrozenGroup {
    let GroupState { place, answers, advantages, old, reference, importance } = group;
    let rewards = summary.rewards.clone();
    let mut frozen = FrozenGroup { place, answers, rewards, advantages, scores: None, held: None };
    let placed = session.place_frozen(&frozen, world);
    let decoder = &session.model.decoder;
    let acc = accumulation(decoder.kind());
    let rank = world.cp.rank();
    let owns_last_row = rank == placed.layout.last_row_owner();
    let tensor = |values: Vec<f64>| Tensor::from_slice(&values).to_kind(acc).to_device(decoder.device());
    let deal_answer = |(values, answer): (Vec<f64>, &handoff::Answer)| {
        let labels = answer.span.of(rank).map(|piece| placed.layout.labels(piece));
        Logprobs {
            rows: tensor(labels.flat_map(|label| values[label].iter().copied()).collect()),
            first: owns_last_row.then(|| tensor(values[..1].to_vec())),
        }
    };
    let deal = |scores: Vec<Vec<f64>>| Scores(scores.into_iter().zip(&placed.answers).map(deal_answer).collect());
    let freeze = |old| FrozenScores {
        old: deal(old),
        reference: reference.map(deal),
        importance: importance.map(deal),
        choices: RefCell::default(),
    };
    frozen.scores = old.map(freeze).map(Rc::new);
    frozen
}
