//! One run as the template needs it: its files, its figures, and what a reader should not overlook.

use std::collections::BTreeMap;

use serde::Serialize;

use super::alarms;
use super::answers::Answers;
use super::ending::Ending;
use super::facts::Facts;
use super::figures;
use super::plot::{Figure, neighbours};
use super::read::Run;
use super::warnings::warnings;
use crate::report::averages::mean;
use crate::report::evaluation::Evaluation;
use crate::report::receipt::AlarmSpan;
use crate::report::step::Step;

/// Most rows in the table of numbers.
const ROWS_MAX: usize = 200;
/// One run of the page.
#[derive(Debug, Serialize)]
pub(super) struct View<'a> {
    /// The folder's name, or its path where two runs have one name.
    pub(super) name: &'a str,
    folder: String,
    pub(super) ending: Ending,
    config: &'a toml::Table,
    pub(super) receipt: Option<&'a Facts>,
    pub(super) last: Option<&'a Step>,
    gradient: Option<&'a str>,
    pub(super) reward_ends: [Option<f64>; 2],
    /// Seconds of all updates.
    seconds: f64,
    pub(super) alarms: BTreeMap<String, AlarmSpan>,
    pub(super) notes: Vec<String>,
    /// Which updates raised an alarm; with no figure where none did.
    alarm_rows: Vec<Figure>,
    curves: Vec<Figure>,
    /// Curves of held-out prompts.
    evaluations: Vec<Figure>,
    evaluation_rows: Vec<&'a Evaluation>,
    /// The held-out sets that are shown, and how many are not.
    pub(super) sets: Vec<&'a String>,
    pub(super) more_sets: usize,
    time: Vec<Figure>,
    memory: Vec<Figure>,
    pub(super) gates: &'a [Facts],
    answers: &'a Answers,
    /// Updates with metrics, and those in the table: of a long run every so many.
    updates: usize,
    rows: Vec<&'a Step>,
}

impl<'a> View<'a> {
    pub(super) fn of(run: &'a Run, name: &'a str) -> View<'a> {
        let last = run.steps.last();
        let receipt = run.receipt.as_ref();
        let alarms = alarms::spans(run);
        let shown = figures::shown_sets(run);
        View {
            name,
            folder: run.folder.display().to_string(),
            ending: Ending::of(run),
            config: &run.config,
            receipt,
            last,
            gradient: receipt.map(|receipt| receipt.gradient.as_str()).or(last.map(|step| step.gradient.as_str())),
            reward_ends: reward_ends(&run.steps),
            seconds: run.steps.iter().map(|step| step.seconds.total).sum(),
            notes: warnings(run, &alarms),
            alarms,
            alarm_rows: alarms::figure(&run.steps).into_iter().collect(),
            curves: figures::curves(run),
            evaluations: figures::evaluations(&run.evaluations, &shown),
            evaluation_rows: neighbours(&run.evaluations, ROWS_MAX).into_iter().filter_map(<[_]>::last).collect(),
            more_sets: shown.more,
            sets: shown.names,
            time: figures::time(&run.steps),
            memory: figures::memory(run),
            gates: &run.gates,
            answers: &run.answers,
            updates: run.steps.len(),
            rows: neighbours(&run.steps, ROWS_MAX).into_iter().filter_map(<[Step]>::last).collect(),
        }
    }
}

/// Mean reward of the first and of the last tenth of the updates.
fn reward_ends(steps: &[Step]) -> [Option<f64>; 2] {
    let known: Vec<f64> = steps.iter().filter_map(|step| step.reward_mean).collect();
    let tenth = known.len().div_ceil(10);
    [mean(&known[..tenth]), mean(&known[known.len() - tenth..])]
}
