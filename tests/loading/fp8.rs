//! Checkpoints in fp8: the numbers that their blocks stand for, in both forms in memory, and what is refused.

use std::collections::BTreeMap;

use longstraw::model::parts::ExpertSpec;
use longstraw::model::spec::Spec;
use longstraw::model::weights::{Error, ExpertShare, Form, Opening, Share, Weights, ZeroWeights};
use longstraw::runtime::failure::{Classified, Exit};
use longstraw::runtime::units::LayerIndex;
use longstraw::tensor::bytes::bytes_of;
use safetensors::Dtype;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::checkpoints::{Draft, Stored};

const Q0: &str = "model.layers.0.self_attn.q_proj.weight";
const UP1: &str = "model.layers.1.mlp.experts.1.up_proj.weight";

/// Sides that are no multiples of a block: width 160, experts of 136, five of them.
fn config() -> Value {
    json!({
        "model_type": "qwen3_moe", "vocab_size": 24, "hidden_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 40, "intermediate_size": 300, "max_position_embeddings": 256,
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 136, "mlp_only_layers": [0],
    })
}

/// The number that a byte of e4m3 stands for: a sign, four bits of exponent with bias 7, three of mantissa.
fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let size = match exponent {
        15 if byte & 7 == 7 => f32::NAN,
        0 => mantissa / 8.0 * 2_f32.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2_f32.powi(exponent - 7),
    };
    if byte & 128 == 0 { size } else { -size }
}

/// The weights of a stored matrix, one by one.
fn dequantised(weight: &Stored, scales: &Stored) -> Vec<f32> {
    let (columns, factors) = (weight.shape[1], scales.floats());
    let value = |(i, byte): (usize, &u8)| {
        let (row, column) = (i / columns, i % columns);
        e4m3(*byte) * factors[row / 128 * columns.div_ceil(128) + column / 128]
    };
    weight.bytes.iter().enumerate().map(value).collect()
}

/// A checkpoint whose linear layers are in fp8, with every byte that is a number and factors of their own.
fn draft() -> Draft {
    let mut draft = Draft::made_of(&config());
    draft.linears_in_fp8(0.013);
    draft
}

fn load(draft: &Draft, kind: Kind, share: ExpertShare, form: Form) -> Result<Weights, Error> {
    let spec = Spec::read(draft.path(), None).unwrap();
    let opening = Opening::open(draft.path(), &spec, None)?.held_as(form)?;
    let loading = opening.load(&spec, kind, Device::Cpu, ZeroWeights::Refuse, Share::ALL, share)?;
    Ok(loading.finish([], false))
}

#[track_caller]
fn refusal(draft: &Draft, parts: &[&str]) -> String {
    draft.write();
    let mut all = Vec::new();
    for form in [Form::Plain, Form::Fp8] {
        let error = load(draft, Kind::Float, ExpertShare::ALL, form).unwrap_err();
        assert_eq!(error.exit(), Exit::Data);
        let words = error.to_string();
        for part in parts {
            assert!(words.contains(part), "{part:?} is not in: {words}");
        }
        all.push(words);
    }
    assert_eq!(all[0], all[1], "both forms are refused alike");
    all.remove(0)
}

/// The expected values of every matrix in fp8, by name.
fn expected(draft: &Draft) -> BTreeMap<String, Vec<f32>> {
    let fp8 = draft.tensors.iter().filter(|(_, stored)| stored.dtype == Dtype::F8_E4M3);
    fp8.map(|(name, stored)| (name.clone(), dequantised(stored, &draft.tensors[&format!("{name}_scale_inv")])))
        .collect()
}

/// The matrix `name` as it stands in memory, of experts its part of the joined tensor.
fn matrix(weights: &Weights, name: &str) -> Tensor {
    let Some((_, rest)) = name.split_once(".mlp.experts.") else { return weights.get(name) };
    let (expert, projection) = rest.split_once('.').unwrap();
    let expert: i64 = expert.parse().unwrap();
    let (layer, part) = (LayerIndex(1), i64::from(projection == "up_proj.weight"));
    if projection == "down_proj.weight" {
        return weights.experts(&ExpertSpec::down_name(layer), expert..expert + 1).get(0);
    }
    weights.experts(&ExpertSpec::gate_up_name(layer), expert..expert + 1).get(0).narrow(0, part * 136, 136)
}

