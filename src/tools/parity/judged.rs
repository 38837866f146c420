//! Gradient modes that a case has no expectation for: conventional autograd over the same sequences is the judge.

use tch::{Device, Tensor};

use super::{Case, Error, Gradient};
use crate::model::head::Head;
use crate::model::pass::Pass;
use crate::prompt::handoff::PlacedGroup;
use crate::step::conventional::{Group, Target};
use crate::step::finalize;
use crate::tensor::accumulation;

/// The whole gradient of every adapter tensor, computed by this rank alone; in host memory, where expectations lie.
pub(super) fn gradients(
    case: &Case,
    pass: &Pass,
    head: &Head,
    work: &PlacedGroup,
    gradient: Gradient,
    kl_coef: f64,
) -> Result<Vec<Option<Tensor>>, Error> {
    let acc = accumulation(pass.decoder.kind());
    let answers: Vec<Vec<i64>> = work.answers.iter().map(|answer| answer.ids.clone()).collect();
    let (terms, advantages, weights) = case.goal(work, kl_coef)?;
    let targets = (0..answers.len()).map(|index| {
        Ok(Target {
            trained: None,
            old: case.get(&format!("old_logprobs.{index}"))?.to_kind(acc).to_device(pass.decoder.device()),
            reference: case.get(&format!("ref_logprobs.{index}"))?.to_kind(acc).to_device(pass.decoder.device()),
            advantage: advantages[index].unwrap_or(0.0),
            weight: weights[index],
        })
    });
    let targets = targets.collect::<Result<Vec<_>, Error>>()?;
    let tail = gradient.tail(work.layout.prompt());
    let whole = Group { prompt_ids: &work.prompt_ids, answers: &answers, tail, temperature: head.temperature };
    let _ = whole.backward(pass.decoder, pass.adapters, &targets, &terms);
    let gradients = finalize::take(pass.adapters).0;
    Ok(gradients.into_iter().map(|gradient| Some(gradient.to_device(Device::Cpu))).collect())
}
