//! One update over `dp_size × grad_accum` groups, from prompts to the optimizer.
//!
//! Ranks of different prompts meet three times in a turn: before rewards, in them, and behind the replay. A stop that comes
//! in the middle is agreed on there, so that no rank waits in a collective that another has left.

use std::time::Instant;

use super::patience::Patience;
use super::rewards::{self, Told};
use super::round::{Answer, Frozen, Place, Round};
use super::tally::Tally;
use super::{Session, whole};
use crate::data::Group;
use crate::model::lora::Adapters;
use crate::prompt::handoff::{Captured, PlacedGroup, Scores};
use crate::report::{Reporter, Seconds, Step};
use crate::runtime::failure::{Failure, Phase};
use crate::runtime::units::{Tokens, from_index};
use crate::step::objective;
use crate::step::replay::ReplayTargets;
use crate::step::{capture, finalize, replay, rollout, score};
use crate::tensor::gpu;
use crate::world::World;

/// What an update writes to beside the adapters.
pub(super) struct Desk<'a> {
    pub(super) reporter: &'a mut Reporter,
    pub(super) tally: &'a mut Tally,
    pub(super) patience: &'a Patience,
    /// Whether the update fails on all ranks for want of rewards: what was learnt before is worth keeping.
    pub(super) unrewarded: &'a mut bool,
}

/// A group's answers, and the captured prompt if they were drawn from it.
struct Answered {
    answers: Vec<Answer>,
    captured: Option<Captured>,
    /// Log-probabilities of the tokens when they were drawn.
    drawn: Vec<Vec<f64>>,
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
    let tally = &mut *desk.tally;
    world.tracker().enter(Phase::Finalize);
    let divisor = round.counts.divisor(session.terms.aggregation);
    let local = finalize::divided(finalize::take(&session.adapters), divisor);
    let summed =
        tally.clock.time("finalize", || finalize::run(&world.all, local, &session.adapters, session.max_grad_norm));
    let reduced = world.agree(summed)?;
    let numbers = tally.batch_numbers(world, divisor);
    if !numbers.loss.is_finite() {
        return world.agree(Err(finalize::Error::Number { what: "loss", value: numbers.loss }.into()));
    }
    world.tracker().enter(Phase::Update);
    let learning_rate = session.learning_rate(step);
    tally.clock.time("update", || session.optimizer.update(&mut session.adapters, &reduced, learning_rate));
    world.agree(finalize::check(&session.adapters, learning_rate))?;
    let seconds = Seconds { total: start.elapsed().as_secs_f64(), ..tally.step_seconds() };
    let groups = || round.places.iter().map(|place| session.data.group(place.index));
    let prompts: Vec<u64> = groups().map(|group| from_index(group.prompt_ids.len())).collect();
    let draws = session.sampler.is_some();
    let step = Step {
        step,
        gradient: session.gradient.to_string(),
        grad_norm: reduced.norm(),
        learning_rate,
        prompts: groups().map(|group| group.name.clone()).collect(),
        seconds,
        ..numbers.into_step(session.reference.is_some())
    };
    let step = round.numbers(step, &prompts, draws);
    if let Some(gap) = step.sampled_gap.filter(|&gap| gap > session.gap_warn || gap.is_nan()) {
        desk.reporter.line(&format!(
            "warning: a token was drawn with a log-probability that lies {gap:.1e} from its score, more than \
             rollout.gap_warn allows ({:.1e}): drawing and scoring do not compute the same policy",
            session.gap_warn
        ));
    }
    Ok(step)
}

/// This rank's groups, one after another: answered, scored and frozen in a round's first update, replayed in each.
fn all_groups(session: &Session, world: &World, desk: &mut Desk, round: &mut Round, step: u64) -> Result<(), Failure> {
    let turns = round.places.len() / world.dp_size;
    for turn in 0..turns {
        let place = round.places[turn * world.dp_size + world.dp_index];
        let name = &session.data.group(place.index).name;
        let at = turn + 1;
        desk.reporter.now(&format!("step {step}: prompt {at} of {turns} on this rank ({name})"));
        if round.made == 0 {
            first_turn(session, world, desk, round, (turn, step))?;
        } else {
            let again = again(session, world, &round.mine[turn], desk.tally);
            desk.patience.agree(world, again)?;
        }
    }
    Ok(())
}

