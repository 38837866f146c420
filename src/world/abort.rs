//! How a rank ends the whole job, and what is printed first.

use std::mem;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, ThreadId};

use mpi::topology::{Communicator, SimpleCommunicator};

use crate::runtime::failure::{Exit, Failure, out_of_memory};
use crate::runtime::liveness::SharedSite;
use crate::runtime::memory::{Holdings, Ledger, Shortage};
use crate::runtime::terminal::say;

/// Ends the whole job at once.
pub(super) fn abort_world(exit: Exit) -> ! {
    SimpleCommunicator::world().abort(exit.code())
}

/// The one thread whose panic unwinds instead of ending the job at once, because its caller has something to save.
#[derive(Clone, Debug, Default)]
pub(super) struct PanicScope(Arc<Mutex<ScopeState>>);

#[derive(Clone, Copy, Debug, Default)]
enum ScopeState {
    #[default]
    Closed,
    Open(ThreadId),
    Panicked(Exit),
}

impl PanicScope {
    /// Runs `work`; a panic of this thread is printed, and returned as the exit code that it leads to.
    pub(super) fn catch<T>(&self, work: impl FnOnce() -> T) -> Result<T, Exit> {
        self.set(ScopeState::Open(thread::current().id()));
        let done = panic::catch_unwind(AssertUnwindSafe(work));
        let state = self.set(ScopeState::Closed);
        done.map_err(|_| if let ScopeState::Panicked(exit) = state { exit } else { Exit::Bug })
    }

    fn set(&self, state: ScopeState) -> ScopeState {
        mem::replace(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner), state)
    }

    /// Whether a panic of this thread may unwind. A second one, from a destructor, may not.
    fn takes(&self, exit: Exit) -> bool {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let takes = matches!(*state, ScopeState::Open(thread) if thread == thread::current().id());
        if takes {
            *state = ScopeState::Panicked(exit);
        }
        takes
    }
}

/// Makes a panic on any thread print its site and end the whole job, at once or after `scope` has let it unwind.
pub(super) fn abort_on_panic(site: SharedSite, ledger: Ledger, scope: PanicScope) {
    panic::set_hook(Box::new(move |panic| {
        let exit = report_panic(&panic.to_string(), &site, &ledger);
        if !scope.takes(exit) {
            abort_world(exit)
        }
    }));
}

/// Prints a panic, and returns the exit code that it leads to.
fn report_panic(text: &str, site: &SharedSite, ledger: &Ledger) -> Exit {
    if out_of_memory(text) {
        let report = shortage(text, site, ledger.holdings());
        say(&format!("longstraw: {report}"));
        tracing::error!(exit = Exit::DoesNotFit.code(), "{report}\n{text}");
        return Exit::DoesNotFit;
    }
    let site = site.site();
    // libtorch appends its own stack frames, which do not help a user.
    let cause = text.split("\\nException raised from").next().unwrap_or_default();
    say(&format!("longstraw: {site}: bug: {cause}"));
    tracing::error!(exit = Exit::Bug.code(), "{site}: bug: {text}");
    Exit::Bug
}

/// The message of a failure. For lack of memory it is a report. The phase has freed its memory by now, so the report
/// lists the peaks.
pub(super) fn message(failure: &Failure, site: &SharedSite, ledger: &Ledger) -> String {
    let message = failure.to_string();
    if failure.exit() != Exit::DoesNotFit || !out_of_memory(&message) {
        return message;
    }
    let report = shortage(&message, site, ledger.holdings_at_most());
    format!("{report}\n  {}", message.lines().next().unwrap_or_default())
}

fn shortage(allocator_message: &str, site: &SharedSite, holdings: Holdings) -> String {
    Shortage::new(allocator_message, site.site(), site.in_top_layer(), holdings).report()
}
