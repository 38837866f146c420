//! The sum: every addend of a rank's memory.

use super::addend::{Addend, Place, addend, product};
use super::sizes::Sizes;

/// The addends of a rank. Those without a phase stay for the whole run; of the others only one phase's are alive at a time.
pub(super) fn addends(sizes: &Sizes<'_>) -> Vec<Addend> {
    if !sizes.config.memory.prompt_no_grad {
        return [sizes.model(), conventional(sizes)].concat();
    }
    [
        // Weights, adapters, and gradients on their way through finalize.
        sizes.model(),
        // Keys and values of the prompt, where they wait and where they are staged.
        sizes.pages(),
        // Recurrent states where answers and the tail start, and those of a layer.
        sizes.borders(),
        // Tensors of other ranks that pass through host memory.
        sizes.messages(),
        // Saved inputs of the answers, and what replay computes in.
        sizes.answers(),
        // What sampling holds and computes in.
        sizes.rollout(),
        // What capture holds and computes in.
        sizes.capture(),
        // Saved inputs of the tail, and what the sweep computes in.
        sizes.tail(),
        // Keys and experts that were chosen.
        sizes.choices(),
        // Keys of the whole prompt, one layer at a time.
        sizes.gathered(),
    ]
    .concat()
}

/// The conventional schedule: one whole sequence on one rank.
fn conventional(sizes: &Sizes<'_>) -> Vec<Addend> {
    let shape = sizes.shape;
    let positions = sizes.config.context.max_seq_len.0;
    let answer = sizes.config.context.answer_len;
    let heads = shape.most(|layer| layer.mix.widths().ask);
    let knob = "set memory.prompt_no_grad = true, which needs neither";
    vec![
        addend(
            "layer inputs of a sequence",
            Place::Device,
            product(&[positions, shape.width, sizes.layers + 1, sizes.model_bytes]),
            format!("{positions} positions × {} × {} layers and the last output", shape.width, sizes.layers),
            knob,
        ),
        addend(
            "one layer's graph",
            Place::Device,
            product(&[
                positions,
                (3 * sizes.ffn_width() + 8 * shape.width + 6 * heads) * sizes.model_bytes + heads * sizes.acc_bytes,
            ]),
            format!("{positions} positions × one block's activations and their gradients"),
            knob,
        ),
        addend(
            "head scratch",
            Place::Device,
            product(&[answer.0, shape.vocabulary, 4 * sizes.acc_bytes]),
            format!("{} rows × vocabulary {}", answer, shape.vocabulary),
            "choose a shorter context.answer_len",
        ),
    ]
}
