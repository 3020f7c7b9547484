"""`topics segment`: the segments of a data folder, listed or block by block, on a running or a stopped server.

Reads and never writes. What is damaged is shown where it lies, and what follows it, too.

Exit codes: 0 done; 1 it could not be done, or damage was found; 2 the command was not understood; 130 Ctrl-C.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from topics.cli.completion import topic_option
from topics.cli.datadir.wal import record_words, shown_records, topic_id_of
from topics.cli.shared.place import (
    bytes_text,
    data_dir_option,
    failures_told,
    folder_name,
    json_option,
    print_json,
    time_text,
)
from topics.cli.shared.tables import Column, show, wide_option
from topics.cli.shared.terminal import say
from topics.datadir import inventory
from topics.datadir.files import ColdTierAway, Files
from topics.datadir.inventory import Entry
from topics.datadir.reading import Block, Stretch, read_all, walk_segment
from topics.errors import TopicsError
from topics.storage.columns import Columns
from topics.storage.format import DELETED, FILE_HEADER_BYTES
from topics.storage.segment import decode_segment_header

if TYPE_CHECKING:
    from rich.text import Text


@click.group()
def segment() -> None:
    """Look at segments: the files in which records lie for good.

    \b
      topics segment ls --topic orders
      topics segment dump --topic orders --from-seq 17 --to-seq 20 --records
    """


@segment.command("ls")
@topic_option
@click.option("--shard", type=click.IntRange(0), help="Of this shard alone.")
@wide_option
@data_dir_option
@json_option
def ls(topic: str | None, shard: int | None, wide: bool, data_dir: str | None, as_json: bool) -> None:
    """List the segments that count, with what is live, deleted and damaged in them.

    Deleted are records whose flag is set; `topics shard inspect` also knows what caps and TTL took. A segment that
    can't be read is listed all the same, with what is wrong.

    \b
      topics segment ls
      topics segment ls --json | jq -r '.[] | select(.problem) | .file'
    """
    with failures_told():
        place = folder_name(data_dir)
        lines = [_listed(Files(place), entry) for entry in _entries(place, topic, shard)]
        if as_json:
            print_json(lines)
        else:
            _print_listing(lines, wide=wide)
    sys.exit(1 if any(line["problem"] for line in lines) else 0)


def _entries(place: str, topic: str | None, shard: int | None) -> list[Entry]:
    """What snapshots name; one that can't be read is told of on stderr."""
    topic_id = None if topic is None else topic_id_of(place, topic)
    listed = inventory.take(place, now_ms=time.time_ns() // 1_000_000)
    for damage in listed.damage:
        say(f"topics: shard {damage.shard}: {damage.text}; its segments are not listed", err=True)
    return [
        entry
        for entry in listed.entries
        if entry.kind == "segment"
        and (topic_id is None or entry.topic_id == topic_id)
        and (shard is None or entry.shard == shard)
    ]


def _listed(files: Files, entry: Entry) -> dict[str, Any]:
    line: dict[str, Any] = {
        "file": entry.file,
        "shard": entry.shard,
        "topic": entry.topic,
        "first_seq": entry.first_seq,
        "last_seq": entry.last_seq,
        "sealed": entry.sealed,
        "data_bytes": entry.data_bytes,
        "tier": None,
        "disk_bytes": 0,
        "blocks": 0,
        "records": 0,
        "deleted": 0,
        "problem": None,
    }
    try:
        line["tier"], _, line["disk_bytes"] = files.find(entry.file)
        blocks = files.read_index(entry.file).blocks if entry.sealed else None
        with files.opened(entry.file) as fd:
            header = decode_segment_header(os.pread(fd, FILE_HEADER_BYTES, 0), path=entry.file)
            if blocks is None:
                for found in walk_segment(os.pread(fd, entry.data_bytes, 0), salt=header.salt, counts=entry.data_bytes):
                    if isinstance(found, Stretch):
                        line["problem"] = f"at offset {found.offset}: {found.text}"
                    else:
                        line["blocks"] += 1
                        line["records"] += found.frame.count
                        line["deleted"] += found.flags.count(DELETED)
            else:
                line["blocks"] = len(blocks)
                line["records"] = sum(block.count for block in blocks)
                line["deleted"] = sum(os.pread(fd, block.count, block.flags_offset).count(DELETED) for block in blocks)
                if os.fstat(fd).st_size < entry.data_bytes:
                    line["problem"] = f"cut short: {os.fstat(fd).st_size} bytes of {entry.data_bytes}"
    except FileNotFoundError as exc:
        line["problem"] = f"{os.path.basename(str(exc.filename or exc))} is missing"
    except ColdTierAway:
        line["problem"] = "its cold tier is away"
    except (TopicsError, ValueError) as exc:
        line["problem"] = str(exc).rpartition(": ")[2]
    return line


_COLUMNS = (
    Column("topic", justify="left", folds=True),
    Column("segment", 5, justify="left"),
    Column("shard", 6),
    Column("tier", 4, justify="left"),
    Column("seqs"),
    Column("blocks", 7),
    Column("records", 2),
    Column("deleted", 3),
    Column("on disk", 1),
    Column("state", justify="left", folds=True),
)


def _print_listing(lines: list[dict[str, Any]], *, wide: bool) -> None:
    if lines:
        show(_COLUMNS, [_cells(line) for line in lines], wide=wide)
    else:
        say("no segments: records are in the log until there are enough of them")


def _cells(line: dict[str, Any]) -> list[str | Text]:
    from rich.text import Text

    return [
        Text(line["topic"]),
        os.path.basename(line["file"]),
        str(line["shard"]),
        line["tier"] or "",
        f"{line['first_seq']}..{line['last_seq']}",
        f"{line['blocks']:,}",
        f"{line['records']:,}",
        f"{line['deleted']:,}",
        bytes_text(line["disk_bytes"]),
        Text(line["problem"], "red") if line["problem"] else Text("sealed" if line["sealed"] else "open"),
    ]


@segment.command()
@click.argument("files", nargs=-1, type=click.Path(dir_okay=False))
@topic_option
@click.option("--shard", type=click.IntRange(0), help="Of this shard alone.")
@click.option("--from-seq", type=click.IntRange(1), default=1, help="Blocks with this seq or later ones.")
@click.option("--to-seq", type=click.IntRange(1), default=2**64, help="Blocks with this seq or earlier ones.")
@click.option("--limit", type=click.IntRange(1), help="At most so many blocks.")
@click.option("--records", is_flag=True, help="Show the records of blocks too, with their delete flags.")
@data_dir_option
@json_option
def dump(
    files: tuple[str, ...],
    topic: str | None,
    shard: int | None,
    from_seq: int,
    to_seq: int,
    limit: int | None,
    records: bool,
    data_dir: str | None,
    as_json: bool,
) -> None:
    """Print every block of segments, decoded.

    FILES are .data files; without any, all that count in the data folder are read. A flag of d5 means that a client
    deleted the record; what caps and TTL took has no flag.

    \b
      topics segment dump --topic orders
      topics segment dump --topic orders --from-seq 17 --to-seq 17 --records
      topics segment dump 00000000000000000001.data --json

    With --json there is one object a line. The exit code is 1 if damage was found.
    """
    damaged = False
    with failures_told():
        left = limit if limit is not None else 2**64
        for line in _dumped(folder_name(data_dir), files, topic, shard, records=records):
            damaged = damaged or "damage" in line
            if "count" in line:
                if line["first_seq"] > to_seq or line["first_seq"] + line["count"] <= from_seq:
                    continue
                if not left:
                    break
                left -= 1
            print_json(line) if as_json else _print(line)
    sys.exit(1 if damaged else 0)


def _dumped(
    place: str, given: tuple[str, ...], topic: str | None, shard: int | None, *, records: bool
) -> Iterator[dict[str, Any]]:
    if given:
        for path in given:
            yield from _lines(path, path, None, records=records)
        return
    for entry in _entries(place, topic, shard):
        try:
            path = Files(place).find(entry.file)[1]
        except FileNotFoundError:
            yield {"file": entry.file, "offset": 0, "damage": "this file is missing"}
            continue
        except ColdTierAway as exc:
            yield {"file": entry.file, "offset": 0, "damage": str(exc)}
            continue
        yield from _lines(entry.file, path, entry, records=records)


def _lines(name: str, path: str, entry: Entry | None, *, records: bool) -> Iterator[dict[str, Any]]:
    with open(path, "rb") as source:
        data = read_all(source.fileno())
    counts = None if entry is None else entry.data_bytes
    try:
        header = decode_segment_header(data[:FILE_HEADER_BYTES], path=name)
    except TopicsError as exc:
        yield {"file": name, "offset": 0, "damage": str(exc).removeprefix(f"{name}: ")}
        return
    yield {
        "file": name,
        "topic": None if entry is None else entry.topic,
        "topic_id": f"{header.topic_id:016x}",
        "created_ms": header.created_ms,
        "salt": f"{header.salt:08x}",
        "bytes": len(data),
        "counting_bytes": counts,
        "sealed": None if entry is None else entry.sealed,
    }
    if counts is not None and len(data) < counts:
        yield {"file": name, "offset": len(data), "damage": f"cut short: {counts - len(data)} bytes are missing"}
    for found in walk_segment(data, salt=header.salt, counts=counts):
        if isinstance(found, Stretch):
            what = "damage" if found.kind == "damaged" else "note"
            yield {"file": name, "offset": found.offset, "length": found.length, what: found.text}
        else:
            yield _block(name, found, counts=counts, records=records)


def _block(name: str, block: Block, *, counts: int | None, records: bool) -> dict[str, Any]:
    frame = block.frame
    shown: dict[str, Any] = {
        "file": name,
        "offset": frame.offset,
        "length": frame.length,
        "first_seq": frame.first_seq,
        "count": frame.count,
        "deleted": block.flags.count(DELETED),
        "first_ts": frame.ts,
        "last_ts": frame.lsn,
        "size": frame.synced,
    }
    if counts is not None and frame.offset >= counts:
        shown["note"] = "behind what the snapshot knows: it does not count yet"
    try:
        shown["tagged"] = Columns(frame.body, count=frame.count, ts=frame.ts).has_tags
        if records:
            shown["records"] = shown_records(frame, block.flags)
    except (TopicsError, ValueError) as exc:
        shown["damage"] = f"its records can't be read: {exc}"
    return shown


def _print(line: dict[str, Any]) -> None:
    if "salt" in line:
        topic = f"topic {line['topic']} ({line['topic_id']})" if line["topic"] else f"topic {line['topic_id']}"
        say(f"{line['file']}: {topic}, made {time_text(line['created_ms'])}, {line['bytes']:,} bytes")
        return
    if "count" in line:
        last = line["first_seq"] + line["count"] - 1
        say(
            f"{line['offset']:>10} seq {line['first_seq']}..{last} ({line['count']}, {line['deleted']} deleted) "
            f"{time_text(line['first_ts'])} to {time_text(line['last_ts'])}, {line['size']:,} bytes of records"
        )
        for record in line.get("records", ()):
            say(f"{'':>13}{record_words(record)}")
    for what in ("note", "damage"):
        if what in line:
            where = f"{line['offset']:>10} " if "count" not in line else f"{'':>13}"
            say(f"{where}{'DAMAGE ' if what == 'damage' else ''}{line[what]}")
