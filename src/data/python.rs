//! Values as Python prints them: chat templates are written for Python, so their output must look the same.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

/// Levels of nesting that are printed.
const DEPTH_MAX: usize = 64;

/// `str(value)`; an undefined value is empty, as in Jinja.
pub(super) fn display(value: &Value) -> Result<String, Error> {
    match (value.kind(), value.as_str()) {
        (ValueKind::Undefined, _) => Ok(String::new()),
        (_, Some(text)) => Ok(text.to_owned()),
        _ => {
            let mut text = String::new();
            represent(value, DEPTH_MAX, &mut text)?;
            Ok(text)
        }
    }
}

/// `repr(value)` onto `out`.
fn represent(value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
    if depth == 0 {
        return Err(refused("a value is nested too deeply to be printed"));
    }
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&number(value)?),
        ValueKind::String => quoted(value.as_str().unwrap_or_default(), out),
        ValueKind::Seq => {
            out.push('[');
            for (index, item) in value.try_iter()?.enumerate() {
                out.push_str(if index == 0 { "" } else { ", " });
                represent(&item, depth - 1, out)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (index, key) in value.try_iter()?.enumerate() {
                out.push_str(if index == 0 { "" } else { ", " });
                represent(&key, depth - 1, out)?;
                out.push_str(": ");
                represent(&value.get_item(&key)?, depth - 1, out)?;
            }
            out.push('}');
        }
        _ => {
            let _ = write!(out, "{value}");
        }
    }
    Ok(())
}

/// A string in Python's quotes.
fn quoted(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for character in text.chars() {
        match character {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            _ if character == quote => out.extend(['\\', character]),
            _ if character.is_control() => {
                let _ = write!(out, "\\x{:02x}", u32::from(character));
            }
            _ => out.push(character),
        }
    }
    out.push(quote);
}

/// An integer, or a float with the digits that Python gives it.
fn number(value: &Value) -> Result<String, Error> {
    if value.is_integer() { Ok(value.to_string()) } else { f64::try_from(value.clone()).map(float) }
}

/// The shortest digits that identify the float, with an exponent from 1e16 and below 1e-4.
fn float(value: f64) -> String {
    if !value.is_finite() {
        return if value.is_nan() { "nan".into() } else { format!("{value}") };
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        return format!("{value:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// The options of `json.dumps`.
struct Json {
    ascii: bool,
    indent: Option<usize>,
    item_separator: String,
    key_separator: String,
    sorted: bool,
}

/// The filter `tojson` as `transformers` defines it: `json.dumps` with `ensure_ascii=False`.
pub(super) fn to_json(value: &Value, options: &Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let separators = separators.map(<[String; 2]>::try_from).transpose();
    let separators = separators.map_err(|_| refused("tojson: separators must be two strings"))?;
    let default = || [if indent.is_some() { "," } else { ", " }, ": "].map(String::from);
    let [item_separator, key_separator] = separators.unwrap_or_else(default);
    let json = Json {
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        indent,
        item_separator,
        key_separator,
        sorted: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let mut out = String::new();
    json.write(value, 0, &mut out)?;
    Ok(out)
}

impl Json {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if depth >= DEPTH_MAX {
            return Err(refused("tojson: a value is nested too deeply"));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&match number(value)?.as_str() {
                "nan" => "NaN".to_owned(),
                "inf" => "Infinity".to_owned(),
                "-inf" => "-Infinity".to_owned(),
                digits => digits.to_owned(),
            }),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.enclosed(['[', ']'], &items, depth, out, |item, out| self.write(item, depth + 1, out))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sorted {
                    keys.sort();
                }
                self.enclosed(['{', '}'], &keys, depth, out, |key, out| {
                    self.string(&key_text(key)?, out);
                    out.push_str(&self.key_separator);
                    self.write(&value.get_item(key)?, depth + 1, out)
                })?;
            }
            kind => return Err(refused(format!("tojson: {kind} has no JSON form"))),
        }
        Ok(())
    }

    /// Items in brackets, each on its own line if there is an indent.
    fn enclosed(
        &self,
        [open, close]: [char; 2],
        items: &[Value],
        depth: usize,
        out: &mut String,
        mut each: impl FnMut(&Value, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let line = |depth: usize, out: &mut String| {
            if let Some(indent) = self.indent.filter(|_| !items.is_empty()) {
                out.push('\n');
                out.extend(std::iter::repeat_n(' ', indent.saturating_mul(depth).min(4_096)));
            }
        };
        out.push(open);
        for (index, item) in items.iter().enumerate() {
            out.push_str(if index == 0 { "" } else { &self.item_separator });
            line(depth + 1, out);
            each(item, out)?;
        }
        line(depth, out);
        out.push(close);
        Ok(())
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for character in text.chars() {
            match character {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                _ if character < ' ' || (self.ascii && !matches!(character, ' '..='~')) => {
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                _ => out.push(character),
            }
        }
        out.push('"');
    }
}

/// The text of a JSON key.
fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::Number => number(key),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.to_owned()),
        ValueKind::None => Ok("null".to_owned()),
        kind => Err(refused(format!("tojson: {kind} cannot be a key"))),
    }
}

