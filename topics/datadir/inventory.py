"""The files of a data folder, and which of them count.

What counts is what the newest snapshot of each shard names, and the log of the manifest's layout. Everything else below
`wal/` and `topics/` is left over: an orphan. A server makes files before a snapshot names them and removes others right
after one, so only what has lain there untouched for a while is called so.

It looks at names and snapshots alone, so it works on a folder whose records can't be read any more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec

from topics.datadir.files import Files
from topics.errors import TopicsError
from topics.storage.config import owner_of_id
from topics.storage.paths import index_path, parse_numbered, parse_segment, parse_topic_dir, segment_name, shard_dir
from topics.storage.snapshot import SegmentState, ShardState, decode_snapshot, decode_topic

SETTLED_MS = 600_000  # a flush, its snapshot and what that removes take seconds
_TRIES = 10


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A file that counts."""

    file: str  # below the data folder
    kind: str  # segment, wal
    shard: int
    topic: str | None = None
    topic_id: int = 0
    first_seq: int = 0
    last_seq: int = 0
    data_bytes: int = 0  # how many of a segment's bytes count
    sealed: bool = False


class Orphan(msgspec.Struct, frozen=True, kw_only=True):
    file: str
    shard: int | None  # None: no telling
    bytes: int
    modified_ms: int
    why: str


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that can't be read, so that nobody knows which segments count."""

    file: str
    shard: int
    text: str


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    entries: list[Entry]
    orphans: list[Orphan]
    damage: list[Damage]
    covered: dict[int, int]  # by shard: the last frame of its log that the snapshot knows


def take(data_dir: str, *, now_ms: int, settled_ms: int = SETTLED_MS) -> Inventory:
    """settled_ms: how long a file must have lain there to be called an orphan; 0 where no server is at work."""
    files = Files(data_dir)
    for left in reversed(range(_TRIES)):
        manifest = files.read_manifest()
        before = _newest(files)
        try:
            found = _take(files, before, now_ms=now_ms, settled_ms=settled_ms)
        except FileNotFoundError:
            if not left:
                raise
            continue
        if not left or (_newest(files) == before and files.read_manifest() == manifest):
            return found  # the last try stands although a busy server has gone on meanwhile
    raise AssertionError("the last try returns or raises")


def _newest(files: Files) -> dict[int, str | None]:
    """The snapshot that counts, by shard."""
    found: dict[int, str | None] = {}
    for shard in range(files.manifest.shards):
        names = _names(shard_dir(files.data_dir, shard))
        numbered = [(parsed[1], name) for name in names if (parsed := parse_numbered(name)) is not None]
        ours = [
            (number, name)
            for number, name in numbered
            if name.endswith(".snap") and name.startswith(f"{files.manifest.layout:08x}-")
        ]
        found[shard] = max(ours)[1] if ours else None
    return found


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _take(files: Files, newest: dict[int, str | None], *, now_ms: int, settled_ms: int) -> Inventory:
    entries: list[Entry] = []
    damage: list[Damage] = []
    covered: dict[int, int] = {}
    blind: set[int] = set()  # shards whose segments nobody can name
    for shard, name in newest.items():
        folder = shard_dir(files.data_dir, shard)
        for wal in _names(folder):
            parsed = parse_numbered(wal)
            if parsed is not None and parsed[0] == files.manifest.layout and parsed[2] == "wal":
                entries.append(Entry(file=files.relative(os.path.join(folder, wal)), kind="wal", shard=shard))
        if name is None:
            continue
        path = os.path.join(folder, name)
        try:
            with open(path, "rb") as source:
                state = decode_snapshot(source.read(), path=files.relative(path))
            entries += _segments(state)
            covered[shard] = state.lsn
        except (TopicsError, msgspec.MsgspecError) as exc:
            blind.add(shard)
            damage.append(Damage(file=files.relative(path), shard=shard, text=str(exc)))
    counting = {entry.file for entry in entries}
    counting |= {index_path(entry.file) for entry in entries if entry.kind == "segment" and entry.sealed}
    counting |= {files.relative(os.path.join(shard_dir(files.data_dir, n), name)) for n, name in newest.items() if name}
    orphans = []
    for file, status in _walk(files):
        shard_of = _shard_of(file, files.manifest.shards)
        modified_ms = status.st_mtime_ns // 1_000_000
        if file in counting or modified_ms > now_ms - settled_ms or shard_of in blind:
            continue
        why = _why(file, files)
        orphans.append(
            Orphan(file=file, shard=shard_of, bytes=status.st_blocks * 512, modified_ms=modified_ms, why=why)
        )
    return Inventory(entries=entries, orphans=orphans, damage=damage, covered=covered)


def _segments(state: ShardState) -> Iterator[Entry]:
    for raw in state.topics:
        topic = decode_topic(raw)
        for known in topic.segments:
            yield _segment(known, topic_id=topic.id, name=topic.name, shard=state.shard)


def _segment(known: SegmentState, *, topic_id: int, name: str, shard: int) -> Entry:
    return Entry(
        file=os.path.join("topics", f"{topic_id:016x}", segment_name(known.first_seq)),
        kind="segment",
        shard=shard,
        topic=name,
        topic_id=topic_id,
        first_seq=known.first_seq,
        last_seq=known.last_seq,
        data_bytes=known.data_bytes,
        sealed=known.sealed,
    )


def _walk(files: Files) -> Iterator[tuple[str, os.stat_result]]:
    """Every file of both tiers, named as below the data folder."""
    for _, root in files.roots():
        for part in ("wal", "topics"):
            for folder, _, names in os.walk(os.path.join(root, part)):
                for name in names:
                    path = os.path.join(folder, name)
                    try:
                        yield os.path.relpath(path, root), os.stat(path)
                    except FileNotFoundError:
                        pass  # the server has removed it


def _shard_of(file: str, shards: int) -> int | None:
    parts = file.split(os.sep)
    if parts[0] == "topics" and len(parts) > 1:
        topic_id = parse_topic_dir(parts[1])
        return None if topic_id is None else owner_of_id(topic_id, shards)
    number = parts[1].removeprefix("shard-") if len(parts) > 2 else ""
    return int(number) if number.isdigit() else None


def _why(file: str, files: Files) -> str:
    folder, name = os.path.split(file)
    if name.endswith(".tmp"):
        return "never finished"
    parsed = parse_numbered(name)
    if parsed is not None and folder.startswith("wal"):
        if parsed[0] != files.manifest.layout or (_shard_of(file, files.manifest.shards) or 0) >= files.manifest.shards:
            return f"of layout {parsed[0]}, not {files.manifest.layout}"
        return "an older snapshot"
    if parse_segment(name) is not None or parse_segment(name.removesuffix(".idx") + ".data") is not None:
        return "in no snapshot"
    return "not a file of topics"
