//! Parsers of arguments, for clap.

use std::ffi::OsString;

use longstraw::config::{DeviceChoice, Gate, Gradient};
use longstraw::data::keychain;
use longstraw::prompt::pages::Residency;
use longstraw::runtime::units::Tokens;
use longstraw::tools::study;

pub(super) fn gradient(text: &str) -> Result<Gradient, String> {
    text.parse().map_err(str::to_owned)
}

/// A dtype by the configuration's name.
pub(super) fn dtype(text: &str) -> Result<tch::Kind, String> {
    match text {
        "float32" => Ok(tch::Kind::Float),
        "float64" => Ok(tch::Kind::Double),
        "bfloat16" => Ok(tch::Kind::BFloat16),
        _ => Err("should be float32, float64 or bfloat16".into()),
    }
}

/// Where the model computes, by the configuration's name.
pub(super) fn device(text: &str) -> Result<DeviceChoice, String> {
    match text {
        "auto" => Ok(DeviceChoice::Auto),
        "cpu" => Ok(DeviceChoice::Cpu),
        "cuda" => Ok(DeviceChoice::Cuda),
        _ => Err("should be auto, cpu or cuda".into()),
    }
}

pub(super) fn gate_name(text: &str) -> Result<Gate, String> {
    Gate::named(text).ok_or_else(|| format!("should be one of {}", gate_names()))
}

/// Every gate's name, in their order.
pub(super) fn gate_names() -> String {
    Gate::all().iter().map(Gate::name).collect::<Vec<_>>().join(", ")
}

pub(super) fn residency(text: &str) -> Result<Residency, String> {
    match text {
        "host" => Ok(Residency::Host),
        "device" => Ok(Residency::Device),
        _ => Err("should be host or device".into()),
    }
}

/// A count of at least 1.
pub(super) fn at_least_one(text: &str) -> Result<u64, String> {
    text.parse().ok().filter(|&count: &u64| count > 0).ok_or_else(|| "should be a number of at least 1".into())
}

/// A number of at least 2.
pub(super) fn at_least_two(text: &str) -> Result<u64, String> {
    text.parse().ok().filter(|&count: &u64| count > 1).ok_or_else(|| "should be a number of at least 2".into())
}

/// A finite number above 0.
pub(super) fn rate(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|rate: &f64| rate.is_finite() && *rate > 0.0).ok_or_else(|| "should be above 0".into())
}

/// A number above 0, at most 1.
pub(super) fn share(text: &str) -> Result<f64, String> {
    rate(text).ok().filter(|share| *share <= 1.0).ok_or_else(|| "should be above 0 and at most 1".into())
}

/// `POSITIONS` or `POSITIONS:PROMPTS`.
pub(super) fn length(text: &str) -> Result<study::Length, String> {
    let (positions, prompts) = text.split_once(':').unwrap_or((text, "1"));
    let count = |text: &str| at_least_one(text).map_err(|_| "should be POSITIONS or POSITIONS:PROMPTS".to_owned());
    let prompts = usize::try_from(count(prompts)?).map_err(|error| error.to_string())?;
    Ok(study::Length { positions: Tokens(count(positions)?), prompts })
}

/// `FROM..TO`, in percent.
pub(super) fn depth(text: &str) -> Result<keychain::Depth, String> {
    let percent = |text: &str| text.parse().ok().filter(|percent: &u64| *percent <= 100);
    let range = text.split_once("..").and_then(|(from, to)| Some((percent(from)?, percent(to)?)));
    let range = range.filter(|(from, to)| from <= to);
    range
        .map(|(from, to)| keychain::Depth { from, to })
        .ok_or_else(|| "should be FROM..TO, whole percents from 0 to 100, FROM not above TO".into())
}

/// `start`, `drawn`, or the folder of the adapters.
#[expect(clippy::unnecessary_wraps, reason = "clap requires a parser to return a result")]
pub(super) fn start(text: &str) -> Result<study::Start, String> {
    Ok(match text {
        "start" => study::Start::Start,
        "drawn" => study::Start::Drawn,
        folder => study::Start::Folder(folder.into()),
    })
}

/// Removes every `--set` from the arguments and returns its pairs, in order. clap would drop those before the verb if
/// others follow it. A `--set` without a value stays, so that clap reports it.
pub(crate) fn take_set_flags(arguments: impl Iterator<Item = OsString>) -> (Vec<OsString>, Vec<String>) {
    let mut rest = Vec::new();
    let mut set = Vec::new();
    let mut arguments = arguments.peekable();
    while let Some(argument) = arguments.next() {
        let text = argument.to_string_lossy().into_owned();
        match (text.strip_prefix("--set="), text == "--set", arguments.peek()) {
            (Some(pair), ..) => set.push(pair.to_owned()),
            (None, true, Some(_)) => set.extend(arguments.next().map(|pair| pair.to_string_lossy().into_owned())),
            _ => rest.push(argument),
        }
    }
    (rest, set)
}
