//! Weights in fp8: a byte (e4m3) for each value, a float32 factor for each block of 128 × 128 values.
//!
//! 1. A matrix of o rows and i columns has ⌈o/128⌉ × ⌈i/128⌉ factors; blocks at its lower and right edge may be smaller.
//! 2. A weight is float32(value) · factor in float32, then rounded to the model's dtype: whenever that is done, the weight
//!    is the same number.
//! 3. Matrices that are joined to one tensor keep their blocks: these begin anew with each matrix.

use std::ops::Range;

use tch::{Device, Kind, TchError, Tensor};

use crate::runtime::units::Bytes;
use crate::tensor::boundary::storage_bytes;

/// Elements that are dequantised together.
const PIECE_ELEMENTS: i64 = 1 << 24;
/// The largest value of e4m3.
const LARGEST: f64 = 448.0;
/// Rows and columns of a block.
const SIDE: i64 = 128;

/// Blocks that cover a side of so many values.
fn blocks_of(values: i64) -> i64 {
    (values + SIDE - 1) / SIDE
}

/// Matrices in fp8 with their factors.
#[derive(Debug)]
pub(super) struct Blocks {
    /// One matrix [o, i], or [n, r, i] of n experts with r rows in one matrix or two.
    pub(super) values: Tensor,
    /// Float32 [matrices, ⌈o/128⌉, ⌈i/128⌉].
    pub(super) scales: Tensor,
    /// Dtype of the dequantised weights.
    kind: Kind,
}

impl Blocks {
    /// Room for weights of `shape`, in which each of the first dimension's entries is `parts` matrices.
    pub(super) fn empty(shape: &[i64], parts: i64, kind: Kind, device: Device) -> Result<Blocks, TchError> {
        let [.., rows, columns] = shape else { unreachable!("only matrices are held in blocks") };
        let matrices = if shape.len() == 3 { shape[0] * parts } else { 1 };
        let factors = [matrices, blocks_of(rows / parts), blocks_of(*columns)];
        let values = Tensor::f_empty(shape, (Kind::Float8e4m3fn, device))?;
        let scales = Tensor::f_empty(factors, (Kind::Float, device))?;
        Ok(Blocks { values, scales, kind })
    }

    /// All weights, in the model's dtype.
    pub(super) fn dequantised(&self) -> Tensor {
        self.f_dequantised().unwrap_or_else(|error| panic!("fp8 weights {:?}: {error}", self.values.size()))
    }

    /// The same, where too little memory is no fault of the program.
    pub(super) fn f_dequantised(&self) -> Result<Tensor, TchError> {
        let mut target = self.f_room()?;
        dequantise_into(&mut target, &self.values, &self.scales)?;
        Ok(target)
    }

    /// A new tensor for as many values in the model's dtype.
    pub(super) fn f_room(&self) -> Result<Tensor, TchError> {
        Tensor::f_empty(self.values.size(), (self.kind, self.values.device()))
    }

    /// The entries `range` of the first of three dimensions, in place.
    pub(super) fn range(&self, range: Range<i64>) -> Blocks {
        let parts = self.scales.size()[0] / self.values.size()[0].max(1);
        let count = range.end - range.start;
        let values = self.values.narrow(0, range.start, count);
        let scales = self.scales.narrow(0, range.start * parts, count * parts);
        Blocks { values, scales, kind: self.kind }
    }

    /// Rows `rows` of entry `expert`, which are its matrix `part`, in place.
    pub(super) fn matrix(&self, expert: i64, part: i64, rows: i64) -> Result<Blocks, TchError> {
        let parts = self.values.size()[1] / rows;
        let values = self.values.f_select(0, expert)?.f_narrow(0, part * rows, rows)?;
        let scales = self.scales.f_narrow(0, expert * parts + part, 1)?;
        Ok(Blocks { values, scales, kind: self.kind })
    }

    pub(super) fn shallow_clone(&self) -> Blocks {
        let (values, scales) = (self.values.shallow_clone(), self.scales.shallow_clone());
        Blocks { values, scales, kind: self.kind }
    }

