//! Held-out evaluation: how much more probable the right answer is than the wrong ones, and what the policy's own answers
//! are worth.
//!
//! Nothing of it touches what updates are made of: noise follows from the seed and the prompt's index in its set, no tensor
//! records a gradient, and neither the position in the data nor the optimizer moves. All sets have the same noise, so the
//! numbers of a set depend on neither its name nor the other sets.

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::answer::{Answer, AnswerReward};
use super::calls;
use super::outcome::Interruption;
use super::rewards::{self, Asked};
use super::session::{HeldOutSet, Session};
use super::signal::has_margin;
use super::stop_policy::StopPolicy;
use crate::config::Gradient;
use crate::data::Group;
use crate::prompt::handoff::Logprobs;
use crate::report::{EvalAnswer, EvalLine, HeldOut, Reporter};
use crate::runtime::failure::{Failure, Phase};
use crate::runtime::units::{Rank, Tokens, as_index, float, from_index};
use crate::step::finalize;
use crate::step::observer::Observer;
use crate::step::rollout::CallCounts;
use crate::step::transaction::{Outcome, Transaction, Verdict};
use crate::world::World;
use crate::world::exchange::sum_number;

/// What an evaluation needs on every rank.
pub(super) struct Evaluator<'a> {
    pub(super) session: &'a Session,
    pub(super) world: &'a World,
    pub(super) reporter: &'a mut Reporter,
    pub(super) stop: &'a StopPolicy,
}

/// Indices of the prompts of a set that can show anything: all where the policy answers, else those with a margin.
pub(super) fn wanted(session: &Session, set: &HeldOutSet) -> Vec<usize> {
    let draws = session.draws_held_out();
    (0..set.data.len()).filter(|&index| draws || has_margin(set.data.group(index))).collect()
}

impl Evaluator<'_> {
    /// What a set shows; the same on every rank. `None` without anything to measure.
    pub(super) fn set(&mut self, set: &HeldOutSet) -> Result<Option<HeldOut>, Interruption> {
        let wanted = wanted(self.session, set);
        if wanted.is_empty() {
            return Ok(None);
        }
        let mut lines = Vec::new();
        let counts = self.prompts(set, &wanted, |more| {
            lines.extend(more);
            Ok(())
        })?;
        // Every rank has counted the same.
        let replied = check_calls(self.session, &set.name, &counts);
        self.world.agree(replied).map_err(|failure| Interruption::NoRewards { failure })?;
        let held_out = HeldOut::of(&lines);
        self.warn_of_missing(&set.name, &held_out);
        Ok(Some(held_out))
    }

    /// Says where answers have no reward.
    pub(super) fn warn_of_missing(&self, set: &str, held_out: &HeldOut) {
        let missing = held_out.missing;
        if missing > 0 {
            self.reporter.line(&format!(
                "warning: {missing} held-out answers of {set} have no reward; the mean is that of the others, and two such means \
                 are of different answers"
            ));
        }
    }

    /// Evaluates the prompts of a set at these indices, as many side by side as there are prompt groups of ranks, and gives
    /// `keep` what each turn has shown, in the order of `indices`, on every rank. Every rank comes to every turn, also without a
    /// prompt. Returns how the calls of these answers have ended.
    pub(super) fn prompts(
        &mut self,
        set: &HeldOutSet,
        indices: &[usize],
        mut keep: impl FnMut(Vec<EvalLine>) -> Result<(), Failure>,
    ) -> Result<CallCounts, Interruption> {
        let (session, world, stop) = (self.session, self.world, self.stop);
        let mut counts = CallCounts::default();
        for (turn, side_by_side) in indices.chunks(world.dp_size).enumerate() {
            world.tracker().enter(Phase::Evaluate);
            let count = turn * world.dp_size + side_by_side.len();
            self.reporter.now(&format!("held-out prompt {count} of {} of {}", indices.len(), set.name));
            let own = side_by_side.get(world.dp_index);
            let shown = own.map_or(Ok(Shown::default()), |&index| evaluate_prompt(session, world, set, index));
            let Shown { answers, margin } = stop.settle(world, shown)?;
            // Every rank of a prompt has the same margin; the first one gives it.
            let own = (world.cp.rank() == Rank(0)).then_some(GatheredMargin { margin });
            let margins = world.gather(&own).into_iter().flatten();
            let groups: Vec<Asked> = side_by_side.iter().map(|&index| Asked { data: &set.data, index }).collect();
            let mut lines: Vec<EvalLine> = side_by_side
                .iter()
                .zip(&groups)
                .zip(margins)
                .map(|((&index, group), GatheredMargin { margin })| line_of(set, index, group.group(), margin))
                .collect();
            if session.draws_held_out() {
                // Scoring has the deadlines of a phase of its own, here as in an update.
                world.tracker().enter(Phase::Reward);
                let rewarded = rewards::reward_groups(session, world, stop, &groups, &answers)?;
                for (line, group) in lines.iter_mut().zip(rewarded) {
                    counts.add(&group.calls());
                    let sampled = as_index(session.config().eval_samples());
                    let pairs = group.answers.iter().zip(&group.rewards).enumerate();
                    line.answers = pairs.map(|(at, (answer, reward))| drawn(at >= sampled, answer, reward)).collect();
                }
            }
            keep(lines)?;
        }
        if let Some(warning) = calls::warning(&counts, &answers_of(&set.name)) {
            self.reporter.line(&warning);
        }
        Ok(counts)
    }
}

