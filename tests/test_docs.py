"""The documents say what is so: links lead somewhere, tables match the code, commands print what is shown.

A ```sh block is run; the ```json or ```text block behind it is what it must print. Numbers that differ from run to run
(times, durations, pids) are not compared; `…` in an object stands for fields left out.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import livefiles
import msgspec
import pytest
from e2e.server import TOPICS, Server, clean_environment, eventually

from topics import settings as settings_module
from topics.errors import STATUS, SettingsError
from topics.settings import Settings, from_environment
from topics.storage import control, segment, snapshot
from topics.storage.columns import Columns
from topics.storage.format import FrameType
from topics.storage.frames import decode_wal_header, find_frame_after, scan

ROOT = Path(__file__).parent.parent
DOCS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "deploy/README.md",
    ROOT / "spark_pipeline/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


def read(name: str) -> str:
    return (ROOT / name).read_text()


# --- links ---------------------------------------------------------------------------------------------


def _prose(text: str) -> str:
    """Without code, where brackets and number signs mean something else."""
    return re.sub(r"`[^`\n]*`", "`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))


def _anchors(path: Path) -> set[str]:
    """Of every heading, as the usual Markdown viewers make them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M)
    headings = re.findall(r"^#+ +(.+?) *$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_internal_links_resolve(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(path.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), f"{path.name} links to {target}, which does not exist"
        assert linked.is_relative_to(ROOT)
        if anchor:
            assert anchor in _anchors(linked), f"{path.name} links to {target}; there is no such heading"


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_named_in_the_text_exist(path: Path) -> None:
    for name in re.findall(r"`((?:topics|tests|docs|deploy|spark_pipeline|benchmarks)/[\w/.-]+)`", path.read_text()):
        assert (ROOT / name).exists(), f"{path.name} names {name}, which does not exist"


# --- tables --------------------------------------------------------------------------------------------


def rows(text: str, *, start: str) -> Iterator[list[str]]:
    """The cells of table rows whose first cell begins with `start`."""
    for line in text.splitlines():
        if line.startswith(f"| {start}"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def _variables() -> set[str]:
    """Every variable that settings.py reads."""
    source = Path(settings_module.__file__).read_text()
    literal = set(re.findall(r'environ\.get\("(TOPICS_[A-Z_]+)"\)', source))
    return literal | {f"TOPICS_{field.upper()}" for field in settings_module._READERS}


class Variable(NamedTuple):
    default: str
    accepts: str


def _documented() -> dict[str, Variable]:
    found: dict[str, Variable] = {}
    for cells in rows(read("docs/CONFIGURATION.md"), start="`TOPICS_"):
        name = cells[0].strip("`")
        assert name not in found, f"{name} is listed twice"
        found[name] = Variable(cells[1].strip("`"), cells[2])
    return found


def test_every_variable_is_documented_and_no_other() -> None:
    assert set(_documented()) == _variables()


def test_the_documented_defaults_are_the_real_ones() -> None:
    real = Settings()
    words: dict[object, str] = {None: "none", False: "0", True: "1", (): "none"}
    for name, variable in _documented().items():
        field = name.removeprefix("TOPICS_").lower()
        if name in ("TOPICS_API_KEYS", "TOPICS_API_KEYS_FILE", "TOPICS_WAL_SHARDS", "TOPICS_CONFIG"):
            continue  # kept as digests only; one per core; where settings come from is none
        value = getattr(real, field)
        shown = words[value] if isinstance(value, bool | tuple | None) else str(value)
        expected = "auto" if field == "spin_us" else shown
        assert variable.default == expected, name


def _bounds(accepts: str) -> tuple[float, float] | None:
    number = r"(\d+(?:\.\d+)?(?:\^\d+)?)"
    match = re.search(f"{number} to {number}", accepts)
    if match is None:
        return None
    low, high = (
        _number(base) ** int(power or 1) for base, _, power in (text.partition("^") for text in match.groups())
    )
    return low, high


def _number(text: str) -> float:
    return float(text) if "." in text else int(text)


@pytest.mark.parametrize("name", sorted(name for name, given in _documented().items() if _bounds(given.accepts)))
def test_the_documented_ranges_are_the_real_ones(name: str) -> None:
    bounds = _bounds(_documented()[name].accepts)
    assert bounds is not None
    for value in bounds:
        from_environment({name: str(value)})
    for value in (bounds[0] - 1, bounds[1] + 1):
        with pytest.raises(SettingsError):
            from_environment({name: str(value)})


def test_error_codes_are_those_of_the_program() -> None:
    section = read("docs/API.md").partition("\n## Errors\n")[2].partition("\n## ")[0]
    documented = {cells[0].strip("`"): int(cells[1]) for cells in rows(section, start="`")}
    assert documented == STATUS


def test_kill_points_are_those_of_the_program() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "topics").rglob("*.py"))
    section = read("docs/DEVELOPMENT.md").partition("\n### Kill points\n")[2].partition("\n#")[0]
    assert {cells[0].strip("`") for cells in rows(section, start="`")} == set(
        re.findall(r'kill_point\("(\w+)"\)', sources)
    )


