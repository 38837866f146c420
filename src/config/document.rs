//! `docs/configuration.md`, from the comments of the default file and the list of keys.

use std::fmt::Write as _;

use super::environment::OTHER_VARIABLES;
use super::precedence::{DEFAULT_TOML, LAPTOP_TOML};
use super::schema::{self, Kind, Need};
use super::supported::SUPPORTED;

const HEAD: &str = "\
<!-- Made from configs/default.toml and the list of keys; a test fails when it differs. Make it again with
     cargo test --release --test config -- --ignored -->
# Configuration

`longstraw` reads these sources. Later sources override earlier ones:

1. the built-in defaults, `configs/default.toml`;
2. `config.toml` of the working directory, or the file of `--config`; without either, `train` takes the built-in
   laptop run and says so, and every other verb the defaults alone;
3. `settings.json` of the working directory, or the file of `--settings`;
4. for `longstraw gate`, the values of [the gate](gates.md);
5. environment variables `LONGSTRAW_TABLE__KEY`, such as `LONGSTRAW_GRPO__GROUP_SIZE=4`;
6. flags `--set table.key=value`, such as `--set grpo.group_size=4`, and `--run-dir`.

In variables and flags a text needs no quotes, and a list of texts is written with commas
(`--set lora.targets=q_proj,v_proj`). All other values are written as in TOML (`--set 'grpo.gradient={ last = 64 }'`).
Relative paths start at the working directory. A key whose value is a table (`grpo.gradient`, `data.held_out`, `model.rope_scaling`) is
replaced as a whole.

Nothing is ignored: an unknown or misplaced key in any source ends the program with exit code 2, and so does a wrong value.
All problems are listed at once, each with its source and the correct value.

The values of a run are written to `config.resolved.toml` in its folder, which is itself a `config.toml`. All ranks must
have the same values: a digest of them is compared at the start. `run.dir`, `run.share_device`, `run.grace_sec`,
`run.stall_sec` and `run.log_level` may differ between ranks and are no part of the digest.
";

const SETTINGS: &str = "
## settings.json

`settings.json` has the keys of `[endpoint]` without a table, those of `[endpoint.endpoints]` and `[endpoint.usage]` in the
objects `endpoints` and `usage`, and `run.log_level` as `log_level`. config.toml may have the same keys in their tables;
`settings.json` overrides it.

The key of the service comes from the environment variable that `api_key_env` names, and from nowhere else. No log, error or
file shows it.
";

/// One key as the default file describes it.
struct Entry<'a> {
    name: &'a str,
    value: &'a str,
    meaning: String,
}

/// One table as the default file describes it.
struct Section<'a> {
    path: &'a str,
    meaning: String,
    entries: Vec<Entry<'a>>,
}

/// The tables of a commented file: comments belong to the line below them, `#key = value` is a key without default.
fn sections(text: &str) -> Vec<Section<'_>> {
    let mut sections: Vec<Section<'_>> = Vec::new();
    let mut comment: Vec<&str> = Vec::new();
    for line in text.lines() {
        if let Some(prose) = line.strip_prefix("# ") {
            comment.push(prose);
            continue;
        }
        let meaning = std::mem::take(&mut comment).join(" ");
        if let Some(path) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
            sections.push(Section { path, meaning, entries: Vec::new() });
        } else if let Some((name, value)) = line.split_once(" = ")
            && let Some(section) = sections.last_mut()
        {
            section.entries.push(Entry { name: name.trim_start_matches('#'), value, meaning });
        }
    }
    sections
}

/// The text of `docs/configuration.md`.
#[must_use]
pub fn document() -> String {
    let mut text = HEAD.to_owned();
    for section in sections(DEFAULT_TOML) {
        let _ = write!(text, "\n## [{}]\n\n{}\n", section.path, section.meaning);
        if !section.entries.is_empty() {
            text.push_str("\n| key | value | default | meaning |\n|---|---|---|---|\n");
        }
        for entry in section.entries {
            let Some(key) = schema::key_at(&schema::join(section.path, entry.name)) else { continue };
            let default = match key.need {
                Need::Default => format!("`{}`", entry.value),
                Need::Optional | Need::Derived => format!("absent; e.g. `{}`", entry.value),
                Need::Required => format!("none, must be given; e.g. `{}`", entry.value),
            };
            let expects = match key.kind {
                // Their names stand in one document.
                Kind::Reward => "a reward's name, or a list of { name, weight }".to_owned(),
                kind => kind.expects(),
            };
            let meaning = entry.meaning.replace('|', "\\|");
            let _ = writeln!(text, "| `{}` | {expects} | {default} | {meaning} |", entry.name);
        }
    }
    text.push_str(SETTINGS);
    text.push_str("\n## Other variables\n\n| variable | meaning |\n|---|---|\n");
    for (name, meaning) in OTHER_VARIABLES {
        let _ = writeln!(text, "| `{name}` | {meaning} |");
    }
    text.push_str("\nEvery other variable that begins with `LONGSTRAW_` must name a key.\n");
    text.push_str("\n## Accepted later\n\nValues that this build refuses for now:\n\n");
    for row in SUPPORTED {
        let _ = writeln!(text, "- `{}` must be `{}`: this build does not {} yet", row.key, row.be, row.what);
    }
    let _ = write!(text, "\n## The laptop run\n\n```toml\n{LAPTOP_TOML}```\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_default_file_explains_every_key_once_and_no_other() {
        let explained: Vec<(String, bool)> = sections(DEFAULT_TOML)
            .iter()
            .flat_map(|s| s.entries.iter().map(|e| (schema::join(s.path, e.name), e.meaning.is_empty())))
            .collect();
        let known: BTreeSet<String> = schema::keys().map(|(path, _)| path).collect();
        let named: BTreeSet<String> = explained.iter().map(|(path, _)| path.clone()).collect();
        assert_eq!(named, known);
        assert_eq!(explained.len(), known.len(), "a key stands twice");
        assert!(explained.iter().all(|(_, empty)| !empty), "a key without meaning");
        let tables: Vec<&str> = sections(DEFAULT_TOML).iter().map(|s| s.path).collect();
        assert_eq!(tables, schema::TABLES.iter().map(|t| t.path).collect::<Vec<_>>());
        assert!(sections(DEFAULT_TOML).iter().all(|s| !s.meaning.is_empty()));
    }

    #[test]
    fn the_default_file_gives_keys_with_a_default_and_shows_the_others_as_examples() {
        for (path, key) in schema::keys() {
            let (table, name) = path.rsplit_once('.').expect("a key stands in a table");
            let sections = sections(DEFAULT_TOML);
            let section = sections.iter().find(|s| s.path == table).expect("every table is there");
            let value = section.entries.iter().find(|e| e.name == name).expect("every key is there").value;
            let commented = DEFAULT_TOML.contains(&format!("\n#{name} = {value}\n"));
            assert_eq!(commented, key.need != Need::Default, "{path}");
        }
    }
}
