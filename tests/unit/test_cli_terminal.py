"""A terminal shows what others wrote and never obeys it; a pipe gets it as it is."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import click
import msgspec
import pytest
from folderplay import write_manifest
from model import Record, Shard
from msgspec import Raw

from topics.cli.client.export import export
from topics.cli.client.queue import JobPrinter, QueueLine, _print_lines
from topics.cli.client.tail import JsonPrinter, LinePrinter
from topics.cli.datadir.segment import segment
from topics.cli.datadir.snapshot import snapshot
from topics.cli.datadir.topic import topic
from topics.cli.datadir.verify import _print as print_verdict
from topics.cli.datadir.wal import wal
from topics.cli.server import ps
from topics.cli.shared import place, reach, tables, terminal
from topics.client import Record as Received
from topics.client import Records
from topics.datadir.fsck.verify import Trouble, Verdict
from topics.errors import TopicsError

# Clears the screen, in the form that JSON may hold unescaped; writes from right to left; rings; a line of its own.
EVIL = "a\x9b2J\u202eb\x07\x1b]0;title\x07\nfake"
OBEYED = "\x9b\u202e\x07\x1b"
DATA = '{"x":"\x9b2J\u202e"}'


class Stream(io.TextIOWrapper):
    def __init__(self, *, tty: bool) -> None:
        self.bytes = io.BytesIO()
        super().__init__(self.bytes, encoding="utf-8", write_through=True)
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty

    @property
    def text(self) -> str:
        self.flush()
        return self.bytes.getvalue().decode()


Streams = Callable[[bool], Stream]


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Both stdout and stderr from now on: a terminal, or a pipe."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "200")

    def start(tty: bool) -> Stream:
        stream = Stream(tty=tty)
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    return start


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records that want to be obeyed, in a segment and in the log."""
    folder = tmp_path_factory.mktemp("data")
    shard = Shard(folder, segment_max_events=2)
    write_manifest(folder)
    records = [Record(DATA.encode(), EVIL, EVIL, b'{"k":"\xc2\x9b"}')] * 2
    shard.append("t", records)
    shard.flush("t")
    shard.checkpoint()
    shard.append("t", records, key="\x9b")
    shard.stop()
    return folder


def run(command: click.Command, *args: object) -> None:
    code: object = None
    try:
        command.main([str(arg) for arg in args], standalone_mode=False)
    except SystemExit as exc:
        code = exc.code
    assert not code


def lines_of(text: str) -> list[str]:
    """Without what an export says on stderr."""
    return [line for line in text.split("\n") if line.startswith("{")]


VERBS: dict[str, tuple[click.Command, list[str]]] = {
    "wal": (wal, ["dump", "--records"]),
    "wal json": (wal, ["dump", "--records", "--json"]),
    "segment": (segment, ["dump", "--records"]),
    "segment json": (segment, ["dump", "--records", "--json"]),
    "export": (export, ["t"]),
}


@pytest.mark.parametrize("verb", VERBS)
def test_records_of_a_folder(output: Streams, data: Path, verb: str) -> None:
    command, args = VERBS[verb]
    piped = output(False)
    run(command, *args, "--data-dir", data)
    assert DATA in piped.text, "a pipe gets data as it was sent"
    stream = output(True)
    run(command, *args, "--data-dir", data)
    assert not set(stream.text) & set(OBEYED)
    assert "\\u009b2J\\u202e" in stream.text
    if verb.endswith("json") or verb == "export":
        on_screen, sent = ([json.loads(line) | {"id": 0} for line in lines_of(each.text)] for each in (stream, piped))
        assert on_screen == sent, "an escape says the same"
    else:
        assert "\nfake" not in stream.text


def test_a_pipe_gets_the_bytes_of_an_export(output: Streams, data: Path, tmp_path: Path) -> None:
    run(export, "t", "--data-dir", data, "--out", tmp_path / "out")
    piped = output(False)
    run(export, "t", "--data-dir", data)
    written, piped_bytes = (
        [line for line in whole.splitlines() if b'"data"' in line]
        for whole in ((tmp_path / "out").read_bytes(), piped.bytes.getvalue())
    )
    assert written == piped_bytes


