"""What a shard's tests stand on: a naive topic that is obviously right, and a real shard stepped by hand.

NaiveTopic keeps a list of records and does everything by walking it. Shard is the real engine, log, syncer, mover
and recovery on a folder, without a process around them: a list takes the answers, the wall clock is a number, and
crash() leaves the files as kill -9 would.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, ClassVar

import effort
import hypothesis
import msgspec
from figures import RECOVERIES

from topics.actors import messages
from topics.actors.clock import Clock
from topics.actors.messages import Op
from topics.errors import ApiError, ColdTierGone
from topics.settings import Settings
from topics.storage import columns
from topics.storage.config import TopicConfig
from topics.storage.format import RECORD_OVERHEAD
from topics.storage.manifest import COLD_NOTE
from topics.storage.paths import shard_dir
from topics.walshard.engine import Engine
from topics.walshard.log.disk import Disk
from topics.walshard.log.recovery import Recovered, Recovery
from topics.walshard.log.syncer import Syncer
from topics.walshard.log.wal import Wal
from topics.walshard.segments.checkpointer import Mover
from topics.walshard.segments.orphans import remove_leftovers
from topics.walshard.segments.segments import OpenFiles
from topics.walshard.tiering.relocator import Relocator
from topics.walshard.tiering.tier import ColdTier
from topics.walshard.topic.topic import Topic

EXHAUSTIVE, GATE, SEED = effort.EXHAUSTIVE, effort.GATE, effort.SEED
BOOT = bytes(range(16))


def examples(usual: int, **more: Any) -> hypothesis.settings:
    """The examples that conftest.py's profile draws, many more of them when asked for.

    stateful examples are shrunk only then: it takes minutes."""
    if "stateful_step_count" in more and not EXHAUSTIVE:
        more["phases"] = [hypothesis.Phase.generate]
    return hypothesis.settings(
        max_examples=usual * 20 if EXHAUSTIVE else _of(usual),
        suppress_health_check=list(hypothesis.HealthCheck),
        **more,
    )


def seeds(usual: int, many: int) -> range:
    """For walks that grow from a number: from 0 in every usual run, from TOPICS_TEST_SEED where it is given."""
    first = int(SEED) if SEED and SEED != "random" else 0
    return range(first, first + (many if EXHAUSTIVE else _of(usual)))


def _of(usual: int) -> int:
    return usual // 2 if GATE and usual > 10 else usual


# --- the naive topic ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """A record as a client sends it."""

    data: bytes
    tag: str | None = None
    node: str | None = None
    meta: bytes | None = None

    @property
    def size(self) -> int:
        return len(self.data) + len(self.meta or b"") + RECORD_OVERHEAD


@dataclass(frozen=True)
class Stored:
    """A record as a reader gets it."""

    seq: int
    ts: int
    record: Record
    logged: bool = True  # False: written while the topic was ephemeral


@dataclass
class Lost:
    """A record that went against its readers' will, and what may be named as the reason."""

    ts: int
    reasons: set[str]


@dataclass(frozen=True)
class Kept:
    """What an idempotency key stands for."""

    first: int
    count: int
    ts: int


