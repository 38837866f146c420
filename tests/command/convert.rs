//! `convert` and `data keychain` of unusable files: nothing remains.

use super::room::Room;

/// The first bytes of a GGUF file: version, tensors, keys, and then whatever `rest` is.
fn gguf(version: u32, tensors: u64, keys: u64, rest: &[u8]) -> Vec<u8> {
    [b"GGUF" as &[u8], &version.to_le_bytes(), &tensors.to_le_bytes(), &keys.to_le_bytes(), rest].concat()
}

#[test]
fn a_broken_gguf_is_refused_and_nothing_remains() {
    let room = Room::new();
    room.write("garbage.gguf", "PK\u{3}\u{4} and so on");
    room.write("short.gguf", "GG");
    room.write("old.gguf", gguf(1, 0, 0, &[]));
    // A key with a name of 20 bytes, of which the file has 4.
    room.write("cut.gguf", gguf(3, 1, 1, &[&20_u64.to_le_bytes() as &[u8], b"gene"].concat()));
    room.write("endless.gguf", gguf(3, u64::MAX, u64::MAX, &[]));
    let before = room.files("");
    for (file, words) in [
        ("absent.gguf", &["absent.gguf: cannot", "No such file"] as &[&str]),
        ("garbage.gguf", &["garbage.gguf: not a GGUF file", "starts with bytes [50, 4b, 03, 04]"]),
        ("short.gguf", &["short.gguf: ", "the file ends after 2"]),
        ("old.gguf", &["old.gguf: GGUF version 1 cannot be read"]),
        ("cut.gguf", &["cut.gguf: truncated", "the file ends after"]),
        ("endless.gguf", &["endless.gguf: "]),
    ] {
        room.alone(&["convert", file, "made/model"]).refused(3, words);
    }
    assert_eq!(room.files(""), before);
}

#[test]
fn an_existing_destination_is_unchanged() {
    let room = Room::with(&[("mine/notes.txt", "mine"), ("x.gguf", "garbage")]);
    room.alone(&["convert", "x.gguf", "mine"]).refused(2, &["mine", "--force"]);
    room.alone(&["convert", "x.gguf", "mine", "--force"]).refused(3, &["x.gguf: not a GGUF file"]);
    assert_eq!(room.files(""), ["mine/notes.txt", "x.gguf"]);
}

#[test]
fn a_keychain_without_a_tokenizer_is_refused_and_nothing_remains() {
    let room = Room::with(&[("model/config.json", "{}")]);
    room.alone(&["data", "keychain", "--model", "model", "--out", "made"]).refused(3, &["model/tokenizer.json"]);
    assert_eq!(room.files(""), ["model/config.json"]);
}
