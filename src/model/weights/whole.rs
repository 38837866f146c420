//! Weights with the experts that other ranks hold.

use std::collections::BTreeSet;

use super::blocks::Value;
use super::experts::joined;
use super::{ExpertShare, Weights};
use crate::model::spec::Spec;
use crate::runtime::units::{Tokens, from_dim};
use crate::world::Axis;
use crate::world::exchange::gather_rows;

impl Weights {
    /// The same weights with the experts of all ranks of `group`, each of which holds its share of them; gathered ones are in the
    /// dtype that they are given out in. Every rank of the group enters.
    #[must_use]
    pub fn with_all_experts(&self, spec: &Spec, group: &Axis) -> Weights {
        let experts: BTreeSet<String> =
            joined(spec, ExpertShare::ALL).into_iter().map(|expected| expected.name).collect();
        let whole = |(name, value): (&String, &Value)| {
            if group.size() == 1 || !experts.contains(name) {
                return (name.clone(), value.shallow_clone());
            }
            let own = value.tensor();
            let counts = vec![Tokens(from_dim(own.size()[0])); group.size()];
            (name.clone(), Value::Plain(gather_rows(group, &own, &counts)))
        };
        let tensors = self.tensors.iter().map(whole).collect();
        Weights::with_head(tensors, self.digest.clone(), Vec::new(), self.kind, self.device)
    }
}