@dataclass
class NaiveTopic:
    config: TopicConfig
    head: int = 0
    evict_floor: int = 1
    live: list[Stored] = field(default_factory=list)
    lost: dict[int, Lost] = field(default_factory=dict)
    keys: dict[str, Kept] = field(default_factory=dict)
    last_ts: int = 0
    pending: list[list[Stored]] = field(default_factory=list)  # written, not readable yet
    was_ephemeral: bool = False
    gone_with_process: set[int] = field(default_factory=set)  # seqs of resident records that a crash took

    def __post_init__(self) -> None:
        self.was_ephemeral = self.config.durability == "ephemeral"

    # --- what is true now ---

    @property
    def count(self) -> int:
        return len(self.live)

    @property
    def bytes(self) -> int:
        return sum(stored.record.size for stored in self.live)

    @property
    def earliest(self) -> int:
        return self.live[0].seq if self.live else self.head + 1

    @property
    def next_seq(self) -> int:
        return (self.pending[-1][-1].seq if self.pending else self.head) + 1

    # --- writing ---

    def overflows(self, waiting: list[Record]) -> bool:
        """Whether the topic with these records too would be beyond its caps."""
        many = self.count + len(waiting)
        size = self.bytes + sum(record.size for record in waiting)
        return bool(
            (self.config.cap_records and many > self.config.cap_records)
            or (self.config.cap_bytes and size > self.config.cap_bytes)
        )

    @property
    def waiting(self) -> list[Record]:
        return [stored.record for batch in self.pending for stored in batch]

    def never_fits(self, records: list[Record]) -> bool:
        config, size = self.config, sum(record.size for record in records)
        return bool(
            (config.cap_records and len(records) > config.cap_records) or (config.cap_bytes and size > config.cap_bytes)
        )

    def write(self, records: list[Record], *, now: int, key: str | None = None) -> list[Stored]:
        """Give out seqs; publish() makes them readable."""
        ts = max(now, self.last_ts)
        logged = self.config.durability != "ephemeral"
        first = self.next_seq
        batch = [Stored(first + at, ts, record, logged) for at, record in enumerate(records)]
        self.last_ts = ts
        if key is not None:
            self.keys[key] = Kept(first, len(batch), ts)
        self.pending.append(batch)
        return batch

    def publish(self) -> None:
        for batch in self.pending:
            self.live.extend(batch)
            self.head = batch[-1].seq
            self.enforce_caps(now=batch[-1].ts)
        self.pending = []

    def remembered(self, key: str, *, now: int) -> Kept | None:
        found = self.keys.get(key)
        return found if found is not None and now - found.ts <= self.config.idempotency_window_ms else None

    # --- losing and deleting ---

    def _lose(self, stored: Stored, reasons: set[str]) -> None:
        self.lost[stored.seq] = Lost(stored.ts, reasons)
        self.evict_floor = stored.seq + 1

    def _expired(self, stored: Stored | Lost, now: int) -> bool:
        return bool(self.config.ttl_ms) and now - stored.ts > self.config.ttl_ms

    def expire(self, *, now: int) -> None:
        while self.live and self._expired(self.live[0], now):
            self._lose(self.live.pop(0), {"ttl"})

    def enforce_caps(self, *, now: int) -> None:
        """Whether what goes had expired by then is not the evictor's business, so either reason may be named."""
        while self.config.discard == "old" and self.live and self.overflows([]):
            first = self.live.pop(0)
            self._lose(first, {"cap", "ttl"} if self._expired(first, now) else {"cap"})

    def configure(self, config: TopicConfig, *, now: int) -> None:
        self.expire(now=now)
        self.config = config
        self.was_ephemeral |= config.durability == "ephemeral"
        self.expire(now=now)
        self.enforce_caps(now=now)

    def delete(self, matches: Callable[[Stored], bool]) -> int:
        left = [stored for stored in self.live if not matches(stored)]
        deleted = self.count - len(left)
        self.live = left
        return deleted

    # --- reading ---

    def gap(self, from_seq: int) -> tuple[int, int, set[str]] | None:
        """(gap_from, gap_to, acceptable reasons) of the tombstone that a reader must get."""
        if from_seq > self.head:
            return 1, self.head, {"recreated"}
        if from_seq + 1 >= self.evict_floor:
            return None
        causes = [lost.reasons for seq, lost in self.lost.items() if seq > from_seq]
        may = set().union(*causes) if causes else {"cap", "ttl"}
        sure = {next(iter(reasons)) for reasons in causes if len(reasons) == 1}
        if sure == {"cap", "ttl"}:
            reasons = {"mixed"}
        elif sure:
            reasons = sure if may == sure else sure | {"mixed"}
        else:
            reasons = may | {"mixed"}
        return from_seq + 1, self.earliest - 1, reasons

    def after(self, from_seq: int) -> list[Stored]:
        if from_seq > self.head:
            from_seq = 0
        return [stored for stored in self.live if stored.seq > from_seq]

    # --- a crash of the process ---

    def survive_crash(self, *, now: int) -> None:
        """What was written is there, readable or not yet; what was resident only is not. Which of two good reasons a
        loss had may be forgotten."""
        self.publish()
        self.gone_with_process |= {stored.seq for stored in self.live if not stored.logged}
        self.live = [stored for stored in self.live if stored.logged]
        self.keys = {} if self.was_ephemeral else self.keys
        for lost in self.lost.values():
            if self._expired(lost, now):
                lost.reasons.add("ttl")


