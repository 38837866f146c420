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
use crate::failure::Exit;
use crate::units::Rank;
use crate::watch::{Beat, Heard, Hearts, Pace, Patience, Peers, Place, Verdict};

/// From the verdict to the end at the latest, whatever holds up words and abort.
const END_MAX: Duration = Duration::from_secs(5);
/// What the ranks that do not speak leave the one that does.
const SPEAKING: Duration = Duration::from_secs(3);

/// What both threads know.
struct Known {
    pace: Pace,
    peers: Peers,
    entered: DateTime<Utc>,
}

/// Who watches, and whom.
#[derive(Clone)]
struct Watch {
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
    /// Writes this rank's first heartbeat and starts to watch.
    pub(super) fn start(hearts: Hearts, place: &Place, ranks: usize, patience: Patience) -> io::Result<Watchdog> {
        let rank = place.site().rank;
        let moment = place.moment();
        let known = Known {
            pace: Pace::new(patience, moment),
            peers: Peers::new(rank, ranks, patience.silence()),
            entered: Utc::now(),
        };
        let host = mpi::environment::processor_name().unwrap_or_default();
        let known = Arc::new(Mutex::new(known));
        let watch = Watch { hearts: hearts.clone(), place: place.clone(), rank, ranks, host, known };
        watch.hearts.write(&watch.beat(0))?;
        let (other, interval) = (watch.clone(), patience.interval());
        let beats = Thread::start("heartbeat", move |stopped| other.beat_until(stopped, interval))?;
        let judge = Thread::start("watchdog", move |stopped| watch.judge_until(stopped, interval))?;
        Ok(Watchdog { hearts, rank, beats: Some(beats), judge: Some(judge) })
    }
}

impl Watch {
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
            let own = matches!(&heard[self.rank.0], Heard::Beat(beat) if beat.count == count);
            let now = Instant::now();
            let good = own && !failed && now - start <= interval && now - last <= 3 * interval;
            self.known().peers.look(heard, now - last, good);
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
