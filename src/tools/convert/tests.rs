//! A small llama GGUF with one tensor of every readable type, and the errors for broken files.
//!
//! Blocks are packed from chosen integers and scales, bit by bit from the format's description; expected values follow
//! from the plain formula over those integers. Scales are short binary fractions, so all products are exact in float32.

use std::fs;
use std::path::Path;

use half::{bf16, f16};
use safetensors::SafeTensors;

use super::*;
use crate::data::test_tokenizer;
use crate::runtime::failure::{Classified, Exit};

const WIDTH: usize = 256;
const HEAD: usize = 64;
const VOCABULARY: usize = 260;
/// Type numbers in the order in which the tensors below take them.
const TYPES: [u32; 11] = [0, 1, 30, 2, 3, 6, 7, 8, 12, 13, 14];

/// A sequence of small integers.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u8 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        u8::try_from((self.0 >> 33) % bound).unwrap()
    }

    /// A scale that float16 holds exactly.
    fn scale(&mut self) -> f32 {
        (f32::from(self.below(31)) - 15.0) / 1024.0
    }
}

fn f16_bytes(value: f32) -> [u8; 2] {
    assert_eq!(f16::from_f32(value).to_f32().to_bits(), value.to_bits());
    f16::from_f32(value).to_le_bytes()
}

/// One block of 32: (bytes, values) of `bits` bits, with a minimum or around a zero point.
fn block_of_32(bits: u32, with_minimum: bool, dice: &mut Dice) -> (Vec<u8>, Vec<f32>) {
    let (d, m) = (dice.scale(), dice.scale());
    let q: Vec<u8> = (0..32).map(|_| dice.below(1 << bits)).collect();
    let zero = f32::from(1_u8 << (bits - 1));
    let value = |q: &u8| if with_minimum { f32::from(*q) * d + m } else { (f32::from(*q) - zero) * d };
    let values = q.iter().map(value).collect();
    let mut bytes = f16_bytes(d).to_vec();
    if with_minimum {
        bytes.extend(f16_bytes(m));
    }
    if bits == 5 {
        let fifth = q.iter().enumerate().fold(0_u32, |word, (index, q)| word | (u32::from(q >> 4) << index));
        bytes.extend(fifth.to_le_bytes());
    }
    if bits == 8 {
        bytes.extend(q.iter().map(|q| q.wrapping_sub(128)));
    } else {
        bytes.extend((0..16).map(|index| (q[index] & 15) | ((q[index + 16] & 15) << 4)));
    }
    (bytes, values)
}

/// One `Q4_K` or `Q5_K` block.
fn block_of_4_or_5_k(bits: u32, dice: &mut Dice) -> (Vec<u8>, Vec<f32>) {
    let (d, d_min) = (dice.scale(), dice.scale());
    let q: Vec<u8> = (0..256).map(|_| dice.below(1 << bits)).collect();
    let (scales, minima): (Vec<u8>, Vec<u8>) = (0..8).map(|_| (dice.below(64), dice.below(64))).unzip();
    let value = |(index, q): (usize, &u8)| {
        d * f32::from(scales[index / 32]) * f32::from(*q) - d_min * f32::from(minima[index / 32])
    };
    let values = q.iter().enumerate().map(value).collect();
    let mut packed = [0; 12];
    for sub in 0..4 {
        packed[sub] = scales[sub] | ((scales[sub + 4] >> 4) << 6);
        packed[sub + 4] = minima[sub] | ((minima[sub + 4] >> 4) << 6);
        packed[sub + 8] = (scales[sub + 4] & 15) | ((minima[sub + 4] & 15) << 4);
    }
    let mut bytes = [f16_bytes(d), f16_bytes(d_min)].concat();
    bytes.extend(packed);
    if bits == 5 {
        let fifth = |index: usize| (0..8).fold(0, |byte, sub| byte | ((q[sub * 32 + index] >> 4) << sub));
        bytes.extend((0..32).map(fifth));
    }
    for pair in 0..4 {
        bytes.extend((0..32).map(|index| (q[pair * 64 + index] & 15) | ((q[pair * 64 + 32 + index] & 15) << 4)));
    }
    (bytes, values)
}

