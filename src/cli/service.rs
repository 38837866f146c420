//! The verbs that look before anything is started: at the endpoint, and at the machine.

use longstraw::config::{self, Environment, Gate};
use longstraw::endpoint::Endpoint;
use longstraw::endpoint::ping::{self, Several};
use longstraw::report::print_result;
use longstraw::runtime::failure::{Exit, Failure};
use longstraw::tools::doctor::{self, Report};
use longstraw::tools::gate::{self, Check};
use serde_json::{Value, json};

use super::{ConfigFlags, overrides, print_json, print_report, world};

/// Asks the endpoint; a fault is printed with what came before it.
pub(super) fn ping(flags: ConfigFlags, json: bool) -> Result<Exit, Failure> {
    let environment = Environment::process();
    alone(&environment)?;
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

/// The first gate: what `ping` asks, as checks with a receipt. No ranks and no model.
pub(super) fn key_gate(flags: ConfigFlags, gate: &Gate, json: bool) -> Result<Exit, Failure> {
    let environment = Environment::process();
    alone(&environment)?;
    let loaded = config::load_gate(&overrides(flags), gate)?;
    let dir = &loaded.rank.dir;
    gate::move_away(dir)?;
    std::fs::create_dir_all(dir).map_err(|source| gate::Error::File { file: dir.clone(), source })?;
    let model = loaded.run.default_model()?;
    let (checks, fault) = match Endpoint::open(&loaded.run, &environment) {
        Ok(endpoint) => {
            let ping = ping::run(&endpoint, model);
            let means = ping.error.as_ref().map(ToString::to_string).unwrap_or_default();
            (ping.checks.iter().map(|check| of_ping(check, &means)).collect(), ping.error.map(Failure::from))
        }
        Err(error) => {
            let (name, means) = ("endpoint".to_owned(), error.to_string());
            let check =
                Check { name, value: Value::Null, limit: "address and key are there".into(), passed: false, means };
            (vec![check], Some(error))
        }
    };
    let receipt = gate::end_alone(gate, &loaded.run, dir, checks)?;
    if json {
        print_json(&receipt);
    }
    // A fault of the service has an exit code of its own.
    fault.map_or(Ok(()), Err)?;
    gate::verdict(&receipt, dir)?;
    Ok(Exit::Done)
}

/// One thing that was asked, as a gate's check; a model that is not listed may answer all the same.
fn of_ping(asked: &ping::Check, fault: &str) -> Check {
    let ping::Check { name, passed, required, seconds, attempts, detail } = asked;
    Check {
        name: (*name).to_owned(),
        value: json!({"said": detail, "seconds": seconds, "attempts": attempts}),
        limit: if *required { "answered".into() } else { "answered, or the model answers all the same".into() },
        passed: *passed || !required,
        means: fault.to_owned(),
    }
}

/// Several processes would each ask the service.
fn alone(environment: &Environment) -> Result<(), Failure> {
    let told = environment.launcher_tasks().filter(|told| told.tasks > 1);
    told.map_or(Ok(()), |told| Err(Several { variable: told.variable, tasks: told.tasks }.into()))
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
