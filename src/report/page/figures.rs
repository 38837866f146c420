//! The figures of one run: curves over its updates, seconds by phase, memory by phase and rank.

use std::collections::{BTreeMap, BTreeSet};

use super::alarms;
use super::boxes::{Bars, Column, bars, stacks};
use super::facts::Facts;
use super::lines::{Besides, Edges, Series, lines};
use super::plot::{About, Figure};
use super::read::Run;
use crate::report::averages::ends;
use crate::report::evaluation::{Evaluation, HeldOut};
use crate::report::receipt::Seconds;
use crate::report::step::Step;
use crate::runtime::units::{float, from_index};

/// Held-out sets, files or parts of a reward that a page shows: a reader tells no more apart, and a page stays small.
pub(super) const MEMBERS_MAX: usize = 12;

/// Up to this many ranks each has its own bar; of more, the least and the most are drawn.
const RANKS_MAX: usize = 8;

/// One number of each update that has it.
pub(super) fn series(name: &str, steps: &[Step], number: impl Fn(&Step) -> Option<f64>) -> Series {
    let points = steps.iter().filter_map(|step| Some((float(step.step), number(step)?))).collect();
    Series { name: name.to_owned(), points, ..Series::default() }
}

/// As [`series`], but without a point where all numbers are zero.
fn seldom(name: &str, steps: &[Step], number: impl Fn(&Step) -> Option<f64>) -> Series {
    let found = series(name, steps, number);
    if found.points.iter().all(|(_, value)| *value == 0.0) { Series::default() } else { found }
}

/// Lines over updates.
pub(super) fn curve(
    title: &str,
    reading: &str,
    unit: &'static str,
    series: &[Series],
    besides: &Besides,
) -> Option<Figure> {
    let about = About { title: title.into(), reading: reading.into(), x_name: "update", unit, wide: false };
    lines(about, series, besides)
}

/// Curves over updates.
pub(super) fn curves(run: &Run) -> Vec<Figure> {
    [rewards(run), policy(run), answers(run)].into_iter().flatten().flatten().collect()
}

/// A number of a held-out set.
type Measure = fn(&HeldOut) -> Option<f64>;

/// The held-out sets of a run that its page shows, those with most prompts first, in every figure and table the same.
pub(super) fn shown_sets(run: &Run) -> Shown<'_> {
    let count = |held_out: &HeldOut| from_index(held_out.prompts);
    let evaluated = run.evaluations.iter().flat_map(|evaluation| &evaluation.sets).map(|(set, of)| (set, count(of)));
    let receipt = run.receipt.iter().flat_map(|receipt| &receipt.held_out_sets);
    let ends = receipt.map(|(set, ends)| (set, ends.iter().flatten().map(count).sum()));
    Shown::of(largest(evaluated.chain(ends)), "sets")
}

/// Measurements on held-out prompts over updates: a line for each set, and for sampled and greedy answers.
pub(super) fn evaluations(evaluations: &[Evaluation], sets: &Shown<'_>) -> Vec<Figure> {
    if evaluations.len() < 2 {
        return Vec::new();
    }
    let figure = |title: &str, reading: &str, unit, lines: &[(&str, Measure)]| {
        let one = |set: &String, words: &str, number: Measure| Series {
            name: format!("{set}{words}"),
            points: evaluations.iter().filter_map(|at| Some((float(at.step), number(at.sets.get(set)?)?))).collect(),
            ..Series::default()
        };
        let series: Vec<Series> =
            sets.names.iter().flat_map(|set| lines.iter().map(|(words, number)| one(set, words, *number))).collect();
        curve(title, &sets.after(reading), unit, &series, &Besides::default())
    };
    let figures = [
        figure(
            "Held-out reward",
            "Mean by set.",
            "",
            &[(", sampled", |set| set.reward), (", greedy", |set| set.greedy)],
        ),
        figure(
            "Held-out margin",
            "How much more probable right answers are than wrong ones.",
            " nats",
            &[("", |set| set.margin)],
        ),
        figure(
            "Held-out accuracy",
            "Share of prompts whose best answer is the most probable.",
            "",
            &[("", |set| set.accuracy)],
        ),
        figure(
            "Held-out answer length",
            "Mean by set.",
            " tokens",
            &[(", sampled", |set| set.tokens), (", greedy", |set| set.greedy_tokens)],
        ),
        figure(
            "Held-out answers cut off",
            "Share of the answers.",
            "",
            &[(", sampled", |set| set.truncated_share), (", greedy", |set| set.greedy_truncated_share)],
        ),
    ];
    figures.into_iter().flatten().collect()
}