/// One `Q6_K` block.
fn block_of_6_k(dice: &mut Dice) -> (Vec<u8>, Vec<f32>) {
    let d = dice.scale();
    let q: Vec<u8> = (0..256).map(|_| dice.below(64)).collect();
    let scales: Vec<i8> = (0..16).map(|_| i8::from_le_bytes([dice.below(256)])).collect();
    let value = |(index, q): (usize, &u8)| d * f32::from(scales[index / 16]) * (f32::from(*q) - 32.0);
    let values = q.iter().enumerate().map(value).collect();
    let mut bytes = Vec::new();
    for half in q.chunks(128) {
        for index in 0..64 {
            bytes.push((half[index] & 15) | ((half[index + 64] & 15) << 4));
        }
    }
    for half in q.chunks(128) {
        for index in 0..32 {
            bytes.push((0..4).fold(0, |byte, quarter| byte | ((half[quarter * 32 + index] >> 4) << (2 * quarter))));
        }
    }
    bytes.extend(scales.iter().flat_map(|scale| scale.to_le_bytes()));
    bytes.extend(f16_bytes(d));
    (bytes, values)
}

/// `count` values stored as type `kind`.
fn stored(kind: u32, count: usize, dice: &mut Dice) -> (Vec<u8>, Vec<f32>) {
    let (mut bytes, mut values) = (Vec::new(), Vec::new());
    while values.len() < count {
        let (block, more) = match kind {
            0 | 1 | 30 => {
                let value = dice.scale();
                let block = match kind {
                    0 => value.to_le_bytes().to_vec(),
                    1 => f16_bytes(value).to_vec(),
                    _ => bf16::from_f32(value).to_le_bytes().to_vec(),
                };
                (block, vec![value])
            }
            2 => block_of_32(4, false, dice),
            3 => block_of_32(4, true, dice),
            6 => block_of_32(5, false, dice),
            7 => block_of_32(5, true, dice),
            8 => block_of_32(8, false, dice),
            12 => block_of_4_or_5_k(4, dice),
            13 => block_of_4_or_5_k(5, dice),
            _ => block_of_6_k(dice),
        };
        bytes.extend(block);
        values.extend(more);
    }
    (bytes, values)
}

/// A tensor of the made file: name, dimensions innermost first, type, bytes, values.
struct Made {
    name: String,
    dims: Vec<usize>,
    kind: u32,
    bytes: Vec<u8>,
    values: Vec<f32>,
}

/// All tensors of a llama of two layers.
fn tensors() -> Vec<Made> {
    let mut dice = Dice(1);
    let mut kinds = TYPES.iter().cycle();
    let mut made = Vec::new();
    let mut add = |name: String, dims: Vec<usize>, kind: u32| {
        let (bytes, values) = stored(kind, dims.iter().product(), &mut dice);
        made.push(Made { name, dims, kind, bytes, values });
    };
    add("token_embd.weight".into(), vec![WIDTH, VOCABULARY], 8);
    add("output_norm.weight".into(), vec![WIDTH], 0);
    for layer in 0..2 {
        for (name, rows) in [
            ("attn_q", WIDTH),
            ("attn_k", 2 * HEAD),
            ("attn_v", 2 * HEAD),
            ("attn_output", WIDTH),
            ("ffn_gate", 3 * WIDTH),
            ("ffn_up", 3 * WIDTH),
        ] {
            add(format!("blk.{layer}.{name}.weight"), vec![WIDTH, rows], *kinds.next().unwrap());
        }
        add(format!("blk.{layer}.ffn_down.weight"), vec![3 * WIDTH, WIDTH], *kinds.next().unwrap());
        add(format!("blk.{layer}.attn_norm.weight"), vec![WIDTH], 0);
        add(format!("blk.{layer}.ffn_norm.weight"), vec![WIDTH], 0);
    }
    made
}

