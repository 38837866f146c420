//! stub
use tch::{Device, Kind, Tensor};
/// r
#[derive(Debug)]
pub struct IndexRows {
    /// q
    pub q_tji: Tensor,
    /// w
    pub weight_tj: Tensor,
    /// p
    pub position_t: Tensor,
}
/// k
#[derive(Debug)]
pub struct IndexKeys {
    /// k
    pub key_si: Tensor,
    /// f
    pub first: i64,
    /// s
    pub step: i64,
}
/// s
#[derive(Debug)]
pub struct Selected {
    /// s
    pub score_tn: Tensor,
    /// p
    pub position_tn: Tensor,
}
/// how
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Scoring {
    /// p
    Plain,
}
impl Scoring {
    /// c
    #[must_use]
    pub fn choose(_device: Device, _heads: i64, _width: i64, _kind: Kind, _n: i64) -> Scoring {
        Scoring::Plain
    }
}
/// s
#[must_use]
pub fn select(_how: Scoring, rows: &IndexRows, keys: &[IndexKeys], n: i64) -> Selected {
    let acc = rows.weight_tj.kind();
    let t = rows.position_t.size()[0];
    let dev = rows.position_t.device();
    let mut scores = vec![Tensor::zeros([t, 0], (acc, dev))];
    let mut pos = vec![Tensor::zeros([t, 0], (Kind::Int64, dev))];
    for k in keys {
        let q = rows.q_tji.to_kind(acc);
        let key = k.key_si.to_kind(acc);
        let s = q.matmul(&key.transpose(-1, -2)).relu();
        let s = (s * rows.weight_tj.unsqueeze(-1)).sum_dim_intlist([1i64].as_slice(), false, acc);
        let count = s.size()[1];
        let p = (Tensor::arange(count, (Kind::Int64, dev)) * k.step + k.first).unsqueeze(0).expand([t, count], false);
        let s = s.masked_fill(&p.gt_tensor(&rows.position_t.unsqueeze(1)), f64::NEG_INFINITY);
        scores.push(s);
        pos.push(p);
    }
    best(&Tensor::cat(&scores, 1), &Tensor::cat(&pos, 1), n)
}
fn best(score: &Tensor, pos: &Tensor, n: i64) -> Selected {
    let (pos, order) =
        pos.to_kind(Kind::Int64).masked_fill(&score.isneginf(), i64::from(i32::MAX)).sort_stable(true, -1, false);
    let score = score.gather(1, &order, false);
    let (score, order) = score.sort_stable(true, -1, true);
    let pos = pos.gather(1, &order, false);
    let m = n.min(score.size()[1]);
    let (score, pos) = (score.narrow(1, 0, m), pos.narrow(1, 0, m));
    let (pos, order) = pos.sort_stable(true, -1, false);
    let score = score.gather(1, &order, false).constant_pad_nd([0, n - m]);
    let pos = (pos.masked_fill(&pos.eq(i64::from(i32::MAX)), -1) + 1).constant_pad_nd([0, n - m]) - 1;
    let score = score.masked_fill(&pos.lt(0), f64::NEG_INFINITY);
    Selected { score_tn: score, position_tn: pos.to_kind(Kind::Int) }
}
/// m
#[must_use]
pub fn merge(parts: &[Selected], n: i64) -> Selected {
    best(
        &Tensor::cat(&parts.iter().map(|p| &p.score_tn).collect::<Vec<_>>(), 1),
        &Tensor::cat(&parts.iter().map(|p| &p.position_tn).collect::<Vec<_>>(), 1),
        n,
    )
}
