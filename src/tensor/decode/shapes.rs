//! How the kernels of a decode step are started: blocks, threads, shared memory, and how their work is shared out.
//!
//! What changes the order of a sum never depends on the number of answers, so an answer has the same bits alone and beside
//! others.

use std::ffi::c_uint;

use tch::Kind;

use super::graph::Shape;

/// Multiprocessors of a device.
#[derive(Clone, Copy, Debug)]
pub struct Processors(pub i64);

/// Answers of one tile of a product. What is shared out is shared out as for one tile.
const TILE: i64 = 8;
/// Inputs of a step of a product.
const STEP: i64 = 64;
/// Steps of a split, at most: the rows of one tile then fit into shared memory.
const STEPS_MAX: i64 = 64;
/// Splits of a product, at most.
const SPLITS_MAX: i64 = 8;
/// Outputs of a tile of a product.
const OUTPUTS: i64 = 16;
/// Parts that can be merged.
const PARTS_MAX: i64 = 1_024;
/// Keys of a stage of attention.
const KEYS: i64 = 64;
/// Stages of attention that are in shared memory.
const STAGES: i64 = 3;
/// Prompts from here on are long.
const LONG_ROWS: i64 = 32_768;

fn whole(number: i64) -> c_uint {
    c_uint::try_from(number).unwrap_or_else(|_| unreachable!("{number} blocks or bytes in one launch"))
}

fn ceil(number: i64, of: i64) -> i64 {
    (number + of - 1) / of
}

fn plain(x: i64, y: i64, threads: i64) -> Shape {
    Shape { grid: [whole(x), whole(y), 1], threads: whole(threads), shared: 0, early: true }
}

/// Splits of the inputs of a product, whose sums are added afterwards: as few as let all multiprocessors work, where more gain
/// less than a twentieth.
#[must_use]
pub fn splits(processors: Processors, inputs: i64, outputs: i64) -> i64 {
    let (steps, tiles) = (ceil(inputs, STEP), ceil(outputs, OUTPUTS));
    let cost = |splits: i64| ceil(tiles, (processors.0 / splits).max(1)) * ceil(steps, splits);
    let able = (1..=SPLITS_MAX).filter(|&splits| splits <= steps && ceil(steps, splits) <= STEPS_MAX);
    able.reduce(|best, splits| if 20 * cost(splits) <= 19 * cost(best) { splits } else { best }).unwrap_or(SPLITS_MAX)
}

/// Parts into which attention is split.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Shares {
    /// Over this rank's prompt rows.
    pub prompt: i64,
    /// Over each answer's own rows.
    pub own: i64,
}

impl Shares {
    /// Parts of both kinds together.
    #[must_use]
    pub fn all(self) -> i64 {
        self.prompt + self.own
    }
}

/// What attention of a layer goes over.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct AttendSizes {
    /// Query heads that share a key head.
    pub heads_each: i64,
    /// Key heads of the layer.
    pub groups: i64,
    pub head_dim: i64,
    /// On this rank.
    pub prompt_rows: i64,
    /// Rows that each answer has memory for on this rank.
    pub room: i64,
    /// Keys that a row sees.
    pub window: Option<i64>,
}

/// Two blocks of threads for a multiprocessor over a long prompt; fewer over a short one, so that blocks do not have few keys.
#[must_use]
pub fn shares(processors: Processors, sizes: &AttendSizes) -> Shares {
    let AttendSizes { heads_each, groups, head_dim, prompt_rows, room, window } = *sizes;
    let seen = |rows: i64| window.map_or(rows, |window| rows.min(window));
    let (prompt_rows, room) = (seen(prompt_rows), seen(room));
    let most = 2 * processors.0 / (row_blocks(TILE, heads_each, head_dim) * groups);
    let prompt = if prompt_rows >= LONG_ROWS { most } else { (most * 3 / 4).min(ceil(prompt_rows, 2 * KEYS)) };
    let prompt = prompt.clamp(1, PARTS_MAX / 2);
    Shares { prompt, own: ceil(room, 4 * KEYS).clamp(1, PARTS_MAX - prompt) }
}

/// Most rows of queries that one block takes.
pub(super) fn rows_max(head_dim: i64) -> i64 {
    if head_dim <= 128 { 32 } else { 16 }
}