/// One standard deviation around the mean reward, within the rewards that there were; `None` where these are not known, as in
/// metrics of an earlier version.
fn reward_band(run: &Run) -> Option<Vec<[f64; 2]>> {
    let edges = |step: &Step| {
        let [least, most] = step.reward_range.or(run.answers.reward_range)?;
        let (mean, std) = (step.reward_mean?, step.reward_std.unwrap_or(0.0));
        Some([(mean - std).max(least.min(mean)), (mean + std).min(most.max(mean))])
    };
    run.steps.iter().filter(|step| step.reward_mean.is_some()).map(edges).collect()
}

/// The names that a page shows, and what it says of those that it does not.
#[derive(Debug)]
pub(super) struct Shown<'a> {
    pub(super) names: Vec<&'a String>,
    /// Names that are left out.
    pub(super) more: usize,
    what: &'static str,
}

impl<'a> Shown<'a> {
    /// The first of these names; `what` they are.
    fn of(mut names: Vec<&'a String>, what: &'static str) -> Shown<'a> {
        let more = names.len().saturating_sub(MEMBERS_MAX);
        names.truncate(MEMBERS_MAX);
        Shown { names, more, what }
    }

    /// The words under a figure.
    pub(super) fn after(&self, reading: &str) -> String {
        if self.more == 0 {
            return reading.to_owned();
        }
        format!("{reading} {} more {} are left out.", self.more, self.what)
    }
}

/// Names by the sum of their numbers, the largest first, then in alphabetical order.
fn largest<'a>(counted: impl Iterator<Item = (&'a String, u64)>) -> Vec<&'a String> {
    let mut sums: BTreeMap<&String, u64> = BTreeMap::new();
    for (name, count) in counted {
        let sum = sums.entry(name).or_default();
        *sum = sum.saturating_add(count);
    }
    let mut names: Vec<&String> = sums.keys().copied().collect();
    names.sort_by_key(|name| std::cmp::Reverse(sums[name]));
    names
}

fn rewards(run: &Run) -> Vec<Option<Figure>> {
    let steps = &run.steps;
    let mut reward = series("mean", steps, |step| step.reward_mean);
    let band = reward_band(run);
    let reading = match band {
        Some(_) => {
            "Mean over the update's answers; the band is one standard deviation, within the rewards that there were."
        }
        None => "Mean over the update's answers.",
    };
    reward.band = band.unwrap_or_default();
    let names: BTreeSet<&String> = steps.iter().flat_map(|step| step.reward_parts.keys()).collect();
    let shown_parts = Shown::of(names.iter().copied().filter(|_| names.len() > 1).collect(), "parts");
    let part = |name: &String| series(name, steps, |step| step.reward_parts.get(name).copied());
    // A single part is the reward itself, or its weight away from it.
    let parts: Vec<Series> = shown_parts.names.iter().copied().map(part).collect();
    let sources = largest(steps.iter().flat_map(|step| &step.sources).map(|(name, source)| (name, source.groups)));
    let shown_sources = Shown::of(sources, "files");
    let source = |name: &String| series(name, steps, |step| step.sources.get(name)?.reward_mean);
    let of_sources = "Mean over the update's answers from each file, those with most groups first.";
    let sources: Vec<Series> = shown_sources.names.iter().copied().map(source).collect();
    let equal = seldom("groups with equal rewards", steps, |step| Some(step.frac_groups_zero_std));
    let cut = seldom("answers cut off", steps, |step| step.truncated_share);
    let flat = alarms::besides(run, &["reward_flat"], &[]);
    let equal_raised = alarms::besides(run, &["equal_rewards"], &[]);
    let cut_raised = alarms::besides(run, &["truncated"], &[]);
    vec![
        curve("Reward", reading, "", &[reward], &flat),
        curve("Parts of the reward", &shown_parts.after("Mean of each part."), "", &parts, &Besides::default()),
        curve("Reward by source", &shown_sources.after(of_sources), "", &sources, &Besides::default()),
        curve(
            "Groups with equal rewards",
            "Share of the update's groups: these teach nothing.",
            "",
            &[equal],
            &equal_raised,
        ),
        curve("Answers cut off", "Share of the sampled answers.", "", &[cut], &cut_raised),
    ]
}