/// A group's turn in the first update of its round.
fn first_turn(
    session: &Session,
    world: &World,
    desk: &mut Desk,
    round: &mut Round,
    (turn, step): (usize, u64),
) -> Result<(), Failure> {
    let side_by_side = turn * world.dp_size..(turn + 1) * world.dp_size;
    let place = round.places[side_by_side.start + world.dp_index];
    let answered = desk.patience.agree(world, answered(session, world, place, desk.tally))?;
    world.tracker().enter(Phase::Reward);
    let start = Instant::now();
    let groups: Vec<&Group> = round.places[side_by_side].iter().map(|place| session.data.group(place.index)).collect();
    let told = rewards::told(session, world, desk.patience, &groups, &answered.answers);
    *desk.unrewarded |= told.is_err();
    let told = told?;
    desk.tally.clock.add("reward", start.elapsed().as_secs_f64());
    for (told, group) in told.iter().zip(&groups) {
        let rewards = told.rewards();
        if session.tells_answers {
            desk.reporter.answers(&rewards::lines(step, group, told, &session.advantages(&rewards)))?;
        }
        round.know(told, session.leaves_nothing(&rewards));
    }
    let frozen = freeze(session, world, place, answered, &told[world.dp_index], desk.tally);
    round.mine.push(desk.patience.agree(world, frozen)?);
    Ok(())
}

/// A group's answers: those of the data set, or what the policy answers to the captured prompt.
fn answered(session: &Session, world: &World, place: Place, tally: &mut Tally) -> Result<Answered, Failure> {
    let group = session.data.group(place.index);
    let Some(sampler) = &session.sampler else {
        let answers = group.answers.iter().map(Answer::supplied).collect();
        return Ok(Answered { answers, captured: None, drawn: Vec::new() });
    };
    let longest = vec![vec![0; sampler.longest.index()]; sampler.answers];
    make_room(session, world, &session.work(&group.prompt_ids, &longest, world), tally)?;
    let work = session.work(&group.prompt_ids, &[], world);
    let captured = captured(session, world, &work, &session.adapters, tally)?;
    let drawn = draw(session, world, &work, &captured, place, tally)?;
    let logprobs = drawn.iter().map(|drawn| drawn.logprobs.clone()).collect();
    Ok(Answered { answers: drawn.into_iter().map(Answer::drawn).collect(), captured: Some(captured), drawn: logprobs })
}

/// The policy's answers to a captured prompt.
fn draw(
    session: &Session,
    world: &World,
    work: &PlacedGroup,
    captured: &Captured,
    place: Place,
    tally: &mut Tally,
) -> Result<Vec<rollout::SampledAnswer>, Failure> {
    world.tracker().enter(Phase::Rollout);
    let pass = session.pass(world, &session.adapters);
    let ask = session.ask(place.number);
    let drawn = tally.clock.time("rollout", || {
        let drawn = rollout::run(&pass, &session.head, &work.layout, captured, &ask, world.tracker())?;
        gpu::synchronize(session.decoder.device())?;
        Ok::<_, Failure>(drawn)
    })?;
    tally.drawn(&drawn);
    Ok(drawn)
}

/// Scores a group's answers for the whole round, and replays them for its first update.
fn freeze(
    session: &Session,
    world: &World,
    place: Place,
    answered: Answered,
    told: &Told,
    tally: &mut Tally,
) -> Result<Frozen, Failure> {
    let Answered { answers, captured: drawn_from, drawn } = answered;
    let rewards = told.rewards();
    let advantages = session.advantages(&rewards);
    let skipped = session.leaves_nothing(&rewards);
    let mut frozen = Frozen { place, answers, rewards, advantages, old: None, reference: None };
    tally.group(&frozen);
    if skipped {
        return Ok(frozen);
    }
    if !session.paged {
        whole::one_group(session, world, &frozen, tally)?;
        return Ok(frozen);
    }
    let work = session.frozen_work(&frozen, world);
    if drawn_from.is_none() {
        make_room(session, world, &work, tally)?;
    }
    // Only one captured prompt is held at a time: where there is a reference policy, the policy captures again behind it.
    let mut drawn_from = drawn_from;
    if let Some(reference) = &session.reference {
        drawn_from = None;
        let work = session.work_without_tail(&session.data.group(place.index).prompt_ids, &frozen.ids(), world);
        let captured = captured(session, world, &work, reference, tally)?;
        frozen.reference = Some(scored(session, world, &work, &captured, reference, tally)?);
    }
    let captured = match drawn_from {
        Some(captured) => captured,
        None => captured(session, world, &work, &session.adapters, tally)?,
    };
    let old = scored(session, world, &work, &captured, &session.adapters, tally)?;
    for (index, drawn) in drawn.iter().enumerate() {
        let scored = super::round::whole_answer(&old.0[index], index, &work, world);
        tally.gap(rollout::gap(drawn, &tch::Tensor::from_slice(&scored)));
    }
    frozen.old = Some(old);
    replayed(session, world, &work, &captured, &frozen, tally)?;
    Ok(frozen)
}

