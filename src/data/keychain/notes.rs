//! The notes of a prompt: which place has which code, what leads where, and how deep each note lies.

use super::super::order::Random;
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
/// The depth behind the last line; depths are counted in thousandths of a percent.
pub(super) const DEEPEST: u64 = 100_000;
const PERCENT: u64 = 1_000;

/// A line about one place.
pub(super) struct Note {
    /// The line.
    pub(super) text: String,
    /// How deep it lies in the passage.
    pub(super) depth: u64,
}

/// What a prompt holds and asks.
pub(super) struct Task {
    /// All notes, the least deep first.
    pub(super) notes: Vec<Note>,
    /// The place whose code is asked for.
    pub(super) asked: String,
    /// Its code.
    pub(super) code: u32,
    /// Codes of other places, in no order.
    pub(super) others: Vec<u32>,
}

/// How deep the code's note of prompt `index` of `prompts` lies.
pub(super) fn depth_of(depth: Depth, index: usize, prompts: usize) -> u64 {
    let width = (depth.to - depth.from) * PERCENT;
    let (index, last) = (from_index(index), from_index(prompts.saturating_sub(1)));
    depth.from * PERCENT + (width * index).checked_div(last).unwrap_or(width / 2)
}

/// Draws the notes of one prompt. `codes` are distinct; those that stand in the passage by accident come last.
pub(super) fn task(options: &Options, codes: &[u32], depth: u64, random: &mut Random) -> Task {
    let Options { hops, keys, answers, .. } = *options;
    let mut names: Vec<usize> = (0..NAMES).collect();
    random.shuffle(&mut names);
    let mut places =
        names.iter().map(|name| format!("{} {}", DIRECTIONS[name % DIRECTIONS.len()], PLACES[name / DIRECTIONS.len()]));
    let mut codes = codes.iter().copied();
    let mut notes = Vec::new();
    let (mut asked, mut code, mut others) = (String::new(), 0, Vec::new());
    // Chains beside the one that is asked for, or a reference would give the answer away; every answer needs a code.
    let beside = keys.saturating_sub(answers.max(1)).checked_div(hops - 1).unwrap_or(keys);
    let chains = beside.min(keys / hops);
    let lengths = std::iter::repeat_n(hops, chains).chain(std::iter::repeat_n(1, keys - chains * hops));
    for (chain, length) in lengths.enumerate() {
        let chain_places: Vec<String> = places.by_ref().take(length).collect();
        let Some(chain_code) = codes.next() else { break };
        let depths = if chain == 0 {
            chain_depths(options.depth, depth, length, random)
        } else {
            (0..length).map(|_| from_index(random.below(as_index(DEEPEST) + 1))).collect()
        };
        for (hop, (place, depth)) in chain_places.iter().zip(depths).enumerate() {
            let text = match chain_places.get(hop + 1) {
                Some(next) => format!("Note: the access code of the {place} is the same as that of the {next}."),
                None => format!("Note: the access code of the {place} is {chain_code}."),
            };
            notes.push(Note { text, depth });
        }
        if chain == 0 {
            (asked, code) = (chain_places.into_iter().next().unwrap_or_default(), chain_code);
        } else {
            others.push(chain_code);
        }
    }
    notes.sort_by_key(|note| note.depth);
    random.shuffle(&mut others);
    Task { notes, asked, code, others }
}

/// Depths of a chain's notes, the code's own last: evenly apart within the range, and in no order.
fn chain_depths(range: Depth, code: u64, length: usize, random: &mut Random) -> Vec<u64> {
    let (from, width) = (range.from * PERCENT, (range.to - range.from) * PERCENT);
    let apart = |hop: u64| from + (code - from + width * hop / from_index(length)) % width.max(1);
    let mut depths: Vec<u64> = (1..from_index(length)).map(apart).collect();
    random.shuffle(&mut depths);
    depths.push(code);
    depths
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    fn options(keys: usize, hops: usize, answers: usize) -> Options {
        Options { keys, hops, answers, depth: Depth { from: 20, to: 80 }, ..Options::default() }
    }

    /// The code that the notes give for a place, the notes from there to it, and their depths.
    fn followed(task: &Task) -> (u32, Vec<u64>) {
        let notes: BTreeMap<&str, (&str, u64)> = task
            .notes
            .iter()
            .map(|note| {
                let (place, says) = note.text["Note: the access code of the ".len()..].split_once(" is ").unwrap();
                (place, (says.trim_end_matches('.'), note.depth))
            })
            .collect();
        let (mut place, mut depths) = (task.asked.as_str(), Vec::new());
        loop {
            let (says, depth) = notes[place];
            depths.push(depth);
            match says.strip_prefix("the same as that of the ") {
                Some(next) => place = next,
                None => return (says.parse().unwrap(), depths),
            }
        }
    }

    #[test]
    fn a_chain_leads_to_its_code_through_notes_at_distinct_depths_of_the_range() {
        let codes: Vec<u32> = (1_000..2_000).collect();
        for (keys, hops, answers) in [(8, 1, 4), (8, 2, 4), (8, 4, 4), (8, 5, 4), (64, 7, 2), (5, 5, 0)] {
            for depth in [20_000, 44_321, 80_000] {
                let task =
                    task(&options(keys, hops, answers), &codes, depth, &mut Random::new(depth, from_index(hops)));
                assert_eq!(task.notes.len(), keys);
                let (code, depths) = followed(&task);
                assert_eq!((code, depths.len()), (task.code, hops));
                assert_eq!(depths.last(), Some(&depth));
                assert_eq!(depths.iter().collect::<BTreeSet<_>>().len(), hops, "{depths:?}");
                assert!(depths.iter().all(|depth| (20_000..=80_000).contains(depth)), "{depths:?}");
                assert!(task.others.len() + 1 >= answers && !task.others.contains(&code));
                assert!(task.notes.is_sorted_by_key(|note| note.depth));
            }
        }
    }

    #[test]
    fn a_reference_alone_does_not_tell_which_code_is_asked_for() {
        let codes: Vec<u32> = (1_000..2_000).collect();
        let task = task(&options(8, 2, 4), &codes, 50_000, &mut Random::new(1, 1));
        assert_eq!(task.notes.iter().filter(|note| note.text.contains("the same as")).count(), 4);
    }

    #[test]
    fn depths_go_evenly_from_end_to_end() {
        let range = Depth { from: 10, to: 90 };
        assert_eq!([0, 1, 2, 3, 4].map(|index| depth_of(range, index, 5)), [10_000, 30_000, 50_000, 70_000, 90_000]);
        assert_eq!(depth_of(range, 0, 1), 50_000);
        assert_eq!(depth_of(Depth { from: 100, to: 100 }, 1, 3), DEEPEST);
    }
}
