# Each target makes .venv and installs what it needs, once; again when the requirements change.
#   make train ARGS="loss=simpo trainer.max_steps=100"
#   make test

SHELL := /bin/bash
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --use-pep517 -c constraints.txt
# The first of these that is new enough; or say which: make PYTHON=/opt/python3.12/bin/python3 test
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)

.PHONY: help train test test-slow check notebooks docs bench
.DELETE_ON_ERROR:

help:
	@echo "make train ARGS=\"loss=simpo\"  train; ARGS are those of train.py"
	@echo "make test                     lint, types and tests"
	@echo "make test-slow                the tests that take minutes"
	@echo "make check                    both"
	@echo "make notebooks                run every notebook and keep what it shows"
	@echo "make docs                     write docs/losses.md and its plots"
	@echo "make bench                    measure side by side with TRL; write benchmarks/RESULTS.md"

train: .venv/.train
	@$(BIN)/python train.py $(ARGS)

test: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not slow"

test-slow: .venv/.dev
	$(BIN)/python -m pytest -m slow

check: test test-slow

notebooks: .venv/.dev
	$(BIN)/jupyter-execute --inplace notebooks/*.ipynb

docs: .venv/.dev
	$(BIN)/python docs/make_losses.py

# BENCH="--rows dpo_fp32,grpo" measures a part
bench: .venv/.bench
	$(BIN)/python benchmarks/side_by_side.py $(BENCH)

.venv/bin/pip:
	@if [ -z "$(PYTHON)" ]; then echo "error: Python 3.11 or newer is needed; say where: make PYTHON=..." >&2; exit 1; fi
	$(PYTHON) -m venv .venv

.venv/.train: pyproject.toml constraints.txt | .venv/bin/pip
	@echo "installing lit_align and what it needs into .venv: some minutes, once"
	@$(PIP) -e '.[peft,gguf]'
	@touch $@

.venv/.dev: pyproject.toml constraints.txt | .venv/bin/pip
	@echo "installing lit_align, what it needs and the tools of development into .venv: some minutes, once"
	@$(PIP) -e '.[dev]'
	@touch $@ .venv/.train

.venv/.bench: pyproject.toml constraints.txt | .venv/bin/pip
	@echo "installing lit_align, what it needs and TRL into .venv: some minutes, once"
	@$(PIP) -e '.[bench]'
	@touch $@
