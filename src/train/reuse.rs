//! A capture that serves several updates of its group (`run.reuse_capture`).
//!
//! The pages are on no disk. What a checkpoint holds are the adapters that captured them, so that a run that goes on in between
//! captures the prompt again with the same bits; so does an update after an evaluation, which needs the memory.

use tch::{Device, Tensor};

use crate::config::RunConfig;
use crate::model::lora::Adapters;
use crate::model::spec::Spec;
use crate::prompt::handoff::Captured;
use crate::report::Reuse;
use crate::runtime::failure::{Classified, Exit, Failure};
use crate::runtime::memory::{Held, MemorySpace, Purpose};
use crate::runtime::units::Tokens;
use crate::step::drift::Drift;
use crate::tensor::boundary::storage_bytes;
use crate::world::World;

/// Why a run cannot reuse a capture.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error(
        "run.reuse_capture = {reuses}: the adapters of experts are spread over ranks, and a reused capture needs those of all \
         layers as they were; set parallel.ep_size = 1 or run.reuse_capture = 1"
    )]
    Spread { reuses: u64 },
    #[error(
        "run.reuse_capture = {reuses}: the last {tail} prompt positions carry gradient and are computed again in each update, \
         which {model_type} cannot do, for it has layers without keys and values: set grpo.gradient = {{ last = 0 }} or \
         run.reuse_capture = 1"
    )]
    Mixer { reuses: u64, tail: Tokens, model_type: &'static str },
    #[error(
        "run.reuse_capture = {reuses}: the last {tail} prompt positions carry gradient and are computed again in each update, \
         at most memory.micro_block = {rows} of them: set grpo.gradient = {{ last = {rows} }} or run.reuse_capture = 1"
    )]
    LongTail { reuses: u64, tail: Tokens, rows: Tokens },
    #[error(
        "update {step}: pages captured {age} updates ago have drifted by {drift:.3e}, more than grpo.reuse_drift_max = {most}; \
         the negative log-likelihood of the answers is {reused:.6} a token on them and {fresh:.6} on pages captured anew. Start anew \
         with a smaller run.reuse_capture or optimizer.lr, or go on with a larger grpo.reuse_drift_max"
    )]
    TooFar { step: u64, age: u64, drift: f64, most: f64, reused: f64, fresh: f64 },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::TooFar { .. } => Exit::Alarm,
            Error::Spread { .. } | Error::Mixer { .. } | Error::LongTail { .. } => Exit::Config,
        }
    }
}

/// A captured prompt that waits for the next update, and the seconds that its capture took.
#[derive(Debug)]
pub(super) struct HeldPrompt {
    pub(super) captured: Captured,
    pub(super) capture_s: f64,
}

/// The adapters of a reused capture, in host memory.
#[derive(Debug)]
pub(super) struct EarlierAdapters {
    pub(super) version: u64,
    /// In the adapters' order.
    pub(super) values: Vec<Tensor>,
    _held: Held,
}

impl EarlierAdapters {
    /// A copy of `values`, which the adapters had at `version`.
    pub(super) fn new<'a>(version: u64, values: impl Iterator<Item = &'a Tensor>, world: &World) -> EarlierAdapters {
        let values: Vec<Tensor> = values.map(|value| value.detach().to_device(Device::Cpu).copy()).collect();
        let bytes = values.iter().map(storage_bytes).sum();
        let held = world.ledger().hold(Purpose::Adapters, MemorySpace::Host, bytes);
        EarlierAdapters { version, values, _held: held }
    }

    /// The policy as it was, and its entry in the ledger.
    pub(super) fn policy(&self, now: &Adapters, world: &World) -> (Adapters, Held) {
        let mut then = now.frozen(now.stamp().policy);
        let held = world.ledger().hold(Purpose::Adapters, MemorySpace::Device, then.tensors().map(storage_bytes).sum());
        then.restore(&self.values, self.version);
        // Products of some mixers have another form, and other bits, with factors that are not tracked.
        for tensor in then.tensors() {
            let _ = tensor.set_requires_grad(true);
        }
        (then, held)
    }
}

/// Updates since the pages of a round's next update were captured; 0: it captures them.
pub(super) fn age(config: &RunConfig, made: u64) -> u64 {
    made % config.run.reuse_capture.max(1)
}

/// Whether the update after `made` of a round leaves its pages to a further one.
pub(super) fn leaves_pages(config: &RunConfig, made: u64) -> bool {
    made + 1 < config.grpo.updates_per_group && age(config, made + 1) > 0
}

/// Whether update `step` of the run, the one after `made` of a round, measures the drift: the last one on reused pages does,
/// also where the run ends before the round.
pub(super) fn is_measured(config: &RunConfig, made: u64, step: u64) -> bool {
    age(config, made) > 0 && (!leaves_pages(config, made) || step == config.run.steps)
}

/// Refuses models and gradients for which no capture can be reused.
pub(super) fn check(config: &RunConfig, spec: &Spec, spreads: bool) -> Result<(), Error> {
    let reuses = config.run.reuse_capture;
    if reuses <= 1 {
        return Ok(());
    }
    if spreads {
        return Err(Error::Spread { reuses });
    }
    let tail = config.tail(config.context.prompt_len);
    if tail > Tokens(0) && (spec.latent.is_some() || spec.delta.is_some()) {
        return Err(Error::Mixer { reuses, tail, model_type: spec.model_type });
    }
    let rows = config.memory.micro_block;
    if tail > rows {
        return Err(Error::LongTail { reuses, tail, rows });
    }
    Ok(())
}

/// Refuses an update on pages that have drifted too far. `drift` is that of all ranks.
pub(super) fn require_near(config: &RunConfig, made: u64, step: u64, drift: &Drift) -> Result<(), Failure> {
    let Some((far, most)) = drift.relative().zip(config.grpo.reuse_drift_max) else { return Ok(()) };
    if far <= most {
        return Ok(());
    }
    let (reused, fresh) = (drift.mean(drift.nll_reused), drift.mean(drift.nll_fresh));
    Err(Error::TooFar { step, age: age(config, made), drift: far, most, reused, fresh }.into())
}

/// What metrics.jsonl says of the update after `made` of a round, on reused pages; `None` where it has captured them. `seconds`: those
/// of captures that it did without, and of the measurement. `loss` makes a sum the batch's loss.
pub(super) fn describe(
    config: &RunConfig,
    made: u64,
    seconds: [f64; 2],
    drift: &Drift,
    loss: impl Fn(f64) -> f64,
) -> Option<Reuse> {
    let [saved_s, measured_s] = seconds;
    let age = age(config, made);
    let measured = drift.tokens > 0;
    (age > 0).then(|| Reuse {
        age,
        saved_s,
        measured_s,
        drift: drift.relative(),
        nll: measured.then(|| [drift.mean(drift.nll_reused), drift.mean(drift.nll_fresh)]),
        loss: measured.then(|| [loss(drift.loss_reused), loss(drift.loss_fresh)]),
        k3: measured.then(|| drift.mean(drift.k3)),
        gap: measured.then_some(drift.gap),
    })
}
