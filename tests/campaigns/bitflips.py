"""One bit of a data folder changed, at every byte of every file in turn: nothing is served that was not written.

The folder has all kinds of files: logs, a snapshot, sealed and open segments with delete flags and their indexes, in
the data folder and in a cold tier, the file of routers, the manifest. The log names copies of a router, and some of
them were in memory only. A seed changes one bit of each eighth byte, so 64 seeds in a row change every bit of every
byte; then a shard starts on it and everything is read, as a client reads. What may be seen:

    refused      the shard does not start, and names the file
    harmless     everything is as it was
    told         a read of the damaged records is answered with an error, everything else is as it was
    cut          the last frames of a log look like a write that a crash cut short: they are gone
    wrongly      anything else: a record that is changed, gone or back without anybody saying so, a seq given out again

The manifest and the file of routers are read by other processes than shards: here by their decoders, which must refuse
the change or not be touched by it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from folderplay import write_manifest
from model import Record, Shard, Stored
from pipeshard import PipeShard

from topics.errors import ApiError, CorruptData, FormatError, TopicsError, Unreachable
from topics.storage.config import TopicConfig
from topics.storage.manifest import MANIFEST_NAME, decode_manifest
from topics.storage.routers import Rule, decode_rules, encode_rules

from .campaign import Campaign, Finding, Tally
from .copies import StrictForwarder
from .stepped import scratch, small_limits

Verdict = Literal["refused", "harmless", "told", "cut", "wrongly"]
SETTINGS = {"wal_file_bytes": 4_096, "segment_max_events": 16}
BITS = 8
PARTS = 8  # of all bytes: a unit is short, and what is cut short is not much
ROW = BITS * PARTS  # seeds: all there is
PAGE = 7  # records of a read: one that is damaged does not hide the others


@dataclass(slots=True)
class Whole:
    """The folder without damage, and what is read from it."""

    folder: Path
    contents: dict[str, bytes]
    files: list[str]
    records: dict[str, dict[int, Stored]]
    heads: dict[str, int]
    last_frames: dict[str, set[int]]  # by topic: seqs of records that a torn tail may take


def records(count: int, *, start: int = 0) -> list[Record]:
    return [
        Record(b'{"n":%d}' % number, tag=f"t{number % 3}", node="n" if number % 2 else None, meta=b'{"m":1}')
        for number in range(start, start + count)
    ]


def build(folder: Path) -> Whole:
    """A killed shard."""
    shard = open_shard(folder)
    for name, config in (
        ("sealed", TopicConfig(durability="fsync", durable=True)),
        ("open", TopicConfig()),
        ("capped", TopicConfig(cap_records=12)),
        ("log", TopicConfig(durability="fsync", durable=True)),
        ("copies", TopicConfig(durability="fsync", durable=True)),
    ):
        shard.put(name, config)
    for start in range(0, 48, 8):
        shard.append("sealed", records(8, start=start))
    shard.flush("sealed")
    shard.checkpoint()
    shard.relocate()
    shard.append("open", records(6))
    shard.append("capped", records(20))
    shard.delete("sealed", tag="t1")
    shard.delete("open", before_seq=3)
    shard.flush("open")
    shard.flush("capped")
    shard.checkpoint()
    for number in range(4):
        shard.append("log", records(2, start=10 * number), key=f"key-{number}")
    shard.append("open", records(3, start=50))
    forwarder = StrictForwarder(shard, "log", "copies")
    forwarder.pump()
    shard.flush("copies")
    shard.checkpoint()
    shard.delete("log", tag="t2")
    shard.append("log", records(3, start=60))
    forwarder.pump()
    shard.sync()
    before = {name: {one.seq: one for one in shard.everything(name)} for name in shard.engine.topics}
    shard.append("log", records(2, start=90))
    found = {name: {one.seq: one for one in shard.everything(name)} for name in shard.engine.topics}
    heads = {name: shard.report(name).head_seq for name in shard.engine.topics}
    shard.crash()
    write_manifest(folder / "data")
    rule = Rule("r", "log", "elsewhere", 7, 5, 0, 0)
    (folder / "data" / "routers").write_bytes(encode_rules([rule]))
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    torn = {name: set(found[name]) - set(before[name]) for name in found}
    contents = {file: (folder / file).read_bytes() for file in files}
    return Whole(folder, contents, files, found, heads, torn)


def copy(whole: Whole, folder: Path) -> None:
    """As shutil.copytree, without times and modes, which nobody looks at."""
    for path in sorted(path for path in whole.folder.rglob("*") if path.is_dir()):
        (folder / path.relative_to(whole.folder)).mkdir(parents=True, exist_ok=True)
    for file, content in whole.contents.items():
        (folder / file).write_bytes(content)


def open_shard(folder: Path) -> PipeShard:
    cold = os.fspath(folder / "cold")
    return PipeShard(folder / "data", cold=cold, cold_dir=cold, hot_retain_segments=1, **SETTINGS)  # type: ignore[arg-type]


def places(whole: Whole) -> Iterator[tuple[str, int]]:
    for file, content in whole.contents.items():
        for at in range(len(content)):
            yield file, at


def chosen_by(seed: int, whole: Whole) -> tuple[int, list[tuple[int, tuple[str, int]]]]:
    """The bit that is changed, and in which bytes, with their numbers in the folder."""
    part = seed // BITS % PARTS
    return seed % BITS, [each for each in enumerate(places(whole)) if each[0] % PARTS == part]


# --- one flip ----------------------------------------------------------------------------------------


def judge(whole: Whole, folder: Path, file: str) -> tuple[Verdict, str]:
    name = os.path.basename(file)
    if name in (MANIFEST_NAME, "routers"):
        return _judge_decoded(whole, folder, file)
    try:
        shard = open_shard(folder)
    except (CorruptData, FormatError, Unreachable, OSError) as error:
        return ("refused", "") if str(error) else ("wrongly", "it is refused without a reason")
    except Exception as error:  # whatever it is, it is none that is documented
        return "wrongly", f"it does not start: {type(error).__name__}: {error}"
    try:
        return _judge_served(whole, shard, file)
    except Exception as error:  # an answer that nobody can read, or none
        return "wrongly", f"{type(error).__name__}: {error}"


def _judge_decoded(whole: Whole, folder: Path, file: str) -> tuple[Verdict, str]:
    decode = decode_manifest if os.path.basename(file) == MANIFEST_NAME else decode_rules
    good = decode((whole.folder / file).read_bytes(), path=file)
    try:
        found = decode((folder / file).read_bytes(), path=file)
    except (CorruptData, FormatError):
        return "refused", ""
    except Exception as error:
        return "wrongly", f"{type(error).__name__}: {error}"
    return ("harmless", "") if found == good else ("wrongly", f"it is read as {found}, was {good}")


def _judge_served(whole: Whole, shard: PipeShard, file: str) -> tuple[Verdict, str]:
    told = cut = False
    if set(shard.engine.topics) != set(whole.records):
        return "wrongly", f"topics are {sorted(shard.engine.topics)}"
    with contextlib.suppress(ApiError, TopicsError):  # the source can't be read: what waits for it is answered with 503
        StrictForwarder(shard, "log", "copies").refill()
    for name, expected in whole.records.items():
        found, unreadable = read(shard, name, whole.heads[name])
        told = told or unreadable
        for seq, stored in found.items():
            if seq not in expected:
                return "wrongly", f"{name}: seq {seq} is back, or was never there: {stored}"
            if stored != expected[seq]:
                return "wrongly", f"{name}: seq {seq} is {stored}, was {expected[seq]}"
        gone = expected.keys() - found.keys()
        if gone and not unreadable:
            if not gone <= whole.last_frames[name] or not file.endswith(".wal"):
                return "wrongly", f"{name}: seqs {sorted(gone)} are gone, and nobody says so"
            cut = True
        elif shard.report(name).head_seq < whole.heads[name]:
            return "wrongly", f"{name}: the head went from {whole.heads[name]} back to {shard.report(name).head_seq}"
    return ("told" if told else "cut" if cut else "harmless"), ""


def read(shard: Shard, name: str, head: int) -> tuple[dict[int, Stored], bool]:
    """What can be read, and whether a part was answered with an error."""
    found: dict[int, Stored] = {}
    unreadable = False
    at = 0
    while at <= head:
        try:
            page = shard.diff(name, at, limit=PAGE)
        except (ApiError, TopicsError):
            unreadable = True
            at += 1  # a reader that skips what it can't have
            continue
        found.update({one.seq: one for one in page.stored})
        if page.caught_up:
            break
        at = max(page.next_from_seq, at + 1)
    return found, unreadable


def run(seed: int, only: str | None = None, *, every: int = 1) -> Tally:
    """One bit of a part of the bytes; every: of each n-th of these. only: FILE:BYTE:BIT."""
    tally = Tally()
    base = scratch()
    try:
        with small_limits():
            whole = build(base / "whole")
            bit, chosen = chosen_by(seed, whole)
            for number, (file, at) in chosen[:: max(1, every)]:
                if only is not None and only != f"{file}:{at}:{bit}":
                    continue
                folder = base / str(number)
                copy(whole, folder)
                data = bytearray(whole.contents[file])
                data[at] ^= 1 << bit
                (folder / file).write_bytes(data)
                verdict, why = judge(whole, folder, file)
                Shard.forget_all()
                tally.add("flips")
                tally.add(verdict)
                tally.add(f"flips_{Path(file).suffix.lstrip('.') or Path(file).name}")
                if verdict == "wrongly":
                    tally.find(Finding(seed, f"{file}:{at}:{bit}", f"{Path(file).suffix or file}: {why}"))
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return tally


CAMPAIGN = Campaign(
    name="bitflips",
    title="single-bit flips over every byte of a folder with all kinds of files",
    goal=129_500,  # reached by all seeds of a ROW only: every bit of every byte
    figure="flips",
    run=run,
    meaning="one bit changed, a shard started, everything read; `wrongly` is what was served wrongly",
)
