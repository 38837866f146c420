//! The groups of one update on one rank, a transaction each.
//!
//! Ranks of different prompts meet three times in a turn: before rewards, in them, and after the transaction. A stop that
//! comes in the middle is settled there, so that no rank waits in a collective that another rank has left.

use std::time::Instant;

use tch::Tensor;

use super::answer::{Answer, GroupPlace};
use super::conventional;
use super::metrics::UpdateMetrics;
use super::outcome::Interruption;
use super::reuse::{self, HeldPrompt};
use super::rewards::{self, Asked};
use super::round::{FrozenGroup, Round};
use super::round_state::gather_logprobs;
use super::session::Session;
use super::stop_policy::StopPolicy;
use crate::prompt::handoff::Captured;
use crate::report::Reporter;
use crate::runtime::failure::{Failure, Phase};
use crate::step::observer::Observer;
use crate::step::rollout::{self, DrawnChoices, SampledAnswer};
use crate::step::transaction::{Outcome, Trained, Verdict};
use crate::world::World;

/// The groups of an update on this rank, one turn after another; gradients add up in the adapters.
pub(super) struct Turns<'a> {
    pub(super) session: &'a Session,
    pub(super) world: &'a World,
    pub(super) reporter: &'a mut Reporter,
    pub(super) stop: &'a StopPolicy,
    pub(super) round: &'a mut Round,
    pub(super) step: u64,
    pub(super) metrics: UpdateMetrics,
}

impl Turns<'_> {
    pub(super) fn run(&mut self, observer: &mut Observer) -> Result<UpdateMetrics, Interruption> {
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
        let prompt_ids = &*session.data.train.prompt_ids(place.index).map_err(Failure::from)?;
        let caller = session.caller(session.data.train.group(place.index));
        let request = session.sample_request(place.number, caller.as_ref());
        let mut drawn: Vec<SampledAnswer> = Vec::new();
        let reward = |observer: &mut Observer, sampled: Result<Vec<SampledAnswer>, Failure>| {
            let sampled = stop.settle(world, sampled)?;
            drawn.clone_from(&sampled);
            self.reward(turn, sampled, observer)
        };
        let outcome = session.transaction(world).run(prompt_ids, request.as_ref(), observer, reward);
        if let Outcome::Trained(mut trained) = stop.settle(world, outcome)? {
            for (index, sampled) in drawn.iter().enumerate() {
                let scored = gather_logprobs(&trained.scores.old.0[index], index, &trained.group, world);
                let scored = Tensor::from_slice(&sampled.of_sampled(&scored));
                self.metrics.add_gap(rollout::gap(&sampled.logprobs, &scored));
            }
            self.metrics.add_choices(trained.changed);
            if session.config().grpo.updates_per_group > 1
                && request.is_some_and(|request| request.choices == DrawnChoices::Use)
            {
                trained.scores.choices.replace(Some(trained.choices.clone()));
            }
            self.round.mine[turn].scores = Some(trained.scores.clone());
            self.hold(turn, trained.captured.take(), observer.capture_s());
            self.add_trained(&trained);
        }
        Ok(())
    }

    /// Keeps a captured prompt where the next update reuses it.
    fn hold(&mut self, turn: usize, captured: Option<Captured>, capture_s: f64) {
        if reuse::leaves_pages(self.session.config(), self.round.made) {
            self.round.mine[turn].held = captured.map(|captured| HeldPrompt { captured, capture_s });
        }
    }

    /// A group whose prompt is no page but a part of whole sequences.
    fn conventional_update(&mut self, turn: usize, observer: &mut Observer) -> Result<(), Interruption> {
        let trains = !matches!(self.reward(turn, Vec::new(), observer)?, Verdict::Skip);
        let loss =
            if trains { conventional::train_group(self.session, &self.round.mine[turn], observer) } else { Ok(0.0) };
        self.metrics.loss += self.stop.settle(self.world, loss)?;
        if trains {
            self.session.count_gradients(self.world);
        }
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
        let data = &session.data.train;
        let groups: Vec<Asked> = side_by_side.iter().map(|place| Asked { data, index: place.index }).collect();
        let reward_groups = || rewards::reward_groups(session, world, self.stop, &groups, &answers);
        let rewarded = observer.host_phase(Phase::Reward, reward_groups)?;
        for (rewarded, group) in rewarded.iter().zip(&groups) {
            let lines = rewards::answer_lines(session, self.step, group.group(), rewarded);
            self.reporter.answers(&lines).map_err(Failure::from)?;
            let advantages = session.advantages(rewarded);
            self.round.add(rewarded, &advantages, session.has_no_gradient(&advantages));
        }
        let own = &rewarded[world.dp_index];
        let (rewards, advantages) = (own.values(), session.advantages(own));
        let skipped = session.has_no_gradient(&advantages);
        let frozen = FrozenGroup { place, answers, rewards, advantages, scores: None, held: None };
        let answers = frozen.trained_answers(session.objective().aggregation);
        self.round.mine.push(frozen);
        Ok(if skipped { Verdict::Skip } else { Verdict::Train(answers) })
    }

    /// A group in a further update of its round: captured under the adapters as they are now, or on the pages of an earlier
    /// update, and replayed.
    fn further_update(&mut self, turn: usize, observer: &mut Observer) -> Result<(), Interruption> {
        let trained = self.retrain(turn, observer);
        if let Some(trained) = self.stop.settle(self.world, trained)? {
            self.add_trained(&trained);
        }
        Ok(())
    }

    /// `None` for a group that is left out.
    fn retrain(&mut self, turn: usize, observer: &mut Observer) -> Result<Option<Trained>, Failure> {
        let (session, made) = (self.session, self.round.made);
        let frozen = &mut self.round.mine[turn];
        let Some(scores) = frozen.scores.clone() else { return Ok(None) };
        let held = frozen.held.take();
        let prompt_ids = &*session.data.train.prompt_ids(frozen.place.index)?;
        let (ids, answers) = (frozen.ids(), frozen.trained_answers(session.objective().aggregation));
        let transaction = session.transaction(self.world);
        if reuse::age(session.config(), made) == 0 {
            let mut trained = transaction.train(prompt_ids, None, &answers, Some(scores), observer)?;
            self.hold(turn, trained.captured.take(), observer.capture_s());
            return Ok(Some(trained));
        }
        let HeldPrompt { captured, capture_s } = if let Some(held) = held {
            self.round.saved_s += held.capture_s;
            held
        } else {
            let earlier = self.round.earlier.as_ref().expect("a reused capture comes with the adapters that made it");
            let (earlier, _held) = earlier.policy(&session.policy.adapters, self.world);
            let captured = transaction.capture_under(&earlier, prompt_ids, ids, observer)?;
            HeldPrompt { captured, capture_s: observer.capture_s() }
        };
        let mut trained = transaction.train_on_reused(prompt_ids, captured, &answers, scores, observer)?;
        let captured = trained.captured.take();
        if reuse::is_measured(session.config(), made, self.step) {
            // Two prompts are never held at one time.
            drop(captured);
            let start = Instant::now();
            self.metrics.drift.add(transaction.drift(&answers, &trained, observer)?);
            self.round.measured_s += start.elapsed().as_secs_f64();
        } else {
            self.hold(turn, captured, capture_s);
        }
        Ok(Some(trained))
    }

    fn add_trained(&mut self, trained: &Trained) {
        self.session.count_gradients(self.world);
        self.metrics.add_replay(&trained.replayed);
    }
}
