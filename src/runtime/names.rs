//! How much two names are alike, for messages that suggest what a misspelt one might have been.

/// Characters of a name that are compared: time and memory grow with the product of two lengths.
const COMPARED_CHARS_MAX: usize = 80;

/// From 0 (nothing in common) to 1 (equal but for upper and lower case).
#[must_use]
pub fn likeness(word: &str, name: &str) -> f64 {
    let short = |text: &str| text.chars().take(COMPARED_CHARS_MAX).collect::<String>().to_lowercase();
    let (word, name) = (short(word), short(name));
    strsim::jaro_winkler(&word, &name).max(strsim::normalized_damerau_levenshtein(&word, &name))
}

/// The entry of `known` that is most like `word`.
#[must_use]
pub fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    known.iter().max_by(|a, b| likeness(word, a).total_cmp(&likeness(word, b))).copied()
}