def test_every_module_has_its_place_in_the_house() -> None:
    house = read("docs/ARCHITECTURE.md").partition("\n## The rooms of the house\n")[2]
    rooms = ("storage", "datadir", "shm", "actors", "walshard", "gateway", "queue", "router", "backup", "tools")
    for room in rooms:
        section = re.split(r"\n  \w+/ ", house.partition(f"\n  {room}/ ")[2])[0]
        own, *packages = re.split(r"\n    (\w+)/ ", section)
        texts = {"": own, **dict(zip(packages[::2], packages[1::2], strict=True))}
        folder = ROOT / "topics" / room
        found = {path.parent.name for path in folder.glob("*/__init__.py")} - {"messages"}
        assert {name for name in texts if name} == found, room
        for package, text in texts.items():
            modules = {path.name for path in (folder / package).glob("*.py")} - {"__init__.py"}
            assert sorted(re.findall(r"\w+\.py", text)) == sorted(modules), f"{room}/{package}"


def test_make_targets_are_those_of_the_makefile() -> None:
    declared = re.search(r"^\.PHONY: (.+)$", read("Makefile").replace("\\\n", " "), flags=re.M)
    assert declared is not None
    section = read("docs/DEVELOPMENT.md").partition("\n## Make targets\n")[2].partition("\n#")[0]
    named = {cells[0].strip("`").split()[1] for cells in rows(section, start="`make ")}
    assert named == set(declared[1].split())


# --- the format ----------------------------------------------------------------------------------------

STRUCTS = {
    "TopicFrame": control.TopicFrame,
    "HeadFrame": control.HeadFrame,
    "DeleteFrame": control.DeleteFrame,
    "BlockEntry": segment.BlockEntry,
    "ShardState": snapshot.ShardState,
    "TopicState": snapshot.TopicState,
    "SegmentState": snapshot.SegmentState,
    "KeyState": snapshot.KeyState,
}


@pytest.mark.parametrize("name", STRUCTS)
def test_arrays_on_disk_are_documented_in_order(name: str) -> None:
    text = read("docs/FORMAT.md").partition(f"`{name}`, an array of")[2]
    assert text, f"FORMAT.md does not describe {name}"
    table = text[text.index("\n| ") :].partition("\n\n")[0]
    documented = [cells[1].strip("`") for cells in rows(table, start="") if cells[0].isdigit()]
    assert documented == list(STRUCTS[name].__struct_fields__)


def test_frame_types_are_documented() -> None:
    section = read("docs/FORMAT.md").partition("\n### Frame types\n")[2].partition("\n#")[0]
    table = section.partition("\n\n`")[0]
    documented = {cells[1].strip("`"): int(cells[0]) for cells in rows(table, start="") if cells[0].isdigit()}
    assert documented == {kind.name: kind.value for kind in FrameType}


