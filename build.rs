//! Compiles the C++ boundary against the same libtorch that `tch` links, lets the binary find it without
//! `LD_LIBRARY_PATH`, and lists the gates.

use std::path::{Path, PathBuf};

const SOURCES: [&str; 8] = [
    "src/tensor/boundary.cpp",
    "src/tensor/decode/decode.cpp",
    "src/tensor/delta/compiled.cpp",
    "src/tensor/fused/adapted.cpp",
    "src/tensor/fused/compiled.cpp",
    "src/tensor/gpu.cpp",
    "src/tensor/link.cpp",
    "src/tensor/selection.cpp",
];
const HEADERS: [&str; 4] =
    ["src/tensor/count.h", "src/tensor/fused/kernels.h", "src/tensor/gpu.h", "src/tensor/nvrtc.h"];

#[expect(clippy::disallowed_methods, reason = "a build script is configured by the environment")]
fn main() {
    for watched in SOURCES.iter().chain(&HEADERS).chain(&["build.rs"]) {
        println!("cargo:rerun-if-changed={watched}");
    }
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    let libtorch = PathBuf::from(std::env::var("LIBTORCH").unwrap_or_else(|_| ".deps/libtorch".into()));
    let include = libtorch.join("include");
    assert!(
        include.join("torch/csrc/api/include/torch/all.h").exists(),
        "no libtorch at {}: run `make deps`, or set LIBTORCH to a folder with include/ and lib/",
        libtorch.display()
    );
    cc::Build::new()
        .cpp(true)
        .std("c++20")
        .include(&include)
        .include(include.join("torch/csrc/api/include"))
        .files(SOURCES)
        .opt_level(2)
        .warnings(false)
        .compile("longstraw_boundary");
    // The real folder, not the one of symbolic links: libtorch finds its own dependencies next to its real files.
    for name in ["libtorch_cpu.so", "libc10.so", "libtorch.so"] {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{}", folder_of(&libtorch.join("lib").join(name)).display());
    }
    println!("cargo:rustc-link-arg=-Wl,--as-needed");
    name_commit();
    list_gates();
}

/// A file of `configs/gates` is a gate: `config::gates` includes the list of their names and texts.
#[expect(clippy::disallowed_methods, reason = "Cargo names the folder for built files by a variable")]
fn list_gates() {
    let folder = "configs/gates";
    println!("cargo:rerun-if-changed={folder}");
    let entries = std::fs::read_dir(folder).expect("the folder of the gates");
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("a readable folder").path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "toml") && !file.ends_with("every.toml"));
    files.sort();
    let row = |file: &PathBuf| {
        let name = file.file_stem().and_then(|stem| stem.to_str()).expect("a name of plain letters");
        format!("    ({name:?}, include_str!(concat!(env!(\"CARGO_MANIFEST_DIR\"), \"/{folder}/{name}.toml\"))),\n")
    };
    let rows: String = files.iter().map(row).collect();
    let list = Path::new(&std::env::var("OUT_DIR").expect("Cargo sets it")).join("gates.rs");
    std::fs::write(list, format!("&[\n{rows}]\n")).expect("a folder for what is built");
}

/// Sets the commit that receipts name; `unknown` outside a checkout.
fn name_commit() {
    for watched in [".git/HEAD", ".git/logs/HEAD"] {
        if Path::new(watched).exists() {
            println!("cargo:rerun-if-changed={watched}");
        }
    }
    let output = std::process::Command::new("git").args(["rev-parse", "--short=12", "HEAD"]).output();
    let output = output.ok().filter(|output| output.status.success());
    let commit = output.and_then(|output| String::from_utf8(output.stdout).ok());
    println!("cargo:rustc-env=LONGSTRAW_COMMIT={}", commit.as_deref().unwrap_or("unknown").trim());
}

fn folder_of(library: &Path) -> PathBuf {
    let real = library.canonicalize().unwrap_or_else(|_| library.to_path_buf());
    real.parent().map_or_else(|| real.clone(), Path::to_path_buf)
}
