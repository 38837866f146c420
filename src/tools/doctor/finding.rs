//! Findings: one line each.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::runtime::failure::{Exit, Failure};

/// How serious a finding is.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Nothing to do.
    Ok,
    /// A run would work, but slower than it could, or not in every case.
    Warn,
    /// A run would fail.
    Fail,
}

/// The result of one check.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Finding {
    /// What was checked.
    pub name: String,
    /// How serious it is.
    pub verdict: Verdict,
    /// What was found, on one line.
    pub detail: String,
    /// What to do; empty where there is nothing to do, or where `detail` says it.
    pub fix: String,
    /// Exit code of a run that fails in this way; 0 for no failure.
    pub exit: i32,
}

impl Finding {
    fn new(name: &str, verdict: Verdict, exit: Exit, detail: impl Into<String>, fix: &str) -> Finding {
        Finding { name: name.into(), verdict, detail: on_one_line(&detail.into()), fix: fix.into(), exit: exit.code() }
    }

    pub(super) fn ok(name: &str, detail: impl Into<String>) -> Finding {
        Finding::new(name, Verdict::Ok, Exit::Done, detail, "")
    }

    pub(super) fn warn(name: &str, detail: impl Into<String>, fix: &str) -> Finding {
        Finding::new(name, Verdict::Warn, Exit::Done, detail, fix)
    }

    /// A run would end with `exit`.
    pub(super) fn fail(name: &str, exit: Exit, detail: impl Into<String>, fix: &str) -> Finding {
        Finding::new(name, Verdict::Fail, exit, detail, fix)
    }

    /// A failure of a run, whose message says what to do.
    pub(super) fn failed(name: &str, failure: &Failure) -> Finding {
        Finding::fail(name, failure.exit(), failure.to_string(), "")
    }

    pub(super) fn exit(&self) -> Exit {
        Exit::from_code(self.exit)
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding { name, detail, fix, .. } = self;
        let verdict = match self.verdict {
            Verdict::Ok => "ok",
            Verdict::Warn => "warn",
            Verdict::Fail => "FAIL",
        };
        write!(f, "{verdict:<4}  {name:<14}  {detail}")?;
        if fix.is_empty() { Ok(()) } else { write!(f, ": {fix}") }
    }
}

/// A refusal may be a list of lines.
fn on_one_line(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_one_line_with_its_fix() {
        assert_eq!(Finding::ok("mpi", "Open MPI v4.1.4").to_string(), "ok    mpi             Open MPI v4.1.4");
        let list = Finding::fail("configuration", Exit::Config, "2 problems:\n  1. a\n  2. b", "");
        assert_eq!(list.to_string(), "FAIL  configuration   2 problems: 1. a 2. b");
        assert_eq!(Finding::warn("cores", "few", "take more").to_string(), "warn  cores           few: take more");
        assert_eq!((list.exit(), Verdict::Fail > Verdict::Warn), (Exit::Config, true));
    }
}