/// Python's methods: those of `minijinja_contrib`, and more that chat templates call.
pub(super) fn method(state: &State, value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        return pycompat::unknown_method_callback(state, value, name, arguments);
    };
    let three = |parts: Option<(&str, &str)>, separator: &str, rest: [&str; 3]| {
        Value::from(
            parts.map_or(rest.map(str::to_owned), |(one, two)| [one, separator, two].map(str::to_owned)).to_vec(),
        )
    };
    match name {
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(arguments)?;
            Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(arguments)?;
            Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        "partition" => {
            let (separator,): (&str,) = from_args(arguments)?;
            Ok(three(text.split_once(separator), separator, [text, "", ""]))
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(arguments)?;
            Ok(three(text.rsplit_once(separator), separator, ["", "", text]))
        }
        "rsplit" => {
            let (separator, most): (&str, Option<i64>) = from_args(arguments)?;
            let most =
                most.and_then(|most| usize::try_from(most).ok()).map_or(usize::MAX, |most| most.saturating_add(1));
            let mut parts: Vec<&str> = text.rsplitn(most, separator).collect();
            parts.reverse();
            Ok(parts.into_iter().map(Value::from).collect())
        }
        _ => pycompat::unknown_method_callback(state, value, name, arguments),
    }
}

fn refused(reason: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn value_of(json: serde_json::Value) -> Value {
        Value::from_serialize(json)
    }

    #[test]
    fn values_print_as_pythons_str_does() {
        let value =
            value_of(json!({"a": [1, 2.0, 1e-5, 1e16, 123_456_789.25, true, null], "b'": "it's\n\"x\"", "c": "it's"}));
        assert_eq!(
            display(&value).unwrap(),
            r#"{'a': [1, 2.0, 1e-05, 1e+16, 123456789.25, True, None], "b'": 'it\'s\n"x"', 'c': "it's"}"#
        );
        assert_eq!(display(&value_of(json!("plain\n"))).unwrap(), "plain\n");
        assert_eq!(display(&Value::UNDEFINED).unwrap(), "");
        assert_eq!(display(&value_of(json!(false))).unwrap(), "False");
    }

    #[test]
    fn json_is_written_as_json_dumps_does() {
        let value = value_of(json!({"z": [1, {"ü": "<\u{1}\u{7f}😀\">"}], "a": {}, "e": [], "f": 0.1}));
        let written = |options: &[(&str, Value)]| {
            to_json(&value, &options.iter().map(|(name, value)| (*name, value.clone())).collect()).unwrap()
        };
        assert_eq!(written(&[]), "{\"z\": [1, {\"ü\": \"<\\u0001\u{7f}😀\\\">\"}], \"a\": {}, \"e\": [], \"f\": 0.1}");
        assert_eq!(
            written(&[
                ("ensure_ascii", true.into()),
                ("sort_keys", true.into()),
                ("separators", vec![",".to_owned(), ":".to_owned()].into()),
            ]),
            r#"{"a":{},"e":[],"f":0.1,"z":[1,{"\u00fc":"<\u0001\u007f\ud83d\ude00\">"}]}"#
        );
        assert_eq!(
            written(&[("indent", 2.into())]),
            "{\n  \"z\": [\n    1,\n    {\n      \"ü\": \"<\\u0001\u{7f}😀\\\">\"\n    }\n  ],\n  \"a\": {},\n  \
             \"e\": [],\n  \"f\": 0.1\n}"
        );
        assert!(to_json(&Value::UNDEFINED, &std::iter::empty::<(&str, Value)>().collect()).is_err());
    }
}
