//! One HTML page about one run or several: `longstraw report`. The page is one file that needs no network and no script.
//!
//! `read` reads a run directory (with `facts`, `answers`, `log`, `life`), `ending` and `warnings` say what a reader should know
//! first, `figures`, `alarms` and `several` lay out its plots (`lines`, `boxes`, `dots` over `axes` and `scale`), `view` gathers
//! what one run shows, and the template page.html.jinja writes all of it.

mod alarms;
mod answers;
mod axes;
mod boxes;
mod dots;
mod ending;
mod error;
mod facts;
mod figures;
mod life;
mod lines;
mod log;
mod numbers;
mod plot;
mod read;
mod scale;
mod several;
mod view;
mod warnings;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use minijinja::{Environment, UndefinedBehavior, Value, context};
use serde::Serialize;

pub use error::Error;
use read::Run;
use view::View;

use super::receipt::AlarmSpan;

/// What was written, in short.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Written {
    /// The page's file.
    pub out: PathBuf,
    /// The runs on the page.
    pub runs: Vec<InShort>,
}

/// One run in short.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct InShort {
    /// The run directory.
    pub folder: PathBuf,
    /// Whether the run ended, and how.
    pub state: &'static str,
    /// Exit code, where something tells it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit: Option<i32>,
    /// Why it has failed, or was ended by an alarm.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    pub updates: u64,
    /// Mean reward of the first and of the last tenth of the updates.
    pub rewards: [Option<f64>; 2],
    /// Loss of the last update.
    pub loss: Option<f64>,
    /// Names of its gates, each with whether it has passed.
    pub gates: Vec<(String, bool)>,
    /// Alarms that were raised, by name; empty where there were none.
    pub alarms: BTreeMap<String, AlarmSpan>,
    /// What a reader should not overlook.
    pub notes: Vec<String>,
}

impl Written {
    /// The lines that the command prints.
    #[must_use]
    pub fn text(&self) -> String {
        let mut lines = Vec::new();
        for run in &self.runs {
            let exit = run.exit.map_or(String::new(), |code| format!(" (exit {code})"));
            lines.push(format!("{}: {}{exit}, {} updates", run.folder.display(), run.state, run.updates));
            lines.extend(run.cause.iter().map(|cause| format!("  {cause}")));
            for (gate, passed) in &run.gates {
                lines.push(format!("  {gate}: {}", if *passed { "passed" } else { "not passed" }));
            }
            lines.extend(run.notes.iter().map(|note| format!("  {note}")));
        }
        lines.push(format!("written: {}", self.out.display()));
        lines.join("\n")
    }
}

/// Writes a page about the runs in `folders` to `out`. The default is report.html, in the run directory of a single run,
/// in the current folder for several.
///
/// # Errors
/// When a folder is no run directory or cannot be read, or the page cannot be written.
pub fn write(folders: &[PathBuf], out: Option<&Path>) -> Result<Written, Error> {
    let runs: Vec<Run> = folders.iter().map(|folder| Run::read(folder)).collect::<Result<_, _>>()?;
    let out = match (out, folders) {
        (Some(out), _) => out.to_owned(),
        (None, [folder]) => folder.join("report.html"),
        _ => PathBuf::from("report.html"),
    };
    let names = names(&runs);
    let views: Vec<View<'_>> = runs.iter().zip(&names).map(|(run, name)| View::of(run, name)).collect();
    let page = render(&runs, &views).map_err(io::Error::other);
    let written = page.and_then(|page| fs::write(&out, page));
    written.map_err(|source| Error::Write { file: out.clone(), source })?;
    Ok(Written { out, runs: runs.iter().zip(views).map(|(run, view)| in_short(run, view)).collect() })
}

fn in_short(run: &Run, view: View<'_>) -> InShort {
    InShort {
        folder: run.folder.clone(),
        state: view.ending.state,
        exit: view.ending.exit,
        cause: view.ending.cause,
        updates: view.last.map_or(0, |step| step.step),
        rewards: view.reward_ends,
        loss: view.last.map(|step| step.loss),
        gates: run.gates.iter().map(|gate| (gate.gate.clone().unwrap_or_default(), gate.passed)).collect(),
        alarms: view.alarms,
        notes: view.notes,
    }
}

