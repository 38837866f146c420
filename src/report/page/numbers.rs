//! Numbers as the page writes them. Each is a filter of the template too; "–" stands where there is no number.

use crate::runtime::units::Bytes;

const NONE: &str = "–";

/// About four significant digits.
pub(super) fn short(value: f64) -> String {
    let size = value.abs();
    let digits = match size {
        0.0 => return "0".to_owned(),
        _ if !value.is_finite() => return "not finite".to_owned(),
        _ if !(1e-3..1e6).contains(&size) => return format!("{value:.2e}").replace(".00e", "e"),
        10_000.0.. => return in_threes(&format!("{value:.0}")),
        1000.0.. => 0,
        100.0.. => 1,
        10.0.. => 2,
        1.0.. => 3,
        _ => 4,
    };
    let text = format!("{value:.digits$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    text.to_owned()
}

/// Seconds in the unit that people would choose.
fn duration(seconds: f64) -> String {
    match seconds {
        ..=0.0 => NONE.to_owned(),
        ..120.0 => format!("{} s", short(seconds)),
        ..7200.0 => format!("{:.1} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3600.0),
    }
}

/// A count with its digits in threes.
pub(super) fn count(value: u64) -> String {
    in_threes(&value.to_string())
}

fn in_threes(number: &str) -> String {
    let (sign, digits) = number.strip_prefix('-').map_or(("", number), |digits| ("-", digits));
    let mut text = sign.to_owned();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Gives the template these functions as filters. Counts and bytes of zero are facts that a receipt lacks.
pub(super) fn add_filters(environment: &mut minijinja::Environment<'_>) {
    let known = |value: Option<u64>| value.filter(|&value| value > 0);
    environment.add_filter("short", |value: Option<f64>| value.map_or(NONE.to_owned(), short));
    environment.add_filter("duration", |value: Option<f64>| duration(value.unwrap_or(0.0)));
    environment.add_filter("count", move |value: Option<u64>| known(value).map_or(NONE.to_owned(), count));
    environment.add_filter("bytes", move |value: Option<u64>| {
        known(value).map_or(NONE.to_owned(), |bytes| Bytes(bytes).to_string())
    });
    environment.add_filter("percent", |share: f64| format!("{:.0} %", 100.0 * share));
    environment.add_filter("px", |place: f64| format!("{place:.1}"));
    environment.add_filter("part", |share: f64| format!("{share:.2}%"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_as_short_as_they_may_be() {
        let texts = [0.0, 1.0, 0.25, 1234.5, -40_000.0, 123.45, 0.000_01, 1.5e7, -2.5, 0.123_456].map(short);
        assert_eq!(texts, ["0", "1", "0.25", "1234", "-40,000", "123.5", "1e-5", "1.50e7", "-2.5", "0.1235"]);
        assert_eq!([0.0, 3.25, 600.0, 36_000.0].map(duration), ["–", "3.25 s", "10.0 min", "10.0 h"]);
        assert_eq!([7, 131_072, 2_097_152].map(count), ["7", "131,072", "2,097,152"]);
    }
}
