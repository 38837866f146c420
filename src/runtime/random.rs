//! `SplitMix64` (Steele, Lea and Flood, 2014): random numbers that are the same on every machine, rank and version.

/// What the state grows by from one number to the next.
pub const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
/// The factors of the mixing function.
pub const FACTORS: [u64; 2] = [0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb];

/// The number that follows `state`, whose next state is `state` + [`STEP`]. So a counter gives a well-mixed number each.
#[must_use]
pub fn split_mix(state: u64) -> u64 {
    let z = state.wrapping_add(STEP);
    let z = (z ^ (z >> 30)).wrapping_mul(FACTORS[0]);
    let z = (z ^ (z >> 27)).wrapping_mul(FACTORS[1]);
    z ^ (z >> 31)
}