/// A frozen group in a further update: captured under the adapters as they are now, and replayed.
fn again(session: &Session, world: &World, frozen: &Frozen, tally: &mut Tally) -> Result<(), Failure> {
    tally.group(frozen);
    if frozen.old.is_none() {
        return Ok(());
    }
    let work = session.frozen_work(frozen, world);
    make_room(session, world, &work, tally)?;
    let captured = captured(session, world, &work, &session.adapters, tally)?;
    replayed(session, world, &work, &captured, frozen, tally)
}

fn make_room(session: &Session, world: &World, work: &PlacedGroup, tally: &mut Tally) -> Result<(), Failure> {
    world.tracker().enter(Phase::Capture);
    let pass = session.pass(world, &session.adapters);
    tally.clock.time("pinning", || capture::make_room(&pass, work, session.keeping))
}

/// Gradients add up in the adapters.
fn replayed(
    session: &Session,
    world: &World,
    work: &PlacedGroup,
    captured: &Captured,
    frozen: &Frozen,
    tally: &mut Tally,
) -> Result<(), Failure> {
    let Some(old) = &frozen.old else { return Ok(()) };
    let aggregation = session.terms.aggregation;
    let weights: Vec<f64> = frozen.answers.iter().map(|answer| aggregation.share(answer.trained())).collect();
    let goal = ReplayTargets {
        old,
        reference: frozen.reference.as_ref(),
        advantages: &frozen.advantages,
        weights: &weights,
        terms: &session.terms,
    };
    world.tracker().enter(Phase::Replay);
    let pass = session.pass(world, &session.adapters);
    let done = replay::run(&pass, &session.head, work, captured, goal, world.tracker())?;
    session.count_gradients(world);
    tally.replayed(&done);
    Ok(())
}

fn captured(
    session: &Session,
    world: &World,
    work: &PlacedGroup,
    adapters: &Adapters,
    tally: &mut Tally,
) -> Result<Captured, Failure> {
    world.tracker().enter(Phase::Capture);
    let pass = session.pass(world, adapters);
    let captured = tally.clock.time("capture", || {
        let captured = capture::run(&pass, work, session.keeping, world.tracker())?;
        // A phase's seconds are those until it is done, not until it has been asked for.
        gpu::synchronize(session.decoder.device())?;
        Ok::<_, Failure>(captured)
    })?;
    tally.captured(work, &captured, session)?;
    Ok(captured)
}

fn scored(
    session: &Session,
    world: &World,
    work: &PlacedGroup,
    captured: &Captured,
    adapters: &Adapters,
    tally: &mut Tally,
) -> Result<Scores, Failure> {
    world.tracker().enter(Phase::Score);
    let pass = session.pass(world, adapters);
    tally.clock.time("score", || {
        let scores = score::run(&pass, &session.head, work, captured, world.tracker())?;
        gpu::synchronize(session.decoder.device())?;
        Ok(scores)
    })
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

    /// What is drawn for the group of this number.
    fn ask(&self, number: u64) -> rollout::SampleRequest<'_> {
        let sampler = self.sampler.as_ref().expect("answers are drawn only where there is a sampler");
        sampler.ask(sampler.stream.part(number))
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
    /// What is drawn with this noise.
    pub(super) fn ask(&self, stream: rollout::Stream) -> rollout::SampleRequest<'_> {
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
