//! Extremes that keep a NaN: a comparison with one is false, so that `f64::max` would drop it.

/// The larger of two numbers, or a NaN if there is one.
#[must_use]
pub fn max_or_nan(one: f64, two: f64) -> f64 {
    if one.is_nan() || two.is_nan() { f64::NAN } else { one.max(two) }
}

/// The smaller of two numbers, or a NaN if there is one.
#[must_use]
pub fn min_or_nan(one: f64, two: f64) -> f64 {
    -max_or_nan(-one, -two)
}

/// Smallest and largest of some numbers; NaN where one of them was.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(missing_docs, reason = "the names say everything")]
pub struct Range {
    pub least: f64,
    pub most: f64,
}

impl Range {
    /// The range of one number.
    #[must_use]
    pub fn at(number: f64) -> Range {
        Range { least: number, most: number }
    }

    /// The range that covers two ranges, either of which may have no numbers.
    #[must_use]
    pub fn cover(one: Option<Range>, two: Option<Range>) -> Option<Range> {
        let (Some(a), Some(b)) = (one, two) else { return one.or(two) };
        Some(Range { least: min_or_nan(a.least, b.least), most: max_or_nan(a.most, b.most) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nan_stays_at_the_end_where_it_is() {
        assert_eq!(Range::cover(Some(Range { least: 1.0, most: 2.0 }), None), Some(Range { least: 1.0, most: 2.0 }));
        let (a, b) = (Range { least: f64::NAN, most: 2.0 }, Range { least: 0.5, most: 3.0 });
        for range in [Range::cover(Some(a), Some(b)), Range::cover(Some(b), Some(a))] {
            let range = range.expect("both have numbers");
            assert!(range.least.is_nan() && range.most >= 3.0);
        }
        assert!(min_or_nan(-1.0, 2.0) <= -1.0 && max_or_nan(f64::NAN, 1.0).is_nan());
    }
}