fn render(runs: &[Run], views: &[View<'_>]) -> Result<String, minijinja::Error> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Chainable);
    environment.set_keep_trailing_newline(true);
    environment.set_formatter(|out, state, value| match value.as_str().filter(|text| text.contains(is_unshowable)) {
        Some(text) => minijinja::escape_formatter(out, state, &Value::from(text.replace(is_unshowable, "\u{fffd}"))),
        None => minijinja::escape_formatter(out, state, value),
    });
    numbers::add_filters(&mut environment);
    environment.add_template("page.html.jinja", include_str!("page.html.jinja"))?;
    let several = views.len() > 1;
    environment.get_template("page.html.jinja")?.render(context! {
        title => if several { "several runs" } else { views.first().map_or("", |view| view.name) },
        style => include_str!("page.css"),
        runs => views,
        members_max => figures::MEMBERS_MAX,
        together => several.then(|| several::curves(runs, views)),
        peaks => several::peaks(views),
        written => chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Secs, true),
        version => env!("CARGO_PKG_VERSION"),
    })
}

/// Whether a letter has no place on a page: a control character is no HTML, not even escaped, and an order that turns the
/// direction of letters would show another text than there is. Letters of any direction stay what they are.
fn is_unshowable(letter: char) -> bool {
    match letter {
        // HTML takes a carriage return for a line end, alone or before one.
        '\n' | '\r' | '\t' => false,
        '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{2028}' | '\u{2029}' => true,
        other => other.is_control(),
    }
}

