//! Chooses for each query the keys with the largest index scores (sparse attention with an indexer).
//!
//! The score of a row and a key is a sum over the index heads j: `Σ_j weight[t, j] · relu(q[t, j] · k[s])`, as in
//! `DeepSeek-V3.2`. Scores and sums are in the accumulation dtype. A row sees the keys at positions up to its own. Of
//! equal scores the lowest position is chosen: relu makes many scores exactly 0, so ties are the rule.
//!
//! No tensor of rows × all keys exists: keys are scored in blocks, and only the best `n` of a row go on to the next
//! block. The choice does not depend on the order of the blocks, because no two keys of a row have the same position.
//!
//! Shapes: t rows, j index heads, i index width, s keys of a block, n keys chosen, m candidates.

use tch::{Device, Kind, Tensor, no_grad};

use super::accumulation;

/// Keys that are scored at a time.
const BLOCK_KEYS_MAX: i64 = 8192;
/// Elements of the scores of all heads, rows × heads × keys of a block, which exist at a time.
const SCORES_MAX: i64 = 1 << 25;
/// Position of an entry that is no key while keys are compared; larger than every position.
const HIDDEN: i64 = i32::MAX as i64;

/// Index queries of some rows.
#[derive(Debug)]
pub struct IndexRows {
    /// [t, j, i] in the model's dtype.
    pub q_tji: Tensor,
    /// [t, j] in the accumulation dtype; may be negative.
    pub weight_tj: Tensor,
    /// [t] int64: position of each row; it sees keys at positions up to its own.
    pub position_t: Tensor,
}

/// Index keys at consecutive positions.
#[derive(Debug)]
pub struct IndexKeys {
    /// [s, i], shared by all rows; or [t, s, i], each row its own keys.
    pub key_si: Tensor,
    /// Position of the first key.
    pub first: i64,
    /// Positions from one key to the next: 1, or the number of ranks where answers' rows are dealt in turn.
    pub step: i64,
}

/// The keys chosen for some rows, in ascending order of position; entries that are left over stand at the end: score −∞,
/// position −1.
#[derive(Debug)]
pub struct Selected {
    /// [t, n] in the accumulation dtype.
    pub score_tn: Tensor,
    /// [t, n] int32.
    pub position_tn: Tensor,
}

/// How index scores are computed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Scoring {
    /// Matrix products in bounded blocks, on any device.
    Plain,
    /// A CUDA kernel that is compiled at run time.
    Compiled,
}

impl Scoring {
    /// The fastest way that runs on `device` for `heads` index heads of `width`, rows and keys of dtype `kind`, and `n`
    /// chosen keys.
    #[must_use]
    pub fn choose(_device: Device, _heads: i64, _width: i64, _kind: Kind, _n: i64) -> Scoring {
        Scoring::Plain
    }
}

/// Candidates of some rows, in no order: score [t, m] in the accumulation dtype, position [t, m] int64, or [`HIDDEN`].
struct Candidates {
    score_tm: Tensor,
    position_tm: Tensor,
}

impl Candidates {
    fn none(rows: i64, n: i64, kind: Kind, device: Device) -> Candidates {
        Candidates {
            score_tm: Tensor::full([rows, n], f64::NEG_INFINITY, (kind, device)),
            position_tm: Tensor::full([rows, n], HIDDEN, (Kind::Int64, device)),
        }
    }

    fn joined(parts: &[Candidates]) -> Candidates {
        let scores: Vec<&Tensor> = parts.iter().map(|part| &part.score_tm).collect();
        let positions: Vec<&Tensor> = parts.iter().map(|part| &part.position_tm).collect();
        Candidates { score_tm: Tensor::cat(&scores, 1), position_tm: Tensor::cat(&positions, 1) }
    }

    fn picked(&self, index_tn: &Tensor) -> Candidates {
        Candidates {
            score_tm: self.score_tm.gather(1, index_tn, false),
            position_tm: self.position_tm.gather(1, index_tn, false),
        }
    }

    /// The best `n`: by score, then by the lowest position. There are at least `n` candidates.
    fn best(&self, n: i64) -> Candidates {
        if self.score_tm.kind() == Kind::Double {
            let ordered = self.picked(&self.position_tm.argsort(1, false));
            let (_, index_tm) = ordered.score_tm.sort_stable(true, 1, true);
            return ordered.picked(&index_tm.narrow(1, 0, n));
        }
        let (_, index_tn) = self.order_tm().topk(n, 1, true, false);
        self.picked(&index_tn)
    }

