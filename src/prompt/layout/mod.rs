//! Which rank has which position: pages dealt to ranks, answers spread over ranks, labels, and which keys a query sees.
//!
//! The prompt is cut into pages and the pages into 2·R chunks. Chunk c belongs to rank min(c, 2R − 1 − c), so that
//! causal work is even:
//!
//! ```text
//!   chunk   0    1    2    3    4    5      (R = 3)
//!   rank    0    1    2    2    1    0
//!           |----|----|----|----|----|--.|  the last page may be partly filled; '.' is row P−1, a separate piece
//! ```
//!
//! An answer continues the token line. Row t predicts token t + 1, and the last token is no input:
//!
//! ```text
//!   position   … P−2  P−1 | P    P+1  P+2  P+3     prompt | answer of A = 4 tokens
//!   row            …   .  | 0    1    2            A − 1 rows, dealt to ranks evenly and in order
//!   predicts           a0 | a1   a2   a3
//! ```
//!
//! The first (pages mod 2R) chunks have one page more, so no rank owns more than ceil(pages / R) pages. A short prompt
//! leaves ranks without pages. Only this module knows these rules.

mod positions;
mod tiles;

use crate::runtime::units::{PageIndex, Pages, Position, Rank, Tokens, as_dim};

pub use positions::Positions;
pub use tiles::{Tile, TileSizes, tiles};

/// Consecutive positions on one rank.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Piece {
    /// The rank that computes and stores them.
    pub rank: Rank,
    /// The first position.
    pub start: Position,
    /// The position after the last.
    pub stop: Position,
}

impl Piece {
    /// Number of positions.
    #[must_use]
    pub fn rows(&self) -> Tokens {
        self.stop.since(self.start)
    }
}

/// Consecutive whole pages on one rank; the last page of the prompt may be partly filled.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Run {
    /// The rank that owns them.
    pub rank: Rank,
    /// The first page.
    pub first: PageIndex,
    /// Number of pages.
    pub pages: Pages,
    /// The first position.
    pub start: Position,
    /// The position after the last filled one.
    pub stop: Position,
}

impl Run {
    /// Number of filled positions.
    #[must_use]
    pub fn rows(&self) -> Tokens {
        self.stop.since(self.start)
    }
}

/// The pieces of a stretch of positions on all ranks of a context-parallel group, in position order. Several answers can be
/// packed into one span, one sequence after another: all continue the prompt, and none sees another.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Span {
    pieces: Vec<Piece>,
    /// Where the pieces of the second and of every further sequence begin.
    breaks: Vec<usize>,
    ranks: usize,
}

impl Span {
    /// Several spans as the sequences of one.
    ///
    /// # Panics
    /// When a span has no rows on any rank, or is of another number of ranks: it would not be seen as a sequence.
    #[must_use]
    pub fn packed(spans: &[&Span]) -> Span {
        let [first, ..] = spans else { panic!("a packed span has a sequence") };
        let (mut pieces, mut breaks) = (Vec::new(), Vec::new());
        for span in spans {
            assert!(span.ranks == first.ranks && !span.is_empty(), "a sequence has rows on ranks of the same group");
            if !pieces.is_empty() {
                breaks.push(pieces.len());
            }
            breaks.extend(span.breaks.iter().map(|at| at + pieces.len()));
            pieces.extend_from_slice(&span.pieces);
        }
        Span { pieces, breaks, ranks: first.ranks }
    }

    /// Whether it has more than one sequence.
    #[must_use]
    pub fn is_packed(&self) -> bool {
        !self.breaks.is_empty()
    }

    /// Each sequence as a span of its own.
    pub fn sequences(&self) -> impl Iterator<Item = Span> {
        let starts = std::iter::once(0).chain(self.breaks.iter().copied());
        let stops = self.breaks.iter().copied().chain([self.pieces.len()]);
        starts.zip(stops).map(|(start, stop)| Span {
            pieces: self.pieces[start..stop].to_vec(),
            breaks: Vec::new(),
            ranks: self.ranks,
        })
    }

    /// The pieces of `rank`, sequence after sequence, each in position order.
    pub fn of(&self, rank: Rank) -> impl Iterator<Item = &Piece> + Clone {
        self.pieces.iter().filter(move |piece| piece.rank == rank)
    }

    /// The pieces of `rank`, those that stand next to each other as one, but for what begins at `apart`. The span has one
    /// sequence.
    #[must_use]
    pub fn joined(&self, rank: Rank, apart: Position) -> Vec<Piece> {
        let mut joined: Vec<Piece> = Vec::new();
        for piece in self.of(rank) {
            match joined.last_mut() {
                Some(before) if before.stop == piece.start && piece.start != apart => before.stop = piece.stop,
                _ => joined.push(*piece),
            }
        }
        joined
    }

