//! How a run ends: exit codes, sites, and the one error type that crosses phase borders.
//!
//! Each module has its own `thiserror` enum that implements [`Classified`]. `?` turns it into a [`Failure`], and the
//! phase border adds the site once.

use std::error::Error;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::runtime::units::{LayerIndex, Rank};

/// Exit codes of the command.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Exit {
    /// The run has ended as planned.
    Done = 0,
    /// The configuration is wrong.
    Config = 2,
    /// Data or weights are wrong.
    Data = 3,
    /// Ranks disagree, or the world is not what the launcher says.
    Disagree = 4,
    /// The run does not fit the machine.
    DoesNotFit = 5,
    /// A number is not finite.
    NotFinite = 6,
    /// The endpoint failed.
    Endpoint = 7,
    /// A gate's check did not hold.
    Gate = 8,
    /// An alarm has ended the run; its state is saved.
    Alarm = 9,
    /// longstraw itself is wrong.
    Bug = 70,
    /// Stopped after a checkpoint; should be started again.
    Requeue = 75,
}

impl Exit {
    const ALL: [Exit; 11] = [
        Exit::Done,
        Exit::Config,
        Exit::Data,
        Exit::Disagree,
        Exit::DoesNotFit,
        Exit::NotFinite,
        Exit::Endpoint,
        Exit::Gate,
        Exit::Alarm,
        Exit::Bug,
        Exit::Requeue,
    ];

    /// The process's exit code.
    #[must_use]
    pub fn code(self) -> i32 {
        self as i32
    }

    /// The exit with this code; [`Exit::Bug`] for an unknown code.
    #[must_use]
    pub fn from_code(code: i32) -> Exit {
        Exit::ALL.into_iter().find(|exit| exit.code() == code).unwrap_or(Exit::Bug)
    }
}

/// Whether an allocator's message says that memory has run out.
#[must_use]
pub fn out_of_memory(message: &str) -> bool {
    ["can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED"].iter().any(|words| message.contains(words))
}

/// An error that knows the exit code it leads to.
pub trait Classified: Error + Send + Sync + 'static {
    /// The exit code this error leads to.
    fn exit(&self) -> Exit;
}

/// The stages of a run, as sites and receipts name them.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Phase {
    /// Before the first step: configuration, weights, data.
    Start,
    /// The prompt runs once without a graph.
    Capture,
    /// Answers are sampled, with the pages as their past.
    Rollout,
    /// Answers get their rewards.
    Reward,
    /// Old-policy and reference log-probabilities.
    Score,
    /// The answers run again with a graph.
    Replay,
    /// Backward of the prompt's own rows.
    Sweep,
    /// Adapter gradients are summed over ranks.
    Finalize,
    /// The optimizer's step.
    Update,
    /// A checkpoint is written.
    Save,
    /// Evaluation on held-out prompts.
    Evaluate,
}

impl Phase {
    /// All of them, in the order of a run.
    pub const ALL: [Phase; 11] = [
        Phase::Start,
        Phase::Capture,
        Phase::Rollout,
        Phase::Reward,
        Phase::Score,
        Phase::Replay,
        Phase::Sweep,
        Phase::Finalize,
        Phase::Update,
        Phase::Save,
        Phase::Evaluate,
    ];

    /// Its index in [`Phase::ALL`].
    #[must_use]
    pub fn index(self) -> usize {
        self as usize
    }

    /// The name in sites, receipts and logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Phase::Start => "start",
            Phase::Capture => "capture",
            Phase::Rollout => "rollout",
            Phase::Reward => "reward",
            Phase::Score => "score",
            Phase::Replay => "replay",
            Phase::Sweep => "sweep",
            Phase::Finalize => "finalize",
            Phase::Update => "update",
            Phase::Save => "save",
            Phase::Evaluate => "evaluate",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Where something happened.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Site {
    /// The rank within the world.
    pub rank: Rank,
    /// The phase it was in.
    pub phase: Phase,
    /// The layer, where the phase goes through layers.
    pub layer: Option<LayerIndex>,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}, {}", self.rank, self.phase)?;
        match self.layer {
            Some(layer) => write!(f, ", layer {layer}"),
            None => Ok(()),
        }
    }
}

/// What ends a run: an exit code, the cause, and the site once a phase border has added it.
#[derive(Debug)]
pub struct Failure {
    exit: Exit,
    site: Option<Site>,
    cause: Box<dyn Error + Send + Sync>,
}

impl Failure {
    /// The same failure at `site`; a site that is already known stays.
    #[must_use]
    pub fn at(mut self, site: Site) -> Self {
        self.site.get_or_insert(site);
        self
    }

    /// The exit code.
    #[must_use]
    pub fn exit(&self) -> Exit {
        self.exit
    }

    /// Where it happened, once a phase border has added it.
    #[must_use]
    pub fn site(&self) -> Option<Site> {
        self.site
    }
}

impl fmt::Display for Failure {
    /// One line: site, cause, and those of its sources whose message is not part of it already.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut message = self.cause.to_string();
        let mut source = self.cause.source();
        while let Some(inner) = source {
            let further = inner.to_string();
            if !message.contains(&further) {
                message = format!("{message}: {further}");
            }
            source = inner.source();
        }
        match self.site {
            Some(site) => write!(f, "{site}: {message}"),
            None => f.write_str(&message),
        }
    }
}

impl Error for Failure {}

impl<E: Classified> From<E> for Failure {
    fn from(cause: E) -> Self {
        Failure { exit: cause.exit(), site: None, cause: Box::new(cause) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum ReadError {
        #[error("a.txt: {source}; look again")]
        WithSource { source: std::io::Error },
        #[error("a.txt cannot be read")]
        WithoutSource { source: std::io::Error },
    }

    impl Classified for ReadError {
        fn exit(&self) -> Exit {
            Exit::Data
        }
    }

    #[test]
    fn a_source_is_printed_once() {
        let source = || std::io::Error::other("the disk is gone");
        assert_eq!(
            Failure::from(ReadError::WithSource { source: source() }).to_string(),
            "a.txt: the disk is gone; look again"
        );
        assert_eq!(
            Failure::from(ReadError::WithoutSource { source: source() }).to_string(),
            "a.txt cannot be read: the disk is gone"
        );
    }
}
