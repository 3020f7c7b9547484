"""`topics wal`: the log of a data folder, frame by frame, on a running or a stopped server.

Reads and never writes. What is no frame is shown where it lies: the end, a torn write, damage, and what follows it.

Exit codes: 0 done; 1 it could not be done, or damage was found; 2 the command was not understood; 130 Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import click
import msgspec

from topics.cli.completion import topic_option
from topics.cli.shared.place import (
    data_dir_option,
    fail,
    failures_told,
    find_topic,
    folder_name,
    json_option,
    print_json,
    time_text,
)
from topics.cli.shared.terminal import say
from topics.datadir.files import Files
from topics.datadir.reading import Stretch, read_all, walk_log
from topics.datadir.view.folder import Folder
from topics.errors import TopicsError
from topics.storage.columns import Columns
from topics.storage.control import DeleteFrame, HeadFrame, TopicFrame
from topics.storage.format import FILE_HEADER_BYTES, FrameType
from topics.storage.frames import Frame, decode_wal_header
from topics.storage.paths import parse_numbered, shard_dir

_TYPES = ("append", "delete", "topic", "drop", "head")
_BODIES: dict[int, type] = {FrameType.DELETE: DeleteFrame, FrameType.TOPIC: TopicFrame, FrameType.HEAD: HeadFrame}


class Range(msgspec.Struct, frozen=True):
    first: int
    last: int

    def meets(self, first: int, last: int) -> bool:
        return first <= self.last and last >= self.first


def range_given(ctx: click.Context, param: click.Parameter, value: str | None) -> Range | None:
    """N, or A-B, or A-, or -B."""
    if value is None:
        return None
    low, dash, high = value.partition("-")
    try:
        first = int(low) if low else 0
        last = (int(high) if high else 2**64) if dash else first
    except ValueError:
        raise click.BadParameter(f"{value!r} is no range: write 17, 17-20, 17- or -20") from None
    return Range(first, last)


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """Which frames were asked for."""

    topic_id: int | None
    types: tuple[str, ...]
    seqs: Range | None
    lsns: Range | None

    def takes(self, frame: Frame) -> bool:
        if self.topic_id is not None and frame.topic_id != self.topic_id:
            return False
        if self.types and type_name(frame.type) not in self.types:
            return False
        if self.lsns is not None and not self.lsns.meets(frame.lsn, frame.lsn):
            return False
        return self.seqs is None or (frame.count > 0 and self.seqs.meets(frame.first_seq, frame.last_seq))


@click.group()
def wal() -> None:
    """Look into the log of a data folder.

    \b
      topics wal dump --topic orders --type append
      topics wal dump --shard 0 --lsn 1000-1020 --records
    """


@wal.command()
@click.argument("files", nargs=-1, type=click.Path(dir_okay=False))
@click.option("--shard", type=click.IntRange(0), help="Of this shard alone.")
@topic_option
@click.option("--type", "types", multiple=True, type=click.Choice(_TYPES), help="Of this type; may be repeated.")
@click.option("--from-seq", type=click.IntRange(1), help="Batches with this seq or later ones.")
@click.option("--to-seq", type=click.IntRange(1), help="Batches with this seq or earlier ones.")
@click.option("--lsn", "lsns", metavar="RANGE", callback=range_given, help="Frames by number: 17, 17-20, 17- or -20.")
@click.option("--limit", type=click.IntRange(1), help="At most so many frames.")
@click.option("--records", is_flag=True, help="Show the records of batches too.")
@data_dir_option
@json_option
def dump(
    files: tuple[str, ...],
    shard: int | None,
    topic: str | None,
    types: tuple[str, ...],
    from_seq: int | None,
    to_seq: int | None,
    lsns: Range | None,
    limit: int | None,
    records: bool,
    data_dir: str | None,
    as_json: bool,
) -> None:
    """Print every frame of the log, decoded.

    FILES are log files; without any, those of the data folder are read, shard by shard, oldest first. A server may be
    running: the dump ends where the log ended when it got there.

    \b
      topics wal dump                                 # everything
      topics wal dump --topic orders --from-seq 17 --to-seq 17 --records
      topics wal dump --type topic --type drop        # which topics came and went
      topics wal dump broken.wal --json | jq 'select(.damage)'

    With --json there is one object a line. The exit code is 1 if damage was found.
    """
    with failures_told():
        place = folder_name(data_dir)
        seqs = Range(from_seq or 0, to_seq or 2**64) if from_seq or to_seq else None
        topic_id = None if topic is None else topic_id_of(place, topic)
        chosen = Chosen(topic_id=topic_id, types=types, seqs=seqs, lsns=lsns)
        paths = list(files) or log_files(place, shard)
        damaged = _dump(paths, chosen, limit=limit, records=records, as_json=as_json)
    sys.exit(1 if damaged else 0)


def topic_id_of(place: str, name: str) -> int:
    """An id stands for itself, so that a folder which can't be read as a whole can still be looked into."""
    if len(name) == 16 and all(letter in "0123456789abcdef" for letter in name.lower()):
        return int(name, 16)
    try:
        return find_topic(Folder(place), name).id
    except TopicsError as exc:
        fail(f"{exc} (--topic takes an id of 16 hex digits, too)")


def log_files(place: str, shard: int | None) -> list[str]:
    files = Files(place)
    shards = range(files.manifest.shards)
    if shard is not None and shard not in shards:
        raise click.BadParameter(f"there are shards 0 to {shards[-1]}", param_hint="--shard")
    found = []
    for number in shards if shard is None else [shard]:
        folder = shard_dir(files.data_dir, number)
        for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
            parsed = parse_numbered(name)
            if parsed is not None and parsed[0] == files.manifest.layout and parsed[2] == "wal":
                found.append(os.path.join(folder, name))
    return found