fn policy(run: &Run) -> Vec<Option<Figure>> {
    let steps = &run.steps;
    let one = |name: &str, number: fn(&Step) -> Option<f64>| [series(name, steps, number)];
    let plain =
        |title: &str, reading: &str, unit, series: &[Series]| curve(title, reading, unit, series, &Besides::default());
    let raised = |names: &[&str], watched: &[&str]| alarms::besides(run, names, watched);
    let ratio = [
        series("smallest", steps, |step| step.ratio.map(|[least, _]| least)),
        series("largest", steps, |step| step.ratio.map(|[_, most]| most)),
    ];
    let clipped = [
        seldom("from below", steps, |step| Some(step.clip_low_share)),
        seldom("from above", steps, |step| Some(step.clip_high_share)),
        seldom("by the dual clip", steps, |step| step.clip_dual_share),
    ];
    let entropies = ["entropy_low", "entropy_high"];
    let norm = one("norm", |step| Some(step.grad_norm));
    let kl = one("KL", |step| step.kl);
    let entropy = one("entropy", |step| step.entropy);
    let gap = one("gap", |step| step.sampled_gap);
    let kl_title = "Divergence from the starting policy";
    vec![
        plain("Loss", "", "", &one("loss", |step| Some(step.loss))),
        curve("Gradient norm", "Before clipping.", "", &norm, &raised(&["grad_norm", "zero_gradient"], &[])),
        plain("Ratio to the frozen scores", "", "", &ratio),
        plain("Clipped tokens", "Share of the trained tokens.", "", &clipped),
        curve(kl_title, "k3 estimate, mean over tokens.", " nats", &kl, &raised(&["kl"], &["kl"])),
        curve("Entropy", "Mean over the sampled tokens.", " nats", &entropy, &raised(&entropies, &entropies)),
        curve(
            "Sampling against score",
            "Largest difference of log-probabilities.",
            " nats",
            &gap,
            &raised(&["sampled_gap"], &["sampled_gap"]),
        ),
        plain("Learning rate", "", "", &one("rate", |step| Some(step.learning_rate))),
    ]
}

fn answers(run: &Run) -> Vec<Option<Figure>> {
    let steps = &run.steps;
    let mut length = series("mean", steps, |step| step.answer_tokens.map(|[mean, ..]| mean));
    length.band = steps.iter().filter_map(|step| step.answer_tokens).map(|[_, least, most]| [least, most]).collect();
    length.edges = Edges::Extremes;
    let missing = seldom("answers", steps, |step| Some(float(step.reward_missing)));
    let skipped = seldom("groups", steps, |step| Some(float(step.groups_skipped)));
    let length_words = "Mean; the band goes from the shortest to the longest.";
    let raised = alarms::besides(run, &["missing_rewards"], &[]);
    vec![
        curve("Answer length", length_words, " tokens", &[length], &Besides::default()),
        curve("Answers without a reward", "", "", &[missing], &raised),
        curve("Groups left out", "", "", &[skipped], &Besides::default()),
    ]
}

