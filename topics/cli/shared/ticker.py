"""A line on the terminal that says how far something is, while it takes long. Where stderr is no terminal: nothing."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import Any

from topics.cli.shared.terminal import plain

_EVERY_S = 0.1


class Ticker:
    def __init__(self) -> None:
        self._started_s = self._shown_s = time.monotonic()
        self._stack = ExitStack()
        self._display: Any = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started_s

    def close(self) -> None:
        self._stack.close()

    def show(self, what: str, records: int) -> None:
        """So many records so far. Cheap enough to be called for each batch."""
        now_s = time.monotonic()
        if now_s - self._shown_s < _EVERY_S or not sys.stderr.isatty():
            return
        self._shown_s = now_s
        if self._display is None:
            from rich.console import Console
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._display = Progress(*columns, console=Console(stderr=True), transient=True)
            self._stack.enter_context(self._display)
            self._display.add_task("")
        text = f"{plain(what, err=True)}  {records:,} records  {records / self.seconds:,.0f}/s"
        self._display.update(self._display.task_ids[0], description=text)
