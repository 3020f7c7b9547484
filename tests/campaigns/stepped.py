"""Random histories of a shard that is stepped by hand, on a tape, with what a client was told after each step.

A history grows from a seed: appends of all classes and sizes, alone and several in one round, with keys and tags;
deletes, configs, drops and recreations; flushes, snapshots, relocations to a cold tier; kills, clean stops and reboots.
It notes what a reader sees after each step: that is right by definition here, the models of tests/unit see to it, and a
restart in the middle must not change it. Half of the histories have routers (copies.py).
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from model import BOOT, QuickDisk, Record, Shard, Stored, marked, shown
from pipeshard import PipeShard

from topics import limits
from topics.errors import ApiError
from topics.storage.config import TopicConfig

from . import copies
from .tape import Call, Recorder, TapedDisk, recording

Operation = Literal[
    "append", "long", "large", "round", "delete", "delete_tag", "put", "drop",
    "flush", "checkpoint", "sync", "relocate", "kill", "stop", "reboot", "copy",
]  # fmt: skip
PLAIN = {"f": "fsync", "d": "disk", "m": "memory", "e": "ephemeral", "capped": "disk", "short": "disk"}
CLASSES = PLAIN | copies.CLASSES
STEPS = 22
ROUTED_STEPS = 30
SETTINGS: dict[str, Any] = {"wal_file_bytes": 6_144, "segment_max_events": 10}
WEIGHTS: dict[Operation, int] = {
    "append": 30, "long": 6, "large": 5, "round": 12, "delete": 6, "delete_tag": 6, "put": 5, "drop": 4,
    "flush": 9, "checkpoint": 8, "sync": 4, "relocate": 3, "kill": 3, "stop": 2, "reboot": 2, "copy": 30,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    operation: Operation
    topic: str = ""
    number: int = 0
    key: str | None = None
    others: tuple[str, ...] = ()  # of a round


@dataclass(frozen=True, slots=True)
class Sight:
    """What a client can know of a topic."""

    id: int
    config: TopicConfig
    head: int
    earliest: int
    floor: int
    records: tuple[Stored, ...]

    @property
    def durability(self) -> str:
        return self.config.durability


Sights = dict[str, Sight]


@dataclass(slots=True)
class Moment:
    """After a number of steps."""

    calls: int  # on the tape by then
    sights: Sights
    durable: int  # steps up to this one survive a power cut
    boot: bytes
    keys: dict[tuple[str, int], dict[str, int]]  # of topic and id: key -> first seq


@dataclass(slots=True)
class History:
    seed: int
    steps: list[Step]
    calls: list[Call]
    moments: list[Moment]
    cold: bool

    def moment_of(self, calls: int) -> int:
        """How many steps were answered when so many calls were made."""
        done = 0
        while done + 1 < len(self.moments) and self.moments[done + 1].calls <= calls:
            done += 1
        return done


def plan(seed: int) -> tuple[list[Step], bool]:
    dice = random.Random(f"steps/{seed}")
    cold = dice.random() < 0.3
    routed = dice.random() < 0.5
    count = ROUTED_STEPS if routed else STEPS
    weights = dict(WEIGHTS)
    if not cold:
        weights["relocate"] = 0
    topics = list(PLAIN)
    droppable = topics
    steps = [Step("put", name) for name in dice.sample(topics, dice.randint(1, 4))]
    if routed:
        droppable = dice.sample(topics, 1)
        topics = [*copies.CLASSES, "s", "s", *droppable]
        steps = [Step("put", name) for name in copies.CLASSES]
    else:
        weights["copy"] = 0
    while len(steps) < count:
        operation = dice.choices(list(weights), list(weights.values()))[0]
        choice = {"drop": droppable, "copy": list(copies.ROUTES)}.get(operation, topics)
        topic = dice.choice(choice)
        key = f"key-{len(steps)}" if dice.random() < 0.4 else None
        others = tuple(dict.fromkeys(dice.sample(topics, dice.randint(2, 4)))) if operation == "round" else ()
        steps.append(Step(operation, topic, dice.randint(1, 9), key, others))
    return steps, cold


def config_of(topic: str, number: int = 0) -> TopicConfig:
    durability = CLASSES[topic]
    return TopicConfig(
        durability=cast(Any, durability),
        durable=durability == "fsync",
        cap_records=9 if topic == "capped" else 0,
        priority=number,
    )


def records_of(step: Step, topic: str, at: int) -> list[Record]:
    if step.operation in ("long", "large"):
        return [
            Record(b'"%b-%d-%d-%b"' % (topic.encode(), at, n, b"x" * 400), tag="long")
            for n in range(step.number % 4 + 1)
        ]
    return [
        Record(b'"%b-%d-%d"' % (topic.encode(), at, n), tag=("x", "y", None)[n % 3], node="n" if n % 2 else None)
        for n in range(step.number)
    ]


@contextmanager
def small_limits() -> Iterator[None]:
    """Files and promises that a short history comes to the end of."""
    small = {
        "WAL_RESERVE_BYTES": 1_000,
        "PLACED_BYTES": 800,
        "SEQ_RESERVE": 40,
        "BLOCK_RECORDS": 8,
        "SECTOR_BYTES": 512,
    }
    before = {name: getattr(limits, name) for name in small}
    for name, value in small.items():
        setattr(limits, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(limits, name, value)


def look(shard: Shard) -> Sights:
    found: Sights = {}
    for name, topic in shard.engine.topics.items():
        report = shard.report(name)
        found[name] = Sight(
            topic.id, report.config, report.head_seq, report.earliest_seq, topic.evict_floor,
            tuple(shown(shard.everything(name))),
        )  # fmt: skip
    return found


def scratch() -> Path:
    """In memory where there is such a place: nothing here depends on the speed of a disk."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="topics-campaign-", dir=memory if memory.is_dir() else None))