fn content(weights: &Weights) -> Vec<(String, Vec<u8>)> {
    weights.iter().map(|(name, tensor)| (name.to_owned(), bytes_of(&tensor).unwrap())).collect()
}

#[test]
fn an_fp8_weight_is_its_value_times_the_factor_of_its_block() {
    let draft = draft();
    draft.write();
    let expected = expected(&draft);
    assert_eq!(expected.len(), 2 * 4 + 3 + 3 * 5, "every linear layer");
    for form in [Form::Plain, Form::Fp8] {
        let weights = load(&draft, Kind::Float, ExpertShare::ALL, form).unwrap();
        for (name, values) in &expected {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            assert!(bytes_of(&matrix(&weights, name)).unwrap() == bytes, "{name} {form:?}");
        }
        // Other dtypes hold the same float32 numbers, rounded once.
        for kind in [Kind::BFloat16, Kind::Double] {
            let other = load(&draft, kind, ExpertShare::ALL, form).unwrap();
            for name in [Q0, UP1] {
                assert!(matrix(&other, name).equal(&matrix(&weights, name).to_kind(kind)), "{name} {kind:?}");
            }
        }
    }
}

#[test]
fn both_forms_give_the_same_numbers_and_digest_and_fp8_takes_a_byte_a_value() {
    let draft = draft();
    draft.write();
    let [plain, fp8] =
        [Form::Plain, Form::Fp8].map(|form| load(&draft, Kind::BFloat16, ExpertShare::ALL, form).unwrap());
    assert!(content(&plain) == content(&fp8));
    assert_eq!(plain.digest(), fp8.digest());
    let (mut in_fp8, mut others) = (0, 0);
    for (name, stored) in &draft.tensors {
        match stored.dtype {
            Dtype::F8_E4M3 => in_fp8 += stored.bytes.len(),
            _ if name.ends_with("_scale_inv") => in_fp8 += stored.bytes.len(),
            _ => others += stored.bytes.len() / 2,
        }
    }
    assert_eq!(fp8.bytes().0, u64::try_from(in_fp8 + others).unwrap());
    let count: usize = expected(&draft).values().map(Vec::len).sum();
    assert_eq!(plain.bytes().0, u64::try_from(2 * count + others).unwrap());
}

#[test]
fn the_user_reads_what_becomes_of_fp8_weights() {
    let draft = draft();
    draft.write();
    let notes = |form| load(&draft, Kind::BFloat16, ExpertShare::ALL, form).unwrap().notes().join("; ");
    let found = notes(Form::Plain);
    assert!(found.starts_with("26 weights of the checkpoint are fp8: dequantised to BFloat16 while"), "{found}");
    assert!(found.contains("model.weights = \"fp8\" keeps them"), "{found}");
    let found = notes(Form::Fp8);
    assert!(found.contains("26 weights of the checkpoint are fp8: kept so"), "{found}");
}

#[test]
fn shares_of_experts_in_fp8_are_those_of_the_whole() {
    let draft = draft();
    // Factors and weights stand in different files.
    draft.write_shards(3);
    let whole = load(&draft, Kind::Float, ExpertShare::ALL, Form::Plain).unwrap();
    for of in [1, 2, 4, 8] {
        for form in [Form::Plain, Form::Fp8] {
            let share = |index| load(&draft, Kind::Float, ExpertShare { index, of }, form).unwrap();
            let parts: Vec<Weights> = (0..of).map(share).collect();
            for (name, tensor) in whole.iter() {
                let here: Vec<Tensor> = parts.iter().map(|part| part.get(name)).collect();
                let joined = if name.contains(".experts.") { Tensor::cat(&here, 0) } else { here[0].shallow_clone() };
                assert!(joined.equal(&tensor), "{name} over {of} ranks, {form:?}");
            }
            assert!(parts.iter().all(|part| part.digest() == whole.digest()));
        }
    }
}

