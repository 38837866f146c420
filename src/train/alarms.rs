//! What is watched while a run goes on: a number that leaves its limit warns, and stops the run where `[alarm]` says so.
//!
//! Rank 0 judges, since it alone has the updates before a resume and its own peak of memory; all ranks learn what it found.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

use crate::config::AlarmConfig;
use crate::report::Step;
use crate::runtime::units::{Bytes, float, from_index};

/// Updates with a gradient, or with a wait for rewards, before that of a further one is compared with theirs.
const COMPARED_MIN: u64 = 5;
/// Waits for rewards that are shorter raise no alarm, s.
const REWARD_SEC_MIN: f64 = 60.0;
/// A lasting alarm is said again after as many updates.
const SAID_AGAIN: u64 = 50;

/// What an alarm is compared with besides the numbers of an update.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected {
    /// Distance of sampling and scoring beyond which a user is warned, nats.
    pub(super) gap_warn: f64,
    /// Rank 0's sum in the plan, on the device.
    pub(super) device_bytes: Bytes,
    /// Answers of an update.
    pub(super) answers: u64,
    /// Whether rewards are to differ; they do not with the reward that is always 1.
    pub(super) rewards_differ: bool,
}

/// What rank 0 found in one update.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub(super) struct Findings {
    /// Value of each alarm that is raised, by name; absent where it is not finite, which JSON has no word for.
    pub(super) raised: BTreeMap<String, Option<f64>>,
    /// What a user is told now.
    pub(super) lines: Vec<String>,
    /// Why the run ends here, if it does.
    pub(super) stop: Option<String>,
}

/// Alarms of a run, and what they remember.
#[derive(Debug)]
pub(super) struct Alarms {
    config: AlarmConfig,
    past: VecDeque<Past>,
    /// Seconds of the newest waits for rewards. Of the updates of one round only the first waits, so they reach further back.
    waits: VecDeque<f64>,
    /// Updates that each raised alarm has lasted.
    lasting: BTreeMap<&'static str, u64>,
}

/// What is remembered of an update.
#[derive(Clone, Copy, Debug)]
struct Past {
    reward: Option<f64>,
    truncated: Option<f64>,
    equal_groups: f64,
    grad_norm: f64,
}

/// One watched number.
struct Reading {
    name: &'static str,
    value: f64,
    warns: bool,
    stops: bool,
    words: String,
}

impl Alarms {
    /// `earlier`: the updates before a resume, as far as metrics.jsonl has them.
    pub(super) fn new(config: &AlarmConfig, earlier: &[Step]) -> Alarms {
        let mut alarms =
            Alarms { config: config.clone(), past: VecDeque::new(), waits: VecDeque::new(), lasting: BTreeMap::new() };
        for step in earlier {
            alarms.remember(step);
        }
        alarms
    }

    /// Judges an update that was made.
    pub(super) fn judge(&mut self, step: &Step, expected: &Expected) -> Findings {
        let norm = compared(step.grad_norm, self.last(self.config.window.max(COMPARED_MIN)).map(|past| past.grad_norm));
        let wait = compared(step.seconds.reward, self.waits.iter().copied());
        let wait = wait.filter(|_| step.seconds.reward >= REWARD_SEC_MIN);
        self.remember(step);
        let mut readings = self.of_update(step, norm, expected);
        readings.extend(self.reward_wait(step, wait));
        readings.extend(self.of_window());
        readings.retain(|one| expected.rewards_differ || !["equal_rewards", "reward_flat"].contains(&one.name));
        let mut findings = Findings::default();
        let raised: BTreeSet<&str> = readings.iter().filter(|reading| reading.warns).map(|one| one.name).collect();
        self.lasting.retain(|name, _| raised.contains(name));
        for reading in readings {
            if reading.warns {
                let lasted = self.lasting.entry(reading.name).or_default();
                *lasted += 1;
                if *lasted % SAID_AGAIN == 1 {
                    findings.lines.push(format!("warning: alarm {}: {}", reading.name, reading.words));
                }
            }
            if reading.warns || reading.stops {
                let value = Some(reading.value).filter(|value| value.is_finite());
                findings.raised.insert(reading.name.to_owned(), value);
            }
            if reading.stops && findings.stop.is_none() {
                findings.stop = Some(format!("alarm.{}_stop: {}", reading.name, reading.words));
            }
        }
        findings
    }