def _dump() -> bytes:
    """The bytes of the dump in FORMAT.md, annotated lines and all."""
    section = read("docs/FORMAT.md").partition("\n## A WAL file, byte by byte\n")[2].partition("\n## ")[0]
    found = bytearray()
    for at, text in re.findall(r"^([0-9a-f]{8}): ((?:[0-9a-f]{2} ){16})", section, flags=re.M):
        assert int(at, 16) == len(found)
        found += bytes.fromhex(text)
    return bytes(found)


def test_the_dump_is_a_wal_file() -> None:
    data = _dump()
    header = decode_wal_header(data, path="FORMAT.md")
    assert (header.shard, header.layout, header.file_no) == (0, 1, 1)
    frames = list(scan(data, salt=header.salt))
    assert [frame.type for frame in frames] == [
        FrameType.TOPIC,
        FrameType.APPEND,
        FrameType.APPEND,
        FrameType.DELETE,
    ]
    assert [frame.lsn for frame in frames] == [1, 2, 3, 4]
    assert [frame.synced for frame in frames] == [0, 0, 2, 2]
    assert all(later.offset == frame.offset + frame.length for frame, later in pairwise(frames))
    topic = msgspec.msgpack.decode(frames[0].body, type=control.TopicFrame)
    assert (topic.name, topic.ceiling) == ("demo", 100)
    first = Columns(frames[1].body, count=2, ts=frames[1].ts)
    assert (first.data(), first.tags(), first.nodes()) == ([b'{"n":1}', b'{"n":2}'], ["a", "b"], ["w1", "w1"])
    assert frames[1].key == b"k1"
    assert msgspec.msgpack.decode(frames[3].body, type=control.DeleteFrame).seqs == [1]
    assert find_frame_after(data, salt=header.salt, start=frames[3].offset + frames[3].length) is None


