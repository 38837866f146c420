//! Prompt groups side by side.

use longstraw::runtime::units::from_index;
use longstraw::step::objective::{Batch, Counted};
use longstraw::tools::parity::distance::Distance;
use longstraw::world::World;
use serde_json::json;
use tch::{Kind, Tensor};

use crate::fixture::{Group, Model, PLAIN, config, distance, reduced, step};

/// dp 2 × cp N/2 with one group each equals cp N with two groups accumulated; where N is odd, dp N × cp 1 with N groups.
/// Counts are uneven on purpose.
pub(crate) fn dp_equals_accumulation(world: &mut World) {
    let ranks = world.all.size();
    let parts = if ranks.is_multiple_of(2) { 2 } else { ranks };
    let model = Model::random(&config("qwen3", &json!({})), Kind::Double);
    let groups: Vec<Group> = (0..parts)
        .map(|part| match part % 3 {
            0 => Group::random(5, 61, 50, &[9, 2]),
            1 => Group::random(6, 61, 31, &[1, 4, 30]),
            _ => Group::random(7, 61, 64, &[3]),
        })
        .collect();
    let batch = Batch::of(groups.iter().flat_map(|group| {
        group.answers.iter().map(|answer| Counted { tokens: from_index(answer.len()), scored: true })
    }));
    for group in &groups {
        step(world, &model, group, PLAIN, &batch);
    }
    let accumulated: Vec<Tensor> = reduced(world, &model.adapters).gradients().iter().map(Tensor::copy).collect();
    world.cut(ranks / parts, 1).expect("prompt groups side by side");
    step(world, &model, &groups[world.dp_index], PLAIN, &batch);
    let side_by_side = reduced(world, &model.adapters);
    let Distance { worst, worst_tensor, .. } = distance(&model.adapters, side_by_side.gradients(), &accumulated);
    assert!(worst <= 1e-12, "{worst_tensor} is {worst:.1e} off");
}
