//! Documentation comments and marks of unfinished work.

use proc_macro2::TokenTree;
use regex::Regex;

use crate::source::{Source, each_level};

/// Rooms whose short comments are not rewritten yet. The list may only shrink.
const PENDING: [&str; 10] =
    ["checkpoint", "config", "data", "model", "plan", "report", "reward", "step", "tools", "train"];

/// Documentation comments of at most two words: they repeat the name, where they should give unit, range or reason.
pub(crate) fn short_docs(sources: &[Source]) -> Vec<String> {
    let mut faults = Vec::new();
    for source in sources.iter().filter(|source| source.path.starts_with("src/")) {
        let room = source.module_path().map_or_else(String::new, |path| path[0].to_owned());
        if PENDING.contains(&room.as_str()) {
            continue;
        }
        each_level(&source.tokens(), &mut |level| {
            for comment in docs(level) {
                if comment.text.split_whitespace().count() <= 2 {
                    faults.push(source.fault_at(
                        comment.line,
                        &format!("`{}` says nothing: unit, range, reason, or no comment", comment.text.trim()),
                    ));
                }
            }
        });
    }
    faults
}

struct DocComment {
    line: usize,
    text: String,
}

/// Whole comments of one level: a comment of several lines is several attributes `#[doc = "…"]` in a row.
fn docs(level: &[TokenTree]) -> Vec<DocComment> {
    let mut comments: Vec<DocComment> = Vec::new();
    let mut last_end = None;
    for (index, pair) in level.windows(2).enumerate() {
        let [TokenTree::Punct(sign), TokenTree::Group(group)] = pair else { continue };
        let inside: Vec<TokenTree> = group.stream().into_iter().collect();
        let [TokenTree::Ident(word), TokenTree::Punct(_), TokenTree::Literal(text)] = &inside[..] else { continue };
        if sign.as_char() != '#' || word != "doc" {
            continue;
        }
        let text = text.to_string().trim_matches('"').to_owned();
        match comments.last_mut() {
            Some(comment) if last_end == Some(index) => comment.text += &text,
            _ => comments.push(DocComment { line: sign.span().start().line, text }),
        }
        last_end = Some(index + 2);
    }
    comments
}

/// Marks of unfinished work, in any file that people write.
pub(crate) fn leftovers(sources: &[Source]) -> Vec<String> {
    // In pieces, so that this file does not find itself.
    let words = [["FIX", "ME"], ["TO", "DO"], ["X", "XX"]].map(|pieces| pieces.concat());
    let pattern = Regex::new(&format!(r"\b(?:{})\b", words.join("|"))).expect("a pattern");
    let mut faults = Vec::new();
    for source in sources {
        for hit in pattern.find_iter(&source.text) {
            faults.push(source.fault(hit.start(), &format!("leftover `{}`: do it or file it", hit.as_str())));
        }
    }
    faults
}