@pytest.mark.e2e
def test_the_reader_of_the_format_document(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """What it prints from a stopped server's folder is what the server showed: from segments and from the log."""
    program = tmp_path / "read_topic.py"
    program.write_text(block_after(read("docs/FORMAT.md"), "## Reading a topic", "python"))
    server = start_server(TOPICS_SEGMENT_MAX_EVENTS=20)
    with server.client() as client:
        for first in range(0, 50, 5):
            records = [{"data": {"n": n}, "tag": f"mod:{n % 3}"} for n in range(first, first + 5)]
            client.append_records("numbers", records)
        segments = server.data_dir / "topics"
        eventually(lambda: livefiles.find(segments, "*/*.idx"), what="a sealed segment")
        client.delete("numbers", match="mod:0")
        client.delete("numbers", before_seq=9)
        client.append("numbers", "the last", "the very last")
        shown = client.diff("numbers", limit=1000)["records"]
    server.stop()
    command: list[str | Path] = [sys.executable, program, server.data_dir, "numbers"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.splitlines()
    printed = [line.split(" ", 2) for line in lines]
    assert [(int(seq), int(ts), json.loads(data)) for seq, ts, data in printed] == [
        (record["$seq"], record["$ts"], record["data"]) for record in shown
    ]
    assert len(printed) > 20


# --- commands ------------------------------------------------------------------------------------------


class Step(NamedTuple):
    command: str
    kind: str  # of the block behind it: json, text, or nothing
    expected: str


_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)


def steps(text: str) -> list[Step]:
    blocks = [match.groups() for match in _BLOCK.finditer(text)]
    found = []
    for (kind, command), (next_kind, output) in pairwise([*blocks, ("", "")]):
        if kind == "sh":
            found.append(Step(command, *((next_kind, output) if next_kind in ("json", "text") else ("", ""))))
    return found


def block_after(text: str, heading: str, kind: str) -> str:
    """The first block of a kind behind a heading."""
    for found, content in _BLOCK.findall(text.partition(heading)[2]):
        if found == kind:
            return str(content)
    raise AssertionError(f"no {kind} block behind {heading!r}")


def parse_json(text: str) -> list[Any]:
    """Values one after the other, as several commands print them."""
    text = re.sub(r",\s*…", ',"…":null', text)
    decoder = json.JSONDecoder()
    values = []
    at = 0
    while (at := at + len(text[at:]) - len(text[at:].lstrip())) < len(text):
        value, at = decoder.raw_decode(text, at)
        values.append(value)
    return values


# Different each time, but always there and always numbers.
_VARIABLE = re.compile(r"\$ts|\w+_ms|last_(read|write)_ts|effective_priority")


def comparable(value: Any, like: Any) -> Any:
    """`value` in the form in which it is compared with `like`, which is what the document shows."""
    if isinstance(value, dict) and isinstance(like, dict):
        if "…" in like:
            value = {key: value[key] for key in value if key in like} | {"…": None}
        return {key: _steady(key, item, like.get(key)) for key, item in value.items()}
    if isinstance(value, list) and isinstance(like, list) and len(value) == len(like):
        return [comparable(item, shown) for item, shown in zip(value, like, strict=True)]
    return value


def _steady(key: str, item: Any, like: Any) -> Any:
    numbers = isinstance(item, int | float) and isinstance(like, int | float)
    if numbers and _VARIABLE.fullmatch(key) and not _is_config(key):
        return like
    return comparable(item, like)


def _is_config(key: str) -> bool:
    return key in ("ttl_ms", "lease_ms", "claim_jitter_ms", "idempotency_window_ms")


def without_numbers(text: str) -> str:
    """For tables meant for people: the words in order, whatever the widths, and however long it took."""
    words = " ".join(re.sub(r"[\d.]+", "N", re.sub(r"[━─┏┓┡┩└┘┳┴╇╈┃│]", " ", text)).split())
    return re.sub(r"\bN[hm] (?=N[ms]\b)", "", words).replace("Nm ", "Ns ")


def check(step: Step, printed: str) -> None:
    if step.kind == "text":
        assert without_numbers(printed) == without_numbers(step.expected), step.command
    elif step.kind == "json":
        expected, values = parse_json(step.expected), parse_json(printed)
        assert len(values) == len(expected), printed
        if "&\n" in step.command:  # two at once finish in any order
            expected.sort(key=lambda value: sorted(value))
            values.sort(key=lambda value: sorted(value))
        for value, shown in zip(values, expected, strict=True):
            assert comparable(value, shown) == shown, step.command


class Shell:
    """Runs the commands of a document as its reader would, against a server of the test's own."""

    def __init__(self, folder: Path, start_server: Callable[..., Server]) -> None:
        self._folder = folder
        self._start_server = start_server
        self._port = 0

    def serve(self) -> str:
        """What `make run` does once everything is installed; returns the line that says so."""
        server = self._start_server(data_dir=self._folder / "topics-data", TOPICS_PORT=self._port)
        self._port = server.port
        line = eventually(lambda: re.search(r"^topics .* ready on .*$", server.output(), re.M), what="the ready line")
        return line[0].replace(str(server.data_dir), "./topics-data")

    def run(self, command: str) -> str:
        if command == "make run\n":
            return self.serve()
        command = command.replace("localhost:4000", f"127.0.0.1:{self._port}").replace(".venv/bin/topics", str(TOPICS))
        done = subprocess.run(
            ["bash", "-c", command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self._folder,
            env=clean_environment(COLUMNS="120"),
            timeout=60,
        )
        return done.stdout


@needs_curl
@pytest.mark.e2e
def test_the_tour_of_the_readme(start_server: Callable[..., Server], tmp_path: Path) -> None:
    shell = Shell(tmp_path, start_server)
    tour = steps(read("README.md"))
    assert [step.command for step in tour].count("make run\n") == 2
    assert len(tour) > 10
    for step in tour:
        check(step, shell.run(step.command))


@needs_curl
@pytest.mark.e2e
def test_the_examples_of_the_api(start_server: Callable[..., Server], tmp_path: Path) -> None:
    shell = Shell(tmp_path, start_server)
    shell.serve()
    examples = steps(read("docs/API.md"))
    assert len(examples) > 10
    for step in examples:
        check(step, shell.run(step.command))
