//! The verbs that look before anything is started: at the endpoint, and at the machine.

use longstraw::config::{self, Environment};
use longstraw::doctor::{self, Report};
use longstraw::endpoint::Endpoint;
use longstraw::endpoint::ping::{self, Several};
use longstraw::failure::{Exit, Failure};
use longstraw::report::print_result;

use super::{ConfigFlags, overrides, print_json, print_report, world};

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

/// Looks at everything that a run would need, on every rank; ends as the first failure would.
pub(super) fn doctor(flags: ConfigFlags, json: bool) -> Exit {
    let environment = Environment::process();
    let world = match world(&environment) {
        Ok(world) => world,
        Err(failure) => {
            let report = Report::without_world(&failure);
            if json {
                print_json(&report);
            } else {
                print_result(&report.text());
            }
            return failure.exit();
        }
    };
    let report = doctor::examine(&config::load(&overrides(flags)), &environment, &world);
    print_report(&world, json, &report, &report.text());
    // A launcher ends a job at its first non-zero exit, so nobody leaves before the lines are out.
    world.all.barrier();
    report.exit()
}
