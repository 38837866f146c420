//! What can be wrong with a configuration, and in which source.

use std::fmt;
use std::path::PathBuf;

use crate::runtime::failure::{Classified, Exit};

/// Where values come from, in order: later sources override earlier ones.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum Source {
    /// A file that is compiled in.
    Builtin(&'static str),
    /// The file of `--config`, or ./config.toml.
    Config(PathBuf),
    /// A settings.json, whose keys are those of `[endpoint]`.
    Settings(PathBuf),
    /// An environment variable `LONGSTRAW_TABLE__KEY`.
    Variable(String),
    /// `--set table.key=value`; the key alone is kept.
    Flag(String),
    /// The flag `--run-dir`.
    RunDir,
}

impl Source {
    /// A key's dotted path as this source spells it.
    #[must_use]
    pub fn spell(&self, path: &str) -> String {
        match self {
            Source::Settings(_) => match path {
                "run.log_level" => "log_level".to_owned(),
                other => other.strip_prefix("endpoint.").unwrap_or(other).to_owned(),
            },
            Source::Variable(_) => variable_of(path),
            _ => path.to_owned(),
        }
    }

    /// The place where a key belongs, in words.
    fn home(&self, path: &str) -> String {
        let spelt = self.spell(path);
        match (self, path.rsplit_once('.')) {
            (Source::Variable(_), _) => format!("is spelt {spelt}"),
            (Source::Flag(_) | Source::RunDir, _) => format!("is spelt --set {spelt}=VALUE"),
            (Source::Settings(_), None) if path == "endpoint" => "is left out here: its keys need no table".to_owned(),
            (Source::Settings(_), None) => format!("belongs into config.toml, as [{path}]"),
            (Source::Settings(_), Some(_)) if spelt != path => match spelt.rsplit_once('.') {
                Some((table, _)) => format!("belongs under \"{table}\""),
                None => "belongs to the top level".to_owned(),
            },
            (Source::Settings(_), Some((table, _))) => format!("belongs under [{table}] of config.toml"),
            (_, None) => format!("is a table at the top level, [{path}]"),
            (_, Some((table, _))) if table.starts_with("endpoint") => {
                format!("belongs into settings.json or under [{table}]")
            }
            (_, Some((table, _))) => format!("belongs under [{table}]"),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Builtin(name) => write!(f, "built-in {name}"),
            Source::Config(path) | Source::Settings(path) => write!(f, "{}", path.display()),
            Source::Variable(_) => f.write_str("environment"),
            Source::Flag(_) => f.write_str("--set"),
            Source::RunDir => f.write_str("--run-dir"),
        }
    }
}

/// The environment variable of a key's dotted path.
#[must_use]
pub fn variable_of(path: &str) -> String {
    format!("LONGSTRAW_{}", path.replace('.', "__").to_uppercase())
}

/// What is wrong with one key or one source.
#[expect(missing_docs, reason = "the fields are parts of the message, which says what they are")]
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// No such key; the dotted path of the most similar one.
    UnknownKey { nearest: String },
    /// No such key, but one of this name in other trainers.
    OtherName {
        /// Dotted paths of the keys that do the same here; none where nothing does.
        here: &'static [&'static str],
        /// What differs; may be empty.
        note: &'static str,
    },
    /// No such table.
    UnknownTable { nearest: String },
    /// The key exists, but in other tables.
    Misplaced {
        /// Dotted paths at which it exists.
        homes: Vec<String>,
    },
    /// A value of the wrong kind.
    WrongKind {
        expected: String,
        /// Hidden where it may be a secret.
        found: String,
    },
    /// A key without a default that no source gives.
    Missing,
    /// A value that a rule refuses.
    Should { be: String, why: String },
    /// A file that cannot be read.
    Unreadable { error: String },
    /// A file that is not TOML or JSON.
    Syntax {
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// The parser's words, without the text of the line.
        message: String,
    },
    /// `--set` without a key or an equals sign.
    FlagForm,
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    /// The key's dotted path; empty where a whole source is meant.
    pub key: String,
    /// The source that gave the value, where one is known.
    pub source: Option<Source>,
    /// What is wrong.
    pub fault: Fault,
    /// Further keys that the rule reads.
    pub(super) with: Vec<&'static str>,
}

impl Problem {
    /// A problem of `key` as `source` gives it.
    pub(super) fn new(source: &Source, key: impl Into<String>, fault: Fault) -> Self {
        Problem { key: key.into(), source: Some(source.clone()), fault, with: Vec::new() }
    }
}

/// Characters of a name that a message repeats; no key of ours is nearly as long.
const NAME_CHARS_MAX: usize = 80;
/// The same of a parser's words, which repeat names too.
const WORDS_CHARS_MAX: usize = 300;

