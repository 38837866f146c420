//! Feed-forwards of experts: a router gives each row to a few of a layer's experts, whose outputs are weighted and summed.
//!
//! How this departs from an implementation that knows one device:
//! 1. The experts of a layer are spread over the ranks of a group. Rows travel to them and results travel back, in bounded
//!    rounds (`dispatch`).
//! 2. Nothing is kept between forward and backward but the choice: backward computes the inner layer again, by hand.
//! 3. A row's results are summed on the rank of the row, in the order of its experts, in the accumulation dtype, and cast once.
//!    So the sum depends neither on the number of ranks nor on the order of arrival.
//!
//! Shapes: t rows of this rank, k experts of a row, e experts of the layer, w width, f inner width; p pairs of a row and one of
//! its experts, n pairs whose expert is on this rank.

pub mod adapters;
mod dispatch;
mod products;
mod routed;
mod router;
#[cfg(test)]
mod tests;

use std::rc::Rc;

use tch::Tensor;

pub use routed::{Routed, RoutedGradient};
pub use router::route;

use super::lora::{Adapters, linear};
use super::parts::ExpertSpec;
use super::weights::Weights;
use crate::runtime::failure::{Classified, Exit};
use crate::runtime::units::{LayerIndex, Tokens, as_dim, as_index, from_dim, from_index};
use crate::tensor::{self, accumulation};
use crate::world::Axis;
use crate::world::exchange::{gather_rows, sum_in_order};
use dispatch::{Dispatch, Home, inverse};
use products::{Held, Segments};

/// Most pairs that one rank computes at a time if all are spread evenly: what bounds every intermediate tensor.
pub const PAIRS_MAX: i64 = 65_536;

/// Why experts cannot be spread.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The ranks of a group do not divide the experts of a layer.
    #[error(
        "parallel.ep_size = {ep_size} does not divide the {experts} experts of a layer of {model_type}: give a divisor of both \
         {experts} and parallel.cp_size"
    )]
    Uneven {
        /// Experts of a layer.
        experts: u64,
        /// Ranks that hold them together.
        ep_size: u64,
        /// The family's name.
        model_type: &'static str,
    },
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        Exit::Config
    }
}

/// The experts of one layer that this rank holds.
#[derive(Debug)]
pub struct Experts {
    layer: LayerIndex,
    /// Experts of the layer, those of all ranks of the group.
    count: i64,
    source: Source,
    pairs_max: i64,
}

/// Where matrices come from: taken when they are used, so that they may be made then.
#[derive(Debug)]
enum Source {
    Weights(Rc<Weights>),
    Given { gate_up: Tensor, down: Tensor },
}

impl Experts {
    /// The experts of `layer`, from this rank's weights: its own part of them, or all.
    #[must_use]
    pub fn new(spec: &ExpertSpec, layer: LayerIndex, weights: Rc<Weights>) -> Experts {
        Experts { layer, count: as_dim(spec.count), source: Source::Weights(weights), pairs_max: PAIRS_MAX }
    }

    /// The same with given matrices, [experts, 2 · f, w] with gate rows first, and [experts, w, f].
    #[must_use]
    pub fn of(spec: &ExpertSpec, layer: LayerIndex, gate_up: Tensor, down: Tensor) -> Experts {
        let source = Source::Given { gate_up, down };
        Experts { layer, count: as_dim(spec.count), source, pairs_max: PAIRS_MAX }
    }

    /// The same with another bound on the pairs of one round, so that tests see several.
    #[must_use]
    pub fn with_pairs_max(self, pairs_max: i64) -> Experts {
        Experts { pairs_max, ..self }
    }

    /// Σ over a row's experts of weight · expert(row), [t, w] in the model's dtype; no graph. `group` are the ranks that hold
    /// the experts together: each of them enters, with as many rows as it has, also none.
    pub fn forward(&self, group: &Axis, routed: &Routed, adapters: &Adapters) -> Tensor {
        tch::no_grad(|| {
            let held = self.held(group, adapters);
            let out_tw = routed.x_tw.empty_like();
            for (first, rows) in self.rounds(group, routed) {
                let routed = routed.rows(first, rows);
                let dispatch = Dispatch::new(group, &routed, self.count);
                let y_nw = held.forward(&dispatch.rows(&routed.x_tw), &dispatch.segments);
                let sum_tw = dispatch.home(&y_nw).summed(Some(&routed.weight_tk));
                out_tw.narrow(0, first, rows).copy_(&sum_tw);
            }
            out_tw
        })
    }

