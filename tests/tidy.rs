//! The project's own rules, on the project's own files. Rules that clippy knows are in clippy.toml and Cargo.toml.
//!
//! Each rule is a function from sources to faults (`file:line: what and what to do`). It runs twice: over the tree,
//! where it must find nothing, and over a planted fault, where it must find exactly that, so that a rule that no longer
//! works is noticed.

#[path = "tidy/circles.rs"]
mod circles;
#[path = "tidy/comments.rs"]
mod comments;
#[path = "tidy/documents.rs"]
mod documents;
#[path = "tidy/imports.rs"]
mod imports;
#[path = "tidy/paths.rs"]
mod paths;
#[path = "tidy/size.rs"]
mod size;
#[path = "tidy/source.rs"]
mod source;
#[path = "tidy/templates.rs"]
mod templates;
#[path = "tidy/terminal.rs"]
mod terminal;

use source::{Source, rust_sources, text_sources};

/// Fails with every fault on a line of its own.
fn assert_tidy(faults: &[String]) {
    assert!(faults.is_empty(), "\n{}\n", faults.join("\n"));
}

/// The rule finds exactly one fault in `text`, with these words in its message.
fn assert_bites(rule: fn(&[Source]) -> Vec<String>, path: &str, text: &str, words: &str) {
    let faults = rule(&[Source::new(path, text)]);
    assert!(faults.len() == 1 && faults[0].contains(words), "expected one fault with {words:?}, found {faults:#?}");
}

/// The rule lets `text` pass.
fn assert_passes(rule: fn(&[Source]) -> Vec<String>, path: &str, text: &str) {
    assert_eq!(rule(&[Source::new(path, text)]), Vec::<String>::new());
}

#[test]
fn a_module_imports_only_from_rows_above_it() {
    assert_tidy(&imports::faults(&rust_sources()));
}

#[test]
fn an_import_from_a_row_below_is_found() {
    let bites = |path, text, words| assert_bites(imports::faults, path, text, words);
    bites(
        "src/prompt/layout/mod.rs",
        "//! x\nuse crate::model::Spec;\n",
        "src/prompt/layout/mod.rs:2: `prompt::layout` (row 3) imports `model`",
    );
    bites(
        "src/prompt/pages.rs",
        "fn f() -> crate::prompt::handoff::PlacedGroup { g() }\n",
        "pages.rs:1: `prompt::pages` (row 3)",
    );
    bites(
        "src/prompt/pages.rs",
        "use crate::{\n    runtime::units::Bytes,\n    train::{self, Step},\n};\n",
        "src/prompt/pages.rs:3: `prompt::pages`",
    );
    bites("src/model/rope.rs", "use super::super::step::capture::Captured;\n", "imports `step::capture` (row 5)");
    bites("src/config.rs", "use super::tensor;\n", "`config` (row 1) imports `tensor` (row 2)");
    bites("src/runtime/units.rs", "use super::failure::Exit;\n", "`runtime::units` (row 0) imports `runtime::failure`");
    bites("src/tools/parity.rs", "use crate::tools::{convert, gate};\n", "imports `tools::gate` (row 8)");
    bites("src/model/mod.rs", "use crate::hepler::x;\n", "`hepler` is in no row");
    bites("src/hepler/mod.rs", "//! x\n", "`hepler` is in no row");
    bites("src/world/axis.rs", "use anyhow::Context as _;\n", "`anyhow` in the library");
    bites("src/world/axis.rs", "fn f() { matches!(x, crate::model::Spec) }\n", "imports `model` (row 4)");
}

#[test]
fn a_phase_that_imports_a_phase_is_found() {
    assert_bites(
        imports::faults,
        "src/step/replay/mod.rs",
        "use crate::step::capture::Captured;\n",
        "phases never import each other",
    );
}

#[test]
fn an_import_from_a_row_above_passes() {
    let text = "use crate::{prompt::pages::Pool, model::{self, block}};\nuse super::rope;\nuse crate::model::head;\n\
                // crate::train in a comment\nconst S: &str = \"crate::train\";\n";
    assert_passes(
        imports::faults,
        "src/step/capture/mod.rs",
        "use crate::model::block;\nuse super::super::prompt::pages;\n",
    );
    assert_passes(imports::faults, "src/model/attention.rs", text);
    assert_passes(imports::faults, "src/main.rs", "use longstraw::train;\nuse crate::report;\n");
    assert_passes(
        imports::faults,
        "src/prompt/pages.rs",
        "fn f() {}\n#[cfg(test)]\nmod tests {\n    use crate::model::Spec;\n}\n",
    );
}

#[test]
fn no_file_imports_what_imports_it() {
    assert_tidy(&circles::faults(&rust_sources()));
}