fn row_blocks(answers: i64, heads_each: i64, head_dim: i64) -> i64 {
    ceil(answers * heads_each, rows_max(head_dim))
}

pub(super) fn embed(answers: i64, width: i64) -> Shape {
    plain(ceil(width, 256), answers, 256)
}

pub(super) fn product(
    processors: Processors,
    kind: Kind,
    answers: i64,
    inputs: i64,
    outputs: &[i64],
    splits: i64,
) -> Shape {
    let tiles: i64 = outputs.iter().map(|outputs| ceil(*outputs, OUTPUTS)).sum();
    let shape = plain((processors.0 / splits).clamp(1, tiles.max(1)), splits, 256);
    let columns = ceil(answers, TILE).max(1).cast_unsigned().next_power_of_two().cast_signed();
    let rows = ceil(ceil(inputs, STEP), splits) * columns * 1024;
    let sums = columns * 5120 * if columns <= 2 { 2 } else { 1 };
    let (short, long) = (65_536, 131_072);
    let bytes = match (kind, columns) {
        (Kind::Float, _) => 0,
        (_, ..=2) if rows <= 73_728 => sums + long + rows,
        (_, ..=2) if rows <= 139_264 => sums + short + rows,
        _ => sums + long,
    };
    Shape { shared: whole(bytes), ..shape }
}

pub(super) fn residual(answers: i64, clusters: bool) -> Shape {
    if clusters { plain(8, answers, 256) } else { plain(1, answers, 1024) }
}

pub(super) fn heads(answers: i64, heads: i64, groups: i64) -> Shape {
    plain(ceil(answers * (heads + 2 * groups), 4), 1, 128)
}

pub(super) fn attend(answers: i64, sizes: &AttendSizes, kind: Kind, shares: Shares) -> Shape {
    let AttendSizes { heads_each, groups, head_dim, .. } = *sizes;
    let (together, alone) = (row_blocks(answers, heads_each, head_dim), row_blocks(1, heads_each, head_dim));
    let row = (head_dim + 8) * 2;
    let shape = plain((shares.prompt * together + shares.own * answers * alone) * groups, 1, 128);
    match kind {
        Kind::Float => shape,
        _ => Shape { shared: whole((rows_max(head_dim) + STAGES * 2 * KEYS) * row), ..shape },
    }
}

pub(super) fn merge(answers: i64, heads: i64, head_dim: i64) -> Shape {
    plain(answers * heads, 1, ceil(head_dim, 32) * 32)
}

pub(super) fn activate(answers: i64, width: i64) -> Shape {
    plain(ceil(width, 128), ceil(answers, 4), 128)
}

pub(super) fn scan(answers: i64, chunks: i64) -> Shape {
    plain(chunks, answers, 256)
}

pub(super) fn rows_of_1024(rows: i64) -> Shape {
    plain(rows, 1, 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Processors = Processors(132);

    #[test]
    fn products_of_known_models_are_split_so_that_no_multiprocessor_waits_long() {
        for (inputs, outputs) in [(4_096, 6_192), (4_096, 4_112), (12_288, 4_112), (4_096, 24_608), (1_024, 151_936)] {
            let splits = splits(H200, inputs, outputs);
            let (steps, tiles) = (ceil(inputs, STEP), ceil(outputs, OUTPUTS));
            let blocks = H200.0 / splits;
            let longest = ceil(tiles, blocks) * ceil(steps, splits);
            assert!(ceil(steps, splits) <= STEPS_MAX && splits <= steps);
            // Work of the busiest block against an even share.
            assert!(10 * longest * H200.0 <= 13 * steps * tiles, "{inputs} × {outputs}: {splits} splits");
        }
    }

    #[test]
    fn attention_of_known_models_is_shared_out_over_all_multiprocessors() {
        let sizes =
            AttendSizes { heads_each: 4, groups: 8, head_dim: 128, prompt_rows: 131_072, room: 256, window: None };
        let shares = shares(H200, &sizes);
        let units = shares.prompt * 8 + shares.own * 8 * 8;
        assert!((200..=340).contains(&units), "{shares:?}");
        assert_eq!(super::shares(H200, &AttendSizes { window: Some(100), ..sizes }), Shares { prompt: 1, own: 1 });
        assert_eq!(
            super::shares(H200, &AttendSizes { prompt_rows: 0, room: 1, ..sizes }),
            Shares { prompt: 1, own: 1 }
        );
    }
}