    fn remember(&mut self, step: &Step) {
        self.past.push_back(Past {
            reward: step.reward_mean,
            truncated: step.truncated_share,
            equal_groups: step.frac_groups_zero_std,
            grad_norm: step.grad_norm,
        });
        self.waits.extend(Some(step.seconds.reward).filter(|&wait| wait > 0.0));
        while from_index(self.waits.len()) > self.config.window.max(COMPARED_MIN) {
            self.waits.pop_front();
        }
        let AlarmConfig { window, reward_flat_warn, reward_flat_stop, zero_gradient_warn, zero_gradient_stop, .. } =
            self.config;
        let counts = [window.max(COMPARED_MIN), reward_flat_warn, zero_gradient_warn];
        let stops = [reward_flat_stop, zero_gradient_stop].map(Option::unwrap_or_default);
        let most = counts.into_iter().chain(stops).max().unwrap_or(0);
        while from_index(self.past.len()) > most {
            self.past.pop_front();
        }
    }

    /// The wait for an update's rewards, in units of the median of those before.
    fn reward_wait(&self, step: &Step, wait: Option<f64>) -> Option<Reading> {
        let alarm = &self.config;
        reading("reward_sec", wait, f64::gt, alarm.reward_sec_warn, alarm.reward_sec_stop, |value| {
            format!(
                "the update has waited {:.0} s for its rewards, {value:.1} times the median of the updates before: what scores \
                 answers has become slow (`longstraw ping` times a judge)",
                step.seconds.reward
            )
        })
    }

    /// The newest updates, `count` at most.
    fn last(&self, count: u64) -> impl Iterator<Item = &Past> {
        let skipped = self.past.len().saturating_sub(usize::try_from(count).unwrap_or(usize::MAX));
        self.past.iter().skip(skipped)
    }

    /// What one update tells.
    fn of_update(&self, step: &Step, compared_norm: Option<f64>, expected: &Expected) -> Vec<Reading> {
        let alarm = &self.config;
        let missing = float(step.reward_missing) / float(expected.answers.max(1));
        let device_peak = step.memory.values().map(|&[device, _]| device).max().unwrap_or(0);
        let planned = (expected.device_bytes.0 > 0).then(|| float(device_peak) / float(expected.device_bytes.0));
        let readings = [
            reading("kl", step.kl, f64::gt, alarm.kl_warn, alarm.kl_stop, |value| {
                format!(
                    "{value:.3} nats a token between the policy and the one that it began from: lower optimizer.lr or raise \
                     grpo.kl_coef"
                )
            }),
            reading("grad_norm", compared_norm, f64::gt, alarm.grad_norm_warn, alarm.grad_norm_stop, |value| {
                format!(
                    "the gradient's norm, {:.3e}, is {value:.1} times the median of the updates before: lower optimizer.lr or \
                     optimizer.max_grad_norm",
                    step.grad_norm
                )
            }),
            reading("entropy_low", step.entropy, f64::lt, alarm.entropy_low_warn, alarm.entropy_low_stop, |value| {
                format!(
                    "tokens are sampled with an entropy of {value:.2e} nats: answers of a group no longer differ, so that nothing \
                     is learnt from them; lower optimizer.lr"
                )
            }),
            reading("entropy_high", step.entropy, f64::gt, alarm.entropy_high_warn, alarm.entropy_high_stop, |value| {
                format!("tokens are sampled with an entropy of {value:.2} nats, nearly at random: lower optimizer.lr")
            }),
            reading(
                "missing_rewards",
                (step.reward_missing > 0).then_some(missing),
                f64::gt,
                alarm.missing_rewards_warn,
                alarm.missing_rewards_stop,
                |value| {
                    format!(
                        "{:.0} % of the answers have no reward: reward_failures in metrics.jsonl says why",
                        100.0 * value
                    )
                },
            ),
            reading("sampled_gap", step.sampled_gap, f64::gt, expected.gap_warn, alarm.sampled_gap_stop, |value| {
                format!(
                    "a token was sampled with a log-probability that lies {value:.1e} from its score, more than \
                     rollout.gap_warn allows ({:.1e}): sampling and scoring do not compute the same policy",
                    expected.gap_warn
                )
            }),
            reading("device_memory", planned, f64::gt, alarm.device_memory_warn, alarm.device_memory_stop, |value| {
                format!(
                    "{} were used on the device, {value:.3} times the plan's {}: `longstraw plan` names the addends",
                    Bytes(device_peak),
                    expected.device_bytes
                )
            }),
        ];
        readings.into_iter().flatten().collect()
    }

