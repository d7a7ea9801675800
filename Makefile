# Two commands: `make demo` (a real run on this machine) and `make test`. Each sets up what it needs first.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3.11
VENV ?= .venv
RUN := $(VENV)/bin/python
# The second environment: the newest Megatron-Core, which has no wheels for Python 3.11. Its tests are optional.
PYTHON_NEXT ?= python3.12
VENV_NEXT ?= .venv-next
# Where to find PyTorch's CPU build if no configured package source has it: see README.md, "Set-up".
TORCH_INDEX ?=
# 0: all tests in one process, one after the other.
WORKERS ?= auto

# Oversubscribed OpenMP threads cost up to 20×: one thread a process.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup setup-next demo test test-next test-isa lint bench compare clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: ## create .venv with both engines and patch Megatron-Core in it (minutes; safe to repeat)
	@PYTHON=$(PYTHON) VENV=$(VENV) TORCH_INDEX=$(TORCH_INDEX) tools/setup.sh

demo: setup ## train the tiny Qwen3-MoE with GRPO from under 0.5 to over 0.9 held-out reward (about 3 minutes)
	$(RUN) -m megatron_rl train recipes/tiny/demo.yaml --resume never --set name=demo-$$(date +%Y%m%d-%H%M%S)

test: setup ## run the whole test suite on WORKERS processes (one a core), and name the ten slowest
	@VENV=$(VENV) tools/setup_tests.sh
	$(RUN) -m pytest --numprocesses $(WORKERS) --dist loadscope --durations 10

setup-next: ## create .venv-next: Python 3.12 (PYTHON_NEXT=…), megatron-core 0.19.2, patched; up to 8 GB
	@$(PYTHON_NEXT) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null || { \
	  echo "setup-next: $(PYTHON_NEXT) is not a Python 3.12, which megatron-core 0.19.2 wants; name one: make $(or $(MAKECMDGOALS),setup-next) PYTHON_NEXT=/path/to/python3.12"; exit 1; }
	@PYTHON=$(PYTHON_NEXT) VENV=$(VENV_NEXT) TORCH_INDEX=$(TORCH_INDEX) TORCH_BUILD=any tools/setup.sh

test-next: setup-next ## the learner's tests, parallel ones included, under the newest Megatron-Core
	@VENV=$(VENV_NEXT) TEST_CACHE=.cache/next tools/setup_tests.sh transformer-engine
	TEST_CACHE=.cache/next OTHER_PYTHON=$(abspath $(wildcard $(RUN))) \
	  $(VENV_NEXT)/bin/python -m pytest --numprocesses $(WORKERS) --dist loadscope \
	  tests/parallel tests/patches tests/unit/learner tests/unit/checkpoint tests/unit/schedule

test-isa: setup ## the computing tests under other instruction sets, two threads, deterministic kernels
	tests/isa/run.sh $(RUN)

lint: setup ## ruff, shellcheck, both patch series and every recipe
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(VENV)/bin/shellcheck --external-sources --source-path=. $$(git ls-files '*.sh' '*.sbatch' .ci/run)
	$(RUN) -m megatron_rl patch check
	$(RUN) -m tools.dev.check_recipes

compare: setup ## the working tree against the baseline commit, side by side: is anything slower?
	$(RUN) -m tools.bench.compare

# Left out: `compare` has a target; `reward` wants files of problems, `trl` another environment; --help says how to start them.
bench: setup ## print the benchmarks' tables
	@for bench in $(filter-out __init__ compare reward trl,$(basename $(notdir $(wildcard tools/bench/*.py)))); do echo "== $$bench"; $(RUN) -m tools.bench.$$bench; done

clean: ## remove what set-up made (not the runs)
	rm -rf $(VENV) $(VENV_NEXT) .cache
