//! The watchdog of a rank: two threads that outlive whatever the rank itself is stuck in.
//!
//! One writes and reads heartbeats and may be held up by the run directory's disk. The other never touches a disk: it
//! watches the time and ends the job when a rank stands still.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use chrono::{DateTime, SecondsFormat, Utc};

use super::{abort_world, say};
use crate::runtime::failure::Exit;
use crate::runtime::liveness::{Beat, Heard, Hearts, Pace, Patience, Peers, Place, Sight, Verdict};
use crate::runtime::units::Rank;

/// From the verdict to the end at the latest, whatever holds up words and abort.
const END_MAX: Duration = Duration::from_secs(5);
/// What the ranks that do not speak leave the one that does.
const SPEAKING: Duration = Duration::from_secs(3);
/// At the start a rank looks for all heartbeats so often, a second apart, before it holds the folder for its own.
const FIRST_LOOKS: u32 = 5;

/// What both threads know.
struct Known {
    pace: Pace,
    peers: Peers,
    entered: DateTime<Utc>,
}

/// Who watches, and whom.
#[derive(Clone)]
pub(super) struct Watch {
    patience: Patience,
    hearts: Hearts,
    place: Place,
    rank: Rank,
    ranks: usize,
    host: String,
    known: Arc<Mutex<Known>>,
}

/// Both threads; dropped, they end and the rank's heartbeat is removed.
pub(super) struct Watchdog {
    hearts: Hearts,
    rank: Rank,
    beats: Option<Thread>,
    judge: Option<Thread>,
}

struct Thread {
    /// Dropped to end it.
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
        // The disk may hold up the one; the other watches over that too.
        self.beats.take().into_iter().for_each(Thread::end);
        self.hearts.remove(self.rank);
        self.judge.take().into_iter().for_each(Thread::end);
    }
}

impl Watchdog {
    /// Starts to watch. Where heartbeats are not `shared`, none is kept, and this rank watches itself alone.
    pub(super) fn start(watch: Watch, shared: bool) -> io::Result<Watchdog> {
        let (hearts, rank, interval) = (watch.hearts.clone(), watch.rank, watch.patience.interval());
        let beats = if shared {
            let other = watch.clone();
            Some(Thread::start("heartbeat", move |stopped| other.beat_until(stopped, interval))?)
        } else {
            watch.known().peers.ignore_others();
            hearts.remove(rank);
            None
        };
        let judge = Thread::start("watchdog", move |stopped| watch.judge_until(stopped, interval))?;
        Ok(Watchdog { hearts, rank, beats, judge: Some(judge) })
    }
}

impl Watch {
    /// Of the rank at `place`, one of `ranks`; nothing is written yet.
    pub(super) fn new(hearts: Hearts, place: &Place, ranks: usize, patience: Patience) -> Watch {
        let rank = place.site().rank;
        let known = Known {
            pace: Pace::new(patience, place.moment()),
            peers: Peers::new(rank, ranks, patience.silence()),
            entered: Utc::now(),
        };
        let host = mpi::environment::processor_name().unwrap_or_default();
        Watch { patience, hearts, place: place.clone(), rank, ranks, host, known: Arc::new(Mutex::new(known)) }
    }

    /// Makes the folder anew, with this rank's first heartbeat in it.
    pub(super) fn begin(&self) -> io::Result<()> {
        self.hearts.prepare()?;
        self.write_first()
    }

    /// This rank's first heartbeat.
    pub(super) fn write_first(&self) -> io::Result<()> {
        self.hearts.write(&self.beat(0))
    }

