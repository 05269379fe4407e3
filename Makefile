# One environment (.venv) for everything. A stamp file remembers an install until what it was made from changes.
PYTHON ?= python3
BIN := .venv/bin
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip --disable-pip-version-check --quiet
MADE_FROM := pyproject.toml setup.py $(wildcard backends/cpu/kernels/*.[ch])

.PHONY: help install up test test-all test-arm lint bench picture clean

help:
	@echo "make up        install, then serve a model (the default one is fetched when there is none)"
	@echo "make install   the environment in .venv and the cluster command"
	@echo "make test      ruff, pyright and all tests (adds the test extras: torch, transformers, ...)"
	@echo "make test-all  the tests that need llama-cpp-python, which is compiled for them"
	@echo "make test-arm  the NEON kernels under qemu-user with Debian's cross compiler"
	@echo "make lint      ruff and pyright alone"
	@echo "make bench     tokens per second against llama.cpp on the same file and threads"
	@echo "make clean     remove what was built here, the environment too"

install: .venv/.installed

up: install
	@exec $(BIN)/cluster up

test: lint
	$(BIN)/python -m pytest

test-all: .venv/.installed-llama
	$(BIN)/python -m pytest -m llama

test-arm:
	scripts/test-arm

lint: .venv/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

bench: .venv/.installed-llama
	$(BIN)/cluster bench --against llama

picture: install
	$(BIN)/python scripts/picture.py docs/terminal.svg

clean:
	rm -rf .venv build dist ./*.egg-info .pytest_cache .ruff_cache .hypothesis backends/cpu/_kernels*.so

$(BIN)/python:
	scripts/make-venv "$(PYTHON)"

# order-only: the interpreter's date is older than ours whatever happens
.venv/.installed: $(MADE_FROM) | $(BIN)/python
	@echo 'Installing Roost into .venv (its CPU kernels are compiled for that) ...'
	@$(PIP) install --editable .
	@touch $@

.venv/.installed-dev: $(MADE_FROM) | $(BIN)/python
	@echo 'Installing Roost and what its tests need into .venv ...'
	@$(PIP) install --editable '.[dev]'
	@touch .venv/.installed $@

.venv/.installed-llama: .venv/.installed-dev
	@echo 'Installing llama-cpp-python; it is compiled, which takes minutes ...'
	@$(PIP) install --editable '.[llama]'
	@touch $@
