"""One-line logs on stderr: time, level, process, event, then key=value.

Rules: one write per line, so that lines of several processes don't mix; a value with spaces or quotes is
a JSON string; a reader that went away (a closed terminal, a full pipe behind a dead pager) never stops
the process.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime

import msgspec

LEVELS = {"debug": 0, "info": 1, "warning": 2, "error": 3}


class Log:
    def __init__(self, name: str, level: str) -> None:
        self.name = name
        self._threshold = LEVELS[level]

    def debug(self, event: str, **fields: object) -> None:
        self._write("debug", event, fields)

    def info(self, event: str, **fields: object) -> None:
        self._write("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._write("warning", event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._write("error", event, fields)

    def _write(self, level: str, event: str, fields: dict[str, object]) -> None:
        if LEVELS[level] < self._threshold:
            return
        try:
            sys.stderr.write(render(datetime.now(UTC), level, self.name, event, fields))
            sys.stderr.flush()
        except (OSError, ValueError):
            pass


def render(at: datetime, level: str, name: str, event: str, fields: dict[str, object]) -> str:
    stamp = at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z"
    pairs = "".join(f" {key}={_value(value)}" for key, value in fields.items())
    return f"{stamp} {level:<7} {name} {event}{pairs}\n"


def _value(value: object) -> str:
    text = str(value)
    if text and text.isprintable() and not any(char in ' "=' for char in text):
        return text
    return msgspec.json.encode(text).decode()
