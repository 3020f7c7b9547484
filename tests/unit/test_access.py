"""The access log: what a line says, and that lines wait for the end of the round."""

from __future__ import annotations

import select
from typing import Any

import pytest
from e2e.logged import parse, parse_logfmt

from topics.actors.log import Log
from topics.gateway.access_log import AccessLog

REQUEST: dict[str, Any] = {
    "id": 47,
    "request_id": None,
    "method": "POST",
    "path": "/v0/topics/a",
    "status": 201,
    "size": 120,
    "took_us": 1_234,
    "peer": "127.0.0.1:4711",
    "key": 0,
}


class Kept(Log):
    """Keeps what it is asked to put, one entry for each time."""

    def __init__(self, level: str = "info", form: str = "logfmt") -> None:
        super().__init__("gateway-0", level, form)
        self.puts: list[str] = []

    def put(self, *lines: str) -> None:  # type: ignore[override]
        self.puts.append("".join(lines))


def noted(form: str = "logfmt", **changed: Any) -> str:
    log = Kept(form=form)
    access = AccessLog(log, prefix="0.1.")
    access.note(**{**REQUEST, **changed})
    access.flush()
    (line,) = log.puts
    assert line.endswith("\n")
    assert line.count("\n") == 1
    return line[:-1]


def test_a_line_says_what_was_asked_and_answered() -> None:
    fields = parse(noted())
    assert fields.pop("time")
    assert list(fields.items()) == [
        ("level", "info"),
        ("process", "gateway-0"),
        ("event", "request"),
        ("id", "0.1.2f"),
        ("method", "POST"),
        ("path", "/v0/topics/a"),
        ("status", "201"),
        ("bytes", "120"),
        ("ms", "1.234"),
        ("peer", "127.0.0.1:4711"),
    ]


def test_numbers_are_numbers_in_json() -> None:
    fields = parse(noted("json", key=3), "json")
    assert (fields["status"], fields["bytes"], fields["ms"], fields["key"]) == (201, 120, 1.234, 3)
    assert (fields["id"], fields["path"], fields["peer"]) == ("0.1.2f", "/v0/topics/a", "127.0.0.1:4711")


def test_the_clients_own_name_stands_beside_ours() -> None:
    fields = parse(noted(request_id=b"job-7/a=1"))
    assert (fields["id"], fields["request_id"]) == ("0.1.2f", "job-7/a=1")
    assert "request_id" not in parse(noted())


def test_a_key_is_a_number_and_who_has_none_is_not_shown() -> None:
    assert parse(noted(key=12))["key"] == "12"
    assert "key" not in parse(noted(key=0))


def test_a_key_with_a_name_is_its_name() -> None:
    log = Kept()
    access = AccessLog(log, prefix="0.1.", names={12: "ci"})
    for key in (12, 3):
        access.note(**{**REQUEST, "key": key})
    access.flush()
    assert [parse(line)["key"] for line in "".join(log.puts).splitlines()] == ["ci", "3"]


@pytest.mark.parametrize(
    "path",
    [
        "/v0/a b",
        '/v0/"x"',
        "/v0/a=b",
        "/v0/\x00\x1b[31m",
        "/v0/\xff\xfe",
        "/v0/\u2028",
        "/v0/a\r\nlevel=error",
        "-",
        "",
    ],
)
def test_whatever_a_path_holds_it_stays_one_field_of_one_line(path: str) -> None:
    """Nobody writes a line of somebody else's."""
    assert parse(noted(path=path))["path"] == path
    assert parse(noted("json", path=path), "json")["path"] == path


def test_lines_wait_for_the_end_of_the_round() -> None:
    log = Kept()
    access = AccessLog(log, prefix="1.2.")
    for id in (10, 11, 12):
        access.note(**{**REQUEST, "id": id})
    assert log.puts == []
    access.flush()
    assert [parse_logfmt(line)["id"] for line in "".join(log.puts).splitlines()] == ["1.2.a", "1.2.b", "1.2.c"]
    written = len(log.puts)
    access.flush()
    assert len(log.puts) == written  # nothing twice, and nothing of nothing


def test_asked_for_it_is_written_whatever_the_level() -> None:
    log = Kept(level="error")
    access = AccessLog(log, prefix="0.1.")
    access.note(**REQUEST)
    access.flush()
    assert len(log.puts) == 1


@pytest.mark.parametrize("path", ["/v0/topics/a", "/v0/\xff\xfe" * 100, "/v0/" + "\u2028" * 8_000])
def test_a_pipe_takes_each_write_in_one_piece(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Otherwise lines of other processes would come between: what is longer than PIPE_BUF may be torn."""
    writes: list[str] = []
    monkeypatch.setattr("sys.stderr.write", writes.append)
    access = AccessLog(Log("gateway-0", "info"), prefix="0.1.")
    for id in range(200):
        access.note(**{**REQUEST, "id": id, "path": path})
    access.flush()
    assert all(len(text.encode()) <= select.PIPE_BUF and text.endswith("\n") for text in writes)
    lines = [parse(line) for text in writes for line in text.removesuffix("\n").split("\n")]
    assert [int(line["id"].removeprefix("0.1."), 16) for line in lines] == list(range(200))
    assert all(path.startswith(line["path"]) for line in lines)
    assert len(writes) < 200 or len(path) > 100  # several at a time, where they fit
