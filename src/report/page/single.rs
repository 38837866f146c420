//! The sections of one run: what it was, its curves, its seconds and bytes, its gates, and some of its answers.

use super::html::{count, duration, escape, facts, grid, notes, section, short, table};
use super::plot::{About, Series, groups, lines, stacks, thinned};
use super::read::{Facts, Run};
use crate::report::step::{ends, mean};
use crate::report::{AnswerLine, Seconds, Step};
use crate::runtime::units::{Bytes, float};

/// Letters of an answer that are shown.
const LETTERS_MAX: usize = 1500;
/// Rows of the table of all numbers.
const ROWS_MAX: usize = 200;
/// Ranks whose bytes are drawn each for itself; of more, the most and the least.
const RANKS_MAX: usize = 8;
/// Nats between drawing and scoring a token from which on it is noted: the ratio is off by a tenth.
const GAP_NOTED: f64 = 0.1;

/// What became of a run, in a word or two.
pub(super) fn state(run: &Run) -> &'static str {
    match &run.receipt {
        Some(receipt) if receipt.stopped => "stopped before its end",
        Some(receipt) if receipt.passed => "ended well",
        Some(_) => "ended, not passed",
        None if run.steps.is_empty() && !run.gates.is_empty() => "a folder of gates",
        None => "goes on, or was interrupted",
    }
}

/// All sections of a run.
pub(super) fn sections(run: &Run) -> String {
    let mut told = run.notes.clone();
    told.extend(warnings(run));
    let answers: String = run
        .answers
        .iter()
        .map(|one| {
            let worst = one.worst.as_ref().map_or(String::new(), |worst| answer("lowest reward", worst));
            let best = if one.worst.is_some() { "highest reward" } else { "no other reward in this update" };
            answer(best, &one.best) + &worst
        })
        .collect();
    let curves = curves(&run.steps);
    [
        facts(&about(run)),
        notes(&told),
        section("Curves", &grid(&curves)),
        section("Time", &grid(&seconds(run))),
        section("Memory", &grid(&memory(run))),
        section("Gates", &gates(&run.gates)),
        section("Answers", &answers),
        numbers(&run.steps),
    ]
    .concat()
}

/// Names and values at the top.
fn about(run: &Run) -> Vec<(String, String)> {
    let mut rows: Vec<(String, String)> = Vec::new();
    let mut row = |name: &str, value: Option<String>| {
        rows.extend(value.filter(|value| !value.is_empty()).map(|value| (name.to_owned(), value)));
    };
    row("run directory", Some(run.folder.display().to_string()));
    row("state", Some(state(run).to_owned()));
    let steps = run.steps.last().map(|step| step.step);
    let planned = run.configured("run", "steps").map_or(String::new(), |steps| format!(" of {steps}"));
    row("updates", steps.map(|made| format!("{made}{planned}")));
    row("model", run.configured("model", "path"));
    row("data", run.configured("data", "path"));
    row(
        "gradient",
        run.receipt
            .as_ref()
            .map(|receipt| receipt.gradient.clone())
            .or(run.steps.last().map(|step| step.gradient.clone())),
    );
    row("answers a group", run.configured("grpo", "group_size"));
    row("learning rate", run.configured("optimizer", "lr"));
    if let Some(receipt) = &run.receipt {
        let tokens = |tokens: u64| (tokens > 0).then(|| count(tokens));
        row("longest prompt and answer", tokens(receipt.positions));
        row("ranks", (receipt.ranks > 0).then(|| format!("{} ({} a prompt)", receipt.ranks, receipt.cp_size)));
        row("device", Some(receipt.device.clone()));
        row("numbers", Some(receipt.dtype.clone()));
        row("attention", Some(receipt.attention_kernel.clone()));
        row("time of all updates", (receipt.seconds.total > 0.0).then(|| duration(receipt.seconds.total)));
        row(
            "share of capture",
            (receipt.capture_share > 0.0).then(|| format!("{:.0} %", 100.0 * receipt.capture_share)),
        );
        row(
            "loss, first and last",
            (receipt.steps > 0).then(|| format!("{}, {}", short(receipt.loss_first), short(receipt.loss))),
        );
        row("last gradient norm", (receipt.steps > 0).then(|| short(receipt.grad_norm)));
        if let [Some(before), Some(after)] = receipt.held_out {
            let prompts = after.prompts;
            let both =
                |before: Option<f64>, after: Option<f64>| Some(format!("{} → {}", short(before?), short(after?)));
            let on = |text: Option<String>, unit: &str| text.map(|text| format!("{text}{unit} on {prompts} prompts"));
            row("held-out mean reward", on(both(before.reward, after.reward), ""));
            row("held-out margin, right over wrong", on(both(before.margin, after.margin), " nats"));
            row("held-out accuracy", both(before.accuracy, after.accuracy));
        }
        row("ended", Some(receipt.finished.clone()));
        row("built from", Some(receipt.commit.clone()));
        row("configuration", Some(receipt.config_digest.chars().take(12).collect()));
        row("checkpoint", Some(receipt.model_digest.chars().take(12).collect()));
    }
    rows
}

