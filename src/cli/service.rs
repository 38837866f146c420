//! The verbs that check the endpoint and the machine before a run.

use longstraw::config::{self, Environment, Gate, RunConfig, WithoutFile};
use longstraw::endpoint::Endpoint;
use longstraw::endpoint::ping::{self, Asked, SeveralProcesses};
use longstraw::report::print_result;
use longstraw::reward;
use longstraw::runtime::failure::{Exit, Failure};
use longstraw::tools::doctor::{self, Report};
use longstraw::tools::gate::{self, Check};
use serde_json::{Value, json};

use super::output::{print_json, print_report};
use super::start::{ConfigFlags, start_world};

/// Checks the endpoint; a fault is reported after the results of the earlier checks.
pub(super) fn ping(flags: ConfigFlags, json: bool) -> Result<Exit, Failure> {
    let environment = Environment::process();
    require_one_process(&environment)?;
    let loaded = config::load(&flags.overrides(WithoutFile::DefaultsInPart))?;
    let endpoint = Endpoint::open(&loaded.run, &environment)?;
    let ping = ping::run(&endpoint, &asked(&loaded.run)?);
    if json {
        print_json(&ping);
    } else {
        print_result(&ping.text());
    }
    let temperature = ping.temperature;
    ping.error.map_or(Ok(Exit::Done), |error| Err(reward::message_failure(error, temperature)))
}

/// The models that a run asks: the service's own one, and those that its judges name, with the temperature of judges.
fn asked(run: &RunConfig) -> Result<Vec<Asked<'_>>, config::Error> {
    let judges = run.named_judges();
    let mut models = Vec::new();
    if judges.iter().all(|(_, judge)| judge.model.is_none()) || run.endpoint.default_model.is_some() {
        models.push(run.default_model()?);
    }
    for model in judges.iter().filter_map(|(_, judge)| judge.model) {
        if !models.contains(&model) {
            models.push(model);
        }
    }
    let judged = |model: &str| judges.iter().any(|(_, judge)| judge.model == Some(model));
    let default = run.endpoint.default_model.as_deref();
    let asked = models.into_iter().map(|model| Asked {
        model,
        temperature: run.reward.judge_temperature.number().filter(|_| judged(model)),
        is_default: default == Some(model),
    });
    Ok(asked.collect())
}

/// The first gate: the checks of `ping` with a receipt. Needs no ranks and no model.
pub(super) fn key_gate(flags: ConfigFlags, gate: &Gate, json: bool) -> Result<Exit, Failure> {
    let environment = Environment::process();
    require_one_process(&environment)?;
    let loaded = config::load_gate(&flags.overrides(WithoutFile::DefaultsInPart), gate)?;
    let dir = &loaded.rank.dir;
    gate::move_away(dir)?;
    std::fs::create_dir_all(dir).map_err(|source| gate::Error::File { file: dir.clone(), source })?;
    let models = asked(&loaded.run)?;
    let (checks, fault) = match Endpoint::open(&loaded.run, &environment) {
        Ok(endpoint) => {
            let ping = ping::run(&endpoint, &models);
            let means = ping.error.as_ref().map(ToString::to_string).unwrap_or_default();
            let checks = ping.checks.iter().map(|check| gate_check(check, &means)).collect();
            let temperature = ping.temperature;
            (checks, ping.error.map(|error| reward::message_failure(error, temperature)))
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

/// A check of the ping as a check of the gate. A model that is not listed may answer anyway.
fn gate_check(check: &ping::Check, fault: &str) -> Check {
    let ping::Check { name, passed, required, seconds, attempts, detail } = check;
    Check {
        name: (*name).to_owned(),
        value: json!({"said": detail, "seconds": seconds, "attempts": attempts}),
        limit: if *required { "answered".into() } else { "answered, or the model answers all the same".into() },
        passed: *passed || !required,
        means: fault.to_owned(),
    }
}

/// Refuses several processes: each would send requests.
fn require_one_process(environment: &Environment) -> Result<(), Failure> {
    match environment.launcher_tasks() {
        Some(launcher) if launcher.tasks > 1 => {
            Err(SeveralProcesses { variable: launcher.variable, tasks: launcher.tasks }.into())
        }
        _ => Ok(()),
    }
}

/// Checks what a run needs, on every rank; the exit code is that of the first failure.
pub(super) fn doctor(flags: ConfigFlags, json: bool) -> Exit {
    let environment = Environment::process();
    let world = match start_world(&environment) {
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
    let loaded = config::load(&flags.overrides(WithoutFile::DefaultsInPart));
    let report = doctor::examine(&loaded, &environment, &world);
    print_report(&world, json, &report, &report.text());
    // A launcher ends a job at its first non-zero exit, so no rank leaves before the lines are printed.
    world.all.barrier();
    report.exit()
}
