//! Held-out evaluation: how much more probable the right answer is than the wrong ones, and what the policy's own answers
//! are worth.

use tch::{Kind, Tensor};

use super::answer::{Answer, RewardedGroup};
use super::outcome::Interruption;
use super::rewards;
use super::session::Session;
use super::stop_policy::StopPolicy;
use crate::config::Gradient;
use crate::data::{Dataset, Group};
use crate::prompt::handoff::Logprobs;
use crate::report::{HeldOut, Reporter};
use crate::runtime::failure::{Failure, Phase};
use crate::runtime::units::{Rank, Tokens, float, from_index};
use crate::step::observer::Observer;
use crate::step::transaction::{Outcome, Transaction, Verdict};
use crate::step::{finalize, objective};
use crate::world::World;
use crate::world::exchange::sum_number;

/// Sums over the prompts of this prompt group of ranks.
#[derive(Default)]
struct Sums {
    /// Sum of margins, nats, and how many right answers are the most probable; on one rank of a prompt.
    margin: f64,
    right: f64,
    /// Sum of rewards, and answers with and without one; the same on every rank of the world.
    reward: f64,
    rewarded: u64,
    missing: u64,
}

/// Margin and accuracy over the held-out groups that have better and worse answers, and mean reward of sampled answers over
/// all groups; the same on every rank. `None` without anything to measure.
pub(super) fn evaluate(
    session: &Session,
    world: &World,
    reporter: &mut Reporter,
    stop: &StopPolicy,
) -> Result<Option<HeldOut>, Interruption> {
    let Some(data) = &session.data.held_out else { return Ok(None) };
    let with_margin = (0..data.len()).filter(|&index| has_margin(data.group(index))).count();
    let samples = session.samples();
    if with_margin < data.len() && !samples {
        let without = data.len() - with_margin;
        reporter.line(&format!("{without} of {} held-out prompts have no better and worse answer", data.len()));
    }
    let wanted: Vec<usize> = (0..data.len()).filter(|&index| samples || has_margin(data.group(index))).collect();
    if wanted.is_empty() {
        return Ok(None);
    }
    // Its length is not known beforehand, so a signal drops it; a later run measures again.
    let sums = stop.droppable(None, || sum_over_prompts(session, world, reporter, stop, data, &wanted))?;
    let margin = sum_number(&world.all, sums.margin);
    let right = sum_number(&world.all, sums.right);
    if !margin.is_finite() {
        let failure = finalize::Error::Number { what: "held-out margin", value: margin };
        world.agree(Err(failure.into()))?;
    }
    if sums.missing > 0 {
        reporter.line(&format!(
            "warning: {} of {} held-out answers have no reward; the mean is that of the others, and two such means are of \
             different answers",
            sums.missing,
            sums.missing + sums.rewarded
        ));
    }
    let mean = |sum: f64, count: u64| (count > 0).then(|| sum / float(count));
    Ok(Some(HeldOut {
        margin: mean(margin, from_index(with_margin)),
        accuracy: mean(right, from_index(with_margin)),
        reward: mean(sums.reward, sums.rewarded),
        missing: sums.missing,
        prompts: wanted.len(),
    }))
}

/// Whether a group has a better and a worse answer; an answer without a reward is neither.
fn has_margin(group: &Group) -> bool {
    let rewards: Vec<Option<f64>> = group.answers.iter().map(|answer| answer.reward).collect();
    objective::spread(&rewards).is_some()
}

/// The wanted prompts, as many side by side as there are prompt groups of ranks. Every rank comes to every turn, also without
/// a prompt.
fn sum_over_prompts(
    session: &Session,
    world: &World,
    reporter: &mut Reporter,
    stop: &StopPolicy,
    data: &Dataset,
    wanted: &[usize],
) -> Result<Sums, Interruption> {
    let mut sums = Sums::default();
    for (turn, side_by_side) in wanted.chunks(world.dp_size).enumerate() {
        world.tracker().enter(Phase::Evaluate);
        let count = turn * world.dp_size + side_by_side.len();
        reporter.now(&format!("held-out prompt {count} of {}", wanted.len()));
        let own = side_by_side.get(world.dp_index);
        let answered = own.map_or(Ok(Vec::new()), |&index| evaluate_prompt(session, world, data, index, &mut sums));
        let answers = stop.settle(world, answered)?;
        if session.samples() {
            let groups: Vec<&Group> = side_by_side.iter().map(|&index| data.group(index)).collect();
            // Scoring has the deadlines of a phase of its own, here as in an update.
            world.tracker().enter(Phase::Reward);
            let rewarded = rewards::reward_groups(session, world, stop, &groups, &answers)?;
            for value in rewarded.iter().flat_map(RewardedGroup::values) {
                sums.reward += value.unwrap_or_default();
                sums.rewarded += u64::from(value.is_some());
                sums.missing += u64::from(value.is_none());
            }
        }
    }
    Ok(sums)
}

