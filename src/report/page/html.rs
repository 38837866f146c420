//! Pieces of HTML. Whatever comes from outside goes through [`escape`].

use std::fmt::Write as _;

/// Text as it may stand in an element or between quotes of an attribute.
pub(super) fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            // Control characters are no HTML, whichever way they are written.
            letter if letter.is_control() && !matches!(letter, '\n' | '\t') => safe.push('\u{fffd}'),
            letter => safe.push(letter),
        }
    }
    safe
}

/// A whole page; `body` is HTML.
pub(super) fn document(title: &str, body: &str) -> String {
    let title = escape(title);
    let style = include_str!("page.css");
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{title}</title>\n<style>\n{style}</style>\n</head>\n\
         <body>\n<main>\n<h1>{title}</h1>\n{body}</main>\n</body>\n</html>\n"
    )
}

/// Names with values, both text.
pub(super) fn facts(rows: &[(String, String)]) -> String {
    let mut html = String::from("<dl class=\"facts\">\n");
    for (name, value) in rows {
        // Writing to a text cannot fail.
        let _ = writeln!(html, "<div><dt>{}</dt><dd>{}</dd></div>", escape(name), escape(value));
    }
    html + "</dl>\n"
}

/// Lines that want attention, text.
pub(super) fn notes(lines: &[String]) -> String {
    if lines.is_empty() {
        return String::new();
    }
    let mut html = String::from("<ul class=\"notes\">\n");
    for line in lines {
        let _ = writeln!(html, "<li>{}</li>", escape(line));
    }
    html + "</ul>\n"
}

/// A table; heads are text, cells are HTML.
pub(super) fn table(heads: &[&str], rows: &[Vec<String>]) -> String {
    let mut html = String::from("<div class=\"scroll\"><table>\n<thead><tr>");
    for head in heads {
        let _ = write!(html, "<th scope=\"col\">{}</th>", escape(head));
    }
    html += "</tr></thead>\n<tbody>\n";
    for row in rows {
        let _ = writeln!(html, "<tr><td>{}</td></tr>", row.join("</td><td>"));
    }
    html + "</tbody>\n</table></div>\n"
}

/// A section with a heading; nothing where it would be empty.
pub(super) fn section(heading: &str, body: &str) -> String {
    if body.is_empty() {
        return String::new();
    }
    format!("<section>\n<h2>{}</h2>\n{body}</section>\n", escape(heading))
}

/// Figures, two beside one another; nothing where there is none.
pub(super) fn grid(figures: &str) -> String {
    if figures.is_empty() { String::new() } else { format!("<div class=\"grid\">\n{figures}</div>\n") }
}

/// A number with about four digits that matter.
pub(super) fn short(value: f64) -> String {
    let size = value.abs();
    let digits = match size {
        0.0 => return "0".to_owned(),
        _ if !value.is_finite() => return value.to_string(),
        _ if !(1e-3..1e6).contains(&size) => {
            let text = format!("{value:.2e}");
            return text.replace(".00e", "e");
        }
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

/// Seconds as people say them.
pub(super) fn duration(seconds: f64) -> String {
    match seconds {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_from_outside_becomes_markup() {
        assert_eq!(
            escape("<b a='x' c=\"y\">&amp;\u{1b}[0m"),
            "&lt;b a=&#39;x&#39; c=&quot;y&quot;&gt;&amp;amp;\u{fffd}[0m"
        );
        let page = document("<title>", "");
        assert!(page.contains("<title>&lt;title&gt;</title>") && page.contains("<h1>&lt;title&gt;</h1>"));
        assert!(facts(&[("<i>".into(), "<i>".into())]).matches("&lt;i&gt;").count() == 2);
        assert!(notes(&["<i>".into()]).contains("&lt;i&gt;") && section("<i>", "x").contains("&lt;i&gt;"));
    }

    #[test]
    fn numbers_are_as_short_as_they_may_be() {
        let told = [0.0, 1.0, 0.25, 1234.5, -40_000.0, 123.45, 0.000_01, 1.5e7, -2.5, 0.123_456].map(short);
        assert_eq!(told, ["0", "1", "0.25", "1234", "-40,000", "123.5", "1e-5", "1.50e7", "-2.5", "0.1235"]);
        assert_eq!([duration(3.25), duration(600.0), duration(36_000.0)], ["3.25 s", "10.0 min", "10.0 h"]);
        assert_eq!([count(7), count(131_072), count(2_097_152)], ["7", "131,072", "2,097,152"]);
    }
}
