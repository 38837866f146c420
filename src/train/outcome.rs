//! How an update or an evaluation ends.

use crate::runtime::failure::Failure;

/// How work that all ranks share has ended, on all of them alike.
#[derive(Debug)]
pub(super) enum Outcome<T> {
    Done(T),
    /// A stop was requested and the end would have come too late; `why` completes "update 3 is …".
    Dropped {
        why: String,
    },
    /// Answers could not be scored, or their calls got no reply. What was learnt before is worth a checkpoint.
    NoRewards {
        failure: Failure,
    },
}

/// What leaves such work in its middle.
#[derive(Debug)]
pub(super) enum Interruption {
    Dropped {
        why: String,
    },
    NoRewards {
        failure: Failure,
    },
    /// The run ends.
    Failed(Failure),
}

impl<T> Outcome<T> {
    /// The outcome of work that was interrupted or not.
    pub(super) fn of(work: Result<T, Interruption>) -> Result<Outcome<T>, Failure> {
        match work {
            Ok(done) => Ok(Outcome::Done(done)),
            Err(Interruption::Dropped { why }) => Ok(Outcome::Dropped { why }),
            Err(Interruption::NoRewards { failure }) => Ok(Outcome::NoRewards { failure }),
            Err(Interruption::Failed(failure)) => Err(failure),
        }
    }
}

impl From<Failure> for Interruption {
    fn from(failure: Failure) -> Interruption {
        Interruption::Failed(failure)
    }
}
