//! Results and usage messages on the terminal.

use longstraw::config::Environment;
use longstraw::report::{print_result, say};
use longstraw::runtime::liveness::Tracker;
use longstraw::world::World;
use serde::Serialize;

/// Prints one JSON object.
pub(super) fn print_json<T: Serialize>(value: &T) {
    match serde_json::to_string(value) {
        Ok(text) => print_result(&text),
        Err(error) => say(&format!("longstraw: the result has no JSON form: {error}")),
    }
}

/// Rank 0 prints a report, as one JSON object or as text.
pub(super) fn print_report<T: Serialize>(world: &World, json: bool, report: &T, text: &str) {
    match (world.all.rank().0, json) {
        (0, true) => print_json(report),
        (0, false) => print_result(text),
        _ => {}
    }
}

/// Prints clap's message once, also if several ranks were started with this command line.
pub(crate) fn print_usage(usage: &clap::Error) {
    let several = Environment::process().launcher_tasks().is_some_and(|launcher| launcher.tasks > 1);
    let world = several.then(|| World::start(None, Tracker::default()).ok()).flatten();
    if world.as_ref().is_none_or(|world| world.all.rank().0 == 0) {
        // Clap repeats the arguments as they were given.
        let text = usage.render().to_string();
        if usage.use_stderr() { say(text.trim_end()) } else { print_result(text.trim_end()) }
    }
    if let Some(world) = world {
        // A launcher ends a job at its first non-zero exit, so no rank leaves before the message is printed.
        world.all.barrier();
    }
}
