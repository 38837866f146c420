//! Random values of weights: the same numbers for the same seed, on every device and rank.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::blocks::Value;
use super::experts::DELTA_NORM;
use crate::model::spec::{Expected, NormForm};
use crate::runtime::random::{FACTORS, STEP, split_mix};
use crate::runtime::units::{as_dim, as_index, float, from_dim};
use crate::tensor::bytes::{self, fill_from_bytes};

/// Elements that are made together.
const BLOCK_ELEMENTS: i64 = 1 << 20;

/// Logarithms of the rates at which heads of a gated delta rule forget lie between this and 0: with a bias of 0, a state halves
/// after one position to a thousand.
const LOG_RATE_MIN: f64 = -7.0;

/// Fills a norm with what leaves its input's scale as it is, a bias with 0, the logarithms of a delta rule's rates with values
/// spread over heads, and a matrix or convolution with uniform values of standard deviation 1/√inputs.
///
/// A matrix in fp8 is drawn in the model's dtype and then rounded.
pub(super) fn fill_random(target: Value, expected: &Expected, norm: NormForm, stream: u64) -> Result<(), bytes::Error> {
    match target {
        Value::Plain(mut tensor) => fill_plain(&mut tensor, expected, norm, stream),
        Value::Blocks(mut blocks) => {
            let mut drawn = blocks.f_room()?;
            fill_plain(&mut drawn, expected, norm, stream)?;
            Ok(blocks.round(&drawn)?)
        }
    }
}

/// How the values of a tensor are distributed.
enum Values {
    /// All are this.
    Constant(f64),
    /// Between `middle` − `half_width` and `middle` + `half_width`.
    Uniform { middle: f64, half_width: f64 },
}

impl Values {
    fn of(expected: &Expected, norm: NormForm) -> Values {
        let name = &expected.name;
        if let [_, inputs @ ..] = &expected.shape[..]
            && !inputs.is_empty()
        {
            let inputs: u64 = inputs.iter().product();
            return Values::Uniform { middle: 0.0, half_width: (3.0 / float(inputs)).sqrt() };
        }
        if name.ends_with(".A_log") {
            return Values::Uniform { middle: LOG_RATE_MIN / 2.0, half_width: -LOG_RATE_MIN / 2.0 };
        }
        let is_factor = norm == NormForm::Weight || name.ends_with(DELTA_NORM);
        Values::Constant(if is_factor && !name.ends_with("bias") { 1.0 } else { 0.0 })
    }
}

fn fill_plain(tensor: &mut Tensor, expected: &Expected, norm: NormForm, stream: u64) -> Result<(), bytes::Error> {
    let (middle, half_width) = match Values::of(expected, norm) {
        Values::Constant(constant) => {
            let _itself = tensor.f_fill_(constant)?;
            return Ok(());
        }
        Values::Uniform { middle, half_width } => (middle, half_width),
    };
    let value = |counter: u64| {
        let [_, _, _, _, a, b, c, d] = split_mix(stream.wrapping_add(counter)).to_le_bytes();
        (f64::from(u32::from_le_bytes([a, b, c, d])) / 2_147_483_648.0 - 1.0) * half_width + middle
    };
    let flat = tensor.f_view([-1])?;
    let elements = as_dim(expected.elements());
    let mut start = 0;
    while start < elements {
        let length = BLOCK_ELEMENTS.min(elements - start);
        let mut part = flat.f_narrow(0, start, length)?;
        if tensor.device() == Device::Cpu {
            let mut buffer = Vec::with_capacity(8 * as_index(from_dim(length)));
            for counter in from_dim(start)..from_dim(start + length) {
                buffer.extend_from_slice(&value(counter).to_le_bytes());
            }
            fill_from_bytes(&mut part, &buffer, Kind::Double)?;
        } else {
            part.copy_(&(uniform_on(tensor.device(), stream, start..start + length) * half_width + middle));
        }
        start += length;
    }
    Ok(())
}

/// What [`split_mix`] makes of `stream` + counter, as numbers in [−1, 1): the same bits as on the processor. Additions and
/// products of signed integers wrap as unsigned ones do; shifts to the right bring the sign along, which is masked.
fn uniform_on(device: Device, stream: u64, counters: Range<i64>) -> Tensor {
    let signed = |x: u64| i64::from_ne_bytes(x.to_ne_bytes());
    let shifted = |z: &Tensor, bits: i64| z.bitwise_right_shift_tensor_scalar(bits).bitwise_and(i64::MAX >> (bits - 1));
    let start = signed(stream.wrapping_add(STEP));
    let z = Tensor::arange_start(counters.start, counters.end, (Kind::Int64, device)) + start;
    let z = z.bitwise_xor_tensor(&shifted(&z, 30)) * signed(FACTORS[0]);
    let z = z.bitwise_xor_tensor(&shifted(&z, 27)) * signed(FACTORS[1]);
    let z = z.bitwise_xor_tensor(&shifted(&z, 31));
    shifted(&z, 32).to_kind(Kind::Double) / 2_147_483_648.0 - 1.0
}
