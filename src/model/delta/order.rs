//! The pieces of a span in the order of positions, and what crosses from one to the next.

use tch::Tensor;

use crate::prompt::layout::{Piece, Span};
use crate::runtime::units::{Position, Rank, Tokens, as_dim, from_index};
use crate::tensor::accumulation;
use crate::world::Axis;
use crate::world::exchange::gather_rows;

/// The pieces of all ranks in order of position: each begins where the one before it ends.
#[derive(Debug)]
pub(super) struct Order {
    pieces: Vec<Piece>,
    rank: Rank,
    /// Index of each piece among those that are gathered, rank by rank.
    gathered: Vec<i64>,
    ranks: usize,
}

impl Order {
    pub(super) fn new(span: &Span, rank: Rank) -> Order {
        assert!(!span.is_packed(), "a state goes through one sequence");
        let pieces: Vec<Piece> = span.in_order().copied().collect();
        let ranks = span.counts().len();
        let by_rank: Vec<&Piece> = span.gathered().collect();
        let index = |piece: &Piece| by_rank.iter().take_while(|other| ***other != *piece).count();
        let gathered = pieces.iter().map(|piece| as_dim(from_index(index(piece)))).collect();
        Order { pieces, rank, gathered, ranks }
    }

    /// How many pieces there are on all ranks.
    pub(super) fn count(&self) -> usize {
        self.pieces.len()
    }

    /// Numbers of this rank's pieces.
    pub(super) fn own(&self) -> impl Iterator<Item = usize> + Clone {
        (0..self.pieces.len()).filter(|&piece| self.pieces[piece].rank == self.rank)
    }

    pub(super) fn rows(&self, piece: usize) -> i64 {
        self.pieces[piece].rows().dim()
    }

    /// The first piece that begins at `position` or later.
    pub(super) fn first_from(&self, position: Position) -> usize {
        self.pieces.iter().take_while(|piece| piece.start < position).count()
    }

    /// How many pieces each rank has.
    pub(super) fn pieces_by_rank(&self) -> Vec<Tokens> {
        self.sum_by_rank(|_| 1)
    }

    fn sum_by_rank(&self, of: impl Fn(&Piece) -> u64) -> Vec<Tokens> {
        let sum = |rank| self.pieces.iter().filter(|piece| piece.rank == Rank(rank)).map(&of).sum();
        (0..self.ranks).map(|rank| Tokens(sum(rank))).collect()
    }

    /// One row for each piece, gathered rank by rank, in order of position.
    pub(super) fn in_position_order(&self, gathered: &Tensor) -> Tensor {
        gathered.index_select(0, &Tensor::from_slice(&self.gathered).to_device(gathered.device()))
    }

    /// The last rows before each piece and after the last one, as many as `past_ju` has, which are those before the first.
    /// `u_tu` are this rank's rows. Every rank takes part.
    pub(super) fn before(&self, axis: &Axis, u_tu: &Tensor, past_ju: &Tensor) -> Vec<Tensor> {
        let short = past_ju.size()[0];
        let last_rows = |piece: &Piece| piece.rows().dim().min(short);
        let mut first = 0;
        let mut own = vec![u_tu.narrow(0, 0, 0)];
        for piece in self.own() {
            let (rows, kept) = (self.rows(piece), last_rows(&self.pieces[piece]));
            own.push(u_tu.narrow(0, first + rows - kept, kept));
            first += rows;
        }
        let counts = self.sum_by_rank(|piece| piece.rows().0.min(crate::runtime::units::from_dim(short)));
        let all = gather_rows(axis, &Tensor::cat(&own, 0), &counts);
        let mut starts = vec![0; self.pieces.len()];
        let mut first = 0;
        for (rank, _) in counts.iter().enumerate() {
            for (piece, start) in self.pieces.iter().zip(&mut starts).filter(|(piece, _)| piece.rank == Rank(rank)) {
                *start = first;
                first += last_rows(piece);
            }
        }
        let mut before = vec![past_ju.shallow_clone()];
        for (piece, &start) in self.pieces.iter().zip(&starts) {
            let longer = Tensor::cat(&[&before[before.len() - 1], &all.narrow(0, start, last_rows(piece))], 0);
            before.push(longer.narrow(0, longer.size()[0] - short, short));
        }
        before
    }

    /// The reverse of [`Order::before`]: adds gradients of the rows before pieces to `du_tu`, those of this rank's rows.
    /// `dbefore` are those before this rank's pieces, in the accumulation dtype, `dafter_ju` is that of the rows before the
    /// end of the span, equal on all ranks. Returns the gradient of the rows before the span, on every rank. Every rank takes
    /// part.
    pub(super) fn return_before(
        &self,
        axis: &Axis,
        dbefore: &[Tensor],
        dafter_ju: &Tensor,
        du_tu: &mut Tensor,
    ) -> Tensor {
        let acc = accumulation(du_tu.kind());
        let short = dafter_ju.size()[0];
        let dafter = dafter_ju.to_kind(acc).unsqueeze(0);
        let own = if dbefore.is_empty() { dafter.narrow(0, 0, 0) } else { Tensor::stack(dbefore, 0) };
        let all = self.in_position_order(&gather_rows(axis, &own, &self.pieces_by_rank()));
        let all = Tensor::cat(&[&all, &dafter], 0);
        let end = self.pieces.last().map_or(Position(0), |piece| piece.stop);
        let starts: Vec<i64> =
            self.pieces.iter().map(|piece| piece.start).chain([end]).map(|at| as_dim(at.0)).collect();
        let start = starts[0];
        // Adds to `rows`, which stand from position `first` on, what pieces that begin later have for them.
        let add = |rows: &mut Tensor, first: i64| {
            let count = rows.size()[0];
            for (number, &after) in starts.iter().enumerate().filter(|(_, after)| **after > first) {
                let from = first.max(after - short);
                let to = (first + count).min(after);
                if from < to {
                    let part = all.get(as_dim(from_index(number))).narrow(0, from - (after - short), to - from);
                    let _ = rows.narrow(0, from - first, to - from).g_add_(&part);
                }
            }
        };
        let mut first = 0;
        for piece in self.own() {
            add(&mut du_tu.narrow(0, first, self.rows(piece)), starts[piece]);
            first += self.rows(piece);
        }
        // The rows before the first piece stand before the span.
        let dpast = dafter.get(0).zeros_like();
        for (number, &after) in starts.iter().enumerate() {
            let kept = short - (after - start);
            if kept > 0 {
                let part = all.get(as_dim(from_index(number))).narrow(0, 0, kept);
                let _ = dpast.narrow(0, short - kept, kept).g_add_(&part);
            }
        }
        dpast
    }
}
