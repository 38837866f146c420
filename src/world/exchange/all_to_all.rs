//! Rows from every rank of an axis to every other, in uneven numbers.

use tch::Tensor;

use super::{direct, incoming, outgoing, row_bytes};
use crate::runtime::units::{Rank, Tokens};
use crate::tensor::link::{Link, Message};
use crate::tensor::views;
use crate::world::Axis;

/// How many rows each rank sends to each other; the same on every rank.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Traffic {
    /// Those of rank `from` for rank `to` are `rows[from][to]`.
    rows: Vec<Vec<Tokens>>,
}

impl Traffic {
    /// Rank `from` sends `rows[from][to]` rows to rank `to`.
    ///
    /// # Panics
    /// When the table is not square.
    #[must_use]
    pub fn new(rows: Vec<Vec<Tokens>>) -> Traffic {
        assert!(rows.iter().all(|row| row.len() == rows.len()), "as many receivers as senders");
        Traffic { rows }
    }

    /// The way back: who has received now sends.
    #[must_use]
    pub fn back(&self) -> Traffic {
        let ranks = 0..self.rows.len();
        Traffic { rows: ranks.map(|from| self.rows.iter().map(|row| row[from]).collect()).collect() }
    }

    /// Rows that `rank` sends to each rank.
    #[must_use]
    pub fn sent_by(&self, rank: Rank) -> Vec<Tokens> {
        self.rows[rank.0].clone()
    }

    /// Rows that `rank` receives from each rank.
    #[must_use]
    pub fn received_by(&self, rank: Rank) -> Vec<Tokens> {
        self.rows.iter().map(|row| row[rank.0]).collect()
    }

    /// Most rows that one rank sends to another.
    fn most(&self) -> Tokens {
        let travelling =
            self.rows.iter().enumerate().flat_map(|(from, row)| {
                row.iter().enumerate().filter(move |(to, _)| *to != from).map(|(_, &rows)| rows)
            });
        travelling.max().unwrap_or(Tokens(0))
    }
}

/// Sends consecutive rows of `x` to the ranks in rank order, as many as `traffic` says, and returns what arrives in the order
/// of the senders. Rows that stay on their rank do not travel.
///
/// # Panics
/// When `x` has not as many rows as this rank sends.
pub fn send_rows(axis: &Axis, x: &Tensor, traffic: &Traffic) -> Tensor {
    let x = x.detach().contiguous();
    let (send, receive) = (traffic.sent_by(axis.rank()), traffic.received_by(axis.rank()));
    assert_eq!(x.size().first(), Some(&total(&send)), "this rank sends what it announced");
    if axis.size() == 1 {
        return x;
    }
    match direct::transport(axis, x.device()) {
        Some(link) => send_direct(link, axis, &x, &send, &receive),
        None => send_by_host(axis, &x, &send, &receive, traffic.most()),
    }
}

fn total(rows: &[Tokens]) -> i64 {
    rows.iter().map(|rows| rows.dim()).sum()
}

/// [`send_rows`] from GPU to GPU.
fn send_direct(link: &Link, axis: &Axis, x: &Tensor, send: &[Tokens], receive: &[Tokens]) -> Tensor {
    let arrived = Tensor::empty(direct::resized(x, receive.iter().map(|rows| rows.0).sum()), (x.kind(), x.device()));
    let messages = |whole: &Tensor, rows: &[Tokens]| -> Vec<Message> {
        let peers = direct::others(axis, rows).into_iter();
        peers.map(|(peer, first, rows)| Message { tensor: whole.narrow(0, first, rows), peer }).collect()
    };
    let done = direct::exchange(axis, link, messages(x, send), messages(&arrived, receive));
    let me = axis.rank().0;
    let stays = x.narrow(0, total(&send[..me]), send[me].dim());
    arrived.narrow(0, total(&receive[..me]), receive[me].dim()).copy_(&stays);
    direct::wait(&done);
    arrived
}

/// [`send_rows`] through host memory; `most` is the most rows of one message.
fn send_by_host(axis: &Axis, x: &Tensor, send: &[Tokens], receive: &[Tokens], most: Tokens) -> Tensor {
    let me = axis.rank().0;
    let row = row_bytes(x);
    let (before, own) = (total(&send[..me]), send[me].dim());
    let after = x.size()[0] - before - own;
    let leaving = outgoing(&Tensor::cat(&[x.narrow(0, 0, before), x.narrow(0, before + own, after)], 0));
    let bytes = |rows: &[Tokens]| -> Vec<usize> {
        rows.iter().enumerate().map(|(rank, rows)| if rank == me { 0 } else { rows.index() * row }).collect()
    };
    let received = axis.all_to_all(views::view(&leaving), &bytes(send), &bytes(receive), most.index() * row);
    let rows = |rows: &[Tokens]| rows.iter().map(|rows| rows.0).sum::<u64>();
    let first = rows(&receive[..me]);
    let (from_lower, from_higher) = received.split_at(Tokens(first).index() * row);
    let lower = incoming(from_lower, first, x);
    let higher = incoming(from_higher, rows(&receive[me + 1..]), x);
    Tensor::cat(&[lower, x.narrow(0, before, own), higher], 0)
}
