//! Signals that request a stop: SIGUSR1 early, with a configured time to leave; SIGUSR2, SIGTERM, SIGINT and SIGHUP shortly
//! before the end. The second of SIGTERM and SIGINT, in either order, ends the process at once.

#![expect(unsafe_code, reason = "a signal handler may only do what is safe in one")]

use std::fs;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::low_level;

use super::error::Error;
use crate::runtime::terminal::say_in_handler;

/// Time from SIGTERM or SIGUSR2 to the end of the process: what batch systems and service managers leave before they
/// kill.
const URGENT_GRACE: Duration = Duration::from_secs(30);
/// A second signal within this time is the first one again: `timeout` and some shells signal a process and then its group.
const SAME_SIGNAL_MS: u64 = 1000;
/// What SIGINT prints, since a terminal shows nothing of an ordered stop for a while.
const INTERRUPTED: &str = "\nlongstraw: stopping in order; Ctrl-C again, or SIGTERM, ends it at once\n";

/// Zero of the times below.
static START: OnceLock<Instant> = OnceLock::new();
/// When the first SIGUSR1 came, in milliseconds after [`START`], plus 1; 0 before it. A handler receives no argument
/// that could hold this state, so the state is static.
static REQUEST_MS: AtomicU64 = AtomicU64::new(0);
/// The same for the other signals.
static URGENT_REQUEST_MS: AtomicU64 = AtomicU64::new(0);
/// The same for SIGINT and SIGTERM together: the second of them ends the process.
static END_MS: AtomicU64 = AtomicU64::new(0);
/// Whether the signals end the process again.
static LEAVING: AtomicBool = AtomicBool::new(false);

/// Milliseconds since the handlers were installed, plus 1.
fn now_ms() -> u64 {
    let elapsed = START.get().map(Instant::elapsed).unwrap_or_default();
    u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX).saturating_add(1)
}

/// Notes the time of the first signal; returns whether this was it.
fn note(first_ms: &AtomicU64) -> bool {
    first_ms.compare_exchange(0, now_ms(), Ordering::Relaxed, Ordering::Relaxed).is_ok()
}

/// Whether a signal that came first at `first_ms` has come again, and not as an echo of the first.
fn is_repeated(first_ms: &AtomicU64) -> bool {
    !note(first_ms) && now_ms().saturating_sub(first_ms.load(Ordering::Relaxed)) >= SAME_SIGNAL_MS
}

/// From here on the signals request a stop instead of ending the process. Must be called before MPI starts, because a signal
/// may come while MPI starts. SIGINT and SIGHUP stay ignored where the process was started so (`nohup`, a script's `&`).
///
/// # Errors
/// When the system refuses a handler.
pub fn install_signal_handlers() -> Result<(), Error> {
    START.get_or_init(Instant::now);
    let ignored = ignored_signals();
    for signal in [SIGUSR1, SIGUSR2, SIGTERM, SIGINT, SIGHUP] {
        if [SIGINT, SIGHUP].contains(&signal) && ignored >> (signal - 1) & 1 == 1 {
            continue;
        }
        let handler = move || handle(signal);
        // SAFETY: the handler takes no lock and allocates nothing: it loads and stores atomics, reads the monotonic
        // clock, writes to a file descriptor, and calls a function that is meant for handlers.
        unsafe { low_level::register(signal, handler) }.map_err(|source| Error::Signals { source })?;
    }
    Ok(())
}

fn handle(signal: i32) {
    let again = match signal {
        SIGINT | SIGTERM => is_repeated(&END_MS),
        _ => false,
    };
    if again || LEAVING.load(Ordering::Relaxed) {
        let _ = low_level::emulate_default_handler(signal);
    }
    let first = note(if signal == SIGUSR1 { &REQUEST_MS } else { &URGENT_REQUEST_MS });
    if first && signal == SIGINT {
        say_in_handler(INTERRUPTED);
    }
}

/// The signals that this process ignores: bit n − 1 stands for signal n. None where the system does not say.
fn ignored_signals() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// The signals end the process again: this rank leaves after a failure, and the launcher's SIGTERM must not find it
/// waiting.
pub(super) fn restore_default_signals() {
    LEAVING.store(true, Ordering::Relaxed);
}

/// Whether a signal has requested a stop of this rank.
#[must_use]
pub fn stop_requested() -> bool {
    [&REQUEST_MS, &URGENT_REQUEST_MS].iter().any(|first_ms| first_ms.load(Ordering::Relaxed) > 0)
}

/// Another rank was requested to stop; this rank counts as requested, too.
pub(super) fn request_stop() {
    let _ = note(&REQUEST_MS);
}

/// Time until this rank is ended, according to the signals so far: `grace` after the first SIGUSR1, at most 30 s after
/// the first of the others. `None` before the first signal.
#[must_use]
pub fn time_left(grace: Duration) -> Option<Duration> {
    let left = |first_ms: &AtomicU64, grace: Duration| {
        let first_ms = first_ms.load(Ordering::Relaxed);
        let passed = Duration::from_millis(now_ms().saturating_sub(first_ms));
        (first_ms > 0).then(|| grace.saturating_sub(passed))
    };
    [left(&REQUEST_MS, grace), left(&URGENT_REQUEST_MS, grace.min(URGENT_GRACE))].into_iter().flatten().min()
}
