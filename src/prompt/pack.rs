//! Answers of a group that go through the layers together. Their rows share every product of a layer; each answer attends to the
//! prompt and to itself alone.

use std::ops::Range;

use tch::Tensor;

use super::handoff::PlacedGroup;
use super::layout::Span;
use crate::runtime::units::{Rank, Tokens};

/// Consecutive answers of a group.
#[derive(Debug)]
pub struct Pack {
    /// Their places in the group.
    pub answers: Range<usize>,
    /// Their rows on all ranks, a sequence for each answer that has any; without rows where none has.
    pub span: Span,
    /// This rank's rows of each answer of the pack.
    rows: Vec<i64>,
    /// Number and rows on this rank of each answer with rows on any rank, in the order of the sequences.
    pub sequences: Vec<(usize, i64)>,
}

impl Pack {
    fn new(group: &PlacedGroup, rank: Rank, answers: Range<usize>) -> Pack {
        let spans = || group.answers[answers.clone()].iter().map(|answer| &answer.span);
        let own = |span: &Span| span.of(rank).map(|piece| piece.rows().dim()).sum();
        let with_rows: Vec<&Span> = spans().filter(|span| !span.is_empty()).collect();
        let span = match &with_rows[..] {
            [] => group.answers[answers.start].span.clone(),
            spans => Span::packed(spans),
        };
        let rows: Vec<i64> = spans().map(own).collect();
        let numbered = answers.clone().zip(spans()).zip(&rows);
        let sequences =
            numbered.filter(|((_, span), _)| !span.is_empty()).map(|((number, _), &rows)| (number, rows)).collect();
        Pack { answers, span, rows, sequences }
    }

    /// Each answer with its own rows of `x`, this rank's rows of all; views.
    pub fn split<'a>(&'a self, x: &'a Tensor) -> impl Iterator<Item = (usize, Tensor)> {
        self.answers.clone().zip(&self.rows).scan(0, |first, (answer, &rows)| {
            let own = x.narrow(0, *first, rows);
            *first += rows;
            Some((answer, own))
        })
    }
}

impl PlacedGroup {
    /// All answers in packs of at most `rows_max` rows on all ranks together. A longer answer is a pack by itself, and so is every
    /// answer where `rows_max` is 0. The packs are the same on every rank; their rows are those of `rank`.
    #[must_use]
    pub fn packs(&self, rank: Rank, rows_max: Tokens) -> Vec<Pack> {
        let mut packs = Vec::new();
        let (mut first, mut rows) = (0, Tokens(0));
        for (index, answer) in self.answers.iter().enumerate() {
            let more = answer.span.rows();
            if index > first && (rows_max == Tokens(0) || Tokens(rows.0 + more.0) > rows_max) {
                packs.push(Pack::new(self, rank, first..index));
                (first, rows) = (index, Tokens(0));
            }
            rows = Tokens(rows.0 + more.0);
        }
        if first < self.answers.len() {
            packs.push(Pack::new(self, rank, first..self.answers.len()));
        }
        packs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::layout::{Piece, PromptLayout};
    use tch::{Device, Kind};

    fn group(lengths: &[i64], ranks: usize) -> PlacedGroup {
        let layout = PromptLayout::new(Tokens(10), Tokens(4), ranks, Tokens(1));
        PlacedGroup::new(layout, (0..10).collect(), lengths.iter().map(|&length| (0..length).collect()).collect())
    }

    #[test]
    fn every_answer_lies_in_one_pack_and_packs_keep_their_size_but_for_a_longer_answer() {
        // Rows are one fewer than tokens: 3, 0, 5, 12, 0, 2.
        let group = group(&[4, 1, 6, 13, 1, 3], 1);
        let answers = |rows_max| -> Vec<Range<usize>> {
            group.packs(Rank(0), Tokens(rows_max)).iter().map(|pack| pack.answers.clone()).collect()
        };
        assert_eq!(answers(0), (0..6).map(|at| at..at + 1).collect::<Vec<_>>());
        assert_eq!(answers(8), [0..3, 3..4, 4..6]);
        assert_eq!(answers(14), [0..3, 3..6]);
        let all = answers(100);
        assert_eq!((all.len(), all.first()), (1, Some(&(0..6))));
    }

    #[test]
    fn the_rows_of_a_pack_are_those_of_its_answers_on_every_rank() {
        for ranks in [1, 2, 3, 8] {
            let group = group(&[4, 1, 6, 2, 9], ranks);
            for rank in (0..ranks).map(Rank) {
                let packs = group.packs(rank, Tokens(100));
                let [pack] = &packs[..] else { panic!("one pack holds them all") };
                let alone = || group.answers.iter().flat_map(|answer| answer.span.of(rank));
                assert_eq!(pack.span.of(rank).collect::<Vec<_>>(), alone().collect::<Vec<_>>());
                let rows: i64 = alone().map(|piece| piece.rows().dim()).sum();
                let x = Tensor::arange(rows, (Kind::Int64, Device::Cpu));
                let parts: Vec<(usize, Tensor)> = pack.split(&x).collect();
                assert_eq!(parts.len(), 5);
                let own = |at: usize| group.answers[at].span.of(rank).map(|piece| piece.rows().dim()).sum::<i64>();
                assert!(parts.iter().all(|(answer, part)| part.size()[0] == own(*answer)), "{ranks} ranks");
                let joined = Tensor::cat(&parts.iter().map(|(_, part)| part).collect::<Vec<_>>(), 0);
                assert!(joined.equal(&x), "no row twice and none left out");
                assert_eq!(pack.sequences.iter().map(|sequence| sequence.0).collect::<Vec<_>>(), [0, 2, 3, 4]);
            }
        }
    }

    #[test]
    fn a_gathered_row_of_a_pack_knows_its_answer() {
        let group = group(&[4, 1, 6, 2], 3);
        let packs = group.packs(Rank(0), Tokens(100));
        let span = &packs[0].span;
        let found: Vec<(Piece, usize)> = span.gathered().copied().zip(span.gathered_sequences()).collect();
        assert_eq!(found.iter().map(|(piece, _)| piece.rows()).sum::<Tokens>(), Tokens(3 + 5 + 1));
        let sequences: Vec<Span> = span.sequences().collect();
        assert_eq!(sequences.len(), 3);
        for (piece, sequence) in found {
            assert!(sequences[sequence].in_order().any(|own| *own == piece), "{piece:?} in {sequence}");
        }
    }
}
