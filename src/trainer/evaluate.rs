//! Held-out evaluation: how much more probable the right answer is than the wrong ones.

use super::Session;
use super::patience::Patience;
use crate::data::Dataset;
use crate::exchange::sum_number;
use crate::failure::{Failure, Phase};
use crate::report::{HeldOut, Reporter};
use crate::units::{float, from_index};
use crate::world::World;
use crate::{capture, finalize, objective, score};

/// Margin and accuracy over the held-out groups, the same on every rank; `None` without held-out data.
pub(super) fn held_out(
    session: &Session,
    world: &World,
    reporter: &mut Reporter,
    patience: &mut Patience,
) -> Result<Option<HeldOut>, Failure> {
    let Some(data) = &session.held_out else { return Ok(None) };
    // A group without a better and a worse answer has no margin; an answer without a reward is neither.
    let rewards = |index: usize| data.group(index).answers.iter().map(|answer| answer.reward).collect::<Vec<_>>();
    let told: Vec<usize> = (0..data.len()).filter(|&index| objective::spread(&rewards(index)).is_some()).collect();
    if told.len() < data.len() {
        reporter.line(&format!(
            "{} of {} held-out prompts have no better and worse answer",
            data.len() - told.len(),
            data.len()
        ));
    }
    if told.is_empty() {
        return Ok(None);
    }
    // How long it takes is not known, so a signal ends it; what it has measured is lost, and measured again.
    patience.step(None);
    let mut sums = (0.0, 0.0);
    let measured = prompts(session, world, reporter, data, &told, &mut sums);
    let measured = patience.agree(world, measured);
    patience.rest();
    measured?;
    let (margin, right) = (sum_number(&world.all, sums.0), sum_number(&world.all, sums.1));
    if !margin.is_finite() {
        return world.agree(Err(finalize::Error::Number { what: "held-out margin", value: margin }.into()));
    }
    let prompts = float(from_index(told.len()));
    Ok(Some(HeldOut { margin: margin / prompts, accuracy: right / prompts, prompts: told.len() }))
}

/// Adds margin and right answers of this prompt group's share of the groups in `told`, on one of its ranks.
fn prompts(
    session: &Session,
    world: &World,
    reporter: &mut Reporter,
    data: &Dataset,
    told: &[usize],
    (margin, right): &mut (f64, f64),
) -> Result<(), Failure> {
    for (count, &index) in told.iter().enumerate().filter(|(count, _)| count % world.dp_size == world.dp_index) {
        world.board().enter(Phase::Evaluate);
        reporter.now(&format!("held-out prompt {} of {}", count + 1, told.len()));
        let group = data.group(index);
        let scored = || group.answers.iter().filter_map(|answer| Some((answer, answer.reward?)));
        let answers: Vec<Vec<i64>> = scored().map(|(answer, _)| answer.ids.clone()).collect();
        let work = session.work_without_tail(&group.prompt_ids, &answers, world);
        let pass = session.pass(world, &session.adapters);
        let captured = capture::run(&pass, &work, session.keeping, world.board())?;
        let scores = score::run(&pass, &session.head, &work, &captured, world.board())?;
        let logprobs: Vec<f64> = scores.0.iter().map(|one| sum_number(&world.cp, local_sum(one))).collect();
        let rewards: Vec<f64> = scored().map(|(_, reward)| reward).collect();
        let (apart, best) = margin_of(&logprobs, &rewards);
        // Every rank of a prompt group has the same number; one of them counts it.
        if world.cp.rank().0 == 0 {
            *margin += apart;
            *right += f64::from(u8::from(best));
        }
    }
    Ok(())
}

/// Log-probability of this rank's tokens of an answer.
fn local_sum(logprobs: &crate::handoff::Logprobs) -> f64 {
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
