//! The MPI boundary: start, axes, bounded collectives over bytes, and how a failing rank ends the job.
//!
//! Every rank of an axis enters every collective of the axis, also with nothing to send. Counts on the wire are C ints,
//! so one call moves at most [`Axis::round_bytes`] from a rank and is repeated until everything is moved. A rank that
//! fails prints its site and aborts the world: if it only returned, the other ranks would wait for ever.

mod abort;
mod about;
mod axis;
mod binding;
pub mod devices;
mod error;
pub mod exchange;
mod root;
mod signals;
mod watchdog;

use std::cell::Cell;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use mpi::Threading;
use mpi::environment::Universe;

pub use about::{host, library};
pub use axis::Axis;
pub use error::Error;
pub use signals::{install_signal_handlers, stop_requested, time_left};

use crate::runtime::failure::{Exit, Failure};
use crate::runtime::liveness::{HeartbeatFiles, StallLimits, Tracker};
use crate::runtime::memory::Ledger;
use crate::runtime::terminal::say;
use crate::runtime::units::{Rank, as_index, from_index};
use abort::{PanicScope, abort_on_panic, abort_world, message};
use watchdog::{DeadlineGuard, Watch, Watchdog};

/// All ranks of the run, and this process's place among them.
pub struct World {
    /// All ranks of the job.
    pub all: Axis,
    /// The ranks that share this rank's prompt (context parallel).
    pub cp: Axis,
    /// The ranks that hold the experts of a layer together, each of them its own (expert parallel); part of `cp`.
    pub ep: Axis,
    /// The ranks of the job that hold the same experts as this one: those with its index on `ep`.
    pub edp: Axis,
    /// Index of this rank's data-parallel replica.
    pub dp_index: usize,
    /// Number of data-parallel replicas.
    pub dp_size: usize,
    tracker: Tracker,
    ledger: Ledger,
    /// The rank that prints the reason, once all ranks have agreed to fail.
    speaker: Cell<Option<Rank>>,
    panics: PanicScope,
    // Second to last, because fields are dropped in order: communicators must be freed before MPI is finalized.
    _universe: Universe,
    // Last: a rank may also wait for ever while MPI is finalized.
    watchdog: Option<Watchdog>,
}

/// How many processes the launcher says it has started.
#[derive(Clone, Copy, Debug)]
pub struct Launcher {
    /// The environment variable that says so.
    pub variable: &'static str,
    /// Number of processes.
    pub tasks: u64,
}

impl World {
    /// Starts MPI and makes every later panic end the whole job. All ranks form one context-parallel group until
    /// [`World::cut`].
    ///
    /// # Errors
    /// When MPI does not start, or when the launcher says that more processes were started than MPI knows of.
    pub fn start(launcher: Option<Launcher>, tracker: Tracker) -> Result<Self, Failure> {
        let (universe, _) = mpi::initialize_with_threading(Threading::Funneled).ok_or(Error::Start)?;
        let all = Axis::new(universe.world(), tracker.shared_site().clone());
        tracker.set_rank(all.rank());
        let ledger = Ledger::default();
        let panics = PanicScope::default();
        abort_on_panic(tracker.shared_site().clone(), ledger.clone(), panics.clone());
        if let Some(Launcher { variable, tasks }) = launcher.filter(|launcher| all.size() == 1 && launcher.tasks > 1) {
            return Err(Error::Alone { variable, tasks }.into());
        }
        let cp = all.split(0);
        let ep = all.split(all.rank().0);
        let edp = all.split(0);
        Ok(World {
            all,
            cp,
            ep,
            edp,
            dp_index: 0,
            dp_size: 1,
            tracker,
            ledger,
            speaker: Cell::new(None),
            panics,
            _universe: universe,
            watchdog: None,
        })
    }

    /// Starts the watchdog of each rank. Until MPI is finalized, the watchdog writes heartbeats to rank 0's `run_dir`
    /// and ends the job if a rank stalls. `stall_sec` is `run.stall_sec`. Every rank takes part. If a rank does not see
    /// that folder, no rank reads heartbeats: each rank watches only itself, and a warning says so.
    ///
    /// # Errors
    /// When rank 0 cannot write a heartbeat, or a thread cannot be started.
    pub fn watch(&mut self, run_dir: &Path, stall_sec: u64) -> Result<(), Failure> {
        self.watchdog = None;
        let job = self.job_number();
        let folder = self.path_of_rank_0(run_dir);
        let failed = |source| Failure::from(Error::Watch { folder: folder.clone(), source });
        let files = HeartbeatFiles::new(&folder, job);
        let watch = Watch::new(files, self.tracker.shared_site(), self.all.size(), StallLimits::new(stall_sec));
        let first = self.all.rank() == Rank(0);
        // Rank 0 writes before any other rank looks, because file systems cache that a file is absent.
        self.agree(if first { watch.begin().map_err(failed) } else { Ok(()) })?;
        let written = first || watch.write_first().is_ok();
        self.all.barrier();
        let sees_all = self.all.gather_numbers(u64::from(written && watch.sees_all()));
        let blind = sees_all.iter().position(|&sees_all| sees_all == 0);
        let watchdog = Watchdog::start(watch, blind.is_none());
        self.watchdog = Some(self.agree(watchdog.map_err(failed))?);
        if let Some(rank) = blind {
            self.warn_user(&format!(
                "rank {rank} does not share rank 0's run directory {}: no rank will notice when another falls silent; \
                 each watches its own deadline alone",
                folder.display()
            ));
        }
        Ok(())
    }