/// What a reader should not overlook.
pub(super) fn warnings(run: &Run) -> Vec<String> {
    let (steps, mut told) = (&run.steps, Vec::new());
    if steps.is_empty() && run.gates.is_empty() {
        told.push("metrics.jsonl has no update yet".to_owned());
    }
    match &run.receipt {
        None if run.gates.is_empty() => told.push(
            "there is no receipt.json: the run goes on, or has failed or was killed, and then logs/ says where; `longstraw \
             train --resume` goes on from its newest checkpoint"
                .to_owned(),
        ),
        Some(receipt) if receipt.stopped => told.push(format!(
            "stopped after update {}, as asked; `longstraw train --resume` goes on",
            receipt.steps
        )),
        _ => {}
    }
    let missing: u64 = steps.iter().map(|step| step.reward_missing).sum();
    if missing > 0 {
        let mut kinds = std::collections::BTreeMap::new();
        for (kind, count) in steps.iter().flat_map(|step| &step.reward_failures) {
            *kinds.entry(kind).or_insert(0) += count;
        }
        let kinds: Vec<String> = kinds.iter().map(|(kind, count)| format!("{kind}: {count}")).collect();
        let why = if kinds.is_empty() { String::new() } else { format!(" ({})", kinds.join(", ")) };
        told.push(format!("answers without a reward, which took no part: {}{why}", count(missing)));
    }
    let equal = steps.iter().filter(|step| step.frac_groups_zero_std >= 1.0).count();
    if equal > 0 {
        told.push(format!(
            "in {equal} of {} updates the rewards of every group are equal: they have no gradient from rewards",
            steps.len()
        ));
    }
    let gap = steps.iter().filter_map(|step| Some((step.sampled_gap?, step.step)));
    if let Some((gap, step)) = gap.max_by(|one, other| one.0.total_cmp(&other.0)).filter(|(gap, _)| *gap > GAP_NOTED) {
        told.push(format!(
            "a token was drawn with a log-probability that its frozen score misses by {} nats (update {step})",
            short(gap)
        ));
    }
    let first = |step: &&Step| step.group_update == 0;
    if let Some((step, [least, most])) = steps
        .iter()
        .filter(first)
        .filter_map(|step| Some((step.step, step.ratio?)))
        .find(|(_, [least, most])| (least - 1.0).abs() > 1e-6 || (most - 1.0).abs() > 1e-6)
    {
        told.push(format!("update {step}: the first replay's ratio is {} to {} and not 1", short(least), short(most)));
    }
    if let Some(receipt) = &run.receipt {
        let pairs = [
            ("device", receipt.device_peak(), receipt.plan_device_bytes),
            ("host", receipt.peak_host_bytes.iter().copied().max(), receipt.plan_host_bytes),
        ];
        for (place, measured, plan) in pairs {
            // As far as gates let a run go beyond its plan.
            if let Some(measured) = measured.filter(|&measured| measured > plan + plan / 20 && plan > 0) {
                told.push(format!("{place} memory: {} measured, {} planned", Bytes(measured), Bytes(plan)));
            }
        }
    }
    told
}

fn line(title: &str, reading: &str, unit: &'static str, series: &[Series]) -> String {
    let about = About { title: title.into(), reading: reading.into(), x_name: "update", unit, wide: false };
    lines(&about, series)
}

