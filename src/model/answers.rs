//! State of answers that are being drawn, in one layer on one rank.
//!
//! Row j of every answer stands at position prompt + j and lies on rank j mod R, so that memory and reading are shared
//! evenly however long answers become:
//!
//! ```text
//!   row     0  1  2  3  4  5  6      (R = 3)
//!   rank    0  1  2  0  1  2  0
//! ```

use tch::{Device, Tensor};

use crate::prompt::pages::PlaneRow;
use crate::runtime::memory::{Held, Ledger, MemorySpace, Purpose};
use crate::runtime::units::{Position, Rank, Tokens, as_dim, from_dim, from_index};
use crate::tensor::boundary::storage_bytes;

/// Rows that are made room for at first.
const ROOM: i64 = 64;

/// One layer's rows of all answers on this rank.
#[derive(Debug)]
pub struct AnswerState {
    /// One tensor a plane, [answers, room, …].
    planes: Vec<Tensor>,
    /// Rows that are filled.
    rows: i64,
    /// Rows that this rank will hold at the most.
    rows_max: i64,
    /// Rows of all ranks.
    length: u64,
    prompt: Position,
    cp_group: (u64, u64),
    ledger: Ledger,
    held: Held,
}

impl AnswerState {
    /// No rows yet of `answers` answers behind a prompt that ends at `prompt`, of at most `longest` rows each.
    #[must_use]
    pub fn new(
        answers: usize,
        planes: &[PlaneRow],
        (prompt, longest): (Position, Tokens),
        (rank, ranks): (Rank, usize),
        device: Device,
        ledger: &Ledger,
    ) -> AnswerState {
        let cp_group = (from_index(rank.0), from_index(ranks));
        let rows_max = as_dim(longest.0.div_ceil(cp_group.1));
        let room = ROOM.min(rows_max);
        let planes = planes.iter().map(|plane| {
            let shape: Vec<i64> =
                [as_dim(from_index(answers)), room].into_iter().chain(plane.shape.iter().copied()).collect();
            Tensor::zeros(shape, (plane.kind, device))
        });
        let planes: Vec<Tensor> = planes.collect();
        let held = held(ledger, &planes);
        AnswerState { planes, rows: 0, rows_max, length: 0, prompt, cp_group, ledger: ledger.clone(), held }
    }

    /// The next row of every answer, one tensor a plane, [answers, …]; kept where it belongs.
    pub fn push(&mut self, rows: &[Tensor]) {
        let here = self.length % self.cp_group.1 == self.cp_group.0;
        self.length += 1;
        if !here {
            return;
        }
        let room = self.planes[0].size()[1];
        if self.rows == room {
            self.grow((2 * room).min(self.rows_max.max(room + 1)));
        }
        for (plane, row) in self.planes.iter().zip(rows) {
            plane.select(1, self.rows).copy_(row);
        }
        self.rows += 1;
    }

    /// Goes on with some of the answers.
    pub fn keep(&mut self, answers: &Tensor) {
        for plane in &mut self.planes {
            *plane = plane.index_select(0, answers);
        }
        self.held = held(&self.ledger, &self.planes);
    }

    /// This rank's rows that the newest row sees through a window of so many positions, itself included; one tensor a plane,
    /// [answers, rows, …]. `None` sees all.
    #[must_use]
    pub fn seen(&self, window: Option<i64>) -> Vec<Tensor> {
        let first = window.map_or(0, |window| {
            // Row j is seen where length - 1 - j < window; this rank's i-th row is j = rank + i * ranks.
            let least = self.length.saturating_sub(from_dim(window));
            as_dim(least.saturating_sub(self.cp_group.0).div_ceil(self.cp_group.1)).min(self.rows)
        });
        self.planes.iter().map(|plane| plane.narrow(1, first, self.rows - first)).collect()
    }

    /// Where the newest row stands.
    #[must_use]
    pub fn newest(&self) -> Position {
        self.prompt.plus(Tokens(self.length.saturating_sub(1)))
    }

    fn grow(&mut self, room: i64) {
        for plane in &mut self.planes {
            let mut shape = plane.size();
            shape[1] = room;
            let wider = Tensor::zeros(shape, (plane.kind(), plane.device()));
            wider.narrow(1, 0, self.rows).copy_(&plane.narrow(1, 0, self.rows));
            *plane = wider;
        }
        self.held = held(&self.ledger, &self.planes);
    }
}

fn held(ledger: &Ledger, planes: &[Tensor]) -> Held {
    ledger.hold(Purpose::Answers, MemorySpace::Device, planes.iter().map(storage_bytes).sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Kind;

    fn rows_of(rank: usize, ranks: usize, pushed: i64, window: Option<i64>) -> Vec<i64> {
        let planes = [PlaneRow { shape: vec![1], kind: Kind::Float }];
        let ends = (Position(10), Tokens(200));
        let mut state = AnswerState::new(2, &planes, ends, (Rank(rank), ranks), Device::Cpu, &Ledger::default());
        for row in 0..pushed {
            state.push(&[Tensor::full([2, 1], row, (Kind::Float, Device::Cpu))]);
        }
        assert_eq!(state.newest(), Position(9 + from_dim(pushed)));
        Vec::<i64>::try_from(state.seen(window)[0].select(0, 1).select(1, 0).to_kind(Kind::Int64)).unwrap()
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
        let planes = [PlaneRow { shape: vec![1], kind: Kind::Float }];
        let ends = (Position(0), Tokens(5));
        let mut state = AnswerState::new(3, &planes, ends, (Rank(0), 1), Device::Cpu, &Ledger::default());
        state.push(&[Tensor::from_slice(&[0.0f32, 1.0, 2.0]).view([3, 1])]);
        state.keep(&Tensor::from_slice(&[0i64, 2]));
        assert_eq!(Vec::<f32>::try_from(state.seen(None)[0].flatten(0, -1)).unwrap(), [0.0, 2.0]);
    }
}
