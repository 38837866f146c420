//! Operations of a layer: how often a phase runs its parts, and what one run costs.

use serde::{Deserialize, Serialize};

use crate::model::shape::{Layer, Mix, Segment};
use crate::runtime::units::{Tokens, float, from_dim};
use crate::tensor::delta::plain::CHUNK;

/// The work of one phase, on the rank that has most.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Work {
    /// Operations of matrix products.
    pub(super) products: f64,
    /// Operations of attention, forward.
    pub(super) attention_forward: f64,
    /// Operations of attention, backward.
    pub(super) attention_backward: f64,
    /// Operations of attention over gathered keys, forward.
    pub(super) gathered_forward: f64,
    /// Operations of attention over gathered keys, backward.
    pub(super) gathered_backward: f64,
    /// Operations of index scores, with the choice of the largest.
    pub(super) choosing: f64,
    /// Operations of grouped products of experts.
    pub(super) experts: f64,
    /// Operations of gated delta rules, forward, and of maps of the state.
    pub(super) delta_forward: f64,
    /// Operations of gated delta rules, backward.
    pub(super) delta_backward: f64,
    /// Bytes that operations element by element around a delta rule move through the device's memory.
    pub(super) moved: f64,
    /// Bytes from host memory to the device.
    pub(super) bytes_in: f64,
    /// Bytes from the device to host memory.
    pub(super) bytes_out: f64,
    /// Bytes that the device reads from its own memory, where reading may take longer than computing.
    pub(super) reads: f64,
    /// Layers of sampled tokens, a head as one layer: each takes a time of its own besides what it reads.
    pub(super) layer_steps: f64,
    /// Messages between ranks that do not overlap any computation.
    pub(super) messages: f64,
    /// Bytes of these messages, from device to device.
    pub(super) message_bytes: f64,
}

impl Work {
    /// The same work `by` times.
    pub(super) fn times(self, by: f64) -> Work {
        Work {
            products: self.products * by,
            attention_forward: self.attention_forward * by,
            attention_backward: self.attention_backward * by,
            gathered_forward: self.gathered_forward * by,
            gathered_backward: self.gathered_backward * by,
            choosing: self.choosing * by,
            experts: self.experts * by,
            delta_forward: self.delta_forward * by,
            delta_backward: self.delta_backward * by,
            moved: self.moved * by,
            bytes_in: self.bytes_in * by,
            bytes_out: self.bytes_out * by,
            reads: self.reads * by,
            layer_steps: self.layer_steps * by,
            messages: self.messages * by,
            message_bytes: self.message_bytes * by,
        }
    }
}

/// Operations of some rows in some layers, forward and without adapters.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Amount {
    /// Of what each row does by itself: products with weights, delta rules; 10¹².
    pub rows_tera: f64,
    /// Of what rows do with the rows before them: attention, index scores; 10¹².
    pub pairs_tera: f64,
}

impl Amount {
    /// That of `count` consecutive rows from position `start` on.
    #[must_use]
    pub fn of(layers: &[Layer], start: Tokens, count: Tokens) -> Amount {
        Amount::of_rows(layers, Rows { start: float(start.0), count: float(count.0) })
    }

    pub(super) fn of_rows(layers: &[Layer], rows: Rows) -> Amount {
        let mut work = Work::default();
        let mut of_rows = 0.0;
        for layer in layers {
            mixing(layer, rows, Runs::FORWARD, &mut work);
            let products = layer.products(Segment::A) + layer.products(Segment::B) + float(layer.constant);
            of_rows += rows.count * (2.0 * products + delta_row(&layer.mix).0);
        }
        let pairs = work.attention_forward + work.gathered_forward + work.choosing;
        Amount { rows_tera: of_rows / 1e12, pairs_tera: pairs / 1e12 }
    }

    /// `by` times as much.
    #[must_use]
    pub fn times(self, by: f64) -> Amount {
        Amount { rows_tera: self.rows_tera * by, pairs_tera: self.pairs_tera * by }
    }
}

/// How often a phase runs one part of a layer.
#[derive(Clone, Copy)]
pub(super) struct Passes {
    pub(super) forward: f64,
    pub(super) backward: f64,
}

impl Passes {
    pub(super) const ONE: Passes = Passes { forward: 1.0, backward: 0.0 };

    /// A backward with `forward` forwards, its own included.
    pub(super) const fn back(forward: f64) -> Passes {
        Passes { forward, backward: 1.0 }
    }
}

/// How often a phase runs each part of a layer.
#[derive(Clone, Copy)]
pub(super) struct Runs {
    pub(super) a: Passes,
    pub(super) b: Passes,
    pub(super) attention: Passes,
    pub(super) choosing: f64,
}

impl Runs {
    /// One pass without a graph.
    pub(super) const FORWARD: Runs = Runs { a: Passes::ONE, b: Passes::ONE, attention: Passes::ONE, choosing: 1.0 };
}

/// Consecutive rows of a sequence.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub(super) start: f64,
    pub(super) count: f64,
}

impl Rows {
    /// Pairs of a row and a key that it attends to, itself included: all earlier keys, or at most `most` of them.
    pub(super) fn pairs(self, most: Option<u64>) -> f64 {
        let Rows { start, count } = self;
        let most = most.map_or(f64::INFINITY, float);
        let growing = (most - start).clamp(0.0, count);
        let beyond = count - growing;
        let full = if beyond > 0.0 { beyond * most } else { 0.0 };
        growing * start + growing * (growing + 1.0) / 2.0 + full
    }
}