/// One number of each update that has it.
pub(super) fn series(name: &str, steps: &[Step], of: impl Fn(&Step) -> Option<f64>) -> Series {
    let points = steps.iter().filter_map(|step| Some((float(step.step), of(step)?))).collect();
    Series { name: name.to_owned(), points, band: Vec::new() }
}

fn curves(steps: &[Step]) -> String {
    let of = |name: &str, of: fn(&Step) -> Option<f64>| series(name, steps, of);
    let seldom = |name: &str, of: fn(&Step) -> f64| {
        let found = series(name, steps, |step| Some(of(step)));
        if found.points.iter().all(|(_, value)| *value == 0.0) { Series::default() } else { found }
    };
    let mut reward = of("mean", |step| step.reward_mean);
    let spread = |step: &Step| Some((step.reward_mean?, step.reward_std.unwrap_or(0.0)));
    reward.band = steps.iter().filter_map(spread).map(|(mean, std)| [mean - std, mean + std]).collect();
    let mut names: Vec<&String> = steps.iter().flat_map(|step| step.reward_parts.keys()).collect();
    names.sort();
    names.dedup();
    let parts: Vec<Series> =
        names.iter().map(|name| series(name, steps, |step| step.reward_parts.get(*name).copied())).collect();
    let mut length = of("mean", |step| step.answer_tokens.map(|[mean, ..]| mean));
    length.band = steps.iter().filter_map(|step| step.answer_tokens).map(|[_, least, most]| [least, most]).collect();
    let ratio = [
        of("smallest", |step| step.ratio.map(|ratio| ratio[0])),
        of("largest", |step| step.ratio.map(|ratio| ratio[1])),
    ];
    let clipped = [seldom("from below", |step| step.clip_low_share), seldom("from above", |step| step.clip_high_share)];
    let shares = [
        of("groups with equal rewards", |step| Some(step.frac_groups_zero_std)),
        of("answers cut off", |step| step.truncated_share),
    ];
    [
        line("Reward", "Mean over the update's answers; the band is one standard deviation.", "", &[reward]),
        line("Parts of the reward", "Mean of each part.", "", &parts),
        line(
            "Groups and answers that teach nothing, or less",
            "Share of the update's groups, or answers.",
            "",
            &shares,
        ),
        line("Loss", "", "", &[of("loss", |step| Some(step.loss))]),
        line("Gradient norm", "Before clipping.", "", &[of("norm", |step| Some(step.grad_norm))]),
        line("Ratio to the frozen scores", "", "", &ratio),
        line("Clipped tokens", "Share of the trained tokens.", "", &clipped),
        line(
            "Divergence from the starting policy",
            "k3 estimate, mean over tokens.",
            " nats",
            &[of("KL", |step| step.kl)],
        ),
        line("Entropy", "Mean over the tokens drawn.", " nats", &[of("entropy", |step| step.entropy)]),
        line(
            "Drawn against scored",
            "Largest distance of log-probabilities.",
            " nats",
            &[of("gap", |step| step.sampled_gap)],
        ),
        line("Answer length", "Mean; the band goes from the shortest to the longest.", " tokens", &[length]),
        line("Answers without a reward", "", "", &[seldom("answers", |step| float(step.reward_missing))]),
        line("Groups left out", "", "", &[seldom("groups", |step| float(step.groups_skipped))]),
        line("Learning rate", "", "", &[of("rate", |step| Some(step.learning_rate))]),
    ]
    .concat()
}

fn seconds(run: &Run) -> String {
    let names = Seconds::default().phases().map(|(name, _)| name);
    let columns: Vec<(f64, Vec<f64>)> = run
        .steps
        .iter()
        .map(|step| (float(step.step), step.seconds.phases().iter().map(|(_, spent)| *spent).collect()))
        .collect();
    let about = About {
        title: "Seconds by phase".into(),
        reading: "Each update's phases on rank 0, and their shares of all updates.".into(),
        x_name: "update",
        unit: " s",
        wide: true,
    };
    let speed = |step: &Step| (step.tokens_per_second > 0.0).then_some(step.tokens_per_second);
    stacks(&about, &names, &columns)
        + &line(
            "Throughput",
            "Prompt and answer tokens, each once, by second of the update.",
            " tokens/s",
            &[series("tokens", &run.steps, speed)],
        )
        + &line(
            "Prompt tokens of an update",
            "",
            " tokens",
            &[series("tokens", &run.steps, |step| (step.prompt_tokens > 0).then(|| float(step.prompt_tokens)))],
        )
}

