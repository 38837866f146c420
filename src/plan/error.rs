//! Why a plan is refused.

use crate::runtime::failure::{Classified, Exit};
use crate::runtime::units::Bytes;

/// Why a run is refused before it starts. `at` is the gate with a colon, or empty for a plan by itself.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what its variant and its fields are")]
pub enum Error {
    #[error("{at}{who} {needed} of {what} memory and {available} are there; from the largest part down: {parts}")]
    DoesNotFit { at: String, who: String, what: &'static str, needed: Bytes, available: Bytes, parts: String },
    #[error(
        "{at}a token of the sampled answers takes {seconds:.3} s by the plan, and rollout.token_sec_max is {most}: {why}; {how}"
    )]
    TooSlow { at: String, seconds: f64, most: f64, why: String, how: &'static str },
}

impl Error {
    /// Names the gate that is refused.
    pub(super) fn at_gate(mut self, gate: &str) -> Error {
        let (Error::DoesNotFit { at, .. } | Error::TooSlow { at, .. }) = &mut self;
        *at = format!("{gate}: ");
        self
    }
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        Exit::DoesNotFit
    }
}