    /// What several updates tell together.
    fn of_window(&self) -> Vec<Reading> {
        let alarm = &self.config;
        let window = alarm.window;
        let is_full = from_index(self.past.len()) >= window;
        let share = |of: fn(&Past) -> Option<f64>| {
            let known: Vec<f64> = self.last(window).filter_map(of).collect();
            (is_full && from_index(known.len()) == window).then(|| mean(&known))
        };
        let truncated = share(|past| past.truncated);
        let equal = share(|past| Some(past.equal_groups));
        let shares = [
            reading("truncated", truncated, f64::ge, alarm.truncated_warn, alarm.truncated_stop, |value| {
                format!(
                    "{:.0} % of the sampled answers of the last {window} updates were cut at their greatest length: raise \
                     context.answer_len, or reward answers that end",
                    100.0 * value
                )
            }),
            reading("equal_rewards", equal, f64::ge, alarm.equal_rewards_warn, alarm.equal_rewards_stop, |value| {
                format!(
                    "in {:.0} % of the groups of the last {window} updates all rewards are equal, and such groups teach nothing: \
                     prompts are too hard or too easy",
                    100.0 * value
                )
            }),
        ];
        let flat = self.flat(alarm.reward_flat_warn);
        let reward_flat = Reading {
            name: "reward_flat",
            value: flat.unwrap_or_default(),
            warns: flat.is_some(),
            stops: alarm.reward_flat_stop.is_some_and(|count| self.flat(count).is_some()),
            words: format!(
                "the mean reward, {:.3}, has not risen measurably within the last {} updates",
                flat.unwrap_or_default(),
                alarm.reward_flat_warn
            ),
        };
        let zeros = self.past.iter().rev().take_while(|past| past.grad_norm <= 0.0).count();
        let is_long = |count: u64| count > 0 && from_index(zeros) >= count;
        let zero_gradient = Reading {
            name: "zero_gradient",
            value: float(from_index(zeros)),
            warns: is_long(alarm.zero_gradient_warn),
            stops: alarm.zero_gradient_stop.is_some_and(is_long),
            words: format!(
                "{zeros} updates in a row had no gradient: the rewards of every group were equal, or its answers were left out \
                 (grpo.mask_truncated)"
            ),
        };
        shares.into_iter().flatten().chain([reward_flat, zero_gradient]).collect()
    }

    /// The mean reward of the newer half of the last `count` updates, where it lies less than two standard errors above that
    /// of the older half. `None` where `count` is 0, or there are fewer updates with a reward.
    fn flat(&self, count: u64) -> Option<f64> {
        let rewards: Vec<f64> = self.last(count).filter_map(|past| past.reward).collect();
        if count < 4 || from_index(rewards.len()) < count {
            return None;
        }
        let (older, newer) = rewards.split_at(rewards.len() / 2);
        let error = (squared_error(older) + squared_error(newer)).sqrt();
        (mean(newer) - mean(older) < 2.0 * error.max(f64::MIN_POSITIVE)).then(|| mean(newer))
    }
}

