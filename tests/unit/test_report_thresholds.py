"""Thresholds: what is read from a file, what is refused, and what a metric breaks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from spark_pipeline.reports.registry import similar
from spark_pipeline.reports.report import Metric
from spark_pipeline.reports.thresholds import BadThresholds, Threshold, check, read

KNOWN = ("queues_ready_jobs", "queues_wait_seconds", "traffic_day_records")


def suggest(name: str) -> str | None:
    return None if name in KNOWN else similar(name, KNOWN)


def from_text(folder: Path, text: str) -> list[Threshold]:
    path = folder / "limits.toml"
    path.write_text(text)
    return read(str(path), suggest=suggest)


def test_a_file(tmp_path: Path) -> None:
    found = from_text(
        tmp_path,
        """
        queues_ready_jobs = { max = 10 }
        topics_report_traffic_day_records = { min = 1, max = 2.5 }
        [[queues_wait_seconds]]
        max = 5
        [[queues_wait_seconds]]
        max = 1
        labels = { queue = "mail-*", percentile = "p95" }
        """,
    )
    assert found == [
        Threshold(metric="queues_ready_jobs", max=10.0),
        Threshold(metric="traffic_day_records", min=1.0, max=2.5),
        Threshold(metric="queues_wait_seconds", max=5.0),
        Threshold(metric="queues_wait_seconds", max=1.0, labels={"queue": "mail-*", "percentile": "p95"}),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("queues_redy_jobs = { max = 1 }", "no report has a metric queues_redy_jobs; did you mean queues_ready_jobs"),
        ("zzz = { max = 1 }", "no report has a metric zzz; there are queues_ready_jobs, queues_wait_seconds"),
        ("queues_ready_jobs = 5", "queues_ready_jobs: write { max = N } or { min = N }"),
        ("queues_ready_jobs = {}", "queues_ready_jobs: a max or a min is missing"),
        ("queues_ready_jobs = { maximum = 5 }", "there is no 'maximum' here, only max, min and labels"),
        ('queues_ready_jobs = { max = "5" }', "max must be a number, not '5'"),
        ("queues_ready_jobs = { max = true }", "max must be a number, not True"),
        ("queues_ready_jobs = { max = nan }", "max must be a number, not nan"),
        ("queues_ready_jobs = { min = 2, max = 1 }", "min is above max"),
        ("queues_ready_jobs = { max = 2, labels = { queue = 1 } }", "labels must be a table of texts"),
        ("queues_ready_jobs = ", "it is not TOML"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadThresholds) as refused:
        from_text(tmp_path, text)
    assert said in str(refused.value)
    assert str(tmp_path / "limits.toml") in str(refused.value)
    assert "\n" not in str(refused.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadThresholds, match="no such file"):
        read(str(tmp_path / "none.toml"), suggest=suggest)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(BadThresholds, match="not UTF-8"):
        read(str(tmp_path / "bytes.toml"), suggest=suggest)


@pytest.mark.parametrize(
    ("threshold", "value", "limit"),
    [
        (Threshold(metric="m", max=5), 5, None),
        (Threshold(metric="m", max=5), 5.01, "max of 5"),
        (Threshold(metric="m", min=5), 5, None),
        (Threshold(metric="m", min=5), 4.99, "min of 5"),
        (Threshold(metric="m", min=1, max=5), 0, "min of 1"),
        (Threshold(metric="m", min=1, max=5), 6, "max of 5"),
        (Threshold(metric="m", max=5), math.inf, "max of 5"),
        (Threshold(metric="m", max=5), math.nan, None),
    ],
)
def test_limits(threshold: Threshold, value: float, limit: str | None) -> None:
    assert threshold.broken_by(value) == limit


def test_labels_choose() -> None:
    metrics = [
        Metric("wait", "How long jobs wait.", 9, {"queue": "mail-in", "p": "p95"}),
        Metric("wait", "How long jobs wait.", 9, {"queue": "jobs", "p": "p95"}),
        Metric("wait", "How long jobs wait.", 1, {"queue": "mail-out", "p": "p95"}),
        Metric("other", "", 99),
    ]
    breaches, idle = check([Threshold(metric="wait", max=5, labels={"queue": "mail-*"})], metrics)
    assert idle == []
    assert [(breach.labels["queue"], breach.value, breach.limit) for breach in breaches] == [("mail-in", 9, "max of 5")]
    assert breaches[0].text == "wait{queue=mail-in, p=p95} is 9, beyond the max of 5. How long jobs wait."
    nothing = Threshold(metric="wait", max=5, labels={"queue": "chat", "p": "*"})
    absent = Threshold(metric="wait", max=5, labels={"node": "*"})
    assert check([nothing, absent], metrics) == ([], [nothing, absent])
    assert str(nothing) == "wait{queue=chat, p=*}"
