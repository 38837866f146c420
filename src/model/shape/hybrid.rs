//! `qwen3_5` text models: a gated delta rule in most layers, gated attention in the others, dense feed-forwards.

use super::layers::{Layer, Mix, Projection, Segment, Shape, feed_forward, weights};
use crate::model::config_reader::ConfigReader;
use crate::runtime::units::from_index;

/// Sizes that all layers share.
struct Sizes {
    width: u64,
    ffn_width: u64,
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
    key_heads: u64,
    value_heads: u64,
    key_dim: u64,
    value_dim: u64,
    taps: u64,
}

/// Reads a config; absent keys have the defaults of the published config class.
pub(super) fn read(keys: &mut ConfigReader<'_>) -> Shape {
    let vocabulary = keys.count("vocab_size", None);
    let layers = keys.layers("num_hidden_layers");
    let sizes = Sizes {
        width: keys.size("hidden_size", None),
        ffn_width: keys.size("intermediate_size", None),
        heads: keys.size("num_attention_heads", Some(16)),
        kv_heads: keys.size("num_key_value_heads", Some(4)),
        head_dim: keys.size("head_dim", Some(256)),
        key_heads: keys.size("linear_num_key_heads", Some(16)),
        value_heads: keys.size("linear_num_value_heads", Some(32)),
        key_dim: keys.size("linear_key_head_dim", Some(128)),
        value_dim: keys.size("linear_value_head_dim", Some(128)),
        taps: keys.size("linear_conv_kernel_dim", Some(4)),
    };
    let (known, wanted) = (["linear_attention", "full_attention"], "\"linear_attention\" and \"full_attention\"");
    let listed = keys.layer_words("layer_types", layers, &known, wanted);
    let interval = keys.count("full_attention_interval", Some(4));
    let full = |layer: usize| match &listed {
        Some(types) => types[layer] == 1,
        None => (from_index(layer) + 1).is_multiple_of(interval),
    };
    let tied = keys.flag_here_or_outside("tie_word_embeddings", false);
    Shape {
        model_type: "qwen3_5_text",
        trained: false,
        vocabulary,
        width: sizes.width,
        max_positions: keys.count("max_position_embeddings", Some(32_768)),
        stretched_positions: None,
        outside: vocabulary * sizes.width * if tied { 1 } else { 2 } + sizes.width,
        layers: (0..layers).map(|layer| if full(layer) { sizes.full() } else { sizes.linear() }).collect(),
    }
}

impl Sizes {
    /// Gated attention: the query projection yields queries and gates.
    fn full(&self) -> Layer {
        let (queries, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let linear = |name, segment, inputs, outputs| Projection { name, segment, inputs, outputs };
        let own = [
            linear("q_proj", Segment::A, self.width, 2 * queries),
            linear("k_proj", Segment::A, self.width, kv),
            linear("v_proj", Segment::A, self.width, kv),
            linear("o_proj", Segment::B, queries, self.width),
        ];
        let mix = Mix::Grouped {
            query_heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            window: None,
            gated: true,
        };
        self.layer(mix, &own, 2 * self.head_dim)
    }

    fn linear(&self) -> Layer {
        let (keys, values) = (self.key_heads * self.key_dim, self.value_heads * self.value_dim);
        let linear = |name, segment, inputs, outputs| Projection { name, segment, inputs, outputs };
        let channels = 2 * keys + values;
        let own = [
            linear("in_proj_qkv", Segment::A, self.width, channels),
            linear("in_proj_z", Segment::A, self.width, values),
            linear("in_proj_b", Segment::A, self.width, self.value_heads),
            linear("in_proj_a", Segment::A, self.width, self.value_heads),
            linear("out_proj", Segment::B, values, self.width),
        ];
        let mix = Mix::Delta {
            key_heads: self.key_heads,
            value_heads: self.value_heads,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            taps: self.taps,
        };
        // The convolution, decay and its bias by head, and the output norm.
        self.layer(mix, &own, channels * self.taps + 2 * self.value_heads + self.value_dim)
    }

    /// `small` are elements of tensors that are no linear layers, besides the layer's two norms.
    fn layer(&self, mix: Mix, own: &[Projection], small: u64) -> Layer {
        let projections = [own, &feed_forward(self.width, self.ffn_width)].concat();
        Layer {
            mix,
            ffn_width: self.ffn_width,
            chosen: 0,
            parameters: weights(&projections) + small + 2 * self.width,
            experts: 0,
            expert_count: 0,
            expert_width: 0,
            projections,
            further: 0,
            constant: 0,
        }
    }
}
