#!/usr/bin/env python3
"""Compares `longstraw convert` with transformers' own loading of the same GGUF file.

    python3 -m venv venv && . venv/bin/activate
    pip install torch==2.11.0 transformers==5.24.0 accelerate gguf sentencepiece protobuf tokenizers
    scripts/check_convert.py models/SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2-135m-instruct

1. weights and logits of the HF folder against `from_pretrained(…, gguf_file=…)`, both float32: at most 1e-4 apart;
2. ids and text of a megabyte of real text: equal, and decode(encode(x)) == x;
3. with `--binary target/release/longstraw`: a small model that stores a tensor in every readable type, filled with random
   bytes, is converted and compared with the `gguf` package's own dequantisation, bit for bit.

Prints one line a check; exit code 1 if a check fails. Not part of `make ci`: the packages are large.
"""

import argparse
import glob
import json
import os
import subprocess
import sys
import tempfile
import unicodedata

import gguf
import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

LOGITS_APART_MAX = 1e-4
TEXT_PATTERNS = [
    "/usr/share/common-licenses/*",
    "/usr/share/doc/*/copyright",
    "/usr/share/perl/*/**/*.pod",
    "/usr/share/perl/*/**/*.pm",
    "/usr/share/i18n/locales/*",
]
SAMPLES = [
    "hello  12 34\n\n\t 5,678.90 – “naïve” façade … 100 %\r\n",
    "日本語とかな、한국어, العربية, עברית, ไทย, Ελληνικά, русский язык 1234 слова",
    "emoji 👩‍👩‍👧‍👦 🇫🇷 👍🏽 and combining e\u0301 a\u030a, nbsp\u00a0thin\u2009space",
    "    def f(x):\n        return x**2  # comment\n\n\n" + " " * 40 + "end",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|im_start|> it's we'll I'D",
]
failed = []


def check(name, holds, detail):
    """One line for a check."""
    print(f"{'ok  ' if holds else 'FAIL'} {name}: {detail}")
    if not holds:
        failed.append(name)


def real_text(bytes_wanted):
    """Texts of real files, about `bytes_wanted` bytes from each kind of folder, so that no kind crowds out another."""
    # Every assigned character whose UTF-8 bytes can be tokens of a vocabulary that was learnt from text.
    ranges = [*range(32, 0xD800), *range(0xE000, 0x40000)]
    assigned = [chr(code) for code in ranges if unicodedata.category(chr(code)) not in ("Cn", "Cc", "Co")]
    texts = [*SAMPLES, "".join(assigned), " ".join(assigned)]
    for pattern in TEXT_PATTERNS:
        taken = 0
        for path in sorted(glob.glob(pattern, recursive=True)):
            if taken >= bytes_wanted or not os.path.isfile(path) or os.path.islink(path):
                continue
            try:
                with open(path, encoding="utf-8", newline="") as file:
                    texts.append(file.read())
            except UnicodeDecodeError:
                continue
            taken += len(texts[-1].encode())
    return texts


def check_text(theirs, ours, bytes_wanted):
    """Ids, decoded text and round trip of both tokenizers."""
    texts = real_text(bytes_wanted)
    ids_differ = text_differs = round_trip_fails = tokens = size = beyond_ascii = 0
    for text in texts:
        one, other = (tokenizer(text, add_special_tokens=True)["input_ids"] for tokenizer in (theirs, ours))
        ids_differ += one != other
        decoded = [
            tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            for tokenizer, ids in ((theirs, one), (ours, other))
        ]
        text_differs += decoded[0] != decoded[1]
        round_trip_fails += decoded[1] != text
        tokens += len(other)
        size += len(text.encode())
        beyond_ascii += sum(ord(character) > 127 for character in text)
    amount = f"{len(texts)} texts, {size:,} bytes, {beyond_ascii:,} characters beyond ASCII, {tokens:,} tokens"
    check("text is long enough", size >= bytes_wanted, amount)
    check("ids equal transformers'", ids_differ == 0, f"{ids_differ} texts differ")
    check("decoded text equals transformers'", text_differs == 0, f"{text_differs} texts differ")
    check("decode(encode(x)) == x", round_trip_fails == 0, f"{round_trip_fails} texts come back changed")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "chat_template"):
        one, other = getattr(theirs, name), getattr(ours, name)
        check(name, one == other, "equal" if one == other else f"{one!r} and {other!r}")
    turns = [{"role": "user", "content": "What is 7 times 12?"}]
    one, other = (
        tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False) for tokenizer in (theirs, ours)
    )
    check("chat prompt", one == other, f"{len(other)} characters")


