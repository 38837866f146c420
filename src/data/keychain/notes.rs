//! The notes of a prompt: which place has which code, which note refers to which place, and the depth of each note.

use super::super::random::Random;
use super::options::{Depth, KEYS_MAX, Options};
use crate::runtime::units::{as_index, from_index};

const DIRECTIONS: [&str; 16] = [
    "north", "south", "east", "west", "upper", "lower", "inner", "outer", "old", "new", "red", "blue", "green",
    "white", "first", "second",
];
const PLACES: [&str; 16] = [
    "archive", "bridge", "cellar", "depot", "garden", "gate", "harbour", "kitchen", "library", "market", "mill",
    "office", "station", "tower", "vault", "workshop",
];
const NAMES: usize = DIRECTIONS.len() * PLACES.len();
const _: () = assert!(KEYS_MAX == NAMES / 4, "a prompt takes at most a quarter of the names");
/// The depth after the last line; the unit is a thousandth of a percent.
pub(super) const DEPTH_MAX: u64 = 100_000;
const PERCENT: u64 = 1_000;

/// A line about one place.
pub(super) struct Note {
    pub(super) text: String,
    /// From 0 to [`DEPTH_MAX`].
    pub(super) depth: u64,
}

/// The notes of a prompt, its question, and its codes.
pub(super) struct Task {
    /// In order of depth.
    pub(super) notes: Vec<Note>,
    /// The place in the question.
    pub(super) place: String,
    /// The code of that place.
    pub(super) code: u32,
    /// Codes of other places, shuffled.
    pub(super) other_codes: Vec<u32>,
}

/// The depth of the note with the code, in prompt `index` of `prompts`.
pub(super) fn code_depth(depth: Depth, index: usize, prompts: usize) -> u64 {
    let width = (depth.to - depth.from) * PERCENT;
    let (index, last) = (from_index(index), from_index(prompts.saturating_sub(1)));
    depth.from * PERCENT + (width * index).checked_div(last).unwrap_or(width / 2)
}

/// Random notes of one prompt. `codes` are distinct; those that the passage contains by accident come last.
pub(super) fn random_task(options: &Options, codes: &[u32], depth: u64, random: &mut Random) -> Task {
    let Options { hops, keys, answers, .. } = *options;
    let mut names: Vec<usize> = (0..NAMES).collect();
    random.shuffle(&mut names);
    let mut places =
        names.iter().map(|name| format!("{} {}", DIRECTIONS[name % DIRECTIONS.len()], PLACES[name / DIRECTIONS.len()]));
    let mut codes = codes.iter().copied();
    let mut notes = Vec::new();
    let (mut place, mut code, mut other_codes) = (String::new(), 0, Vec::new());
    // With a single chain, its references would give the answer away. As many chains as leave each answer a code.
    let chains_max = keys.saturating_sub(answers.max(1)).checked_div(hops - 1).unwrap_or(keys);
    let chains = chains_max.min(keys / hops);
    let lengths = std::iter::repeat_n(hops, chains).chain(std::iter::repeat_n(1, keys - chains * hops));
    for (chain, length) in lengths.enumerate() {
        let chain_places: Vec<String> = places.by_ref().take(length).collect();
        let Some(chain_code) = codes.next() else { break };
        let depths = if chain == 0 {
            chain_depths(options.depth, depth, length, random)
        } else {
            (0..length).map(|_| from_index(random.below(as_index(DEPTH_MAX) + 1))).collect()
        };
        for (hop, (place, depth)) in chain_places.iter().zip(depths).enumerate() {
            let text = match chain_places.get(hop + 1) {
                Some(next) => format!("Note: the access code of the {place} is the same as that of the {next}."),
                None => format!("Note: the access code of the {place} is {chain_code}."),
            };
            notes.push(Note { text, depth });
        }
        if chain == 0 {
            place = chain_places.into_iter().next().unwrap_or_default();
            code = chain_code;
        } else {
            other_codes.push(chain_code);
        }
    }
    notes.sort_by_key(|note| note.depth);
    random.shuffle(&mut other_codes);
    Task { notes, place, code, other_codes }
}

/// Depths of a chain's notes, evenly spaced in the range and shuffled; the note with the code comes last.
fn chain_depths(range: Depth, code_depth: u64, length: usize, random: &mut Random) -> Vec<u64> {
    let (from, width) = (range.from * PERCENT, (range.to - range.from) * PERCENT);
    let apart = |hop: u64| from + (code_depth - from + width * hop / from_index(length)) % width.max(1);
    let mut depths: Vec<u64> = (1..from_index(length)).map(apart).collect();
    random.shuffle(&mut depths);
    depths.push(code_depth);
    depths
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    fn options(keys: usize, hops: usize, answers: usize) -> Options {
        Options { keys, hops, answers, depth: Depth { from: 20, to: 80 }, ..Options::default() }
    }

    /// Follows the notes from the place in the question: its code, and the depths of the notes on the way.
    fn followed(task: &Task) -> (u32, Vec<u64>) {
        let notes: BTreeMap<&str, (&str, u64)> = task
            .notes
            .iter()
            .map(|note| {
                let (place, code) = note.text["Note: the access code of the ".len()..].split_once(" is ").unwrap();
                (place, (code.trim_end_matches('.'), note.depth))
            })
            .collect();
        let (mut place, mut depths) = (task.place.as_str(), Vec::new());
        loop {
            let (code, depth) = notes[place];
            depths.push(depth);
            match code.strip_prefix("the same as that of the ") {
                Some(next) => place = next,
                None => return (code.parse().unwrap(), depths),
            }
        }
    }

    #[test]
    fn a_chain_leads_to_its_code_through_notes_at_distinct_depths_of_the_range() {
        let codes: Vec<u32> = (1_000..2_000).collect();
        for (keys, hops, answers) in [(8, 1, 4), (8, 2, 4), (8, 4, 4), (8, 5, 4), (64, 7, 2), (5, 5, 0)] {
            for depth in [20_000, 44_321, 80_000] {
                let task = random_task(
                    &options(keys, hops, answers),
                    &codes,
                    depth,
                    &mut Random::new(depth, from_index(hops)),
                );
                assert_eq!(task.notes.len(), keys);
                let (code, depths) = followed(&task);
                assert_eq!((code, depths.len()), (task.code, hops));
                assert_eq!(depths.last(), Some(&depth));
                assert_eq!(depths.iter().collect::<BTreeSet<_>>().len(), hops, "{depths:?}");
                assert!(depths.iter().all(|depth| (20_000..=80_000).contains(depth)), "{depths:?}");
                assert!(task.other_codes.len() + 1 >= answers && !task.other_codes.contains(&code));
                assert!(task.notes.is_sorted_by_key(|note| note.depth));
            }
        }
    }

    #[test]
    fn several_chains_have_references() {
        let codes: Vec<u32> = (1_000..2_000).collect();
        let task = random_task(&options(8, 2, 4), &codes, 50_000, &mut Random::new(1, 1));
        assert_eq!(task.notes.iter().filter(|note| note.text.contains("the same as")).count(), 4);
    }

    #[test]
    fn code_depths_are_evenly_spaced() {
        let range = Depth { from: 10, to: 90 };
        assert_eq!([0, 1, 2, 3, 4].map(|index| code_depth(range, index, 5)), [10_000, 30_000, 50_000, 70_000, 90_000]);
        assert_eq!(code_depth(range, 0, 1), 50_000);
        assert_eq!(code_depth(Depth { from: 100, to: 100 }, 1, 3), DEPTH_MAX);
    }
}
