//! One update over `dp_size × grad_accum` groups, from prompts to the optimizer.
//!
//! Ranks of different prompts meet three times in a turn: before rewards, in them, and behind the replay. A stop that comes
//! in the middle is agreed on there, so that no rank waits in a collective that another has left.

use std::time::Instant;

use tch::Tensor;

use super::patience::Patience;
use super::rewards;
use super::round::{Answer, Frozen, Round};
use super::tally::Tally;
use super::{Session, whole};
use crate::data::Group;
use crate::report::{Reporter, Seconds, Step};
use crate::runtime::failure::{Failure, Phase};
use crate::runtime::units::{Tokens, from_index};
use crate::step::observer::Observer;
use crate::step::rollout::SampledAnswer;
use crate::step::transaction::{Outcome, Verdict};
use crate::step::{finalize, objective, rollout};
use crate::world::World;

/// What an update writes to beside the adapters.
pub(super) struct Desk<'a> {
    pub(super) reporter: &'a mut Reporter,
    pub(super) tally: &'a mut Tally,
    pub(super) observer: &'a mut Observer,
    pub(super) patience: &'a Patience,
    /// Whether the update fails on all ranks for want of rewards: what was learnt before is worth keeping.
    pub(super) unrewarded: &'a mut bool,
}

/// One update.
pub(super) fn one_step(
    session: &mut Session,
    world: &World,
    desk: &mut Desk,
    round: &mut Round,
    step: u64,
) -> Result<Step, Failure> {
    let start = Instant::now();
    all_groups(session, world, desk, round, step)?;
    if round.made == 0 {
        let enough = world.agree(round.enough(session.missing_share_max, step).map_err(Failure::from));
        *desk.unrewarded |= enough.is_err();
        enough?;
    }
    let divisor = round.counts.divisor(session.terms.aggregation);
    let summed = desk.observer.host_phase(Phase::Finalize, || {
        let local = finalize::divided(finalize::take(&session.adapters), divisor);
        finalize::run(&world.all, local, &session.adapters, session.max_grad_norm)
    });
    let reduced = world.agree(summed)?;
    let numbers = desk.tally.batch_numbers(world, divisor);
    if !numbers.loss.is_finite() {
        return world.agree(Err(finalize::Error::Number { what: "loss", value: numbers.loss }.into()));
    }
    let learning_rate = session.learning_rate(step);
    desk.observer.host_phase(Phase::Update, || {
        session.optimizer.update(&mut session.adapters, &reduced, learning_rate);
    });
    world.agree(finalize::check(&session.adapters, learning_rate))?;
    let spent = desk.tally.step_seconds(&desk.observer.take_seconds());
    let seconds = Seconds { total: start.elapsed().as_secs_f64(), ..spent };
    let groups = || round.places.iter().map(|place| session.data.group(place.index));
    let prompts: Vec<u64> = groups().map(|group| from_index(group.prompt_ids.len())).collect();
    let step = Step {
        step,
        gradient: session.gradient.to_string(),
        grad_norm: reduced.norm(),
        learning_rate,
        prompts: groups().map(|group| group.name.clone()).collect(),
        seconds,
        ..numbers.into_step(session.reference.is_some())
    };
    let step = round.numbers(step, &prompts, session.sampler.is_some());
    if let Some(gap) = step.sampled_gap.filter(|&gap| gap > session.gap_warn || gap.is_nan()) {
        desk.reporter.line(&format!(
            "warning: a token was sampled with a log-probability that lies {gap:.1e} from its score, more than \
             rollout.gap_warn allows ({:.1e}): sampling and scoring do not compute the same policy",
            session.gap_warn
        ));
    }
    Ok(step)
}

/// This rank's groups, one transaction after another; gradients add up in the adapters.
fn all_groups(session: &Session, world: &World, desk: &mut Desk, round: &mut Round, step: u64) -> Result<(), Failure> {
    let turns = round.places.len() / world.dp_size;
    for turn in 0..turns {
        let place = round.places[turn * world.dp_size + world.dp_index];
        let name = &session.data.group(place.index).name;
        let number = turn + 1;
        desk.reporter.now(&format!("step {step}: prompt {number} of {turns} on this rank ({name})"));
        if round.made == 0 {
            first_update(session, world, desk, round, turn, step)?;
        } else {
            let trained = further_update(session, world, &round.mine[turn], desk);
            desk.patience.agree(world, trained)?;
        }
    }
    Ok(())
}

