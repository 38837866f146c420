//! Which keys a stretch of queries sees, as rectangles that a kernel can compute.
//!
//! Rectangles are aligned by position, so queries at the end of a longer range (an answer after its prompt) see
//! everything before them: bottom-right alignment.

use std::ops::Range;

use crate::tensor::attention::Visible;

/// Maximum size of a rectangle whose scores are materialized: bounds their memory.
#[derive(Clone, Copy, Debug)]
pub struct TileSizes {
    /// Maximum number of queries.
    pub rows: i64,
    /// Maximum number of keys.
    pub keys: i64,
}

impl TileSizes {
    /// Small enough for a processor's caches.
    pub const CPU: TileSizes = TileSizes { rows: 256, keys: 1024 };
    /// Large enough to fill a GPU.
    pub const PLAIN: TileSizes = TileSizes { rows: 1024, keys: 4096 };
}

/// A rectangle of queries and keys, as offsets into the two stretches.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Tile {
    /// Offsets of the queries.
    pub rows: Range<i64>,
    /// Offsets of the keys.
    pub keys: Range<i64>,
    /// Which of the keys each row sees.
    pub visible: Visible,
}

/// Rectangles of `queries` × `keys` (both positions) that contain visible pairs, in a fixed order. With a window, a
/// query sees itself and the `window` − 1 positions before it, and rectangles have at most the given sizes.
#[must_use]
pub fn tiles(queries: Range<i64>, keys: Range<i64>, window: Option<i64>, sizes: TileSizes) -> Vec<Tile> {
    let keys_stop = keys.end.min(queries.end);
    if queries.is_empty() || keys.start >= keys_stop {
        return Vec::new();
    }
    match window {
        None => causal(&queries, keys.start..keys_stop),
        Some(window) => banded(&queries, &(keys.start..keys_stop), window, sizes),
    }
}

fn causal(queries: &Range<i64>, keys: Range<i64>) -> Vec<Tile> {
    let mut found = Vec::new();
    let mut push = |rows: Range<i64>, columns: Range<i64>, visible| {
        if !rows.is_empty() && !columns.is_empty() {
            let rows = rows.start - queries.start..rows.end - queries.start;
            found.push(Tile { rows, keys: columns.start - keys.start..columns.end - keys.start, visible });
        }
    };
    // Every row sees the keys before the first query. The other keys form a causal square, and rows below it see all of
    // it.
    let square = keys.start.max(queries.start)..keys.end;
    push(queries.clone(), keys.start..keys.end.min(queries.start), Visible::All);
    push(square.clone(), square.clone(), Visible::Causal);
    push(square.end..queries.end, square, Visible::All);
    found
}

fn banded(queries: &Range<i64>, keys: &Range<i64>, window: i64, sizes: TileSizes) -> Vec<Tile> {
    let step = |size: i64| usize::try_from(size).unwrap_or(1);
    let mut found = Vec::new();
    for row in (queries.start..queries.end).step_by(step(sizes.rows)) {
        let row_end = (row + sizes.rows).min(queries.end);
        let seen = (row - window + 1).max(keys.start)..row_end.min(keys.end);
        for key in seen.clone().step_by(step(sizes.keys)) {
            let key_end = (key + sizes.keys).min(seen.end);
            // All pairs are visible iff the first row sees the last key and the last row sees the first key.
            let whole = key_end - 1 <= row && row_end - 1 - key < window;
            let visible = if whole { Visible::All } else { Visible::Band { offset: row - key, window } };
            found.push(Tile {
                rows: row - queries.start..row_end - queries.start,
                keys: key - keys.start..key_end - keys.start,
                visible,
            });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Visibility of every pair, by the definition, against what the tiles say.
    fn check(queries: Range<i64>, keys: Range<i64>, window: Option<i64>) {
        let mut seen = std::collections::BTreeMap::new();
        for tile in tiles(queries.clone(), keys.clone(), window, TileSizes::CPU) {
            for row in tile.rows.clone() {
                for key in tile.keys.clone() {
                    let (i, j) = (row - tile.rows.start, key - tile.keys.start);
                    let visible = match tile.visible {
                        Visible::All => true,
                        Visible::Causal => j <= i,
                        Visible::Band { offset, window } => (0..window).contains(&(i + offset - j)),
                    };
                    if visible {
                        *seen.entry((queries.start + row, keys.start + key)).or_insert(0) += 1;
                    }
                }
            }
        }
        for i in queries.clone() {
            for j in keys.clone() {
                let expected = i32::from(j <= i && window.is_none_or(|window| i - j < window));
                assert_eq!(
                    seen.get(&(i, j)).copied().unwrap_or(0),
                    expected,
                    "{queries:?} {keys:?} {window:?} {i} {j}"
                );
            }
        }
    }

    #[test]
    fn every_visible_pair_lies_in_exactly_one_tile_and_no_hidden_one_is_seen() {
        for queries in [0..1, 0..5, 3..9, 7..8, 10..20] {
            for keys in [0..1, 0..5, 2..4, 3..9, 5..12, 12..30] {
                for window in [None, Some(1), Some(3), Some(7), Some(100)] {
                    check(queries.clone(), keys.clone(), window);
                }
            }
        }
        check(1000..1600, 0..1600, Some(700));
    }

    #[test]
    fn an_answer_of_two_sees_its_whole_prompt_of_128() {
        let tile = &tiles(128..130, 0..128, None, TileSizes::CPU)[..];
        assert_eq!(tile, [Tile { rows: 0..2, keys: 0..128, visible: Visible::All }]);
    }
}
