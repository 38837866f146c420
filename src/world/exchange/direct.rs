//! The transport from GPU to GPU: opened once for an axis, taken by every exchange of tensors that lie on GPUs.

use std::collections::BTreeSet;

use tch::{Device, Tensor};

use crate::runtime::units::{Rank, Tokens, as_dim};
use crate::tensor::gpu::{self, Event};
use crate::tensor::link::{self, Link, Parcel};
use crate::tensor::{self};
use crate::world::Axis;

/// Opens it, where every rank of the axis has a GPU of its own and NCCL is there; says whether it is open. Every rank
/// takes part. A rank on which it fails leaves the others waiting: its error has to end the job.
///
/// # Errors
/// When NCCL cannot connect the ranks.
pub fn connect(axis: &Axis, device: Device) -> Result<bool, tensor::Error> {
    let here = match device {
        Device::Cuda(index) if link::nccl_available() => {
            gpu::identity(index).map(|address| format!("{}{address}", machine()))
        }
        _ => None,
    };
    let all = axis.gather_texts(&here.unwrap_or_default());
    let apart = all.iter().all(|one| !one.is_empty()) && all.iter().collect::<BTreeSet<_>>().len() == all.len();
    if axis.size() == 1 || !apart {
        return Ok(false);
    }
    let mut name = if axis.rank() == Rank(0) { link::name()? } else { [0; link::NAME_BYTES] };
    axis.broadcast(&mut name);
    let waiting = axis.waits();
    let link = Link::open(&name, axis.size(), axis.rank())?;
    drop(waiting);
    axis.set_transport(link);
    Ok(true)
}

/// Whether tensors on `device` go from GPU to GPU between the ranks of the axis.
#[must_use]
pub fn is_direct(axis: &Axis, device: Device) -> bool {
    transport(axis, device).is_some()
}

/// What no two machines have in common.
fn machine() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

/// The transport for tensors on `device`, if there is one.
pub(crate) fn transport(axis: &Axis, device: Device) -> Option<&Link> {
    axis.transport().filter(|_| device != Device::Cpu)
}

/// What a failed exchange means: the peers wait for messages that will not come.
fn sent<T>(outcome: Result<T, tensor::Error>) -> T {
    outcome.unwrap_or_else(|error| panic!("{error}"))
}

/// Sends and receives beside the computation. Empty tensors do not travel: both sides know all sizes.
pub(crate) fn exchange(link: &Link, send: Vec<Parcel>, receive: Vec<Parcel>) -> Event {
    let full = |parcels: Vec<Parcel>| parcels.into_iter().filter(|one| one.tensor.numel() > 0).collect::<Vec<_>>();
    sent(link.exchange(&full(send), &full(receive)))
}

/// The computation goes on after an exchange.
pub(crate) fn wait(event: &Event) {
    sent(event.block());
}

/// Each tensor for, or from, one peer.
pub(crate) fn parcels(tensors: &[Tensor], peer: Rank) -> Vec<Parcel> {
    tensors.iter().map(|tensor| Parcel { tensor: tensor.shallow_clone(), peer }).collect()
}

/// Row ranges of every rank but this one, in rank order: (rank, first row, rows).
fn others(axis: &Axis, counts: &[Tokens]) -> Vec<(Rank, i64, i64)> {
    let ends = counts.iter().scan(0, |sum, count| {
        let first = *sum;
        *sum += count.dim();
        Some((first, count.dim()))
    });
    let ranks = (0..counts.len()).map(Rank).zip(ends);
    ranks.filter(|(rank, _)| *rank != axis.rank()).map(|(rank, (first, rows))| (rank, first, rows)).collect()
}

/// [`super::gather_rows`] without the host.
pub(crate) fn gather_rows(link: &Link, axis: &Axis, x: &Tensor, counts: &[Tokens]) -> Tensor {
    let x = x.detach().contiguous();
    let all = Tensor::empty(resized(&x, counts.iter().map(|count| count.0).sum()), (x.kind(), x.device()));
    let peers = others(axis, counts);
    let send = peers.iter().map(|&(peer, ..)| Parcel { tensor: x.shallow_clone(), peer }).collect();
    let receive = peers.iter().map(|&(peer, first, rows)| Parcel { tensor: all.narrow(0, first, rows), peer });
    let done = exchange(link, send, receive.collect());
    let first = counts[..axis.rank().0].iter().map(|count| count.dim()).sum();
    all.narrow(0, first, x.size()[0]).copy_(&x);
    wait(&done);
    all
}

/// [`super::return_rows`] without the host.
pub(crate) fn return_rows(link: &Link, axis: &Axis, parts: &Tensor, counts: &[Tokens]) -> Vec<Tensor> {
    let parts = parts.detach().contiguous();
    let own = counts[axis.rank().0];
    let home: Vec<Tensor> =
        counts.iter().map(|_| Tensor::empty(resized(&parts, own.0), (parts.kind(), parts.device()))).collect();
    let peers = others(axis, counts);
    let send = peers.iter().map(|&(peer, first, rows)| Parcel { tensor: parts.narrow(0, first, rows), peer });
    let receive = peers.iter().map(|&(peer, ..)| Parcel { tensor: home[peer.0].shallow_clone(), peer });
    let done = exchange(link, send.collect(), receive.collect());
    let first = counts[..axis.rank().0].iter().map(|count| count.dim()).sum();
    home[axis.rank().0].shallow_clone().copy_(&parts.narrow(0, first, own.dim()));
    wait(&done);
    home
}

fn resized(like: &Tensor, rows: u64) -> Vec<i64> {
    let mut shape = like.size();
    shape[0] = as_dim(rows);
    shape
}
