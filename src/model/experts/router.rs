//! The router: from a row to its experts and their weights.

use tch::{Kind, Tensor};

use super::routed::Routed;
use crate::model::parts::{ExpertSpec, Router};
use crate::runtime::units::as_dim;
use crate::tensor::accumulation;

/// Added to the sum that sigmoid scores are divided by.
const SUM_EPS: f64 = 1e-20;

/// Chooses each row's experts, or takes the `kept` ones, [t, k] int64, and weighs them by the live scores.
///
/// `x_tw` are the normed rows in the model's dtype, `gate_ew` the router's matrix, `bias_e` the correction that only the choice
/// sees. Scores and weights are in the accumulation dtype; a softmax router's logits are in the model's dtype, and so are its
/// weights before they are widened again, as in the published models. The choice is a constant: gradient flows through the
/// weights, also to an expert that the router would not choose now. Of equal scores the lowest index is chosen.
#[must_use]
pub fn route(
    spec: &ExpertSpec,
    x_tw: &Tensor,
    gate_ew: &Tensor,
    bias_e: Option<&Tensor>,
    kept: Option<&Tensor>,
) -> Routed {
    let kind = x_tw.kind();
    let acc = accumulation(kind);
    let score_te = scores(spec.router, x_tw, gate_ew, acc);
    let expert_tk = match kept {
        Some(kept) => kept.shallow_clone(),
        None => choose(spec, &score_te.detach(), bias_e),
    };
    let mut weight_tk = score_te.gather(-1, &expert_tk, false);
    if spec.normalised {
        let sum = weight_tk.sum_dim_intlist(-1i64, true, acc);
        weight_tk = match spec.router {
            // What is divided by itself is 1 and has no gradient, not one of rounding.
            Router::Softmax if spec.chosen == 1 => weight_tk.detach().ones_like(),
            Router::Softmax => weight_tk / sum,
            Router::Sigmoid => weight_tk / (sum + SUM_EPS),
        };
    }
    if spec.router == Router::Softmax {
        weight_tk = weight_tk.to_kind(kind).to_kind(acc);
    }
    Routed { x_tw: x_tw.shallow_clone(), weight_tk: weight_tk * spec.scaling, expert_tk }
}

/// Scores of all experts, [t, e].
fn scores(router: Router, x_tw: &Tensor, gate_ew: &Tensor, acc: Kind) -> Tensor {
    match router {
        Router::Sigmoid => x_tw.to_kind(acc).linear(&gate_ew.to_kind(acc), None::<&Tensor>).sigmoid(),
        Router::Softmax => x_tw.linear(gate_ew, None::<&Tensor>).softmax(-1, acc),
    }
}

/// The experts of each row, [t, k] int64, ascending in a row.
fn choose(spec: &ExpertSpec, score_te: &Tensor, bias_e: Option<&Tensor>) -> Tensor {
    let mut choice_te = match bias_e {
        Some(bias_e) => score_te + bias_e.to_kind(score_te.kind()),
        None => score_te.shallow_clone(),
    };
    if spec.groups > 1 {
        choice_te = within_best_groups(spec, &choice_te);
    }
    largest(&choice_te, as_dim(spec.chosen)).sort(-1, false).0
}

/// Scores with −∞ for experts outside the row's best groups; a group is worth the sum of its two best.
fn within_best_groups(spec: &ExpertSpec, choice_te: &Tensor) -> Tensor {
    let (groups, size) = (as_dim(spec.groups), as_dim(spec.count / spec.groups));
    let grouped = choice_te.view([-1, groups, size]);
    let worth = grouped.topk(size.min(2), -1, true, true).0.sum_dim_intlist(-1i64, false, choice_te.kind());
    let kept = largest(&worth, as_dim(spec.kept_groups));
    let dropped = worth.ones_like().to_kind(Kind::Bool).scatter_value(-1, &kept, 0);
    grouped.masked_fill(&dropped.unsqueeze(-1), f64::NEG_INFINITY).view([-1, groups * size])
}

/// Indices of the `count` largest of each row; of equal ones the lowest index. A selection without a sort does not promise it.
fn largest(x: &Tensor, count: i64) -> Tensor {
    x.sort_stable(true, -1, true).1.narrow(-1, 0, count)
}
