//! The MPI boundary: start, axes, bounded collectives over bytes, and the abort discipline.
//!
//! Every collective is entered by every rank of its axis, also with nothing to send. Counts on the wire are C ints, so
//! each call moves at most [`Axis::round_bytes`] from a rank and repeats until all is moved. A rank that fails prints
//! its site and aborts the world: a rank that merely returned would leave the others waiting for ever.

mod about;
mod axis;
pub mod devices;
pub mod exchange;
mod root;
mod stop;
mod watchdog;

use std::cell::Cell;
use std::ffi::OsStr;
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use mpi::Threading;
use mpi::environment::Universe;
use mpi::topology::{Color, Communicator, SimpleCommunicator};
use mpi::traits::CommunicatorCollectives;

pub use about::{host, library};
pub use axis::Axis;
pub use stop::{asked_to_stop, heed_signals, time_left};

use crate::runtime::failure::{Classified, Exit, Failure, out_of_memory};
use crate::runtime::liveness::{Hearts, Patience, Place, Tracker};
use crate::runtime::memory::{Ledger, Shortage};
use crate::runtime::units::{Rank, as_index, from_index};
use watchdog::{Watch, Watchdog};

/// What can be wrong with the world itself.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// MPI could not be started.
    #[error("MPI is already running or could not be started in this process")]
    Start,
    /// The system takes no handler for a signal.
    #[error("the signals that ask for a stop cannot be heeded: {source}")]
    Signals {
        /// What the system says.
        source: std::io::Error,
    },
    /// N processes each believe they are alone.
    #[error(
        "this process is rank 0 of 1, but {variable} says that {tasks} were started: each of them believes it is \
         alone; start with `srun --mpi=pmix` or `mpirun` of the MPI that longstraw was built with"
    )]
    Alone {
        /// Which variable of the launcher says so.
        variable: &'static str,
        /// How many processes it names.
        tasks: u64,
    },
    /// The world cannot be cut into context-parallel groups.
    #[error("{ranks} ranks cannot be cut into context-parallel groups of {cp_size}: start a multiple of {cp_size}")]
    Uneven {
        /// Ranks in the world.
        ranks: u64,
        /// Ranks that share one prompt.
        cp_size: u64,
    },
    /// Ranks hold different values where one was expected.
    #[error(
        "ranks disagree about {what}: rank {first} has {first_value}, rank {other} has {other_value}; give all ranks the same files, flags and LONGSTRAW_ variables"
    )]
    Disagree {
        /// What was compared.
        what: &'static str,
        /// The lowest rank.
        first: Rank,
        /// Its value.
        first_value: String,
        /// The first rank that differs.
        other: Rank,
        /// Its value.
        other_value: String,
    },
    /// No heartbeat can be written, or nobody can watch.
    #[error("cannot keep a heartbeat in {}: {source}; choose another place with --run-dir", folder.display())]
    Watch {
        /// The run directory.
        folder: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// Another rank failed; that rank says why.
    #[error("rank {rank} failed")]
    Elsewhere {
        /// The rank that failed.
        rank: Rank,
        /// How it ends.
        exit: Exit,
    },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            Error::Uneven { .. } => Exit::Config,
            Error::Watch { .. } => Exit::Data,
            Error::Elsewhere { exit, .. } => *exit,
            _ => Exit::Disagree,
        }
    }
}

/// All ranks of the run, and this process's place among them.
pub struct World {
    /// All ranks.
    pub all: Axis,
    /// The ranks that share this rank's prompt (context parallel).
    pub cp: Axis,
    /// Index of this rank's prompt group (data parallel).
    pub dp_index: usize,
    /// How many prompt groups run side by side.
    pub dp_size: usize,
    tracker: Tracker,
    ledger: Ledger,
    /// Who says why, once all ranks have agreed to fail.
    speaker: Cell<Option<Rank>>,
    // Almost last, because fields are dropped in order: communicators must be freed before MPI is finalized.
    _universe: Universe,
    // After it: a rank may also wait for ever in the end of MPI.
    watchdog: Option<Watchdog>,
}

/// How many processes the launcher says it has started, and the variable that says so.
#[derive(Clone, Copy, Debug)]
pub struct Launcher {
    /// The variable.
    pub variable: &'static str,
    /// Its value.
    pub tasks: u64,
}

impl World {
    /// Starts MPI and makes every later panic end the whole job. `cp_size` of `None` is the world.
    ///
    /// # Errors
    /// When MPI does not start, when the launcher says that more processes were started than MPI knows of, or when the
    /// world is no multiple of `cp_size`.
    pub fn start(launcher: Option<Launcher>, tracker: Tracker) -> Result<Self, Failure> {
        let (universe, _) = mpi::initialize_with_threading(Threading::Funneled).ok_or(Error::Start)?;
        let all = Axis::new(universe.world(), tracker.place().clone());
        tracker.set_rank(all.rank());
        let ledger = Ledger::default();
        abort_on_panic(tracker.place().clone(), ledger.clone());
        if let Some(Launcher { variable, tasks }) = launcher.filter(|told| all.size() == 1 && told.tasks > 1) {
            return Err(Error::Alone { variable, tasks }.into());
        }
        let cp = all.split(0);
        Ok(World {
            all,
            cp,
            dp_index: 0,
            dp_size: 1,
            tracker,
            ledger,
            speaker: Cell::new(None),
            _universe: universe,
            watchdog: None,
        })
    }