    /// Backward of [`Experts::forward`] from `dout_tw`, the gradient of its result. Everything is computed again; gradients of
    /// the experts' adapters add up in their `.grad`, on the rank that holds the expert. Every rank of the group enters.
    ///
    /// # Errors
    /// When libtorch refuses a backward pass.
    pub fn backward(
        &self,
        group: &Axis,
        routed: &Routed,
        dout_tw: &Tensor,
        adapters: &Adapters,
    ) -> Result<RoutedGradient, tensor::Error> {
        tch::no_grad(|| {
            let held = self.held(group, adapters);
            let (dx_tw, dweight_tk) = (routed.x_tw.empty_like(), routed.weight_tk.empty_like());
            let mut outcome = Ok(());
            for (first, rows) in self.rounds(group, routed) {
                let routed = routed.rows(first, rows);
                let dispatch = Dispatch::new(group, &routed, self.count);
                let x_nw = dispatch.rows(&routed.x_tw);
                let dout_nw = dispatch.rows(&dout_tw.detach().narrow(0, first, rows));
                let weight_n = dispatch.pairs(&routed.weight_tk);
                let done = held.backward(&x_nw, &weight_n, &dout_nw, &dispatch.segments);
                drop(dout_nw);
                // A rank that fails completes its rounds: the others wait for its rows.
                let (dx_nw, dweight_n) = match done {
                    Ok(gradient) => (gradient.dx_nw, gradient.dweight_n),
                    Err(error) => {
                        outcome = Err(error);
                        (x_nw, weight_n)
                    }
                };
                dx_tw.narrow(0, first, rows).copy_(&dispatch.home(&dx_nw).summed(None));
                dweight_tk.narrow(0, first, rows).copy_(&dispatch.home(&dweight_n).each());
            }
            outcome.map(|()| RoutedGradient { dx_tw, dweight_tk })
        })
    }

    /// [`Experts::forward`] of rows that every rank of the group has, the same ones: each rank computes what its own experts give,
    /// and the parts are summed in rank order, so that every rank gets the same bits.
    pub fn replicated(&self, group: &Axis, routed: &Routed, adapters: &Adapters) -> Tensor {
        if group.size() == 1 {
            return self.forward(group, routed, adapters);
        }
        tch::no_grad(|| {
            let held = self.held(group, adapters);
            let out_tw = routed.x_tw.empty_like();
            for (first, rows) in blocks(routed, self.pairs_max) {
                let part_tw = self.own_part(group, &held, &routed.rows(first, rows));
                let counts = vec![Tokens(from_dim(rows)); group.size()];
                let parts = gather_rows(group, &part_tw, &counts).view([-1, rows, part_tw.size()[1]]);
                let parts: Vec<Tensor> = (0..parts.size()[0]).map(|rank| parts.get(rank)).collect();
                out_tw.narrow(0, first, rows).copy_(&sum_in_order(&parts));
            }
            out_tw
        })
    }

    /// The part of the sum that the experts on this rank give, [t, w] in the accumulation dtype.
    fn own_part(&self, group: &Axis, held: &Held, routed: &Routed) -> Tensor {
        let (first, count) = self.part_of(group);
        let number_tk = &routed.expert_tk - first;
        let is_elsewhere = number_tk.lt(0).logical_or(&number_tk.ge(count));
        // Pairs of other ranks come last and belong to no expert, so no product has rows of them.
        let (number_p, order_p) =
            number_tk.masked_fill(&is_elsewhere, count).flatten(0, -1).sort_stable(true, 0, false);
        let place_tk = inverse(&order_p).view_as(&routed.expert_tk);
        let x_pw = routed.x_tw.index_select(0, &order_p.divide_scalar_mode(routed.expert_tk.size()[1], "floor"));
        let y_pw = held.forward(&x_pw, &Segments::new(&number_p, count));
        let y_pw = y_pw.masked_fill(&number_p.ge(count).unsqueeze(-1), 0.0);
        Home::here(y_pw, &place_tk).summed(Some(&routed.weight_tk))
    }

