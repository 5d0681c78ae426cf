PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help demo test test-gpu lint

help: ## show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /make \1: /'

demo: $(INSTALLED) ## make a tiny policy, train it with GRPO on a CPU, say what it learned (a few minutes)
	$(BIN)/python tools/demo.py

test: $(INSTALLED) ## run the tests
	$(BIN)/python -m pytest

# Installs nothing: a GPU's machine has its own torch. PYTHON=... chooses another interpreter than that of $(VENV).
test-gpu: ## run the tests that need a GPU, with what is installed; see docs/gpu.md
	$(if $(filter command,$(origin PYTHON)),$(PYTHON),$(or $(wildcard $(BIN)/python),$(PYTHON))) -m pytest tests/gpu -rs

lint: $(INSTALLED) ## check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# constraints.txt pins the tested versions.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@
