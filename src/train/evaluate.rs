//! Held-out evaluation: how much more probable the right answer is than the wrong ones, and what the policy's own answers
//! are worth.

use super::Session;
use super::patience::Patience;
use super::rewards;
use super::round::Answer;
use crate::config::Gradient;
use crate::data::{Dataset, Group};
use crate::report::{HeldOut, Reporter};
use crate::runtime::failure::{Failure, Phase};
use crate::runtime::units::{Tokens, float, from_index};
use crate::step::observer::Observer;
use crate::step::transaction::{Outcome, Transaction, Verdict};
use crate::step::{finalize, objective};
use crate::world::World;
use crate::world::exchange::sum_number;

/// The branch of the run's noise that held-out prompts have: no group of the run has this number.
const BRANCH: u64 = u64::MAX;

/// Sums over the prompts of this prompt group of ranks.
#[derive(Default)]
struct Sums {
    margin: f64,
    right: f64,
    /// Rewards, and how many; the same on every rank of the world.
    reward: f64,
    rewarded: u64,
    missing: u64,
}

/// Margin and accuracy over the held-out groups that have better and worse answers, and mean reward of drawn answers over
/// all, where answers are drawn; the same on every rank. `None` without anything to measure.
pub(super) fn held_out(
    session: &Session,
    world: &World,
    reporter: &mut Reporter,
    patience: &mut Patience,
) -> Result<Option<HeldOut>, Failure> {
    let Some(data) = &session.held_out else { return Ok(None) };
    // A group without a better and a worse answer has no margin; an answer without a reward is neither.
    let told = (0..data.len()).filter(|&index| has_margin(data.group(index))).count();
    let draws = session.sampler.is_some();
    if told < data.len() && !draws {
        reporter.line(&format!(
            "{} of {} held-out prompts have no better and worse answer",
            data.len() - told,
            data.len()
        ));
    }
    let wanted: Vec<usize> = (0..data.len()).filter(|&index| draws || has_margin(data.group(index))).collect();
    if wanted.is_empty() {
        return Ok(None);
    }
    // How long it takes is not known, so a signal ends it; what it has measured is lost, and measured again.
    patience.step(None);
    let mut sums = Sums::default();
    let measured = prompts(session, world, reporter, patience, (data, &wanted), &mut sums);
    patience.rest();
    measured?;
    let (margin, right) = (sum_number(&world.all, sums.margin), sum_number(&world.all, sums.right));
    if !margin.is_finite() {
        return world.agree(Err(finalize::Error::Number { what: "held-out margin", value: margin }.into()));
    }
    if sums.missing > 0 {
        let all = sums.missing + sums.rewarded;
        reporter.line(&format!(
            "warning: {} of {all} held-out answers have no reward; the mean is that of the others, and two such means are of \
             different answers",
            sums.missing
        ));
    }
    let mean = |sum: f64, count: u64| (count > 0).then(|| sum / float(count));
    Ok(Some(HeldOut {
        margin: mean(margin, from_index(told)),
        accuracy: mean(right, from_index(told)),
        reward: mean(sums.reward, sums.rewarded),
        missing: sums.missing,
        prompts: wanted.len(),
    }))
}

fn has_margin(group: &Group) -> bool {
    objective::spread(&group.answers.iter().map(|answer| answer.reward).collect::<Vec<_>>()).is_some()
}