# --- the real shard ----------------------------------------------------------------------------------


class QuickDisk(Disk):
    """Promises what it does not keep and reserves no space: only a power cut or a full disk could tell. It knows its
    descriptors, so that those of a shard that refused to open are closed as the end of its process would."""

    _fds: ClassVar[dict[int, dict[int, int]]] = {}  # by disk: descriptor -> inode

    def _opened(self, fd: int) -> int:
        QuickDisk._fds.setdefault(id(self), {})[fd] = os.fstat(fd).st_ino
        return fd

    def open(self, path: str, *, write: bool = False) -> int:
        return self._opened(super().open(path, write=write))

    def create(self, path: str, *, size: int = 0) -> int:
        fd = self._opened(super().create(path))
        os.ftruncate(fd, size)
        return fd

    def cut(self, fd: int, end: int, size: int) -> None:
        os.ftruncate(fd, end)
        os.ftruncate(fd, size)

    def close_all(self) -> None:
        for fd, inode in QuickDisk._fds.pop(id(self), {}).items():
            try:
                if os.fstat(fd).st_ino == inode:
                    os.close(fd)
            except OSError:
                pass  # closed already

    def sync(self, fd: int) -> None:
        pass

    def sync_dir(self, path: str) -> None:
        pass

    def write_whole(self, path: str, data: bytes) -> None:
        with open(path + ".tmp", "wb") as file:
            file.write(data)
        os.replace(path + ".tmp", path)

    def truncate(self, path: str, size: int) -> None:
        os.truncate(path, size)


class Wall:
    """A clock moved by hand: what the machine says the time is, and the time that really passes."""

    def __init__(self) -> None:
        self.wall_ms = 1_700_000_000_000
        self.monotonic_ms = 5_000_000

    def pass_ms(self, ms: int) -> None:
        self.wall_ms += ms
        self.monotonic_ms += ms

    def set_back_ms(self, ms: int) -> None:
        self.wall_ms -= ms

    def clock(self) -> Clock:
        return Clock(wall_ns=lambda: self.wall_ms * 1_000_000, monotonic_ms=lambda: self.monotonic_ms)


class Answers:
    """Stands for a link's writer."""

    def __init__(self) -> None:
        self.messages: dict[int, bytes] = {}

    def send_always(self, message: bytes) -> None:
        correlation = messages.unpack(message).correlation
        assert correlation not in self.messages, "a request was answered twice"
        self.messages[correlation] = message


class Gap(msgspec.Struct):
    gap_from: int
    gap_to: int
    reason: str
    missed_estimate: int
    earliest_seq: int
    head_seq: int


class _Shown(msgspec.Struct):
    seq: int = msgspec.field(name="$seq")
    ts: int = msgspec.field(name="$ts")
    data: msgspec.Raw
    node: str | None = msgspec.field(name="$node", default=None)
    tag: str | None = msgspec.field(name="$tag", default=None)
    meta: msgspec.Raw = msgspec.Raw()

    def stored(self) -> Stored:
        return Stored(self.seq, self.ts, Record(bytes(self.data), self.tag, self.node, bytes(self.meta) or None))


class Page(msgspec.Struct):
    topic: str
    records: list[_Shown]
    next_from_seq: int
    head_seq: int
    earliest_seq: int
    caught_up: bool
    tombstone: Gap | None
    lag: int
    scanned: int = 0

    @property
    def stored(self) -> list[Stored]:
        return [shown.stored() for shown in self.records]