/// A unit that suits the most, and how many bytes it is.
pub(super) fn unit_of(most: f64) -> (&'static str, f64) {
    if most >= 1024.0 * 1024.0 * 1024.0 { (" GiB", 1024.0 * 1024.0 * 1024.0) } else { (" MiB", 1024.0 * 1024.0) }
}

/// Peaks by phase and rank from the receipt; rank 0's from the metrics where there is none yet.
fn memory(run: &Run) -> String {
    let receipt = run.receipt.clone().unwrap_or_default();
    let mut places: [Vec<(String, Vec<u64>)>; 2] = Default::default();
    for phase in &receipt.memory {
        places[0].push((phase.phase.clone(), phase.device_peak.clone()));
        places[1].push((phase.phase.clone(), phase.host_peak.clone()));
    }
    if receipt.memory.is_empty() {
        let names = Seconds::default().phases().map(|(name, _)| name);
        for (at, place) in places.iter_mut().enumerate() {
            let most = |name: &str| run.steps.iter().filter_map(|step| Some(step.memory.get(name)?[at])).max();
            place.extend(names.iter().filter_map(|&name| Some((name.to_owned(), vec![most(name)?]))));
        }
    }
    let plans = [receipt.plan_device_bytes, receipt.plan_host_bytes];
    let of = |name: &str, place: &[(String, Vec<u64>)], plan: u64| {
        let ranks = place.iter().map(|(_, bytes)| bytes.len()).max().unwrap_or(0);
        let all = place.iter().flat_map(|(_, bytes)| bytes);
        let most = float(all.copied().max().unwrap_or(0).max(plan));
        if ranks == 0 || most <= 0.0 || place.iter().any(|(_, bytes)| bytes.len() != ranks) {
            return String::new();
        }
        let (unit, size) = unit_of(most);
        let members: Vec<String> = if ranks <= RANKS_MAX {
            (0..ranks).map(|rank| format!("rank {rank}")).collect()
        } else {
            vec!["rank with the least".into(), "rank with the most".into()]
        };
        let heights = |bytes: &Vec<u64>| -> Vec<f64> {
            let each: Vec<f64> = bytes.iter().map(|&bytes| float(bytes) / size).collect();
            if ranks <= RANKS_MAX { each } else { ends(&each).map(Vec::from).unwrap_or_default() }
        };
        let phases: Vec<(String, Vec<f64>)> =
            place.iter().map(|(phase, bytes)| (phase.clone(), heights(bytes))).collect();
        let reading = if receipt.memory.is_empty() {
            "The most that each phase held so far on rank 0."
        } else {
            "The most that each phase held, by rank, beside the plan's sum for rank 0."
        };
        let about = About {
            title: format!("{name} memory by phase"),
            reading: reading.into(),
            x_name: "phase",
            unit,
            wide: true,
        };
        groups(&about, &members, &phases, (plan > 0).then_some(("plan", float(plan) / size)))
    };
    of("Device", &places[0], plans[0]) + &of("Host", &places[1], plans[1])
}

