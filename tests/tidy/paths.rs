//! The paths that Rust code names, also inside macros and groups of `use`.

use proc_macro2::{Delimiter, TokenTree};

use crate::source::{Source, each_level, members};

/// A path from the root of the library.
pub(crate) struct NamedPath {
    pub(crate) line: usize,
    /// Without `crate`, `super` and `self`.
    pub(crate) segments: Vec<String>,
    /// Named by `pub use`.
    pub(crate) reexported: bool,
}

/// Every path of the code before the unit tests that begins with `crate`, `longstraw`, `super` or `self`, and every
/// path of a `use` (which may begin with a child module).
pub(crate) fn named_paths(source: &Source, own: &[&str]) -> Vec<NamedPath> {
    let mut found = Vec::new();
    each_level(&source.tokens(), &mut |level| {
        let mut at = 0;
        while at < level.len() {
            let start = at;
            let is_use = is_word(&level[at], &["use"]);
            let begins = is_word(&level[at], &["crate", "longstraw", "super", "self"])
                && is_colons(level, at + 1)
                && !(at > 1 && is_colons(level, at - 2));
            at += usize::from(is_use);
            let mut tree = Vec::new();
            if is_use || begins {
                at = read_tree(level, at, &[], &mut tree);
            }
            let reexported = is_use && start > 0 && is_visibility(&level[start - 1]);
            found.extend(tree.into_iter().filter_map(|(line, segments)| {
                let segments = resolve(&segments, own, is_use)?;
                Some(NamedPath { line, segments, reexported })
            }));
            at = at.max(start + 1);
        }
    });
    found
}

fn is_word(token: &TokenTree, words: &[&str]) -> bool {
    matches!(token, TokenTree::Ident(ident) if words.iter().any(|word| ident == word))
}

fn is_punct(token: Option<&TokenTree>, sign: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == sign)
}

/// Whether `::` begins at this index.
fn is_colons(level: &[TokenTree], at: usize) -> bool {
    is_punct(level.get(at), ':') && is_punct(level.get(at + 1), ':')
}

/// `pub`, or the parentheses of `pub(crate)`.
fn is_visibility(token: &TokenTree) -> bool {
    is_word(token, &["pub"]) || matches!(token, TokenTree::Group(group) if group.delimiter() == Delimiter::Parenthesis)
}

/// Reads a path, with all members of a brace group at its end, and returns the index after it.
fn read_tree(level: &[TokenTree], mut at: usize, prefix: &[String], found: &mut Vec<(usize, Vec<String>)>) -> usize {
    let mut segments = prefix.to_vec();
    let line = level.get(at).map_or(0, |token| token.span().start().line);
    while let Some(token) = level.get(at) {
        match token {
            TokenTree::Ident(ident) => segments.push(ident.to_string()),
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => {
                for member in
                    members(group).split(|token| is_punct(Some(token), ',')).filter(|member| !member.is_empty())
                {
                    read_tree(member, 0, &segments, found);
                }
                return at + 1;
            }
            _ => break,
        }
        at += 1;
        if !is_colons(level, at) {
            break;
        }
        at += 2;
    }
    found.push((line, segments));
    at
}

/// The segments from the root of the library; none for a path into another crate.
fn resolve(segments: &[String], own: &[&str], is_use: bool) -> Option<Vec<String>> {
    let owned = |path: &[&str]| path.iter().map(|&segment| segment.to_owned()).collect::<Vec<String>>();
    let supers = segments.iter().take_while(|segment| *segment == "super").count();
    let rest = |skipped: usize| segments[skipped..].iter().filter(|segment| *segment != "self").cloned();
    let first = segments.first()?;
    let base = match first.as_str() {
        "crate" | "longstraw" => return Some(rest(1).collect()),
        "self" => owned(own),
        _ if supers > 0 => owned(&own[..own.len().checked_sub(supers)?]),
        _ if is_use => return Some(owned(own).into_iter().chain(rest(0)).collect()),
        _ => return None,
    };
    Some(base.into_iter().chain(rest(supers.max(1))).collect())
}
