//! The compiled index scores against the plain ones, and how fast both are.

use longstraw::tensor::gpu::Mark;
use longstraw::tensor::selection::{IndexKeys, IndexRows, Scoring, Selected, merge, select};
use longstraw::tensor::selection_kernel::{Instructions, load};
use longstraw::world::World;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

/// Whole numbers up to `span` in size: every product and sum is exact in every dtype, and ties are many.
fn whole(shape: &[i64], span: i64, kind: Kind, device: Device) -> Tensor {
    (Tensor::randint(2 * span + 1, shape, (Kind::Int64, device)) - span).to_kind(kind)
}

/// Rows at positions from `first` on, `apart` from one to the next.
fn whole_rows(shape: [i64; 3], first: i64, apart: i64, device: Device) -> IndexRows {
    IndexRows {
        q_tji: whole(&shape, 2, Kind::BFloat16, device),
        weight_tj: whole(&shape[..2], 3, Kind::Float, device),
        position_t: Tensor::arange(shape[0], (Kind::Int64, device)) * apart + first,
    }
}

fn whole_keys(count: i64, width: i64, first: i64, step: i64, device: Device) -> IndexKeys {
    IndexKeys { key_si: whole(&[count, width], 2, Kind::BFloat16, device), first, step }
}

fn assert_same(rows: &IndexRows, keys: &[IndexKeys], n: i64, what: &str) -> Selected {
    let compiled = select(Scoring::Compiled, rows, keys, n);
    let plain = select(Scoring::Plain, rows, keys, n);
    let different = compiled.position_tn.not_equal_tensor(&plain.position_tn).sum(Kind::Int64).int64_value(&[]);
    assert_eq!(different, 0, "{what}: positions of {} rows, n = {n}", rows.q_tji.size()[0]);
    assert!(compiled.score_tn.equal(&plain.score_tn), "{what}: scores");
    compiled
}

fn load_or_panic(heads: i64, width: i64, instructions: Instructions) {
    load(heads, width, instructions).unwrap_or_else(|error| panic!("{instructions:?}: {error}"));
}

/// One shape in all situations that a run has.
fn assert_situations(heads: i64, width: i64, device: Device) {
    let rows = whole_rows([37, heads, width], 3, 611, device);
    let blocks = [
        whole_keys(7000, width, 9000, 1, device),
        whole_keys(9000, width, 0, 1, device),
        whole_keys(1333, width, 16_000, 3, device),
        whole_keys(0, width, 20_002, 1, device),
    ];
    for n in [1, 7, 64, 2048] {
        let all = assert_same(&rows, &blocks, n, "blocks in any order");
        let part = |keys: &[IndexKeys]| select(Scoring::Compiled, &rows, keys, n);
        let merged = merge(&[part(&blocks[..1]), part(&blocks[1..])], n);
        assert!(merged.position_tn.equal(&all.position_tn) && merged.score_tn.equal(&all.score_tn));
        // The choice of a row depends on no other row.
        let single = IndexRows {
            q_tji: rows.q_tji.narrow(0, 30, 1),
            weight_tj: rows.weight_tj.narrow(0, 30, 1),
            position_t: rows.position_t.narrow(0, 30, 1),
        };
        assert!(select(Scoring::Compiled, &single, &blocks, n).position_tn.equal(&all.position_tn.narrow(0, 30, 1)));
    }
    let zero = IndexRows { weight_tj: rows.weight_tj.zeros_like(), ..whole_rows([37, heads, width], 3, 611, device) };
    assert_same(&zero, &blocks, 2048, "scores that are all zero");
    let negative =
        IndexRows { weight_tj: rows.weight_tj.abs().neg() - 1.0, ..whole_rows([37, heads, width], 3, 611, device) };
    assert_same(&negative, &blocks, 2048, "negative weights");
    let mut rising = whole_rows([13, heads, width], 40_000, 1, device);
    rising.q_tji = rising.q_tji.zeros_like();
    let _ = rising.q_tji.narrow(2, 0, 2).fill_(1.0);
    let _ = rising.weight_tj.fill_(1.0);
    // 256 a + b with a and b below 256 are exact, and rise from key to key: every key beats all before it.
    let at = Tensor::arange(40_000, (Kind::Int64, device));
    let digits = [at.divide_scalar_mode(256, "floor") * 256, at.remainder(256)];
    let mut rise = whole_keys(40_000, width, 0, 1, device);
    rise.key_si = rise.key_si.zeros_like();
    for (column, digit) in digits.iter().enumerate() {
        rise.key_si.select(1, i64::try_from(column).unwrap_or(0)).copy_(&digit.to_kind(Kind::BFloat16));
    }
    assert_same(&rising, &[rise], 2048, "scores that rise from key to key");
    let own = IndexKeys { key_si: whole(&[37, 5, width], 2, Kind::BFloat16, device), first: 17_000, step: 2 };
    let with_own = [whole_keys(17_000, width, 0, 1, device), own];
    assert_same(&rows, &with_own, 2048, "keys of each row");
    assert_same(&rows, &[], 5, "no keys");
    assert_same(&whole_rows([0, heads, width], 0, 1, device), &with_own[..1], 5, "no rows");
}