fn text(text: &str) -> Vec<u8> {
    [&from_index(text.len()).to_le_bytes()[..], text.as_bytes()].concat()
}

/// A header key: its name, type number and value bytes.
type Key = (String, u32, Vec<u8>);

fn number(key: &str, value: u32) -> Key {
    (key.into(), 4, value.to_le_bytes().to_vec())
}

fn word(key: &str, value: &str) -> Key {
    (key.into(), 8, text(value))
}

fn list(key: &str, kind: u32, items: &[Vec<u8>]) -> Key {
    (
        key.into(),
        9,
        [kind.to_le_bytes().to_vec(), from_index(items.len()).to_le_bytes().to_vec(), items.concat()].concat(),
    )
}

/// All keys of a llama with a byte-level tokenizer of one merge.
fn keys() -> Vec<Key> {
    let mut tokens: Vec<String> = test_tokenizer::alphabet().iter().map(ToString::to_string).collect();
    tokens.extend(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "ab"].map(str::to_owned));
    let types: Vec<Vec<u8>> =
        (0..VOCABULARY).map(|id| i32::to_le_bytes(if (256..259).contains(&id) { 3 } else { 1 }).to_vec()).collect();
    vec![
        word("general.architecture", "llama"),
        number("llama.block_count", 2),
        number("llama.context_length", 512),
        number("llama.embedding_length", 256),
        number("llama.feed_forward_length", 768),
        number("llama.attention.head_count", 4),
        number("llama.attention.head_count_kv", 2),
        ("llama.attention.layer_norm_rms_epsilon".into(), 6, 1e-5_f32.to_le_bytes().to_vec()),
        ("llama.rope.freq_base".into(), 6, 100_000_f32.to_le_bytes().to_vec()),
        word("tokenizer.ggml.model", "gpt2"),
        word("tokenizer.ggml.pre", "smollm"),
        list("tokenizer.ggml.tokens", 8, &tokens.iter().map(|token| text(token)).collect::<Vec<_>>()),
        list("tokenizer.ggml.token_type", 5, &types),
        list("tokenizer.ggml.merges", 8, &[text("a b")]),
        number("tokenizer.ggml.bos_token_id", 257),
        number("tokenizer.ggml.eos_token_id", 258),
        word("tokenizer.chat_template", "{{ add_generation_prompt }}<|im_start|>assistant<|im_end|>"),
    ]
}

/// The bytes of a GGUF file.
fn file(keys: &[Key], tensors: &[Made]) -> Vec<u8> {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3_u32.to_le_bytes());
    bytes.extend(from_index(tensors.len()).to_le_bytes());
    bytes.extend(from_index(keys.len()).to_le_bytes());
    for (key, kind, value) in keys {
        bytes.extend([text(key), kind.to_le_bytes().to_vec(), value.clone()].concat());
    }
    let mut data = Vec::new();
    for tensor in tensors {
        bytes.extend(text(&tensor.name));
        bytes.extend(u32::try_from(tensor.dims.len()).unwrap().to_le_bytes());
        bytes.extend(tensor.dims.iter().flat_map(|dim| from_index(*dim).to_le_bytes()));
        bytes.extend(tensor.kind.to_le_bytes());
        bytes.extend(from_index(data.len()).to_le_bytes());
        data.extend(&tensor.bytes);
        data.resize(data.len().next_multiple_of(32), 0);
    }
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    bytes.extend(data);
    bytes
}

/// The HF name of a GGUF tensor, and whether its head rows are interleaved.
fn renamed(name: &str) -> (String, bool) {
    let parts: Vec<&str> = name.split('.').collect();
    let inner = |part| match part {
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" => "self_attn.o_proj",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        "attn_norm" => "input_layernorm",
        _ => "post_attention_layernorm",
    };
    match parts[..] {
        ["blk", layer, part, _] => {
            (format!("model.layers.{layer}.{}.weight", inner(part)), ["attn_q", "attn_k"].contains(&part))
        }
        ["token_embd", _] => ("model.embed_tokens.weight".into(), false),
        _ => ("model.norm.weight".into(), false),
    }
}