/// Text from outside as a message may repeat it: on one line, of bounded length, and with control characters escaped.
pub(super) fn tame(words: &str, chars_max: usize) -> String {
    let mut tamed = String::new();
    for (count, c) in words.chars().enumerate() {
        match c {
            _ if count == chars_max => {
                tamed.push('…');
                break;
            }
            '"' | '\'' | '\\' => tamed.push(c),
            _ => tamed.extend(c.escape_debug()),
        }
    }
    tamed
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spell = |path: &str| self.source.as_ref().map_or_else(|| path.to_owned(), |s| s.spell(path));
        let key = match spell(&self.key).as_str() {
            "" => "\"\"".to_owned(),
            key => tame(key, NAME_CHARS_MAX),
        };
        if let Some(source) = &self.source {
            write!(f, "{source}: ")?;
        }
        match &self.fault {
            Fault::UnknownKey { nearest } => {
                write!(f, "unknown key {key}; the nearest known one is {}", spell(nearest))
            }
            Fault::OtherName { here, note } => {
                let here: Vec<String> = here.iter().map(|path| spell(path)).collect();
                write!(f, "unknown key {key}; here it is {}", here.join(" and "))?;
                if note.is_empty() { Ok(()) } else { write!(f, " ({note})") }
            }
            Fault::UnknownTable { nearest } => {
                write!(f, "unknown table {key}; the nearest known name is {}", spell(nearest))
            }
            Fault::Misplaced { homes } => {
                let home = |h: &String| self.source.as_ref().map_or_else(|| h.clone(), |s| s.home(h));
                let homes: Vec<String> = homes.iter().map(home).collect();
                write!(f, "{key} is in the wrong place: it {}", homes.join(", or "))
            }
            Fault::WrongKind { expected, found } => write!(f, "{key} should be {expected}, not {found}"),
            Fault::Missing => write!(
                f,
                "{key} is missing and has no default: set it in config.toml, with --set {key}=VALUE or as {}",
                variable_of(&key)
            ),
            Fault::Should { be, why } => write!(f, "{key} should be {be}: {why}"),
            Fault::Unreadable { error } => write!(f, "cannot be read: {error}"),
            Fault::Syntax { line, column, message } => {
                write!(f, "line {line}, column {column}: {}", tame(message, WORDS_CHARS_MAX))
            }
            Fault::FlagForm => write!(f, "{key} is no table.key=value"),
        }
    }
}

/// What ends a run before it starts.
#[expect(missing_docs, reason = "the fields are parts of the message, which says what they are")]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// One or more problems, all of them.
    #[error("{}", listed(.problems))]
    Refused { problems: Vec<Problem> },
    /// A key that this verb needs and that no source gives.
    #[error("{key} is not set: {how}")]
    Unset { key: &'static str, how: &'static str },
    /// No configuration is there, and the model of the built-in run is not there either.
    #[error(
        "there is no ./config.toml, so this is the built-in laptop run, and its model is not at {}: start where `make \
         run` has put it, or name what you have with --config FILE or --set model.path=FOLDER",
        path.display()
    )]
    NoLaptopModel { path: PathBuf },
    /// The environment variable that should hold the endpoint's key is empty or absent.
    #[error(
        "the environment variable {variable} (named by api_key_env) is not set: it holds the endpoint's key; \
         export it in the shell or the job that starts longstraw, never in a file"
    )]
    NoApiKey { variable: String },
    /// The endpoint's key holds characters that no request header takes; the key is not shown.
    #[error("the key in {variable} holds a blank, a line break or a character outside ASCII: set it anew")]
    BadApiKey { variable: String },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        match self {
            // What has to do with the key ends like every other fault of the service.
            Error::NoApiKey { .. } | Error::BadApiKey { .. } => Exit::Endpoint,
            _ => Exit::Config,
        }
    }
}

/// One problem in a line, several as a numbered list.
fn listed(problems: &[Problem]) -> String {
    match problems {
        [one] => format!("configuration refused: {one}{}", settings_hint(problems)),
        many => {
            let lines: Vec<String> = many.iter().enumerate().map(|(i, p)| format!("  {}. {p}", i + 1)).collect();
            format!("configuration refused, {} problems:\n{}{}", many.len(), lines.join("\n"), settings_hint(problems))
        }
    }
}

/// What helps where a settings file has values that do not fit the configuration: it may be another service's.
fn settings_hint(problems: &[Problem]) -> String {
    let of_settings = problems.iter().find_map(|problem| match (&problem.source, &problem.fault) {
        (Some(Source::Settings(file)), Fault::Should { .. }) => Some(file),
        _ => None,
    });
    of_settings.map_or_else(String::new, |file| {
        format!(
            "\n{} overrides config.toml; a settings file of {{}} leaves the service to config.toml (--settings FILE)",
            file.display()
        )
    })
}