/// Seconds by phase, tokens a second, and the prompts that they depend on.
pub(super) fn time(steps: &[Step]) -> Vec<Figure> {
    let column = |step: &Step| Column {
        first: float(step.step),
        last: float(step.step),
        heights: step.seconds.phases().map(|(_, seconds)| seconds).into(),
    };
    let columns: Vec<Column> = steps.iter().map(column).collect();
    let about = About {
        title: "Seconds by phase".into(),
        reading: "Each update's phases on rank 0, and their shares of all updates.".into(),
        x_name: "update",
        unit: " s",
        wide: true,
    };
    let speed = series("tokens", steps, |step| (step.tokens_per_second > 0.0).then_some(step.tokens_per_second));
    let prompts = series("tokens", steps, |step| (step.prompt_tokens > 0).then(|| float(step.prompt_tokens)));
    let throughput = "Prompt and answer tokens, each counted once, per second of the update.";
    let figures = [
        stacks(about, &Seconds::default().phases().map(|(name, _)| name), &columns),
        curve("Throughput", throughput, " tokens/s", &[speed], &Besides::default()),
        curve("Prompt tokens of an update", "", " tokens", &[prompts], &Besides::default()),
    ];
    figures.into_iter().flatten().collect()
}

/// The unit in which numbers up to `bytes` are drawn, and its size in bytes.
pub(super) fn byte_unit(bytes: u64) -> (&'static str, f64) {
    const GIB: u64 = 1 << 30;
    const MIB: u64 = 1 << 20;
    if bytes >= GIB { (" GiB", float(GIB)) } else { (" MiB", float(MIB)) }
}

/// Peaks by phase and rank from the receipt; while there is no receipt, rank 0's peaks from the metrics.
pub(super) fn memory(run: &Run) -> Vec<Figure> {
    let none = Facts::default();
    let receipt = run.receipt.as_ref().unwrap_or(&none);
    let mut device: Vec<Peaks> = Vec::new();
    let mut host: Vec<Peaks> = Vec::new();
    for phase in &receipt.memory {
        device.push(Peaks { phase: &phase.phase, by_rank: phase.device_peak.clone() });
        host.push(Peaks { phase: &phase.phase, by_rank: phase.host_peak.clone() });
    }
    let mut reading = "Peak of each phase by rank; the line is the plan's sum for rank 0.";
    if receipt.memory.is_empty() {
        reading = "Peak of each phase so far on rank 0.";
        for (phase, _) in Seconds::default().phases() {
            let peaks = || run.steps.iter().filter_map(|step| step.memory.get(phase));
            device.extend(peaks().map(|[device, _]| *device).max().map(|most| Peaks { phase, by_rank: vec![most] }));
            host.extend(peaks().map(|[_, host]| *host).max().map(|most| Peaks { phase, by_rank: vec![most] }));
        }
    }
    let figures = [
        peaks_by_phase("Device memory by phase", reading, &device, receipt.plan_device_bytes),
        peaks_by_phase("Host memory by phase", reading, &host, receipt.plan_host_bytes),
    ];
    figures.into_iter().flatten().collect()
}

/// Bytes that a phase held at its peak, by rank.
struct Peaks<'a> {
    phase: &'a str,
    by_rank: Vec<u64>,
}