/// The table of gates, and what each failed check means.
pub(super) fn gates(gates: &[Facts]) -> String {
    if gates.is_empty() {
        return String::new();
    }
    let heads = [
        "gate",
        "outcome",
        "checks",
        "positions",
        "group",
        "gradient",
        "ranks",
        "device peak",
        "plan",
        "time",
        "ended",
    ];
    let row = |gate: &Facts| {
        let held = gate.checks.iter().filter(|check| check.passed).count();
        let outcome =
            if gate.passed { "<span class=\"good\">passed</span>" } else { "<span class=\"bad\">not passed</span>" };
        let forced = if gate.forced { ", forced" } else { "" };
        let bytes = |bytes: Option<u64>| {
            bytes.filter(|&bytes| bytes > 0).map_or("–".into(), |bytes| Bytes(bytes).to_string())
        };
        let number = |number: u64| if number > 0 { count(number) } else { "–".into() };
        let spent = gate.seconds.total;
        vec![
            escape(gate.gate.as_deref().unwrap_or_default()),
            format!("{outcome}{forced}"),
            format!("{held} of {} held", gate.checks.len()),
            number(gate.positions),
            number(gate.group_size),
            escape(&gate.gradient),
            number(crate::runtime::units::from_index(gate.ranks)),
            bytes(gate.device_peak()),
            bytes(Some(gate.plan_device_bytes)),
            if spent > 0.0 { duration(spent) } else { "–".into() },
            escape(&gate.finished),
        ]
    };
    let rows: Vec<Vec<String>> = gates.iter().map(row).collect();
    let mut told = Vec::new();
    for gate in gates {
        let name = gate.gate.as_deref().unwrap_or_default();
        for check in gate.checks.iter().filter(|check| !check.passed) {
            let value: String = check.value.to_string().chars().take(200).collect();
            told.push(format!("{name}, {}: {value} ({}): {}", check.name, check.limit, check.means));
        }
        told.extend(gate.not_checked.iter().map(|what| format!("{name}, not checked: {what}")));
    }
    table(&heads, &rows) + &notes(&told)
}

/// One answer, as it may stand in a page.
fn answer(which: &str, line: &AnswerLine) -> String {
    let mut about =
        vec![format!("update {}, {which}", line.step), format!("prompt {}, answer {}", line.prompt, line.answer)];
    about.push(line.reward.map_or("no reward".to_owned(), |reward| format!("reward {}", short(reward))));
    about.extend(line.parts.iter().map(|(name, value)| format!("{name} {}", short(*value))));
    about.extend(line.advantage.map(|advantage| format!("advantage {}", short(advantage))));
    about.push(format!("{} tokens{}", count(line.tokens), if line.truncated { ", cut off" } else { "" }));
    about.extend(line.failure.iter().cloned());
    let letters = line.text.chars().count();
    let shown: String = line.text.chars().take(LETTERS_MAX).collect();
    let more = letters.saturating_sub(LETTERS_MAX);
    let more = if more > 0 {
        format!("\n<p class=\"soft\">… and {more} more letters in answers.jsonl</p>")
    } else {
        String::new()
    };
    format!(
        "<article>\n<h3>{}</h3>\n<p class=\"soft\">{}</p>\n<pre>{}</pre>{more}\n</article>\n",
        escape(&about[0]),
        escape(&about[1..].join(" · ")),
        escape(&shown)
    )
}

/// All numbers in a table, for those who read rather than look.
fn numbers(steps: &[Step]) -> String {
    if steps.is_empty() {
        return String::new();
    }
    let heads = [
        "update",
        "reward",
        "std",
        "equal groups",
        "loss",
        "gradient norm",
        "ratio",
        "learning rate",
        "prompt tokens",
        "answer tokens",
        "seconds",
    ];
    let some = |value: Option<f64>| value.map_or("–".to_owned(), short);
    // Of a long run every so many updates.
    let rows: Vec<Vec<String>> = thinned(steps, ROWS_MAX)
        .into_iter()
        .filter_map(<[Step]>::last)
        .map(|step| {
            vec![
                count(step.step),
                some(step.reward_mean),
                some(step.reward_std),
                format!("{:.0} %", 100.0 * step.frac_groups_zero_std),
                short(step.loss),
                short(step.grad_norm),
                step.ratio.map_or("–".into(), |[least, most]| format!("{} … {}", short(least), short(most))),
                short(step.learning_rate),
                count(step.prompt_tokens),
                some(step.answer_tokens.map(|[mean, ..]| mean)),
                short(step.seconds.total),
            ]
        })
        .collect();
    let left =
        if rows.len() < steps.len() { format!(", {} of {} updates", rows.len(), steps.len()) } else { String::new() };
    format!("<details>\n<summary>Numbers by update{left}</summary>\n{}</details>\n", table(&heads, &rows))
}

/// Mean reward of the last tenth of the updates, and of the first.
pub(super) fn reward_ends(steps: &[Step]) -> [Option<f64>; 2] {
    let known: Vec<f64> = steps.iter().filter_map(|step| step.reward_mean).collect();
    let some = known.len().div_ceil(10);
    [mean(&known[..some]), mean(&known[known.len() - some..])]
}