/// The values of a tensor in HF's order: pair i of a head becomes rows i and i + HEAD/2.
fn in_hf_order(tensor: &Made, interleaved: bool) -> Vec<f32> {
    if !interleaved {
        return tensor.values.clone();
    }
    let mut values = vec![0.0; tensor.values.len()];
    for (row, content) in tensor.values.chunks(WIDTH).enumerate() {
        let (head, pair, member) = (row / HEAD, row % HEAD / 2, row % 2);
        let target = head * HEAD + member * HEAD / 2 + pair;
        values[target * WIDTH..][..WIDTH].copy_from_slice(content);
    }
    values
}

fn converted(bytes: &[u8], options: Options) -> Result<(tempfile::TempDir, Summary), Error> {
    let room = tempfile::tempdir().unwrap();
    fs::write(room.path().join("model.gguf"), bytes).unwrap();
    let summary = convert(&room.path().join("model.gguf"), &room.path().join("made/hf"), &options)?;
    Ok((room, summary))
}

#[test]
#[expect(clippy::float_cmp, reason = "all products are exact, so nothing is rounded in either formula")]
fn every_readable_type_gives_the_values_of_its_formula_in_hf_order() {
    let made = tensors();
    let (room, summary) = converted(&file(&keys(), &made), Options::default()).unwrap();
    assert_eq!((summary.layers, summary.tensors, summary.vocabulary), (2, 20, 260));
    let bytes = fs::read(room.path().join("made/hf/model.safetensors")).unwrap();
    assert_eq!(summary.bytes, Bytes(from_index(bytes.len())));
    let written = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(written.len(), made.len());
    for tensor in &made {
        let (name, interleaved) = renamed(&tensor.name);
        let view = written.tensor(&name).unwrap();
        assert_eq!(view.shape(), tensor.dims.iter().rev().copied().collect::<Vec<_>>(), "{name}");
        let expected = in_hf_order(tensor, interleaved);
        let found = view.data().chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap()));
        for (index, (found, expected)) in found.zip(expected).enumerate() {
            assert!(found == expected, "{name}, type {}, value {index}: {found} for {expected}", tensor.kind);
        }
    }
}

#[test]
fn the_folder_holds_config_and_a_tokenizer_that_merges() {
    let (room, _) = converted(&file(&keys(), &tensors()), Options::default()).unwrap();
    let folder = room.path().join("made/hf");
    let read = |name: &str| -> Json { serde_json::from_slice(&fs::read(folder.join(name)).unwrap()).unwrap() };
    let config = read("config.json");
    for (field, wanted) in [
        ("model_type", json!("llama")),
        ("hidden_size", json!(256)),
        ("intermediate_size", json!(768)),
        ("num_hidden_layers", json!(2)),
        ("num_attention_heads", json!(4)),
        ("num_key_value_heads", json!(2)),
        ("head_dim", json!(64)),
        ("vocab_size", json!(260)),
        ("max_position_embeddings", json!(512)),
        ("rms_norm_eps", json!(1e-5)),
        ("rope_theta", json!(100_000.0)),
        ("rope_scaling", Json::Null),
        ("tie_word_embeddings", json!(true)),
        ("torch_dtype", json!("float32")),
        ("bos_token_id", json!(257)),
        ("eos_token_id", json!(258)),
    ] {
        assert_eq!(config[field], wanted, "{field}");
    }
    assert_eq!(read("special_tokens_map.json")["eos_token"], "<|im_end|>");
    assert_eq!(read("generation_config.json")["eos_token_id"], 258);
    let tokenizer = Tokenizer::open(&folder).unwrap();
    assert_eq!(tokenizer.encode("abba<|im_end|>").unwrap(), [259, 98, 97, 258]);
    assert_eq!(tokenizer.turn_end().unwrap(), 258);
}