def prepare(base: Path, *, cold: bool) -> None:
    """What the supervisor makes before a shard starts."""
    for name in ("wal", "topics"):
        (base / "data" / name).mkdir(parents=True)
    if cold:
        marked(os.fspath(base / "cold"))


class Life:
    """A shard on a folder that plays steps."""

    def __init__(self, base: Path, *, cold: bool, disk: QuickDisk | None = None, boot: bytes = BOOT) -> None:
        self.boot = boot
        self.base = base
        settings = dict(SETTINGS)
        place: str | None = None
        if cold:
            place = os.fspath(base / "cold")
            settings |= {"cold_dir": place, "hot_retain_segments": 1}
        self.shard = PipeShard(base / "data", disk=disk, cold=place, boot=boot, **settings)
        self.forwarders = copies.Forwarders(self.shard)
        self.forwarders.begin()
        self.keys: dict[tuple[str, int], dict[str, int]] = {}
        self.refused: set[str] = set()  # topics, by the last round that was not answered with success

    def open(self, disk: QuickDisk) -> None:
        """Start again, on what is there."""
        self.shard.open(disk, boot=self.boot)
        self.forwarders.begin()

    def restart(self) -> None:
        self.shard.crash()
        self.open(self.shard.disk)

    def play(self, step: Step, at: int) -> None:
        """Raises what the shard raises."""
        shard = self.shard
        match step.operation:
            case "append" | "long" | "large":
                append = shard.append_large if step.operation == "large" else shard.append
                answer = append(
                    step.topic, records_of(step, step.topic, at), key=step.key, config=config_of(step.topic)
                )
                self._remember(step.topic, step.key, answer.first_seq)
            case "round":
                sent = [
                    (name, shard.send_append(name, records_of(step, name, at), key=step.key, config=config_of(name)))
                    for name in step.others
                ]
                shard.settle()
                refused: dict[str, ApiError] = {}
                for name, correlation in sent:
                    try:
                        self._remember(name, step.key, shard.answer(correlation).first_seq)
                    except ApiError as error:
                        refused[name] = error
                self.refused = set(refused)
                for first in refused.values():
                    raise first
            case "delete" if step.topic in shard.engine.topics:
                shard.delete(step.topic, before_seq=max(1, shard.topic(step.topic).head_seq - step.number))
            case "delete_tag" if step.topic in shard.engine.topics:
                shard.delete(step.topic, tag=("x", "y", "long")[step.number % 3])
            case "put":
                shard.put(step.topic, config_of(step.topic, step.number))
            case "drop":
                shard.drop(step.topic)
            case "flush" if step.topic in shard.engine.topics:
                shard.flush(step.topic)
            case "checkpoint":
                shard.checkpoint()
            case "sync":
                shard.be_quiet()
            case "relocate":
                shard.relocate()
            case "kill":
                self.restart()
            case "stop":
                self.shard.stop()
                self.open(self.shard.disk)
            case "reboot":
                self.boot = bytes([self.boot[0] + 1, *self.boot[1:]])
                self.restart()
            case "copy":
                self.forwarders.step(step.topic, step.number)
            case _:
                pass  # of a topic that is not there

    def _remember(self, topic: str, key: str | None, first_seq: int) -> None:
        if key is not None:
            self.keys.setdefault((topic, self.shard.topic(topic).id), {})[key] = first_seq