#[test]
fn a_circle_of_imports_is_found() {
    let faults = |parent: &str, child: &str| {
        let sources = [Source::new("src/world/mod.rs", parent), Source::new("src/world/axis.rs", child)];
        circles::faults(&sources)
    };
    let child = "use super::Place;\n";
    let found = faults("mod axis;\nuse axis::Axis;\n", child);
    assert_eq!(found, ["src/world/axis.rs:1: imports itself through world/mod: move what they share below"]);
    assert_eq!(faults("mod axis;\npub use axis::{Axis, Ring};\n", child), Vec::<String>::new());
    assert_eq!(faults("mod axis;\nfn f() { crate::world::axis::g() }\n", child).len(), 1);
    assert_eq!(
        faults("mod axis;\n#[cfg(test)]\nmod tests { use crate::world::axis::g; }\n", child),
        Vec::<String>::new()
    );
}

#[test]
fn one_module_writes_to_the_terminal() {
    assert_tidy(&terminal::other_writers(&rust_sources()));
}

#[test]
fn a_second_writer_to_the_terminal_is_found() {
    let bites = |text| assert_bites(terminal::other_writers, "src/world/axis.rs", text, "use `runtime::terminal`");
    bites("fn f() { std::io::stderr().lock(); }\n");
    bites("fn f() { writeln!(io::stdout(), \"x\"); }\n");
    bites("fn f() { usage.print(); }\n");
    assert_passes(terminal::other_writers, "src/runtime/terminal.rs", "fn f() { io::stderr(); }\n");
    assert_passes(terminal::other_writers, "src/world/axis.rs", "fn f() { usage.use_stderr(); child.stdout(piped) }\n");
}

#[test]
fn files_stop_at_500_lines_before_their_tests() {
    assert_tidy(&size::long_files(&rust_sources()));
}

#[test]
fn a_long_file_is_found() {
    assert_bites(size::long_files, "src/units.rs", &"// line\n".repeat(501), "src/units.rs:501: 501 lines");
    assert_passes(size::long_files, "src/units.rs", &"// line\n".repeat(500));
    let tested = "// line\n".repeat(400) + "#[cfg(test)]\nmod tests {\n" + &"// line\n".repeat(400) + "}\n";
    assert_passes(size::long_files, "src/units.rs", &tested);
}

#[test]
fn modules_are_named_after_their_content() {
    assert_tidy(&size::empty_names(&rust_sources()));
}

#[test]
fn a_module_with_an_empty_name_is_found() {
    assert_bites(size::empty_names, "src/model/utils.rs", "//! x\n", "src/model/utils.rs:1: a module named `utils`");
    assert_bites(size::empty_names, "src/helpers/mod.rs", "//! x\n", "a module named `helpers`");
}

#[test]
fn documentation_comments_say_more_than_two_words() {
    assert_tidy(&comments::short_docs(&rust_sources()));
}

#[test]
fn a_comment_that_says_nothing_is_found() {
    let bites = |text, words| assert_bites(comments::short_docs, "src/world/axis.rs", text, words);
    bites("fn f() {}\n/// The file.\nfn g() {}\n", "src/world/axis.rs:2: `The file.` says nothing");
    bites(
        "struct S {\n    /// Why.\n    why: u8,\n    /// Bytes of the\n    /// file.\n    bytes: u8,\n}\n",
        ":2: `Why.`",
    );
    assert_passes(comments::short_docs, "src/world/axis.rs", "// Why.\n/// [t, h, d]\nfn f() {}\n");
}

#[test]
fn no_comment_marks_unfinished_work() {
    assert_tidy(&comments::leftovers(&text_sources()));
}

#[test]
fn a_mark_of_unfinished_work_is_found() {
    let word = ["FIX", "ME"].concat();
    let text = format!("//! Doc.\n// {word}: later\n");
    assert_bites(comments::leftovers, "src/units.rs", &text, "src/units.rs:2: leftover");
    assert_passes(comments::leftovers, "src/units.rs", "// a method of todos\n");
}

#[test]
fn every_configuration_file_parses() {
    assert_tidy(&documents::configurations(&documents::configuration_sources()));
}

#[test]
fn a_configuration_file_that_does_not_parse_is_found() {
    assert_bites(documents::configurations, "configs/x.toml", "[a]\nb = \n", "configs/x.toml:2");
    assert_bites(documents::configurations, "configs/x.json", "{\"a\": 1,}\n", "configs/x.json:1");
}

#[test]
fn links_between_documents_lead_somewhere() {
    assert_tidy(&documents::dead_links(&text_sources()));
}

