//! How a run has ended, or that it has not: what stands at the top of its page.

use serde::Serialize;

use super::facts::Facts;
use super::life::Life;
use super::log::Logged;
use super::numbers::short;
use super::read::Run;
use crate::runtime::failure::Exit;

/// Most characters of a cause.
const CAUSE_CHARS_MAX: usize = 3000;
/// Most failures besides the first one.
const FURTHER_MAX: usize = 4;

/// Whether a reader should be pleased.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Tone {
    Good,
    Note,
    Bad,
}

/// The top of a run's page.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Ending {
    pub(super) tone: Tone,
    /// In a few words, for tables.
    pub(super) state: &'static str,
    title: String,
    /// Names and texts.
    facts: Vec<(&'static str, String)>,
    pub(super) exit: Option<i32>,
    pub(super) cause: Option<String>,
}

/// Kind of an exit code, what to do, and the heading of docs/troubleshooting.md.
fn advice(exit: Exit) -> [&'static str; 2] {
    match exit {
        Exit::Done | Exit::Requeue => ["saved", "The same command with --resume goes on."],
        Exit::Config => [
            "the configuration is wrong",
            "Correct what the cause names; longstraw plan checks a configuration without a run (docs/troubleshooting.md, \
             Configuration).",
        ],
        Exit::Data => [
            "data, weights or a disk are wrong",
            "Look at the file that the cause names; longstraw doctor tries disks and data (docs/troubleshooting.md, Data and \
             weights).",
        ],
        Exit::Disagree => [
            "ranks disagree, or one stood still",
            "Look at the machine of the rank that is named, and at the last places of the others (docs/troubleshooting.md, \
             Launch and Ranks).",
        ],
        Exit::DoesNotFit => [
            "it does not fit the machine",
            "longstraw plan names the addends and what makes them smaller; the cause lists what was held \
             (docs/troubleshooting.md, Memory).",
        ],
        Exit::NotFinite => [
            "a number is not finite",
            "Look at the curves before that update; a lower optimizer.lr, or float32 (docs/troubleshooting.md, Numbers).",
        ],
        Exit::Endpoint => [
            "the endpoint failed",
            "longstraw ping tells key, address and time-out apart (docs/troubleshooting.md, Endpoint).",
        ],
        Exit::Gate => ["a check did not hold", "The table of gates names it (docs/troubleshooting.md, Gates)."],
        Exit::Alarm => ["an alarm has ended the run", "The limits are in [alarm] of config.resolved.toml."],
        Exit::Bug => [
            "a bug of longstraw",
            "Please report it, with the cause and the run directory (docs/troubleshooting.md, Bugs).",
        ],
    }
}

/// [`advice`] for a failure with this message: drift has an exit code that it shares with alarms, and a limit of its own.
fn advice_for(exit: Exit, message: &str) -> [&'static str; 2] {
    const LIMIT: &str = "grpo.reuse_drift_max";
    if exit == Exit::Alarm && message.contains(LIMIT) {
        let todo = "The limit is grpo.reuse_drift_max of config.resolved.toml (docs/troubleshooting.md, Numbers).";
        return ["reused pages have drifted too far", todo];
    }
    advice(exit)
}

impl Ending {
    pub(super) fn of(run: &Run) -> Ending {
        match &run.receipt {
            Some(receipt) => Ending::of_receipt(run, receipt),
            None if run.steps.is_empty() && !run.gates.is_empty() => Ending::of_gates(&run.gates),
            None if run.signs.life == Life::Running => Ending::going_on(run),
            None => {
                let own = run.failures.iter().find(|failure| !is_echo(&failure.message));
                own.or(run.failures.first()).map_or_else(|| Ending::unknown(run), |first| Ending::failed(run, first))
            }
        }
    }

