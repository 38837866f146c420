//! The watchdog of a rank: two threads that keep running whatever the rank itself is stuck in.
//!
//! One writes and reads heartbeats; the disk of the run directory may block it. The other never touches a disk: it
//! watches the time and ends the job when a rank stalls.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use chrono::{DateTime, SecondsFormat, Utc};

use super::abort::abort_world;
use crate::runtime::failure::Exit;
use crate::runtime::liveness::{
    Heartbeat, HeartbeatFiles, Peers, Progress, Reading, SharedSite, Stall, StallLimits, Visibility,
};
use crate::runtime::terminal::say;
use crate::runtime::units::Rank;

/// Maximum time from the discovery of a stall to the end of the process, even if printing or aborting blocks.
const END_MAX: Duration = Duration::from_secs(5);
/// Time that the other ranks leave the reporting one to print.
const REPORT_TIME: Duration = Duration::from_secs(3);
/// Attempts, a second apart, to read all first heartbeats before the folder counts as not shared.
const FIRST_READS: u32 = 5;

/// State of both threads.
struct Known {
    progress: Progress,
    peers: Peers,
    /// When the rank passed the last border.
    entered: DateTime<Utc>,
}

/// What both threads work with.
#[derive(Clone)]
pub(super) struct Watch {
    limits: StallLimits,
    files: HeartbeatFiles,
    site: SharedSite,
    rank: Rank,
    ranks: usize,
    host: String,
    known: Arc<Mutex<Known>>,
}

/// Both threads. Dropping it ends them and removes the rank's heartbeat.
pub(super) struct Watchdog {
    files: HeartbeatFiles,
    rank: Rank,
    heartbeat: Option<Thread>,
    timer: Option<Thread>,
}

struct Thread {
    /// Dropping the sender ends the thread.
    stop: Sender<()>,
    handle: JoinHandle<()>,
}

impl Thread {
    fn start(name: &str, body: impl FnOnce(&Receiver<()>) + Send + 'static) -> io::Result<Thread> {
        let (stop, stopped) = channel();
        let handle = thread::Builder::new().name(name.into()).spawn(move || body(&stopped))?;
        Ok(Thread { stop, handle })
    }

    fn end(self) {
        drop(self.stop);
        // A thread that panicked has ended the job.
        let _ = self.handle.join();
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        // The disk may block the heartbeat thread; the timer thread watches this wait as well.
        self.heartbeat.take().into_iter().for_each(Thread::end);
        self.files.remove(self.rank);
        self.timer.take().into_iter().for_each(Thread::end);
    }
}

impl Watchdog {
    /// Starts both threads. If the ranks do not share the folder (`shared` is false), no heartbeat is written and this
    /// rank watches only itself.
    pub(super) fn start(watch: Watch, shared: bool) -> io::Result<Watchdog> {
        let files = watch.files.clone();
        let rank = watch.rank;
        let interval = watch.limits.interval();
        let heartbeat = if shared {
            let watch = watch.clone();
            Some(Thread::start("heartbeat", move |stopped| watch.exchange_heartbeats(stopped, interval))?)
        } else {
            watch.known().peers.watch_only_self();
            files.remove(rank);
            None
        };
        let timer = Thread::start("watchdog", move |stopped| watch.watch_time(stopped, interval))?;
        Ok(Watchdog { files, rank, heartbeat, timer: Some(timer) })
    }
}

impl Watch {
    /// For the rank of `site`, one of `ranks`; writes nothing yet.
    pub(super) fn new(files: HeartbeatFiles, site: &SharedSite, ranks: usize, limits: StallLimits) -> Watch {
        let rank = site.site().rank;
        let known = Known {
            progress: Progress::new(limits, site.snapshot()),
            peers: Peers::new(rank, ranks, limits.silence()),
            entered: Utc::now(),
        };
        let host = mpi::environment::processor_name().unwrap_or_default();
        Watch { limits, files, site: site.clone(), rank, ranks, host, known: Arc::new(Mutex::new(known)) }
    }

    /// Empties the folder and writes this rank's first heartbeat.
    pub(super) fn begin(&self) -> io::Result<()> {
        self.files.prepare()?;
        self.write_first()
    }

    /// Writes this rank's first heartbeat.
    pub(super) fn write_first(&self) -> io::Result<()> {
        self.files.write(&self.heartbeat(0))
    }

