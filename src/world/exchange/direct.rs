//! The transport from GPU to GPU: opened once for an axis, used by every exchange of tensors on GPUs.

use std::collections::BTreeSet;

use tch::{Device, Tensor};

use crate::runtime::units::{Rank, Tokens, as_dim, as_index};
use crate::tensor::gpu::{self, Event};
use crate::tensor::link::{self, Link, Message};
use crate::tensor::{self, element_bytes};
use crate::world::Axis;

/// Opens the transport if every rank of the axis has its own GPU and NCCL can be opened; returns whether it is open.
/// Every rank takes part. If it fails on a rank, the others wait: the error must end the job.
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
    let gpus = axis.gather_texts(&here.unwrap_or_default());
    let is_distinct = gpus.iter().collect::<BTreeSet<_>>().len() == gpus.len();
    if axis.size() == 1 || !is_distinct || gpus.iter().any(String::is_empty) {
        return Ok(false);
    }
    let mut id = if axis.rank() == Rank(0) { link::new_id()? } else { [0; link::ID_BYTES] };
    axis.broadcast(&mut id);
    let waiting = axis.begin_wait();
    let link = Link::open(&id, axis.size(), axis.rank())?;
    drop(waiting);
    axis.set_transport(link);
    Ok(true)
}

/// Whether tensors on `device` go from GPU to GPU between the ranks of the axis.
#[must_use]
pub fn is_direct(axis: &Axis, device: Device) -> bool {
    transport(axis, device).is_some()
}

/// Differs between any two machines.
fn machine() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

/// The transport for tensors on `device`, if one is open.
pub(crate) fn transport(axis: &Axis, device: Device) -> Option<&Link> {
    axis.transport().filter(|_| device != Device::Cpu)
}

/// Panics at a failed exchange, which ends the job: the peers wait for messages that will not come.
fn sent<T>(outcome: Result<T, tensor::Error>) -> T {
    outcome.unwrap_or_else(|error| panic!("{error}"))
}

/// Sends and receives between the ranks of `axis`, whose transport `link` is, concurrently with the computation. Empty tensors are
/// not sent: both sides know all sizes.
pub(crate) fn exchange(axis: &Axis, link: &Link, send: Vec<Message>, receive: Vec<Message>) -> Event {
    axis.count_sent(send.iter().map(|one| one.tensor.numel() * as_index(element_bytes(one.tensor.kind()))).sum());
    let full = |messages: Vec<Message>| messages.into_iter().filter(|one| one.tensor.numel() > 0).collect::<Vec<_>>();
    sent(link.exchange(&full(send), &full(receive)))
}

/// Makes the computation wait for an exchange.
pub(crate) fn wait(event: &Event) {
    sent(event.block());
}

/// Messages that send each tensor to one peer, or receive it from there.
pub(crate) fn messages(tensors: &[Tensor], peer: Rank) -> Vec<Message> {
    tensors.iter().map(|tensor| Message { tensor: tensor.shallow_clone(), peer }).collect()
}

/// Row ranges of every rank but this one, in rank order: (rank, first row, rows).
pub(super) fn others(axis: &Axis, counts: &[Tokens]) -> Vec<(Rank, i64, i64)> {
    let ends = counts.iter().scan(0, |sum, count| {
        let first = *sum;
        *sum += count.dim();
        Some((first, count.dim()))
    });
    let ranks = (0..counts.len()).map(Rank).zip(ends);
    ranks.filter(|(rank, _)| *rank != axis.rank()).map(|(rank, (first, rows))| (rank, first, rows)).collect()
}

/// [`super::gather_rows`] from GPU to GPU.
pub(crate) fn gather_rows(link: &Link, axis: &Axis, x: &Tensor, counts: &[Tokens]) -> Tensor {
    let x = x.detach().contiguous();
    let all = Tensor::empty(resized(&x, counts.iter().map(|count| count.0).sum()), (x.kind(), x.device()));
    let peers = others(axis, counts);
    let send = peers.iter().map(|&(peer, ..)| Message { tensor: x.shallow_clone(), peer }).collect();
    let receive = peers.iter().map(|&(peer, first, rows)| Message { tensor: all.narrow(0, first, rows), peer });
    let done = exchange(axis, link, send, receive.collect());
    let first = counts[..axis.rank().0].iter().map(|count| count.dim()).sum();
    all.narrow(0, first, x.size()[0]).copy_(&x);
    wait(&done);
    all
}

/// [`super::return_rows`] from GPU to GPU.
pub(crate) fn return_rows(link: &Link, axis: &Axis, parts: &Tensor, counts: &[Tokens]) -> Vec<Tensor> {
    let parts = parts.detach().contiguous();
    let own = counts[axis.rank().0];
    let home: Vec<Tensor> =
        counts.iter().map(|_| Tensor::empty(resized(&parts, own.0), (parts.kind(), parts.device()))).collect();
    let peers = others(axis, counts);
    let send = peers.iter().map(|&(peer, first, rows)| Message { tensor: parts.narrow(0, first, rows), peer });
    let receive = peers.iter().map(|&(peer, ..)| Message { tensor: home[peer.0].shallow_clone(), peer });
    let done = exchange(axis, link, send.collect(), receive.collect());
    let first = counts[..axis.rank().0].iter().map(|count| count.dim()).sum();
    home[axis.rank().0].shallow_clone().copy_(&parts.narrow(0, first, own.dim()));
    wait(&done);
    home
}

pub(super) fn resized(like: &Tensor, rows: u64) -> Vec<i64> {
    let mut shape = like.size();
    shape[0] = as_dim(rows);
    shape
}
