"""What a run leaves for programs: summary.json, a JSON file for each report, and a textfile for node_exporter.

Every file is written under another name, synced and renamed: a reader sees the old one or the new one, never a half.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from . import units
from .outcome import Entry, Outcome
from .report import Metric
from .thresholds import PREFIX

VERSION = 1  # of the JSON files; a field that comes is no new version, one that goes or changes is
SUMMARY = "summary.json"

_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*\Z")
_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*\Z")


def write_atomically(path: Path, data: bytes) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o644)  # mkstemp's 0600 would hide it from node_exporter
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


# --- JSON --------------------------------------------------------------------------------------------


def write_json(out: Path, outcome: Outcome) -> None:
    for entry in outcome.entries:
        write_atomically(out / f"{entry.name}.json", _json({**_head(outcome), **_whole(entry)}))
    write_atomically(out / SUMMARY, _json(summary(outcome)))


def summary(outcome: Outcome) -> dict[str, Any]:
    return {
        **_head(outcome),
        "seconds": round(outcome.seconds, 3),
        "ok": not outcome.failed and not outcome.breaches,
        "breaches": outcome.breaches,
        "notices": outcome.notices,
        "reports": {entry.name: _short(entry) for entry in outcome.entries},
    }


def _head(outcome: Outcome) -> dict[str, Any]:
    return {
        "version": VERSION,
        "run": outcome.run,
        "program": outcome.version,
        "folder": outcome.folder,
        "when": f"{units.moment(outcome.now_ms):%Y-%m-%dT%H:%M:%SZ}",
        "now_ms": outcome.now_ms,
        "since_ms": outcome.since_ms,
        "snapshot_ms": outcome.snapshot_ms,
    }


def _short(entry: Entry) -> dict[str, Any]:
    result = entry.result
    return {
        "title": entry.title,
        "question": entry.question,
        "seconds": round(entry.seconds, 3),
        "ok": result is not None,
        "error": entry.error,
        "summary": {} if result is None else result.summary,
        "findings": [] if result is None else result.findings,
        "metrics": [] if result is None else result.metrics,
    }


def _whole(entry: Entry) -> dict[str, Any]:
    result = entry.result
    shown = {"tables": [], "charts": []} if result is None else {"tables": result.tables, "charts": result.charts}
    return {"report": entry.name, **_short(entry), **shown}


def _json(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2) + b"\n"


# --- the textfile ------------------------------------------------------------------------------------


def write_textfile(path: Path, outcome: Outcome) -> None:
    write_atomically(path, textfile(outcome).encode())


def textfile(outcome: Outcome) -> str:
    """All metrics in Prometheus' text format, each family once."""
    families: dict[str, list[Metric]] = {}
    for metric in [*outcome.metrics, *_own(outcome)]:
        families.setdefault(metric.name, []).append(metric)
    return "".join(line for name in sorted(families) for line in _family(PREFIX + name, families[name]))


def _own(outcome: Outcome) -> Iterator[Metric]:
    """About the run itself."""
    yield Metric("run_timestamp_seconds", "When the last run began.", outcome.now_ms / 1_000)
    yield Metric("run_breaches", "Metrics beyond a limit of the thresholds file.", len(outcome.breaches))
    for entry in outcome.entries:
        labels = {"report": entry.name}
        yield Metric("run_ok", "1 if the last run computed this report.", float(entry.error is None), labels)
        yield Metric("run_seconds", "How long that took.", round(entry.seconds, 3), labels)


def _family(name: str, metrics: list[Metric]) -> Iterator[str]:
    yield f"# HELP {name} {_escaped(metrics[0].help)}\n"
    yield f"# TYPE {name} gauge\n"
    for metric in metrics:
        pairs = ",".join(f'{label}="{_quoted(value)}"' for label, value in sorted(metric.labels.items()))
        yield f"{name}{'{' + pairs + '}' if pairs else ''} {_value(metric.value)}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', '\\"')


def _value(value: float) -> str:
    value = float(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


def check_metrics(metrics: list[Metric], *, taken: set[tuple[str, tuple[tuple[str, str], ...]]]) -> None:
    """A name that Prometheus refuses, or one sample twice, would cost the reader the whole file. Raises ValueError."""
    for metric in metrics:
        if not _METRIC_NAME.match(metric.name) or metric.name.startswith("run_"):
            raise ValueError(f"{metric.name!r} can't be the name of a metric")
        for label in metric.labels:
            if not _LABEL_NAME.match(label) or label.startswith("__"):
                raise ValueError(f"{label!r} can't be the name of a label of {metric.name}")
        sample = (metric.name, tuple(sorted(metric.labels.items())))
        if sample in taken:
            raise ValueError(f"the metric {metric.name} is there twice with the labels {metric.labels}")
        taken.add(sample)
