# Every target sets up what it needs: an environment in .venv, from pinned packages.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check acceptance setup stubs clean

demo: $(READY) ## encode real photographs and a clip, compare with plain transformers
	$(BIN)/python tools/demo.py

test: $(READY) ## the whole test suite
	$(BIN)/python -m pytest

check: $(READY) ## format, lint, types, import rules, proto, stubs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	PYTHON=$(PYTHON) tools/proto.sh check

acceptance: check test demo ## every tier in full

stubs: ## regenerate client/vitwire/v1 from the proto
	PYTHON=$(PYTHON) tools/proto.sh generate

setup: $(READY)

$(READY): pyproject.toml constraints.txt requirements-tools.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes --requirement requirements-tools.txt
	touch $@

clean: ## remove what make made
	rm -rf $(VENV) .tools