/// The name of each run: its folder's, or the whole path where two folders have the same name.
fn names(runs: &[Run]) -> Vec<String> {
    let short: Vec<String> = runs.iter().map(Run::name).collect();
    let twice = |name: &String| short.iter().filter(|other| *other == name).count() > 1;
    let name = |(run, name): (&Run, &String)| if twice(name) { run.folder.display().to_string() } else { name.clone() };
    runs.iter().zip(&short).map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{AnswerLine, Seconds, Step};

    /// Writes a run of `steps` updates with every kind of file, and `evil` wherever a text comes from outside.
    fn run(room: &Path, steps: u64, evil: &str) {
        fs::create_dir_all(room.join("gates/gate5_g2")).unwrap();
        let step = |step: u64| Step {
            step,
            gradient: evil.into(),
            reward_mean: Some(0.5),
            reward_std: Some(0.1),
            kl: Some(0.01),
            entropy: Some(1.0),
            sampled_gap: Some(0.2),
            reward_missing: 1,
            reward_failures: [(evil.to_owned(), 1)].into(),
            reward_parts: [(evil.to_owned(), 0.5)].into(),
            ratio: Some([1.0, 1.0]),
            prompts: vec![evil.into()],
            seconds: Seconds { capture: 1.0, total: 1.0, ..Seconds::default() },
            memory: [("capture".to_owned(), [1 << 30, 1 << 20])].into(),
            ..Step::default()
        };
        let lines: String = (1..=steps).map(|at| serde_json::to_string(&step(at)).unwrap() + "\n").collect();
        fs::write(room.join("metrics.jsonl"), lines + "{\"step\": 9").unwrap();
        let answer = AnswerLine {
            step: 1,
            prompt: evil.into(),
            text: evil.into(),
            parts: [(evil.to_owned(), 1.0)].into(),
            failure: Some(evil.into()),
            reward_data: [("expected".to_owned(), evil.into()), ("question".to_owned(), evil.into())]
                .into_iter()
                .collect(),
            ..AnswerLine::default()
        };
        fs::create_dir_all(room.join("logs")).unwrap();
        let start = "2026-01-01T00:00:00.000000Z  INFO longstraw 0.1.0, rank 0 of 1, process 1\n";
        let failure = format!("2026-01-01T00:00:01.000000Z ERROR rank 0, replay, layer 1: {evil} exit=6\n");
        fs::write(room.join("logs/rank_0.log"), start.to_owned() + &failure).unwrap();
        fs::write(room.join("answers.jsonl"), serde_json::to_string(&answer).unwrap() + "\n").unwrap();
        let plain = evil.replace('\u{7}', "");
        fs::write(room.join("config.resolved.toml"), format!("[model]\npath = '{plain}'\n[data]\npath = '{plain}'\n"))
            .unwrap();
        let check = serde_json::json!({"name": evil, "value": evil, "limit": evil, "passed": false, "means": evil});
        let receipt = serde_json::json!({
            "gate": evil, "checks": [check], "not_checked": [evil], "gradient": evil, "device": evil, "finished": evil,
            "peak_device_bytes": [5], "positions": 64, "group_size": 2, "ranks": 1,
            "memory": [{"phase": evil, "device_peak": [5], "host_peak": [5]}]
        });
        fs::write(room.join("gates/gate5_g2/receipt.json"), receipt.to_string()).unwrap();
    }

    #[test]
    fn no_text_of_a_run_becomes_markup_and_the_page_fetches_nothing() {
        let word = "x".repeat(3000);
        let evil =
            &format!("<script>alert(\"1\")</script><img src=x onerror=1>&\u{7}\u{202e}\u{5e9}\u{5dc} \u{1f980} {word}");
        let room = tempfile::tempdir().unwrap();
        for name in ["one", "two"] {
            run(&room.path().join(name), 3, evil);
        }
        let folders = ["one", "two"].map(|name| room.path().join(name));
        let out = room.path().join("page.html");
        for folders in [&folders[..1], &folders[..]] {
            write(folders, Some(&out)).unwrap();
            let page = fs::read_to_string(&out).unwrap();
            assert!(!page.contains("<script") && !page.contains("<img") && !page.contains("\"1\")"), "escaped");
            assert!(
                !page.contains(['\u{7}', '\u{202e}']) && page.contains("&amp;\u{fffd}\u{fffd}"),
                "no control characters"
            );
            assert!(page.contains("\u{5e9}\u{5dc} \u{1f980} xxx"), "letters of any direction stay");
            assert!(page.matches("&lt;script&gt;").count() > 10);
            for outside in ["http:", "https:", "url(", "@import", "<link", "src="] {
                assert!(!page.replace("img src=x", "").contains(outside), "{outside}");
            }
            assert!(page.ends_with("</html>\n"));
        }
    }

    #[test]
    fn a_failure_stands_above_everything_else() {
        let room = tempfile::tempdir().unwrap();
        run(room.path(), 2, "out of numbers");
        let written = write(&[room.path().to_owned()], None).unwrap();
        let page = fs::read_to_string(&written.out).unwrap();
        let at = |words: &str| page.find(words).unwrap_or_else(|| panic!("no {words}"));
        assert!(at("This run has failed after update 2") < at("Warnings") && at("Warnings") < at("Curves"));
        assert!(at("6: a number is not finite") < at("Warnings"));
        let text = written.text();
        assert!(text.contains(": failed (exit 6), 2 updates\n  rank 0, replay, layer 1: out of numbers\n"), "{text}");
        assert_eq!(written.runs[0].exit, Some(6));
    }

    #[test]
    fn a_page_about_ten_thousand_updates_is_bounded_and_says_what_it_leaves_out() {
        let room = tempfile::tempdir().unwrap();
        run(room.path(), 10_000, "plain");
        let written = write(&[room.path().to_owned()], None).unwrap();
        let page = fs::read_to_string(&written.out).unwrap();
        assert!(page.len() < 1 << 20, "{} bytes", page.len());
        for words in
            ["Each point is the mean of up to 42 updates", "the mean of up to 84 updates", "200 of 10,000 updates"]
        {
            assert!(page.contains(words), "{words}");
        }
    }

    #[test]
    fn every_element_that_opens_closes_again_in_order() {
        let room = tempfile::tempdir().unwrap();
        run(room.path(), 5, "plain");
        let written = write(&[room.path().to_owned()], None).unwrap();
        assert_eq!(written.out, room.path().join("report.html"));
        let page = fs::read_to_string(&written.out).unwrap();
        let tag = regex::Regex::new(r"<(/?)([a-z0-9]+)[^>]*?(/?)>").unwrap();
        let mut open: Vec<String> = Vec::new();
        for hit in tag.captures_iter(&page) {
            match (&hit[1], &hit[2], &hit[3]) {
                ("/", name, _) => assert_eq!(open.pop().as_deref(), Some(name)),
                (_, "meta", _) | (_, _, "/") => {}
                (_, name, _) => open.push(name.to_owned()),
            }
        }
        assert!(open.is_empty(), "{open:?}");
        assert!(!page.contains("NaN") && !page.contains("inf\""));
    }

    #[test]
    fn line_ends_of_any_system_are_shown() {
        assert_eq!(['\r', '\n', '\t', '\u{7}', 'a'].map(is_unshowable), [false, false, false, true, false]);
    }

    #[test]
    fn an_unfinished_run_has_a_page_with_notes() {
        let room = tempfile::tempdir().unwrap();
        run(room.path(), 2, "plain");
        let written = write(&[room.path().to_owned()], None).unwrap();
        let notes = written.runs[0].notes.join("\n");
        assert!(
            notes.contains("metrics.jsonl, line 3")
                && notes.contains("answers without a reward, which took no part: 2 (plain: 2)"),
            "{notes}"
        );
        assert!(notes.contains("0.2 nats"), "{notes}");
        assert_eq!((written.runs[0].updates, &written.runs[0].gates[..]), (2, &[("plain".to_owned(), false)][..]));
        let text = written.text();
        assert!(text.contains("plain: not passed") && text.contains("written: "), "{text}");
        let empty = tempfile::tempdir().unwrap();
        fs::write(empty.path().join("metrics.jsonl"), "").unwrap();
        let written = write(&[empty.path().to_owned()], None).unwrap();
        assert!(written.runs[0].notes.iter().any(|note| note.contains("no update yet")));
        assert!(fs::read_to_string(written.out).unwrap().contains("no update yet"));
    }
}