#[test]
fn digits_are_cut_apart_first_only_where_asked() {
    let cut = |splits| {
        let bytes = file(&keys(), &tensors());
        let (room, _) = converted(&bytes, Options { splits, ..Options::default() }).unwrap();
        let json: Json =
            serde_json::from_slice(&fs::read(room.path().join("made/hf/tokenizer.json")).unwrap()).unwrap();
        json["pre_tokenizer"]["pretokenizers"][0]["type"].clone()
    };
    assert_eq!(cut(Splits::AsTransformers), Json::Null);
    assert_eq!(cut(Splits::AsTrained), "Digits");
}

#[test]
fn bfloat16_weights_are_the_rounded_float32_ones() {
    let made = tensors();
    let options = Options { weights: Weights::Bfloat16, ..Options::default() };
    let (room, _) = converted(&file(&keys(), &made), options).unwrap();
    let bytes = fs::read(room.path().join("made/hf/model.safetensors")).unwrap();
    let written = SafeTensors::deserialize(&bytes).unwrap();
    let view = written.tensor("model.embed_tokens.weight").unwrap();
    let wanted: Vec<u8> = made[0].values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect();
    assert_eq!(view.data(), wanted);
}

/// Converts broken bytes; the message must hold `words`, and nothing may remain.
fn refused(bytes: &[u8], words: &str) {
    let room = tempfile::tempdir().unwrap();
    let source = room.path().join("broken.gguf");
    fs::write(&source, bytes).unwrap();
    let error = convert(&source, &room.path().join("hf"), &Options::default()).unwrap_err();
    let message = error.to_string();
    assert!(message.contains(words) && message.contains("broken.gguf"), "{message}");
    assert_eq!(error.exit(), Exit::Data);
    let left: Vec<_> = fs::read_dir(room.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["broken.gguf"]);
}

#[test]
fn every_broken_file_is_refused_with_file_tensor_and_numbers() {
    let good = file(&keys(), &tensors());
    refused(b"PK\x03\x04 a zip file", "not a GGUF file: it starts with bytes [50, 4b, 03, 04]");
    refused(b"GG", "truncated: the magic at byte 0 needs 4 bytes, but the file ends after 2");
    refused(&[b"GGUF", &7_u32.to_le_bytes()[..]].concat(), "GGUF version 7 cannot be read, only 2 and 3");
    refused(&good[..100], "truncated: ");
    refused(&good[..good.len() - 800], "tensor blk.1.ffn_norm.weight lies outside the file: bytes ");

    let with_key = |index: usize, key: Key| {
        let mut all = keys();
        all[index] = key;
        file(&all, &tensors())
    };
    refused(&with_key(0, word("general.architecture", "mamba")), "key general.architecture is mamba, wanted llama");
    refused(&with_key(3, number("llama.other", 1)), "key llama.embedding_length is missing");
    refused(&with_key(5, number("llama.attention.head_count", 5)), "head_count_kv is 2, wanted a divisor of 5 heads");
    refused(&with_key(9, word("tokenizer.ggml.model", "bert")), "tokenizer.ggml.model is bert, wanted gpt2");
    refused(&with_key(10, word("tokenizer.ggml.pre", "viking")), "tokenizer.ggml.pre is viking, wanted default");
    refused(&with_key(13, list("tokenizer.ggml.merges", 8, &[text("a q")])), "tokenizer.ggml.merges[0] is \"a q\"");
    refused(&with_key(15, number("tokenizer.ggml.eos_token_id", 260)), "is 260, wanted below the vocabulary's 260");

    let with_tensors = |change: &dyn Fn(&mut Vec<Made>)| {
        let mut all = tensors();
        change(&mut all);
        file(&keys(), &all)
    };
    refused(&with_tensors(&|all| all[0].kind = 10), "tensor token_embd.weight is stored as Q2_K; convertible are F32");
    refused(&with_tensors(&|all| all[0].kind = 99), "tensor token_embd.weight is stored as unknown type 99");
    refused(
        &with_tensors(&|all| all[4].dims = vec![240, 128]),
        "tensor blk.0.attn_v.weight has shape [240, 128], the header's numbers imply [256, 128]",
    );
    refused(
        &with_tensors(&|all| all[0].dims = vec![250, 260]),
        "tensor token_embd.weight has rows of 250 values, no multiple of the 32 values of a Q8_0 block",
    );
    refused(&with_tensors(&|all| drop(all.remove(3))), "tensor blk.0.attn_k.weight is missing: 2 layers of llama");
    refused(&with_tensors(&|all| all[19].name = "blk.2.ffn_norm.weight".into()), "blk.1.ffn_norm.weight is missing");
    let further = |all: &mut Vec<Made>| {
        let (bytes, values) = stored(0, WIDTH, &mut Dice(3));
        all.push(Made { name: "blk.2.attn_norm.weight".into(), dims: vec![WIDTH], kind: 0, bytes, values });
    };
    refused(&with_tensors(&further), "tensor blk.2.attn_norm.weight has no place in a llama model of 2 layers");
    refused(&with_tensors(&|all| all[1].name = all[0].name.clone()), "token_embd.weight appears twice");
    let infinite = |all: &mut Vec<Made>| all[1].bytes[12..16].copy_from_slice(&f32::INFINITY.to_le_bytes());
    refused(&with_tensors(&infinite), "tensor output_norm.weight has inf at element 3");
}

