"""The reports there are, in the order of the page. Their modules are imported when they are used."""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import re
from collections.abc import Iterable
from functools import cache
from types import ModuleType
from typing import Protocol, cast

from topics.errors import TopicsError

from .report import Job, Result

NAMES = ("traffic", "storage", "queues", "letters", "loss", "integrity", "skew", "producers", "routers")


class ReportModule(Protocol):
    NAME: str
    TITLE: str
    QUESTION: str

    @staticmethod
    def compute(job: Job) -> Result: ...


class UnknownReport(TopicsError):
    """A name that stands for no report."""


def load(name: str) -> ReportModule:
    return cast(ReportModule, _module(name))


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.subjects.{name}")


def chosen(names: Iterable[str]) -> tuple[str, ...]:
    """The reports of `--only`, each once and in the order of the page; all where none is named."""
    wanted = list(names)
    for name in wanted:
        if name not in NAMES:
            raise UnknownReport(f"--only {name}: there is no such report{similar(name, NAMES)}")
    return tuple(name for name in NAMES if name in wanted) if wanted else NAMES


def similar(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about a wrong name: what may have been meant, else everything there is."""
    among = sorted(known)
    close = difflib.get_close_matches(name, among, n=3, cutoff=0.6) or [one for one in among if name in one][:3]
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; there are {', '.join(among)}" if among else ""


# --- metrics -----------------------------------------------------------------------------------------


def report_of(metric: str) -> str | None:
    """Which report has a metric of this name."""
    for name in NAMES:
        if any(pattern.fullmatch(metric) for pattern in _metrics(name)):
            return name
    return None


def suggest_metric(metric: str) -> str | None:
    """None if a report knows the metric, else the end of a sentence about a wrong name."""
    if report_of(metric) is not None:
        return None
    plain = [pattern.pattern for name in NAMES for pattern in _metrics(name) if "[" not in pattern.pattern]
    return similar(metric, plain)


@cache
def _metrics(name: str) -> tuple[re.Pattern[str], ...]:
    """The names in a report's `Metric(...)` calls. They are read from its source: a run has only those metrics of which
    there is something to say, and a threshold for a queue is not wrong because there is no queue yet."""
    tree = ast.parse(inspect.getsource(_module(name)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Metric"]
    return tuple(re.compile(pattern) for call in calls if (pattern := _pattern(call.args[0] if call.args else None)))


def _pattern(name: ast.expr | None) -> str | None:
    if isinstance(name, ast.Constant) and isinstance(name.value, str):
        return re.escape(name.value)
    if isinstance(name, ast.JoinedStr):
        return "".join(
            re.escape(str(part.value)) if isinstance(part, ast.Constant) else r"[a-z0-9_]+" for part in name.values
        )
    return None