    fn plain(tone: Tone, state: &'static str, title: String, facts: Vec<(&'static str, String)>) -> Ending {
        Ending { tone, state, title, facts, exit: None, cause: None }
    }

    fn of_receipt(run: &Run, receipt: &Facts) -> Ending {
        let steps = receipt.steps;
        if receipt.stopped_by_alarm {
            let raised: Vec<String> = run.steps.last().into_iter().flat_map(|step| &step.alarms).map(alarm).collect();
            let [kind, _] = advice(Exit::Alarm);
            let facts = vec![
                ("exit", format!("{}: {kind}", Exit::Alarm.code())),
                ("alarms", raised.join("; ")),
                ("limits", limits(run)),
                ("last update", last_update(run)),
                ("saved", saved(run)),
                (
                    "what to do",
                    "Look at the curve of that number. longstraw train --resume goes on from the saved state with other limits \
                     ([alarm]); --anew begins again, with another learning rate for example."
                        .to_owned(),
                ),
            ];
            let title = format!("An alarm has ended this run after update {steps}");
            let cause = (!raised.is_empty()).then(|| raised.join("; "));
            let ending = Ending::plain(Tone::Bad, "stopped by an alarm", title, facts);
            return Ending { exit: Some(Exit::Alarm.code()), cause, ..ending };
        }
        if receipt.stopped {
            let facts = vec![
                ("last update", last_update(run)),
                ("saved", saved(run)),
                ("what to do", "longstraw train --resume goes on.".to_owned()),
            ];
            let title = format!("This run was stopped after update {steps}, as requested");
            return Ending::plain(Tone::Note, "stopped before its end", title, facts);
        }
        if receipt.passed {
            let title = match &receipt.gate {
                Some(gate) => format!("{gate} has passed"),
                None => format!("This run has ended well after {steps} updates"),
            };
            return Ending::plain(Tone::Good, "ended well", title, Vec::new());
        }
        let failed: Vec<String> = receipt.checks.iter().filter(|check| !check.passed).map(|c| c.name.clone()).collect();
        let (title, exit, why) = if let Some(gate) = &receipt.gate {
            (format!("{gate} has not passed"), Exit::Gate, failed.join(", "))
        } else {
            ("This run has ended and trained nothing".to_owned(), Exit::Data, "no update had a gradient".to_owned())
        };
        let facts = vec![("cause", why.clone()), ("last update", last_update(run))];
        let ending = Ending::plain(Tone::Bad, "ended, not passed", title, facts);
        Ending { exit: Some(exit.code()), cause: Some(why), ..ending }
    }

    fn of_gates(gates: &[Facts]) -> Ending {
        let passed = gates.iter().filter(|gate| gate.passed).count();
        let tone = if passed == gates.len() { Tone::Good } else { Tone::Bad };
        let title = format!("{passed} of {} gates have passed", gates.len());
        Ending::plain(tone, "a folder of gates", title, Vec::new())
    }

    fn going_on(run: &Run) -> Ending {
        let facts =
            vec![("last update", last_update(run)), ("saved", saved(run)), ("ranks", run.signs.places.join("\n"))];
        Ending::plain(Tone::Note, "goes on", "This run goes on: it has no end yet".to_owned(), facts)
    }

    /// A run whose logs name a failure.
    fn failed(run: &Run, first: &Logged) -> Ending {
        let exit = first.exit.or_else(|| run.failures.iter().find_map(|failure| failure.exit));
        let [kind, todo] = exit.map_or(["", "See the cause, and docs/troubleshooting.md."], |code| {
            advice_for(Exit::from_code(code), &first.message)
        });
        let mut further: Vec<&str> = Vec::new();
        for failure in &run.failures {
            let message = failure.message.as_str();
            // Ranks that fail alike say the same.
            if !message.starts_with(&first.message)
                && !is_echo(message)
                && !further.contains(&message)
                && further.len() < FURTHER_MAX
            {
                further.push(message);
            }
        }
        let exit_words =
            exit.map_or("not known: a log of an earlier version".to_owned(), |code| format!("{code}: {kind}"));
        let resume = "Once the cause is gone, longstraw train --resume goes on from what is saved.";
        let cause = shortened(&first.message);
        let facts = vec![
            ("exit", exit_words),
            ("cause", cause.clone()),
            ("also", shortened(&further.join("\n"))),
            ("rank", format!("{}, at {}", whose(run, first), first.time)),
            ("last update", last_update(run)),
            ("saved", saved(run)),
            ("last places of the ranks", run.signs.places.join("\n")),
            ("what to do", if run.newest.is_some() { format!("{todo} {resume}") } else { todo.to_owned() }),
        ];
        let title = format!("This run has failed {}", after(run));
        Ending { exit, cause: Some(cause), ..Ending::plain(Tone::Bad, "failed", title, facts) }
    }

    /// A run without a receipt, a failure or a process that is known to be there.
    fn unknown(run: &Run) -> Ending {
        let is_gone = run.signs.life == Life::Gone;
        let (state, title) = if is_gone {
            ("was interrupted", format!("This run was interrupted {}: it has no end", after(run)))
        } else {
            ("goes on, or was interrupted", "This run has no end yet: it goes on, or was interrupted".to_owned())
        };
        let cause = if is_gone {
            "No rank has logged why. It was killed (by hand, for lack of memory, at the end of a job's time), or its machine \
             stopped. The launcher's output and the kernel's log (dmesg) may say more."
        } else {
            "There is no receipt.json and no failure in logs/, and nothing here tells whether its processes are there."
        };
        let facts = vec![
            ("cause", cause.to_owned()),
            ("last update", last_update(run)),
            ("saved", saved(run)),
            ("last places of the ranks", run.signs.places.join("\n")),
            ("what to do", "Where no process of it is left, longstraw train --resume goes on.".to_owned()),
        ];
        let tone = if is_gone { Tone::Bad } else { Tone::Note };
        Ending::plain(tone, state, title, facts)
    }
}