    /// All pieces in position order.
    pub fn in_order(&self) -> impl Iterator<Item = &Piece> {
        self.pieces.iter()
    }

    /// All pieces in rank order, each rank's as [`Span::of`] gives them: the order in which rows are gathered.
    pub fn gathered(&self) -> impl Iterator<Item = &Piece> {
        (0..self.ranks).flat_map(|rank| self.of(Rank(rank)))
    }

    /// The number of the sequence of each piece of [`Span::of`].
    pub fn sequences_of(&self, rank: Rank) -> impl Iterator<Item = usize> {
        let number = |at: usize| self.breaks.partition_point(|&start| start <= at);
        let own = self.pieces.iter().enumerate().filter(move |(_, piece)| piece.rank == rank);
        own.map(move |(at, _)| number(at))
    }

    /// The number of the sequence of each piece of [`Span::gathered`].
    pub fn gathered_sequences(&self) -> impl Iterator<Item = usize> {
        (0..self.ranks).flat_map(|rank| self.sequences_of(Rank(rank)))
    }

    /// Number of rows of each rank.
    #[must_use]
    pub fn counts(&self) -> Vec<Tokens> {
        (0..self.ranks).map(|rank| self.of(Rank(rank)).map(Piece::rows).sum()).collect()
    }

    /// Number of rows on all ranks.
    #[must_use]
    pub fn rows(&self) -> Tokens {
        self.pieces.iter().map(Piece::rows).sum()
    }

    /// Whether no rank has a row.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }
}

/// How the pages and rows of one prompt are dealt to the ranks of a context-parallel group.
#[derive(Clone, Debug)]
pub struct PromptLayout {
    prompt: Tokens,
    page_size: Tokens,
    ranks: usize,
    cut: Position,
    chunks: Vec<Run>,
}

impl PromptLayout {
    /// Deals `prompt` positions in pages of `page_size` to `ranks`; the last `tail` positions carry gradient.
    ///
    /// # Panics
    /// When a size is 0 or the tail is longer than the prompt; the configuration refuses both.
    #[must_use]
    pub fn new(prompt: Tokens, page_size: Tokens, ranks: usize, tail: Tokens) -> Self {
        assert!(prompt.0 > 0 && page_size.0 > 0 && ranks > 0, "a prompt, a page and a group of ranks are not empty");
        assert!(tail <= prompt, "the tail is part of the prompt");
        let chunk_count = 2 * ranks as u64;
        let pages = prompt.pages(page_size).0;
        let (small, extra) = (pages / chunk_count, pages % chunk_count);
        let mut first = 0;
        let mut chunks = Vec::new();
        for chunk in 0..chunk_count {
            let held = small + u64::from(chunk < extra);
            let rank = Rank(crate::runtime::units::as_index(chunk.min(chunk_count - 1 - chunk)));
            chunks.push(Run {
                rank,
                first: PageIndex(first),
                pages: Pages(held),
                start: Position((first * page_size.0).min(prompt.0)),
                stop: Position(((first + held) * page_size.0).min(prompt.0)),
            });
            first += held;
        }
        PromptLayout { prompt, page_size, ranks, cut: Position(prompt.0 - tail.0), chunks }
    }

    /// Number of positions of the prompt.
    #[must_use]
    pub fn prompt(&self) -> Tokens {
        self.prompt
    }

    /// Positions in a page.
    #[must_use]
    pub fn page_size(&self) -> Tokens {
        self.page_size
    }

    /// The first position that carries gradient; the prompt's end if none does.
    #[must_use]
    pub fn cut(&self) -> Position {
        self.cut
    }

    /// The position after the prompt, where every answer starts.
    #[must_use]
    pub fn end(&self) -> Position {
        Position(self.prompt.0)
    }

    /// Both chunks of `rank` in position order, also if empty; they travel the ring together.
    #[must_use]
    pub fn chunks_of(&self, rank: Rank) -> [Run; 2] {
        [self.chunks[rank.0], self.chunks[2 * self.ranks - 1 - rank.0]]
    }

    /// Number of pages that `rank` owns.
    #[must_use]
    pub fn pages_of(&self, rank: Rank) -> Pages {
        self.chunks_of(rank).iter().map(|run| run.pages).sum()
    }

    /// Every row of the prompt, cut at the ends of chunks, at the tail's start and before row P−1.
    #[must_use]
    pub fn span(&self) -> Span {
        self.pieces(Position(0))
    }

    /// The tail: the rows that carry gradient.
    #[must_use]
    pub fn tail(&self) -> Span {
        self.pieces(self.cut)
    }

