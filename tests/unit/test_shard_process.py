"""The shard process without a process around it: how it starts, moves to another shard count, and ends."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import trio
from model import BOOT, Record, Shard, Stored, batch_of, error_of
from pipeshard import PipeShard
from test_engine_faults import FaultyDisk

from topics import limits
from topics.actors import messages
from topics.actors.link import Link
from topics.actors.messages import Op
from topics.errors import DiskFull
from topics.settings import Settings
from topics.shm import layout
from topics.shm.counters import ROW_WORDS, Word
from topics.shm.ring import format_link
from topics.storage.config import TopicConfig
from topics.storage.paths import shard_dir
from topics.storage.snapshot import ShardState, decode_snapshot
from topics.walshard import process


class Refused(Exception):
    """The role called fail()."""


class Row:
    def __init__(self) -> None:
        self.words = [0] * ROW_WORDS

    def __getitem__(self, word: int) -> int:
        return self.words[word]


class Life:
    """One life of a shard process on a folder."""

    def __init__(
        self,
        folder: Path,
        disk: FaultyDisk,
        *,
        index: int = 0,
        shards: int = 1,
        layout: int = 1,
        old: tuple[int, int] | None = None,
        links: dict[str, Link] | None = None,
        **settings: Any,
    ) -> None:
        self.logged: list[str] = []

        def log(event: str, **fields: object) -> None:
            self.logged.append(f"{event} {fields}")

        def fail(reason: str) -> NoReturn:
            raise Refused(reason)

        rows = {f"shard-{number}": Row() for number in range(shards)}
        row = rows[f"shard-{index}"]
        row.words[Word.GENERATION] = 1
        self.context: Any = SimpleNamespace(
            settings=Settings(data_dir=os.fspath(folder), **settings),
            index=index,
            shards=shards,
            layout=layout,
            old_layout=None if old is None else old[0],
            old_shards=None if old is None else old[1],
            cold=None,
            links=links or {},
            row=row,
            board=SimpleNamespace(row=rows.__getitem__, rows=lambda: list(rows.values())),
            recovering=lambda permille: None,
            fail=fail,
            log=SimpleNamespace(debugging=False, info=log, warning=log, error=log),
        )
        self.disk = disk

    def begin(self) -> process.Shard:
        self.context.bell = SimpleNamespace(ring_always=lambda: None)
        self.shard = process.Shard(self.context)
        self.shard._disk = self.disk
        self.shard.recover()
        return self.shard

    def end(self) -> None:
        """As a kill would."""
        shard = getattr(self, "shard", None)
        for part in ("_mover", "_syncer"):
            if hasattr(shard, part):
                getattr(shard, part).close()
        self.disk.close_all()


@pytest.fixture(autouse=True)
def _same_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "boot_id", lambda: BOOT)


@pytest.fixture
def disk() -> Iterator[FaultyDisk]:
    disk = FaultyDisk()
    yield disk
    disk.close_all()


def records(count: int) -> list[Record]:
    return [Record(b"%d" % number) for number in range(count)]


def kept(folder: Path, names: list[str]) -> dict[str, list[Stored]]:
    shard = Shard(folder, segment_max_events=10)
    found = {name: shard.everything(name) for name in names}
    shard.crash()
    return found


# --- another number of shards ------------------------------------------------------------------------

NAMES = [f"t{number}" for number in range(6)]


@pytest.fixture
def old(tmp_path: Path) -> dict[str, list[Stored]]:
    """What one shard of layout 1 left: some in segments, some in its log."""
    shard = Shard(tmp_path, segment_max_events=10)
    for name in NAMES:
        shard.append(name, records(7), config=TopicConfig(durability="fsync", durable=True))
    shard.flush(NAMES[0])
    shard.checkpoint()
    for name in NAMES:
        shard.append(name, records(25))
    found = {name: shard.everything(name) for name in NAMES}
    shard.crash()
    return found


def move(tmp_path: Path, disk: FaultyDisk, index: int) -> Life:
    return Life(tmp_path, disk, index=index, shards=2, layout=2, old=(1, 1), segment_max_events=10)


@pytest.mark.parametrize("call", ["create", "write", "write_whole"])
@pytest.mark.parametrize("skip", [0, 1])
def test_a_move_without_space_is_given_up_and_the_old_layout_is_whole(
    tmp_path: Path, disk: FaultyDisk, old: dict[str, list[Stored]], call: str, skip: int
) -> None:
    """Whichever flush it is: the shard may not say that it is ready."""
    life = move(tmp_path, disk, 0)
    left = skip + (call == "write") + (call == "create")  # after the log's own

    def full(now: str) -> Exception | None:
        nonlocal left
        left -= now == call
        return DiskFull("no space") if now == call and left < 0 else None

    disk.when = full
    with pytest.raises(DiskFull):
        life.begin()
    life.end()
    assert kept(tmp_path, NAMES) == old
    disk.well()
    for index in (0, 1):
        again = move(tmp_path, disk, index)
        moved = again.begin()._engine.topics
        assert {name: moved[name].count for name in moved} == {name: len(old[name]) for name in moved}
        again.end()


def test_a_move_without_a_snapshot_is_given_up_too(
    tmp_path: Path, disk: FaultyDisk, old: dict[str, list[Stored]]
) -> None:
    life = move(tmp_path, disk, 1)
    disk.when = lambda call: (
        DiskFull("no space") if call == "write_whole" and not life.shard._engine.wal.older else None
    )
    with pytest.raises(DiskFull, match="snapshot"):
        life.begin()
    life.end()
    assert kept(tmp_path, NAMES) == old


def test_a_move_without_space_says_so_and_is_not_tried_again(
    tmp_path: Path, disk: FaultyDisk, old: dict[str, list[Stored]], monkeypatch: pytest.MonkeyPatch
) -> None:
    interval = sys.getswitchinterval()
    life = move(tmp_path, disk, 0)
    disk.when = lambda call: DiskFull("no space") if call == "write_whole" else None
    monkeypatch.setattr(process, "Disk", lambda: disk)
    try:
        with pytest.raises(Refused, match="no space"):
            trio.run(process.run, life.context)
    finally:
        sys.setswitchinterval(interval)
    assert any("shard count" in line for line in life.logged)


def test_files_of_the_old_layout_stay_until_the_new_one_counts(
    tmp_path: Path, disk: FaultyDisk, old: dict[str, list[Stored]]
) -> None:
    """A shard that has done its part waits for the others: what goes meanwhile may be needed to go back."""
    for index in (0, 1):
        life = move(tmp_path, disk, index)
        shard = life.begin()
        for topic in shard._engine.topics.values():
            topic.delete_before(topic.head_seq + 1)  # what is too old goes like this, and leaves nothing in the log
        shard._mover.checkpoint()
        shard._mover.wait()
        life.end()
    assert kept(tmp_path, NAMES) == old


def test_and_go_when_it_does(tmp_path: Path, disk: FaultyDisk, old: dict[str, list[Stored]]) -> None:
    life = move(tmp_path, disk, 0)
    shard = life.begin()
    shard._layout_committed()
    assert all(name.startswith("00000002-") for name in os.listdir(shard_dir(os.fspath(tmp_path), 0)))
    topic = next(iter(shard._engine.topics.values()))
    segments = [segment.path for segment in topic.segments]
    topic.delete_before(topic.head_seq + 1)
    shard._mover.checkpoint()
    shard._mover.wait()
    life.end()
    assert segments
    assert not any(os.path.exists(path) for path in segments)


# --- a start on a full disk --------------------------------------------------------------------------


class LittleSpace(FaultyDisk):
    """New files may be small ones."""

    def create(self, path: str, *, size: int = 0) -> int:
        if size > limits.WAL_RESERVE_BYTES // 2:
            raise DiskFull("no space")
        return super().create(path, size=size)


def test_a_start_without_space_for_a_log_file_serves_what_it_can(tmp_path: Path, disk: FaultyDisk) -> None:
    shard = Shard(tmp_path, disk=disk)
    shard.append("t", records(30))
    shard.append("e", records(3), config=TopicConfig(durability="ephemeral"))
    for _ in range(3):
        shard.restart(LittleSpace())
        stored = shard.everything("t")
        assert error_of(lambda: shard.append("t", records(1))).code == "storage_full"
        assert shard.engine.commit.read_only
        assert error_of(lambda: shard.put("new", TopicConfig())).code == "storage_full"
        assert shard.delete("t", before_seq=stored[0].seq + 5).deleted == 5
        assert shard.everything("t") == stored[5:]
    assert len(stored) == 20
    shard.disk.create = FaultyDisk.create.__get__(shard.disk)  # type: ignore[method-assign]
    shard.append("t", records(2))
    assert not shard.engine.commit.read_only
    shard.restart()
    assert [each.seq for each in shard.everything("t")] == list(range(16, 33))


def test_what_nothing_names_goes_before_the_log_asks_for_space(tmp_path: Path, disk: FaultyDisk) -> None:
    shard = Shard(tmp_path, disk=disk)
    shard.append("t", records(30))
    shard.crash()
    unfinished = tmp_path / "topics" / f"{shard.topic('t').id:016x}" / "00000000000000000001.data"
    unfinished.parent.mkdir(parents=True)
    unfinished.write_bytes(b"x" * 1_000)
    stale = Path(shard_dir(os.fspath(tmp_path), 0)) / "00000007-000000000001.wal"
    stale.write_bytes(b"x" * 1_000)
    new = FaultyDisk()
    new.when = lambda call: (
        DiskFull("no space") if call == "create" and (unfinished.exists() or stale.exists()) else None
    )
    life = Life(tmp_path, new)
    wal = life.begin()._engine.wal
    life.end()
    assert wal.current.size == life.context.settings.wal_file_bytes


# --- the end -----------------------------------------------------------------------------------------


class Bell:
    def ring(self) -> None: ...


class Peer:
    """The other side of the shard's only link: a gateway and a router in one."""

    def __init__(self) -> None:
        view = memoryview(bytearray(layout.link_bytes(64 * 1024)))
        format_link(view, generation=1, ring_bytes=64 * 1024)
        bell: Any = Bell()
        self.link = Link("shard-0", view, side=0, generation=1, bell=bell)
        self.links = {"gateway-0": Link("gateway-0", view, side=1, generation=1, bell=bell)}
        self.answers: dict[int, Any] = {}
        self._correlations = count(1)

    def send(self, op: Op, head: Any, body: bytes = b"") -> int:
        correlation = next(self._correlations)
        self.link.writer.send_always(messages.pack(op, correlation, head, body))
        self.link.flush()
        return correlation

    def append(self, topic: str, how_many: int, config: TopicConfig | None = None) -> int:
        body, size = batch_of(records(how_many))
        return self.send(Op.APPEND, messages.Append(topic, how_many, size, None, config), body)

    def forward(self, shard: process.Shard, source: str, dest: str, *, at: int, how_many: int) -> int:
        body, size = batch_of(records(how_many))
        topics = shard._engine.topics
        head = messages.Forward(
            topic=dest,
            topic_id=topics[dest].id,
            source_id=topics[source].id,
            from_seq=at,
            to_seq=at + how_many,
            count=how_many,
            size=size,
            lost=0,
            complete=True,
            level=True,
            counts={"r": how_many},
            sources=[(at + 1, how_many)],
            hops=None,
        )
        return self.send(Op.FORWARD, head, body)

    def hear(self) -> None:
        for message in self.link.drain():
            self.answers[messages.unpack(message).correlation] = messages.decode_answer(message)[0]

    def wait(self, shard: process.Shard, correlation: int) -> Any:
        until = time.monotonic() + 30
        while correlation not in self.answers:
            assert time.monotonic() < until
            shard._round(time.monotonic_ns())
            shard._mover.step(quiet=False)
            self.hear()
        return self.answers[correlation]