fn alarm((name, value): (&String, &Option<f64>)) -> String {
    format!("{name} {}", value.map_or_else(|| "not finite".to_owned(), short))
}

/// The limits that may stop the run.
fn limits(run: &Run) -> String {
    let alarms = run.config.get("alarm").and_then(toml::Value::as_table);
    let stops = alarms.into_iter().flatten().filter(|(key, _)| key.ends_with("_stop"));
    stops.map(|(key, value)| format!("alarm.{key} = {value}")).collect::<Vec<_>>().join(", ")
}

/// The failure's rank: the one that its message names, else the one whose log has it, else all of them.
fn whose(run: &Run, first: &Logged) -> String {
    let named = first.message.strip_prefix("rank ").map(|rest| rest.chars().take_while(char::is_ascii_digit).collect());
    let named: Option<String> = named.filter(|digits: &String| !digits.is_empty());
    let alike = run.failures.iter().filter(|failure| failure.message == first.message).count();
    match named {
        Some(rank) => format!("rank {rank}"),
        None if alike > 1 => format!("all alike ({alike} logs)"),
        None => format!("rank {}", first.rank),
    }
}

/// Whether a rank says no more than that another one has failed.
fn is_echo(message: &str) -> bool {
    let of_rank = message.strip_prefix("rank ").and_then(|rest| rest.strip_suffix(" failed"));
    let is_of_rank = of_rank.is_some_and(|rank| rank.bytes().all(|byte| byte.is_ascii_digit()));
    is_of_rank || message.ends_with("(another rank says so)")
}

fn after(run: &Run) -> String {
    run.steps.last().map_or("before its first update".to_owned(), |step| format!("after update {}", step.step))
}

fn last_update(run: &Run) -> String {
    let of = run.config.get("run").and_then(|table| table.get("steps")).and_then(toml::Value::as_integer);
    let of = of.map_or(String::new(), |steps| format!(" of {steps}"));
    run.steps.last().map_or("none".to_owned(), |step| format!("{}{of}", step.step))
}

fn saved(run: &Run) -> String {
    run.newest.clone().unwrap_or_else(|| "no checkpoint".to_owned())
}

