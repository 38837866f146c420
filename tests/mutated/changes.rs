//! What can happen to a file: a slip of the hand, a bad copy, another idea of the format.

use crate::draw::Draw;

/// Values of every kind, at the edges of what they can be.
pub(crate) const VALUES: [&str; 62] = [
    "0",
    "1",
    "-1",
    "2",
    "3",
    "7",
    "8",
    "16",
    "64",
    "100",
    "1024",
    "65536",
    "2147483647",
    "2147483648",
    "4294967296",
    "9007199254740993",
    "4611686018427387904",
    "9223372036854775806",
    "9223372036854775807",
    "-9223372036854775808",
    "9223372036854775808",
    "18446744073709551615",
    "1e400",
    "1e308",
    "1e-320",
    "-0.0",
    "0.5",
    "1.0",
    "1.5",
    "1e-4",
    "nan",
    "inf",
    "-inf",
    "true",
    "false",
    "\"\"",
    "\"auto\"",
    "\"adamw\"",
    "\"exact\"",
    "\"response\"",
    "\"synthetic\"",
    "\"one\"",
    "\"cosine\"",
    "\"float64\"",
    "\"cpu\"",
    "\"token_mean\"",
    "{ last = 0 }",
    "{ last = 9223372036854775807 }",
    "{ last = 5 }",
    "{}",
    "[]",
    "[0.9, 0.999]",
    "[nan, 0.5]",
    "[[1], [2]]",
    "[\"q_proj\", \"v_proj\"]",
    "{ a = { b = [1, { c = inf }] } }",
    "1979-05-27T07:32:00Z",
    "0x7fffffffffffffff",
    "\"\\u0000\"",
    "\"\u{202e}é漢🦀\u{1b}[2J\"",
    "\"a\\nb\"",
    "",
];

/// The same for JSON.
const JSON_VALUES: [&str; 24] = [
    "0",
    "1",
    "-1",
    "1e400",
    "1e308",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "1000000",
    "0.5",
    "1.0",
    "true",
    "null",
    "\"\"",
    "\"https://example.org/v1\"",
    "\"sk-0451\"",
    "{}",
    "[]",
    "{ \"a\": 1 }",
    "NaN",
    "\"\\u0000\\u001b\"",
    "\"\u{202e}é漢🦀\"",
    "\"error\"",
    "",
];

type Change = fn(&mut Draw, &mut Vec<u8>);

const OF_ANY_TEXT: [Change; 9] = [
    delete_line,
    duplicate_line,
    truncate,
    swap_lines,
    |draw, text| flip_bytes(draw, text),
    insert_unicode,
    scale_number,
    scale_number,
    misspell,
];

/// One change to a config.toml.
pub(crate) fn toml(draw: &mut Draw, text: &mut Vec<u8>) {
    const OF_TOML: [Change; 9] = [
        |draw, text| set_value(draw, text, " = ", &VALUES),
        |draw, text| set_value(draw, text, " = ", &VALUES),
        |draw, text| set_value(draw, text, " = ", &VALUES),
        |draw, text| set_value(draw, text, " = ", &VALUES),
        rename_table,
        nest_table,
        move_header,
        long_name,
        deep,
    ];
    change(draw, text, &OF_TOML);
}

/// One change to a settings.json.
pub(crate) fn json(draw: &mut Draw, text: &mut Vec<u8>) {
    const OF_JSON: [Change; 3] = [
        |draw, text| set_value(draw, text, "\": ", &JSON_VALUES),
        |draw, text| set_value(draw, text, "\": ", &JSON_VALUES),
        |draw, text| set_value(draw, text, "\": ", &JSON_VALUES),
    ];
    change(draw, text, &OF_JSON);
}

fn change(draw: &mut Draw, text: &mut Vec<u8>, own: &[Change]) {
    let change = if draw.percent(55) { *draw.one(own) } else { *draw.one(&OF_ANY_TEXT) };
    change(draw, text);
}

