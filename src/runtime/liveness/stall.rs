//! The report about a stalled rank.

use std::fmt;
use std::time::Duration;

use super::heartbeat::Heartbeat;
use crate::runtime::failure::Site;
use crate::runtime::units::Rank;

/// Maximum number of other ranks' sites that a report lists.
const SITES_MAX: usize = 8;

/// The process to look for.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Process {
    host: String,
    pid: u32,
    entered: String,
}

impl Process {
    pub(super) fn new(heartbeat: &Heartbeat) -> Process {
        Process { host: heartbeat.host.clone(), pid: heartbeat.pid, entered: heartbeat.entered.clone() }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum StallCause {
    /// No new heartbeat comes.
    Silent { silent: Duration, also: Vec<Rank> },
    /// Heartbeats come; the rank waits for no other rank and does not move.
    Stuck { deadline: Duration },
    /// Heartbeats come and the rank does not move; it may wait for a message inside its GPU.
    GpuLink { deadline: Duration, others: Vec<Site> },
    /// Every rank waits for another.
    AllWait,
    /// No heartbeat of any rank could be read for this time.
    Blind(Duration),
}

/// Why a job must end: which rank has stalled, and what is known of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Stall {
    pub(super) site: Site,
    pub(super) process: Option<Process>,
    pub(super) time_here: Duration,
    pub(super) cause: StallCause,
}

impl Stall {
    /// Rank, phase and layer of the stalled rank.
    #[must_use]
    pub fn site(&self) -> Site {
        self.site
    }
}

impl fmt::Display for Stall {
    /// One sentence: which rank, where, since when, and the likely cause.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let here = self.time_here.as_secs();
        write!(f, "{}", self.site)?;
        if let Some(Process { host, pid, entered }) = &self.process {
            write!(f, " (host {host}, process {pid}) has not moved for {here} s, since {entered}")?;
        } else {
            write!(f, " has not moved for {here} s")?;
        }
        match &self.cause {
            StallCause::Silent { silent, also } => {
                write!(
                    f,
                    "; its last heartbeat is {} s old: it is stopped or dead, or its machine is",
                    silent.as_secs()
                )?;
                if !also.is_empty() {
                    let ranks: Vec<String> = also.iter().map(ToString::to_string).collect();
                    write!(f, "; the same is true of rank {}", ranks.join(", "))?;
                }
                Ok(())
            }
            StallCause::Stuck { deadline } => write!(
                f,
                "; {} s were allowed. It runs and waits for no other rank: its disk, its GPU or the machine holds it, or \
                 run.stall_sec is too small",
                deadline.as_secs()
            ),
            StallCause::GpuLink { deadline, others } => {
                write!(
                    f,
                    "; {} s were allowed. It may wait for a message from another rank's GPU: it, one of the others, or the \
                     link between their GPUs hangs, or run.stall_sec is too small",
                    deadline.as_secs()
                )?;
                let sites: Vec<String> = others.iter().take(SITES_MAX).map(ToString::to_string).collect();
                let more = if others.len() > SITES_MAX { "; …" } else { "" };
                if sites.is_empty() { Ok(()) } else { write!(f, "; the others: {}{more}", sites.join("; ")) }
            }
            StallCause::AllWait => {
                f.write_str("; every rank waits for the others, and this one came least far: look at the network")
            }
            StallCause::Blind(blind) => write!(
                f,
                ": it waits for others, and the run directory has shown no heartbeat of theirs for {} s",
                blind.as_secs()
            ),
        }
    }
}
