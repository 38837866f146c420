//! Rows with the experts that were chosen for them.

use tch::Tensor;

/// Rows on their way to experts, and what each expert's output is weighted with.
#[derive(Debug)]
pub struct Routed {
    /// The normed rows, [t, w], in the model's dtype.
    pub x_tw: Tensor,
    /// Weights of each row's experts, [t, k], in the accumulation dtype; carries gradient to the router's scores.
    pub weight_tk: Tensor,
    /// Chosen experts, [t, k] int64, ascending in a row; a constant.
    pub expert_tk: Tensor,
}

impl Routed {
    /// A stretch of the rows, without a graph.
    pub(super) fn rows(&self, first: i64, rows: i64) -> Routed {
        let part = |x: &Tensor| x.detach().narrow(0, first, rows);
        Routed { x_tw: part(&self.x_tw), weight_tk: part(&self.weight_tk), expert_tk: part(&self.expert_tk) }
    }
}

/// Gradients of what [`Routed`] holds.
#[derive(Debug)]
pub struct RoutedGradient {
    /// [t, w], the model's dtype.
    pub dx_tw: Tensor,
    /// [t, k], the accumulation dtype.
    pub dweight_tk: Tensor,
}
