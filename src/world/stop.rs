//! Signals that ask for a stop.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use libc::{SIGTERM, SIGUSR1, SIGUSR2, c_int};

use super::Error;

/// Seconds between SIGTERM or SIGUSR2 and the end, where less is not configured: what batch systems and service managers
/// leave before they kill.
const HURRY: Duration = Duration::from_secs(30);

/// When the first SIGUSR1 came, in milliseconds of the monotonic clock, plus 1; 0 before it. A handler is given nothing to
/// find its state by, so it stands here.
static ASKED_MS: AtomicU64 = AtomicU64::new(0);
/// The same for SIGTERM and SIGUSR2, which leave less time.
static HURRIED_MS: AtomicU64 = AtomicU64::new(0);

/// All that a handler does: anything more could meet a lock that the interrupted code holds.
extern "C" fn ask(signal: c_int) {
    let when = if signal == SIGUSR1 { &ASKED_MS } else { &HURRIED_MS };
    let _ = when.compare_exchange(0, now_ms() + 1, Ordering::Relaxed, Ordering::Relaxed);
}

/// The monotonic clock, by a call that a handler may make.
fn now_ms() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes to a value that outlives the call; this clock is always there.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    u64::try_from(now.tv_sec).unwrap_or(0) * 1000 + u64::try_from(now.tv_nsec).unwrap_or(0) / 1_000_000
}

/// SIGUSR1, SIGUSR2 and SIGTERM ask for a stop from here on instead of ending the process. Called before MPI starts, which
/// takes long enough for a signal to come.
///
/// # Errors
/// When the system refuses a handler.
pub fn install_signal_handlers() -> Result<(), Error> {
    answer((ask as *const ()).addr())
}

/// They end the process again: this rank leaves after a failure, and the launcher's SIGTERM should not find it waiting.
pub(super) fn heed_no_longer() {
    // A rank whose handlers stay is ended by the launcher's SIGKILL, a little later.
    let _ = answer(libc::SIG_DFL);
}

fn answer(handler: libc::sighandler_t) -> Result<(), Error> {
    for signal in [SIGUSR1, SIGUSR2, SIGTERM] {
        // SAFETY: all bits zero is a valid `sigaction`: no flags, an empty mask, and the default handler, which is
        // replaced below.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = handler;
        // A read or write that the signal interrupts goes on by itself.
        action.sa_flags = libc::SA_RESTART;
        // SAFETY: the handler is the default or a function of the type that a plain handler has, which lives as long as
        // the process, reads a clock and stores to an atomic; the action outlives the call, and no earlier one is asked
        // for.
        let outcome = unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) };
        if outcome != 0 {
            return Err(Error::Signals { source: io::Error::last_os_error() });
        }
    }
    Ok(())
}

/// Whether a signal has asked this rank to stop.
#[must_use]
pub fn stop_requested() -> bool {
    [&ASKED_MS, &HURRIED_MS].iter().any(|when| when.load(Ordering::Relaxed) > 0)
}

/// Another rank was asked to stop: this one was, from now on.
pub(super) fn asked_elsewhere() {
    let _ = ASKED_MS.compare_exchange(0, now_ms() + 1, Ordering::Relaxed, Ordering::Relaxed);
}

/// How long this rank has until it is ended, by the signals that have come: `grace` from the first SIGUSR1, and no more
/// than half a minute from the first SIGTERM or SIGUSR2. `None` if none has.
#[must_use]
pub fn time_left(grace: Duration) -> Option<Duration> {
    let left = |when: &AtomicU64, grace: Duration| {
        let came = when.load(Ordering::Relaxed).checked_sub(1)?;
        Some(grace.saturating_sub(Duration::from_millis(now_ms().saturating_sub(came))))
    };
    [left(&ASKED_MS, grace), left(&HURRIED_MS, grace.min(HURRY))].into_iter().flatten().min()
}
