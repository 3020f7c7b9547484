"""All reports on a folder that has something of everything, through everything that is written about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pyspark.sql import SparkSession

from spark_pipeline.reports import registry
from spark_pipeline.reports.outcome import Outcome
from spark_pipeline.reports.run import Request, run

from .reportrun import Silent, files, summary
from .reportscene import Scene, play

pytestmark = pytest.mark.timeout(900)

LIMITS = """
topics_report_traffic_day_records = { max = 1 }
loss_records = { max = 0, labels = { by = "delet*" } }
loss_unexplained_seqs = { max = 0 }
routers_router_lag_records = { max = 0, labels = { router = "no such router" } }
"""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return play(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def outcome(spark: SparkSession, scene: Scene, out: Path) -> Outcome:
    limits = out / "limits.toml"
    limits.write_text(LIMITS)
    request = Request(
        folder=str(scene.data_dir), out=out, version="test", thresholds=str(limits), textfile=out / "topics.prom"
    )
    watcher = Silent()
    found = run(request, watcher)
    assert watcher.ended == list(registry.NAMES)
    return found


def test_all_reports_are_computed(outcome: Outcome) -> None:
    assert {entry.name: entry.error for entry in outcome.entries} == dict.fromkeys(registry.NAMES)
    for entry in outcome.entries:
        assert entry.result is not None
        assert entry.result.summary
        assert entry.result.findings
        assert entry.result.metrics


def test_thresholds_know_every_metric(outcome: Outcome) -> None:
    for entry in outcome.entries:
        assert entry.result is not None
        for metric in entry.result.metrics:
            assert registry.report_of(metric.name) == entry.name, metric.name
            assert registry.suggest_metric(metric.name) is None
    hint = registry.suggest_metric("trafic_day_records")
    assert hint is not None
    assert "traffic_day_records" in hint


def test_thresholds_are_applied(outcome: Outcome) -> None:
    broken = {breach.metric: (breach.value, breach.limit) for breach in outcome.breaches}
    assert broken["traffic_day_records"] == (summary(outcome)["day_records"], "max of 1")
    assert broken["loss_records"] == (summary(outcome, "loss")["deleted"], "max of 0")
    assert set(broken) == {"traffic_day_records", "loss_records"}
    assert [notice.text for notice in outcome.notices] == [
        "The threshold for routers_router_lag_records{router=no such router} applied to nothing: "
        "there is no such metric in this run."
    ]


def test_programs_can_read_it(outcome: Outcome, scene: Scene, out: Path, spark: SparkSession) -> None:
    told = json.loads((out / "summary.json").read_text())
    assert told["folder"] == str(scene.data_dir)
    assert told["ok"] is False, "thresholds were breached"
    assert list(told["reports"]) == list(registry.NAMES)
    for name in registry.NAMES:
        whole = json.loads((out / f"{name}.json").read_text())
        assert whole["summary"] == told["reports"][name]["summary"]
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families((out / "topics.prom").read_text())
        for sample in family.samples
    }
    assert samples["topics_report_traffic_day_records"] == summary(outcome)["day_records"]
    assert samples["topics_report_run_breaches"] == 2
    tables = {path.split("/date=")[0] for path in files(out / "parquet")}
    assert "traffic/hourly" in tables
    rows = spark.read.parquet(str(out / "parquet" / "traffic" / "hourly")).groupBy().sum("records").collect()
    assert rows[0][0] == summary(outcome)["records"]
    assert not files(out / "staging")


def test_people_can_read_it(outcome: Outcome, out: Path) -> None:
    text = (out / "index.html").read_text()
    assert "<script" not in text
    for name in registry.NAMES:
        assert f'id="{name}"' in text
        assert registry.load(name).TITLE in text
    assert "traffic_day_records is" in text
    charts = sum(len(entry.result.charts) for entry in outcome.entries if entry.result is not None)
    assert 10 < text.count("<svg") <= 2 * charts


def test_a_second_run_adds_nothing(outcome: Outcome, scene: Scene, out: Path) -> None:
    again = run(Request(folder=str(scene.data_dir), out=out, version="test"), Silent())
    assert {entry.name: entry.error for entry in again.entries} == dict.fromkeys(registry.NAMES)
    assert summary(again)["records"] == summary(outcome)["records"]
    assert summary(again)["read_since_last_run"] == 0
    assert summary(again, "queues")["acked"] == summary(outcome, "queues")["acked"]