    fn pieces(&self, from: Position) -> Span {
        let last = Position(self.prompt.0 - 1);
        let pieces = self
            .chunks
            .iter()
            .flat_map(|run| {
                let mut edges = [run.start, self.cut, last, run.stop];
                edges = edges.map(|edge| edge.clamp(run.start, run.stop));
                edges.sort_unstable();
                let pair = |i: usize| Piece { rank: run.rank, start: edges[i], stop: edges[i + 1] };
                [pair(0), pair(1), pair(2)]
            })
            .filter(|piece| piece.start < piece.stop && piece.start >= from)
            .collect();
        Span { pieces, breaks: Vec::new(), ranks: self.ranks }
    }

    /// The rank that owns row P−1, which predicts every answer's first token.
    #[must_use]
    pub fn last_row_owner(&self) -> Rank {
        let last = Position(self.prompt.0 - 1);
        let holds = |run: &&Run| run.start <= last && last < run.stop;
        self.chunks.iter().find(holds).map_or(Rank(0), |run| run.rank)
    }

    /// Number of rows of each rank if only row P−1 counts: 1 on its owner, 0 elsewhere.
    #[must_use]
    pub fn last_row_counts(&self) -> Vec<Tokens> {
        let owner = self.last_row_owner();
        (0..self.ranks).map(|rank| Tokens(u64::from(Rank(rank) == owner))).collect()
    }

    /// The rows of an answer of `length` tokens, dealt evenly and in order. The last token is no input, so an answer of
    /// one token has no row; a short answer leaves ranks without rows.
    #[must_use]
    pub fn answer(&self, length: Tokens) -> Span {
        let rows = length.0.saturating_sub(1);
        let edge = |rank: u64| Position(self.prompt.0 + rows * rank / self.ranks as u64);
        let pieces = (0..self.ranks as u64)
            .map(|rank| Piece {
                rank: Rank(crate::runtime::units::as_index(rank)),
                start: edge(rank),
                stop: edge(rank + 1),
            })
            .filter(|piece| piece.start < piece.stop)
            .collect();
        Span { pieces, breaks: Vec::new(), ranks: self.ranks }
    }

    /// Indices of the answer's tokens that a piece of its rows predicts. Labels are shifted here, before rows are dealt
    /// to ranks, so no label is lost between two ranks.
    #[must_use]
    pub fn labels(&self, piece: &Piece) -> std::ops::Range<usize> {
        let first = piece.start.since(self.end()).index() + 1;
        first..first + piece.rows().index()
    }

    /// Indices of the answer's tokens that are the inputs of a piece of its rows.
    #[must_use]
    pub fn inputs(&self, piece: &Piece) -> std::ops::Range<usize> {
        let first = piece.start.since(self.end()).index();
        first..first + piece.rows().index()
    }
}

