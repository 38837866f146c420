//! What the tests of the gates share.

use super::checks::Expected;
use crate::config::Gate;
use crate::report::{Check, Receipt};
use crate::runtime::units::{Bytes, Pages, Tokens};

/// The gate of this name.
pub(super) fn gate(name: &str) -> Gate {
    Gate::named(name).expect("there is one")
}

/// What [`good`] should have been.
pub(super) fn expected() -> Expected {
    Expected { updates: 1, pages: Pages(7), page_bytes: Bytes(1000), advantages: Some(vec![-1.0, 1.0]) }
}

/// A receipt of two ranks on a prompt of 7 pages, to which nothing can be objected.
pub(super) fn good() -> Receipt {
    Receipt {
        passed: true,
        ranks: 2,
        cp_size: 2,
        scale: 1,
        gradient: "response".into(),
        positions: Tokens(512),
        prompt_len: Tokens(384),
        answer_len: Tokens(128),
        group_size: 2,
        steps: 1,
        optimizer_calls: 1,
        layers: 3,
        layers_by_phase: ["capture", "score", "replay", "sweep", "finalize"].map(|phase| (phase, 3)).into(),
        pages_per_rank: vec![Pages(3), Pages(4)],
        page_bytes_per_rank: vec![Bytes(3000), Bytes(4000)],
        loss_first: 0.0,
        loss: 0.5,
        grad_norm: 0.1,
        ratio_first: Some([1.0, 1.0]),
        sampled_gap: Some(1e-6),
        gap_warn: 1e-4,
        rewards: vec![Some(0.0), Some(1.0)],
        advantages: vec![Some(-1.0), Some(1.0)],
        adapter_digest: vec!["ab".into(), "ab".into()],
        ..Receipt::default()
    }
}

/// Names of the checks that do not hold.
pub(super) fn failed(checks: &[Check]) -> Vec<&str> {
    checks.iter().filter(|check| !check.passed).map(|check| check.name.as_str()).collect()
}
