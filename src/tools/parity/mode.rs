//! Gradient modes, as the cases name them.

use crate::runtime::units::Tokens;

/// Which prompt rows carry gradient.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Gradient {
    /// All of them.
    Exact,
    /// The last N.
    Last(Tokens),
}

impl Gradient {
    /// Rows that carry gradient in a prompt of `prompt` positions.
    #[must_use]
    pub fn tail(self, prompt: Tokens) -> Tokens {
        match self {
            Gradient::Exact => prompt,
            Gradient::Last(rows) => rows,
        }
    }

    /// The name in reports.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Gradient::Exact => "exact".into(),
            Gradient::Last(Tokens(1)) => "response".into(),
            Gradient::Last(rows) => format!("last={rows}"),
        }
    }

    /// The cases' word for it, if they have an expectation.
    pub(super) fn expected(self, prompt: Tokens) -> Option<&'static str> {
        match self.tail(prompt) {
            rows if rows == prompt => Some("full"),
            Tokens(1) => Some("resp"),
            Tokens(0) => Some("resp_strict"),
            _ => None,
        }
    }
}