    /// Rounds the matrix `weights` [o, i] to blocks: the factor of a block takes its largest value to that of e4m3.
    pub(super) fn round(&mut self, weights: &Tensor) -> Result<(), TchError> {
        let (columns, blocks) = (self.values.size()[1], self.scales.size()[2]);
        for segment in segments(&self.values, &self.scales, PIECE_ELEMENTS) {
            let wide = weights.f_narrow(0, segment.row, segment.rows())?.f_to_kind(Kind::Float)?;
            let padded = wide.f_constant_pad_nd([0, blocks * SIDE - columns])?;
            let apart = padded.f_view([segment.blocks, segment.height, blocks, SIDE])?;
            let largest = apart.f_abs()?.f_amax([1i64, 3], true)?;
            let factors = largest.f_where_self(&largest.f_gt(0.0)?, &largest.f_ones_like()?.f_mul_scalar(LARGEST)?)?;
            let factors = factors.f_div_scalar(LARGEST)?;
            let scaled = apart.f_div(&factors)?.f_clamp(-LARGEST, LARGEST)?;
            let scaled = scaled.f_view([segment.rows(), blocks * SIDE])?.f_narrow(1, 0, columns)?;
            self.values.f_narrow(0, segment.row, segment.rows())?.f_copy_(&scaled)?;
            let flat = self.scales.f_view([-1, blocks])?;
            flat.f_narrow(0, segment.block, segment.blocks)?.f_copy_(&factors.f_view([segment.blocks, blocks])?)?;
        }
        Ok(())
    }
}

/// Writes float32(values) · scales into `target`, of the values' shape and any dtype, piece by piece. A piece is cast to a
/// dtype that holds every e4m3 value, and the product goes from there to `target` at once: what is computed in float32
/// never stands in memory.
pub(super) fn dequantise_into(target: &mut Tensor, values: &Tensor, scales: &Tensor) -> Result<(), TchError> {
    let size = values.size();
    let Some(columns) = size.last().copied().filter(|_| values.numel() > 0) else { return Ok(()) };
    let (target, values) = (target.f_view([-1, columns])?, values.f_view([-1, columns])?);
    let flat = scales.f_view([-1, scales.size()[2]])?;
    let between = match target.kind() {
        kind @ (Kind::BFloat16 | Kind::Half) => kind,
        _ => Kind::Float,
    };
    for segment in segments(&values, scales, PIECE_ELEMENTS) {
        let apart = [segment.blocks, segment.height, columns];
        let piece = |x: &Tensor| x.f_narrow(0, segment.row, segment.rows())?.f_view(apart);
        let factors = flat.f_narrow(0, segment.block, segment.blocks)?.f_repeat_interleave_self_int(SIDE, 1, None)?;
        let factors = factors.f_narrow(1, 0, columns)?.f_unsqueeze(1)?;
        let _target = piece(&values)?.f_to_kind(between)?.f_multiply_out(&piece(&target)?, &factors)?;
    }
    Ok(())
}

/// Rows of blocks that lie together and have the same height.
#[derive(Clone, Copy)]
struct Segment {
    /// The first row of values, over all matrices.
    row: i64,
    /// The first row of factors, over all matrices.
    block: i64,
    /// Rows of factors.
    blocks: i64,
    /// Rows of values for each: 128, or fewer at a lower edge.
    height: i64,
}

impl Segment {
    fn rows(self) -> i64 {
        self.blocks * self.height
    }
}

