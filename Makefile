# Two commands for a newcomer: `make quickstart` and `make test`. Both set up .venv first (a no-op once it is there).
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.epilora-ready
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= passive
export TOKENIZERS_PARALLELISM ?= false
export RAY_USAGE_STATS_ENABLED ?= 0

MODEL ?= tiny
ARGS ?=

.PHONY: help setup quickstart serve test test-full test-gpu lint clean

help:
	@echo "make quickstart [MODEL=tiny|smollm2] [ARGS='key=value ...']   set up and run the whole system end to end"
	@echo "make serve                                                   keep the server up; prints a curl that works"
	@echo "make test | test-full | test-gpu                             tests: CPU share | everything | on a GPU machine"
	@echo "make lint                                                    ruff and mypy"

setup: $(STAMP)

$(STAMP): pyproject.toml scripts/bootstrap.py
	@$(PYTHON) scripts/bootstrap.py --venv $(VENV)

quickstart: $(STAMP)
	@$(PY) -m jobs.quickstart --config configs/quickstart_$(MODEL).yaml $(ARGS)

serve: $(STAMP)
	@$(PY) -m jobs.serve --config configs/quickstart_$(MODEL).yaml $(ARGS)

test: $(STAMP)
	@$(PY) -m pytest -m "not slow and not gpu" $(ARGS)

test-full: $(STAMP)
	@$(PY) -m pytest -m "not gpu" $(ARGS)

test-gpu:
	@$(PYTHON) -m pytest -m gpu $(ARGS)

lint: $(STAMP)
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy

clean:
	rm -rf runs .pytest_cache .ruff_cache .mypy_cache build *.egg-info