/// A group in the first update of its round: its answers, rewards and scores are frozen for all of them.
fn first_update(
    session: &Session,
    world: &World,
    desk: &mut Desk,
    round: &mut Round,
    turn: usize,
    step: u64,
) -> Result<(), Failure> {
    let place = round.places[turn * world.dp_size + world.dp_index];
    let group = session.data.group(place.index);
    let Desk { reporter, tally, observer, patience, unrewarded } = desk;
    let mut sampled_logprobs: Vec<Vec<f64>> = Vec::new();
    let mut reward = |observer: &mut Observer, sampled: Result<Vec<SampledAnswer>, Failure>| {
        let sampled = patience.agree(world, sampled)?;
        tally.sampled(&sampled);
        sampled_logprobs = sampled.iter().map(|answer| answer.logprobs.clone()).collect();
        let answers: Vec<Answer> = match session.sampler {
            Some(_) => sampled.into_iter().map(Answer::sampled).collect(),
            None => group.answers.iter().map(Answer::supplied).collect(),
        };
        let side_by_side = &round.places[turn * world.dp_size..(turn + 1) * world.dp_size];
        let groups: Vec<&Group> = side_by_side.iter().map(|place| session.data.group(place.index)).collect();
        let told = observer.host_phase(Phase::Reward, || rewards::told(session, world, patience, &groups, &answers));
        **unrewarded |= told.is_err();
        let told = told?;
        for (told, group) in told.iter().zip(&groups) {
            let rewards = told.rewards();
            if session.tells_answers {
                reporter.answers(&rewards::lines(step, group, told, &session.advantages(&rewards)))?;
            }
            round.know(told, session.leaves_nothing(&rewards));
        }
        let rewards = told[world.dp_index].rewards();
        let advantages = session.advantages(&rewards);
        let skipped = session.leaves_nothing(&rewards);
        let frozen = Frozen { place, answers, rewards, advantages, scores: None };
        tally.group(&frozen);
        let answers = frozen.trained(session.terms.aggregation);
        round.mine.push(frozen);
        Ok(if skipped { Verdict::Skip } else { Verdict::Train(answers) })
    };
    if !session.paged {
        let loss = reward(observer, Ok(Vec::new())).and_then(|verdict| match verdict {
            Verdict::Skip => Ok(0.0),
            _ => whole::one_group(session, &round.mine[turn], observer),
        });
        tally.conventional(patience.agree(world, loss)?);
        session.count_gradients(world);
        return Ok(());
    }
    let request = session.sampler.as_ref().map(|sampler| sampler.request(sampler.stream.part(place.number)));
    let outcome = session.transaction(world).run(&group.prompt_ids, request.as_ref(), observer, reward);
    if let Outcome::Trained(trained) = patience.agree(world, outcome)? {
        session.count_gradients(world);
        for (index, sampled) in sampled_logprobs.iter().enumerate() {
            let scored = super::round::whole_answer(&trained.scores.old.0[index], index, &trained.group, world);
            tally.gap(rollout::gap(sampled, &Tensor::from_slice(&scored)));
        }
        tally.replayed(&trained.replayed);
        round.mine[turn].scores = Some(trained.scores);
    }
    Ok(())
}

/// A frozen group in a further update of its round: captured under the adapters as they are now, and replayed.
fn further_update(session: &Session, world: &World, frozen: &Frozen, desk: &mut Desk) -> Result<(), Failure> {
    desk.tally.group(frozen);
    let Some(scores) = &frozen.scores else { return Ok(()) };
    let prompt_ids = &session.data.group(frozen.place.index).prompt_ids;
    let answers = frozen.trained(session.terms.aggregation);
    let transaction = session.transaction(world);
    let trained = transaction.train(prompt_ids, None, &answers, Some(scores.clone()), desk.observer)?;
    session.count_gradients(world);
    desk.tally.replayed(&trained.replayed);
    Ok(())
}

impl Session {
    /// Advantages of a group under the run's rule.
    pub(super) fn advantages(&self, rewards: &[Option<f64>]) -> Vec<Option<f64>> {
        if self.advantage_is_reward { rewards.to_vec() } else { objective::advantages(rewards, self.normalize) }
    }

    /// Whether a group with these rewards has no gradient: all advantages are 0, and nothing else pulls.
    pub(super) fn leaves_nothing(&self, rewards: &[Option<f64>]) -> bool {
        self.reference.is_none() && self.advantages(rewards).iter().flatten().all(|&advantage| advantage == 0.0)
    }
}

/// How the policy answers.
pub(super) struct Sampler {
    /// Answers of a group.
    pub(super) answers: usize,
    /// Tokens of an answer, at most.
    pub(super) longest: Tokens,
    /// Tokens that end one.
    pub(super) ends: Vec<i64>,
    /// From which tokens.
    pub(super) sampling: rollout::Sampling,
    /// The run's noise.
    pub(super) stream: rollout::Stream,
    /// All layers' pages lie on the device meanwhile.
    pub(super) pages_on_device: bool,
}

impl Sampler {
    /// A group's request, with its own noise.
    pub(super) fn request(&self, stream: rollout::Stream) -> rollout::SampleRequest<'_> {
        rollout::SampleRequest {
            answers: self.answers,
            longest: self.longest,
            ends: &self.ends,
            sampling: self.sampling,
            stream,
            pages_on_device: self.pages_on_device,
        }
    }
}
