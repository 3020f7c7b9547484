"""One moment of several shards: no shard is seen later than another, however they write while they are looked at.

The logs are written by hand, so that every frame comes exactly when it can do harm: between the looks at two shards.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from topics.backup import moment as moments
from topics.backup.create import create
from topics.backup.repository import Repository
from topics.backup.restore import restore
from topics.datadir.view.folder import Folder
from topics.datadir.view.shard import Shard
from topics.storage.columns import pack
from topics.storage.config import TopicConfig, owner_of_name, topic_id
from topics.storage.control import TopicFrame
from topics.storage.format import FrameType
from topics.storage.frames import WalHeader, encode_frame
from topics.storage.manifest import MANIFEST_NAME, Manifest, encode_manifest
from topics.storage.paths import numbered_name, shard_dir

SHARDS = 3
START_MS = 1_700_000_000_000
SALT = 7
NAMES = [next(name for n in range(99) if owner_of_name(name := f"t{n}", SHARDS) == shard) for shard in range(SHARDS)]


class Logs:
    """A folder of shards with one topic each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._paths = [Path(shard_dir(str(folder), shard), numbered_name(1, 1, "wal")) for shard in range(SHARDS)]
        self._lsns = [0] * SHARDS
        self._seqs = [0] * SHARDS
        for shard, path in enumerate(self._paths):
            path.parent.mkdir(parents=True)
            path.write_bytes(WalHeader(shard, 1, 1, SALT, bytes(16)).encode())
            body = msgspec.msgpack.encode(TopicFrame(NAMES[shard], TopicConfig(), START_MS, 100))
            self._add(shard, type=FrameType.TOPIC, ts=START_MS, body=body)
        manifest = Manifest(format=1, layout=1, shards=SHARDS)
        (folder / MANIFEST_NAME).write_bytes(encode_manifest(manifest))

    def append(self, shard: int, data: bytes, *, at_ms: int) -> None:
        self._seqs[shard] += 1
        body = pack([data])
        self._add(shard, type=FrameType.APPEND, ts=at_ms, first_seq=self._seqs[shard], count=1, body=body)

    def _add(self, shard: int, **fields: Any) -> None:
        self._lsns[shard] += 1
        lsn = self._lsns[shard]
        frame = encode_frame(salt=SALT, topic_id=topic_id(NAMES[shard], 1), lsn=lsn, synced=0, **fields)
        with open(self._paths[shard], "ab") as file:
            file.write(frame)


def contents(folder: Path) -> list[list[bytes]]:
    """By shard."""
    seen = Folder(str(folder))
    topics = [next(topic for topic in seen.topics if topic.name == name) for name in NAMES]
    return [[data for batch in topic.batches for data in seen.columns(batch).data()] for topic in topics]


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path / "data")


def backed_up(logs: Logs, base: Path) -> list[list[bytes]]:
    create(str(logs.folder), Repository.made(str(base / "repository")), "one")
    restore(Repository(str(base / "repository")), "one", str(base / "back"))
    return contents(base / "back")


def test_no_effect_without_its_cause(logs: Logs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shard passes something on to the next one, right behind the back of whoever looks from shard to shard."""
    clock = [START_MS]
    look = Shard.look

    def passing_on(shard: Shard) -> None:
        look(shard)
        before = shard.number
        if before + 1 < SHARDS:
            clock[0] += 1
            name = b'"%d at %d"' % (before, clock[0])
            logs.append(before, name, at_ms=clock[0])
            clock[0] += 1
            logs.append(before + 1, name, at_ms=clock[0])

    monkeypatch.setattr(Shard, "look", passing_on)
    monkeypatch.setattr(moments, "time", type("Time", (), {"time_ns": staticmethod(lambda: clock[0] * 1_000_000)}))
    found = backed_up(logs, tmp_path)
    assert any(found[1:])
    for before in range(SHARDS - 1):
        passed_on = [name for name in found[before + 1] if name.startswith(b'"%d ' % before)]
        assert set(passed_on) <= set(found[before])


def test_what_was_there_before_it_began_is_in_it(logs: Logs, tmp_path: Path) -> None:
    for shard in range(SHARDS):
        logs.append(shard, b"%d" % shard, at_ms=START_MS)
    assert backed_up(logs, tmp_path) == [[b"0"], [b"1"], [b"2"]]


def test_a_clock_ahead_of_ours_costs_nothing_that_was_there(logs: Logs, tmp_path: Path) -> None:
    for shard in range(SHARDS):
        logs.append(shard, b"%d" % shard, at_ms=START_MS * 2)
    assert backed_up(logs, tmp_path) == [[b"0"], [b"1"], [b"2"]]


def test_files_that_were_held_open_are_closed(logs: Logs) -> None:
    before = os.listdir("/proc/self/fd")
    with moments.take(str(logs.folder)) as moment:
        assert len(moment.logs) == SHARDS
        assert len(os.listdir("/proc/self/fd")) == len(before) + SHARDS
    assert len(os.listdir("/proc/self/fd")) == len(before)