#[test]
fn ranges_of_experts_are_parts_of_the_whole_tensor() {
    let draft = draft();
    draft.write();
    for form in [Form::Plain, Form::Fp8] {
        let weights = load(&draft, Kind::Float, ExpertShare { index: 1, of: 2 }, form).unwrap();
        for name in [ExpertSpec::gate_up_name(LayerIndex(1)), ExpertSpec::down_name(LayerIndex(1))] {
            let whole = weights.get(&name);
            assert_eq!(whole.size()[0], 3, "the second half of five");
            for range in [0..0, 0..1, 1..3, 0..3] {
                let part = whole.narrow(0, range.start, range.end - range.start);
                assert!(weights.experts(&name, range.clone()).equal(&part), "{name} {range:?} {form:?}");
            }
        }
    }
}

#[test]
fn a_layer_is_dequantised_once_until_another_is_asked_for() {
    let draft = draft();
    draft.write();
    let weights = load(&draft, Kind::Float, ExpertShare::ALL, Form::Fp8).unwrap();
    let other = "model.layers.0.mlp.up_proj.weight";
    let (first, beside) = (weights.get(Q0), weights.get(other));
    assert_eq!(weights.get(Q0).data_ptr(), first.data_ptr(), "the next micro-block takes the same tensor");
    assert_eq!(weights.get(other).data_ptr(), beside.data_ptr());
    // What belongs to no layer changes nothing; another layer does.
    assert_eq!(weights.get("model.norm.weight").size(), [160]);
    assert_eq!(weights.get(Q0).data_ptr(), first.data_ptr());
    assert_eq!(weights.get("model.layers.1.self_attn.q_proj.weight").size(), [160, 160]);
    let again = weights.get(Q0);
    assert_ne!(again.data_ptr(), first.data_ptr(), "the layer was given up");
    assert!(again.equal(&first));
}

#[test]
fn a_part_shares_fp8_weights_and_another_dtype_has_none() {
    let draft = draft();
    draft.write();
    let spec = Spec::read(draft.path(), None).unwrap();
    let weights = load(&draft, Kind::BFloat16, ExpertShare::ALL, Form::Fp8).unwrap();
    let first = weights.part(&spec.first_layers(1), Kind::BFloat16);
    assert!(first.bytes().0 < weights.bytes().0 && first.get(Q0).equal(&weights.get(Q0)));
    for wide in [weights.part(&spec, Kind::Double), weights.converted(Kind::Double)] {
        assert!(wide.get(Q0).equal(&weights.get(Q0).to_kind(Kind::Double)));
        assert!(wide.bytes().0 > 4 * weights.bytes().0);
    }
}

#[test]
fn a_checkpoint_without_fp8_cannot_be_held_in_it() {
    let draft = Draft::made_of(&config());
    draft.write();
    let error = load(&draft, Kind::Float, ExpertShare::ALL, Form::Fp8).unwrap_err();
    assert_eq!(error.exit(), Exit::Config);
    let words = error.to_string();
    assert!(words.contains("this one holds none") && words.contains("set model.weights = \"checkpoint\""), "{words}");
}

#[test]
fn factors_in_bfloat16_give_the_weights_of_the_same_factors_in_float32() {
    let (mut wide, mut narrow) = (draft(), draft());
    for (name, stored) in wide.tensors.iter_mut().filter(|(name, _)| name.ends_with("_scale_inv")) {
        // The upper half of a float32 is a bfloat16.
        stored.bytes.chunks_exact_mut(4).for_each(|value| value[..2].fill(0));
        let upper = stored.bytes.chunks_exact(4).flat_map(|value| value[2..].to_vec()).collect();
        let half = Stored { dtype: Dtype::BF16, shape: stored.shape.clone(), bytes: upper };
        narrow.tensors.insert(name.clone(), half);
    }
    for draft in [&wide, &narrow] {
        draft.write();
    }
    for form in [Form::Plain, Form::Fp8] {
        let read = |draft: &Draft| content(&load(draft, Kind::Float, ExpertShare::ALL, form).unwrap());
        assert!(read(&wide) == read(&narrow), "{form:?}");
    }
}

