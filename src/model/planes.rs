//! Rows of several tensors, in the form in which code carries them that does not know the mixer they belong to.

use tch::{Kind, Tensor};

use crate::tensor::accumulation;

/// Tensors of the same rows, first dimension rows: the queries, the state or the gradients of one mixer.
///
/// Only the mixer knows what each plane is: it converts planes from and to a struct of its own with named fields
/// (for attention [`super::attention_rows::KeyValue`]).
#[derive(Debug, Default)]
pub struct Planes(Vec<Tensor>);

impl From<Vec<Tensor>> for Planes {
    fn from(tensors: Vec<Tensor>) -> Planes {
        Planes(tensors)
    }
}

impl Planes {
    /// One tensor for each plane.
    pub fn tensors(&self) -> &[Tensor] {
        &self.0
    }

    /// One tensor for each plane.
    #[must_use]
    pub fn into_tensors(self) -> Vec<Tensor> {
        self.0
    }

    /// `rows` rows of every plane from row `first` on; a view.
    #[must_use]
    pub fn narrow(&self, first: i64, rows: i64) -> Planes {
        self.map(|plane| plane.narrow(0, first, rows))
    }

    /// The first `planes` planes.
    #[must_use]
    pub fn first(&self, planes: usize) -> Planes {
        Planes(self.0.iter().take(planes).map(Tensor::shallow_clone).collect())
    }

    /// These planes, and `more` as the last one where there is one.
    #[must_use]
    pub fn and(mut self, more: Option<Tensor>) -> Planes {
        self.0.extend(more);
        self
    }

    /// The rows of all `parts`, one part after another. One part alone is not copied.
    #[must_use]
    pub fn join(mut parts: Vec<Planes>) -> Planes {
        if parts.len() == 1 {
            return parts.pop().unwrap_or_default();
        }
        let planes = parts.first().map_or(0, |part| part.0.len());
        let joined = |plane: usize| Tensor::cat(&parts.iter().map(|part| &part.0[plane]).collect::<Vec<_>>(), 0);
        Planes((0..planes).map(joined).collect())
    }

    /// Zeros of the same shapes in the accumulation dtype: where gradients of these planes add up.
    #[must_use]
    pub fn zero_gradient(&self) -> Planes {
        self.map(|plane| Tensor::zeros(plane.size(), (accumulation(plane.kind()), plane.device())))
    }

    /// Every plane in another dtype.
    #[must_use]
    pub fn to_kind(&self, kind: Kind) -> Planes {
        self.map(|plane| plane.to_kind(kind))
    }

    /// What `change` makes of every plane.
    #[must_use]
    pub fn map(&self, change: impl Fn(&Tensor) -> Tensor) -> Planes {
        Planes(self.0.iter().map(change).collect())
    }
}

/// The rows of all `parts`, one part after another. One part alone is not copied.
pub fn join_rows(mut parts: Vec<Tensor>) -> Tensor {
    match (parts.len(), parts.pop()) {
        (1, Some(only)) => only,
        (_, last) => Tensor::cat(&parts.iter().chain(&last).collect::<Vec<_>>(), 0),
    }
}