    /// [t, m] int64, larger for a better candidate; no two keys of a row have the same. High half: the bits of the float32
    /// score, ordered as signed integers. Low half: the lower the position, the larger.
    fn order_tm(&self) -> Tensor {
        // Adding zero turns −0 into 0: the two are equal scores, and their bits differ.
        let bits_tm = (&self.score_tm + 0.0).view_dtype(Kind::Int);
        let ordered_tm = bits_tm.bitwise_xor_tensor(&(bits_tm.lt(0).to_kind(Kind::Int) * 0x7fff_ffff));
        ordered_tm.to_kind(Kind::Int64) * (1_i64 << 32) + self.position_tm.neg() + HIDDEN
    }

    /// In ascending order of position, what is no key at the end.
    fn ordered(&self) -> Selected {
        let (position_tn, index_tn) = self.position_tm.sort(1, false);
        let hidden_tn = position_tn.eq(HIDDEN);
        Selected {
            score_tn: self.score_tm.gather(1, &index_tn, false).masked_fill(&hidden_tn, f64::NEG_INFINITY),
            position_tn: position_tn.masked_fill(&hidden_tn, -1).to_kind(Kind::Int),
        }
    }
}

/// The `n` visible keys of each row that have the largest scores, over all blocks of `keys` together; all visible keys
/// of a row that sees fewer. No two keys of a row have the same position, and positions are below 2³¹ − 1. No rows and
/// no keys are legal.
#[must_use]
pub fn select(how: Scoring, rows: &IndexRows, keys: &[IndexKeys], n: i64) -> Selected {
    match how {
        Scoring::Plain | Scoring::Compiled => no_grad(|| plain(rows, keys, n)),
    }
}

/// The best `n` of `parts`: what was chosen for the same rows over disjoint keys, for example on each rank. At least one
/// part.
#[must_use]
pub fn merge(parts: &[Selected], n: i64) -> Selected {
    no_grad(|| {
        let candidates = |part: &Selected| {
            let position_tn = part.position_tn.to_kind(Kind::Int64);
            let hidden_tn = position_tn.lt(0);
            Candidates {
                score_tm: part.score_tn.shallow_clone(),
                position_tm: position_tn.masked_fill(&hidden_tn, HIDDEN),
            }
        };
        let mut all: Vec<Candidates> = parts.iter().map(candidates).collect();
        let first = &parts[0].score_tn;
        all.push(Candidates::none(first.size()[0], n, first.kind(), first.device()));
        Candidates::joined(&all).best(n).ordered()
    })
}

/// [`select`] by matrix products. Rows and keys go in blocks, so that at most [`SCORES_MAX`] scores exist.
fn plain(rows: &IndexRows, keys: &[IndexKeys], n: i64) -> Selected {
    let (count, heads, _) = rows.q_tji.size3().unwrap_or_else(|_| unreachable!("index queries are [t, j, i]"));
    let (kind, device) = (accumulation(rows.q_tji.kind()), rows.q_tji.device());
    let widest = keys.iter().map(IndexKeys::count).max().unwrap_or(0).clamp(1, BLOCK_KEYS_MAX);
    let together = (SCORES_MAX / (widest * heads)).max(1);
    let mut chosen = Vec::new();
    for first in (0..count).step_by(usize::try_from(together).unwrap_or(1)) {
        let part = RowBlock::new(rows, first, together.min(count - first));
        let mut best = Candidates::none(part.count, n, kind, device);
        for block in keys {
            for begin in (0..part.seen(block)).step_by(usize::try_from(widest).unwrap_or(1)) {
                let candidates = part.candidates(block, begin, widest.min(part.seen(block) - begin));
                best = Candidates::joined(&[best, candidates]).best(n);
            }
        }
        chosen.push(best.ordered());
    }
    if chosen.is_empty() {
        return Candidates::none(0, n, kind, device).ordered();
    }
    let scores: Vec<&Tensor> = chosen.iter().map(|part| &part.score_tn).collect();
    let positions: Vec<&Tensor> = chosen.iter().map(|part| &part.position_tn).collect();
    Selected { score_tn: Tensor::cat(&scores, 0), position_tn: Tensor::cat(&positions, 0) }
}

impl IndexKeys {
    /// Number of keys.
    fn count(&self) -> i64 {
        let shape = self.key_si.size();
        shape[shape.len() - 2]
    }
}

/// Consecutive rows that are scored together.
struct RowBlock {
    /// [t, j, i] in the accumulation dtype.
    q_tji: Tensor,
    weight_tj: Tensor,
    position_t: Tensor,
    first: i64,
    count: i64,
    /// The highest position of a row.
    last_position: i64,
}

