//! GGUF's stored types, and how their blocks become float32.
//!
//! A block is a run of values of one row that share scales. Legacy blocks have 32 values, K blocks 256. All sums and
//! products are float32 in the order of llama.cpp's reference code, so that the values equal other readers' bit for bit.

use half::{bf16, f16};

use crate::runtime::units::as_index;

/// A stored type that can be read.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Quant {
    F32,
    F16,
    /// 4 bits, scale.
    Q4_0,
    /// 4 bits, scale and minimum.
    Q4_1,
    /// 5 bits, scale.
    Q5_0,
    /// 5 bits, scale and minimum.
    Q5_1,
    /// 8 bits, scale.
    Q8_0,
    /// 4 bits, 8 sub-blocks with 6-bit scales and minima.
    Q4K,
    /// 5 bits, 8 sub-blocks with 6-bit scales and minima.
    Q5K,
    /// 6 bits, 16 sub-blocks with 8-bit scales.
    Q6K,
    Bf16,
}

/// One row of the table of readable types.
struct Layout {
    quant: Quant,
    /// The type's number in a GGUF file.
    number: u32,
    name: &'static str,
    block_values: u64,
    block_bytes: u64,
}

const fn layout(quant: Quant, number: u32, name: &'static str, block_values: u64, block_bytes: u64) -> Layout {
    Layout { quant, number, name, block_values, block_bytes }
}

const READABLE: [Layout; 11] = [
    layout(Quant::F32, 0, "F32", 1, 4),
    layout(Quant::F16, 1, "F16", 1, 2),
    layout(Quant::Bf16, 30, "BF16", 1, 2),
    layout(Quant::Q4_0, 2, "Q4_0", 32, 18),
    layout(Quant::Q4_1, 3, "Q4_1", 32, 20),
    layout(Quant::Q5_0, 6, "Q5_0", 32, 22),
    layout(Quant::Q5_1, 7, "Q5_1", 32, 24),
    layout(Quant::Q8_0, 8, "Q8_0", 32, 34),
    layout(Quant::Q4K, 12, "Q4_K", 256, 144),
    layout(Quant::Q5K, 13, "Q5_K", 256, 176),
    layout(Quant::Q6K, 14, "Q6_K", 256, 210),
];

/// Types that cannot be read, named in the refusal.
const REFUSED: [(u32, &str); 19] = [
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (26, "I32"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
];

impl Quant {
    /// The type with this number in a GGUF file, or the name of a type that cannot be read.
    pub(super) fn from_number(number: u32) -> Result<Quant, String> {
        if let Some(layout) = READABLE.iter().find(|layout| layout.number == number) {
            return Ok(layout.quant);
        }
        Err(match REFUSED.iter().find(|refused| refused.0 == number) {
            Some((_, name)) => (*name).to_owned(),
            None => format!("unknown type {number}"),
        })
    }

    /// All readable names, for messages.
    pub(super) fn names() -> String {
        READABLE.map(|layout| layout.name).join(", ")
    }

    /// The name in llama.cpp.
    pub(super) fn name(self) -> &'static str {
        self.layout().name
    }

    pub(super) fn block_values(self) -> u64 {
        self.layout().block_values
    }

    pub(super) fn block_bytes(self) -> u64 {
        self.layout().block_bytes
    }

    fn layout(self) -> &'static Layout {
        READABLE.iter().find(|layout| layout.quant == self).expect("every type is in the table")
    }

    /// The values of whole blocks.
    ///
    /// # Panics
    /// When `stored` is not a whole number of blocks, which the header check excludes.
    pub(super) fn values(self, stored: &[u8]) -> Vec<f32> {
        let block_bytes = as_index(self.block_bytes());
        assert_eq!(stored.len() % block_bytes, 0, "whole blocks of {}", self.name());
        let mut out = Vec::with_capacity(stored.len() / block_bytes * as_index(self.block_values()));
        for block in stored.chunks_exact(block_bytes) {
            match self {
                Quant::F32 => out.push(f32::from_le_bytes([block[0], block[1], block[2], block[3]])),
                Quant::F16 => out.push(half_at(block, 0)),
                Quant::Bf16 => out.push(bf16::from_le_bytes([block[0], block[1]]).to_f32()),
                Quant::Q4_0 => nibbles(&block[2..], [0; 4], |q| (q - 8.0) * half_at(block, 0), &mut out),
                Quant::Q4_1 => nibbles(&block[4..], [0; 4], |q| q * half_at(block, 0) + half_at(block, 2), &mut out),
                Quant::Q5_0 => nibbles(&block[6..], word(block, 2), |q| (q - 16.0) * half_at(block, 0), &mut out),
                Quant::Q5_1 => {
                    nibbles(&block[8..], word(block, 4), |q| q * half_at(block, 0) + half_at(block, 2), &mut out);
                }
                Quant::Q8_0 => {
                    out.extend(block[2..].iter().map(|q| f32::from(i8::from_le_bytes([*q])) * half_at(block, 0)));
                }
                Quant::Q4K => k_nibbles(block, None, &block[16..], &mut out),
                Quant::Q5K => k_nibbles(block, Some(&block[16..48]), &block[48..], &mut out),
                Quant::Q6K => k_six(block, &mut out),
            }
        }
        out
    }
}