/// One prompt: adds its margin where it has one, and returns the policy's answers where the policy samples.
fn evaluate_prompt(
    session: &Session,
    world: &World,
    data: &Dataset,
    index: usize,
    sums: &mut Sums,
) -> Result<Vec<Answer>, Failure> {
    let group = data.group(index);
    let prompt_ids = data.prompt_ids(index)?;
    let known = || group.answers.iter().filter_map(|answer| Some((answer, answer.reward?)));
    let ids: Vec<Vec<i64>> = known().map(|(answer, _)| answer.ids.clone()).collect();
    let rewards: Vec<f64> = known().map(|(_, reward)| reward).collect();
    // Nothing is trained, so no prompt position carries gradient.
    let gradient = Gradient::Last(Tokens(0));
    let transaction = Transaction { gradient, pins_memory: false, ..session.transaction(world) };
    let mut observer = Observer::within(Phase::Evaluate, world.tracker(), session.model.decoder.device());
    let request = session.sample_held_out_request(index);
    let mut answers = Vec::new();
    let outcome = transaction.run(&prompt_ids, request.as_ref(), &mut observer, |_, sampled| {
        answers = sampled?.into_iter().map(Answer::sampled).collect();
        Ok::<_, Failure>(if has_margin(group) { Verdict::Score(ids) } else { Verdict::Skip })
    })?;
    if let Outcome::Scored(scored) = outcome {
        let logprobs: Vec<f64> = scored.scores.0.iter().map(|own| sum_number(&world.cp, sum_own(own))).collect();
        let Margin { nats, best_is_most_probable } = margin(&logprobs, &rewards);
        // Every rank of a prompt has the same numbers; one of them counts.
        if world.cp.rank() == Rank(0) {
            sums.margin += nats;
            sums.right += f64::from(u8::from(best_is_most_probable));
        }
    }
    Ok(answers)
}

/// Log-probability of this rank's tokens of an answer, nats.
fn sum_own(own: &Logprobs) -> f64 {
    let sum = |x: &Tensor| x.sum(Kind::Double).double_value(&[]);
    sum(&own.rows) + own.first.as_ref().map_or(0.0, sum)
}

/// The lead of the best-rewarded answer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Margin {
    /// Log-probability of that answer minus the mean of the others'.
    nats: f64,
    best_is_most_probable: bool,
}

fn margin(logprobs: &[f64], rewards: &[f64]) -> Margin {
    let best = (0..rewards.len()).max_by(|&one, &two| rewards[one].total_cmp(&rewards[two]).then(two.cmp(&one)));
    let Some(best) = best else { return Margin::default() };
    let others = logprobs.iter().enumerate().filter(|(index, _)| *index != best);
    let others: Vec<f64> = others.map(|(_, &logprob)| logprob).collect();
    let count = float(from_index(others.len())).max(1.0);
    let most = others.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    Margin { nats: logprobs[best] - others.iter().sum::<f64>() / count, best_is_most_probable: logprobs[best] > most }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_margin_is_the_right_answers_lead_over_the_mean_of_the_wrong_ones() {
        let expected = |nats, best_is_most_probable| Margin { nats, best_is_most_probable };
        assert_eq!(margin(&[-1.0, -4.0, -2.0], &[0.0, 0.0, 1.0]), expected(0.5, false));
        assert_eq!(margin(&[-1.0, -4.0, -2.0], &[1.0, 0.0, 0.0]), expected(2.0, true));
    }
}
