# The one door to this project: `make` lists what it can do.
#
# Everything a target creates stays inside the checkout: .venv (with its caches), build, dist, demo-output.

PYTHON ?= python3
VENV   ?= .venv
PYTEST_ARGS ?=
PYTHONS ?=

PY     := $(VENV)/bin/python
DEPS   := $(VENV)/.stamp-dependencies
BUILT  := $(VENV)/.stamp-extension

# Whatever the build reads.  `find` sees new files too, so a stamp never hides one.
SOURCES := $(shell find csrc -type f \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.py' \) 2>/dev/null) \
           $(wildcard setup.py pyproject.toml ddp_mp/_version.py)

# pip, matplotlib, Hugging Face and the compilers of PyTorch all keep caches; they belong to the checkout.
export XDG_CACHE_HOME := $(abspath $(VENV))/cache
export PIP_CACHE_DIR := $(XDG_CACHE_HOME)/pip
export MPLCONFIGDIR := $(XDG_CACHE_HOME)/matplotlib
export HF_HOME := $(XDG_CACHE_HOME)/huggingface
export TORCHINDUCTOR_CACHE_DIR := $(XDG_CACHE_HOME)/torchinductor
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONDONTWRITEBYTECODE := 1

PIP_INSTALL := $(PY) -m pip install --quiet
# Every test run has its own folder for temporary files, removed when the run is over.
PYTEST = mkdir -p build/tmp && tmp=$$(mktemp -d build/tmp/pytest-XXXXXX) && trap 'rm -rf "$$tmp"' EXIT && \
         $(PY) -m pytest -p no:cacheprovider --basetemp="$$tmp/base" --timeout=300 $(PYTEST_ARGS)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup dev demo test test-long test-all check docs sanitize mutate soak fuzz peers gallery bench gpu versions wheel compile-commands clean distclean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  \033[1m%-16s\033[0m %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch and the rest in one call: no later requirement can then replace the pinned torch by another build of it.
$(DEPS): requirements-dev.txt | $(VENV)/bin/python
	$(PIP_INSTALL) --requirement requirements-dev.txt
	@touch $@

# DDP_MP_DEVELOP=1: warnings are errors, and the kernels are compiled wherever nvcc is found.
$(BUILT): $(SOURCES) $(DEPS)
	DDP_MP_DEVELOP=1 $(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

setup: $(DEPS) ## create .venv with everything needed (other targets do this themselves)

dev: $(BUILT) ## build the extension in place, warnings as errors; `import ddp_mp` then works from .venv

demo: $(BUILT) ## train a small GPT in fp32 and in mixed precision, side by side, on two processes (two minutes)
	mkdir -p build/tmp
	TMPDIR=$(abspath build/tmp) OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --nproc-per-node=2 examples/demo.py

# Two processes, each with its own ranks; a file's tests stay together.
PARALLEL := -n 2 --dist loadfile

test: $(BUILT) ## build, and test every subject (five minutes)
	@$(PYTEST) $(PARALLEL) -m "not long" tests

test-long: $(BUILT) ## the sweeps, long forms, PyTorch's own tests and the simulator's, which `make test` leaves out
	@$(PYTEST) $(PARALLEL) -m long tests

test-all: test test-long ## every test

check: $(BUILT) ## format, lint, types and the unit tests (one minute)
	$(VENV)/bin/ruff check --no-cache .
	$(VENV)/bin/ruff format --no-cache --check .
	$(VENV)/bin/mypy --strict --cache-dir $(XDG_CACHE_HOME)/mypy ddp_mp
	@$(PYTEST) $(PARALLEL) -m "not long" tests/unit

$(VENV)/.stamp-docs: docs/requirements.txt $(DEPS)
	$(PIP_INSTALL) --requirement docs/requirements.txt
	@touch $@

docs: $(BUILT) $(VENV)/.stamp-docs ## build the documentation into build/docs, warnings as errors
	$(PY) -m sphinx -W --keep-going -q -b html -d build/doctrees docs build/docs
	@echo build/docs/index.html

sanitize: $(BUILT) ## run the tests with AddressSanitizer and UndefinedBehaviorSanitizer in all C code
	PYTHON=$(PY) scripts/sanitize.sh $(PYTEST_ARGS)

mutate: $(BUILT) ## take waits, records and checks out of the CUDA code one at a time: do tests notice? (an hour or two)
	$(PY) scripts/mutate_cuda.py

MINUTES ?= 60
soak: $(BUILT) ## train random models by random actions on four ranks for MINUTES=60, compare all, watch memory
	OMP_NUM_THREADS=1 $(PY) tests/long/soak.py --minutes $(MINUTES)

fuzz: $(BUILT) ## walks over training, DLPack descriptions and plans, chosen by fuzzers, MINUTES=60 each
	@DDP_MP_FUZZ=$(MINUTES) $(PYTEST) tests/long/test_fuzz.py tests/long/test_exchange_fuzz.py tests/long/test_plan_fuzz.py

peers: $(BUILT) ## run PyTorch's own tests of DistributedDataParallel on patched models, write docs/peer-tests.md
	$(PY) tests/peers/peers.py

gallery: $(BUILT) ## train small models in the shape of public programs in three ways, write docs/gallery.md
	$(PY) tests/gallery

bench: $(BUILT) ## run every benchmark; results as JSON, text and plots in benchmarks/results
	$(PY) -m benchmarks

# PYTHON=... is the interpreter to use; where it is not given, .venv's or python3, whichever sees a GPU first.
REHEARSE ?=
gpu: ## everything that needs an NVIDIA GPU, in ten minutes; REHEARSE=1 runs the same steps, tiny, without one
	$(PYTHON) scripts/gpu.py $(if $(REHEARSE),--rehearse) $(if $(filter file,$(origin PYTHON)),,--python "$(PYTHON)")

# TORCH: releases of PyTorch; TESTS: what pytest is to run.  PIP_INDEX_URL names the index that PyTorch comes from.
versions: $(BUILT) ## run `make test` and the acceptance scenarios on PyTorch 2.10 to 2.14, write docs/versions.md
	$(PY) scripts/pytorch_versions.py $(if $(TORCH),--torch $(TORCH)) $(if $(TESTS),--tests $(TESTS))

# PYTHONS: names on PATH, shims of a version manager, or paths.  The shell expands ~ and wildcards in it.
wheel: $(DEPS) ## build an sdist and manylinux wheels into dist, for PYTHONS or every python3.X on PATH
	$(PY) scripts/wheels.py $(PYTHONS)

compile-commands: $(DEPS) ## write compile_commands.json, for clangd and editors
	$(PY) scripts/compile_commands.py

clean: ## remove what was built, keep .venv
	rm -rf build dist demo-output .hypothesis *.egg-info compile_commands.json $(BUILT)
	find ddp_mp csrc tests -name '*.so' -delete
	find ddp_mp tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove .venv too
	rm -rf $(VENV)