    /// The same sum in differentiable operations, expert by expert, for what others are judged by. All experts must be here.
    ///
    /// # Panics
    /// When this rank holds only a part of the experts.
    pub fn plain(&self, routed: &Routed, adapters: &Adapters) -> Tensor {
        let (gate_up, down) = self.matrices();
        assert_eq!(gate_up.size()[0], self.count, "all experts are on this rank");
        let Routed { x_tw, weight_tk, expert_tk } = routed;
        let (acc, f) = (accumulation(x_tw.kind()), down.size()[2]);
        let mut out_tw = Tensor::zeros(x_tw.size(), (acc, x_tw.device()));
        for expert in 0..self.count {
            let chosen = expert_tk.eq(expert).nonzero();
            let (row_n, slot_n) = (chosen.select(1, 0), chosen.select(1, 1));
            if row_n.size()[0] == 0 {
                continue;
            }
            let pair = |projection: &str| {
                let module = format!("model.layers.{}.mlp.experts.{expert}.{projection}", self.layer);
                adapters.of(&module).map(|adapter| (adapter, adapters.scale()))
            };
            let (gate_up, down) = (gate_up.get(expert), down.get(expert));
            let x_nw = x_tw.index_select(0, &row_n);
            let gate_nf = linear(&x_nw, &gate_up.narrow(0, 0, f), None, pair("gate_proj"));
            let up_nf = linear(&x_nw, &gate_up.narrow(0, f, f), None, pair("up_proj"));
            let y_nw = linear(&(gate_nf.silu() * up_nf), &down, None, pair("down_proj"));
            let weight_n = weight_tk.index(&[Some(&row_n), Some(&slot_n)]);
            out_tw = out_tw.index_add(0, &row_n, &(y_nw.to_kind(acc) * weight_n.unsqueeze(-1)));
        }
        out_tw.to_kind(x_tw.kind())
    }

    /// The first expert of this rank, and how many it holds.
    fn part_of(&self, group: &Axis) -> (i64, i64) {
        let held = self.count / as_dim(from_index(group.size()));
        (held * as_dim(from_index(group.rank().0)), held)
    }

    fn matrices(&self) -> (Tensor, Tensor) {
        match &self.source {
            Source::Weights(weights) => {
                (weights.get(&ExpertSpec::gate_up_name(self.layer)), weights.get(&ExpertSpec::down_name(self.layer)))
            }
            Source::Given { gate_up, down } => (gate_up.shallow_clone(), down.shallow_clone()),
        }
    }

    /// This rank's experts: all that its weights hold, or its part where they hold the whole layer.
    fn held<'a>(&self, group: &Axis, adapters: &'a Adapters) -> Held<'a> {
        let (first, count) = self.part_of(group);
        assert_eq!(count * as_dim(from_index(group.size())), self.count, "every rank holds as many experts");
        let (gate_up, down) = self.matrices();
        let start = if gate_up.size()[0] == self.count { first } else { 0 };
        Held::new(gate_up.narrow(0, start, count), down.narrow(0, start, count), self.layer, first, adapters)
    }

    /// First row and rows of each round; the ranks of the group agree on how many rounds there are.
    fn rounds(&self, group: &Axis, routed: &Routed) -> Vec<(i64, i64)> {
        let mut rounds = blocks(routed, self.pairs_max / as_dim(from_index(group.size())));
        if group.size() > 1 {
            let longest = group.gather_numbers(from_index(rounds.len())).into_iter().max().unwrap_or(0);
            let end = (routed.x_tw.size()[0], 0);
            rounds.resize(as_index(longest), end);
        }
        rounds
    }
}

/// Stretches of rows with at most `pairs_max` pairs each, or one row: (first row, rows).
fn blocks(routed: &Routed, pairs_max: i64) -> Vec<(i64, i64)> {
    let [rows, chosen] = [0, 1].map(|dim| routed.expert_tk.size()[dim]);
    let step = (pairs_max / chosen.max(1)).max(1);
    let starts = (0..rows).step_by(as_index(from_dim(step)));
    starts.map(|first| (first, step.min(rows - first))).collect()
}

/// That a layer's experts can be spread over `ep_size` ranks.
///
/// # Errors
/// When they do not divide them.
pub fn check_spread(experts: &ExpertSpec, model_type: &'static str, ep_size: u64) -> Result<(), Error> {
    if ep_size > 0 && experts.count.is_multiple_of(ep_size) {
        return Ok(());
    }
    Err(Error::Uneven { experts: experts.count, ep_size, model_type })
}