pub(crate) fn exact(_world: &World, device: Device) -> Vec<Value> {
    tch::manual_seed(11);
    let mut found = Vec::new();
    for (heads, width) in [(32, 128), (16, 64), (16, 128), (32, 64), (64, 128), (64, 64)] {
        let chosen = Scoring::choose(device, heads, width, Kind::BFloat16, 2048);
        assert_eq!(chosen, Scoring::Compiled, "{heads} heads of {width}: the trial chose otherwise");
        for instructions in [Instructions::Native, Instructions::Portable] {
            load_or_panic(heads, width, instructions);
            assert_situations(heads, width, device);
        }
        found.push(json!({"heads": heads, "width": width, "exact": true}));
    }
    found
}

/// Rows × keys exceed 2³¹.
pub(crate) fn million(_world: &World, device: Device) -> Vec<Value> {
    tch::manual_seed(12);
    let keys = [whole_keys(1 << 20, 128, 0, 1, device)];
    let rows = whole_rows([4111, 32, 128], (1 << 20) - 4111 * 3, 3, device);
    let mut found = Vec::new();
    for instructions in [Instructions::Native, Instructions::Portable] {
        load_or_panic(32, 128, instructions);
        let chosen = assert_same(&rows, &keys, 2048, "a million keys");
        let lowest = chosen.score_tn.min().double_value(&[]);
        found.push(json!({"instructions": format!("{instructions:?}"), "keys": 1 << 20, "lowest": lowest}));
    }
    found
}

fn random_rows(rows: i64, last: i64, device: Device) -> IndexRows {
    IndexRows {
        q_tji: Tensor::randn([rows, 32, 128], (Kind::BFloat16, device)),
        weight_tj: Tensor::randn([rows, 32], (Kind::Float, device)),
        position_t: Tensor::arange(rows, (Kind::Int64, device)) + (last - rows + 1),
    }
}

fn random_keys(count: i64, device: Device) -> [IndexKeys; 1] {
    [IndexKeys { key_si: Tensor::randn([count, 128], (Kind::BFloat16, device)), first: 0, step: 1 }]
}