/// Works on whole lines, however many bytes of them are still UTF-8.
fn on_lines(text: &mut Vec<u8>, work: impl FnOnce(&mut Vec<Vec<u8>>)) {
    let mut lines: Vec<Vec<u8>> = text.split(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
    work(&mut lines);
    *text = lines.join(&b'\n');
}

fn delete_line(draw: &mut Draw, text: &mut Vec<u8>) {
    on_lines(text, |lines| drop(lines.remove(draw.below(lines.len()))));
}

fn duplicate_line(draw: &mut Draw, text: &mut Vec<u8>) {
    on_lines(text, |lines| {
        let line = draw.one(lines).clone();
        let at = draw.below(lines.len());
        lines.insert(at, line);
    });
}

fn swap_lines(draw: &mut Draw, text: &mut Vec<u8>) {
    on_lines(text, |lines| {
        let (one, two) = (draw.below(lines.len()), draw.below(lines.len()));
        lines.swap(one, two);
    });
}

fn truncate(draw: &mut Draw, text: &mut Vec<u8>) {
    text.truncate(draw.below(text.len() + 1));
}

fn flip_bytes(draw: &mut Draw, text: &mut [u8]) {
    for _ in 0..*draw.one(&[1, 1, 5]) {
        if !text.is_empty() {
            let at = draw.below(text.len());
            text[at] ^= 1 << draw.below(8);
        }
    }
}

fn insert_unicode(draw: &mut Draw, text: &mut Vec<u8>) {
    let at = draw.below(text.len() + 1);
    let odd = *draw.one(&["\u{feff}", "é", "漢字", "🦀", "\u{202e}", "\u{0}", "\u{1b}[31m", "“", "\u{a0}", "\r"]);
    text.splice(at..at, odd.bytes());
}

/// The lines that have a value behind `sign`, by their place.
fn valued(lines: &[Vec<u8>], sign: &str) -> Vec<usize> {
    let has = |line: &Vec<u8>| String::from_utf8_lossy(line).contains(sign) && !line.starts_with(b"#");
    lines.iter().enumerate().filter(|(_, line)| has(line)).map(|(at, _)| at).collect()
}

fn set_value(draw: &mut Draw, text: &mut Vec<u8>, sign: &str, values: &[&str]) {
    on_lines(text, |lines| {
        let places = valued(lines, sign);
        if places.is_empty() {
            return;
        }
        let at = *draw.one(&places);
        let line = String::from_utf8_lossy(&lines[at]).into_owned();
        let (name, old) = line.split_once(sign).unwrap_or((&line, ""));
        let comma = if old.trim_end().ends_with(',') { "," } else { "" };
        lines[at] = format!("{name}{sign}{}{comma}", draw.one(values)).into_bytes();
    });
}

/// A number nearby, or of another order: what is still meant seriously.
fn scale_number(draw: &mut Draw, text: &mut Vec<u8>) {
    on_lines(text, |lines| {
        let places: Vec<usize> = valued(lines, "").into_iter().filter(|at| number(&lines[*at]).is_some()).collect();
        if places.is_empty() {
            return;
        }
        let at = *draw.one(&places);
        let Some((start, end, n)) = number(&lines[at]) else { return };
        let other = match draw.below(6) {
            0 => n.saturating_add(1),
            1 => n.saturating_sub(1),
            2 => n.saturating_mul(2),
            3 => n / 2,
            4 => n.saturating_mul(1_000_000),
            _ => n.saturating_mul(n),
        };
        lines[at].splice(start..end, other.to_string().bytes());
    });
}

/// The last run of digits in a line: where, and its value.
fn number(line: &[u8]) -> Option<(usize, usize, u64)> {
    let end = line.iter().rposition(u8::is_ascii_digit)? + 1;
    let start = line[..end].iter().rposition(|byte| !byte.is_ascii_digit()).map_or(0, |at| at + 1);
    let value = std::str::from_utf8(&line[start..end]).ok()?.parse().ok()?;
    Some((start, end, value))
}

/// A letter too much, one too few, two in each other's place, one in the other case.
fn misspell(draw: &mut Draw, text: &mut Vec<u8>) {
    on_lines(text, |lines| {
        let places: Vec<usize> = valued(lines, "").into_iter().filter(|at| lines[*at].len() > 2).collect();
        if places.is_empty() {
            return;
        }
        let line = &mut lines[*draw.one(&places)];
        let within = line.iter().position(|byte| *byte == b'=' || *byte == b':').unwrap_or(line.len()).max(2);
        let at = draw.below(within - 1);
        match draw.below(4) {
            0 => drop(line.remove(at)),
            1 => line.insert(at, line[at]),
            2 => line.swap(at, at + 1),
            _ => line[at] = if line[at].is_ascii_lowercase() { line[at] - 32 } else { line[at].to_ascii_lowercase() },
        }
    });
}

fn headers(lines: &[Vec<u8>]) -> Vec<usize> {
    lines.iter().enumerate().filter(|(_, line)| line.starts_with(b"[")).map(|(at, _)| at).collect()
}

fn rename_table(draw: &mut Draw, text: &mut Vec<u8>) {
    on_lines(text, |lines| {
        let places = headers(lines);
        if places.is_empty() {
            return;
        }
        let names = [
            "[optimiser]",
            "[Context]",
            "[context.memory]",
            "[[grpo]]",
            "[]",
            "[\"a b\".c]",
            "[endpoint]",
            "[parallel",
            "[rollout]",
            "[model.rope_scaling]",
            "[run]",
            "[a.b.c.d.e.f]",
        ];
        let at = *draw.one(&places);
        lines[at] = draw.one(&names).as_bytes().to_vec();
    });
}

fn nest_table(draw: &mut Draw, text: &mut Vec<u8>) {
    on_lines(text, |lines| {
        let odd = [
            "[context.deeper]\nprompt_len = 5",
            "context = 5",
            "[model.rope_scaling]\nrope_type = \"yarn\"\nfactor = 4.0",
            "[model.rope_scaling]\nfactor = inf",
            "[model.rope_scaling.inner]\nx = [{ y = nan }]",
            "[gate]\nscale = 3",
            "[gate]\nscale = 9223372036854775807",
            "[lora]\nrank = 9223372036854775807",
            "[lora]\ntargets = [\"q_proj\", \"q_proj\"]",
            "[data]\npath = \"\\u0000\"",
            "\"\" = 1",
            "\"a\\nb\" = 1",
            "[endpoint]\napi_base = \"http://a:b@c\"",
            "[endpoint]\nretry_backoff = 0.5\nmax_retries = 9223372036854775807",
            "[memory]\ninputs_every = 9223372036854775807",
            "grpo.kl_coef = 0.1",
            "[run]\ndevice = \"cpu\"",
        ];
        let at = if draw.percent(70) { lines.len() } else { draw.below(lines.len()) };
        lines.insert(at, draw.one(&odd).as_bytes().to_vec());
    });
}

fn move_header(draw: &mut Draw, text: &mut Vec<u8>) {
    on_lines(text, |lines| {
        let places = headers(lines);
        if !places.is_empty() {
            let header = lines.remove(*draw.one(&places));
            let at = draw.below(lines.len() + 1);
            lines.insert(at, header);
        }
    });
}

fn long_name(draw: &mut Draw, text: &mut Vec<u8>) {
    let name = draw.one(&["x", "漢", "group_size", "lr"]).repeat(*draw.one(&[50, 2000, 20_000]));
    on_lines(text, |lines| lines.insert(draw.below(lines.len() + 1), format!("\"{name}\" = 1").into_bytes()));
}

/// Brackets, tables or dots far deeper than anything that is meant.
fn deep(draw: &mut Draw, text: &mut Vec<u8>) {
    let depth = *draw.one(&[50, 200, 20_000]);
    let odd = match draw.below(4) {
        0 => format!("deep = {}{}", "[".repeat(depth), "]".repeat(depth)),
        1 => format!("deep = {}1{}", "{ a = ".repeat(depth), " }".repeat(depth)),
        2 => format!("{}x = 1", "a.".repeat(depth)),
        _ => format!("[{}x]", "a.".repeat(depth)),
    };
    on_lines(text, |lines| lines.push(odd.into_bytes()));
}