#[test]
fn a_dead_link_is_found() {
    assert_bites(
        documents::dead_links,
        "docs/x.md",
        "See\n[it](no-such-page.md#part).\n",
        "docs/x.md:2: no file `no-such",
    );
    assert_passes(documents::dead_links, "docs/x.md", "[readme](../README.md) [out](https://example.org/x)\n");
}

#[test]
fn every_test_that_the_six_errors_name_is_there() {
    let document = source::Source::new(documents::ERRORS, &source::read(documents::ERRORS));
    assert_eq!(document.text.matches("\nTests: ").count(), 6);
    assert_tidy(&documents::absent_tests(&document, &rust_sources()));
}

#[test]
fn a_test_that_an_error_names_and_that_is_gone_is_found() {
    let code = [
        Source::new("tests/x.rs", "#[test]\nfn it_falls() {}\nfn no_test() {}\n"),
        Source::new("tests/ranks.rs", "(\"a_claim\", memory::claim),\n"),
        Source::new("src/x.rs", "/// ```compile_fail\n"),
    ];
    let faults = |tests: &str| {
        let text =
            format!("# X\n\n## The six errors of the users' guide\n\n### One\n\n{tests}\n\n## Next\n\nTests: `y`\n");
        documents::absent_tests(&Source::new("docs/x.md", &text), &code)
    };
    assert_eq!(faults("Tests: `it_falls`, `a_claim`, the\nexample in `src/x.rs`."), Vec::<String>::new());
    assert_eq!(faults("Tests: `it_falls`, `no_test`."), ["docs/x.md:5: there is no test `no_test`"]);
    assert_eq!(faults("Tests: `src/y.rs`."), ["docs/x.md:5: there is no test `src/y.rs`"]);
    assert_eq!(faults("Nothing."), ["docs/x.md:5: no paragraph `Tests: …` with a name"]);
}

#[test]
fn both_languages_of_the_readme_say_the_same() {
    let read = |path: &str| Source::new(path, &source::read(path));
    assert_tidy(&documents::out_of_step(&read("README.md"), &read("README.zh-CN.md")));
}

#[test]
fn a_translation_that_is_out_of_step_is_found() {
    let original = "# A\n\n[x](docs/x.md#a)\n\n```sh\nmake run\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n## B\n";
    let faults = |text: &str| documents::out_of_step(&Source::new("R.md", original), &Source::new("R.zh.md", text));
    assert_eq!(faults(&original.replace("# A", "# 甲").replace("[x]", "[某]")), Vec::<String>::new());
    for (changed, words) in [
        (original.replace("## B", "### B"), "headings"),
        (original.replace("make run", "make test"), "code blocks"),
        (original.replace("x.md", "y.md"), "links"),
        (original.replace("| 1 | 2 |\n", ""), "tables"),
    ] {
        let found = faults(&changed);
        assert!(found.len() == 1 && found[0].contains(words), "{found:?}");
    }
}

#[test]
fn every_dependency_has_a_line_of_reason() {
    let manifest = source::read("Cargo.toml");
    assert_tidy(&documents::dependencies_without_reason(&manifest, &source::read(documents::REASONS)));
}

#[test]
fn a_dependency_without_a_reason_is_found() {
    let manifest = "[dependencies]\nanyhow = \"1\"\nserde = { version = \"1\" }\n[lints.rust]\nx = 1\n[build-dependencies]\ncc = \"1\"\n";
    let faults =
        documents::dependencies_without_reason(manifest, "| `anyhow` | why |\n| `old` | why |\n| `cc` | why |\n");
    assert_eq!(faults.len(), 2, "{faults:#?}");
    assert!(faults[0].contains("`serde`") && faults[1].contains("`old`"), "{faults:#?}");
}

#[test]
fn every_template_asks_slurm_for_what_the_site_file_says() {
    assert_tidy(&templates::drifted(&templates::template_sources()));
    assert_tidy(&templates::missing());
}

#[test]
fn a_template_that_has_drifted_is_found() {
    let text = source::read("slurm/gate5_g2.sbatch");
    assert_passes(templates::drifted, "slurm/gate5_g2.sbatch", &text);
    let bites = |path, text: String, words| assert_bites(templates::drifted, path, &text, words);
    let changed = text.replace("--time=06:00:00", "--time=01:00:00");
    bites("slurm/gate5_g2.sbatch", changed, "slurm/gate5_g2.sbatch:1: slurm/site.env asks for");
    let other = text.replace("run_job gate5_g2", "run_job gate4_g1");
    bites("slurm/gate5_g2.sbatch", other, "the last line is not `run_job gate5_g2`");
    bites("slurm/gate9.sbatch", text, "there is no gate9");
}