    /// From here to the end of MPI a watchdog on each rank keeps a heartbeat in rank 0's `run_dir` and ends the job when a
    /// rank stands still. `stall_sec` is `run.stall_sec`. Every rank takes part. Where a rank does not reach that folder,
    /// no rank listens to others: each watches itself alone, and the job says so.
    ///
    /// # Errors
    /// When rank 0 cannot write a heartbeat, or a rank cannot watch.
    pub fn watch(&mut self, run_dir: &Path, stall_sec: u64) -> Result<(), Failure> {
        self.watchdog = None;
        // Unlike the numbers of processes, times do not come again after a machine has started anew.
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let job = self.all.gather_numbers(u64::try_from(now.as_nanos()).unwrap_or_default())[0];
        let folder = self.of_rank_0(run_dir);
        let wrong = |source| Failure::from(Error::Watch { folder: folder.clone(), source });
        let hearts = Hearts::of(&folder, job);
        let watch = Watch::new(hearts, self.tracker.place(), self.all.size(), Patience::of(stall_sec));
        let first = self.all.rank() == Rank(0);
        // Rank 0's heartbeat is there before any other rank looks for it: file systems remember what was absent.
        self.agree(if first { watch.begin().map_err(wrong) } else { Ok(()) })?;
        let written = first || watch.write_first().is_ok();
        self.all.barrier();
        let heard = self.all.gather_numbers(u64::from(written && watch.hears_all()));
        let deaf = heard.iter().position(|&heard| heard == 0);
        let watchdog = Watchdog::start(watch, deaf.is_none());
        self.watchdog = Some(self.agree(watchdog.map_err(wrong))?);
        if let Some(rank) = deaf {
            self.remark(&format!(
                "rank {rank} does not share rank 0's run directory {}: no rank will notice when another falls silent; \
                 each watches its own deadline alone",
                folder.display()
            ));
        }
        Ok(())
    }

    /// Rank 0's path, made absolute there: ranks may stand in different folders.
    fn of_rank_0(&self, path: &Path) -> PathBuf {
        let own = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let mut bytes = own.as_os_str().as_bytes().to_vec();
        let length = self.all.gather_numbers(from_index(bytes.len()))[0];
        bytes.resize(as_index(length), 0);
        self.all.broadcast(&mut bytes);
        OsStr::from_bytes(&bytes).into()
    }

    /// Cuts the world into groups of `cp_size` consecutive ranks.
    ///
    /// # Errors
    /// When the world is no multiple of `cp_size`.
    pub fn cut(&mut self, cp_size: usize) -> Result<(), Failure> {
        let ranks = self.all.size();
        if cp_size == 0 || !ranks.is_multiple_of(cp_size) {
            return Err(self.together(Error::Uneven { ranks: ranks as u64, cp_size: cp_size as u64 }));
        }
        self.dp_index = self.all.rank().0 / cp_size;
        self.dp_size = ranks / cp_size;
        self.cp = self.all.split(self.dp_index);
        Ok(())
    }