/// A number that raises its alarm where `is_beyond` holds for it and a limit; a NaN is beyond every limit.
fn reading(
    name: &'static str,
    value: Option<f64>,
    is_beyond: fn(&f64, &f64) -> bool,
    warn: f64,
    stop: Option<f64>,
    words: impl FnOnce(f64) -> String,
) -> Option<Reading> {
    let value = value?;
    let raises = |limit: f64| is_beyond(&value, &limit) || value.is_nan();
    Some(Reading { name, value, warns: raises(warn), stops: stop.is_some_and(raises), words: words(value) })
}

/// A number in units of the median of those before it that are above 0.
fn compared(number: f64, before: impl Iterator<Item = f64>) -> Option<f64> {
    let mut before: Vec<f64> = before.filter(|&number| number > 0.0).collect();
    before.sort_by(f64::total_cmp);
    (from_index(before.len()) >= COMPARED_MIN).then(|| number / before[before.len() / 2])
}

fn mean(numbers: &[f64]) -> f64 {
    numbers.iter().sum::<f64>() / float(from_index(numbers.len()))
}

/// The squared standard error of a mean: the sample variance over the number of values.
fn squared_error(numbers: &[f64]) -> f64 {
    let count = float(from_index(numbers.len()));
    let center = mean(numbers);
    let squares: f64 = numbers.iter().map(|number| (number - center).powi(2)).sum();
    squares / (count - 1.0).max(1.0) / count
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Seconds;

    /// Name of an alarm, and what raises it.
    type Change = (&'static str, fn(&mut Step));

    const EXPECTED: Expected =
        Expected { gap_warn: 1e-4, device_bytes: Bytes(1_000), answers: 8, rewards_differ: true };

    fn config() -> AlarmConfig {
        AlarmConfig {
            window: 10,
            kl_warn: 1.0,
            kl_stop: None,
            grad_norm_warn: 10.0,
            grad_norm_stop: None,
            entropy_low_warn: 1e-3,
            entropy_low_stop: None,
            entropy_high_warn: 5.0,
            entropy_high_stop: None,
            truncated_warn: 0.5,
            truncated_stop: None,
            equal_rewards_warn: 0.95,
            equal_rewards_stop: None,
            reward_flat_warn: 100,
            reward_flat_stop: None,
            missing_rewards_warn: 0.05,
            missing_rewards_stop: None,
            reward_sec_warn: 10.0,
            reward_sec_stop: None,
            sampled_gap_stop: None,
            device_memory_warn: 1.05,
            device_memory_stop: None,
            zero_gradient_warn: 5,
            zero_gradient_stop: None,
        }
    }

    fn healthy(step: u64) -> Step {
        Step {
            step,
            reward_mean: Some(0.5),
            kl: Some(0.02),
            entropy: Some(1.5),
            sampled_gap: Some(1e-6),
            truncated_share: Some(0.1),
            frac_groups_zero_std: 0.25,
            grad_norm: 1.0 + 0.1 * float(step % 3),
            memory: [("sweep".to_owned(), [900, 10])].into(),
            seconds: Seconds { reward: 8.0 - float(step % 2), ..Seconds::default() },
            ..Step::default()
        }
    }

    fn names(findings: &Findings) -> Vec<&str> {
        findings.raised.keys().map(String::as_str).collect()
    }

    /// After twenty healthy updates, the alarms of one more that `change` has changed.
    fn after_healthy(config: &AlarmConfig, change: impl FnOnce(&mut Step)) -> Findings {
        let mut alarms = Alarms::new(config, &[]);
        for step in 1..=20 {
            assert_eq!(alarms.judge(&healthy(step), &EXPECTED), Findings::default(), "update {step}");
        }
        let mut last = healthy(21);
        change(&mut last);
        alarms.judge(&last, &EXPECTED)
    }

    #[test]
    fn each_number_of_an_update_raises_its_own_alarm_and_no_other() {
        let changes: [Change; 9] = [
            ("kl", |step| step.kl = Some(3.0)),
            ("kl", |step| step.kl = Some(f64::NAN)),
            ("grad_norm", |step| step.grad_norm = 30.0),
            ("entropy_low", |step| step.entropy = Some(1e-6)),
            ("entropy_high", |step| step.entropy = Some(9.0)),
            ("missing_rewards", |step| step.reward_missing = 4),
            ("reward_sec", |step| step.seconds.reward = 90.0),
            ("sampled_gap", |step| step.sampled_gap = Some(2e-4)),
            ("device_memory", |step| step.memory = [("sweep".to_owned(), [1_100, 10])].into()),
        ];
        for (name, change) in changes {
            let findings = after_healthy(&config(), change);
            assert_eq!(names(&findings), [name]);
            assert!(findings.lines[0].starts_with(&format!("warning: alarm {name}: ")), "{:?}", findings.lines);
            assert_eq!(findings.stop, None, "{name}: nothing stops unless it is asked for");
        }
    }

    #[test]
    fn an_alarm_stops_where_its_stop_is_passed_and_only_there() {
        let config = AlarmConfig { kl_stop: Some(5.0), ..config() };
        assert_eq!(after_healthy(&config, |step| step.kl = Some(3.0)).stop, None);
        let stop = after_healthy(&config, |step| step.kl = Some(6.0)).stop.unwrap();
        assert!(stop.starts_with("alarm.kl_stop: 6.000 nats a token"), "{stop}");
    }

    #[test]
    fn a_wait_for_rewards_is_slow_against_the_updates_before_and_from_a_minute_on() {
        let config = AlarmConfig { reward_sec_warn: 2.0, reward_sec_stop: Some(20.0), ..config() };
        let waited = |seconds: f64| after_healthy(&config, |step| step.seconds.reward = seconds);
        assert_eq!(waited(59.0), Findings::default(), "eight times as long, and short all the same");
        assert_eq!((names(&waited(61.0)), waited(61.0).stop), (vec!["reward_sec"], None));
        let stop = waited(200.0).stop.unwrap();
        assert!(stop.starts_with("alarm.reward_sec_stop: the update has waited 200 s"), "{stop}");
        // The first updates of a run have nothing to be compared with.
        let long = Step { seconds: Seconds { reward: 900.0, ..Seconds::default() }, ..healthy(1) };
        assert_eq!(Alarms::new(&config, &[]).judge(&long, &EXPECTED), Findings::default());
    }

    /// A window below five left the gradient's norm without anything to be compared with, and no alarm was ever raised.
    #[test]
    fn a_short_window_leaves_the_gradients_norm_its_five_updates() {
        for window in 1..=6 {
            let config = AlarmConfig { window, reward_flat_warn: 0, zero_gradient_warn: 0, ..config() };
            let findings = after_healthy(&config, |step| step.grad_norm = 30.0);
            assert_eq!(names(&findings), ["grad_norm"], "window {window}");
        }
    }

    #[test]
    fn updates_of_a_round_that_do_not_wait_are_no_waits_to_compare_with() {
        for window in [3, 10] {
            let config = AlarmConfig { window, ..config() };
            let waits = |step: u64, first: f64| {
                let reward = if step % 4 == 1 { first } else { 0.0 };
                Step { seconds: Seconds { reward, ..Seconds::default() }, ..healthy(step) }
            };
            let mut alarms = Alarms::new(&config, &[]);
            for step in 1..=40 {
                assert_eq!(alarms.judge(&waits(step, 8.0), &EXPECTED), Findings::default(), "update {step}");
            }
            assert_eq!(names(&alarms.judge(&waits(41, 4000.0), &EXPECTED)), ["reward_sec"], "window {window}");
        }
    }

    #[test]
    fn shares_are_judged_over_a_whole_window() {
        let config = AlarmConfig { window: 4, zero_gradient_warn: 3, ..config() };
        let mut alarms = Alarms::new(&config, &[]);
        let bad =
            |step| Step { truncated_share: Some(0.9), frac_groups_zero_std: 1.0, grad_norm: 0.0, ..healthy(step) };
        let raised: Vec<Vec<String>> =
            (1..=4).map(|step| alarms.judge(&bad(step), &EXPECTED).raised.into_keys().collect()).collect();
        assert_eq!(raised[..2], [Vec::<String>::new(), Vec::new()]);
        assert_eq!(raised[2], ["zero_gradient"]);
        assert_eq!(raised[3], ["equal_rewards", "truncated", "zero_gradient"]);
    }

    #[test]
    fn rewards_that_never_differ_raise_no_alarm_about_rewards() {
        let config = AlarmConfig { window: 4, reward_flat_warn: 4, ..config() };
        let mut alarms = Alarms::new(&config, &[]);
        let equal = |step| Step { reward_mean: Some(1.0), frac_groups_zero_std: 1.0, ..healthy(step) };
        let expected = Expected { rewards_differ: false, ..EXPECTED };
        for step in 1..=20 {
            assert_eq!(alarms.judge(&equal(step), &expected), Findings::default(), "update {step}");
        }
    }

    #[test]
    fn what_is_not_finite_comes_back_from_json() {
        let findings = after_healthy(&config(), |step| step.sampled_gap = Some(f64::NAN));
        assert_eq!(findings.raised, [("sampled_gap".to_owned(), None)].into());
        let text = serde_json::to_string(&findings).unwrap();
        assert_eq!(serde_json::from_str::<Findings>(&text).unwrap(), findings);
        let step = Step { alarms: findings.raised, ..healthy(1) };
        let line = serde_json::to_string(&step).unwrap();
        assert_eq!(serde_json::from_str::<Step>(&line).unwrap().alarms, step.alarms);
    }

    #[test]
    fn a_resumed_run_remembers_the_updates_before_it() {
        let config = AlarmConfig { window: 4, zero_gradient_warn: 0, ..config() };
        let bad = |step| Step { truncated_share: Some(0.9), ..healthy(step) };
        let mut uninterrupted = Alarms::new(&config, &[]);
        for step in 1..4 {
            uninterrupted.judge(&bad(step), &EXPECTED);
        }
        let mut resumed = Alarms::new(&config, &[bad(1), bad(2), bad(3)]);
        assert_eq!(resumed.judge(&bad(4), &EXPECTED), uninterrupted.judge(&bad(4), &EXPECTED));
        assert_eq!(names(&resumed.judge(&bad(5), &EXPECTED)), ["truncated"]);
    }

    #[test]
    fn a_lasting_alarm_is_said_when_it_begins_and_seldom_again() {
        let mut alarms = Alarms::new(&config(), &[]);
        let bad = |step| Step { kl: Some(7.0), ..healthy(step) };
        let said: Vec<u64> = (1..=60).filter(|&step| !alarms.judge(&bad(step), &EXPECTED).lines.is_empty()).collect();
        assert_eq!(said, [1, 51]);
        assert!(alarms.judge(&healthy(61), &EXPECTED).lines.is_empty());
        assert_eq!(alarms.judge(&bad(62), &EXPECTED).lines.len(), 1, "it begins once more");
    }

    #[test]
    fn a_reward_is_flat_where_its_halves_differ_by_less_than_two_standard_errors() {
        let config = AlarmConfig { reward_flat_warn: 40, ..config() };
        let run = |reward: fn(u64) -> f64| {
            let mut alarms = Alarms::new(&config, &[]);
            let steps = (1..=40).map(|step| Step { reward_mean: Some(reward(step)), ..healthy(step) });
            steps.map(|step| alarms.judge(&step, &EXPECTED)).last().map(|last| names(&last).join(" "))
        };
        let wave = |step: u64| 0.5 + 0.2 * (float(step) * 2.1).sin();
        assert_eq!(run(wave).unwrap(), "reward_flat");
        assert_eq!(run(|step| 0.5 + 0.2 * (float(step) * 2.1).sin() + 0.01 * float(step)).unwrap(), "");
        assert_eq!(run(|_| 1.0).unwrap(), "reward_flat");
    }
}