/// A piece's positions as a half-open range of tensor indices.
#[must_use]
pub fn positions(piece: &Piece) -> std::ops::Range<i64> {
    as_dim(piece.start.0)..as_dim(piece.stop.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(prompt: u64, page: u64, ranks: usize, tail: u64) -> PromptLayout {
        PromptLayout::new(Tokens(prompt), Tokens(page), ranks, Tokens(tail))
    }

    #[test]
    fn the_users_prompt_is_4080_pages_a_rank() {
        let layout = layout(2_088_960, 64, 8, 1);
        assert!((0..8).all(|rank| layout.pages_of(Rank(rank)) == Pages(4080)));
        assert_eq!(layout.last_row_owner(), Rank(0));
    }

    #[test]
    fn every_position_lies_in_exactly_one_piece_and_counts_differ_by_at_most_one_page() {
        for prompt in [1, 2, 63, 64, 65, 96, 129, 449, 1000] {
            for page in [1, 3, 7, 64] {
                for ranks in [1, 2, 3, 4, 8] {
                    for tail in [0, 1, 2, 64, prompt] {
                        let layout = layout(prompt, page, ranks, tail.min(prompt));
                        let span = layout.span();
                        let mut next = Position(0);
                        for piece in &span.pieces {
                            assert_eq!(piece.start, next);
                            next = piece.stop;
                        }
                        assert_eq!(next, Position(prompt));
                        assert_eq!(layout.tail().rows(), Tokens(tail.min(prompt)));
                        assert!(span.pieces.iter().any(|piece| piece.rows() == Tokens(1) && piece.stop == next));
                        let pages: Vec<_> = (0..ranks).map(|rank| layout.pages_of(Rank(rank)).0).collect();
                        let most = prompt.div_ceil(page).div_ceil(ranks as u64);
                        assert!(pages.iter().all(|&held| held <= most && held + 1 >= most), "{pages:?} of {most}");
                    }
                }
            }
        }
    }

    #[test]
    fn joined_pieces_end_at_chunks_and_at_the_tails_start_alone() {
        for (prompt, page, ranks) in [(1, 3, 1), (96, 7, 1), (449, 64, 3), (1000, 7, 8)] {
            for tail in [0, 1, 2, 64, prompt].map(|tail: u64| tail.min(prompt)) {
                let layout = layout(prompt, page, ranks, tail);
                for (span, rank) in [layout.span(), layout.tail()]
                    .iter()
                    .flat_map(|span| (0..ranks).map(move |rank| (span, Rank(rank))))
                {
                    let joined = span.joined(rank, layout.cut());
                    let of = |pieces: &[Piece]| -> Vec<u64> {
                        pieces.iter().flat_map(|piece| piece.start.0..piece.stop.0).collect()
                    };
                    assert_eq!(of(&joined), of(&span.of(rank).copied().collect::<Vec<_>>()));
                    assert!(joined.iter().all(|piece| piece.stop <= layout.cut() || piece.start >= layout.cut()));
                    let [early, late] = layout.chunks_of(rank);
                    // On one rank the two chunks stand next to each other.
                    let chunks = if early.stop == late.start { 1 } else { 2 };
                    assert!(joined.len() <= chunks + 1, "{joined:?}");
                }
            }
        }
    }

    #[test]
    fn a_short_prompt_leaves_ranks_without_pages() {
        let layout = layout(96, 64, 8, 1);
        let pages: Vec<_> = (0..8).map(|rank| layout.pages_of(Rank(rank)).0).collect();
        assert_eq!(pages, [1, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(layout.last_row_owner(), Rank(1));
    }

    #[test]
    fn labels_are_shifted_before_rows_are_spread() {
        let layout = layout(63, 64, 3, 1);
        let span = layout.answer(Tokens(6));
        let labels: Vec<_> = span.gathered().map(|piece| layout.labels(piece)).collect();
        assert_eq!(labels, [1..2, 2..4, 4..6]);
        let inputs: Vec<_> = span.gathered().map(|piece| layout.inputs(piece)).collect();
        assert_eq!(inputs, [0..1, 1..3, 3..5]);
    }

    #[test]
    fn an_answer_of_one_token_has_no_row_and_a_short_one_spares_ranks() {
        let layout = layout(64, 64, 8, 1);
        assert!(layout.answer(Tokens(1)).is_empty());
        let counts = layout.answer(Tokens(4)).counts();
        assert_eq!(counts.iter().map(|rows| rows.0).sum::<u64>(), 3);
        assert!(counts.iter().filter(|rows| rows.0 == 0).count() == 5);
    }

    /// Answers with rows; the shorter ones have none on some ranks.
    fn answers(ranks: usize) -> Vec<Span> {
        let layout = layout(64, 64, ranks, 1);
        [4, 2, 9, 3, 2].into_iter().map(|length| layout.answer(Tokens(length))).collect()
    }

    #[test]
    fn pieces_of_a_packed_span_are_numbered_by_the_sequence_that_they_come_from() {
        for ranks in [1, 2, 3, 8] {
            let alone = answers(ranks);
            let span = Span::packed(&alone.iter().collect::<Vec<_>>());
            assert_eq!(span.sequences().collect::<Vec<_>>(), alone, "{ranks} ranks");
            let of = |rank: Rank| -> Vec<(Piece, usize)> {
                alone
                    .iter()
                    .zip(0..)
                    .flat_map(|(one, number)| one.of(rank).map(move |piece| (*piece, number)))
                    .collect()
            };
            for rank in (0..ranks).map(Rank) {
                let numbered: Vec<(Piece, usize)> = span.of(rank).copied().zip(span.sequences_of(rank)).collect();
                assert_eq!(numbered, of(rank), "{rank:?} of {ranks}");
            }
            let gathered: Vec<(Piece, usize)> = span.gathered().copied().zip(span.gathered_sequences()).collect();
            assert_eq!(gathered, (0..ranks).map(Rank).flat_map(of).collect::<Vec<_>>(), "{ranks} ranks");
        }
    }

    #[test]
    fn packed_spans_that_are_packed_again_keep_every_sequence() {
        for ranks in [1, 2, 3, 8] {
            let alone = answers(ranks);
            let [a, b, c, d, e] = &alone[..] else { panic!("five answers") };
            let again = Span::packed(&[&Span::packed(&[a, b]), c, &Span::packed(&[d, e])]);
            assert_eq!(again, Span::packed(&[a, b, c, d, e]), "{ranks} ranks");
            assert_eq!(Span::packed(&[c]), *c, "one sequence is not packed");
        }
    }
}