    /// Ends an attempt that every rank makes: all succeed, or all fail. The lowest rank that failed keeps its own
    /// failure, the others get [`Error::Elsewhere`], so one message is printed and every rank can leave in order.
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
            _ => Err(Error::Elsewhere { rank: Rank(rank), exit: Exit::of_code(codes[rank]) }.into()),
        }
    }

    /// Rank 0 does what takes long and needs no other rank, such as asking a service; the others sleep meanwhile. All agree
    /// on the outcome, and rank 0 has what came of it. It must come to an end by itself: nobody's deadline holds for it but
    /// rank 0's own.
    ///
    /// # Errors
    /// When it failed.
    pub fn alone<T: Default>(&self, work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
        let done = if self.all.rank() == Rank(0) {
            let done = work();
            self.all.wake();
            done
        } else {
            self.all.sleep(|| self.tracker.alive(), asked_to_stop);
            Ok(T::default())
        };
        self.agree(done)
    }

    /// To be called on rank 0 every few seconds while it works [`World::alone`]: it is alive, and hears whether another rank
    /// was asked to stop.
    pub fn alive(&self) {
        self.tracker.alive();
        if self.all.is_hurried() {
            stop::asked_elsewhere();
        }
    }

    /// A failure that every rank sees alike: rank 0 speaks.
    fn together(&self, error: Error) -> Failure {
        self.speaker.set(Some(Rank(0)));
        error.into()
    }

    /// Compares a short text over all ranks.
    ///
    /// # Errors
    /// On every rank, when any rank's text differs from rank 0's.
    pub fn same(&self, what: &'static str, value: &str) -> Result<(), Failure> {
        let all = self.all.gather_texts(value);
        match all.iter().position(|other| *other != all[0]) {
            None => Ok(()),
            Some(other) => Err(self.together(Error::Disagree {
                what,
                first: Rank(0),
                first_value: all[0].clone(),
                other: Rank(other),
                other_value: all[other].clone(),
            })),
        }
    }

    /// Ends this rank's part after a failure. When all ranks have agreed to fail, one of them speaks and all leave in
    /// order with its exit code; otherwise the others wait for this rank, so the job is aborted.
    #[must_use]
    pub fn leave(&self, failure: Failure) -> Exit {
        let Some(speaker) = self.speaker.get() else { self.abort(failure) };
        stop::heed_no_longer();
        let words = self.words(&failure);
        tracing::error!("{words}");
        if speaker == self.all.rank() {
            say(&format!("longstraw: {words}"));
        }
        // Launchers end a job at its first non-zero exit: nobody leaves before the reason is on its way.
        self.all.barrier();
        failure.exit()
    }

    /// Prints the failure with this rank's site and ends the whole job with its exit code. Never returns.
    pub fn abort(&self, failure: Failure) -> ! {
        let failure = failure.at(self.tracker.site());
        let words = self.words(&failure);
        say(&format!("longstraw: {words}"));
        tracing::error!("{words}");
        abort_world(failure.exit())
    }

    /// A failure in words. Where an allocator had no more memory, they are a report; the phase has let go of what it held
    /// by now, so the most that it held stands there.
    fn words(&self, failure: &Failure) -> String {
        let words = failure.to_string();
        if failure.exit() != Exit::DoesNotFit || !out_of_memory(&words) {
            return words;
        }
        let report = Shortage::of(&words, self.tracker.place(), self.ledger.holdings_at_most()).report();
        format!("{report}\n  {}", first_line(&words))
    }

    /// Rank 0 says something that a user should know before the first step.
    pub fn remark(&self, line: &str) {
        tracing::warn!("{line}");
        if self.all.rank() == Rank(0) {
            say(&format!("longstraw: {line}"));
        }
    }

    /// Whether any rank says yes; every rank gets the same answer.
    #[must_use]
    pub fn any(&self, yes: bool) -> bool {
        self.all.gather_numbers(u64::from(yes)).contains(&1)
    }

    /// Where this rank is.
    #[must_use]
    pub fn tracker(&self) -> &Tracker {
        &self.tracker
    }

    /// Bytes of this rank by kind.
    #[must_use]
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The ranks of this machine.
    #[must_use]
    pub fn machine(&self) -> Axis {
        self.all.split_by_machine()
    }

    /// Ranks on this machine, for the share of cores a rank may use, and this rank's index among them.
    #[must_use]
    pub fn on_this_machine(&self) -> (Rank, usize) {
        let machine = self.machine();
        (machine.rank(), machine.size())
    }
}

impl Drop for World {
    /// What is left is the end of MPI, in which ranks wait for each other.
    fn drop(&mut self) {
        std::mem::forget(self.tracker.place().waits());
    }
}

/// Ends the whole job at once.
fn abort_world(exit: Exit) -> ! {
    SimpleCommunicator::world().abort(exit.code())
}

/// Writes a line to standard error and makes sure that it has left the process before an abort.
fn say(line: &str) {
    let mut stderr = std::io::stderr().lock();
    // A closed standard error leaves nowhere to complain to; the exit code still tells.
    let _ = writeln!(stderr, "{line}").and_then(|()| stderr.flush());
}

/// Makes a panic on any thread print its site and end the whole job; one for want of memory says who has it.
fn abort_on_panic(place: Place, ledger: Ledger) {
    std::panic::set_hook(Box::new(move |panic| {
        let (text, site) = (panic.to_string(), place.site());
        if out_of_memory(&text) {
            let report = Shortage::of(&text, &place, ledger.holdings()).report();
            say(&format!("longstraw: {report}"));
            tracing::error!("{report}\n{text}");
            abort_world(Exit::DoesNotFit)
        }
        // libtorch appends the frames of its own stack, which tell a user nothing.
        let cause = text.split("\\nException raised from").next().unwrap_or_default();
        say(&format!("longstraw: {site}: bug: {cause}"));
        tracing::error!("{site}: bug: {text}");
        abort_world(Exit::Bug)
    }));
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

fn color(index: usize) -> Color {
    Color::with_value(i32::try_from(index).unwrap_or(i32::MAX))
}

fn barrier(communicator: &SimpleCommunicator) {
    communicator.barrier();
}
