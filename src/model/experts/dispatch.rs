//! Rows to the ranks that hold their experts, and results back.
//!
//! ```text
//!   rank of the row      rows [t]  ─ by expert ─▶ pairs [t · k] ──╮            ╭──▶ sum over k, in the order of the row
//!                                                           rows travel   results travel
//!   rank of the experts                        pairs by sender ──╯─ by expert ─╯──▶ pairs by sender
//! ```

use tch::{Device, Kind, Tensor};

use super::products::Segments;
use super::routed::Routed;
use crate::runtime::units::{Tokens, as_dim, as_index, from_dim};
use crate::tensor::accumulation;
use crate::world::Axis;
use crate::world::exchange::{Traffic, gather_rows, send_rows};

/// Some rows and their experts, sorted: each row once for each of its k experts, a pair.
pub(super) struct Dispatch<'a> {
    group: &'a Axis,
    /// Pair that comes at each place once they are sorted by expert, [t · k] int64; pair p is of row p / k.
    order_p: Tensor,
    /// Place of each pair, [t, k] int64.
    place_tk: Tensor,
    /// How pairs travel; `None` where one rank has all experts.
    route: Option<Route>,
    /// Rows that each expert of this rank has, of all senders.
    pub(super) segments: Segments,
}

/// Who sends how many pairs to whom, and the order in which pairs that have arrived are computed.
struct Route {
    traffic: Traffic,
    /// Arrival that comes at each place once arrivals are sorted by expert, [n] int64.
    order_n: Tensor,
    /// Place of each arrival, [n] int64.
    place_n: Tensor,
}

impl<'a> Dispatch<'a> {
    /// Sorts the pairs of `routed`, and agrees with the group on who sends how many of them: each of its ranks holds as many of
    /// the `experts`, in rank order. Every rank of the group enters.
    pub(super) fn new(group: &'a Axis, routed: &Routed, experts: i64) -> Dispatch<'a> {
        let (expert_p, order_p) = routed.expert_tk.flatten(0, -1).sort_stable(true, 0, false);
        let place_tk = inverse(&order_p).view_as(&routed.expert_tk);
        if group.size() == 1 {
            let segments = Segments::new(&expert_p, experts);
            return Dispatch { group, order_p, place_tk, route: None, segments };
        }
        let counts = counts(group, &expert_p, experts);
        let held = experts / as_dim(group.size() as u64);
        let first = held * as_dim(group.rank().0 as u64);
        let rows = |from: &Vec<i64>| {
            let each = from.chunks(as_index(from_dim(held)));
            each.map(|experts| Tokens(experts.iter().copied().map(from_dim).sum())).collect()
        };
        let traffic = Traffic::new(counts.iter().map(rows).collect());
        let arriving = counts.iter().flat_map(|from| {
            (0..held).flat_map(move |expert| {
                let rows = as_index(from_dim(from[as_index(from_dim(first + expert))]));
                std::iter::repeat_n(expert, rows)
            })
        });
        let expert_n = Tensor::from_slice(&arriving.collect::<Vec<i64>>()).to_device(order_p.device());
        let (expert_n, order_n) = expert_n.sort_stable(true, 0, false);
        let route = Some(Route { traffic, place_n: inverse(&order_n), order_n });
        Dispatch { group, order_p, place_tk, route, segments: Segments::new(&expert_n, held) }
    }

    /// One row for each pair whose expert is on this rank, sorted by expert, of what `x_tw` has for each row: [n, …].
    pub(super) fn rows(&self, x_tw: &Tensor) -> Tensor {
        let chosen = self.place_tk.size()[1];
        self.there(&x_tw.index_select(0, &self.order_p.divide_scalar_mode(chosen, "floor")))
    }

    /// The same of what `weight_tk` has for each pair: [n].
    pub(super) fn pairs(&self, weight_tk: &Tensor) -> Tensor {
        self.there(&weight_tk.detach().flatten(0, -1).index_select(0, &self.order_p))
    }

    fn there(&self, sorted: &Tensor) -> Tensor {
        match &self.route {
            None => sorted.shallow_clone(),
            Some(route) => send_rows(self.group, sorted, &route.traffic).index_select(0, &route.order_n),
        }
    }

    /// Results of this rank's experts, [n, …], back on the ranks of the rows.
    pub(super) fn home(&self, y_n: &Tensor) -> Home<'_> {
        let sorted = match &self.route {
            None => y_n.shallow_clone(),
            Some(route) => send_rows(self.group, &y_n.index_select(0, &route.place_n), &route.traffic.back()),
        };
        Home { sorted, place_tk: &self.place_tk }
    }
}

/// Results of a rank's pairs, sorted by expert.
pub(super) struct Home<'a> {
    sorted: Tensor,
    place_tk: &'a Tensor,
}

impl Home<'_> {
    /// Results of `own` pairs that never left, with the place of each pair among them.
    pub(super) fn here(sorted: Tensor, place_tk: &Tensor) -> Home<'_> {
        Home { sorted, place_tk }
    }

    /// Sum of each row's results in the order of its experts, times `weight_tk` where it is given: [t, w], the accumulation
    /// dtype.
    pub(super) fn summed(&self, weight_tk: Option<&Tensor>) -> Tensor {
        let acc = accumulation(self.sorted.kind());
        let rows = self.place_tk.size()[0];
        let mut sum_tw = Tensor::zeros([rows, self.sorted.size()[1]], (acc, self.sorted.device()));
        for slot in 0..self.place_tk.size()[1] {
            let y_tw = self.sorted.index_select(0, &self.place_tk.select(1, slot)).to_kind(acc);
            match weight_tk {
                Some(weight_tk) => sum_tw += y_tw * weight_tk.select(1, slot).unsqueeze(-1),
                None => sum_tw += y_tw,
            }
        }
        sum_tw
    }

    /// The one number of each pair, [t, k].
    pub(super) fn each(&self) -> Tensor {
        self.sorted.index_select(0, &self.place_tk.flatten(0, -1)).view_as(self.place_tk)
    }
}

/// Where each element of a permutation, [n] int64, stands in it.
pub(super) fn inverse(order_n: &Tensor) -> Tensor {
    let numbers = Tensor::arange(order_n.size()[0], (Kind::Int64, order_n.device()));
    order_n.empty_like().scatter_(0, order_n, &numbers)
}

/// How many pairs each rank has for each expert: `[rank][expert]`, on every rank.
fn counts(group: &Axis, expert_p: &Tensor, experts: i64) -> Vec<Vec<i64>> {
    let own = expert_p.bincount(None::<&Tensor>, experts).to_device(Device::Cpu).unsqueeze(0);
    let all = gather_rows(group, &own, &vec![Tokens(1); group.size()]);
    (0..all.size()[0]).map(|rank| Vec::try_from(all.get(rank)).unwrap_or_default()).collect()
}