fn shortened(text: &str) -> String {
    if text.chars().count() <= CAUSE_CHARS_MAX {
        return text.to_owned();
    }
    text.chars().take(CAUSE_CHARS_MAX).chain("… (logs/ has all of it)".chars()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::step::Step;
    use crate::runtime::units::Rank;

    fn run() -> Run {
        Run {
            steps: vec![Step { step: 7, ..Step::default() }],
            config: "[run]\nsteps = 40\n[alarm]\nkl_warn = 1.0\nkl_stop = 2.0\n".parse().unwrap(),
            ..Run::default()
        }
    }

    fn logged(rank: usize, message: &str, exit: Option<i32>) -> Logged {
        Logged { time: format!("2026-01-01T00:00:0{rank}Z"), rank: Rank(rank), exit, message: message.to_owned() }
    }

    fn fact<'a>(ending: &'a Ending, name: &str) -> &'a str {
        ending.facts.iter().find(|(known, _)| *known == name).map_or("", |(_, text)| text)
    }

    #[test]
    fn a_failure_has_exit_cause_rank_last_update_and_what_to_do() {
        let message = "rank 1, replay, layer 3: out of device memory";
        let failures = vec![logged(1, message, Some(5)), logged(2, "rank 2, score: gone", Some(4))];
        let failed = Ending::of(&Run { failures, newest: Some("checkpoints/step_5".into()), ..run() });
        assert_eq!((failed.tone, failed.state, failed.exit), (Tone::Bad, "failed", Some(5)));
        assert_eq!(failed.cause.as_deref(), Some(message));
        assert_eq!(fact(&failed, "rank"), "rank 1, at 2026-01-01T00:00:01Z");
        assert_eq!((fact(&failed, "also"), fact(&failed, "last update")), ("rank 2, score: gone", "7 of 40"));
        assert_eq!(
            (fact(&failed, "saved"), failed.title.as_str()),
            ("checkpoints/step_5", "This run has failed after update 7")
        );
        assert!(
            fact(&failed, "what to do").contains("longstraw plan") && fact(&failed, "what to do").contains("--resume")
        );
        let echoes = vec![logged(0, "rank 2 failed", Some(6)), logged(2, "rank 2, score: gone", Some(6))];
        let failed = Ending::of(&Run { failures: echoes, ..run() });
        assert_eq!((failed.cause.as_deref(), fact(&failed, "also")), (Some("rank 2, score: gone"), ""));
        let alike = vec![logged(0, "no key", None), logged(1, "no key", None)];
        let failed = Ending::of(&Run { failures: alike, ..Run::default() });
        assert!(fact(&failed, "rank").starts_with("all alike (2 logs)") && fact(&failed, "also").is_empty());
        assert_eq!(failed.title, "This run has failed before its first update");
    }

    #[test]
    fn a_run_that_trained_nothing_has_the_exit_of_its_data_and_drift_names_its_own_limit() {
        let ended = Ending::of(&Run { receipt: Some(Facts::default()), ..run() });
        assert_eq!((ended.exit, ended.state), (Some(3), "ended, not passed"));
        let message =
            "update 3: pages captured 2 updates ago have drifted by 1e-2, more than grpo.reuse_drift_max = 1e-3";
        let failed = Ending::of(&Run { failures: vec![logged(0, message, Some(9))], ..run() });
        assert!(fact(&failed, "what to do").starts_with("The limit is grpo.reuse_drift_max"), "{failed:?}");
        assert_eq!(fact(&failed, "exit"), "9: reused pages have drifted too far");
    }

    #[test]
    fn a_run_without_a_receipt_goes_on_was_interrupted_or_nobody_knows() {
        let state = |life| {
            let mut one = run();
            one.signs.life = life;
            let ending = Ending::of(&one);
            (ending.tone, ending.state)
        };
        assert_eq!(state(Life::Running), (Tone::Note, "goes on"));
        assert_eq!(state(Life::Gone), (Tone::Bad, "was interrupted"));
        assert_eq!(state(Life::Unknown), (Tone::Note, "goes on, or was interrupted"));
    }

    #[test]
    fn an_alarm_that_ended_a_run_is_named_with_its_value_and_limit() {
        let mut one = run();
        one.steps[0].alarms = [("kl".to_owned(), Some(2.5))].into();
        one.receipt = Some(Facts { stopped_by_alarm: true, stopped: true, steps: 7, ..Facts::default() });
        let ending = Ending::of(&one);
        assert_eq!(
            (ending.state, ending.exit, ending.cause.as_deref()),
            ("stopped by an alarm", Some(9), Some("kl 2.5"))
        );
        assert_eq!(fact(&ending, "limits"), "alarm.kl_stop = 2.0");
        one.receipt = Some(Facts { passed: true, steps: 7, ..Facts::default() });
        assert_eq!(Ending::of(&one).tone, Tone::Good);
        let gates = vec![Facts { passed: true, ..Facts::default() }, Facts::default()];
        let of_gates = Ending::of(&Run { gates, ..Run::default() });
        assert_eq!((of_gates.tone, of_gates.title.as_str()), (Tone::Bad, "1 of 2 gates have passed"));
        one.receipt = Some(Facts { gate: Some("gate5_g2".into()), ..Facts::default() });
        assert_eq!((Ending::of(&one).state, Ending::of(&one).exit), ("ended, not passed", Some(8)));
    }

    #[test]
    fn every_exit_code_has_a_kind_and_something_to_do() {
        for code in [0, 2, 3, 4, 5, 6, 7, 8, 9, 70, 75] {
            assert!(advice(Exit::from_code(code)).iter().all(|words| !words.is_empty()), "{code}");
        }
    }
}
