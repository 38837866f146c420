//! Held-out evaluation: how much more probable the right answer is than the wrong ones.

use super::Session;
use crate::exchange::sum_number;
use crate::failure::{Failure, Phase};
use crate::report::{HeldOut, Reporter};
use crate::units::from_index;
use crate::world::World;
use crate::{capture, score};

/// Margin and accuracy over the held-out groups, the same on every rank; `None` without held-out data.
pub(super) fn held_out(session: &Session, world: &World, reporter: &mut Reporter) -> Result<Option<HeldOut>, Failure> {
    let Some(data) = &session.held_out else { return Ok(None) };
    let (mut margin, mut right) = (0.0, 0.0);
    for index in 0..data.len() {
        if index % world.dp_size != world.dp_index {
            continue;
        }
        world.board().enter(Phase::Evaluate);
        reporter.now(format!("held-out prompt {} of {}", index + 1, data.len()));
        let group = data.group(index);
        let answers: Vec<Vec<i64>> = group.answers.iter().map(|answer| answer.ids.clone()).collect();
        let work = session.work(&group.prompt_ids, &answers, world);
        let pass = session.pass(world, &session.adapters);
        let captured = capture::run(&pass, &work, session.keeping, world.board())?;
        let scores = score::run(&pass, &session.head, &work, &captured, world.board())?;
        let logprobs: Vec<f64> = scores.0.iter().map(|one| sum_number(&world.cp, local_sum(one))).collect();
        let rewards = group.answers.iter().map(|answer| answer.reward.unwrap_or(0.0));
        let (apart, best) = margin_of(&logprobs, &rewards.collect::<Vec<f64>>());
        // Every rank of a prompt group has the same number; one of them counts it.
        if world.cp.rank().0 == 0 {
            margin += apart;
            right += f64::from(u8::from(best));
        }
    }
    let prompts = f64::from(u32::try_from(from_index(data.len())).unwrap_or(u32::MAX));
    let (margin, right) = (sum_number(&world.all, margin), sum_number(&world.all, right));
    Ok(Some(HeldOut { margin: margin / prompts, accuracy: right / prompts, prompts: data.len() }))
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
    let count = f64::from(u32::try_from(others.len()).unwrap_or(1)).max(1.0);
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
