//! The addends of frozen weights.

use super::addend::{Addend, Place, addend, product};
use super::sizes::Sizes;
use crate::config::Weights;
use crate::model::shape::{Layer, Projection};
use crate::runtime::units::Bytes;

/// Rows and columns of a block of fp8 weights, which one float32 factor belongs to.
const BLOCK: u64 = 128;
/// Bytes of that factor.
const FACTOR_BYTES: u64 = 4;
/// Elements that are dequantised together.
const PIECE_ELEMENTS: u64 = 1 << 24;

/// Bytes of a matrix in fp8, with its factors.
fn fp8_bytes(rows: u64, columns: u64) -> u64 {
    let factors = product(&[rows.div_ceil(BLOCK), columns.div_ceil(BLOCK), FACTOR_BYTES]);
    product(&[rows, columns]).0.saturating_add(factors.0)
}

/// The sum of a number of every linear layer of one decoder layer.
fn of_linears(layer: &Layer, of: impl Fn(&Projection) -> u64) -> u64 {
    layer.projections.iter().map(of).fold(0, u64::saturating_add)
}

fn elements(layer: &Layer) -> u64 {
    of_linears(layer, |linear| product(&[linear.inputs, linear.outputs]).0)
}

impl Sizes<'_> {
    /// Frozen weights. Experts are spread over the ranks of an expert group; every rank has all other weights. In fp8 are
    /// the linear layers and the experts.
    pub(super) fn weights(&self) -> Vec<Addend> {
        let (all, experts, model) = (self.shape.parameter_count(), self.shape.experts(), self.model_bytes);
        let spread = self.config.parallel.ep_size.max(1);
        let own = experts.div_ceil(spread);
        let shared = all - experts;
        // Sides of experts are multiples of a block in every published model.
        let fp8_experts = own.saturating_add(product(&[own.div_ceil(BLOCK * BLOCK), FACTOR_BYTES]).0);
        let fp8_linears = self.shape.sum(|layer| of_linears(layer, |linear| fp8_bytes(linear.outputs, linear.inputs)));
        let linears = self.shape.sum(elements);
        let plain = shared.saturating_sub(linears);
        let fp8 = Bytes(product(&[plain, model]).0.saturating_add(fp8_linears).saturating_add(fp8_experts));
        if self.config.model.weights == Weights::Fp8 {
            let of_experts = if experts == 0 { String::new() } else { format!(" and {own} of experts") };
            let reason = format!(
                "{plain} parameters × {model} B; {linears} of linear layers{of_experts} × 1 B, and {FACTOR_BYTES} B for each \
                 {BLOCK} × {BLOCK} of them"
            );
            let knob = "spread experts over more ranks (parallel.ep_size), or choose a smaller model";
            return vec![addend("weights", Place::Device, fp8, reason, knob), self.dequantised()];
        }
        let bytes = product(&[shared.saturating_add(own), model]);
        let (reason, knob) = if experts == 0 {
            (format!("{all} parameters × {model} B"), "choose a smaller model, or model.dtype = \"bfloat16\"")
        } else {
            let reason = format!(
                "({shared} parameters, and {experts} of experts over {spread} ranks) × {model} B; held in fp8 they would be \
                 {fp8}"
            );
            (
                reason,
                "spread experts over more ranks (parallel.ep_size), or take an fp8 checkpoint (model.weights = \"fp8\")",
            )
        };
        vec![addend("weights", Place::Device, bytes, reason, knob)]
    }

    /// Weights in the model's dtype while they are used: a layer's linear layers, which its graph holds until their gradients
    /// are made, this rank's experts of the layer, and a piece of a matrix that is being dequantised.
    fn dequantised(&self) -> Addend {
        let spread = self.config.parallel.ep_size.max(1);
        let layer = self.shape.most(|layer| elements(layer).saturating_add(layer.experts.div_ceil(spread)));
        let piece = product(&[layer.min(PIECE_ELEMENTS), self.model_bytes.min(4)]);
        let bytes = Bytes(product(&[layer, self.model_bytes]).0.saturating_add(piece.0));
        let reason = format!(
            "{layer} values of a layer's linear layers and of its experts here × {} B, and {piece} on their way",
            self.model_bytes
        );
        addend(
            "dequantised weights",
            Place::Device,
            bytes,
            reason,
            "set model.weights = \"checkpoint\", where there is room",
        )
    }
}
