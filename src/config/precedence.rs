//! From the sources to one configuration: defaults, config.toml, settings.json, environment, flags, in this order.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use figment::Figment;
use figment::value::{Dict, Value};
use serde::Deserialize;

use super::environment::Environment;
use super::gates::{self, Gate};
use super::problem::{Error, Fault, Problem, Source};
use super::schema::{self, Need};
use super::source::{Gathered, Layer, nest};
use super::{Loaded, RankConfig, RunConfig};

/// The compiled-in defaults: every key, with its meaning as a comment.
pub const DEFAULT_TOML: &str = include_str!("../../configs/default.toml");

/// The compiled-in laptop run: what `train` takes where there is no config.toml.
pub const LAPTOP_TOML: &str = include_str!("../../configs/laptop.toml");

/// The source of [`LAPTOP_TOML`].
pub(super) const LAPTOP_RUN: &str = "laptop run";

/// What a verb takes where there is neither a config.toml nor `--config`.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum WithoutFile {
    /// The documented defaults; keys without a default must come from other sources.
    #[default]
    Defaults,
    /// The documented defaults; keys without a default may be missing, since the verb reads other keys.
    DefaultsInPart,
    /// The built-in laptop run.
    LaptopRun,
}

/// The command line's part of the configuration.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// `--config FILE`; absent: ./config.toml where it exists, else what `without_file` says.
    pub config: Option<PathBuf>,
    /// What stands in for a configuration file.
    pub without_file: WithoutFile,
    /// `--settings FILE`; absent: ./settings.json where it exists.
    pub settings: Option<PathBuf>,
    /// `--set table.key=value`, in order.
    pub set: Vec<String>,
    /// `--run-dir DIR`, which overrides `run.dir`.
    pub run_dir: Option<PathBuf>,
    /// Keys without a default that the verb does not read from files.
    pub left_out: &'static [&'static str],
}

/// The configuration of this process: files of the working directory, the process environment, and `overrides`.
///
/// # Errors
/// [`Error::Refused`] with every problem of every source and of the whole, each with its source.
pub fn load(overrides: &Overrides) -> Result<Loaded, Error> {
    load_in(Path::new(""), &Environment::process(), overrides)
}

/// The same for another directory and environment.
///
/// # Errors
/// As [`load`].
pub fn load_in(directory: &Path, environment: &Environment, overrides: &Overrides) -> Result<Loaded, Error> {
    finish(gathered(directory, environment, overrides, None), environment, None)
}

/// The configuration of a gate. The gate's own values override those of files; variables and flags override the gate's. Then
/// `gate.scale` divides lengths, page size and micro-blocks.
///
/// # Errors
/// As [`load`], and for a scale that does not divide them.
pub fn load_gate(overrides: &Overrides, gate: &Gate) -> Result<Loaded, Error> {
    load_gate_in(Path::new(""), &Environment::process(), overrides, gate)
}

/// The same for another directory and environment.
///
/// # Errors
/// As [`load_gate`].
pub fn load_gate_in(
    directory: &Path,
    environment: &Environment,
    overrides: &Overrides,
    gate: &Gate,
) -> Result<Loaded, Error> {
    finish(gathered(directory, environment, overrides, Some(gate)), environment, Some(gate))
}

/// All sources in order.
fn gathered(directory: &Path, environment: &Environment, overrides: &Overrides, gate: Option<&Gate>) -> Gathered {
    let mut gathered = Gathered::default();
    gathered.builtin("defaults", DEFAULT_TOML);
    match chosen(directory, overrides.config.as_deref(), "config.toml") {
        Some(path) => gathered.config(&path),
        None if overrides.without_file == WithoutFile::LaptopRun => gathered.builtin(LAPTOP_RUN, LAPTOP_TOML),
        None => gathered.in_part = overrides.without_file == WithoutFile::DefaultsInPart,
    }
    if let Some(path) = chosen(directory, overrides.settings.as_deref(), "settings.json") {
        gathered.settings(&path);
    }
    let key_variable = api_key_variable(&gathered.layers);
    for path in overrides.left_out {
        gathered.leave_out(path);
    }
    if let Some(gate) = gate {
        for path in gates::LEFT_OUT {
            gathered.leave_out(path);
        }
        gate.add_to(&mut gathered);
        gathered.gate_dir(gate.name());
    }
    for (name, text) in environment.keys(&key_variable) {
        gathered.variable(name, text);
    }
    for text in &overrides.set {
        gathered.flag(text);
    }
    if let Some(path) = &overrides.run_dir {
        gathered.run_dir(path);
    }
    gathered
}

/// The compiled-in laptop run alone.
pub(super) fn laptop() -> Result<Loaded, Error> {
    let mut gathered = Gathered::default();
    gathered.builtin("defaults", DEFAULT_TOML);
    gathered.builtin(LAPTOP_RUN, LAPTOP_TOML);
    finish(gathered, &Environment::default(), None)
}

/// A file named on the command line, else the usual one where it exists.
fn chosen(directory: &Path, named: Option<&Path>, usual: &str) -> Option<PathBuf> {
    let usual = directory.join(usual);
    named.map(Path::to_owned).or_else(|| usual.exists().then_some(usual))
}

/// The variable that holds the endpoint's key, as the files name it: it may begin like ours.
fn api_key_variable(layers: &[Layer]) -> String {
    let merged = merged(layers);
    merged.extract_inner("endpoint.api_key_env").unwrap_or_default()
}

fn merged(layers: &[Layer]) -> Figment {
    layers.iter().fold(Figment::new(), |figment, layer| figment.merge(layer))
}

