//! Noise that is a function of where it stands: no state, so any rank and any resumed run has the same.

use tch::{Kind, Tensor};

use crate::data::Random;
use crate::runtime::random::{self, FACTORS};

/// A place in a tree of random numbers: seed, group, answer, token.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Stream(u64);

/// The constants of `SplitMix64`.
const STEP: i64 = random::STEP.cast_signed();
const FIRST: i64 = FACTORS[0].cast_signed();
const SECOND: i64 = FACTORS[1].cast_signed();
/// A uniform number is an odd multiple of half of this: 52 bits and a half fill a float64, so neither 0 nor 1 comes out.
const UNIT: f64 = 1.0 / 4_503_599_627_370_496.0;

impl Stream {
    /// The root of `seed`.
    #[must_use]
    pub fn of_seed(seed: u64) -> Stream {
        Stream(seed)
    }

    /// The number from which the stream's noise follows.
    #[must_use]
    pub(super) fn root(self) -> u64 {
        self.0
    }

    /// The branch of this number.
    #[must_use]
    pub fn part(self, number: u64) -> Stream {
        Stream(Random::new(self.0, number).next())
    }
}

/// Gumbel noise for each of `entries`, int64, [v], in each of the streams: −ln(−ln u), u the entry's uniform number; float64,
/// [streams, v].
pub(super) fn gumbel(streams: &[Stream], entries_v: &Tensor) -> Tensor {
    -(-uniform(streams, entries_v).log()).log()
}

/// Numbers within (0, 1), [streams, v].
fn uniform(streams: &[Stream], entries_v: &Tensor) -> Tensor {
    let roots: Vec<i64> = streams.iter().map(|stream| stream.0.cast_signed()).collect();
    let roots_s1 = Tensor::from_slice(&roots).to_device(entries_v.device()).unsqueeze(1);
    // Multiplication of 64-bit integers wraps round, as the algorithm wants it.
    let state: Tensor = (entries_v + 1) * STEP + roots_s1;
    let mixed = state.bitwise_xor_tensor(&shifted(&state, 30)) * FIRST;
    let mixed = mixed.bitwise_xor_tensor(&shifted(&mixed, 27)) * SECOND;
    let mixed = mixed.bitwise_xor_tensor(&shifted(&mixed, 31));
    (shifted(&mixed, 12).to_kind(Kind::Double) + 0.5) * UNIT
}

/// Bits moved to the right, with zeros coming in: the library's own shift brings in the sign.
fn shifted(x: &Tensor, bits: u32) -> Tensor {
    x.bitwise_right_shift_tensor_scalar(i64::from(bits)).bitwise_and((1_i64 << (64 - bits)) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    fn entries(count: i64) -> Tensor {
        Tensor::arange(count, (Kind::Int64, Device::Cpu))
    }

    #[test]
    fn the_tensor_form_is_the_sequence_of_the_scalar_one() {
        let roots = [0u64, 7, u64::MAX, 1 << 63];
        let all = uniform(&roots.map(Stream), &entries(100)) / UNIT - 0.5;
        for (row, state) in (0..).zip(roots) {
            let mut random = Random::from_state(state);
            let expected: Vec<u64> = (0..100).map(|_| random.next() >> 12).collect();
            let found = Vec::<f64>::try_from(all.get(row)).unwrap();
            let expected: Vec<f64> = expected.into_iter().map(crate::runtime::units::float).collect();
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn branches_differ_and_repeat() {
        let root = Stream::of_seed(3);
        assert_eq!(root.part(1).part(2), Stream::of_seed(3).part(1).part(2));
        assert_ne!(root.part(1).part(2), root.part(2).part(1));
        assert_ne!(root.part(0), root);
    }

    #[test]
    fn gumbel_noise_has_its_mean_and_is_finite() {
        let noise = gumbel(&[Stream::of_seed(5)], &entries(200_000));
        assert_eq!(noise.isfinite().all().int64_value(&[]), 1);
        assert!((noise.mean(Kind::Double).double_value(&[]) - 0.577_215_66).abs() < 0.01);
    }
}
