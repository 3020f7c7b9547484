"""Every tool that reads a data folder, on one that is not as it should be: a torn tail, a missing segment, a relocation
to a cold tier that was cut off half way, a newer format, a log damaged in the middle. Each goes on or says in one line
what is wrong, with the right exit code, without a stack; and none writes a byte."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from click.testing import CliRunner
from onlooker import contents

from topics.cli.main import main
from topics.datadir.view.folder import Folder
from topics.storage.format import FRAME_HEADER
from topics.storage.frames import decode_wal_header, scan
from topics.storage.manifest import decode_manifest, encode_manifest

from .inspected import copied, golden, topic_in

pytestmark = pytest.mark.e2e


class Answer(NamedTuple):
    code: int
    out: str
    err: str


def topics(folder: Path, *args: str) -> Answer:
    """In this process: there are many, and most of the time would go into starting Python."""
    env = {"TOPICS_DATA_DIR": str(folder), "TOPICS_CONFIG": None, "COLUMNS": "200"}
    done = CliRunner().invoke(main, args, env=env)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Answer(done.exit_code, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden(tmp_path_factory.getbasetemp(), kind="killed")


def segment_of(whole: Path, number: int) -> Path:
    topic = topic_in(Folder(str(whole)), "orders")
    firsts = [segment.first_seq for segment in topic.segments if segment.sealed]
    return Path("topics", f"{topic.id:016x}", f"{firsts[number]:020d}.data")


# --- folders -------------------------------------------------------------------------------------------


def torn_tail(whole: Path, mine: Path) -> None:
    """The last write of each shard was cut short."""
    for folder in sorted((mine / "wal").iterdir()):
        path = sorted(folder.glob("*.wal"))[-1]
        data = path.read_bytes()
        if not any(data[:64]):
            continue
        end = 64
        for frame in scan(data, salt=decode_wal_header(data[:64], path="").salt):
            end = frame.offset + frame.length
        with path.open("r+b") as file:
            file.seek(end + FRAME_HEADER.size)
            file.write(b"half a frame")


def missing_segment(whole: Path, mine: Path) -> None:
    (mine / segment_of(whole, 0)).unlink()


def half_relocated(whole: Path, mine: Path) -> None:
    """One segment is in both tiers, another has moved, a third is half copied."""
    cold = mine.with_name(f"{mine.name}-cold")
    both, moved, half = (segment_of(whole, number) for number in range(3))
    (cold / both).parent.mkdir(parents=True)
    shutil.copy(mine / both, cold / both)
    shutil.move(mine / moved, cold / moved)
    (cold / half).with_suffix(".data.tmp").write_bytes((mine / half).read_bytes()[:1_000])
    path = mine / "topics.json"
    manifest = decode_manifest(path.read_bytes(), path="")
    path.write_bytes(encode_manifest(msgspec.structs.replace(manifest, cold=str(cold))))


def newer_format(whole: Path, mine: Path) -> None:
    path = mine / "topics.json"
    path.write_text(path.read_text().replace('"format":1', '"format":9'))


def damaged_log(whole: Path, mine: Path) -> None:
    """In the middle of the log that `orders` is in."""
    shard = topic_in(Folder(str(whole)), "orders").shard
    for path in sorted((mine / "wal" / f"shard-{shard:02d}").glob("*.wal")):
        data = bytearray(path.read_bytes())
        written = bytes(data)
        frames = list(scan(written, salt=decode_wal_header(written[:64], path="").salt)) if any(written[:64]) else []
        if len(frames) > 3:
            data[frames[1].offset + 60] ^= 0x40
            path.write_bytes(data)
            return
    raise AssertionError("no log with frames")


FOLDERS: dict[str, Callable[[Path, Path], None]] = {
    "torn tail": torn_tail,
    "missing segment": missing_segment,
    "half relocated": half_relocated,
    "newer format": newer_format,
    "damaged log": damaged_log,
}

# --- tools ---------------------------------------------------------------------------------------------

TOOLS: dict[str, list[str]] = {
    "verify": ["verify", "--deep"],
    "repair": ["repair"],
    "shard": ["shard", "inspect", "SHARD"],
    "topic ls": ["topic", "ls"],
    "topic show": ["topic", "show", "orders"],
    "wal": ["wal", "dump"],
    "segment ls": ["segment", "ls"],
    "segment dump": ["segment", "dump"],
    "snapshot": ["snapshot", "create", "view", "--dir", "PLACE"],
    "export": ["export", "orders", "--data-dir", "FOLDER"],
}

# What each says about each: (exit code, a piece of what it says); None: it works as if nothing were wrong.
OK = (0, None)
MISSING = "this file is missing; restore it from a backup"
FORMAT = "written in format 9, this program reads up to 1"
DAMAGE = "good frames follow"
EXPECTED: dict[str, dict[str, tuple[int, str | None]]] = {
    "torn tail": dict.fromkeys(TOOLS, OK)
    | {"verify": (0, "cut short and never acknowledged"), "shard": (0, "torn: "), "wal": (0, "cut short")},
    "missing segment": dict.fromkeys(TOOLS, (1, MISSING))
    | {
        "verify": (1, "this file is missing, though it counts"),
        "repair": (1, "this segment is missing"),
        "wal": OK,
        "segment ls": (1, "is missing"),
        "segment dump": (1, "missing"),
    },
    "half relocated": dict.fromkeys(TOOLS, OK) | {"verify": (0, "never finished"), "repair": (1, "never finished")},
    "newer format": dict.fromkeys(TOOLS, (1, FORMAT)),
    "damaged log": dict.fromkeys(TOOLS, (1, DAMAGE))
    | {
        "verify": (1, "no good frame after frame"),
        "repair": (1, "no good frame at offset"),
        "wal": (1, "damaged"),
        "segment ls": OK,
        "segment dump": OK,
    },
}


@pytest.fixture(scope="module", params=FOLDERS)
def scene(request: pytest.FixtureRequest, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    mine = copied(whole, tmp_path_factory.mktemp("scene") / "data")
    FOLDERS[request.param](whole, mine)
    return request.param, mine


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_on_a_folder(scene: tuple[str, Path], whole: Path, tmp_path: Path, tool: str) -> None:
    name, folder = scene
    code, says = EXPECTED[name][tool]
    shard = topic_in(Folder(str(whole)), "orders").shard
    words = {"FOLDER": str(folder), "PLACE": str(tmp_path), "SHARD": str(shard)}
    before = contents(folder.parent)
    answer = topics(folder, *[words.get(word, word) for word in TOOLS[tool]])
    assert contents(folder.parent) == before, "it wrote"
    assert answer.code == code, answer.err + answer.out[-2_000:]
    said = answer.out + answer.err
    assert "Traceback" not in said
    if says is not None:
        assert says in " ".join(said.split()), said[-2_000:]
    if code and not answer.out:
        (line,) = answer.err.splitlines()  # one line, and no more
        assert line.startswith("topics: ")
    if not code:
        assert answer.err.count("\n") <= 1  # at most what `export` says about itself


@pytest.mark.parametrize("name", ["torn tail", "half relocated"])
def test_what_is_whole_is_read_in_full(name: str, whole: Path, tmp_path: Path) -> None:
    """On folders that a server would serve, the tools see what there was."""
    folder = copied(whole, tmp_path / "data")
    FOLDERS[name](whole, folder)
    here, there = (
        topics(each, "export", "orders", "capped", "jobs", "late", "--data-dir", str(each)) for each in (folder, whole)
    )
    assert [line for line in here.out.splitlines() if '"export"' not in line] == [
        line for line in there.out.splitlines() if '"export"' not in line
    ]
    listed = [json.loads(topics(each, "topic", "ls", "--json").out) for each in (folder, whole)]
    assert listed[0] == listed[1]


def test_a_report_says_it_before_a_jvm_is_started(whole: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    mine = copied(whole, tmp_path / "data")
    newer_format(whole, mine)
    before = contents(mine)
    answer = topics(mine, "report", "--out", str(tmp_path / "out"))
    assert answer.code == 2
    (line,) = answer.err.splitlines()
    assert FORMAT in line
    assert contents(mine) == before
