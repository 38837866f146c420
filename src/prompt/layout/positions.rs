//! Positions of rows that are computed together.

use std::ops::Range;

/// Positions of rows, in runs of consecutive ones.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Positions(Vec<Range<i64>>);

impl From<Range<i64>> for Positions {
    fn from(run: Range<i64>) -> Positions {
        Positions(vec![run])
    }
}

impl FromIterator<Range<i64>> for Positions {
    fn from_iter<T: IntoIterator<Item = Range<i64>>>(runs: T) -> Positions {
        Positions(runs.into_iter().collect())
    }
}

impl Positions {
    /// Runs of consecutive positions, in the order of the rows.
    #[must_use]
    pub fn runs(&self) -> &[Range<i64>] {
        &self.0
    }

    /// Whether it is one position alone.
    #[must_use]
    pub fn is_single(&self) -> bool {
        matches!(&self.0[..], [run] if run.end - run.start == 1)
    }
}