/// The float16 at byte `at`.
fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Four bytes from byte `at`: one fifth bit for each of 32 values.
fn word(block: &[u8], at: usize) -> [u8; 4] {
    [block[at], block[at + 1], block[at + 2], block[at + 3]]
}

/// 32 values: the low nibbles of 16 bytes, then their high ones, each with its fifth bit from `fifth`.
fn nibbles(packed: &[u8], fifth: [u8; 4], value: impl Fn(f32) -> f32, out: &mut Vec<f32>) {
    for index in 0..32 {
        let byte = packed[index % 16];
        let four = if index < 16 { byte & 0x0f } else { byte >> 4 };
        let bit = (fifth[index / 8] >> (index % 8)) & 1;
        out.push(value(f32::from(four | (bit << 4))));
    }
}

/// 256 values in 8 sub-blocks of 32: `q · (d · scale) − dmin · minimum`. Sub-blocks 2j and 2j+1 share 32 bytes, low
/// nibbles first; bit s of `fifth[i]` is the fifth bit of value i of sub-block s.
fn k_nibbles(block: &[u8], fifth: Option<&[u8]>, packed: &[u8], out: &mut Vec<f32>) {
    let (d, d_min) = (half_at(block, 0), half_at(block, 2));
    for sub in 0..8 {
        let (scale, minimum) = k_scale(&block[4..16], sub);
        let (scale, minimum) = (d * f32::from(scale), d_min * f32::from(minimum));
        let bytes = &packed[sub / 2 * 32..][..32];
        for (index, byte) in bytes.iter().enumerate() {
            let four = if sub % 2 == 0 { byte & 0x0f } else { byte >> 4 };
            let bit = fifth.map_or(0, |fifth| (fifth[index] >> sub) & 1);
            out.push(scale * f32::from(four | (bit << 4)) - minimum);
        }
    }
}

/// The 6-bit scale and minimum of one of 8 sub-blocks, from 12 bytes. Sub-blocks 0–3: the low six bits of bytes 0–3 and
/// 4–7. Sub-blocks 4–7: the low four bits are in bytes 8–11, the top two in the top bits of bytes 0–3 and 4–7.
fn k_scale(packed: &[u8], sub: usize) -> (u8, u8) {
    if sub < 4 {
        return (packed[sub] & 0x3f, packed[sub + 4] & 0x3f);
    }
    let scale = (packed[sub + 4] & 0x0f) | ((packed[sub - 4] >> 6) << 4);
    let minimum = (packed[sub + 4] >> 4) | ((packed[sub] >> 6) << 4);
    (scale, minimum)
}

/// 256 values in 16 sub-blocks of 16: `d · scale · (q − 32)`. Each half of 128 values takes 64 bytes of low nibbles and
/// 32 bytes of top bits: quarter k (32 values) has its nibbles in bytes 32·(k mod 2), low for k < 2, and bits 2k of the top.
fn k_six(block: &[u8], out: &mut Vec<f32>) {
    let (low, top, scales, d) = (&block[..128], &block[128..192], &block[192..208], half_at(block, 208));
    for value in 0..256 {
        let (half, quarter, index) = (value / 128, value % 128 / 32, value % 32);
        let byte = low[half * 64 + quarter % 2 * 32 + index];
        let four = if quarter < 2 { byte & 0x0f } else { byte >> 4 };
        let two = (top[half * 32 + index] >> (2 * quarter)) & 3;
        let scale = f32::from(i8::from_le_bytes([scales[value / 16]]));
        out.push(d * scale * (f32::from(four | (two << 4)) - 32.0));
    }
}
