"""The reports there are, in the order of the page. Their modules are imported when they are used."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Protocol

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
    module: ReportModule = importlib.import_module(f"{__package__}.{name}")  # type: ignore[assignment]
    return module


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
