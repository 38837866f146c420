//! One source at a time: read it, compare every key with the list of keys, keep what is right and report what is not.

use std::collections::BTreeMap;
use std::path::Path;

use figment::value::{Dict, Map, Value};
use figment::{Metadata, Profile, Provider};

use super::json;
use super::other_names::{self, OtherDtype};
use super::problem::{Fault, Problem, Source, tame};
use super::schema::{self, Kind};
use crate::runtime::reading;

/// Names in a dotted path, with room for what a table of a model's own holds. A path of many thousands would be a value
/// nested as deep, which no stack holds.
const PATH_NAMES_MAX: usize = 8;
/// The key of the model's number format.
const DTYPE: &str = "model.dtype";
/// A key of `[grpo]` that is still read.
const NORMALIZE_ADV: &str = "normalize_adv";
/// Characters of a text that a message repeats.
const TEXT_CHARS_MAX: usize = 60;

/// The values of one source, without its faulty keys.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) source: Source,
    pub(super) dict: Dict,
}

impl Layer {
    /// Whether this source has a value for the key at a dotted path.
    pub(super) fn gives(&self, path: &str) -> bool {
        find(&self.dict, path).is_some()
    }
}

impl Provider for &Layer {
    fn metadata(&self) -> Metadata {
        Metadata::named(self.source.to_string())
    }

    fn data(&self) -> figment::error::Result<Map<Profile, Dict>> {
        Ok(Profile::Default.collect(self.dict.clone()))
    }
}

/// All sources as they were read, and everything that was wrong with them.
#[derive(Debug, Default)]
pub(super) struct Gathered {
    pub(super) layers: Vec<Layer>,
    pub(super) problems: Vec<Problem>,
    /// Keys and tables that are wrong already, or that an unknown key most likely means, each with the number of its layer.
    /// Their values are not checked further, unless that layer or a later one gives another value.
    pub(super) spoilt: BTreeMap<String, usize>,
    /// A source could not be read at all, so a key that seems to be missing may be in it.
    pub(super) unread: bool,
    /// Keys without a default may be missing.
    pub(super) in_part: bool,
}

impl Gathered {
    /// Adds a compiled-in file.
    pub(super) fn builtin(&mut self, name: &'static str, text: &str) {
        self.toml(Source::Builtin(name), text);
    }

    /// Adds compiled-in values.
    pub(super) fn values(&mut self, name: &'static str, values: Dict) {
        self.walk(Source::Builtin(name), values);
    }

    /// Adds a config.toml.
    pub(super) fn config(&mut self, path: &Path) {
        let source = Source::Config(path.to_owned());
        if let Some(text) = self.read(&source, path) {
            self.toml(source, &text);
        }
    }

    /// Adds a settings.json: its keys are those of `[endpoint]`, but for the log level.
    pub(super) fn settings(&mut self, path: &Path) {
        let source = Source::Settings(path.to_owned());
        let Some(text) = self.read(&source, path) else { return };
        match json::object(&text) {
            Ok(mut keys) => {
                let mut dict = Dict::new();
                if let Some(level) = keys.remove("log_level") {
                    dict.insert("run".to_owned(), Value::from(Dict::from([("log_level".to_owned(), level)])));
                }
                dict.insert("endpoint".to_owned(), Value::from(keys));
                self.walk(source, dict);
            }
            Err(error) => {
                let words = error.to_string();
                let words = words.split(" at line ").next().unwrap_or_default();
                // These words repeat the value, which may be a key by mistake.
                let words =
                    if words.starts_with("invalid type") { "one object { … } is expected here" } else { words };
                self.syntax(&source, error.line(), error.column(), words.to_owned());
            }
        }
    }

    /// Adds `LONGSTRAW_TABLE__KEY` with its value.
    pub(super) fn variable(&mut self, name: &str, text: &str) {
        let path = name.strip_prefix("LONGSTRAW_").unwrap_or(name).to_lowercase().replace("__", ".");
        self.single(Source::Variable(name.to_owned()), &path, text);
    }

    /// Adds the text of one `--set`.
    pub(super) fn flag(&mut self, text: &str) {
        match text.split_once('=') {
            Some((path, value)) if !path.trim().is_empty() => {
                self.single(Source::Flag(path.trim().to_owned()), path.trim(), value);
            }
            _ => {
                let plain: String =
                    text.chars().take_while(|c| c.is_ascii_alphanumeric() || "._".contains(*c)).collect();
                self.problems.push(Problem::new(&Source::Flag(plain.clone()), plain, Fault::FlagForm));
            }
        }
    }

    /// Adds the folder of `--run-dir`.
    pub(super) fn run_dir(&mut self, path: &Path) {
        self.walk(Source::RunDir, nest("run.dir", Value::from(path.to_string_lossy().into_owned())));
    }

