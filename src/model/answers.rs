//! State of answers that are being sampled, in one layer on one rank.
//!
//! Row j of every answer stands at position prompt + j. Rank j mod R holds it, so ranks share memory and reading evenly at
//! every length:
//!
//! ```text
//!   row     0  1  2  3  4  5  6      (R = 3)
//!   rank    0  1  2  0  1  2  0
//! ```

use tch::{Device, Tensor};

use super::planes::Planes;
use crate::prompt::pages::PlaneRow;
use crate::runtime::memory::{Held, Ledger, MemorySpace, Purpose};
use crate::runtime::units::{Position, Rank, Tokens, as_dim, from_dim, from_index};
use crate::tensor::boundary::storage_bytes;

/// Rows that memory is taken for at first.
const ROWS_MIN: i64 = 64;

/// Which answers' rows a rank holds.
#[derive(Clone, Copy, Debug)]
pub struct AnswerRows {
    /// How many answers.
    pub answers: usize,
    /// Where row 0 of every answer stands.
    pub prompt_end: Position,
    /// Most rows of an answer.
    pub rows_max: Tokens,
    /// This rank among those that share the prompt.
    pub rank: Rank,
    /// How many ranks share it.
    pub ranks: usize,
}

/// One layer's rows of all answers on this rank.
#[derive(Debug)]
pub struct AnswerState {
    /// [answers, room, …] each; rows beyond `rows` are zeros.
    planes: Vec<Tensor>,
    /// State after the newest row that stands at a border, [answers, …] each; empty until the first row, and where rows
    /// are left instead.
    carried: Vec<Tensor>,
    /// Filled rows on this rank.
    rows: i64,
    /// Most rows on this rank.
    rows_max: i64,
    /// Filled rows on all ranks.
    rows_global: u64,
    prompt_end: Position,
    rank: u64,
    ranks: u64,
    ledger: Ledger,
    held: Held,
}

impl AnswerState {
    /// State without rows. `planes` are the mixer's state planes.
    #[must_use]
    pub fn new(place: &AnswerRows, planes: &[PlaneRow], device: Device, ledger: &Ledger) -> AnswerState {
        let ranks = from_index(place.ranks);
        let rows_max = as_dim(place.rows_max.0.div_ceil(ranks));
        let room = ROWS_MIN.min(rows_max);
        let planes = planes.iter().map(|plane| {
            let shape = [as_dim(from_index(place.answers)), room].into_iter().chain(plane.shape.iter().copied());
            Tensor::zeros(shape.collect::<Vec<i64>>(), (plane.kind, device))
        });
        let planes: Vec<Tensor> = planes.collect();
        let held = held(ledger, &planes);
        AnswerState {
            planes,
            carried: Vec::new(),
            rows: 0,
            rows_max,
            rows_global: 0,
            prompt_end: place.prompt_end,
            rank: from_index(place.rank.0),
            ranks,
            ledger: ledger.clone(),
            held,
        }
    }

    /// Adds the next row of every answer, [answers, …] each; only the rank that owns the row keeps it.
    pub fn push(&mut self, row: &Planes) {
        let here = self.rows_global % self.ranks == self.rank;
        self.rows_global += 1;
        if !here || self.planes.is_empty() {
            return;
        }
        let room = self.planes[0].size()[1];
        if self.rows == room {
            self.grow((2 * room).min(self.rows_max.max(room + 1)));
        }
        for (plane, row) in self.planes.iter().zip(row.tensors()) {
            plane.select(1, self.rows).copy_(row);
        }
        self.rows += 1;
    }

    /// Keeps some of the answers, by their index.
    pub fn keep(&mut self, answers: &Tensor) {
        for plane in self.planes.iter_mut().chain(&mut self.carried) {
            *plane = plane.index_select(0, answers);
        }
        self.hold();
    }

    /// State after the newest row that stands at a border, [answers, …] each; none before the first row.
    pub fn carried(&self) -> &[Tensor] {
        &self.carried
    }

    /// Puts the state after the newest row in the place of the one before it.
    pub fn carry(&mut self, state: impl Into<Vec<Tensor>>) {
        let first = self.carried.is_empty();
        self.carried = state.into();
        if first {
            self.hold();
        }
    }

    fn hold(&mut self) {
        let planes: Vec<Tensor> = self.planes.iter().chain(&self.carried).map(Tensor::shallow_clone).collect();
        self.held = held(&self.ledger, &planes);
    }

