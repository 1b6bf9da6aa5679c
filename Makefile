# make demo   tag top jets with a small network, sample its posterior, print what it knows, draw a picture
# make test   lint, types, documentation, tests: everything that must hold
# Each creates the virtual environment .venv and installs what it needs; a second call is fast.
.DEFAULT_GOAL := help
.PHONY: help demo browser test test-slow mutants lint types docs serve-docs bench bench-kernels bench-networks bench-jets bench-stacked bench-store bench-gpu bench-rivals bench-growth bench-acceptance bench-nuts bench-verdicts bias clean

PYTHON ?= python3
BIN := .venv/bin
CPUS := $(shell nproc 2>/dev/null || echo 2)
# each test process computes on one thread: many processes, no fight for cores
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 18

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--only-binary pythia8mc,fastjet --editable '.[dev]'  # from source these two compile for an hour
	@touch $@

browser:  # for the tests that look at the report; without one they are skipped
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		{ apt-get update && apt-get install --yes --no-install-recommends chromium; } >/dev/null 2>&1; } || \
		echo "no Chromium: the report is not looked at in a browser"

demo: .venv/installed  ## top tagging on a small scale: train, sample, draw a picture (demo.png)
	$(BIN)/adammcmc demo

test: lint types docs browser .venv/installed  ## lint, types, docs and the tests
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(CPUS) -m "not slow" -q

test-slow: .venv/installed  ## the long statistical tests
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(CPUS) -m slow -q

mutants: .venv/installed  ## break the code on purpose and see the tests notice
	$(BIN)/python -m tests.mutants

lint: .venv/installed  ## ruff: style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed  ## mypy --strict
	$(BIN)/mypy

docs: .venv/installed  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

serve-docs: .venv/installed  ## read the documentation in a browser
	$(BIN)/mkdocs serve

bench: .venv/installed  ## the cost of a step against Adam's, as ratios
	$(BIN)/python -m benchmarks.step_cost

bench-kernels: .venv/installed  ## effective draws per gradient of the exact kernels, on three targets
	$(ONE_THREAD) $(BIN)/python -m benchmarks.kernels

bench-networks: .venv/installed  ## every kernel against long references on three networks
	$(ONE_THREAD) $(BIN)/python -m benchmarks.networks compare

bench-jets: .venv/installed  ## jets a second in training ParticleNet; of interest on a GPU
	$(BIN)/python -m benchmarks.particlenet

bench-stacked: .venv/installed  ## chains at once against one after the other
	$(ONE_THREAD) $(BIN)/python -m benchmarks.stacked

bench-store: .venv/installed  ## what storing costs: share of a run, memory
	$(ONE_THREAD) $(BIN)/python -m benchmarks.storing

bench-gpu: .venv/installed  ## the speed of a step on a GPU against its floors (benchmarks/results/h200.json)
	$(BIN)/python -m benchmarks.h200 --output benchmarks/results/h200.json

bench-rivals: .venv/installed  ## the cost of a step, ours and what can be installed instead
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[rivals]'
	$(BIN)/python -m benchmarks.rivals

bench-growth: .venv/installed  ## how the cost of a step grows with parameters, batch and data
	$(BIN)/python -m benchmarks.growth

bench-acceptance: .venv/installed  ## every acceptance test: how far from the truth, at what cost in data (under ten minutes on two cores)
	$(ONE_THREAD) $(BIN)/python -m benchmarks.acceptance

bench-nuts: .venv/installed  ## our defaults, NUTS and MAMS on certified targets (about half an hour on one core)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[rivals]'
	$(ONE_THREAD) $(BIN)/python -m benchmarks.posteriors nuts
	$(BIN)/python -m docs.certified

bench-verdicts: .venv/installed  ## how often the verdict is right, on healthy and on sick runs (about ten minutes on one core)
	$(ONE_THREAD) $(BIN)/python -m benchmarks.verdicts
	$(BIN)/python -m benchmarks.verdicts table

bias: .venv/installed  ## what Algorithm 1 really samples: the table of the docs
	$(BIN)/python -m benchmarks.bias

clean:  ## remove what was built
	rm -rf .venv site .pytest_cache .mypy_cache .ruff_cache