#[test]
fn factors_that_are_missing_too_many_or_of_another_form_are_refused() {
    let mut draft = draft();
    draft.tensors.remove(&format!("{Q0}_scale_inv"));
    draft.tensors.insert("model.norm.weight_scale_inv".to_owned(), Stored::float(&[1], &[1.0]));
    let (up, down) = (format!("{UP1}_scale_inv"), UP1.replace("up_proj.weight", "down_proj.weight_scale_inv"));
    draft.tensors.insert(up.clone(), Stored::float(&[1, 2], &[1.0, 2.0]));
    draft.tensors.insert(down.clone(), Stored { dtype: Dtype::F64, shape: vec![2, 2], bytes: vec![0; 32] });
    refusal(
        &draft,
        &[
            &format!("{Q0} is fp8, but its factors {Q0}_scale_inv [2, 2] are missing"),
            "model.norm.weight_scale_inv [1] is not part of this model",
            &format!("{up} is [1, 2], the config asks for [2, 2]"),
            &format!("{down} is F64"),
        ],
    );
}

#[test]
fn experts_of_a_layer_are_all_in_fp8_or_none() {
    let mut draft = draft();
    draft.tensors.remove(&format!("{UP1}_scale_inv"));
    draft.tensors.insert(UP1.to_owned(), Stored::float(&[136, 160], &vec![0.5; 136 * 160]));
    refusal(&draft, &[&format!("and {UP1} is not; the experts of a layer must be stored alike")]);
}

#[test]
fn fp8_values_and_factors_that_are_not_finite_are_placed() {
    let mut draft = draft();
    draft.tensor(UP1).bytes[160 * 2 + 3] = 0xff;
    draft.tensor(&format!("{Q0}_scale_inv")).set(3, f32::INFINITY);
    refusal(
        &draft,
        &[
            &format!("{UP1} has 1 NaN and 0 infinite of 21760 values, the first at [2, 3]"),
            &format!("{Q0}_scale_inv has 0 NaN and 1 infinite of 4 values, the first at [1, 1]"),
        ],
    );
}

#[test]
fn fp8_weights_that_are_all_zero_are_refused() {
    let mut draft = draft();
    draft.tensor(Q0).bytes.fill(0x80);
    refusal(&draft, &[&format!("{Q0} [160, 160] is all zero")]);
}

#[test]
fn random_weights_in_fp8_are_those_of_the_dtype_rounded() {
    let draft = Draft::made_of(&config());
    let spec = Spec::from_config(&draft.config, None, "config.json".as_ref()).unwrap();
    let random = |share, form| Weights::random_as(&spec, 5, Kind::Float, Device::Cpu, share, form).unwrap();
    let (plain, fp8) = (random(ExpertShare::ALL, Form::Plain), random(ExpertShare::ALL, Form::Fp8));
    assert_ne!(plain.digest(), fp8.digest());
    let linears: Vec<String> = spec.linear_layers().iter().map(|linear| format!("{}.weight", linear.module)).collect();
    for name in &linears {
        let (exact, rounded) = (matrix(&plain, name), matrix(&fp8, name));
        // Half a step of three mantissa bits, or of the smallest values below them. A block's largest is that of its matrix
        // or less, and that of e4m3 is 448 = 28 · 2⁴.
        let step = exact.abs() / 16.0 + exact.abs().max() / 448.0 * 2_f64.powi(-10);
        let off = (&exact - &rounded).abs();
        assert!(off.le_tensor(&step).all().int64_value(&[]) == 1, "{name}");
        assert!(!exact.equal(&rounded), "{name}");
    }
    for (name, tensor) in
        plain.iter().filter(|(name, _)| !name.contains("experts") && !linears.contains(&(*name).into()))
    {
        assert!(fp8.get(name).equal(&tensor), "{name} is no linear layer");
    }
    assert!(fp8.bytes().0 * 3 < plain.bytes().0, "{} of {}", fp8.bytes().0, plain.bytes().0);
    for of in [2, 8] {
        let parts: Vec<Weights> = (0..of).map(|index| random(ExpertShare { index, of }, Form::Fp8)).collect();
        let name = ExpertSpec::gate_up_name(LayerIndex(1));
        let here: Vec<Tensor> = parts.iter().map(|part| part.get(&name)).collect();
        assert!(Tensor::cat(&here, 0).equal(&fp8.get(&name)), "{of} ranks");
    }
}