/// The keys of `[run]` that may differ between ranks.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RankKeys {
    dir: PathBuf,
    share_device: bool,
    grace_sec: u64,
    stall_sec: u64,
    log_level: String,
}

/// The merged values as those that ranks share and those that may differ.
#[expect(clippy::result_large_err, reason = "figment's own error, once in a run")]
fn split(merged: &Figment) -> figment::error::Result<(RunConfig, RankKeys)> {
    let mut shared: Dict = merged.extract()?;
    let mut own = Dict::new();
    if let Some(Value::Dict(_, run)) = shared.get_mut("run") {
        for name in ["dir", "share_device", "grace_sec", "stall_sec", "log_level"] {
            own.extend(run.remove_entry(name));
        }
    }
    Ok((Value::from(shared).deserialize()?, Value::from(own).deserialize()?))
}

/// Merges the sources and checks the result, apart from keys that are wrong already.
fn finish(mut gathered: Gathered, environment: &Environment, gate: Option<&Gate>) -> Result<Loaded, Error> {
    let (stand_ins, unset) = missing(&mut gathered);
    let (run, own) = match split(&merged(&gathered.layers).join(&stand_ins)) {
        Ok(values) => values,
        Err(error) => {
            let unforeseen = error.into_iter().map(|e| unforeseen(&e, &gathered.layers));
            return Err(refused(gathered.problems.into_iter().chain(unforeseen)));
        }
    };
    let RankKeys { dir, share_device, grace_sec, stall_sec, log_level } = own;
    let log = environment.log().map_or(log_level, str::to_owned);
    let rank = RankConfig { dir, share_device, grace_sec, stall_sec, log };
    let sources: Vec<Source> = gathered.layers.iter().map(|layer| layer.source.clone()).collect();
    let mut loaded = Loaded { run, rank, sources, unset };
    let scale = loaded.run.gate.scale;
    // Gates of different lengths are compared with each other, so they have one number of rows on every device.
    if gate.is_some() {
        loaded.run.memory.micro_block = loaded.run.memory.micro_rows();
    }
    let uneven = gate.and_then(|_| gates::scale_down(&mut loaded.run.context, &mut loaded.run.memory, scale));
    let mut found = if gathered.unread { Vec::new() } else { loaded.run.check(None) };
    found.extend(uneven);
    found.retain(|p| !gathered.is_spoilt(&p.key) && !p.with.iter().any(|key| gathered.is_spoilt(key)));
    let found: Vec<Problem> = found.into_iter().map(|p| with_source(p, &gathered.layers)).collect();
    if found.is_empty() && gathered.problems.is_empty() {
        Ok(loaded)
    } else {
        Err(refused(gathered.problems.into_iter().chain(found)))
    }
}

/// Adds a problem for each required key that no source gives. The returned layer has stand-ins for these keys, so that
/// everything else can be checked; problems that rest on a stand-in are dropped. Where keys may be missing, they are listed
/// instead. The longest sequence follows from prompt and answer where no source gives it.
fn missing(gathered: &mut Gathered) -> (Layer, Vec<String>) {
    let mut dict = Dict::new();
    let mut unset = Vec::new();
    for (path, _) in schema::keys().filter(|(_, key)| key.need == Need::Required) {
        if gathered.layers.iter().any(|layer| layer.gives(&path)) {
            continue;
        }
        if gathered.in_part {
            unset.push(path.clone());
        } else if !gathered.unread && !gathered.is_spoilt(&path) {
            let problem = Problem { key: path.clone(), source: None, fault: Fault::Missing, with: Vec::new() };
            gathered.problems.push(problem);
        }
        // A prompt and an answer of one position each.
        stand_in(&mut dict, &path, 1);
        gathered.spoilt.insert(path, usize::MAX);
    }
    let longest = "context.max_seq_len";
    if !gathered.layers.iter().any(|layer| layer.gives(longest)) {
        let lengths =
            merged(&gathered.layers).join(&Layer { source: Source::Builtin("stand-ins"), dict: dict.clone() });
        let length = |key: &str| lengths.extract_inner::<u64>(key).unwrap_or(1);
        stand_in(&mut dict, longest, length("context.prompt_len").saturating_add(length("context.answer_len")));
        if gathered.in_part && !unset.is_empty() {
            unset.push(longest.to_owned());
        }
    }
    (Layer { source: Source::Builtin("stand-ins"), dict }, unset)
}

fn stand_in(dict: &mut Dict, path: &str, value: u64) {
    for (table, value) in nest(path, Value::from(value)) {
        match (dict.get_mut(&table), value) {
            (Some(Value::Dict(_, there)), Value::Dict(_, new)) => there.extend(new),
            (_, value) => drop(dict.insert(table, value)),
        }
    }
}

/// The problem with the source that gives the key's value; no source where only the default does.
fn with_source(mut problem: Problem, layers: &[Layer]) -> Problem {
    let giver = layers.iter().rev().find(|layer| layer.gives(&problem.key));
    problem.source = giver.map(|layer| layer.source.clone());
    problem
}

/// A fault that serde finds and the walk did not: the list of keys and the structs differ.
fn unforeseen(error: &figment::Error, layers: &[Layer]) -> Problem {
    let key = error.path.join(".");
    let fault = Fault::Should { be: "of another kind".to_owned(), why: error.kind.to_string() };
    with_source(Problem { key, source: None, fault, with: Vec::new() }, layers)
}

/// Every problem once.
fn refused(problems: impl Iterator<Item = Problem>) -> Error {
    let mut seen = BTreeSet::new();
    Error::Refused { problems: problems.filter(|p| seen.insert(p.to_string())).collect() }
}