FSYNC = TopicConfig(durability="fsync", durable=True)


def with_copies(tmp_path: Path, disk: FaultyDisk, peer: Peer) -> Life:
    """A shard whose topic d holds ten copies of s in memory."""
    life = Life(tmp_path, disk, links=peer.links)
    shard = life.begin()
    for name in ("s", "d"):
        peer.wait(shard, peer.send(Op.PUT_TOPIC, messages.PutTopic(name, FSYNC, None)))
    peer.wait(shard, peer.append("s", 10))
    topics = shard._engine.topics
    opening = messages.OpenPipe("d", topics["d"].id, topics["s"].id, 0, ["r"], False)
    peer.wait(shard, peer.send(Op.OPEN_PIPE, opening))
    peer.wait(shard, peer.forward(shard, "s", "d", at=0, how_many=10))
    assert topics["d"].has_copies
    return life


def finish(life: Life) -> None:
    done = threading.Thread(target=life.shard._finish, daemon=True)
    done.start()
    done.join(20)
    ended = not done.is_alive()
    life.disk.well()  # or it would go on for ever
    done.join(20)
    assert ended, "it does not end"


def snapshot(folder: Path) -> ShardState:
    home = shard_dir(os.fspath(folder), 0)
    newest = max(name for name in os.listdir(home) if name.endswith(".snap"))
    return decode_snapshot(Path(home, newest).read_bytes(), path=newest)


