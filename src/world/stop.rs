//! Signals that ask for a stop.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::{SIGTERM, SIGUSR1, c_int};

use super::Error;

/// Whether a signal has come. A handler is given nothing to find its state by, so it stands here.
static ASKED: AtomicBool = AtomicBool::new(false);

/// All that a handler does: anything more could meet a lock that the interrupted code holds.
extern "C" fn ask(_signal: c_int) {
    ASKED.store(true, Ordering::Relaxed);
}

/// SIGUSR1 and SIGTERM ask for a stop from here on instead of ending the process. Called before MPI starts, which takes
/// long enough for a signal to come.
///
/// # Errors
/// When the system refuses a handler.
pub fn heed_signals() -> Result<(), Error> {
    answer((ask as *const ()).addr())
}

/// They end the process again: this rank leaves after a failure, and the launcher's SIGTERM should not find it waiting.
pub(super) fn heed_no_longer() {
    // A rank whose handlers stay is ended by the launcher's SIGKILL, a little later.
    let _ = answer(libc::SIG_DFL);
}

fn answer(handler: libc::sighandler_t) -> Result<(), Error> {
    for signal in [SIGUSR1, SIGTERM] {
        // SAFETY: all bits zero is a valid `sigaction`: no flags, an empty mask, and the default handler, which is
        // replaced below.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = handler;
        // A read or write that the signal interrupts goes on by itself.
        action.sa_flags = libc::SA_RESTART;
        // SAFETY: the handler is the default or a function of the type that a plain handler has, which lives as long as
        // the process and only stores to an atomic; the action outlives the call, and no earlier one is asked for.
        let outcome = unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) };
        if outcome != 0 {
            return Err(Error::Signals { source: io::Error::last_os_error() });
        }
    }
    Ok(())
}

/// Whether a signal has asked this rank to stop.
#[must_use]
pub fn asked_to_stop() -> bool {
    ASKED.load(Ordering::Relaxed)
}
