//! Everything that is wrong with one file or folder, said in one line of bounded length.

use std::fmt;

/// Problems that one message lists; further ones are counted.
const LISTED_MAX: usize = 12;

/// A list of problems, in the order they were found.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Problems<P>(pub Vec<P>);

impl<P: fmt::Display> fmt::Display for Problems<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.0.iter().take(LISTED_MAX).enumerate() {
            write!(f, "{}{problem}", if i == 0 { "" } else { "; " })?;
        }
        match self.0.len().saturating_sub(LISTED_MAX) {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}
