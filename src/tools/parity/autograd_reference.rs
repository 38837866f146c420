//! Gradient modes that a case has no expectation for: conventional autograd over the same sequences is the judge.

use tch::Tensor;

use super::case::{Case, Error};
use crate::runtime::units::{Tokens, from_index};
use crate::step::conventional::{Group, Target};
use crate::step::finalize;
use crate::step::replay::TrainedAnswer;
use crate::step::transaction::Transaction;
use crate::tensor::accumulation;

/// The gradient of every adapter tensor under the transaction's objective, computed by this rank alone.
pub(super) fn gradients(
    case: &Case,
    transaction: &Transaction,
    answers: &[TrainedAnswer],
) -> Result<Vec<Tensor>, Error> {
    let Transaction { policy, objective, gradient, head, .. } = transaction;
    let given =
        |name, index| case.given_logprobs(name, index, accumulation(policy.decoder.kind()), policy.decoder.device());
    let target =
        |(index, answer)| Ok(Target { reference: given("ref", index)?, ..Target::new(answer, given("old", index)?) });
    let targets = answers.iter().enumerate().map(target).collect::<Result<Vec<_>, Error>>()?;
    let tail = gradient.tail(Tokens(from_index(case.prompt_ids.len())));
    let group = Group { prompt_ids: &case.prompt_ids, answers: &case.answers, tail, temperature: head.temperature };
    let _loss = group.backward(policy.decoder, policy.adapters, &targets, objective);
    Ok(finalize::take(policy.adapters).0)
}
