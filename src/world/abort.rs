//! How a rank ends the whole job, and what is printed first.

use mpi::topology::{Communicator, SimpleCommunicator};

use crate::runtime::failure::{Exit, Failure, out_of_memory};
use crate::runtime::liveness::SharedSite;
use crate::runtime::memory::{Holdings, Ledger, Shortage};
use crate::runtime::terminal::say;

/// Ends the whole job at once.
pub(super) fn abort_world(exit: Exit) -> ! {
    SimpleCommunicator::world().abort(exit.code())
}

/// Makes a panic on any thread print its site and end the whole job.
pub(super) fn abort_on_panic(site: SharedSite, ledger: Ledger) {
    std::panic::set_hook(Box::new(move |panic| {
        let text = panic.to_string();
        if out_of_memory(&text) {
            let report = shortage(&text, &site, ledger.holdings());
            say(&format!("longstraw: {report}"));
            tracing::error!("{report}\n{text}");
            abort_world(Exit::DoesNotFit)
        }
        let site = site.site();
        // libtorch appends its own stack frames, which do not help a user.
        let cause = text.split("\\nException raised from").next().unwrap_or_default();
        say(&format!("longstraw: {site}: bug: {cause}"));
        tracing::error!("{site}: bug: {text}");
        abort_world(Exit::Bug)
    }));
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
