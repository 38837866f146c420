//! One update over `dp_size × grad_accum` groups, from prompts to the optimizer.
//!
//! Ranks of different prompts meet three times in a turn: before rewards, in them, and after the transaction. A stop that
//! comes in the middle is settled there, so that no rank waits in a collective that another rank has left.

use std::time::Instant;

use tch::Tensor;

use super::answer::{Answer, GroupPlace};
use super::metrics::{UpdateMetrics, report_seconds};
use super::outcome::Interruption;
use super::rewards;
use super::round::{FrozenGroup, Round};
use super::round_state::gather_logprobs;
use super::session::Session;
use super::stop::StopPolicy;
use super::whole;
use crate::data::Group;
use crate::prompt::handoff::ReducedGrads;
use crate::report::{Reporter, Seconds, Step};
use crate::runtime::failure::{Failure, Phase};
use crate::runtime::units::from_index;
use crate::step::observer::Observer;
use crate::step::rollout::SampledAnswer;
use crate::step::transaction::{Outcome, Trained, Verdict};
use crate::step::{finalize, rollout};
use crate::world::World;

/// What follows an update and decides on it.
pub(super) struct UpdateContext<'a> {
    pub(super) reporter: &'a mut Reporter,
    pub(super) observer: &'a mut Observer,
    pub(super) stop: &'a StopPolicy,
}

/// An update that was made.
pub(super) struct Update {
    pub(super) step: Step,
    /// Seconds in which host memory was pinned on this rank.
    pub(super) pinning_s: f64,
}

/// Makes update `step` of the groups in `round`; all ranks agree on it.
///
/// # Errors
/// When the update is dropped, answers cannot be scored, or a phase fails.
pub(super) fn update(
    session: &mut Session,
    world: &World,
    context: &mut UpdateContext,
    round: &mut Round,
    step: u64,
) -> Result<Update, Interruption> {
    let start = Instant::now();
    let UpdateContext { reporter, observer, stop } = context;
    let metrics = UpdateMetrics::default();
    let metrics = Turns { session, world, reporter, stop, round, step, metrics }.run(observer)?;
    require_rewards(session, world, round, step)?;
    let divisor = round.counts.divisor(session.objective().aggregation);
    let gradients = finalize(session, world, observer, divisor)?;
    let metrics = metrics.reduce(world);
    require_finite(world, metrics.loss / divisor)?;
    let learning_rate = session.policy.schedule.at(step);
    optimize(session, world, observer, &gradients, learning_rate)?;
    let spent = observer.take_seconds();
    let seconds = Seconds { total: start.elapsed().as_secs_f64(), ..report_seconds(&spent) };
    let groups = || round.places.iter().map(|place| session.data.train.group(place.index));
    let prompt_tokens: Vec<u64> = groups().map(|group| from_index(group.prompt_ids.len())).collect();
    let numbers = Step {
        step,
        gradient: session.config().grpo.gradient.to_string(),
        grad_norm: gradients.norm(),
        learning_rate,
        prompts: groups().map(|group| group.name.clone()).collect(),
        seconds,
        ..metrics.describe(divisor, session.policy.reference.is_some())
    };
    let numbers = round.describe(numbers, &prompt_tokens, session.samples());
    warn_of_gap(session, reporter, &numbers);
    Ok(Update { step: numbers, pinning_s: spent.pinning })
}

/// The groups of an update on this rank, one turn after another; gradients add up in the adapters.
struct Turns<'a> {
    session: &'a Session,
    world: &'a World,
    reporter: &'a mut Reporter,
    stop: &'a StopPolicy,
    round: &'a mut Round,
    step: u64,
    metrics: UpdateMetrics,
}

