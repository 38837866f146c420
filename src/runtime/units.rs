//! Counts, sizes and indices as types of their own.
//!
//! Their types keep a count (`Tokens`), a size (`Bytes`) and an index (`Position`) apart; every value has 64 bits.

use derive_more::{Add, AddAssign, Display, FromStr, Sum};
use serde::{Deserialize, Serialize};

/// A number of positions (tokens).
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    Eq,
    Hash,
    Ord,
    PartialEq,
    PartialOrd,
    Add,
    AddAssign,
    Deserialize,
    Display,
    FromStr,
    Serialize,
    Sum,
)]
#[serde(transparent)]
pub struct Tokens(pub u64);

/// A number of pages.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    Eq,
    Hash,
    Ord,
    PartialEq,
    PartialOrd,
    Add,
    AddAssign,
    Deserialize,
    Display,
    FromStr,
    Serialize,
    Sum,
)]
#[serde(transparent)]
pub struct Pages(pub u64);

/// A size in bytes.
#[derive(
    Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd, Add, AddAssign, Deserialize, Serialize, Sum,
)]
#[serde(transparent)]
pub struct Bytes(pub u64);

/// Index of a token in prompt and answer, from 0.
#[derive(Clone, Copy, Debug, Default, Deserialize, Display, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(transparent)]
pub struct Position(pub u64);

/// Index of a page in the prompt, from 0.
#[derive(Clone, Copy, Debug, Default, Deserialize, Display, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(transparent)]
pub struct PageIndex(pub u64);

/// Index of a decoder layer, from 0.
#[derive(Clone, Copy, Debug, Default, Deserialize, Display, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(transparent)]
pub struct LayerIndex(pub usize);

/// Index of a process in the world or in one of its axes, from 0.
#[derive(Clone, Copy, Debug, Default, Deserialize, Display, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(transparent)]
pub struct Rank(pub usize);

/// A 64-bit count as a tensor dimension.
///
/// # Panics
/// When the count exceeds `i64::MAX`, which no tensor can hold.
#[must_use]
pub fn as_dim(count: u64) -> i64 {
    i64::try_from(count).expect("a tensor dimension stays below 2^63")
}

/// A tensor dimension as a 64-bit count.
///
/// # Panics
/// When the dimension is negative, which no tensor has.
#[must_use]
pub fn from_dim(dim: i64) -> u64 {
    u64::try_from(dim).expect("a tensor dimension is not negative")
}

/// A 64-bit count as a slice index on this machine.
///
/// # Panics
/// On a machine whose addresses are narrower than the count.
#[must_use]
pub fn as_index(count: u64) -> usize {
    usize::try_from(count).expect("addresses are 64 bits wide")
}

/// A slice length as a 64-bit count.
#[must_use]
pub fn from_index(length: usize) -> u64 {
    length as u64
}

/// A count as a float, exact up to 2^32 and rounded beyond, for means and rates.
#[must_use]
pub fn float(count: u64) -> f64 {
    let (high, low) = (count >> 32, count & u64::from(u32::MAX));
    let part = |half: u64| f64::from(u32::try_from(half).unwrap_or(u32::MAX));
    part(high).mul_add(4_294_967_296.0, part(low))
}

impl Tokens {
    /// As a tensor dimension.
    #[must_use]
    pub fn dim(self) -> i64 {
        as_dim(self.0)
    }

    /// As a slice index.
    #[must_use]
    pub fn index(self) -> usize {
        as_index(self.0)
    }

    /// Pages that hold this many positions; the last may be partly filled.
    #[must_use]
    pub fn pages(self, page_size: Tokens) -> Pages {
        Pages(self.0.div_ceil(page_size.0))
    }
}

impl Position {
    /// As a slice index.
    #[must_use]
    pub fn index(self) -> usize {
        as_index(self.0)
    }

    /// The position `by` tokens later.
    #[must_use]
    pub fn plus(self, by: Tokens) -> Position {
        Position(self.0 + by.0)
    }

    /// Tokens from `earlier` to here; 0 when `earlier` is later.
    #[must_use]
    pub fn since(self, earlier: Position) -> Tokens {
        Tokens(self.0.saturating_sub(earlier.0))
    }
}

impl std::fmt::Display for Bytes {
    /// Binary units with two decimals, the exact count below 1 KiB.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (unit, shift) = match self.0 {
            0..0x400 => return write!(f, "{} B", self.0),
            0x400..0x10_0000 => ("KiB", 10),
            0x10_0000..0x4000_0000 => ("MiB", 20),
            0x4000_0000..0x100_0000_0000 => ("GiB", 30),
            _ => ("TiB", 40),
        };
        let hundredths = (u128::from(self.0) * 100) >> shift;
        write!(f, "{}.{:02} {unit}", hundredths / 100, hundredths % 100)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_read_in_binary_units() {
        assert_eq!(Bytes(1023).to_string(), "1023 B");
        assert_eq!(Bytes(1536).to_string(), "1.50 KiB");
        assert_eq!(Bytes(309 << 30).to_string(), "309.00 GiB");
    }

    #[test]
    fn a_count_as_a_float_does_not_saturate() {
        assert!((float(7) - 7.0).abs() < 1e-15);
        assert!((float((1 << 40) + 5) - 1_099_511_627_781.0).abs() < 1e-3);
    }

    #[test]
    fn a_partly_filled_page_is_a_page() {
        assert_eq!(Tokens(2_088_960).pages(Tokens(64)), Pages(32_640));
        assert_eq!(Tokens(65).pages(Tokens(64)), Pages(2));
        assert_eq!(Tokens(0).pages(Tokens(64)), Pages(0));
    }
}