/// A set with too large a share of calls without a reply is no measurement; `counts` are those of the whole set.
pub(super) fn check_calls(session: &Session, set: &str, counts: &CallCounts) -> Result<(), Failure> {
    Ok(calls::check(counts, session.config().tools.failed_share_max, &answers_of(set))?)
}

/// What messages call the answers of a set.
fn answers_of(set: &str) -> String {
    format!("held-out answers of {set}")
}

/// What a prompt shows on its ranks.
#[derive(Default)]
struct Shown {
    answers: Vec<Answer>,
    margin: Option<Margin>,
}

/// The margin of one prompt as ranks gather it; a prompt without better and worse answers has none.
#[derive(Deserialize, Serialize)]
struct GatheredMargin {
    margin: Option<Margin>,
}

fn line_of(set: &HeldOutSet, index: usize, group: &Group, margin: Option<Margin>) -> EvalLine {
    EvalLine {
        set: set.name.clone(),
        index,
        prompt: group.name.clone(),
        margin: margin.map(|margin| margin.nats),
        best_is_first: margin.map(|margin| margin.best_is_most_probable),
        answers: Vec::new(),
    }
}

fn drawn(greedy: bool, answer: &Answer, reward: &AnswerReward) -> EvalAnswer {
    EvalAnswer {
        greedy,
        text: reward.text.clone(),
        tokens: answer.tokens(),
        truncated: answer.truncated,
        logprob: answer.logprob,
        reward: reward.value,
        parts: reward.parts.clone(),
        failure: reward.missing.as_ref().map(|missing| format!("{}: {}", missing.kind, missing.words)),
        calls: answer.calls.clone(),
    }
}

/// One prompt: its margin where it has one, and the policy's answers where the policy gives some.
fn evaluate_prompt(session: &Session, world: &World, set: &HeldOutSet, index: usize) -> Result<Shown, Failure> {
    let group = set.data.group(index);
    let prompt_ids = set.data.prompt_ids(index)?;
    let known = || group.answers.iter().filter_map(|answer| Some((answer, answer.reward?)));
    let ids: Vec<Vec<i64>> = known().map(|(answer, _)| answer.ids.clone()).collect();
    let rewards: Vec<f64> = known().map(|(_, reward)| reward).collect();
    // Nothing is trained, so no prompt position carries gradient.
    let gradient = Gradient::Last(Tokens(0));
    let transaction = Transaction { gradient, pins_memory: false, ..session.transaction(world) };
    let mut observer = Observer::within(Phase::Evaluate, world.tracker(), session.model.decoder.device());
    let caller = session.caller(group);
    let request = session.sample_held_out_request(index, caller.as_ref());
    let mut answers = Vec::new();
    let outcome = transaction.run(&prompt_ids, request.as_ref(), &mut observer, |_, sampled| {
        answers = sampled?.into_iter().map(Answer::sampled).collect();
        Ok::<_, Failure>(if has_margin(group) { Verdict::Score(ids) } else { Verdict::Skip })
    })?;
    let Outcome::Scored(scored) = outcome else { return Ok(Shown { answers, margin: None }) };
    let logprobs: Vec<f64> = scored.scores.0.iter().map(|own| sum_number(&world.cp, sum_own(own))).collect();
    let margin = margin(&logprobs, &rewards);
    if !margin.nats.is_finite() {
        return Err(finalize::Error::Number { what: "held-out margin", value: margin.nats }.into());
    }
    Ok(Shown { answers, margin: Some(margin) })
}

/// Log-probability of this rank's tokens of an answer, nats.
fn sum_own(own: &Logprobs) -> f64 {
    let sum = |x: &Tensor| x.sum(Kind::Double).double_value(&[]);
    sum(&own.rows) + own.first.as_ref().map_or(0.0, sum)
}

/// The lead of the best-rewarded answer.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
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
