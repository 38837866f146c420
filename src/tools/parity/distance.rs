//! Relative L2 distances of tensors.

use tch::{Device, Kind, Tensor};

/// Norms below this are those of nothing: then what is found is the error.
const NOTHING: f64 = 1e-12;

/// Distance of some rows of a tensor from what they should be, as sums of squares: parts on several ranks add up.
#[derive(Clone, Copy, Debug, Default)]
pub struct Squares {
    /// Sum of (found − expected)².
    pub error: f64,
    /// Sum of expected².
    pub expected: f64,
}

impl Squares {
    /// In float64 on the CPU.
    #[must_use]
    pub fn between(found: &Tensor, expected: &Tensor) -> Squares {
        let square = |x: Tensor| x.square().sum(Kind::Double).double_value(&[]);
        let expected = double(expected);
        Squares { error: square(double(found) - &expected), expected: square(expected) }
    }

    /// Adds other rows or another tensor.
    pub fn add(&mut self, other: Squares) {
        self.error += other.error;
        self.expected += other.expected;
    }

    /// ‖found − expected‖ / ‖expected‖, or ‖found‖ where nothing is expected.
    #[must_use]
    pub fn relative(self) -> f64 {
        ratio(self.error.sqrt(), self.expected.sqrt())
    }
}

/// The same for whole tensors. libtorch takes the roots, which may differ from the processor's in the last bit: reports of
/// gradients have always been written with them.
#[must_use]
pub fn relative(found: &Tensor, expected: &Tensor) -> f64 {
    let norm = |x: Tensor| x.square().sum(Kind::Double).sqrt().double_value(&[]);
    let expected = double(expected);
    let error = norm(double(found) - &expected);
    ratio(error, norm(expected))
}

fn ratio(error: f64, expected: f64) -> f64 {
    if expected < NOTHING { error } else { error / expected }
}

fn double(x: &Tensor) -> Tensor {
    x.to_device(Device::Cpu).to_kind(Kind::Double)
}

/// How far two sets of named tensors lie apart.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "names and types say what is not described")]
pub struct Distance {
    /// All tensors together.
    pub all: f64,
    /// The tensor that is furthest off; infinite where it is not a number.
    pub worst: f64,
    pub worst_tensor: String,
}

impl Distance {
    /// Of tensors in one order.
    pub fn between(names: impl Iterator<Item = String>, found: &[Tensor], expected: &[Tensor]) -> Distance {
        let mut all = Squares::default();
        let mut worst = (0.0, String::new());
        for (name, (found, expected)) in names.zip(found.iter().zip(expected)) {
            all.add(Squares::between(found, expected));
            let error = comparable(relative(found, expected));
            if error > worst.0 || worst.1.is_empty() {
                worst = (error, name);
            }
        }
        Distance { all: all.relative(), worst: worst.0, worst_tensor: worst.1 }
    }
}

/// An error that can be ordered: one that is not a number is the largest of all.
#[must_use]
pub fn comparable(error: f64) -> f64 {
    if error.is_nan() { f64::INFINITY } else { error }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_relative_and_one_value_that_is_none_is_the_worst() {
        let tensor = |values: &[f64]| Tensor::from_slice(values);
        let names = || ["a", "b", "c"].map(String::from).into_iter();
        let two = [tensor(&[3.0, 4.0]), tensor(&[0.0]), tensor(&[1.0])];
        let near = Distance::between(names(), &[tensor(&[3.0, 4.5]), tensor(&[1e-3]), tensor(&[1.0])], &two);
        assert!((near.worst - 0.1).abs() < 1e-12 && near.worst_tensor == "a", "{near:?}");
        assert!((near.all - ((0.25 + 1e-6) / 26.0_f64).sqrt()).abs() < 1e-12);
        let none = Distance::between(names(), &[tensor(&[3.0, 4.0]), tensor(&[0.0]), tensor(&[f64::NAN])], &two);
        assert_eq!((none.worst, none.worst_tensor.as_str()), (f64::INFINITY, "c"));
    }
}