impl Turns<'_> {
    fn run(&mut self, observer: &mut Observer) -> Result<UpdateMetrics, Interruption> {
        let turns = self.round.places.len() / self.world.dp_size;
        for turn in 0..turns {
            let name = &self.session.data.train.group(self.own_place(turn).index).name;
            let line = format!("step {}: prompt {} of {turns} on this rank ({name})", self.step, turn + 1);
            self.reporter.now(&line);
            if self.round.made == 0 {
                self.first_update(turn, observer)?;
            } else {
                self.further_update(turn, observer)?;
            }
        }
        Ok(self.metrics)
    }

    /// This prompt group's group in a turn.
    fn own_place(&self, turn: usize) -> GroupPlace {
        self.round.places[turn * self.world.dp_size + self.world.dp_index]
    }

    /// A group in the first update of its round: answered, rewarded, scored (frozen for the round) and replayed.
    fn first_update(&mut self, turn: usize, observer: &mut Observer) -> Result<(), Interruption> {
        let (session, world, stop) = (self.session, self.world, self.stop);
        let place = self.own_place(turn);
        if !session.config().memory.prompt_no_grad {
            return self.conventional_update(turn, observer);
        }
        let prompt_ids = &session.data.train.group(place.index).prompt_ids;
        let request = session.sample_request(place.number);
        let mut sampled_logprobs: Vec<Vec<f64>> = Vec::new();
        let reward = |observer: &mut Observer, sampled: Result<Vec<SampledAnswer>, Failure>| {
            let sampled = stop.settle(world, sampled)?;
            sampled_logprobs = sampled.iter().map(|answer| answer.logprobs.clone()).collect();
            self.reward(turn, sampled, observer)
        };
        let outcome = session.transaction(world).run(prompt_ids, request.as_ref(), observer, reward);
        if let Outcome::Trained(trained) = stop.settle(world, outcome)? {
            for (index, sampled) in sampled_logprobs.iter().enumerate() {
                let scored = gather_logprobs(&trained.scores.old.0[index], index, &trained.group, world);
                self.metrics.add_gap(rollout::gap(sampled, &Tensor::from_slice(&scored)));
            }
            self.round.mine[turn].scores = Some(trained.scores.clone());
            self.add_trained(&trained);
        }
        Ok(())
    }

    /// A group whose prompt is no page but a part of whole sequences.
    fn conventional_update(&mut self, turn: usize, observer: &mut Observer) -> Result<(), Interruption> {
        let loss = match self.reward(turn, Vec::new(), observer)? {
            Verdict::Skip => Ok(0.0),
            Verdict::Train(_) | Verdict::Score(_) => whole::train_group(self.session, &self.round.mine[turn], observer),
        };
        self.metrics.loss += self.stop.settle(self.world, loss)?;
        self.session.count_gradients(self.world);
        Ok(())
    }

    /// Rewards the answers of all groups of a turn, and freezes this rank's group. Without `sampled` answers they come with
    /// the data.
    fn reward(
        &mut self,
        turn: usize,
        sampled: Vec<SampledAnswer>,
        observer: &mut Observer,
    ) -> Result<Verdict, Interruption> {
        let (session, world) = (self.session, self.world);
        let place = self.own_place(turn);
        self.metrics.add_sampled(&sampled);
        let answers: Vec<Answer> = if session.samples() {
            sampled.into_iter().map(Answer::sampled).collect()
        } else {
            session.data.train.group(place.index).answers.iter().map(Answer::from_data).collect()
        };
        let side_by_side = &self.round.places[turn * world.dp_size..(turn + 1) * world.dp_size];
        let groups: Vec<&Group> = side_by_side.iter().map(|place| session.data.train.group(place.index)).collect();
        let reward_groups = || rewards::reward_groups(session, world, self.stop, &groups, &answers);
        let rewarded = observer.host_phase(Phase::Reward, reward_groups)?;
        for (rewarded, group) in rewarded.iter().zip(&groups) {
            let lines = rewards::answer_lines(session, self.step, group, rewarded);
            self.reporter.answers(&lines).map_err(Failure::from)?;
            self.round.add(rewarded, session.has_no_gradient(&rewarded.values()));
        }
        let rewards = rewarded[world.dp_index].values();
        let advantages = session.advantages(&rewards);
        let skipped = session.has_no_gradient(&rewards);
        let frozen = FrozenGroup { place, answers, rewards, advantages, scores: None };
        let answers = frozen.trained_answers(session.objective().aggregation);
        self.round.mine.push(frozen);
        Ok(if skipped { Verdict::Skip } else { Verdict::Train(answers) })
    }

    /// A group in a further update of its round: captured under the adapters as they are now, and replayed.
    fn further_update(&mut self, turn: usize, observer: &mut Observer) -> Result<(), Interruption> {
        let session = self.session;
        let frozen = &self.round.mine[turn];
        let trained = match &frozen.scores {
            None => Ok(None),
            Some(scores) => {
                let prompt_ids = &session.data.train.group(frozen.place.index).prompt_ids;
                let answers = frozen.trained_answers(session.objective().aggregation);
                let transaction = session.transaction(self.world);
                transaction.train(prompt_ids, None, &answers, Some(scores.clone()), observer).map(Some)
            }
        };
        if let Some(trained) = self.stop.settle(self.world, trained)? {
            self.add_trained(&trained);
        }
        Ok(())
    }

    fn add_trained(&mut self, trained: &Trained) {
        self.session.count_gradients(self.world);
        self.metrics.add_replay(&trained.replayed);
    }
}

/// All ranks agree on whether enough answers have a reward; a round asks once.
fn require_rewards(session: &Session, world: &World, round: &Round, step: u64) -> Result<(), Interruption> {
    if round.made > 0 {
        return Ok(());
    }
    let enough = round.check_rewards(session.config().reward.missing_share_max, step);
    world.agree(enough.map_err(Failure::from)).map_err(|failure| Interruption::NoRewards { failure })
}

/// Divides this rank's gradients by the batch's divisor, sums them over all ranks, and clips them.
fn finalize(session: &Session, world: &World, observer: &mut Observer, divisor: f64) -> Result<ReducedGrads, Failure> {
    let adapters = &session.policy.adapters;
    let reduced = observer.host_phase(Phase::Finalize, || {
        let local = finalize::divided(finalize::take(adapters), divisor);
        finalize::run(&world.all, local, adapters, session.config().optimizer.max_grad_norm)
    });
    world.agree(reduced)
}

fn require_finite(world: &World, loss: f64) -> Result<(), Failure> {
    let finite = if loss.is_finite() { Ok(()) } else { Err(finalize::Error::Number { what: "loss", value: loss }) };
    world.agree(finite.map_err(Failure::from))
}

/// The optimizer's step; all ranks agree that it has left finite adapters.
fn optimize(
    session: &mut Session,
    world: &World,
    observer: &mut Observer,
    gradients: &ReducedGrads,
    learning_rate: f64,
) -> Result<(), Failure> {
    let policy = &mut session.policy;
    observer.host_phase(Phase::Update, || policy.optimizer.update(&mut policy.adapters, gradients, learning_rate));
    world.agree(finalize::check(&policy.adapters, learning_rate))
}

fn warn_of_gap(session: &Session, reporter: &Reporter, numbers: &Step) {
    let gap_warn = session.gap_warn();
    if let Some(gap) = numbers.sampled_gap.filter(|&gap| gap > gap_warn || gap.is_nan()) {
        reporter.line(&format!(
            "warning: a token was sampled with a log-probability that lies {gap:.1e} from its score, more than \
             rollout.gap_warn allows ({gap_warn:.1e}): sampling and scoring do not compute the same policy"
        ));
    }
}