    /// Adds the folder that a gate writes into.
    pub(super) fn gate_dir(&mut self, name: &'static str) {
        self.walk(Source::Builtin(name), nest("run.dir", Value::from(format!("runs/gates/{name}"))));
    }

    /// Removes a key from all sources so far.
    pub(super) fn leave_out(&mut self, path: &str) {
        self.layers.iter_mut().for_each(|layer| remove(&mut layer.dict, path));
    }

    fn single(&mut self, source: Source, path: &str, text: &str) {
        let value = value_of(schema::key_at(path).map(|k| k.kind), text.trim());
        if path.split('.').nth(PATH_NAMES_MAX).is_some() {
            self.unknown(&source, "", path, &value);
            return;
        }
        self.walk(source, nest(path, value));
    }

    fn read(&mut self, source: &Source, path: &Path) -> Option<String> {
        match reading::text(path) {
            Ok(text) => Some(text),
            Err(error) => {
                self.unread = true;
                self.problems.push(Problem::new(source, "", Fault::Unreadable { error: error.to_string() }));
                None
            }
        }
    }

    fn toml(&mut self, source: Source, text: &str) {
        match toml::from_str::<Dict>(text) {
            Ok(dict) => self.walk(source, dict),
            Err(error) => {
                let before = text.get(..error.span().map_or(0, |s| s.start)).unwrap_or(text);
                let line = before.matches('\n').count() + 1;
                let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
                self.syntax(&source, line, column, error.message().replace('\n', ", "));
            }
        }
    }

    fn syntax(&mut self, source: &Source, line: usize, column: usize, message: String) {
        self.unread = true;
        self.problems.push(Problem::new(source, "", Fault::Syntax { line, column, message }));
    }

    /// Whether the value of a key is not checked further: see `spoilt`.
    pub(super) fn is_spoilt(&self, path: &str) -> bool {
        let table = path.split('.').next().unwrap_or_default();
        let since = self.spoilt.get(path).max(self.spoilt.get(table));
        since.is_some_and(|layer| !self.layers.iter().skip(*layer).any(|l| l.gives(path)))
    }

    /// Keeps the keys that are right and reports the others. A later source overrides the whole value of a key: a value that
    /// is itself a table is replaced, not merged.
    fn walk(&mut self, source: Source, dict: Dict) {
        let dict = self.table(&source, "", dict);
        let layer = Layer { source, dict };
        for (path, key) in schema::keys() {
            if matches!(key.kind, Kind::Free | Kind::Gradient | Kind::Files | Kind::Judges) && layer.gives(&path) {
                self.layers.iter_mut().for_each(|earlier| remove(&mut earlier.dict, &path));
            }
        }
        self.layers.push(layer);
    }

    fn table(&mut self, source: &Source, table: &str, mut dict: Dict) -> Dict {
        let mut kept = Dict::new();
        if table == "grpo"
            && let Some(value) = dict.remove(NORMALIZE_ADV)
        {
            self.normalize_adv(source, &value, &mut dict);
        }
        for (name, value) in dict {
            let path = schema::join(table, &name);
            if let Some(key) = schema::key_at(&path) {
                let value = if path == DTYPE { self.dtype(source, value) } else { Some(value) };
                let Some(value) = value else { continue };
                if key.kind.accepts(&value) {
                    kept.insert(name, value);
                } else {
                    let fault = Fault::WrongKind { expected: key.kind.expects(), found: shown(&path, &value) };
                    self.fault(source, path, fault);
                }
            } else if schema::is_table(&path) {
                if let Value::Dict(tag, inner) = value {
                    kept.insert(name, Value::Dict(tag, self.table(source, &path, inner)));
                } else {
                    let fault = Fault::WrongKind { expected: "a table".to_owned(), found: shown(&path, &value) };
                    self.fault(source, path, fault);
                }
            } else {
                self.unknown(source, table, &name, &value);
            }
        }
        kept
    }

    /// The earlier name of two values of `grpo.scale_rewards`.
    fn normalize_adv(&mut self, source: &Source, value: &Value, grpo: &mut Dict) {
        let path = schema::join("grpo", NORMALIZE_ADV);
        let scale = match value {
            Value::Bool(_, true) => "group",
            Value::Bool(_, false) => "none",
            // Variables and flags are read by the kind of a key that is listed.
            Value::String(_, text) if text == "true" => "group",
            Value::String(_, text) if text == "false" => "none",
            other => {
                let fault = Fault::WrongKind { expected: Kind::Switch.expects(), found: shown(&path, other) };
                return self.fault(source, path, fault);
            }
        };
        if grpo.insert("scale_rewards".to_owned(), Value::from(scale)).is_some() {
            let why = "grpo.scale_rewards says what advantages are divided by".to_owned();
            self.fault(source, path, Fault::Should { be: "left out".to_owned(), why });
        }
    }