impl RowBlock {
    fn new(rows: &IndexRows, first: i64, count: i64) -> RowBlock {
        let kind = accumulation(rows.q_tji.kind());
        let position_t = rows.position_t.narrow(0, first, count);
        RowBlock {
            q_tji: rows.q_tji.narrow(0, first, count).to_kind(kind),
            weight_tj: rows.weight_tj.narrow(0, first, count),
            last_position: position_t.max().int64_value(&[]),
            position_t,
            first,
            count,
        }
    }

    /// Number of keys of `block`, counted from its first, that some row sees.
    fn seen(&self, block: &IndexKeys) -> i64 {
        let visible = (self.last_position - block.first).div_euclid(block.step) + 1;
        visible.clamp(0, block.count())
    }

    /// Scores of `count` keys from key `begin` of `block` on; −∞ and [`HIDDEN`] where a row does not see the key.
    fn candidates(&self, block: &IndexKeys, begin: i64, count: i64) -> Candidates {
        let (heads, width) = (self.q_tji.size()[1], self.q_tji.size()[2]);
        let kind = self.q_tji.kind();
        let product_tjs = if block.key_si.dim() == 2 {
            let key_si = block.key_si.narrow(0, begin, count).to_kind(kind);
            self.q_tji.reshape([-1, width]).matmul(&key_si.tr()).view([self.count, heads, count])
        } else {
            let key_tsi = block.key_si.narrow(0, self.first, self.count).narrow(1, begin, count).to_kind(kind);
            self.q_tji.matmul(&key_tsi.transpose(1, 2))
        };
        let score_ts = self.weight_tj.unsqueeze(1).matmul(&product_tjs.relu()).squeeze_dim(1);
        let first = block.first + begin * block.step;
        let position_s = Tensor::arange(count, (Kind::Int64, block.key_si.device())) * block.step + first;
        let hidden_ts = position_s.unsqueeze(0).gt_tensor(&self.position_t.unsqueeze(1));
        Candidates {
            score_tm: score_ts.masked_fill(&hidden_ts, f64::NEG_INFINITY),
            position_tm: position_s.unsqueeze(0).expand([self.count, count], false).masked_fill(&hidden_ts, HIDDEN),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of a test and their keys; block by block, in any order.
    struct Case {
        rows: IndexRows,
        keys: Vec<IndexKeys>,
    }

    /// Small whole numbers: every product and sum is exact in every dtype, and ties are many.
    fn whole(shape: &[i64], span: i64, kind: Kind) -> Tensor {
        (Tensor::randint(2 * span + 1, shape, (Kind::Int64, Device::Cpu)) - span).to_kind(kind)
    }

    fn case(positions: &[i64], blocks: &[(i64, i64, i64)], span: i64, kind: Kind) -> Case {
        let (rows, heads, width) = (i64::try_from(positions.len()).expect("few rows"), 4, 8);
        let rows = IndexRows {
            q_tji: whole(&[rows, heads, width], span, kind),
            weight_tj: whole(&[rows, heads], 3, accumulation(kind)),
            position_t: Tensor::from_slice(positions),
        };
        let keys = blocks.iter().map(|&(first, step, count)| IndexKeys {
            key_si: whole(&[count, width], span, kind),
            first,
            step,
        });
        Case { rows, keys: keys.collect() }
    }

    /// Every visible key of a row as (score, position), by the definition, key by key in float64.
    fn scores(case: &Case, row: i64) -> Vec<(f64, i64)> {
        let own = case.rows.position_t.int64_value(&[row]);
        let q_ji = case.rows.q_tji.get(row).to_kind(Kind::Double);
        let weight_j = case.rows.weight_tj.get(row).to_kind(Kind::Double);
        let mut all = Vec::new();
        for block in &case.keys {
            let key_si = if block.key_si.dim() == 2 { block.key_si.shallow_clone() } else { block.key_si.get(row) };
            for s in 0..block.count() {
                let position = block.first + s * block.step;
                let product_j = (&q_ji * key_si.get(s).to_kind(Kind::Double)).sum_dim_intlist(1i64, false, None);
                let score = (&weight_j * product_j.relu()).sum(None).double_value(&[]);
                if position <= own {
                    all.push((score, position));
                }
            }
        }
        all
    }

    /// A stable sort by falling score of what is in order of position.
    fn expected(case: &Case, row: i64, n: i64) -> Vec<(i64, f64)> {
        let mut all = scores(case, row);
        all.sort_by_key(|&(_, position)| position);
        all.sort_by(|one, two| two.0.partial_cmp(&one.0).expect("finite scores"));
        all.truncate(usize::try_from(n).expect("a count"));
        let mut chosen: Vec<(i64, f64)> = all.into_iter().map(|(score, position)| (position, score)).collect();
        chosen.sort_by_key(|&(position, _)| position);
        chosen.resize(usize::try_from(n).expect("a count"), (-1, f64::NEG_INFINITY));
        chosen
    }

    fn assert_chosen(selected: &Selected, case: &Case, n: i64) {
        let rows = case.rows.q_tji.size()[0];
        assert_eq!(selected.position_tn.size(), [rows, n]);
        assert_eq!(selected.score_tn.size(), [rows, n]);
        assert_eq!(selected.position_tn.kind(), Kind::Int);
        assert_eq!(selected.score_tn.kind(), accumulation(case.rows.q_tji.kind()));
        for row in 0..rows {
            let positions = Vec::<i64>::try_from(selected.position_tn.get(row).to_kind(Kind::Int64)).expect("numbers");
            let scores = Vec::<f64>::try_from(selected.score_tn.get(row).to_kind(Kind::Double)).expect("numbers");
            let chosen: Vec<(i64, f64)> = positions.into_iter().zip(scores).collect();
            assert_eq!(chosen, expected(case, row, n), "row {row}");
        }
    }

    fn assert_selects(case: &Case, n: i64) {
        assert_chosen(&select(Scoring::Plain, &case.rows, &case.keys, n), case, n);
    }

    const KINDS: [Kind; 3] = [Kind::Double, Kind::Float, Kind::BFloat16];

    #[test]
    fn the_choice_is_that_of_a_stable_sort_in_every_dtype() {
        tch::manual_seed(1);
        for kind in KINDS {
            assert_selects(&case(&[0, 39, 17, 100, 25], &[(0, 1, 40)], 2, kind), 7);
        }
    }

    #[test]
    fn of_scores_that_are_all_zero_the_lowest_positions_are_chosen() {
        for kind in KINDS {
            let mut zero = case(&[30, 3, 19], &[(0, 1, 31)], 1, kind);
            zero.rows.weight_tj = zero.rows.weight_tj.zeros_like();
            let chosen = select(Scoring::Plain, &zero.rows, &zero.keys, 5);
            let first = Tensor::from_slice(&[0_i32, 1, 2, 3, 4]);
            assert!(chosen.position_tn.get(0).equal(&first));
            assert_chosen(&chosen, &zero, 5);
        }
    }

    #[test]
    fn minus_zero_and_zero_are_equal_scores() {
        for kind in KINDS {
            // Every product is negative, so relu gives 0; a negative weight turns that into −0 for the first keys only.
            let mut signed = case(&[9], &[(0, 1, 10)], 1, kind);
            signed.rows.q_tji = signed.rows.q_tji.zeros_like();
            let _ = signed.rows.q_tji.narrow(1, 0, 1).fill_(1.0);
            signed.rows.weight_tj = signed.rows.weight_tj.full_like(-1.0);
            signed.keys[0].key_si = signed.keys[0].key_si.full_like(-1.0);
            assert_selects(&signed, 4);
            let parts = [-0.0, 0.0].map(|score| Selected {
                score_tn: Tensor::from_slice(&[score]).view([1, 1]).to_kind(accumulation(kind)),
                position_tn: Tensor::from_slice(&[if f64::is_sign_negative(score) { 3_i32 } else { 8 }]).view([1, 1]),
            });
            assert_eq!(merge(&parts, 1).position_tn.int64_value(&[0, 0]), 3);
        }
    }

    #[test]
    fn of_scores_that_are_all_equal_the_lowest_positions_are_chosen() {
        for kind in KINDS {
            let mut equal = case(&[30, 12], &[(16, 1, 15), (0, 1, 16)], 2, kind);
            for block in &mut equal.keys {
                block.key_si = block.key_si.ones_like();
            }
            assert_selects(&equal, 20);
        }
    }

    #[test]
    fn negative_weights_put_keys_that_match_last() {
        tch::manual_seed(2);
        for kind in KINDS {
            let mut negative = case(&[50, 49, 48], &[(0, 1, 51)], 3, kind);
            negative.rows.weight_tj = negative.rows.weight_tj.abs().neg();
            assert_selects(&negative, 9);
        }
    }

    #[test]
    fn a_row_with_fewer_visible_keys_than_n_has_them_all_and_is_filled_up() {
        tch::manual_seed(3);
        for kind in KINDS {
            assert_selects(&case(&[0, 3, 4, 11], &[(0, 1, 5)], 2, kind), 8);
        }
    }

    #[test]
    fn a_row_whose_keys_are_all_in_the_future_chooses_none() {
        tch::manual_seed(4);
        for kind in KINDS {
            assert_selects(&case(&[2, 99, 99], &[(100, 1, 6), (106, 2, 6)], 2, kind), 3);
            assert_selects(&case(&[2, 101], &[(100, 1, 6)], 2, kind), 3);
        }
    }

    #[test]
    fn blocks_may_come_in_any_order() {
        tch::manual_seed(5);
        for kind in KINDS {
            let mut blocks = case(&[60, 33, 7, 15], &[(40, 1, 20), (0, 1, 8), (20, 1, 20), (8, 1, 12)], 1, kind);
            assert_selects(&blocks, 10);
            blocks.keys.reverse();
            assert_selects(&blocks, 10);
        }
    }

    #[test]
    fn keys_of_each_row_and_shared_keys_are_chosen_from_together() {
        tch::manual_seed(6);
        for kind in KINDS {
            let mut own = case(&[41, 44, 47], &[(0, 1, 40), (40, 3, 3), (41, 3, 3)], 2, kind);
            for block in &mut own.keys[1..] {
                block.key_si = whole(&[3, 3, 8], 2, kind);
            }
            assert_selects(&own, 12);
        }
    }

    #[test]
    fn merged_parts_equal_the_whole() {
        tch::manual_seed(7);
        for kind in KINDS {
            let all = case(&[80, 5, 33], &[(0, 1, 30), (30, 2, 20), (31, 2, 20), (70, 1, 11)], 1, kind);
            let part = |keys: &[IndexKeys]| select(Scoring::Plain, &all.rows, keys, 12);
            assert_chosen(&merge(&[part(&all.keys[2..]), part(&all.keys[..1]), part(&all.keys[1..2])], 12), &all, 12);
            assert_chosen(&merge(&[part(&all.keys)], 12), &all, 12);
            assert_chosen(&merge(&[part(&[]), part(&all.keys)], 12), &all, 12);
        }
    }

    #[test]
    fn no_rows_and_no_keys_are_legal() {
        for kind in KINDS {
            assert_selects(&case(&[], &[(0, 1, 5)], 2, kind), 3);
            assert_selects(&case(&[4, 0], &[], 2, kind), 3);
            assert_selects(&case(&[4, 0], &[(0, 1, 0)], 2, kind), 3);
            let none = case(&[], &[], 2, kind);
            let empty = select(Scoring::Plain, &none.rows, &none.keys, 3);
            assert_chosen(&merge(&[empty], 3), &none, 3);
        }
    }

    #[test]
    fn rows_and_keys_beyond_a_block_are_scored_too() {
        tch::manual_seed(8);
        let count = 2 * BLOCK_KEYS_MAX + 77;
        let mut long = case(&[count + 5, BLOCK_KEYS_MAX, 9], &[(0, 1, count)], 2, Kind::Float);
        long.rows.q_tji = long.rows.q_tji.zeros_like();
        let _ = long.rows.q_tji.narrow(1, 0, 1).fill_(1.0);
        let _ = long.rows.weight_tj.fill_(1.0);
        long.keys[0].key_si = long.keys[0].key_si.zeros_like();
        let marked = [3, BLOCK_KEYS_MAX - 1, BLOCK_KEYS_MAX, 2 * BLOCK_KEYS_MAX + 76];
        for position in marked {
            let _ = long.keys[0].key_si.get(position).fill_(1.0);
        }
        let chosen = select(Scoring::Plain, &long.rows, &long.keys, 4).position_tn;
        let wanted: [i32; 12] = [3, 8191, 8192, 16460, 0, 3, 8191, 8192, 0, 1, 2, 3];
        assert!(chosen.flatten(0, -1).equal(&Tensor::from_slice(&wanted)), "{chosen}");
        // Rows split: as many as no more fit into one block of scores.
        let rows = SCORES_MAX / (4 * BLOCK_KEYS_MAX) + 3;
        let many = IndexRows {
            q_tji: long.rows.q_tji.narrow(0, 0, 1).repeat([rows, 1, 1]),
            weight_tj: long.rows.weight_tj.narrow(0, 0, 1).repeat([rows, 1]),
            position_t: long.rows.position_t.narrow(0, 0, 1).repeat([rows]),
        };
        let chosen = select(Scoring::Plain, &many, &long.keys, 4).position_tn;
        assert!(chosen.equal(&Tensor::from_slice(&wanted[..4]).unsqueeze(0).repeat([rows, 1])));
    }
}