def shown(stored: list[Stored]) -> list[Stored]:
    """Naive records as a reader can tell them apart."""
    return [one if one.logged else replace(one, logged=True) for one in stored]


def batch_of(records: list[Record]) -> tuple[bytes, int]:
    """What the gateway makes of records: the batch body and the bytes they count for."""
    tags = [record.tag for record in records]
    nodes = [record.node for record in records]
    metas = [None if record.meta is None else msgspec.Raw(record.meta) for record in records]
    body = columns.pack(
        [record.data for record in records],
        tags=tags if any(tag is not None for tag in tags) else None,
        nodes=nodes if any(node is not None for node in nodes) else None,
        metas=metas if any(meta is not None for meta in metas) else None,
    )
    return body, sum(record.size for record in records)


COLD_ID = "c01d"


def marked(cold: str) -> ColdTier:
    """A cold tier, with the marker that a start leaves there."""
    note = os.path.join(cold, COLD_NOTE)
    if not os.path.exists(note):
        os.makedirs(cold, exist_ok=True)
        with open(note, "w") as file:
            file.write(f'{{"id":"{COLD_ID}"}}')
    return ColdTier(cold, COLD_ID)


class Shard:
    """One shard on a folder. Requests wait for their answer unless they are sent with send()."""

    def __init__(
        self,
        folder: os.PathLike[str] | str,
        *,
        wall: Wall | None = None,
        disk: QuickDisk | None = None,
        cold: str | None = None,
        boot: bytes = BOOT,
        **settings: Any,
    ) -> None:
        self._close_those_of_other_tests()
        self.is_open = False
        self.disk = QuickDisk()
        self.settings = Settings(data_dir=os.fspath(folder), **settings)
        place = cold or self.settings.cold_dir
        self.cold = None if place is None else marked(place)  # segments are there, and go if the settings say so
        self.wall = wall or Wall()
        self.entropy = count(1)
        self.correlations = count(1)
        self._lives = 0
        self.open(disk, boot=boot)

    # --- life ---

    _alive: ClassVar[list[Shard]] = []

    def _close_those_of_other_tests(self) -> None:
        """Threads and descriptors of a test that just ended, well or badly, need not wait for its fixtures."""
        self._test = os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0]
        for shard in [shard for shard in Shard._alive if shard._test != self._test]:
            shard.crash()
            Shard._alive.remove(shard)
        Shard._alive.append(self)

    @classmethod
    def forget_all(cls) -> None:
        """Let go of every shard, also of those that did not open; for whoever makes thousands."""
        for shard in cls._alive:
            shard.crash()
        cls._alive.clear()

    def open(self, disk: QuickDisk | None = None, *, boot: bytes = BOOT) -> None:
        self.disk.close_all()
        self.disk = disk or QuickDisk()
        RECOVERIES.add(self._lives > 0)
        self._lives += 1
        self.clock = self.wall.clock()
        self.answers = Answers()
        folder = shard_dir(self.settings.data_dir, 0)
        self.disk.make_dir(folder)
        files = OpenFiles(self.disk)
        if self.cold is not None:
            self.cold = ColdTier(self.cold.path, COLD_ID)  # another process knows nothing of the disk yet
        self.recovered: Recovered = Recovery(
            settings=self.settings,
            disk=self.disk,
            files=files,
            clock=self.clock,
            shard=0,
            shards=1,
            boot=boot,
            progress=lambda permille: None,
            cold=self.cold,
        ).run(layout=1, old_shards=1)
        wal = Wal(
            self.disk,
            folder,
            shard=0,
            layout=1,
            boot_id=boot,
            file_bytes=self.settings.wal_file_bytes,
            next_lsn=self.recovered.next_lsn,
            next_file_no=self.recovered.next_file_no,
            recovered=self.recovered.wal_files,
        )
        self.syncer = Syncer(self.disk)
        self.engine = Engine(
            settings=self.settings,
            topics=self.recovered.topics,
            totals=self.recovered.totals,
            copies=self.recovered.copies,
            wal=wal,
            syncer=self.syncer,
            clock=self.clock,
            entropy=lambda: next(self.entropy),
        )
        # A round of pushes ends after some milliseconds: of the time that the test lets pass, not of the machine's.
        self.engine.tails._clock = lambda: self.wall.monotonic_ms * 1_000_000
        self.engine.dropped = self.recovered.dropped
        self.relocator: Relocator | None = None
        if self.cold is not None:
            self.relocator = Relocator(self.disk, tier=self.cold, settings=self.settings, now_ms=self.clock.now_ms)
            for topic in self.recovered.topics.values():
                self.relocator.consider(topic)
        self.mover = Mover(
            self.engine,
            self.disk,
            files,
            settings=self.settings,
            shard=0,
            layout=1,
            folder=folder,
            next_snapshot_no=self.recovered.next_snapshot_no,
            snapshot_lsn=self.recovered.snapshot_lsn,
            snapshot_due=self.recovered.snapshot_due,
            relocator=self.relocator,
        )
        for path in self.recovered.snapshots:
            self.mover.adopt_snapshot(path)
        remove_leftovers(self.recovered, self.settings.data_dir, cold=False, shard=0, shards=1, disk=self.disk)
        if self.cold is not None and self.relocator is not None:
            try:
                with self.cold.opened() as root:
                    remove_leftovers(self.recovered, root, cold=True, shard=0, shards=1, disk=self.disk)
            except ColdTierGone as error:
                self.relocator.trouble(error)
        self._files = files
        self.is_open = True

    def crash(self) -> None:
        """Let go of everything and leave the files as they are."""
        if self.is_open:
            self.is_open = False
            self.mover.close()
            self.syncer.close()
            self.engine.fetcher.close()
            self.engine.large.close()
            if self.relocator is not None:
                self.relocator.close()
        self.disk.close_all()

    def restart(self, disk: QuickDisk | None = None, *, boot: bytes = BOOT) -> None:
        self.crash()
        self.open(disk, boot=boot)

    def stop(self) -> None:
        """As the process stops: everything synced, a clean snapshot."""
        self.sync()
        self.mover.finish()
        self.crash()

    # --- rounds ---

    def send(self, op: Op, head: Any, body: bytes = b"") -> int:
        """Hand a request over without committing: the rest of the round is commit() and settle()."""
        correlation = next(self.correlations)
        self.engine.handle(messages.pack(op, correlation, head, body), self.answers)
        return correlation

    def settle(self) -> None:
        """Commit, and take in syncs until nobody waits for one."""
        self.engine.fetcher.wait()
        self.engine.commit.write()
        while self.syncer.busy:
            self.engine.commit.synced(self.syncer.wait())

    def sync(self) -> None:
        """What the disk class gets a moment later anyway."""
        self.settle()
        if self.engine.wal.written_lsn > self.engine.wal.synced_lsn:
            self.engine.commit.sync_now()
            self.settle()

    def be_quiet(self) -> None:
        """Long enough that the log gets a witness of what is synced, if it needs one."""
        self.sync()
        commit = self.engine.commit
        commit.bear_witness(self.clock.now_ms(), covered=self.mover.snapshot_lsn)
        self.wall.pass_ms(5_000)
        commit._witness_ms = 0
        commit.bear_witness(self.clock.now_ms(), covered=self.mover.snapshot_lsn)

    def answer(self, correlation: int) -> Any:
        return messages.decode_answer(self.answers.messages.pop(correlation))[0]

    def answered(self, correlation: int) -> bool:
        return correlation in self.answers.messages

    def call(self, op: Op, head: Any, body: bytes = b"") -> Any:
        correlation = self.send(op, head, body)
        self.settle()
        return self.answer(correlation)

    # --- requests ---

    def send_append(
        self,
        topic: str,
        records: list[Record],
        *,
        key: str | None = None,
        config: TopicConfig | None = None,
        create: bool | None = None,
        modest: bool = False,
    ) -> int:
        body, size = batch_of(records)
        head = messages.Append(topic, len(records), size, create, config, key, modest=modest)
        return self.send(Op.APPEND, head, body)

    def append(self, topic: str, records: list[Record], **more: Any) -> messages.Appended:
        correlation = self.send_append(topic, records, **more)
        self.settle()
        answer: messages.Appended = self.answer(correlation)
        return answer

    def send_large(
        self, topic: str, records: list[Record], *, key: str | None = None, config: TopicConfig | None = None
    ) -> int:
        """An append as a long message: its body is placed first, if it has more than PLACED_BYTES."""
        body, size = batch_of(records)
        correlation = next(self.correlations)
        head = messages.Append(topic, len(records), size, None, config, key)
        self.engine.large.take(bytearray(messages.pack(Op.APPEND, correlation, head, body)), self.answers)
        return correlation

    def append_large(self, topic: str, records: list[Record], **more: Any) -> messages.Appended:
        correlation = self.send_large(topic, records, **more)
        self.engine.large.wait()
        self.settle()
        answer: messages.Appended = self.answer(correlation)
        return answer

    def put(self, topic: str, config: TopicConfig) -> messages.TopicPut:
        answer: messages.TopicPut = self.call(Op.PUT_TOPIC, messages.PutTopic(topic, config, None))
        return answer

    def report(self, topic: str) -> messages.TopicReport:
        answer: messages.TopicReport = self.call(Op.GET_TOPIC, messages.GetTopic(topic, False))
        return answer

    def drop(self, topic: str, *, if_empty: bool = False) -> bool:
        answer: messages.TopicDropped = self.call(Op.DROP_TOPIC, messages.DropTopic(topic, if_empty))
        return answer.deleted

    def delete(
        self, topic: str, *, before_seq: int | None = None, tag: str | None = None, prefix: bool = False
    ) -> messages.RecordsDeleted:
        head = messages.DeleteRecords(topic, before_seq, tag, prefix)
        answer: messages.RecordsDeleted = self.call(Op.DELETE_RECORDS, head)
        return answer

    def diff(
        self,
        topic: str,
        from_seq: int = 0,
        *,
        limit: int = 1_000,
        max_bytes: int = 2**20,
        nodes: list[str] | None = None,
        include_tags: bool = True,
        include_meta: bool = True,
        wait_ms: int = 0,
    ) -> Page:
        head = messages.Diff(topic, from_seq, limit, max_bytes, nodes, include_tags, include_meta, wait_ms)
        correlation = self.send(Op.DIFF, head)
        self.engine.fetcher.wait()
        diffed, body = messages.decode_answer(self.answers.messages.pop(correlation))
        page = msgspec.json.decode(bytes(body) + b"}", type=Page)
        page.scanned = diffed.scanned
        return page

    def everything(self, topic: str, **more: Any) -> list[Stored]:
        """All that a reader gets who follows next_from_seq until it is caught up."""
        found: list[Stored] = []
        at = 0
        while True:
            page = self.diff(topic, at, **more)
            found.extend(page.stored)
            assert page.next_from_seq > at or page.caught_up, "a reader is stuck"
            at = page.next_from_seq
            if page.caught_up:
                return found

    def topic(self, name: str) -> Topic:
        return self.engine.topics[name]

    # --- maintenance ---

    def flush(self, name: str) -> None:
        self.mover.flush(self.topic(name))
        self.mover.wait()

    def checkpoint(self) -> None:
        self.mover.checkpoint()
        self.mover.wait()

    def copy_to_cold(self) -> None:
        """Every segment that is due, but the hot files still count."""
        assert self.relocator is not None
        for topic in self.engine.topics.values():
            self.relocator.consider(topic)
        while self.relocator.step():
            self.relocator.wait()

    def relocate(self) -> None:
        self.copy_to_cold()
        self.checkpoint()


def error_of(call: Callable[..., object]) -> ApiError:
    """The error that a call must end with."""
    try:
        call()
    except ApiError as error:
        return error
    raise AssertionError("it succeeded")
