"""One-line logs on stderr, as logfmt or JSON: time, level, process, event, then what belongs to it.

    time=2026-11-16T18:00:00.123Z level=info process=shard-0 event=recovered topics=3
    {"time":"2026-11-16T18:00:00.123Z","level":"info","process":"shard-0","event":"recovered","topics":3}

Rules: no write cuts a line or is longer than what a pipe takes whole, so that lines of several processes don't mix; in
logfmt a value with blanks or quotes is a JSON string; a reader that went away (a closed terminal, a full pipe behind a
dead pager) never stops the process.
"""

from __future__ import annotations

import select
import sys
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

_ATOMIC = select.PIPE_BUF // 4  # characters: each may be four bytes
LEVELS = {"debug": 0, "info": 1, "warning": 2, "error": 3}


class Log:
    def __init__(self, name: str, level: str, form: str = "logfmt") -> None:
        self.name = name
        self.debugging = level == "debug"  # for who would have to prepare what nobody reads
        self._threshold = LEVELS[level]
        self._render = render_json if form == "json" else render

    def debug(self, event: str, **fields: object) -> None:
        self._write("debug", event, fields)

    def info(self, event: str, **fields: object) -> None:
        self._write("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._write("warning", event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._write("error", event, fields)

    def _write(self, level: str, event: str, fields: Mapping[str, object]) -> None:
        if LEVELS[level] >= self._threshold:
            self.put(self.line(level, event, fields))

    def line(self, level: str, event: str, fields: Mapping[str, object]) -> str:
        return self._render(datetime.now(UTC), level, self.name, event, fields)

    @staticmethod
    def put(*lines: str) -> None:
        """Lines of this log, whatever their level; several in one write, as many as a pipe takes in one piece."""
        try:
            batch = ""
            for line in lines:
                if batch and len(batch) + len(line) > _ATOMIC:
                    sys.stderr.write(batch)
                    sys.stderr.flush()
                    batch = ""
                batch += line
            sys.stderr.write(batch)
            sys.stderr.flush()
        except (OSError, ValueError):
            pass


def announce(line: str) -> None:
    """One line on stdout, in one write: print() makes two where Python does not buffer (PYTHONUNBUFFERED), and a line
    of a log that goes to the same pipe may come between them. Nobody may read it; that is no reason not to serve."""
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except (OSError, ValueError):
        pass


def _stamp(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z"


def render(at: datetime, level: str, name: str, event: str, fields: Mapping[str, object]) -> str:
    pairs = "".join(f" {key}={_value(value)}" for key, value in fields.items())
    return f"time={_stamp(at)} level={level} process={name} event={_value(event)}{pairs}\n"


def render_json(at: datetime, level: str, name: str, event: str, fields: Mapping[str, object]) -> str:
    line: dict[str, object] = {"time": _stamp(at), "level": level, "process": name, "event": event}
    line |= {key: value if isinstance(value, int | float) else str(value) for key, value in fields.items()}
    return msgspec.json.encode(line).decode() + "\n"


def _value(value: object) -> str:
    text = str(value)
    if text and text.isprintable() and not any(char in ' "=' for char in text):
        return text
    return msgspec.json.encode(text).decode()