/// Scores whose sums are rounded differ in the order of summation, so the last of the chosen may differ.
pub(crate) fn random(_world: &World, device: Device) -> Vec<Value> {
    tch::manual_seed(13);
    let (count, n) = (1 << 17, 2048);
    let (rows, keys) = (random_rows(1024, count - 1, device), random_keys(count, device));
    let plain = select(Scoring::Plain, &rows, &keys, n);
    let mut found = Vec::new();
    for instructions in [Instructions::Native, Instructions::Portable] {
        load_or_panic(32, 128, instructions);
        let compiled = select(Scoring::Compiled, &rows, &keys, n);
        let again = select(Scoring::Compiled, &rows, &keys, n);
        assert!(
            compiled.position_tn.equal(&again.position_tn) && compiled.score_tn.equal(&again.score_tn),
            "same bits"
        );
        let at_tn = |one: &Selected| one.position_tn.to_kind(Kind::Int64);
        let dense = |one: &Selected| {
            Tensor::full([1024, count], f64::NEG_INFINITY, (Kind::Float, device)).scatter(1, &at_tn(one), &one.score_tn)
        };
        let held_tn = dense(&plain).gather(1, &at_tn(&compiled), false);
        let missing_tn = held_tn.eq(f64::NEG_INFINITY);
        let share = missing_tn.to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
        let largest = plain.score_tn.abs().max().double_value(&[]);
        let last_t1 = plain.score_tn.amin([1], true);
        let beyond =
            (&compiled.score_tn - last_t1).abs().where_self(&missing_tn, &Tensor::zeros([1], (Kind::Float, device)));
        let beyond = beyond.max().double_value(&[]) / largest;
        let apart =
            (&compiled.score_tn - &held_tn).abs().masked_fill(&missing_tn, 0.0).max().double_value(&[]) / largest;
        assert!(share < 1e-4, "{instructions:?}: {share:.1e} of the chosen keys differ");
        assert!(beyond < 1e-5 && apart < 1e-5, "{instructions:?}: {beyond:.1e}, {apart:.1e}: more than rounding");
        found.push(json!({
            "instructions": format!("{instructions:?}"),
            "differing_share": share,
            "differing_from_last": beyond,
            "score_apart": apart,
        }));
    }
    found
}

/// Median seconds of `repeats` runs after one that is not counted.
pub(crate) fn seconds<T>(device: Device, repeats: usize, work: impl Fn() -> T) -> f64 {
    let mut all = Vec::new();
    drop(work());
    for _ in 0..repeats {
        let before = Mark::now(device).unwrap_or_else(|error| panic!("{error}"));
        drop(work());
        let after = Mark::now(device).unwrap_or_else(|error| panic!("{error}"));
        all.push(before.seconds_to(&after).unwrap_or_else(|error| panic!("{error}")));
    }
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Dense bfloat16 products of an H100 or H200, TFLOP/s by its data sheet.
const PEAK_TFLOPS: f64 = 989.0;

/// Seconds of scoring and choosing `n` = 2,048 keys; FLOPs are 2 · visible pairs · heads · width.
pub(crate) fn speed(_world: &World, device: Device) -> Vec<Value> {
    tch::manual_seed(14);
    let mut found = Vec::new();
    for (rows, count, last, plain_too) in [
        (4096, 1 << 17, (1 << 17) - 1, true),
        (4096, 1 << 17, 1 << 16, false),
        (4096, 1 << 20, (1 << 20) - 1, true),
        (8, 1 << 17, (1 << 17) - 1, true),
        (8, 1 << 20, (1 << 20) - 1, true),
    ] {
        let (queries, keys) = (random_rows(rows, last, device), random_keys(count, device));
        // Without weights all scores are equal, and after the first keys no candidate is better: scoring alone.
        let flat = IndexRows {
            q_tji: queries.q_tji.shallow_clone(),
            weight_tj: queries.weight_tj.zeros_like(),
            position_t: queries.position_t.shallow_clone(),
        };
        let pairs = (&queries.position_t + 1).sum(Kind::Double).double_value(&[]);
        let tflop = 2.0 * pairs * 32.0 * 128.0 / 1e12;
        let plain = plain_too.then(|| seconds(device, 1, || select(Scoring::Plain, &queries, &keys, 2048)));
        for instructions in [Instructions::Native, Instructions::Portable] {
            load_or_panic(32, 128, instructions);
            let whole = seconds(device, 5, || select(Scoring::Compiled, &queries, &keys, 2048));
            let scoring = seconds(device, 5, || select(Scoring::Compiled, &flat, &keys, 2048));
            found.push(json!({
                "instructions": format!("{instructions:?}"),
                "rows": rows,
                "keys": count,
                "last_position": last,
                "seconds": whole,
                "scoring_seconds": scoring,
                "choosing_seconds": whole - scoring,
                "tflops": tflop / whole,
                "scoring_tflops": tflop / scoring,
                "share_of_peak": tflop / whole / PEAK_TFLOPS,
                "plain_seconds": plain,
                "speed_up": plain.map(|plain| plain / whole),
            }));
        }
    }
    found
}
