//! The verbs that look before anything is started: the endpoint.

use longstraw::config::{self, Environment};
use longstraw::endpoint::Endpoint;
use longstraw::endpoint::ping::{self, Several};
use longstraw::failure::{Exit, Failure};
use longstraw::report::print_result;

use super::{ConfigFlags, overrides, print_json};

/// Asks the endpoint; a fault is printed with what came before it.
pub(super) fn ping(flags: ConfigFlags, json: bool) -> Result<Exit, Failure> {
    let environment = Environment::process();
    if let Some(told) = environment.launcher_tasks().filter(|told| told.tasks > 1) {
        return Err(Several { variable: told.variable, tasks: told.tasks }.into());
    }
    let loaded = config::load(&overrides(flags))?;
    let endpoint = Endpoint::open(&loaded.run, &environment)?;
    let ping = ping::run(&endpoint, loaded.run.default_model()?);
    if json {
        print_json(&ping);
    } else {
        print_result(&ping.text());
    }
    ping.error.map_or(Ok(Exit::Done), |error| Err(error.into()))
}
