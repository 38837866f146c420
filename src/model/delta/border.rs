//! What a gated delta rule leaves at a border between positions.

use tch::Tensor;

use crate::model::planes::Planes;

/// The state before a position, the same for every row after it; or the gradient of it.
#[derive(Debug)]
pub struct Border {
    /// The recurrent state, [h, k, v], in the accumulation dtype.
    pub state_hkv: Tensor,
    /// Raw inputs of the convolution of the rows before, oldest first, [taps − 1, u], in the model's dtype; zeros before
    /// position 0.
    pub inputs_ju: Tensor,
}

impl From<&Planes> for Border {
    /// Of planes of one row; views.
    fn from(planes: &Planes) -> Border {
        let [state_1hkv, inputs_1ju] = planes.tensors() else { unreachable!("a border has two planes") };
        Border { state_hkv: state_1hkv.get(0), inputs_ju: inputs_1ju.get(0) }
    }
}

impl Border {
    /// The two planes without the dimension of rows.
    pub fn tensors(&self) -> [&Tensor; 2] {
        [&self.state_hkv, &self.inputs_ju]
    }
}