def check_model(path, folder, tokenizer):
    """Weights and logits of both loadings."""
    directory, name = os.path.split(os.path.abspath(path))
    theirs = AutoModelForCausalLM.from_pretrained(directory, gguf_file=name, dtype=torch.float32).eval()
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    one, other = theirs.state_dict(), ours.state_dict()
    check("weight names", one.keys() == other.keys(), f"{len(other)} tensors")
    apart = max((one[key] - other[key]).abs().max().item() for key in one.keys() & other.keys())
    check("weights", apart == 0, f"largest difference {apart}")
    for field in ("rms_norm_eps", "vocab_size", "max_position_embeddings", "tie_word_embeddings", "eos_token_id"):
        one, other = getattr(theirs.config, field), getattr(ours.config, field)
        close = one == other or (isinstance(one, float) and abs(one - other) < 1e-7 * abs(one))
        check(f"config {field}", close, f"{one} and {other}")
    apart = largest = rows = 0
    same_choice = True
    with torch.no_grad():
        for text in [*SAMPLES, open(__file__, encoding="utf-8").read()[:6000]]:
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            one, other = theirs(ids).logits, ours(ids).logits
            apart = max(apart, (one - other).abs().max().item())
            largest = max(largest, one.abs().max().item())
            same_choice &= bool((one.argmax(-1) == other.argmax(-1)).all())
            rows += ids.shape[1]
    detail = f"largest difference {apart:.3g} over {rows} positions, logits up to {largest:.1f}"
    check("logits", apart <= LOGITS_APART_MAX and same_choice, detail)


def write_every_type(path):
    """A llama of two layers whose tensors take every readable type in turn, of random bytes; returns the values."""
    random = np.random.default_rng(1)
    types = [gguf.GGMLQuantizationType[name] for name in "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K".split()]
    writer = gguf.GGUFWriter(path, "llama")
    width, ffn, layers, vocabulary = 256, 512, 2, 300
    writer.add_block_count(layers)
    writer.add_context_length(512)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["a", "b", "ab", *(f"t{index}" for index in range(3, vocabulary))])
    writer.add_token_types([1] * vocabulary)
    writer.add_token_merges(["a b"])
    values = {}

    def add(name, rows, columns, kind):
        block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if kind in (types[0], types[1], types[2]):
            plain = random.standard_normal((rows, columns)).astype(np.float32)
            stored = {types[0]: plain, types[1]: plain.astype(np.float16)}.get(kind)
            if stored is None:
                stored = (plain.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        else:
            blocks = random.integers(0, 256, (rows * columns // block_values, block_bytes), dtype=np.uint8)
            # Scales must be finite: clear the top exponent bit of every float16 in the block.
            scale_bytes = {"Q6_K": [209]}.get(kind.name, [1] if kind.name.endswith("_0") else [1, 3])
            for at in scale_bytes:
                blocks[:, at] &= 0xBF
            stored = blocks.reshape(rows, -1)
        values[name] = gguf.dequantize(stored, kind).reshape(rows, columns)
        writer.add_tensor(name, stored, raw_dtype=kind)

    def add_norm(name):
        values[name] = random.standard_normal(width).astype(np.float32)
        writer.add_tensor(name, values[name])

    add("token_embd.weight", vocabulary, width, types[7])
    add("output.weight", vocabulary, width, types[10])
    add_norm("output_norm.weight")
    count = 0
    for layer in range(layers):
        for name, rows, columns in [
            ("attn_q", width, width),
            ("attn_k", 128, width),
            ("attn_v", 128, width),
            ("attn_output", width, width),
            ("ffn_gate", ffn, width),
            ("ffn_up", ffn, width),
            ("ffn_down", width, ffn),
        ]:
            add(f"blk.{layer}.{name}.weight", rows, columns, types[count % len(types)])
            count += 1
        add_norm(f"blk.{layer}.attn_norm.weight")
        add_norm(f"blk.{layer}.ffn_norm.weight")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def check_types(binary):
    """Converts the small model and compares values bit for bit."""
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "token_embd": "model.embed_tokens",
        "output": "lm_head",
        "output_norm": "model.norm",
    }
    with tempfile.TemporaryDirectory() as room:
        source, folder = os.path.join(room, "types.gguf"), os.path.join(room, "hf")
        values = write_every_type(source)
        subprocess.run([binary, "convert", source, folder], check=True, stdout=subprocess.DEVNULL)
        written = load_file(os.path.join(folder, "model.safetensors"))
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            tied = json.load(file)["tie_word_embeddings"]
    differ = []
    for name, value in values.items():
        parts = name.split(".")
        target = names[parts[-2]] if len(parts) == 2 else f"model.layers.{parts[1]}.{names[parts[2]]}"
        if parts[-2] in ("attn_q", "attn_k"):
            heads = value.shape[0] // 64
            value = value.reshape(heads, 32, 2, -1).swapaxes(1, 2).reshape(value.shape)
        if not np.array_equal(written[f"{target}.weight"], value):
            differ.append(name)
    check("every readable type", not differ and not tied, f"{len(values)} tensors, differing: {differ or 'none'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", help="the GGUF file")
    parser.add_argument("folder", help="the folder that `longstraw convert` made of it")
    parser.add_argument("--text-bytes", type=int, default=1_000_000, help="text from each kind of folder")
    parser.add_argument("--binary", help="longstraw, for the check of every stored type")
    arguments = parser.parse_args()
    directory, name = os.path.split(os.path.abspath(arguments.gguf))
    theirs = AutoTokenizer.from_pretrained(directory, gguf_file=name)
    ours = AutoTokenizer.from_pretrained(arguments.folder)
    check_text(theirs, ours, arguments.text_bytes)
    check_model(arguments.gguf, arguments.folder, theirs)
    if arguments.binary:
        check_types(arguments.binary)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
