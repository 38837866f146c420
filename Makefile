# `make` alone prints what there is. Everything is built in one profile, --release (docs/decisions/0003-one-profile.md).
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# cargo spreads its own work; two of them only wait for each other.
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory
GATES := gate1 gate2 gate3 gate4 gate5 gate6 gate7
.PHONY: help deps gpu bench test-gpu build model data run study study-learning test test-rust test-mpi test-slurm test-kill gates $(GATES) ci ci-tools fmt fmt-check lint shellcheck tidy install clean

LONGSTRAW := target/release/longstraw
# Ranks of `make run` and `make study`, and what else the command is given: make run RANKS=4 ARGS='--set run.steps=3'
RANKS ?= 2
ARGS ?=
# The size of `make study-learning`: small or full.
SCALE ?= small
# World sizes of the MPI tests. Uneven ones hide less. 4 is between its neighbours, and costs minutes.
MPI_RANKS ?= 1 2 3 8
# The first gate that `make gates` submits, and the length of `make gate3` (all five one after another without it).
FROM ?= gate
GATE3 ?=
# Where `make install` puts bin/longstraw and lib/longstraw/.
PREFIX ?= $(if $(filter 0,$(shell id -u)),/usr/local,$(HOME)/.local)
SHELL_FILES = $(wildcard scripts/*.sh tests/slurm/*.sh .ci/run slurm/*.sbatch slurm/*.sh slurm/site.env) slurm/submit slurm/here
# Test programs of many small cases, one process each: more threads only get in each other's way.
TEST_ENVIRONMENT := OMP_NUM_THREADS=1

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  LIBTORCH=FOLDER uses a libtorch 2.11 that is there already; RANKS=N and ARGS='...' go to \`make run\` and \`make study\`."

run: build model data ## train SmolLM2-135M on this machine, two ranks, no GPU (sets everything up first)
	scripts/mpirun.sh $(RANKS) $(LONGSTRAW) train --config configs/laptop.toml $(ARGS)

study: build model ## gradient modes against the exact gradient on SmolLM2, by length and projection (tens of minutes on two cores)
	scripts/mpirun.sh $(RANKS) $(LONGSTRAW) study $(ARGS)

study-learning: build model ## what is learnt at length, by gradient mode (SCALE=small: minutes on a CPU; SCALE=full: one GPU, again to go on)
	scripts/study_learning.py $(SCALE) $(ARGS)

test: test-rust test-mpi ## all tests: unit, command, and MPI claims on 1, 2, 3 and 8 ranks (sets everything up first)

deps: ## system packages, and libtorch into .deps/
	@scripts/setup.sh deps

gpu: deps ## libtorch's GPU libraries into .deps/ (2.5 GB), for a machine with NVIDIA GPUs
	@scripts/setup.sh gpu

build: deps ## the binary, target/release/longstraw
	cargo build --release --locked

model: build ## the SmolLM2 model into models/
	@scripts/setup.sh model

data: model ## the laptop run's training and held-out prompts into data/codes/
	@scripts/laptop_data.sh

install: build ## bin/longstraw and its libraries under PREFIX (/usr/local for root, else ~/.local)
	scripts/install.sh "$(PREFIX)"

ci: ci-tools fmt-check shellcheck deps lint tidy test test-slurm ## what CI runs: format, shellcheck, clippy, tidy, test, Slurm

fmt: ## format the code
	cargo fmt

lint: deps ## clippy, pedantic, no warning allowed
	cargo clippy --release --locked --all-targets -- -D warnings

tidy: deps ## the project's own rules: import table, file and function length, and so on
	cargo test --release --locked --quiet --test tidy

# The MPI test programs belong to test-mpi. nextest refuses a filter that matches nothing.
NOT_MPI := $(if $(wildcard tests/ranks*.rs tests/ranks*/main.rs),-E 'not binary(/^ranks/)')
test-rust: deps
	@if cargo nextest --version >/dev/null 2>&1; then set -x; \
	  $(TEST_ENVIRONMENT) cargo nextest run --release --locked $(NOT_MPI); \
	  cargo test --release --locked --doc; \
	else set -x; \
	  $(TEST_ENVIRONMENT) cargo test --release --locked; \
	fi

test-gpu: gpu ## the tests that need a GPU; writes gpu_test.json
	scripts/gpu_test.sh

bench: build ## one update beside the conventional schedule (SmolLM2's shape; ARGS='--device cpu ...')
	scripts/mpirun.sh 1 $(LONGSTRAW) bench configs/shapes/smollm2-135m --conventional $(ARGS)

test-kill: deps ## 40 kills, stops, full disks and other faults, each run resumed to the same adapters (minutes; prints a table)
	$(TEST_ENVIRONMENT) cargo test --release --locked --test command kills:: -- --ignored --nocapture --test-threads=1

gates: ## submit all gates to Slurm, each after the gate before it has passed (FROM=gate4 begins there)
	slurm/submit gates --from $(FROM)

gate1: ## and gate2 to gate7: here, without Slurm, on a node's number of ranks (RANKS=4; GATE3=256k is one length of gate3)
$(GATES): build
	names=$$(slurm/submit --gates $@_$(if $(filter gate3,$@),$(GATE3))); slurm/here $$names

test-mpi: deps
	scripts/mpi_test.sh $(MPI_RANKS)

test-slurm: build ## the Slurm templates on a real Slurm that comes up here (root, Debian packages)
	@scripts/setup.sh slurm
	scripts/slurm_test.sh

ci-tools:
	@scripts/setup.sh ci

fmt-check:
	cargo fmt --check

shellcheck:
	shellcheck -x $(SHELL_FILES)

clean: ## what was built; .deps/, models/ and data/ stay
	cargo clean
