//! One page of HTML about one run or several: `longstraw report`. It needs nothing but itself: no network, no script.

mod axes;
mod html;
mod plot;
mod read;
mod several;
mod single;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::runtime::failure::{Classified, Exit};
use html::{document, escape, section};
use read::Run;

/// Why there is no page.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A folder that no run has written.
    #[error(
        "{} is no run directory: it has no metrics.jsonl, receipt.json, config.resolved.toml or logs, and no gate's \
         receipt; name the folder that run.dir (--run-dir) named, or one of gates, such as runs/gates",
        folder.display()
    )]
    NoRun {
        /// The folder.
        folder: PathBuf,
    },
    /// A file of the run directory.
    #[error("cannot read {}: {source}", file.display())]
    Read {
        /// Which.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The page.
    #[error("cannot write {}: {source}; choose another place with --out", file.display())]
    Write {
        /// Where.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        Exit::Data
    }
}

/// What was written, and what it says in short.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Written {
    /// The page.
    pub out: PathBuf,
    /// The runs on it.
    pub runs: Vec<InShort>,
}

/// One run in short.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct InShort {
    /// Its directory.
    pub folder: PathBuf,
    /// What became of it, in words.
    pub state: &'static str,
    /// Updates made.
    pub updates: u64,
    /// Mean reward of the first and of the last tenth of the updates.
    pub rewards: [Option<f64>; 2],
    /// Loss of the last update.
    pub loss: Option<f64>,
    /// Its gates, with whether each has passed.
    pub gates: Vec<(String, bool)>,
    /// What a reader should not overlook.
    pub notes: Vec<String>,
}

impl Written {
    /// In words.
    #[must_use]
    pub fn text(&self) -> String {
        let mut lines = Vec::new();
        for run in &self.runs {
            lines.push(format!("{}: {}, {} updates", run.folder.display(), run.state, run.updates));
            lines.extend(
                run.gates
                    .iter()
                    .map(|(gate, passed)| format!("  {gate}: {}", if *passed { "passed" } else { "not passed" })),
            );
            lines.extend(run.notes.iter().map(|note| format!("  {note}")));
        }
        lines.push(format!("written: {}", self.out.display()));
        lines.join("\n")
    }
}

/// Writes a page about the runs in `folders` to `out`; without a place, into the run's own directory, or for several runs
/// as report.html here.
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
    let page = page(&runs);
    fs::write(&out, page).map_err(|source| Error::Write { file: out.clone(), source })?;
    let in_short = |run: &Run| InShort {
        folder: run.folder.clone(),
        state: single::state(run),
        updates: run.steps.last().map_or(0, |step| step.step),
        rewards: single::reward_ends(&run.steps),
        loss: run.steps.last().map(|step| step.loss),
        gates: run.gates.iter().map(|gate| (gate.gate.clone().unwrap_or_default(), gate.passed)).collect(),
        notes: run.notes.iter().cloned().chain(single::warnings(run)).collect(),
    };
    Ok(Written { out, runs: runs.iter().map(in_short).collect() })
}

fn page(runs: &[Run]) -> String {
    let names = names(runs);
    let together = several::sections(runs, &names);
    let [run] = runs else {
        let each: String = runs
            .iter()
            .zip(&names)
            .map(|(run, name)| section(&format!("Run {name}"), &nested(&single::sections(run))))
            .collect();
        return document("longstraw: several runs", &(together + &each + &footer()));
    };
    document(&format!("longstraw: {}", run.name()), &(single::sections(run) + &together + &footer()))
}

/// Headings of a run among several stand one level lower.
fn nested(html: &str) -> String {
    html.replace("<h3>", "<h4>").replace("</h3>", "</h4>").replace("<h2>", "<h3>").replace("</h2>", "</h3>")
}

fn footer() -> String {
    let version = env!("CARGO_PKG_VERSION");
    let now = chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Secs, true);
    format!("<footer>written {} by longstraw {}</footer>\n", escape(&now), escape(version))
}

/// A name for each run: its folder's, or the whole path where two would have the same.
fn names(runs: &[Run]) -> Vec<String> {
    let short: Vec<String> = runs.iter().map(Run::name).collect();
    let twice = |name: &String| short.iter().filter(|other| *other == name).count() > 1;
    runs.iter()
        .zip(&short)
        .map(|(run, name)| if twice(name) { run.folder.display().to_string() } else { name.clone() })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{AnswerLine, Seconds, Step};

    /// A run of `steps` updates with everything in it, and a text in every place that others write.
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
            ..AnswerLine::default()
        };
        fs::write(room.join("answers.jsonl"), serde_json::to_string(&answer).unwrap() + "\n").unwrap();
        fs::write(room.join("config.resolved.toml"), format!("[model]\npath = '{evil}'\n[data]\npath = '{evil}'\n"))
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
    fn no_text_from_a_run_is_markup_on_the_page_and_nothing_is_fetched() {
        let evil = "<script>alert(\"1\")</script><img src=x onerror=1>&";
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
            assert!(page.matches("&lt;script&gt;").count() > 10);
            for outside in ["http:", "https:", "url(", "@import", "<link", "src="] {
                assert!(!page.replace("img src=x", "").contains(outside), "{outside}");
            }
            assert!(page.ends_with("</html>\n"));
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
    fn an_unfinished_run_has_a_page_with_notes() {
        let room = tempfile::tempdir().unwrap();
        run(room.path(), 2, "plain");
        let told = write(&[room.path().to_owned()], None).unwrap();
        let notes = told.runs[0].notes.join("\n");
        assert!(
            notes.contains("metrics.jsonl, line 3")
                && notes.contains("answers without a reward, which took no part: 2 (plain: 2)"),
            "{notes}"
        );
        assert!(notes.contains("0.2 nats"), "{notes}");
        assert_eq!((told.runs[0].updates, &told.runs[0].gates[..]), (2, &[("plain".to_owned(), false)][..]));
        let text = told.text();
        assert!(text.contains("plain: not passed") && text.contains("written: "), "{text}");
        let empty = tempfile::tempdir().unwrap();
        fs::write(empty.path().join("metrics.jsonl"), "").unwrap();
        let told = write(&[empty.path().to_owned()], None).unwrap();
        assert!(told.runs[0].notes.iter().any(|note| note.contains("no update yet")));
        assert!(fs::read_to_string(told.out).unwrap().contains("no update yet"));
    }
}
