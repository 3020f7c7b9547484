"""What programs read: JSON and the textfile, each whole or not there."""

from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from reportsample import NOW_MS, outcome

from spark_pipeline.reports import outputs
from spark_pipeline.reports.outcome import Entry, Outcome
from spark_pipeline.reports.report import Metric, Result


def having(*metrics: Metric) -> Outcome:
    entry = Entry(name="a", title="A", question="?", seconds=1.5, result=Result(summary={}, metrics=list(metrics)))
    return msgspec.structs.replace(outcome(), entries=[entry], breaches=[])


def test_prometheus_reads_it_back() -> None:
    evil = 'a"b\\c\nd{},="'
    metrics = [
        Metric("plain", "A help\nof two \\ lines.", 17),
        Metric("labelled", "L.", 0.1, {"topic": evil, "by": "é"}),
        Metric("labelled", "L.", -3, {"topic": "other"}),
        Metric("odd", "O.", math.nan, {"n": "1"}),
        Metric("odd", "O.", math.inf, {"n": "2"}),
        Metric("odd", "O.", -math.inf, {"n": "3"}),
        Metric("large", "B.", 2**53 + 2),
    ]
    text = outputs.textfile(having(*metrics))
    families = {family.name: family for family in text_string_to_metric_families(text)}
    read = {
        (sample.name.removeprefix("topics_report_"), frozenset(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    for metric in metrics:
        found = read[metric.name, frozenset(metric.labels.items())]
        assert found == metric.value or (math.isnan(found) and math.isnan(metric.value))
    assert all(family.type == "gauge" for family in families.values())
    assert families["topics_report_plain"].documentation == "A help\nof two \\ lines."
    assert len(families) == text.count("# TYPE"), "each family stands in one place"


def test_it_tells_about_the_run() -> None:
    text = outputs.textfile(outcome())
    assert f"topics_report_run_timestamp_seconds {NOW_MS / 1_000:.0f}\n" in text
    assert 'topics_report_run_ok{report="traffic"} 1\n' in text
    assert 'topics_report_run_ok{report="letters"} 0\n' in text
    assert "topics_report_run_breaches 1\n" in text


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ([Metric("bad name", "", 1)], "'bad name' can't be the name"),
        ([Metric("run_ok", "", 1)], "'run_ok' can't be the name"),
        ([Metric("m", "", 1, {"a-b": "x"})], "'a-b' can't be the name of a label"),
        ([Metric("m", "", 1, {"__a": "x"})], "'__a' can't be the name of a label"),
        ([Metric("m", "", 1), Metric("m", "", 2)], "is there twice"),
        ([Metric("m", "", 1, {"a": "1", "b": "2"}), Metric("m", "", 2, {"b": "2", "a": "1"})], "is there twice"),
    ],
)
def test_metrics_that_would_spoil_the_file(metrics: list[Metric], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        outputs.check_metrics(metrics, taken=set())


def test_two_reports_must_not_share_a_sample() -> None:
    taken: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
    outputs.check_metrics([Metric("m", "", 1, {"a": "1"})], taken=taken)
    outputs.check_metrics([Metric("m", "", 1, {"a": "2"})], taken=taken)
    with pytest.raises(ValueError, match="twice"):
        outputs.check_metrics([Metric("m", "", 5, {"a": "1"})], taken=taken)


def test_json(tmp_path: Path) -> None:
    outputs.write_json(tmp_path, outcome())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["letters.json", "summary.json", "traffic.json"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["folder"] == "/srv/topics-data"
    assert summary["when"] == "2026-11-16T21:13:25Z"
    assert summary["ok"] is False
    assert summary["breaches"][0]["metric"] == "traffic_day_records"
    traffic = summary["reports"]["traffic"]
    assert traffic["summary"]["records"] == 123_456_789
    assert [finding["level"] for finding in traffic["findings"]] == ["ok", "notice", "breach"]
    assert traffic["metrics"][0] == {
        "name": "traffic_day_records",
        "help": "Records written in the last 24 hours.",
        "value": 17,
        "labels": {},
    }
    assert summary["reports"]["letters"]["error"]
    assert summary["reports"]["letters"]["ok"] is False
    whole = json.loads((tmp_path / "traffic.json").read_text())
    assert whole["report"] == "traffic"
    assert whole["tables"][0]["rows"][0][0] == "orders"
    assert whole["charts"][0]["series"][0]["name"] == "records"
    assert json.loads((tmp_path / "letters.json").read_text())["tables"] == []


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = [bytes([letter]) * 300_000 for letter in b"abc"]
    outputs.write_atomically(path, contents[0])
    over = threading.Event()
    seen: set[bytes] = set()

    def read() -> None:
        while not over.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(200):
        outputs.write_atomically(path, contents[number % 3])
    over.set()
    reader.join()
    assert seen <= set(contents)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    assert path.stat().st_mode & 0o777 == 0o644, "node_exporter is somebody else"


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    outputs.write_atomically(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        outputs.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
