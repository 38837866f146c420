//! Finalize: one sum of every adapter gradient over all ranks, one norm, one clip.

use tch::{Device, Kind, Tensor};

use crate::model::lora::Adapters;
use crate::prompt::handoff::{LocalGrads, ReducedGrads};
use crate::runtime::failure::{Classified, Exit, Failure};
use crate::world::exchange::{sum_number, sum_over_ranks};
use crate::world::{Axis, World};

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

/// Whether every value of this rank's adapters is finite. Ranks agree on the outcome: the adapters of experts may differ.
///
/// # Errors
/// Names the first tensor with a value that is not.
pub fn check(adapters: &Adapters, learning_rate: f64) -> Result<(), Failure> {
    // One answer for all: sums are finite where every value is, but for an overflow, which the values themselves then settle.
    let sums: Vec<Tensor> = adapters.tensors().map(|tensor| tensor.detach().sum(tensor.kind())).collect();
    if sums.is_empty() || is_finite(&Tensor::stack(&sums, 0)) {
        return Ok(());
    }
    match adapters.tensors().zip(adapters.names()).find(|(tensor, _)| !is_finite(tensor)) {
        Some((_, tensor)) => Err(Error::Update { tensor, learning_rate }.into()),
        None => Ok(()),
    }
}

fn is_finite(x: &Tensor) -> bool {
    x.isfinite().all().int64_value(&[]) != 0
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
    let mut sum = flat(&gradients);
    sum_over_ranks(all, &mut sum);
    let norm = squares(&sum, &gradients).sqrt();
    let reduced = clipped(&sum, &gradients, adapters.names(), norm, norm_max)?;
    Ok(ReducedGrads { gradients: reduced, norm })
}

/// As [`run`], over all ranks of the world. Where the adapters of experts are spread, theirs are summed over the ranks that hold
/// the same experts; each counts once in the norm, which every rank has, and all are clipped alike.
///
/// # Errors
/// When a sum is not finite; the ranks that hold it fail, so all must agree on the outcome.
pub fn run_everywhere(
    world: &World,
    local: LocalGrads,
    adapters: &Adapters,
    norm_max: f64,
) -> Result<ReducedGrads, Failure> {
    if !adapters.is_spread() {
        return run(&world.all, local, adapters, norm_max);
    }
    let spread: Vec<bool> = adapters.spread_tensors().collect();
    let of = |wanted: bool| {
        let own = local.0.iter().zip(&spread).filter(move |(_, spread)| **spread == wanted);
        own.map(|(gradient, _)| gradient.shallow_clone()).collect::<Vec<Tensor>>()
    };
    let names = |wanted: bool| {
        let all = adapters.names().zip(&spread).filter(move |(_, spread)| **spread == wanted);
        all.map(|(name, _)| name)
    };
    let (shared, own) = (of(false), of(true));
    let (mut shared_sum, mut own_sum) = (flat(&shared), flat(&own));
    sum_over_ranks(&world.all, &mut shared_sum);
    sum_over_ranks(&world.edp, &mut own_sum);
    let of_experts = sum_number(&world.ep, squares(&own_sum, &own));
    let norm = (squares(&shared_sum, &shared) + of_experts).sqrt();
    let mut shared = clipped(&shared_sum, &shared, names(false), norm, norm_max)?.into_iter();
    let mut own = clipped(&own_sum, &own, names(true), norm, norm_max)?.into_iter();
    let in_order = spread.iter().filter_map(|&spread| if spread { own.next() } else { shared.next() });
    Ok(ReducedGrads { gradients: in_order.collect(), norm })
}

/// All values beside each other, in host memory.
fn flat(gradients: &[Tensor]) -> Tensor {
    joined(gradients).to_device(Device::Cpu)
}

/// All values beside each other, where they are: one copy to another place, not one for each tensor.
fn joined(tensors: &[Tensor]) -> Tensor {
    let flat: Vec<Tensor> = tensors.iter().map(|tensor| tensor.flatten(0, -1)).collect();
    if flat.is_empty() { Tensor::zeros([0], (Kind::Float, Device::Cpu)) } else { Tensor::cat(&flat, 0) }
}

/// Sum of the squares of all values. Tensor by tensor: float64 copies of all gradients at once would be the largest thing in
/// memory here.
fn squares(sum: &Tensor, gradients: &[Tensor]) -> f64 {
    parts(sum, gradients).map(|part| square(&part)).sum()
}

/// The parts of `sum` for each gradient, scaled down where `norm` exceeds `norm_max`.
fn clipped(
    sum: &Tensor,
    gradients: &[Tensor],
    names: impl Iterator<Item = String>,
    norm: f64,
    norm_max: f64,
) -> Result<Vec<Tensor>, Error> {
    let scale = if norm_max > 0.0 && norm > norm_max { norm_max / norm } else { 1.0 };
    if let Some((_, tensor)) = parts(sum, gradients).zip(names).find(|(part, _)| !is_finite(part)) {
        return Err(Error::NotFinite { tensor, norm });
    }
    let device = gradients.first().map_or(Device::Cpu, Tensor::device);
    let scaled = (sum * scale).to_device(device);
    Ok(parts(&scaled, gradients).collect())
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