/// The prompts that are wanted, as many side by side as there are prompt groups of ranks. Every rank comes to every turn,
/// also without a prompt.
fn prompts(
    session: &Session,
    world: &World,
    reporter: &mut Reporter,
    patience: &Patience,
    (data, wanted): (&Dataset, &[usize]),
    sums: &mut Sums,
) -> Result<(), Failure> {
    for (turn, side_by_side) in wanted.chunks(world.dp_size).enumerate() {
        world.tracker().enter(Phase::Evaluate);
        let count = turn * world.dp_size + side_by_side.len();
        reporter.now(&format!("held-out prompt {count} of {}", wanted.len()));
        let own = side_by_side.get(world.dp_index).map(|&index| (index, data.group(index)));
        let answered = own.map_or(Ok(Vec::new()), |(index, group)| one(session, world, index, group, sums));
        let answers = patience.agree(world, answered)?;
        if session.sampler.is_some() {
            let groups: Vec<&Group> = side_by_side.iter().map(|&index| data.group(index)).collect();
            // Scoring has the deadlines of a phase of its own, here as in an update.
            world.tracker().enter(Phase::Reward);
            let told = rewards::told(session, world, patience, &groups, &answers)?;
            for reward in told.iter().flat_map(rewards::Told::rewards) {
                sums.reward += reward.unwrap_or_default();
                sums.rewarded += u64::from(reward.is_some());
                sums.missing += u64::from(reward.is_none());
            }
        }
    }
    Ok(())
}

/// One prompt: adds its margin, and returns the policy's answers if it is to answer.
fn one(session: &Session, world: &World, index: usize, group: &Group, sums: &mut Sums) -> Result<Vec<Answer>, Failure> {
    let scored = || group.answers.iter().filter_map(|answer| Some((answer, answer.reward?)));
    let answers: Vec<Vec<i64>> = scored().map(|(answer, _)| answer.ids.clone()).collect();
    // Nothing is trained, so no prompt position carries gradient.
    let gradient = Gradient::Last(Tokens(0));
    let transaction = Transaction { gradient, pins_memory: false, ..session.transaction(world) };
    let mut observer = Observer::within(Phase::Evaluate, world.tracker(), session.decoder.device());
    let request = session.sampler.as_ref().map(|sampler| {
        let stream = sampler.stream.part(BRANCH).part(from_index(index));
        sampler.request(stream)
    });
    let mut sampled = Vec::new();
    let outcome = transaction.run(&group.prompt_ids, request.as_ref(), &mut observer, |_, answered| {
        sampled = answered?.into_iter().map(Answer::sampled).collect();
        Ok(if has_margin(group) { Verdict::Score(answers) } else { Verdict::Skip })
    })?;
    if let Outcome::Scored(outcome) = outcome {
        let logprobs: Vec<f64> = outcome.scores.0.iter().map(|one| sum_number(&world.cp, local_sum(one))).collect();
        let rewards: Vec<f64> = scored().map(|(_, reward)| reward).collect();
        let (apart, best) = margin_of(&logprobs, &rewards);
        // Every rank of a prompt group has the same number; one of them counts it.
        if world.cp.rank().0 == 0 {
            sums.margin += apart;
            sums.right += f64::from(u8::from(best));
        }
    }
    Ok(sampled)
}

/// Log-probability of this rank's tokens of an answer.
fn local_sum(logprobs: &crate::prompt::handoff::Logprobs) -> f64 {
    let sum = |x: &tch::Tensor| x.sum(tch::Kind::Double).double_value(&[]);
    sum(&logprobs.rows) + logprobs.first.as_ref().map_or(0.0, sum)
}

/// Log-probability of the best-rewarded answer minus the mean of the others', and whether it is the most probable.
fn margin_of(logprobs: &[f64], rewards: &[f64]) -> (f64, bool) {
    let best = (0..rewards.len()).max_by(|&one, &two| rewards[one].total_cmp(&rewards[two]).then(two.cmp(&one)));
    let Some(best) = best else { return (0.0, false) };
    let others: Vec<f64> =
        logprobs.iter().enumerate().filter(|(index, _)| *index != best).map(|(_, &logprob)| logprob).collect();
    let count = float(from_index(others.len())).max(1.0);
    let most = others.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    (logprobs[best] - others.iter().sum::<f64>() / count, logprobs[best] > most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_margin_is_the_right_answers_lead_over_the_mean_of_the_wrong_ones() {
        assert_eq!(margin_of(&[-1.0, -4.0, -2.0], &[0.0, 0.0, 1.0]), (0.5, false));
        assert_eq!(margin_of(&[-1.0, -4.0, -2.0], &[1.0, 0.0, 0.0]), (2.0, true));
    }
}
