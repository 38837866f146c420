//! Signals that request a stop: SIGUSR1 early, with a configured time to leave; SIGUSR2 and SIGTERM shortly before the
//! end.

#![expect(unsafe_code, reason = "a signal handler may only do what is safe in one")]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::low_level;

use super::error::Error;

/// Time from SIGTERM or SIGUSR2 to the end of the process: what batch systems and service managers leave before they
/// kill.
const URGENT_GRACE: Duration = Duration::from_secs(30);

/// Zero of the times below.
static START: OnceLock<Instant> = OnceLock::new();
/// When the first SIGUSR1 came, in milliseconds after [`START`], plus 1; 0 before it. A handler receives no argument
/// that could hold this state, so the state is static.
static REQUEST_MS: AtomicU64 = AtomicU64::new(0);
/// The same for SIGTERM and SIGUSR2.
static URGENT_REQUEST_MS: AtomicU64 = AtomicU64::new(0);
/// Whether the signals end the process again.
static LEAVING: AtomicBool = AtomicBool::new(false);

/// Milliseconds since the handlers were installed, plus 1.
fn now_ms() -> u64 {
    let elapsed = START.get().map(Instant::elapsed).unwrap_or_default();
    u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX).saturating_add(1)
}

/// Notes the time of the first signal.
fn note(first_ms: &AtomicU64) {
    let _ = first_ms.compare_exchange(0, now_ms(), Ordering::Relaxed, Ordering::Relaxed);
}

/// From here on SIGUSR1, SIGUSR2 and SIGTERM request a stop instead of ending the process. Must be called before MPI
/// starts, because a signal may come while MPI starts.
///
/// # Errors
/// When the system refuses a handler.
pub fn install_signal_handlers() -> Result<(), Error> {
    START.get_or_init(Instant::now);
    for (signal, first_ms) in [(SIGUSR1, &REQUEST_MS), (SIGUSR2, &URGENT_REQUEST_MS), (SIGTERM, &URGENT_REQUEST_MS)] {
        let handler = move || {
            if LEAVING.load(Ordering::Relaxed) {
                let _ = low_level::emulate_default_handler(signal);
            }
            note(first_ms);
        };
        // SAFETY: the handler takes no lock and allocates nothing: it loads and stores atomics, reads the monotonic
        // clock, and calls a function that is meant for handlers.
        unsafe { low_level::register(signal, handler) }.map_err(|source| Error::Signals { source })?;
    }
    Ok(())
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
    note(&REQUEST_MS);
}

/// Time until this rank is ended, according to the signals so far: `grace` after the first SIGUSR1, at most 30 s after
/// the first SIGTERM or SIGUSR2. `None` before the first signal.
#[must_use]
pub fn time_left(grace: Duration) -> Option<Duration> {
    let left = |first_ms: &AtomicU64, grace: Duration| {
        let first_ms = first_ms.load(Ordering::Relaxed);
        let passed = Duration::from_millis(now_ms().saturating_sub(first_ms));
        (first_ms > 0).then(|| grace.saturating_sub(passed))
    };
    [left(&REQUEST_MS, grace), left(&URGENT_REQUEST_MS, grace.min(URGENT_GRACE))].into_iter().flatten().min()
}
