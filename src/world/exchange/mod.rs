//! Collectives over tensors: gather rows, return rows, sum gradients.
//!
//! Every rank of the axis enters every function, also with zero rows. Sums and merges are formed in rank order, never
//! in order of arrival, so results repeat bit for bit. Tensors on GPUs go from GPU to GPU if [`connect`] has opened a
//! transport, else through host memory; the bits are the same.

mod all_to_all;
pub(crate) mod direct;

use tch::{Device, Kind, Tensor};

pub use all_to_all::{Traffic, send_rows};
pub use direct::{connect, is_direct};

use crate::runtime::units::{Tokens, as_dim, as_index, from_dim};
pub use crate::tensor::fused::merge_into;
use crate::tensor::{element_bytes, views};
use crate::world::Axis;

/// Bytes of one row of `x`; the first dimension counts rows.
fn row_bytes(x: &Tensor) -> usize {
    let elements: u64 = x.size().iter().skip(1).map(|&dim| from_dim(dim)).product();
    as_index(elements * element_bytes(x.kind()))
}

/// `x` in host memory, contiguous, ready to be sent.
pub(crate) fn outgoing(x: &Tensor) -> Tensor {
    x.detach().to_device(Device::Cpu).contiguous()
}

/// Received bytes as a tensor of `rows` rows shaped like those of `like`, on its device.
fn incoming(received: &[u8], rows: u64, like: &Tensor) -> Tensor {
    let mut shape = like.size();
    shape[0] = as_dim(rows);
    let mut x = Tensor::empty(shape, (like.kind(), Device::Cpu));
    views::view_mut(&mut x).copy_from_slice(received);
    x.to_device(like.device())
}

/// Concatenates every rank's rows in rank order, on every rank. Rank r has `counts[r]` rows.
pub fn gather_rows(axis: &Axis, x: &Tensor, counts: &[Tokens]) -> Tensor {
    if axis.size() == 1 {
        return x.detach();
    }
    if let Some(link) = direct::transport(axis, x.device()) {
        return direct::gather_rows(link, axis, x, counts);
    }
    let row = row_bytes(x);
    let sizes: Vec<_> = counts.iter().map(|count| count.index() * row).collect();
    let sent = outgoing(x);
    let received = axis.all_gather(views::view(&sent), &sizes);
    incoming(&received, counts.iter().map(|count| count.0).sum(), x)
}

/// The reverse of [`gather_rows`]: each rank has a partial value of every row and sends it to the row's rank. Returns
/// the partial values of this rank's own rows, one tensor from each rank, in rank order.
#[must_use]
pub fn return_rows(axis: &Axis, parts: &Tensor, counts: &[Tokens]) -> Vec<Tensor> {
    if axis.size() == 1 {
        return vec![parts.detach()];
    }
    if let Some(link) = direct::transport(axis, parts.device()) {
        return direct::return_rows(link, axis, parts, counts);
    }
    let row = row_bytes(parts);
    let own = counts[axis.rank().0];
    let send_sizes: Vec<_> = counts.iter().map(|count| count.index() * row).collect();
    let receive_sizes = vec![own.index() * row; axis.size()];
    let bytes_max = send_sizes.iter().copied().max().unwrap_or(0);
    let sent = outgoing(parts);
    let received = axis.all_to_all(views::view(&sent), &send_sizes, &receive_sizes, bytes_max);
    let size = own.index() * row;
    (0..axis.size()).map(|rank| incoming(&received[rank * size..(rank + 1) * size], own.0, parts)).collect()
}

/// Sum of tensors in the order given.
///
/// # Panics
/// When `parts` is empty.
pub fn sum_in_order(parts: &[Tensor]) -> Tensor {
    let (first, rest) = parts.split_first().expect("an axis has at least one rank");
    rest.iter().fold(first.copy(), |sum, part| sum + part)
}

/// Partial attention over no keys: out 0 and log-sum-exp −∞ for `rows` queries.
pub fn nothing(rows: i64, heads: i64, head_dim: i64, acc: Kind, device: Device) -> (Tensor, Tensor) {
    (
        Tensor::zeros([rows, heads, head_dim], (acc, device)),
        Tensor::full([rows, heads], f64::NEG_INFINITY, (acc, device)),
    )
}

/// Sums `x` over the axis on rank 0, in rank order, and broadcasts the sum: every rank has the same bits. All ranks'
/// tensors have the same shape; messages are bounded, so `x` may have any size.
///
/// # Panics
/// When `x` is not a contiguous CPU tensor.
pub fn sum_over_ranks(axis: &Axis, x: &mut Tensor) {
    if axis.size() == 1 {
        return;
    }
    let kind = x.kind();
    let width = as_index(element_bytes(kind));
    let round = (axis.round_bytes() / width).max(1) * width;
    for part in views::view_mut(x).chunks_mut(round) {
        let gathered = axis.gather_round(part);
        if !gathered.is_empty() {
            let mut all =
                Tensor::empty([as_dim(axis.size() as u64), as_dim((part.len() / width) as u64)], (kind, Device::Cpu));
            views::view_mut(&mut all).copy_from_slice(&gathered);
            let rows: Vec<Tensor> = (0..all.size()[0]).map(|rank| all.get(rank)).collect();
            part.copy_from_slice(views::view(&sum_in_order(&rows).contiguous()));
        }
        axis.broadcast(part);
    }
}

/// Sums one number over the axis in rank order; every rank has the same bits.
#[must_use]
pub fn sum_number(axis: &Axis, value: f64) -> f64 {
    axis.gather_floats(value).iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_merged_with_empty_is_empty() {
        let (mut out, mut lse) = nothing(2, 3, 4, Kind::Double, Device::Cpu);
        let (none, never) = nothing(2, 3, 4, Kind::Double, Device::Cpu);
        merge_into(&mut out, &mut lse, &none, &never);
        assert!(out.abs().sum(Kind::Double).double_value(&[]) == 0.0);
        assert!(lse.isneginf().all().int64_value(&[]) == 1);
        let (new_out, new_lse) = (out.ones_like(), lse.zeros_like());
        merge_into(&mut out, &mut lse, &new_out, &new_lse);
        assert!(out.equal(&new_out) && lse.equal(&new_lse));
    }

    #[test]
    fn merged_parts_equal_the_whole() {
        let heads = 32;
        let (rows, dim) = (2, 128);
        let whole = Tensor::randn([rows, heads, 8], (Kind::Double, Device::Cpu));
        let values = Tensor::randn([8, dim], (Kind::Double, Device::Cpu));
        let (mut out, mut lse) = nothing(rows, heads, dim, Kind::Double, Device::Cpu);
        for half in whole.split(4, -1).iter().zip(values.split(4, 0).iter()) {
            let part_lse = half.0.logsumexp([-1i64], false);
            let part = (half.0 - part_lse.unsqueeze(-1)).exp().matmul(half.1);
            merge_into(&mut out, &mut lse, &part, &part_lse);
        }
        let expected = whole.softmax(-1, Kind::Double).matmul(&values);
        assert!((out - expected).abs().max().double_value(&[]) < 1e-14);
    }
}