@pytest.mark.parametrize("full", [True, False])
def test_an_end_without_space_for_copies_answers_everybody_and_is_not_clean(
    tmp_path: Path, disk: FaultyDisk, full: bool
) -> None:
    peer = Peer()
    life = with_copies(tmp_path, disk, peer)
    if full:
        disk.when = lambda call: DiskFull("no space") if call == "create" else None
    waiting = peer.append("s", 5)
    finish(life)
    peer.hear()
    assert (peer.answers[waiting].first_seq, peer.answers[waiting].records) == (11, 5)
    assert snapshot(tmp_path).clean is not full
    disk.close_all()
    again = PipeShard(tmp_path)
    assert [each.seq for each in again.everything("s")] == list(range(1, 16))
    assert again.topic("d").rebuilding is full, "or the copies are lost"
    if not full:
        assert [each.seq for each in again.everything("d")] == list(range(1, 11))
    again.crash()


def test_copies_that_a_sync_makes_readable_are_saved_at_the_end_too(tmp_path: Path, disk: FaultyDisk) -> None:
    peer = Peer()
    life = with_copies(tmp_path, disk, peer)
    before = life.shard._engine.topics["d"].head_seq
    waits = peer.append("d", 1)  # and what is copied behind it waits for its sync
    copied = peer.forward(life.shard, "s", "d", at=10, how_many=5)
    finish(life)
    peer.hear()
    assert waits in peer.answers
    assert copied in peer.answers
    assert snapshot(tmp_path).clean
    disk.close_all()
    again = PipeShard(tmp_path)
    assert [each.seq for each in again.everything("d")] == list(range(1, before + 7))
    again.crash()
