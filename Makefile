# Two commands do all the set-up: `make demo` and `make test`. Both make .venv on first use.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# CPU by default. With CUDA: make CONSTRAINTS= demo
CONSTRAINTS ?= -c constraints-cpu.txt
PIP := $(BIN)/pip install --quiet --disable-pip-version-check $(CONSTRAINTS)

.PHONY: help demo test lint bench clean

help:
	@echo "make demo   a model answers: launch the engine, stream a chat, 64 requests at once"
	@echo "make test   style, types and all tests"
	@echo "make lint   style and types alone"
	@echo "make bench  the offline workloads W1-W5, to benchmarks/results/"
	@echo "make clean  remove the environment and caches"

$(VENV)/.engine: pyproject.toml constraints-cpu.txt
	@echo "setting up $(VENV) with nanocore[engine]"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -e ".[engine]"
	@touch $@

$(VENV)/.dev: $(VENV)/.engine
	@echo "adding nanocore[dev]"
	@$(PIP) -e ".[engine,dev]"
	@touch $@

demo: $(VENV)/.engine
	@$(BIN)/python examples/demo.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/offline.py --model small

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