    /// A number that all ranks share and no other job has. Every rank takes part.
    #[must_use]
    pub fn job_number(&self) -> u64 {
        // A time identifies the job: process numbers repeat after a machine has been restarted.
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.all.gather_numbers(u64::try_from(now.as_nanos()).unwrap_or_default())[0]
    }

    /// Rank 0's path, made absolute on rank 0: ranks may run in different folders. Every rank takes part.
    #[must_use]
    pub fn path_of_rank_0(&self, path: &Path) -> PathBuf {
        let own = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let mut bytes = own.as_os_str().as_bytes().to_vec();
        let length = self.all.gather_numbers(from_index(bytes.len()))[0];
        bytes.resize(as_index(length), 0);
        self.all.broadcast(&mut bytes);
        OsStr::from_bytes(&bytes).into()
    }

    /// Cuts the world into context-parallel groups of `cp_size` consecutive ranks, and each of these into expert-parallel
    /// groups of `ep_size` consecutive ranks.
    ///
    /// # Errors
    /// When the world is no multiple of `cp_size`, or `cp_size` none of `ep_size`.
    pub fn cut(&mut self, cp_size: usize, ep_size: usize) -> Result<(), Failure> {
        let ranks = self.all.size();
        if cp_size == 0 || !ranks.is_multiple_of(cp_size) {
            return Err(self.common_failure(Error::Uneven { ranks: ranks as u64, cp_size: cp_size as u64 }));
        }
        if ep_size == 0 || !cp_size.is_multiple_of(ep_size) {
            return Err(self.common_failure(Error::UnevenExperts { cp_size: cp_size as u64, ep_size: ep_size as u64 }));
        }
        self.dp_index = self.all.rank().0 / cp_size;
        self.dp_size = ranks / cp_size;
        self.cp = self.all.split(self.dp_index);
        self.ep = self.all.split(self.all.rank().0 / ep_size);
        self.edp = self.all.split(self.all.rank().0 % ep_size);
        Ok(())
    }

    /// The ranks of the job that name the same `part`, in their order. Every rank takes part.
    #[must_use]
    pub fn split(&self, part: usize) -> Axis {
        self.all.split(part)
    }

    /// Agrees on the outcome of an attempt that every rank makes: all succeed, or all fail. The lowest rank that failed
    /// keeps its own failure and the others get [`Error::Elsewhere`], so one message is printed and every rank can
    /// leave in order.
    ///
    /// # Errors
    /// When the attempt failed on any rank.
    pub fn agree<T>(&self, attempt: Result<T, Failure>) -> Result<T, Failure> {
        let code = attempt.as_ref().err().map_or(0, |failure| failure.exit().code());
        let codes = self.all.gather_codes(code);
        let Some(rank) = codes.iter().position(|&code| code != 0) else { return attempt };
        self.speaker.set(Some(Rank(rank)));
        match attempt {
            Err(failure) if rank == self.all.rank().0 => Err(failure.at(self.tracker.site())),
            _ => Err(Error::Elsewhere { rank: Rank(rank), exit: Exit::from_code(codes[rank]) }.into()),
        }
    }

    /// Runs `work` on rank 0 while the other ranks sleep: for work that takes long and needs no other rank, such as
    /// requests to a service. All ranks agree on the outcome; the value is on rank 0 and the default elsewhere. `work`
    /// must be bounded: while it runs, only rank 0's own deadline holds.
    ///
    /// # Errors
    /// When `work` failed.
    pub fn on_root_long<T: Default>(&self, work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
        let outcome = if self.all.rank() == Rank(0) {
            let outcome = work();
            self.all.wake();
            outcome
        } else {
            self.all.sleep(|| self.tracker.report_alive(), stop_requested);
            Ok(T::default())
        };
        self.agree(outcome)
    }