    /// Whether the first heartbeats of all ranks are seen from here, once all have been written.
    pub(super) fn hears_all(&self) -> bool {
        let all = || (0..self.ranks).all(|rank| matches!(self.hearts.hear(Rank(rank)), Heard::Beat(_)));
        (0..FIRST_LOOKS).any(|look| {
            if look > 0 {
                thread::sleep(Duration::from_secs(1));
            }
            all()
        })
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // A panic ends the job, so a poisoned lock is only seen on the way out.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn beat(&self, count: u64) -> Beat {
        let known = self.known();
        let (moment, clock) =
            (known.pace.moment(), |time: DateTime<Utc>| time.to_rfc3339_opts(SecondsFormat::Secs, true));
        Beat {
            rank: self.rank,
            host: self.host.clone(),
            pid: std::process::id(),
            job: self.hearts.job(),
            phase: moment.site.phase,
            layer: moment.site.layer,
            borders: moment.borders,
            waits: moment.waits,
            linked: moment.linked,
            seconds_here: known.pace.here().as_secs_f64(),
            deadline_seconds: known.pace.deadline().as_secs_f64(),
            entered: clock(known.entered),
            written: clock(Utc::now()),
            count,
        }
    }

    /// Writes a heartbeat and reads the others', again and again.
    fn beat_until(&self, stopped: &Receiver<()>, interval: Duration) {
        let (mut count, mut last, mut failed) = (0, Instant::now(), false);
        while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
            count += 1;
            let start = Instant::now();
            let written = self.hearts.write(&self.beat(count));
            if let Err(error) = &written
                && !failed
            {
                tracing::warn!("cannot write {}: {error}", self.hearts.file(self.rank).display());
            }
            failed = written.is_err();
            let heard: Vec<Heard> = (0..self.ranks).map(|rank| self.hearts.hear(Rank(rank))).collect();
            let now = Instant::now();
            let patient = self.patience.silence() / 4;
            let quick = now - start <= patient && now - last <= patient + 3 * interval;
            let sight = match &heard[self.rank.0] {
                Heard::Beat(beat) if beat.count == count && !failed && quick => Sight::Clear,
                Heard::Beat(_) => Sight::Late,
                Heard::Gone | Heard::Unclear => Sight::Nothing,
            };
            self.known().peers.look(heard, now - last, sight);
            last = now;
        }
    }

    /// Watches the time; ends the job when it must.
    fn judge_until(&self, stopped: &Receiver<()>, interval: Duration) {
        let mut last = Instant::now();
        while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
            // Time in which this process did not run is nobody's fault.
            let elapsed = last.elapsed().min(3 * interval);
            last = Instant::now();
            let verdict = {
                let mut known = self.known();
                let (before, moment) = (known.pace.moment().borders, self.place.moment());
                known.pace.see(moment, elapsed);
                if moment.borders != before {
                    known.entered = Utc::now();
                }
                known.peers.pass(elapsed);
                known.peers.judge(&known.pace)
            };
            if let Some(verdict) = verdict {
                self.end(&verdict);
            }
        }
    }

    /// Says why, once for all ranks, and ends the whole job.
    fn end(&self, verdict: &Verdict) -> ! {
        let patient = thread::Builder::new().spawn(|| {
            thread::sleep(END_MAX);
            leave_at_once(Exit::Disagree)
        });
        let words = format!("{verdict}; the job ends. Go on with `longstraw train --resume`");
        // Without the thread nothing else would end a process whose words or abort are held up.
        if patient.is_err() {
            say(&format!("longstraw: {words}"));
            leave_at_once(Exit::Disagree)
        }
        if self.hearts.first_to_say(&words) {
            say(&format!("longstraw: {words}"));
            tracing::error!("{words}");
        } else {
            tracing::error!("{words} (another rank says so)");
            thread::sleep(SPEAKING);
        }
        if mpi::environment::is_finalized() {
            leave_at_once(Exit::Disagree)
        }
        abort_world(Exit::Disagree)
    }
}

/// Ends this process without asking anything of it that may be stuck.
fn leave_at_once(exit: Exit) -> ! {
    // SAFETY: the call takes a number and does not return; nothing is unwound or flushed, which is its purpose.
    unsafe { libc::_exit(exit.code()) }
}