/// Elements of a row's partial attention output with its log-sum-exp.
pub(super) fn partial(layer: &Layer) -> u64 {
    let widths = layer.mix.widths();
    widths.output + widths.beside
}

/// Operations of `rows` in a layer's mixer.
pub(super) fn mixing(layer: &Layer, rows: Rows, runs: Runs, work: &mut Work) {
    let Passes { forward, backward } = runs.attention;
    let mut attention = |operations: f64| {
        work.attention_forward += forward * operations;
        work.attention_backward += 2.5 * backward * operations;
    };
    match layer.mix {
        Mix::Grouped { query_heads, head_dim, window, .. } => {
            attention(4.0 * float(query_heads) * float(head_dim) * rows.pairs(window));
        }
        Mix::Latent { heads, latent, rotated, index } => {
            let row = float(latent) * 2.0 + float(rotated);
            let operations = 2.0 * float(heads) * row * rows.pairs(Some(index.top));
            work.gathered_forward += forward * operations;
            work.gathered_backward += 2.5 * backward * operations;
            if index.owner {
                let scores = runs.choosing * rows.pairs(None);
                work.choosing += 2.0 * float(index.heads) * float(index.dim) * scores;
            }
        }
        // Counted by [`delta_rule`], which asks how many ranks there are.
        Mix::Delta { .. } => {}
    }
}

/// Operations of a gated delta rule for one row, all heads: of its output and the state after it; and of a map of the state.
///
/// In a chunk of c rows, with keys of k and values of v, a row takes multiply-adds, two operations each:
///
/// ```text
///   K Kᵀ, Q Kᵀ       2·c·k      R = V − K S      k·v      T R, P V'   2·c·v
///   S ← S + Kᵀ V'    k·v        Q S              k·v
///   map: the state [B | T] is v + k wide, and there is no output
///                    c·k + (2·k + c)·(v + k)
/// ```
#[must_use]
pub fn delta_row(mix: &Mix) -> (f64, f64) {
    let Mix::Delta { value_heads, key_dim, value_dim, .. } = *mix else { return (0.0, 0.0) };
    let (k, v, c) = (float(key_dim), float(value_dim), float(from_dim(CHUNK)));
    let rule = 2.0 * c * (k + v) + 3.0 * k * v;
    let map = c * k + (2.0 * k + c) * (v + k);
    (2.0 * float(value_heads) * rule, 2.0 * float(value_heads) * map)
}

/// The rule of a layer over `rows` rows of all ranks that share a prompt, and what goes round it element by element. A backward
/// counts 2.5 forwards. The mixer runs in each pass of segment A but the one with a graph. Where ranks share a prompt, a
/// forward also forms maps, and a backward first pulls gradients of states through the rows, at the cost of a forward.
pub(super) fn delta_rule(layer: &Layer, rows: f64, runs: Runs, shared: bool, bytes: [f64; 2], work: &mut Work) {
    let Mix::Delta { key_heads, value_heads, key_dim, value_dim, .. } = layer.mix else { return };
    let Passes { forward, backward } = runs.a;
    let forward = forward - backward;
    let (rule, map) = delta_row(&layer.mix);
    let (map, pull) = if shared { (map, rule) } else { (0.0, 0.0) };
    work.delta_forward += rows * (forward * (rule + map) + backward * pull);
    work.delta_backward += rows * backward * 2.5 * rule;
    let [model, acc] = bytes;
    let values = float(value_heads * value_dim);
    let channels = float(2 * key_heads * key_dim) + values;
    // The convolution reads and writes a row; its backward reads two and writes one in the accumulation dtype.
    let (convolution, back) = (2.0 * channels * model, channels * (2.0 * model + acc));
    // The norm by head and its gate are ten operations of libtorch; their backward about as many again, twice.
    let norm = values * (7.0 * model + 15.0 * acc);
    let convolved = if shared { forward * 2.0 + backward } else { forward };
    work.moved += rows * (convolved * convolution + backward * (convolution + back));
    work.moved += rows * (runs.b.forward + 2.0 * runs.b.backward) * norm;
}

/// Bytes that every rank receives when `pieces` pieces of all ranks exchange their maps in a forward, and gradients of states
/// in a backward.
pub(super) fn delta_exchange(layer: &Layer, pieces: f64, runs: Runs, acc: f64) -> f64 {
    let Mix::Delta { value_heads, key_dim, value_dim, .. } = layer.mix else { return 0.0 };
    let Passes { forward, backward } = runs.a;
    let head = (forward - backward) * float(key_dim + value_dim) + backward * float(value_dim);
    pieces * float(value_heads) * float(key_dim) * head * acc
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_those_of_a_loop_over_rows() {
        for (start, count, most) in [(0, 9, None), (5, 4, None), (0, 9, Some(4)), (2, 7, Some(4)), (6, 3, Some(4))] {
            let seen = (start..start + count).map(|row| most.map_or(row + 1, |most: u64| most.min(row + 1)));
            let pairs = Rows { start: float(start), count: float(count) }.pairs(most);
            assert!((pairs - float(seen.sum())).abs() < 1e-9, "{start} {count} {most:?}: {pairs}");
        }
    }
}
