# `make run` and `make test` work on a fresh machine; both go through `make setup`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup run test lint unit e2e recovery bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $(STAMP)

run: setup
	$(BIN)/topics serve

lint: setup
	$(BIN)/ruff check topics tests spark_pipeline
	$(BIN)/ruff format --check topics tests spark_pipeline
	$(BIN)/mypy

unit: setup
	$(BIN)/pytest tests/unit tests/actors tests/concurrency tests/golden tests/test_architecture.py tests/test_docs.py

e2e: setup
	$(BIN)/pytest tests/e2e

recovery: setup
	$(BIN)/pytest tests/recovery

test: lint
	$(BIN)/pytest tests

bench: setup
	$(BIN)/topics bench

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