def record(seed: int, *, steps: list[Step] | None = None, cold: bool | None = None) -> History:
    """Play a history on a tape. Raises AssertionError if a restart changed what a client sees."""
    planned, is_cold = plan(seed)
    steps = planned if steps is None else steps
    cold = is_cold if cold is None else cold
    base = scratch()
    try:
        with small_limits():
            return _record(seed, steps, cold, base)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _record(seed: int, steps: list[Step], cold: bool, base: Path) -> History:
    prepare(base, cold=cold)
    recorder = Recorder(os.fspath(base), seed)
    disk = cast(QuickDisk, TapedDisk(recorder))
    with recording(recorder):
        life = Life(base, cold=cold, disk=disk)
        shard = life.shard
        try:
            moments = [_moment(life, recorder, 0)]
            written = [shard.engine.wal.written_lsn]
            for at, step in enumerate(steps):
                life.play(step, at)
                written.append(shard.engine.wal.written_lsn)
                synced = shard.engine.wal.synced_lsn
                durable = max((n for n, lsn in enumerate(written) if lsn <= synced), default=0)
                if _is_promised(step) and written[-1] > written[-2]:  # what changes nothing writes nothing
                    durable = at + 1
                moment = _moment(life, recorder, max(durable, moments[-1].durable))
                if step.operation in ("kill", "stop", "flush", "checkpoint", "relocate", "sync"):
                    _assert_same(shard, moments[-1].sights, moment.sights, step)
                moments.append(moment)
        finally:
            shard.crash()
    return History(seed, steps, recorder.calls, moments, cold)


def _moment(life: Life, recorder: Recorder, durable: int) -> Moment:
    sights = look(life.shard)
    keys = {place: dict(known) for place, known in life.keys.items()}
    return Moment(len(recorder.calls), sights, durable, life.boot, keys)


def _is_promised(step: Step) -> bool:
    """Whether its answer promises that not even a power cut takes it."""
    if step.operation in ("put", "drop"):
        return True
    if step.operation == "round":
        return any(CLASSES[name] == "fsync" for name in step.others)
    return step.operation in ("append", "long", "large", "delete", "delete_tag") and CLASSES[step.topic] == "fsync"


def _assert_same(shard: PipeShard, before: Sights, after: Sights, step: Step) -> None:
    restarts = step.operation in ("kill", "stop")
    for name in sorted(before.keys() | after.keys()):
        was, now = before.get(name), after.get(name)
        if was is not None and now is not None and restarts:
            # Heads may go up: of ephemeral topics, and of others as long as log files of an earlier boot are there.
            assert (now.id, now.config) == (was.id, was.config), f"{step}: {name} is another: {was} became {now}"
            if name in copies.ROUTES:
                copies.check_copies(shard, [before], 0, after, killed=True)
                continue
            records = () if was.durability == "ephemeral" else was.records
            assert now.head >= was.head, f"{step}: the head of {name} went back from {was.head} to {now.head}"
            assert now.records == records, f"{step} changed the records of {name}: {was} became {now}"
            continue
        assert was == now, f"{step} changed what is seen of {name}: {was} became {now}"
