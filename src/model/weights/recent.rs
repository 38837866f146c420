//! Dequantised weights of the layer that is computed: made once for all its micro-blocks.

use std::collections::BTreeMap;

use tch::Tensor;

use super::blocks::Blocks;

/// Weights of one layer in the model's dtype. Those of the layer before are given up when another layer begins.
#[derive(Debug, Default)]
pub(super) struct Recent {
    /// Names of the layer's tensors begin so.
    layer: String,
    tensors: BTreeMap<String, Tensor>,
}

impl Recent {
    /// The weight `name`, whose blocks are `blocks`. One that belongs to no layer is dequantised each time.
    pub(super) fn get(&mut self, name: &str, blocks: &Blocks) -> Tensor {
        let Some(layer) = layer_of(name) else { return blocks.dequantised() };
        if self.layer != layer {
            self.tensors.clear();
            layer.clone_into(&mut self.layer);
        }
        if let Some(tensor) = self.tensors.get(name) {
            return tensor.shallow_clone();
        }
        let tensor = blocks.dequantised();
        self.tensors.insert(name.to_owned(), tensor.shallow_clone());
        tensor
    }
}

/// The part of a name that all tensors of its layer share.
fn layer_of(name: &str) -> Option<&str> {
    let after = name.strip_prefix("model.layers.")?;
    let number = after.find('.')?;
    name.get(..name.len() - after.len() + number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_is_told_from_others_whose_number_begins_like_its_own() {
        assert_eq!(layer_of("model.layers.1.mlp.up_proj.weight"), Some("model.layers.1"));
        assert_eq!(layer_of("model.layers.12.mlp.up_proj.weight"), Some("model.layers.12"));
        assert_eq!(layer_of("lm_head.weight"), None);
    }
}