    /// This rank's rows that the newest row sees through a window of `window` positions, itself included, [answers, rows, …]
    /// each; a view. Without a window all rows.
    #[must_use]
    pub fn visible(&self, window: Option<i64>) -> Planes {
        let first = window.map_or(0, |window| {
            // Row j is visible where rows_global - 1 - j < window; this rank's i-th row is j = rank + i * ranks.
            let least = self.rows_global.saturating_sub(from_dim(window));
            as_dim(least.saturating_sub(self.rank).div_ceil(self.ranks)).min(self.rows)
        });
        let rows: Vec<Tensor> = self.planes.iter().map(|plane| plane.narrow(1, first, self.rows - first)).collect();
        rows.into()
    }

    /// Position of this rank's first row, and from each of its rows to the next.
    #[must_use]
    pub fn dealt(&self) -> (i64, i64) {
        (as_dim(self.prompt_end.0 + self.rank), as_dim(self.ranks))
    }

    /// Position of the newest row.
    #[must_use]
    pub fn newest(&self) -> Position {
        self.prompt_end.plus(Tokens(self.rows_global.saturating_sub(1)))
    }

    fn grow(&mut self, room: i64) {
        for plane in &mut self.planes {
            let mut shape = plane.size();
            shape[1] = room;
            let wider = Tensor::zeros(shape, (plane.kind(), plane.device()));
            wider.narrow(1, 0, self.rows).copy_(&plane.narrow(1, 0, self.rows));
            *plane = wider;
        }
        self.hold();
    }
}

fn held(ledger: &Ledger, planes: &[Tensor]) -> Held {
    ledger.hold(Purpose::Answers, MemorySpace::Device, planes.iter().map(storage_bytes).sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Kind;

    fn one_number() -> [PlaneRow; 1] {
        [PlaneRow { shape: vec![1], kind: Kind::Float }]
    }

    fn rows_of(rank: usize, ranks: usize, pushed: i64, window: Option<i64>) -> Vec<i64> {
        let place = AnswerRows { answers: 2, prompt_end: Position(10), rows_max: Tokens(200), rank: Rank(rank), ranks };
        let mut state = AnswerState::new(&place, &one_number(), Device::Cpu, &Ledger::default());
        for row in 0..pushed {
            state.push(&vec![Tensor::full([2, 1], row, (Kind::Float, Device::Cpu))].into());
        }
        assert_eq!(state.newest(), Position(9 + from_dim(pushed)));
        Vec::<i64>::try_from(state.visible(window).tensors()[0].select(0, 1).select(1, 0).to_kind(Kind::Int64)).unwrap()
    }

    #[test]
    fn rows_are_dealt_to_ranks_in_turn_and_none_is_lost_when_room_grows() {
        for ranks in [1, 2, 3, 8] {
            let mut all: Vec<i64> = (0..ranks).flat_map(|rank| rows_of(rank, ranks, 150, None)).collect();
            all.sort_unstable();
            assert_eq!(all, (0..150).collect::<Vec<i64>>(), "{ranks} ranks");
        }
        assert_eq!(rows_of(1, 3, 7, None), [1, 4]);
    }

    #[test]
    fn a_window_shows_the_newest_rows_whatever_rank_they_lie_on() {
        for ranks in [1, 2, 3, 8] {
            for window in [1, 2, 5, 149, 150, 400] {
                let mut all: Vec<i64> = (0..ranks).flat_map(|rank| rows_of(rank, ranks, 150, Some(window))).collect();
                all.sort_unstable();
                assert_eq!(all, ((150 - window).max(0)..150).collect::<Vec<i64>>(), "{ranks} ranks, window {window}");
            }
        }
    }

    #[test]
    fn answers_that_have_ended_leave_and_the_others_stay() {
        let place = AnswerRows { answers: 3, prompt_end: Position(0), rows_max: Tokens(5), rank: Rank(0), ranks: 1 };
        let mut state = AnswerState::new(&place, &one_number(), Device::Cpu, &Ledger::default());
        state.push(&vec![Tensor::from_slice(&[0.0f32, 1.0, 2.0]).view([3, 1])].into());
        state.keep(&Tensor::from_slice(&[0i64, 2]));
        assert_eq!(Vec::<f32>::try_from(state.visible(None).tensors()[0].flatten(0, -1)).unwrap(), [0.0, 2.0]);
    }
}