    /// Whether this rank sees the first heartbeats of all ranks, once all have been written.
    pub(super) fn sees_all(&self) -> bool {
        let all = || (0..self.ranks).all(|rank| matches!(self.files.read(Rank(rank)), Reading::Present(_)));
        (0..FIRST_READS).any(|attempt| {
            if attempt > 0 {
                thread::sleep(Duration::from_secs(1));
            }
            all()
        })
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // A panic ends the job, so a poisoned lock is only seen while the process ends.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn heartbeat(&self, count: u64) -> Heartbeat {
        let known = self.known();
        let snapshot = known.progress.snapshot();
        let text = |time: DateTime<Utc>| time.to_rfc3339_opts(SecondsFormat::Secs, true);
        Heartbeat {
            rank: self.rank,
            host: self.host.clone(),
            pid: std::process::id(),
            job: self.files.job(),
            phase: snapshot.site.phase,
            layer: snapshot.site.layer,
            borders: snapshot.borders,
            waits: snapshot.waits,
            linked: snapshot.linked,
            seconds_here: known.progress.time_here().as_secs_f64(),
            deadline_seconds: known.progress.deadline().as_secs_f64(),
            entered: text(known.entered),
            written: text(Utc::now()),
            count,
        }
    }

    /// Writes a heartbeat and reads those of all ranks, every `interval`.
    fn exchange_heartbeats(&self, stopped: &Receiver<()>, interval: Duration) {
        let mut count = 0;
        let mut last = Instant::now();
        let mut failed = false;
        while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
            count += 1;
            let start = Instant::now();
            let written = self.files.write(&self.heartbeat(count));
            if let Err(error) = &written
                && !failed
            {
                tracing::warn!("cannot write {}: {error}", self.files.file(self.rank).display());
            }
            failed = written.is_err();
            let readings: Vec<Reading> = (0..self.ranks).map(|rank| self.files.read(Rank(rank))).collect();
            let now = Instant::now();
            let round_max = self.limits.silence() / 4;
            let is_quick = now - start <= round_max && now - last <= round_max + 3 * interval;
            let visibility = match &readings[self.rank.0] {
                Reading::Present(own) if own.count == count && !failed && is_quick => Visibility::Current,
                Reading::Present(_) => Visibility::Late,
                Reading::Removed | Reading::Unreadable => Visibility::None,
            };
            self.known().peers.record(readings, now - last, visibility);
            last = now;
        }
    }

    /// Watches the time, and ends the job at a stall.
    fn watch_time(&self, stopped: &Receiver<()>, interval: Duration) {
        let mut last = Instant::now();
        while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
            // Time in which this process did not run does not count.
            let elapsed = last.elapsed().min(3 * interval);
            last = Instant::now();
            let stall = {
                let mut known = self.known();
                let borders_before = known.progress.snapshot().borders;
                let snapshot = self.site.snapshot();
                known.progress.observe(snapshot, elapsed);
                if snapshot.borders != borders_before {
                    known.entered = Utc::now();
                }
                known.peers.advance(elapsed);
                known.peers.find_stall(&known.progress)
            };
            if let Some(stall) = stall {
                self.end(&stall);
            }
        }
    }

    /// Reports the stall, once for all ranks, and ends the whole job.
    fn end(&self, stall: &Stall) -> ! {
        let deadline = thread::Builder::new().spawn(|| {
            thread::sleep(END_MAX);
            exit_at_once(Exit::Disagree)
        });
        let report = format!("{stall}; the job ends. Go on with `longstraw train --resume`");
        // Without this thread, nothing would end a process in which printing or aborting blocks.
        if deadline.is_err() {
            say(&format!("longstraw: {report}"));
            exit_at_once(Exit::Disagree)
        }
        if self.files.claim_report(&report) {
            say(&format!("longstraw: {report}"));
            tracing::error!(exit = Exit::Disagree.code(), "{report}");
        } else {
            tracing::error!(exit = Exit::Disagree.code(), "{report} (another rank says so)");
            thread::sleep(REPORT_TIME);
        }
        if mpi::environment::is_finalized() {
            exit_at_once(Exit::Disagree)
        }
        abort_world(Exit::Disagree)
    }
}

/// Ends the process at a deadline, unless it is dropped before.
pub(super) struct DeadlineGuard {
    thread: Option<Thread>,
}

impl DeadlineGuard {
    /// After `limit` the guard prints `message` and ends the process with `exit`. `None` where no thread can be started.
    pub(super) fn start(limit: Duration, message: String, exit: Exit) -> Option<DeadlineGuard> {
        let body = move |stopped: &Receiver<()>| {
            if stopped.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                say(&format!("longstraw: {message}"));
                exit_at_once(exit)
            }
        };
        Some(DeadlineGuard { thread: Some(Thread::start("deadline", body).ok()?) })
    }
}

impl Drop for DeadlineGuard {
    fn drop(&mut self) {
        self.thread.take().into_iter().for_each(Thread::end);
    }
}

/// Ends this process without unwinding or flushing, which may block.
fn exit_at_once(exit: Exit) -> ! {
    signal_hook::low_level::exit(exit.code())
}
