# `make run` and `make test` work on a fresh machine; both go through `make setup`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SPARK  := $(VENV)/.spark-installed

.PHONY: setup run test lint unit e2e fuzz browser recovery spark bench bench-spark report clean

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
	$(BIN)/ruff check topics tests spark_pipeline pyspark_topics
	$(BIN)/ruff format --check topics tests spark_pipeline pyspark_topics
	$(BIN)/mypy

unit: setup
	$(BIN)/pytest tests/unit tests/actors tests/concurrency tests/golden tests/test_architecture.py tests/test_docs.py

e2e: setup
	$(BIN)/pytest tests/e2e

# TOPICS_FUZZ_CASES=200000 TOPICS_FUZZ_SEED=random make fuzz for a long one.
fuzz: setup
	$(BIN)/pytest tests/fuzz

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
	$(BIN)/pytest tests/browser

recovery: setup
	$(BIN)/pytest tests/recovery

# The Spark tests need Java 17 or newer; the same rule.
define want_java
	@command -v java >/dev/null || \
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
	$(BIN)/pytest tests/spark

test: lint
	$(want_chromium)
	$(want_java)
	$(BIN)/pytest tests || { echo "once more, those that failed alone:"; $(BIN)/pytest tests --last-failed --last-failed-no-failures none; }

bench: setup
	$(BIN)/topics bench

bench-spark: $(SPARK)
	$(want_java)
	$(BIN)/python -m spark_pipeline.bench

report: $(SPARK)
	$(BIN)/topics report

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
