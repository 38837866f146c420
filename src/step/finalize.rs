//! Finalize: one sum of every adapter gradient over all ranks, one norm, one clip.

use tch::{Device, Kind, Tensor};

use crate::model::lora::Adapters;
use crate::prompt::handoff::{LocalGrads, ReducedGrads};
use crate::runtime::failure::{Classified, Exit, Failure};
use crate::world::Axis;
use crate::world::exchange::sum_over_ranks;

/// What can be wrong with the sum.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub enum Error {
    /// A gradient is NaN or infinite.
    #[error(
        "the gradient of {tensor} is not finite after the sum over ranks (norm of all: {norm}); no update was made; \
         start anew with a smaller optimizer.lr, and see in metrics.jsonl from which step on the loss grows"
    )]
    NotFinite {
        /// The first adapter tensor with such a value.
        tensor: String,
        /// Norm of all gradients.
        norm: f64,
    },
    /// An update has left a NaN or an infinity.
    #[error("{tensor} is not finite after an update with learning rate {learning_rate:e}; nothing was saved")]
    Update {
        /// The first adapter tensor with such a value.
        tensor: String,
        /// The learning rate.
        learning_rate: f64,
    },
    /// The loss, or another number that every rank sees, is NaN or infinite.
    #[error("the {what} over all ranks is {value}; nothing was saved")]
    Number { what: &'static str, value: f64 },
}

/// Whether every value of the adapters is finite; the same answer on all ranks, which hold the same bits.
///
/// # Errors
/// Names the first tensor with a value that is not.
pub fn check(adapters: &Adapters, learning_rate: f64) -> Result<(), Failure> {
    for (tensor, name) in adapters.tensors().zip(adapters.names()) {
        if tensor.isfinite().all().int64_value(&[]) == 0 {
            return Err(Error::Update { tensor: name, learning_rate }.into());
        }
    }
    Ok(())
}

impl Classified for Error {
    fn exit(&self) -> Exit {
        Exit::NotFinite
    }
}

/// Takes what backward passes have left in the adapters' `.grad`, and leaves nothing there.
pub fn take(adapters: &Adapters) -> LocalGrads {
    LocalGrads(
        adapters
            .tensors()
            .map(|tensor| {
                let mut gradient = tensor.grad();
                if !gradient.defined() {
                    return tensor.detach().zeros_like();
                }
                let taken = gradient.copy();
                let _ = gradient.zero_();
                taken
            })
            .collect(),
    )
}

/// Sums over `all` ranks in rank order, so that every rank holds the same bits, and clips to `norm_max` (0: no clip).
///
/// # Errors
/// When a sum is not finite; every rank sees the same sum, so all fail together.
pub fn run(all: &Axis, local: LocalGrads, adapters: &Adapters, norm_max: f64) -> Result<ReducedGrads, Failure> {
    let LocalGrads(gradients) = local;
    let flat: Vec<Tensor> = gradients.iter().map(|gradient| gradient.to_device(Device::Cpu).flatten(0, -1)).collect();
    let mut sum = Tensor::cat(&flat, 0).contiguous();
    drop(flat);
    sum_over_ranks(all, &mut sum);
    // Tensor by tensor: float64 copies of all gradients at once would be the largest thing in memory here.
    let norm = parts(&sum, &gradients).map(|part| square(&part)).sum::<f64>().sqrt();
    let scale = if norm_max > 0.0 && norm > norm_max { norm_max / norm } else { 1.0 };
    let mut reduced = Vec::with_capacity(gradients.len());
    for ((gradient, part), name) in gradients.iter().zip(parts(&sum, &gradients)).zip(adapters.names()) {
        if part.isfinite().all().int64_value(&[]) == 0 {
            return Err(Error::NotFinite { tensor: name, norm }.into());
        }
        reduced.push((part * scale).to_device(gradient.device()));
    }
    Ok(ReducedGrads { gradients: reduced, norm })
}

/// The parts of `sum` that belong to each gradient, shaped like them.
fn parts<'a>(sum: &'a Tensor, gradients: &'a [Tensor]) -> impl Iterator<Item = Tensor> + 'a {
    gradients.iter().scan(0, |first, gradient| {
        let count = gradient.size().iter().product::<i64>();
        let part = sum.narrow(0, *first, count).view_as(gradient);
        *first += count;
        Some(part)
    })
}

/// Sum of the squares, in float64.
fn square(x: &Tensor) -> f64 {
    x.to_kind(Kind::Double).square().sum(Kind::Double).double_value(&[])
}