    /// A number format under its name here; `None` for one that is refused.
    fn dtype(&mut self, source: &Source, value: Value) -> Option<Value> {
        match value.as_str().and_then(other_names::dtype) {
            Some(OtherDtype::Is(name)) => Some(Value::from(name)),
            Some(OtherDtype::Refused { be, why }) => {
                let fault = Fault::Should { be: be.to_owned(), why: why.to_owned() };
                self.fault(source, DTYPE.to_owned(), fault);
                None
            }
            None => Some(value),
        }
    }

    fn fault(&mut self, source: &Source, path: String, fault: Fault) {
        self.spoilt.insert(path.clone(), self.layers.len());
        self.problems.push(Problem::new(source, path, fault));
    }

    fn unknown(&mut self, source: &Source, table: &str, name: &str, value: &Value) {
        let homes = schema::homes(name);
        let other = other_names::of(name).filter(|_| homes.is_empty() && !matches!(value, Value::Dict(..)));
        let fault = if let Some((here, note)) = other {
            self.spoilt.extend(here.iter().map(|path| ((*path).to_owned(), self.layers.len())));
            Fault::OtherName { here, note }
        } else if homes.is_empty() {
            let nearest = schema::nearest(table, name);
            self.spoilt.insert(nearest.clone(), self.layers.len());
            if matches!(value, Value::Dict(..)) {
                Fault::UnknownTable { nearest }
            } else {
                Fault::UnknownKey { nearest }
            }
        } else {
            self.spoilt.extend(homes.iter().map(|home| (home.clone(), self.layers.len())));
            Fault::Misplaced { homes }
        };
        self.problems.push(Problem::new(source, schema::join(table, name), fault));
    }
}

/// The value at a dotted path.
fn find<'a>(dict: &'a Dict, path: &str) -> Option<&'a Value> {
    match path.split_once('.') {
        None => dict.get(path),
        Some((table, rest)) => find(dict.get(table)?.as_dict()?, rest),
    }
}

fn remove(dict: &mut Dict, path: &str) {
    match path.split_once('.') {
        None => drop(dict.remove(path)),
        Some((table, rest)) => {
            if let Some(Value::Dict(_, inner)) = dict.get_mut(table) {
                remove(inner, rest);
            }
        }
    }
}

/// A dictionary with one value at a dotted path.
pub(super) fn nest(path: &str, value: Value) -> Dict {
    match path.split_once('.') {
        None => Dict::from([(path.to_owned(), value)]),
        Some((table, rest)) => Dict::from([(table.to_owned(), Value::from(nest(rest, value)))]),
    }
}

/// The value of a variable or a flag: texts need no quotes, and lists of texts may be written with commas.
fn value_of(kind: Option<Kind>, text: &str) -> Value {
    let parsed = || {
        let mut dict = toml::from_str::<Dict>(&format!("value = {text}")).ok().filter(|d| d.len() == 1)?;
        dict.remove("value")
    };
    match kind {
        Some(Kind::Text | Kind::Choice(_)) => match parsed() {
            Some(value @ Value::String(..)) => value,
            _ => Value::from(text),
        },
        Some(Kind::Files) => match parsed() {
            Some(value @ (Value::String(..) | Value::Dict(..))) => value,
            _ => Value::from(text),
        },
        Some(Kind::Texts) if !text.starts_with('[') => {
            Value::from(text.split(',').map(|t| t.trim().to_owned()).collect::<Vec<_>>())
        }
        Some(_) => parsed().unwrap_or_else(|| Value::from(text)),
        None => Value::from(text),
    }
}

/// A value in an error message. A text of `[endpoint]` may be a secret key by mistake and is not shown.
fn shown(path: &str, value: &Value) -> String {
    match value {
        Value::String(_, text) if text.is_empty() => "an empty text".to_owned(),
        Value::String(..) if path.starts_with("endpoint") => "a text that is not shown".to_owned(),
        Value::String(_, text) => format!("\"{}\"", tame(text, TEXT_CHARS_MAX)),
        Value::Char(_, c) => format!("\"{c}\""),
        Value::Bool(_, on) => on.to_string(),
        Value::Num(_, number) => number_shown(*number),
        Value::Empty(..) => "null".to_owned(),
        Value::Dict(..) => "a table".to_owned(),
        Value::Array(_, items) => format!("a list of {}", items.len()),
    }
}

fn number_shown(number: figment::value::Num) -> String {
    match (number.to_f64(), number.to_i128(), number.to_u128()) {
        (Some(n), _, _) => format!("{n:?}"),
        (_, Some(n), _) => n.to_string(),
        (_, _, Some(n)) => n.to_string(),
        _ => "a number".to_owned(),
    }
}
