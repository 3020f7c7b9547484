"""A server's log, read as a machine would: every line of either form into its fields, and nothing is skipped.

The parsers are written from what the documents say and know nothing of the server's code: a line that is anything but
fields, one field twice, a value that is quoted without need or not quoted in need are failures.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from .server import Server

Fields = dict[str, Any]
LEVELS = ("debug", "info", "warning", "error")
PROCESS = re.compile(r"supervisor|router|queue|(gateway|shard)-\d+")
OURS = re.compile(r"\d+\.[1-9]\d*\.[0-9a-f]+")  # an id that a gateway gave: which one, which life, which request
READY = re.compile(r"topics \S+ ready on http://\S+ \(.*\)")  # what stdout gets
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
_PAIR = re.compile(r'([a-z_]+)=("(?:[^"\\]|\\.)*"|[^ "=]+)(?: |$)')
_BARE = re.compile(r'[^ "=]+')


def parse_logfmt(line: str) -> Fields:
    """All values are text."""
    fields: Fields = {}
    at = 0
    while at < len(line):
        pair = _PAIR.match(line, at)
        assert pair is not None, f"not a field at {at}: {line!r}"
        name, text = pair.groups()
        assert name not in fields, f"{name} twice: {line!r}"
        if text.startswith('"'):
            fields[name] = json.loads(text)
            needs = not _BARE.fullmatch(fields[name]) or not fields[name].isprintable()
            assert needs, f"{name} is quoted without need: {line!r}"
        else:
            assert text.isprintable(), line
            fields[name] = text
        at = pair.end()
    return fields


def _once(pairs: list[tuple[str, Any]]) -> Fields:
    names = [name for name, _ in pairs]
    assert len(set(names)) == len(names), f"a field twice: {names}"
    return dict(pairs)


def parse_json(line: str) -> Fields:
    fields = json.loads(line, object_pairs_hook=_once)
    assert isinstance(fields, dict), line
    assert all(isinstance(value, str | int | float) for value in fields.values()), line
    return fields


def parse(line: str, form: str = "logfmt") -> Fields:
    """What all lines have in common is checked on each."""
    fields = parse_json(line) if form == "json" else parse_logfmt(line)
    assert list(fields)[:4] == ["time", "level", "process", "event"], line
    assert _TIME.fullmatch(fields["time"]), line
    assert abs((datetime.now(UTC) - datetime.fromisoformat(fields["time"])).total_seconds()) < 3_600, line
    assert fields["level"] in LEVELS, line
    assert PROCESS.fullmatch(fields["process"]), line
    assert fields["event"], line
    return fields


def parse_all(text: str, form: str = "logfmt") -> list[Fields]:
    """Every line of an output but the one that says that the server is ready."""
    assert text.endswith("\n"), text[-200:]
    lines = [line for line in text.split("\n")[:-1] if not READY.fullmatch(line)]
    return [parse(line, form) for line in lines]


def lines_of(server: Server, form: str = "logfmt", **wanted: object) -> list[Fields]:
    """What is in the log so far, whole lines alone: those whose fields are as `wanted`."""
    text = server.output()
    found = parse_all(text[: text.rfind("\n") + 1], form) if "\n" in text else []
    return having(found, **wanted)


def having(lines: Iterable[Fields], **wanted: object) -> list[Fields]:
    return [line for line in lines if all(line.get(name) == value for name, value in wanted.items())]