fn peaks_by_phase(title: &str, reading: &str, phases: &[Peaks<'_>], plan_bytes: u64) -> Option<Figure> {
    let ranks = phases.iter().map(|peaks| peaks.by_rank.len()).max().filter(|&ranks| ranks > 0)?;
    let most = phases.iter().flat_map(|peaks| peaks.by_rank.iter().copied()).max().unwrap_or(0).max(plan_bytes);
    if most == 0 || phases.iter().any(|peaks| peaks.by_rank.len() != ranks) {
        return None;
    }
    let (unit, size) = byte_unit(most);
    let members: Vec<String> = if ranks <= RANKS_MAX {
        (0..ranks).map(|rank| format!("rank {rank}")).collect()
    } else {
        vec!["rank with the least".into(), "rank with the most".into()]
    };
    let heights = |bytes: &[u64]| -> Vec<f64> {
        let each: Vec<f64> = bytes.iter().map(|&bytes| float(bytes) / size).collect();
        if ranks <= RANKS_MAX { each } else { ends(&each).map(Vec::from).unwrap_or_default() }
    };
    let bar = |peaks: &Peaks<'_>| Bars { name: peaks.phase.to_owned(), heights: heights(&peaks.by_rank) };
    let about = About { title: title.into(), reading: reading.into(), x_name: "phase", unit, wide: true };
    let limit = (plan_bytes > 0).then_some(("plan", float(plan_bytes) / size));
    bars(about, &members, &phases.iter().map(bar).collect::<Vec<_>>(), limit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::page::answers::Answers;
    use crate::report::sources::SourceStep;

    #[test]
    fn a_figure_of_many_files_has_the_twelve_with_most_groups_and_says_how_many_it_leaves_out() {
        let source = |at: u64| SourceStep { groups: at, reward_mean: Some(float(at)), ..SourceStep::default() };
        let sources: BTreeMap<String, SourceStep> = (1..=20).map(|at| (format!("f{at:02}"), source(at))).collect();
        let step = |step| Step { step, sources: sources.clone(), ..Step::default() };
        let run = Run { steps: vec![step(1), step(2)], ..Run::default() };
        let figure = serde_json::to_string(&rewards(&run)).unwrap();
        assert!(figure.contains("8 more files are left out") && figure.contains("f20"), "{figure}");
        assert!(figure.contains("f09") && !figure.contains("f08"), "{figure}");
    }

    #[test]
    fn of_many_sets_the_same_ones_are_in_figures_with_both_kinds_of_answers() {
        let set = |at: usize| HeldOut { prompts: at, reward: Some(0.5), greedy: Some(0.5), ..HeldOut::default() };
        let sets: BTreeMap<String, HeldOut> = (1..=14).map(|at| (format!("s{at:02}"), set(at))).collect();
        let evaluation = |step| Evaluation { step, sets: sets.clone(), ..Evaluation::default() };
        let run = Run { evaluations: vec![evaluation(0), evaluation(1)], ..Run::default() };
        let shown = shown_sets(&run);
        assert_eq!((shown.names.len(), shown.more), (12, 2));
        let figure = serde_json::to_string(&evaluations(&run.evaluations, &shown)).unwrap();
        assert!(figure.contains("s03, sampled") && figure.contains("s03, greedy"), "{figure}");
        assert!(!figure.contains("s02,") && figure.contains("2 more sets are left out"), "{figure}");
    }

    #[test]
    fn the_band_of_rewards_stays_within_the_rewards_that_there_were() {
        let step = |step, mean, std, range| Step {
            step,
            reward_mean: Some(mean),
            reward_std: Some(std),
            reward_range: range,
            ..Step::default()
        };
        let steps =
            vec![step(1, 0.875, 0.33, Some([0.0, 1.0])), step(2, 0.1, 0.3, Some([0.0, 1.0])), step(3, 2.0, 0.5, None)];
        let mut run = Run { steps, ..Run::default() };
        assert_eq!(reward_band(&run), None, "an earlier version did not write what the third needs");
        run.answers = Answers { reward_range: Some([0.0, 3.0]), ..Answers::default() };
        let band = reward_band(&run).unwrap();
        assert_eq!(band[..2].concat(), [0.875 - 0.33, 1.0, 0.0, 0.4]);
        assert_eq!(band[2..].concat(), [1.5, 2.5]);
        run.steps.push(Step { step: 4, ..Step::default() });
        assert_eq!(reward_band(&run).unwrap().len(), 3, "an update without a reward has no point");
    }
}
