"""The snapshots and logs of some shards, divided among another number of them. Pure.

Every topic and every frame goes to the shard that the topic's id names under the new number; segments are named by
topic and stay as they are. A new log begins with the frames that the old snapshots covered, so that the new snapshot
can say of exactly those that it knows them, and goes on with the rest; among the frames of a topic the order stays. A
shard that gets something of one that was not stopped in order counts as not stopped in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from topics.storage.config import owner_of_id
from topics.storage.control import decode_copies
from topics.storage.format import FILE_HEADER_BYTES, FrameType
from topics.storage.frames import WHOLE, Frame, WalHeader, encode_frame
from topics.storage.paths import numbered_name, shard_dir
from topics.storage.snapshot import ShardState, decode_topic, encode_snapshot

LOG_BYTES = 64 << 20  # of a file; a frame that is larger has one for itself
SNAPSHOT_NO = 1


class Old(msgspec.Struct, frozen=True, kw_only=True):
    """What one of the old shards left."""

    state: ShardState | None
    headers: list[WalHeader]  # of its log files
    frames: Callable[[], Iterator[Frame]]  # of all of them, in order

    @property
    def covered(self) -> int:
        return self.state.lsn if self.state is not None else 0

    @property
    def clean(self) -> bool:
        if self.state is None:
            return not any(True for _ in self.frames())
        return self.state.clean and all(header.file_no <= self.state.file_no for header in self.headers)


class Piece(msgspec.Struct, frozen=True):
    """Bytes that follow in a file of the new layout."""

    file: str
    data: bytes


def divide(olds: list[Old], *, shards: int, layout: int, salt: Callable[[], int]) -> Iterator[Piece]:
    """The files of all new shards; pieces of one file follow each other, those of others may come between."""
    boots = [header.boot_id for old in olds for header in old.headers]
    boot = next((boot for boot in boots if boot != WHOLE), WHOLE)
    logs = [_Log(shard, layout=layout, boot=boot, salt=salt) for shard in range(shards)]
    for old in olds:
        for frame in old.frames():
            if frame.lsn <= old.covered:
                for log in _logs_of(frame, logs):
                    yield from log.add(frame)
    covered = [log.lsn for log in logs]
    for old in olds:
        for frame in old.frames():
            if frame.lsn > old.covered:
                for log in _logs_of(frame, logs):
                    yield from log.add(frame)
    topics: list[list[msgspec.Raw]] = [[] for _ in range(shards)]
    for state in (old.state for old in olds if old.state is not None):
        for raw in state.topics:
            topics[owner_of_id(decode_topic(raw).id, shards)].append(raw)
    clean = all(old.clean for old in olds)
    clock_ms = max((old.state.clock_ms for old in olds if old.state is not None), default=0)
    for log in logs:
        if log.lsn or topics[log.shard]:
            state = ShardState(log.shard, layout, covered[log.shard], clock_ms, clean, log.file_no, topics[log.shard])
            name = numbered_name(layout, SNAPSHOT_NO, "snap")
            yield Piece(f"{shard_dir('', log.shard)}/{name}", encode_snapshot(state))


def _logs_of(frame: Frame, logs: list[_Log]) -> list[_Log]:
    """Who gets a frame. One with the copies of several topics goes to all of them: each takes what is its own."""
    return logs if decode_copies(frame) else [logs[owner_of_id(frame.topic_id, len(logs))]]


class _Log:
    """The log of a new shard."""

    def __init__(self, shard: int, *, layout: int, boot: bytes, salt: Callable[[], int]) -> None:
        self.shard = shard
        self.lsn = 0
        self.file_no = 0
        self._layout = layout
        self._boot = boot
        self._draw = salt
        self._salt = 0
        self._room = 0
        self._file = ""

    def add(self, frame: Frame) -> Iterator[Piece]:
        if frame.length > self._room:
            self.file_no += 1
            self._salt = self._draw()
            self._room = LOG_BYTES - FILE_HEADER_BYTES
            self._file = f"{shard_dir('', self.shard)}/{numbered_name(self._layout, self.file_no, 'wal')}"
            header = WalHeader(self.shard, self._layout, self.file_no, self._salt, self._boot)
            yield Piece(self._file, header.encode())
        self.lsn += 1
        self._room -= frame.length
        data = encode_frame(
            salt=self._salt,
            type=FrameType(frame.type),
            topic_id=frame.topic_id,
            first_seq=frame.first_seq,
            count=frame.count,
            ts=frame.ts,
            lsn=self.lsn,
            synced=self.lsn - 1,
            body=frame.body,
            key=frame.key,
            flags=frame.flags,
        )
        yield Piece(self._file, data)