    /// Rank 0 calls this every few seconds inside [`World::on_root_long`]. The watchdog sees that the rank is alive,
    /// and the rank learns whether another rank was requested to stop.
    pub fn report_alive(&self) {
        self.tracker.report_alive();
        if self.all.stop_reported() {
            signals::request_stop();
        }
    }

    /// Whether all ranks have agreed to fail, so that each of them leaves in order.
    #[must_use]
    pub fn all_leave(&self) -> bool {
        self.speaker.get().is_some()
    }

    /// Runs `work`. A panic within is printed at once and does not end the job yet: the caller may save something, and then
    /// calls [`World::abort_after_panic`]. What `work` has changed may be half done.
    ///
    /// # Errors
    /// [`Error::Panicked`] after a panic.
    pub fn catch_panic<T>(&self, work: impl FnOnce() -> T) -> Result<T, Error> {
        self.panics.catch(work).map_err(|exit| Error::Panicked { exit })
    }

    /// Ends the whole job after a panic whose message is printed.
    pub fn abort_after_panic(&self, failure: &Failure) -> ! {
        abort_world(failure.exit())
    }

    /// Runs `work` after a failure, before this rank leaves. Where it does not end within `limit`, the failure is printed and
    /// this process ends at once, so that a disk that does not answer holds up no other rank. `None` where the limit cannot
    /// be kept, because no thread can be started.
    pub fn last_work<T>(&self, failure: &Failure, limit: Duration, work: impl FnOnce() -> T) -> Option<T> {
        let message = message(failure, self.tracker.shared_site(), &self.ledger);
        let guard = DeadlineGuard::start(limit, message, failure.exit())?;
        let done = work();
        drop(guard);
        Some(done)
    }

    /// A failure that every rank has in the same way: rank 0 prints it.
    fn common_failure(&self, error: Error) -> Failure {
        self.speaker.set(Some(Rank(0)));
        error.into()
    }

    /// Compares a short text over all ranks; `what` names it in the message.
    ///
    /// # Errors
    /// On every rank, when any rank's text differs from rank 0's.
    pub fn require_equal(&self, what: &'static str, value: &str) -> Result<(), Failure> {
        let all = self.all.gather_texts(value);
        match all.iter().position(|other| *other != all[0]) {
            None => Ok(()),
            Some(other) => Err(self.common_failure(Error::Disagree {
                what,
                first: Rank(0),
                first_value: all[0].clone(),
                other: Rank(other),
                other_value: all[other].clone(),
            })),
        }
    }

    /// Ends this rank's part after a failure. If all ranks have agreed to fail, one of them prints the reason and all
    /// leave in order with its exit code. Otherwise the other ranks wait for this one, so the job is aborted.
    #[must_use]
    pub fn leave(&self, failure: Failure) -> Exit {
        let Some(speaker) = self.speaker.get() else { self.abort(failure) };
        signals::restore_default_signals();
        let message = message(&failure, self.tracker.shared_site(), &self.ledger);
        tracing::error!(exit = failure.exit().code(), "{message}");
        if speaker == self.all.rank() {
            say(&format!("longstraw: {message}"));
        }
        // Launchers end a job at its first non-zero exit, so no rank leaves before the reason is printed.
        self.all.barrier();
        failure.exit()
    }

    /// Prints the failure with this rank's site and ends the whole job with its exit code.
    pub fn abort(&self, failure: Failure) -> ! {
        let failure = failure.at(self.tracker.site());
        let message = message(&failure, self.tracker.shared_site(), &self.ledger);
        say(&format!("longstraw: {message}"));
        tracing::error!(exit = failure.exit().code(), "{message}");
        abort_world(failure.exit())
    }

    /// Rank 0 prints a warning that a user should see; every rank logs it.
    pub fn warn_user(&self, line: &str) {
        tracing::warn!("{line}");
        if self.all.rank() == Rank(0) {
            say(&format!("longstraw: {line}"));
        }
    }

    /// Whether `yes` holds on any rank; every rank gets the same answer.
    #[must_use]
    pub fn any(&self, yes: bool) -> bool {
        self.all.gather_numbers(u64::from(yes)).contains(&1)
    }

    /// Records the site of this rank.
    #[must_use]
    pub fn tracker(&self) -> &Tracker {
        &self.tracker
    }

    /// Bytes of this rank by purpose.
    #[must_use]
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The ranks on this rank's machine. A collective: every rank calls it.
    #[must_use]
    pub fn machine(&self) -> Axis {
        self.all.split_by_machine()
    }
}

impl Drop for World {
    /// What follows is the end of MPI, in which ranks wait for each other.
    fn drop(&mut self) {
        std::mem::forget(self.tracker.shared_site().begin_wait());
    }
}