/// All rows of `values` [.., i] with factors [m, ⌈o/128⌉, ⌈i/128⌉], in pieces of `elements_max` elements or of one row of
/// blocks.
fn segments(values: &Tensor, scales: &Tensor, elements_max: i64) -> Vec<Segment> {
    let (value_size, scale_size) = (values.size(), scales.size());
    let [mut matrices, mut blocks, _] = scale_size[..] else { unreachable!("factors have three dimensions") };
    let columns = value_size.last().copied().unwrap_or(1);
    let all: i64 = value_size.iter().product::<i64>() / columns.max(1);
    let mut rows = all / matrices.max(1);
    if rows % SIDE == 0 {
        // Blocks of one matrix end where those of the next begin: as of one matrix.
        (rows, blocks, matrices) = (all, blocks * matrices, 1);
    }
    let (whole, rest) = (rows / SIDE, rows % SIDE);
    let at_once = (elements_max / (SIDE * columns.max(1))).max(1);
    let mut segments = Vec::new();
    for matrix in 0..matrices {
        let (row, block) = (matrix * rows, matrix * blocks);
        let mut done = 0;
        while done < whole {
            let here = at_once.min(whole - done);
            segments.push(Segment { row: row + done * SIDE, block: block + done, blocks: here, height: SIDE });
            done += here;
        }
        if rest > 0 {
            segments.push(Segment { row: row + whole * SIDE, block: block + whole, blocks: 1, height: rest });
        }
    }
    segments
}

/// A tensor of a model as memory holds it.
#[derive(Debug)]
pub(super) enum Value {
    /// In the model's dtype, or in the accumulation dtype.
    Plain(Tensor),
    /// Values and factors in fp8.
    Blocks(Blocks),
}

impl Value {
    /// In the model's dtype: the tensor itself, or a new one that is dequantised.
    pub(super) fn tensor(&self) -> Tensor {
        match self {
            Value::Plain(tensor) => tensor.shallow_clone(),
            Value::Blocks(blocks) => blocks.dequantised(),
        }
    }

    /// The entries `range` of the first of three dimensions, as [`Value::tensor`].
    pub(super) fn range(&self, range: Range<i64>) -> Tensor {
        match self {
            Value::Plain(tensor) => tensor.narrow(0, range.start, range.end - range.start),
            Value::Blocks(blocks) => blocks.range(range).dequantised(),
        }
    }

    /// The same values in the same storage.
    pub(super) fn shallow_clone(&self) -> Value {
        match self {
            Value::Plain(tensor) => Value::Plain(tensor.shallow_clone()),
            Value::Blocks(blocks) => Value::Blocks(blocks.shallow_clone()),
        }
    }

    /// Bytes of each storage, by its address.
    pub(super) fn storages(&self) -> Vec<(usize, Bytes)> {
        let of = |tensor: &Tensor| (tensor.data_ptr().addr(), storage_bytes(tensor));
        match self {
            Value::Plain(tensor) => vec![of(tensor)],
            Value::Blocks(blocks) => vec![of(&blocks.values), of(&blocks.scales)],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(matrices: i64, rows: i64, columns: i64, elements_max: i64) -> Vec<Segment> {
        let values = Tensor::empty([matrices * rows, columns], (Kind::Float8e4m3fn, Device::Cpu));
        let scales = Tensor::empty([matrices, blocks_of(rows), blocks_of(columns)], (Kind::Float, Device::Cpu));
        segments(&values, &scales, elements_max)
    }

    #[test]
    fn pieces_cover_every_row_once_with_the_factors_of_its_own_block() {
        for (matrices, rows) in [(1, 384), (3, 384), (1, 5), (2, 5), (3, 300), (0, 128), (2, 128)] {
            for elements_max in [1, 128 * 10 * 2, PIECE_ELEMENTS] {
                let mut next = 0;
                for piece in pieces(matrices, rows, 10, elements_max) {
                    assert_eq!(piece.row, next, "{matrices} × {rows}");
                    for row in piece.row..piece.row + piece.rows() {
                        let own = row / rows * blocks_of(rows) + row % rows / SIDE;
                        assert_eq!(
                            own,
                            piece.block + (row - piece.row) / piece.height,
                            "{matrices} × {rows}, row {row}"
                        );
                    }
                    assert!(piece.rows() * 10 <= elements_max.max(SIDE * 10));
                    next += piece.rows();
                }
                assert_eq!(next, matrices * rows);
            }
        }
    }

    #[test]
    fn whole_blocks_of_many_matrices_are_one_piece() {
        assert_eq!(pieces(4, 256, 10, PIECE_ELEMENTS).len(), 1);
    }
}