def test_failures_and_notices(output: Streams) -> None:
    for tty, expected in ((False, EVIL), (True, terminal.harmless(EVIL))):
        stream = output(tty)
        with pytest.raises(SystemExit), place.failures_told():
            raise TopicsError(EVIL)
        reach.notice(EVIL)
        place.WrongSettings(EVIL).show()
        lines = stream.text.removesuffix("\n").split("\ntopics: ")
        plain = click.unstyle(expected)  # click does that to what is no terminal
        assert lines == [f"topics: {plain}", plain, plain]


def test_json_of_any_verb(output: Streams) -> None:
    stream = output(True)
    place.print_json({"name": EVIL, "data": Raw(DATA.encode())})
    assert not set(stream.text) & set(OBEYED)
    assert json.loads(stream.text) == {"name": EVIL, "data": json.loads(DATA)}


def test_tables(output: Streams) -> None:
    from rich.text import Text

    stream = output(True)
    columns = [tables.Column("a"), tables.Column("b")]
    tables.show(columns, [[EVIL, Text(EVIL, "red")]], heading=EVIL)
    assert not set(stream.text) & set(OBEYED)
    assert stream.text.count("\\u009b2J\\u202eb") == 3


def test_processes_queues_and_snapshots(output: Streams, tmp_path: Path) -> None:
    stream = output(True)
    ps._print(ps.Listing(address=EVIL, data_dir="[red]x", version="1", processes=[]))
    _print_lines(
        [QueueLine(queue=EVIL, ready=0, in_flight=0, dead_lettered=0, count=0, dead_letter=f"[b]{EVIL}", lease_ms=1)]
    )
    view = tmp_path / "s"
    view.mkdir()
    note = {"name": EVIL, "created_ms": 1, "data_dir": "", "topics": 0, "records": 0}
    (view / "snapshot.json").write_text(json.dumps(note | {"linked_files": 0, "copied_bytes": 0}))
    run(snapshot, "ls", "--dir", tmp_path)
    assert not set(stream.text) & set(OBEYED)
    assert stream.text.count("\\u009b2J") == 4
    assert "[red]x" in stream.text
    assert "[b]a" in stream.text


def test_topics_of_a_folder(output: Streams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Shard(tmp_path)
    write_manifest(tmp_path)
    shard.append(EVIL, [Record(b"1")])  # no server takes such a name, but a folder may have been made elsewhere
    shard.stop()
    for args in (["ls"], ["ls", "--json"], ["show", EVIL], ["show", EVIL, "--json"]):
        stream = output(True)
        run(topic, *args, "--data-dir", tmp_path)
        assert not set(stream.text) & set(OBEYED), args
        assert "\\u009b2J" in stream.text, args


def test_a_verdict(output: Streams) -> None:
    stream = output(True)
    verdict = Verdict(deep=False)
    verdict.problems.append(Trouble(file=EVIL, offset=1, text=EVIL))
    print_verdict(verdict, EVIL, running=False)
    assert not set(stream.text) & set(OBEYED)
    assert len(stream.text.splitlines()) == 2


def test_what_is_tailed_and_peeked_at(output: Streams) -> None:
    raw = Raw(b'{"$seq":7,"$ts":1,"data":%b}' % DATA.encode())
    event = Records(topic="\x9b", raw=[raw], from_seq=6, to_seq=7, head_seq=7)
    for printer in (LinePrinter, JsonPrinter):
        for tty in (True, False):
            stream = output(tty)
            (printer(several=True) if printer is LinePrinter else printer()).show(event)  # type: ignore[call-arg]
            assert bool(set(stream.text) & set(OBEYED)) is (printer is JsonPrinter and not tty)
    record = msgspec.json.decode(raw, type=Received)
    for tty in (True, False):
        stream = output(tty)
        JobPrinter(as_json=True).show("q", raw, record)
        assert bool(set(stream.text) & set(OBEYED)) is not tty


def test_bytes_that_are_no_text() -> None:
    """A file's name may hold any: Python shows them as halves of a pair, which no terminal gets."""
    assert terminal.harmless(b"a\x9bb".decode(errors="surrogateescape")) == "a\\udc9bb"