#[test]
fn only_an_earlier_conversion_is_replaced_unless_forced() {
    let room = tempfile::tempdir().unwrap();
    let (source, target) = (room.path().join("m.gguf"), room.path().join("hf"));
    fs::write(&source, file(&keys(), &tensors())).unwrap();
    let run = |force| convert(&source, &target, &Options { force, ..Options::default() });
    fs::create_dir(&target).unwrap();
    fs::write(target.join("precious"), "").unwrap();
    let error = run(false).unwrap_err();
    assert!(error.to_string().contains("is not an earlier conversion"), "{error}");
    assert!(target.join("precious").exists());
    run(true).unwrap();
    assert!(!target.join("precious").exists() && target.join("config.json").exists());
    run(false).unwrap();
    let mut left: Vec<_> = fs::read_dir(room.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["hf", "m.gguf"]);
}

#[test]
fn llama3_factors_become_the_rule_and_others_are_refused() {
    let made = |spoil: f32| {
        let mut all = tensors();
        let factors: Vec<f32> = (0..HEAD / 2).map(|pair| llama3_factor(u16::try_from(pair).unwrap()) * spoil).collect();
        let bytes = factors.iter().flat_map(|factor| factor.to_le_bytes()).collect();
        all.push(Made { name: "rope_freqs.weight".into(), dims: vec![HEAD / 2], kind: 0, bytes, values: factors });
        file(&keys(), &all)
    };
    let (room, _) = converted(&made(1.0), Options::default()).unwrap();
    let config: Json = serde_json::from_slice(&fs::read(room.path().join("made/hf/config.json")).unwrap()).unwrap();
    assert_eq!(config["rope_scaling"]["rope_type"], "llama3");
    assert_eq!(config["rope_scaling"]["factor"], 32.0);
    refused(&made(1.5), "tensor rope_freqs.weight is not the llama3 rule: entry 0 is 1.5");
}

/// The llama3 rule's factor for a pair of dimensions: theta 100,000, factor 32, 1 to 4 waves in 8,192 positions.
fn llama3_factor(pair: u16) -> f32 {
    let turns = 8192.0 / (std::f64::consts::TAU * 100_000_f64.powf(f64::from(pair) / 32.0));
    let kept = ((turns - 1.0) / 3.0).clamp(0.0, 1.0);
    (1.0 / (kept + (1.0 - kept) / 32.0)).to_string().parse().unwrap()
}

#[test]
fn the_source_may_be_absent() {
    let room = tempfile::tempdir().unwrap();
    let error = convert(Path::new("absent.gguf"), &room.path().join("hf"), &Options::default()).unwrap_err();
    assert!(error.to_string().starts_with("absent.gguf: cannot open it"), "{error}");
}