def _dump(paths: list[str], chosen: Chosen, *, limit: int | None, records: bool, as_json: bool) -> bool:
    left = limit if limit is not None else 2**64
    damaged = False
    for path in paths:
        for line in _lines(path, chosen, records=records):
            damaged = damaged or "damage" in line
            if "lsn" in line:
                if not left:
                    return damaged
                left -= 1
            print_json(line) if as_json else _print(line)
    return damaged


def _lines(path: str, chosen: Chosen, *, records: bool) -> Iterator[dict[str, Any]]:
    """The file, its frames, and what is no frame."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield {"file": path, "note": "this file is gone; the server removes those that are not needed any more"}
        return
    try:
        data = read_all(fd)
    finally:
        os.close(fd)
    head = data[:FILE_HEADER_BYTES]
    if not any(head):
        yield {"file": path, "note": "no header yet: it was just made, or a crash came then"}
        return
    try:
        header = decode_wal_header(head, path=path)
    except TopicsError as exc:
        yield {"file": path, "offset": 0, "damage": str(exc).removeprefix(f"{path}: ")}
        return
    yield {
        "file": path,
        "shard": header.shard,
        "layout": header.layout,
        "number": header.file_no,
        "salt": f"{header.salt:08x}",
        "boot_id": header.boot_id.hex(),
        "bytes": len(data),
    }
    for found in walk_log(data, salt=header.salt):
        if isinstance(found, Stretch):
            name = "damage" if found.kind == "damaged" else "note"
            yield {"file": path, "offset": found.offset, "length": found.length, name: found.text}
        elif chosen.takes(found):
            yield shown_frame(path, found, records=records)


def type_name(kind: int) -> str:
    try:
        return FrameType(kind).name.lower()
    except ValueError:
        return f"unknown-{kind}"


def shown_frame(path: str, frame: Frame, *, records: bool) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "file": path,
        "offset": frame.offset,
        "length": frame.length,
        "lsn": frame.lsn,
        "synced": frame.synced,
        "type": type_name(frame.type),
        "topic_id": f"{frame.topic_id:016x}",
        "ts": frame.ts,
    }
    if frame.key:
        shown["key"] = frame.key.decode(errors="replace")
    try:
        if frame.type == FrameType.APPEND:
            shown |= {"first_seq": frame.first_seq, "count": frame.count}
            if records:
                shown["records"] = shown_records(frame)
        elif (body := _BODIES.get(frame.type)) is not None:
            shown |= _fields(msgspec.msgpack.decode(frame.body, type=body))
            if frame.type == FrameType.HEAD:
                shown["ceiling"] = frame.first_seq
        elif frame.type != FrameType.DROP:
            shown["damage"] = f"a frame of type {frame.type}, which this program does not know"
    except (TopicsError, msgspec.MsgspecError, ValueError) as exc:
        shown["damage"] = f"its body can't be read: {exc}"
    return shown


def _fields(body: Any) -> dict[str, Any]:
    return {name: getattr(body, name) for name in body.__struct_fields__}


def shown_records(frame: Frame, flags: bytes | None = None) -> list[dict[str, Any]]:
    """Every record of a batch; data as it was sent, or as text if it is no JSON."""
    columns = Columns(frame.body, count=frame.count, ts=frame.ts)
    found = []
    rows = zip(columns.times(), columns.tags(), columns.nodes(), columns.metas(), columns.data(), strict=True)
    for at, (ts, tag, node, meta, data) in enumerate(rows):
        record: dict[str, Any] = {"seq": frame.first_seq + at, "ts": ts}
        record |= {name: value for name, value in (("tag", tag), ("node", node)) if value is not None}
        if meta is not None:
            record["meta"] = msgspec.Raw(meta)
        record["data"] = msgspec.Raw(data)
        if flags is not None:
            record["flag"] = f"{flags[at]:02x}" if at < len(flags) else "missing"
        found.append(record)
    return found


def _print(line: dict[str, Any]) -> None:
    offset = f"{line['offset']:>10} " if "offset" in line else ""
    if "lsn" in line:
        say(f"{offset}{_words(line)}")
        for record in line.get("records", ()):
            say(f"{'':>13}{record_words(record)}")
    elif "shard" in line:
        say(
            f"{line['file']}: shard {line['shard']}, layout {line['layout']}, file {line['number']}, "
            f"salt {line['salt']}, {line['bytes']:,} bytes"
        )
    else:
        text = line.get("note") or f"DAMAGE {line['damage']}"
        say(f"{offset}{text}" if offset else f"{line['file']}: {text}")
    if "lsn" in line and "damage" in line:
        say(f"{'':>13}DAMAGE {line['damage']}")


_PLACE = {"file", "offset", "length", "lsn", "synced", "type", "topic_id", "ts"}
_SAID = _PLACE | {"first_seq", "count", "records", "damage"}


def _words(line: dict[str, Any]) -> str:
    text = f"lsn {line['lsn']} (synced {line['synced']}) {time_text(line['ts'])} {line['type']:<6} {line['topic_id']}"
    if line.get("count"):
        text += f" seq {line['first_seq']}..{line['first_seq'] + line['count'] - 1} ({line['count']})"
    rest = {name: value for name, value in line.items() if name not in _SAID}
    return text + "".join(f" {name}={msgspec.json.encode(value).decode()}" for name, value in rest.items())


def record_words(record: dict[str, Any]) -> str:
    parts = [f"{record['seq']}", f"{record['ts']}"]
    parts += [f"{name}={record[name]}" for name in ("tag", "node", "flag") if name in record]
    parts += [f"meta={bytes(record['meta']).decode(errors='replace')}"] if "meta" in record else []
    return " ".join([*parts, bytes(record["data"]).decode(errors="replace")])
