//! One update over `dp_size × grad_accum` groups, from prompts to the optimizer.

use std::rc::Rc;
use std::time::Instant;

use super::calls;
use super::groups::Turns;
use super::metrics::{UpdateMetrics, report_seconds};
use super::outcome::Interruption;
use super::rate::learning_rate;
use super::reuse::{self, EarlierAdapters};
use super::round::Round;
use super::session::{Session, TrainingData};
use super::sources;
use super::stop_policy::StopPolicy;
use crate::prompt::handoff::ReducedGrads;
use crate::report::{Reporter, Seconds, Step};
use crate::runtime::failure::{Failure, Phase};
use crate::step::finalize;
use crate::step::objective::{divide_gradients, mean_loss};
use crate::step::observer::Observer;
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
    if round.made == 0
        && let Some(warning) = calls::warning(&round.calls(), &format!("the answers of update {step}"))
    {
        reporter.line(&warning);
    }
    require_rewards(session, world, round, step)?;
    // Advantages of a batch share one factor, which is known only now: it divides as the count of answers does.
    let advantage_scale = session.batch_scale(&round.rewards());
    let objective = session.objective();
    let denominator = round.counts.denominator(objective.aggregation) * advantage_scale.unwrap_or(1.0);
    let gradients = finalize(session, world, observer, denominator)?;
    let metrics = metrics.reduce(world);
    let call_seconds = metrics.call_seconds;
    require_finite(world, mean_loss(metrics.loss, denominator))?;
    if reuse::is_measured(session.config(), round.made, step) {
        world.agree(reuse::require_near(session.config(), round.made, step, &metrics.drift))?;
    }
    remember(session, round, world);
    let learning_rate = learning_rate(session.config(), step);
    optimize(session, world, observer, &gradients, learning_rate)?;
    let spent = observer.take_seconds();
    let reuse_s = [round.saved_s, round.measured_s];
    let numbers = Step {
        step,
        gradient: session.config().grpo.gradient.to_string(),
        grad_norm: gradients.norm(),
        learning_rate,
        seconds: Seconds { total: start.elapsed().as_secs_f64(), ..report_seconds(&spent) },
        advantage_scale,
        reuse: reuse::describe(session.config(), round.made, reuse_s, &metrics.drift, |sum| {
            mean_loss(sum, denominator)
        }),
        ..metrics.describe(denominator, &objective)
    };
    let numbers = describe_groups(session, round, numbers, call_seconds);
    Ok(Update { step: numbers, pinning_s: spent.pinning })
}

/// Adds the numbers that follow from the groups' prompts, answers and rewards.
fn describe_groups(session: &Session, round: &Round, numbers: Step, call_seconds: f64) -> Step {
    let groups = || round.places.iter().map(|place| session.data.train.group(place.index));
    let prompt_tokens: Vec<u64> = groups().map(|group| group.prompt_tokens.0).collect();
    let prompts = groups().map(|group| group.name.clone()).collect();
    let TrainingData { train, sources, cursor, .. } = &session.data;
    let sources = sources::describe(train, sources, &cursor.passes(), round, session.samples());
    let call_seconds = session.data.tools.as_ref().map(|_| call_seconds);
    round.describe(Step { sources, prompts, ..numbers }, &prompt_tokens, session.samples(), call_seconds)
}

/// Keeps the adapters of a capture that further updates reuse, before the optimizer changes them.
fn remember(session: &Session, round: &mut Round, world: &World) {
    let config = session.config();
    if reuse::age(config, round.made) == 0 && reuse::leaves_pages(config, round.made) {
        let adapters = &session.policy.adapters;
        let earlier = EarlierAdapters::new(adapters.stamp().version, adapters.tensors(), world);
        round.earlier = Some(Rc::new(earlier));
    }
}

/// All ranks agree on whether enough answers have a reward, and enough calls a reply; a round asks once.
fn require_rewards(session: &Session, world: &World, round: &Round, step: u64) -> Result<(), Interruption> {
    if round.made > 0 {
        return Ok(());
    }
    let enough = round.check_rewards(session.config().reward.missing_share_max, step).map_err(Failure::from);
    let replied =
        calls::check(&round.calls(), session.config().tools.failed_share_max, &format!("the answers of update {step}"));
    let enough = enough.and(replied.map_err(Failure::from));
    world.agree(enough).map_err(|failure| Interruption::NoRewards { failure })
}

/// Divides this rank's gradients by the batch's denominator, sums them over all ranks, and clips them.
fn finalize(
    session: &Session,
    world: &World,
    observer: &mut Observer,
    denominator: f64,
) -> Result<ReducedGrads, Failure> {
    let adapters = &session.policy.adapters;
    let reduced = observer.host_phase(Phase::Finalize, || {
        let local = divide_gradients(finalize::take(adapters), denominator);
        finalize::run_everywhere(world, local, adapters, session.config().optimizer.max_grad_norm)
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
