# `make run` and `make test` work on a fresh machine; both go through `make setup`.
# test: the gate, some minutes. test-full: every test there is. test-exhaustive: seeds, kills and fuzz for hours.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# More workers than cores: most of a test's time is waiting for processes that start.
WORKERS := 4
# Servers and workers compile hundreds of modules again at every start if this is set.
unexport PYTHONDONTWRITEBYTECODE
# Of pytest: make test ARGS=--durations=200. Not from the environment: there it would leave tests out unseen.
ARGS :=
# Knobs of single runs: they would leave tests out.
unexport TOPICS_TEST_GATE TOPICS_TEST_UNTIL TOPICS_TEST_FIGURES TOPICS_FUZZ_CASE TOPICS_SPARK_ROUNDS
unexport PYTEST_ADDOPTS PYTEST_PLUGINS
# Other rules for coverage, another tree for the servers.
unexport COVERAGE_RCFILE PYTHONPATH
# -rs: a test that was skipped says why.
# A worker that dies ends the run: a replacement would run the test that killed it once more.
PYTEST := $(BIN)/pytest -n $(WORKERS) --max-worker-restart=0 -rs $(ARGS)
# As a number: pytest takes 00 for 0, and runs the tests without workers whose books tests/accounting.py would keep.
$(if $(shell test "$(WORKERS)" -ge 1 2>/dev/null && echo yes),,$(error WORKERS=$(WORKERS): it takes a number from 1))
# Of what loss and corruption hang on; pyproject.toml names the files and the least that will do.
COVERAGE := --cov --cov-report=term:skip-covered
STAMP  := $(VENV)/.installed
SPARK  := $(VENV)/.spark-installed

.PHONY: setup run test test-full test-exhaustive test-planted lint unit e2e fuzz browser recovery spark bench bench-spark \
	report clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $(STAMP)

# PySpark is large: only what needs it waits for it.
$(SPARK): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,spark]'
	@touch $(SPARK)

run: setup
	$(BIN)/topics serve

lint: $(SPARK)
	$(BIN)/ruff check topics tests spark_pipeline pyspark_topics benchmarks
	$(BIN)/ruff format --check topics tests spark_pipeline pyspark_topics benchmarks
	$(BIN)/mypy
	@for family in unit actors recovery; do $(BIN)/mypy tests/$$family/conftest.py || exit 1; done

unit: setup
	$(PYTEST) tests/unit tests/actors tests/concurrency tests/golden tests/planted tests/test_*.py

# Tests of the tests: bugs planted one by one in a copy of the tree, each of which a test has to catch.
test-planted: setup
	$(BIN)/python tests/planted/run.py

e2e: setup
	$(PYTEST) tests/e2e

# TOPICS_FUZZ_CASES=200000 TOPICS_FUZZ_SEED=random make fuzz for a long one.
fuzz: setup
	$(PYTEST) tests/fuzz

# The browser tests need Chromium. Where root can have it installed, it is; elsewhere they are skipped.
define want_chromium
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing chromium for the browser tests"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null || \
		echo "chromium could not be installed: the browser tests will be skipped"; \
	else \
		echo "no chromium: the browser tests will be skipped"; \
	fi
endef

browser: setup
	$(want_chromium)
	$(PYTEST) tests/browser

recovery: setup
	$(PYTEST) tests/recovery

# The Spark tests need Java 17 or newer; the same rule.
define want_java
	@command -v "$${JAVA_HOME:+$$JAVA_HOME/bin/}java" >/dev/null || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing Java 17 for the Spark tests"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq openjdk-17-jre-headless >/dev/null || \
		echo "Java could not be installed: the Spark tests will be skipped"; \
	else \
		echo "no Java: the Spark tests will be skipped"; \
	fi
endef

spark: $(SPARK)
	$(want_java)
	$(PYTEST) tests/spark

# What CI runs. A failure is a failure: nothing is tried twice.
test: lint
	$(want_chromium)
	$(want_java)
	TOPICS_TEST_GATE=1 TOPICS_FUZZ_CASES=2000 $(PYTEST) $(COVERAGE) -m "gate or not full" tests

test-full: lint
	$(want_chromium)
	$(want_java)
	env -u TOPICS_FUZZ_CASES $(PYTEST) $(COVERAGE) tests

# Crash points, damage, fuzz and models with new seeds for so many hours; docs/RELIABILITY.md.
HOURS ?= 1

test-exhaustive: setup
	$(BIN)/python tests/exhaustive.py --hours $(HOURS)

bench: setup
	$(BIN)/topics bench

bench-spark: $(SPARK)
	$(want_java)
	$(BIN)/python -m benchmarks.spark

report: $(SPARK)
	$(BIN)/topics report

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
