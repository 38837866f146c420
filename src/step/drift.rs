//! Drift: how far the answers' log-probabilities on reused pages lie from those on pages captured anew, under the same adapters.
//!
//! The mean negative log-likelihood is what the drift is judged by. The loss of an update is near 0 where ratios are near 1, so a
//! share of it says nothing; both losses are told beside.

use tch::{Kind, Tensor};

use super::extremes::max_or_nan;
use super::replay::ReplayTargets;
use crate::prompt::handoff::{Logprobs, PlacedGroup, Scores};
use crate::runtime::units::float;
use crate::world::Axis;

/// Sums over the trained tokens of one rank, or of all.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Drift {
    pub tokens: u64,
    /// Negative log-likelihood, nats.
    pub nll_reused: f64,
    pub nll_fresh: f64,
    /// Loss before the batch's denominator.
    pub loss_reused: f64,
    pub loss_fresh: f64,
    /// e^d − d − 1 with d = reused − fresh, an estimate of the divergence.
    pub k3: f64,
    /// The largest |d|, nats.
    pub gap: f64,
}

impl Drift {
    /// Adds other tokens.
    pub fn add(&mut self, other: Drift) {
        self.tokens += other.tokens;
        self.nll_reused += other.nll_reused;
        self.nll_fresh += other.nll_fresh;
        self.loss_reused += other.loss_reused;
        self.loss_fresh += other.loss_fresh;
        self.k3 += other.k3;
        self.gap = max_or_nan(self.gap, other.gap);
    }

    /// The distance of both negative log-likelihoods, as a share of that on fresh pages; `None` without a token.
    #[must_use]
    pub fn relative(&self) -> Option<f64> {
        let distance = (self.nll_reused - self.nll_fresh).abs();
        let share = if distance > 0.0 { distance / self.nll_fresh } else { distance };
        (self.tokens > 0).then_some(share)
    }

    /// A sum as its mean over the trained tokens.
    #[must_use]
    pub fn mean(&self, sum: f64) -> f64 {
        sum / float(self.tokens.max(1))
    }

    fn add_tokens(&mut self, reused: &Tensor, fresh: &Tensor, trained: Option<&Tensor>) {
        let double = |x: &Tensor| x.to_kind(Kind::Double);
        let (reused, fresh) = (double(reused), double(fresh));
        let trained = trained.map_or_else(|| reused.ones_like(), |trained| double(trained).to_device(reused.device()));
        let kept = trained.gt(0.0);
        // Chosen, not multiplied: a token that takes no part may have any value.
        let (reused, fresh) = (reused.masked_select(&kept), fresh.masked_select(&kept));
        let sum = |x: &Tensor| x.sum(Kind::Double).double_value(&[]);
        let d = &reused - &fresh;
        self.tokens += u64::try_from(reused.numel()).unwrap_or(u64::MAX);
        self.nll_reused -= sum(&reused);
        self.nll_fresh -= sum(&fresh);
        self.k3 += sum(&(d.exp() - &d - 1.0));
        if d.numel() > 0 {
            self.gap = max_or_nan(self.gap, d.abs().max().double_value(&[]));
        }
    }
}

/// Compares two sets of log-probabilities of this rank's tokens. Every rank takes part, with or without tokens.
///
/// # Panics
/// When the rank that owns row P−1 has log-probabilities of first tokens in one of them and no frozen ones.
#[must_use]
pub fn measure(cp: &Axis, work: &PlacedGroup, targets: &ReplayTargets, reused: &Scores, fresh: &Scores) -> Drift {
    let mut drift = Drift::default();
    for (index, answer) in work.answers.iter().enumerate() {
        let (reused, fresh) = (&reused.0[index], &fresh.0[index]);
        let trained = work.trained(answer, cp.rank());
        let loss = |scores: &Logprobs| {
            let Logprobs { rows, first } = scores;
            let means = targets.means(work, cp, index, rows, first.as_ref());
            let of_rows =
                targets.tokens(index, rows, trained.as_ref().map(Tensor::shallow_clone), means, |own| &own.rows);
            let of_first = first.as_ref().and_then(|first| {
                targets.tokens(index, first, answer.first_is_trained(), means, |own| {
                    own.first.as_ref().expect("the owner scored the first token")
                })
            });
            [of_rows, of_first].into_iter().flatten().map(|added| added.loss).sum::<f64>()
        };
        let (loss_reused, loss_fresh) = (loss(reused), loss(fresh));
        if targets.answers[index].advantage.is_none() {
            continue;
        }
        drift.loss_reused += loss_reused;
        drift.loss_fresh += loss_fresh;
        drift.add_tokens(&reused.rows, &fresh.rows, trained.as_ref());
        if let Some((reused, fresh)) = reused.first.as_ref().zip(fresh.first.as_ref()) {
            drift.add_tokens(reused, fresh, answer.first_is_trained().as_ref());
        }
    }
    drift
}
