"""A redrive that dies at every point at which something has just happened, or is about to, against a real server.

The redrive runs in this process, so that it can be made to die between two steps; whatever it held open is closed, as
the kernel does it. What counts is what the two topics hold when it was run again: every dead letter once.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from topics.client.address import parse_url
from topics.client.client import Client, Receipt
from topics.client.queue import Acked, Jobs
from topics.tools import redrive_journal as journals
from topics.tools.dead_letters import CannotMove, DeadLetter
from topics.tools.redrive import Redrive, Tally
from topics.tools.redrive_journal import Append, Journal
from topics.tools.tag_glob import TagGlob

from .client import Client as RawClient
from .client import unique
from .queues import Queue, make_queue
from .routing import read
from .server import Server, eventually

pytestmark = pytest.mark.e2e

LETTERS = 3
WRITTEN = 2 + 6 * LETTERS  # moments: before and after the plan, and for each the beginning, the append and the note
DAY_MS = 86_400_000


class Death(BaseException):
    """Not an Exception: nobody is there any more to handle it."""


class Fuse:
    """Dies at the n-th moment; never, if it has none."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.moments = 0

    def moment(self) -> None:
        self.moments += 1
        if self.moments == self.at:
            raise Death


class FusedClient(Client):
    fuse: Fuse

    async def publish(self, *args: Any, **fields: Any) -> Receipt:
        self.fuse.moment()
        receipt = await super().publish(*args, **fields)
        self.fuse.moment()
        return receipt

    async def delete(self, *args: Any, **fields: Any) -> int:
        self.fuse.moment()
        deleted = await super().delete(*args, **fields)
        self.fuse.moment()
        return deleted

    async def ack(self, queue: str, node: str, jobs: Jobs, **fields: Any) -> Acked:
        self.fuse.moment()
        acked = await super().ack(queue, node, jobs, **fields)
        self.fuse.moment()
        return acked


class FusedJournal(Journal):
    fuse: Fuse

    def plan(self, appends: list[Append]) -> None:
        self.fuse.moment()
        super().plan(appends)
        self.fuse.moment()

    def begin(self, append: Append) -> None:
        self.fuse.moment()
        super().begin(append)
        self.fuse.moment()

    def write(self, key: str) -> None:
        self.fuse.moment()
        super().write(key)
        self.fuse.moment()

    def settle(self, keys: Any) -> None:
        self.fuse.moment()
        super().settle(keys)
        self.fuse.moment()


class Scene:
    """A dead-letter topic with some dead letters of one queue, and the journal of its redrives."""

    def __init__(self, server: Server, api: RawClient, folder: Path, *, kind: str, window_ms: int) -> None:
        self.server = server
        self.api = api
        self.kind = kind
        self.target = make_queue(api, idempotency_window_ms=window_ms)
        self.dlq = unique("dlq")
        assert api.put(self.dlq, type="queue" if kind == "queue" else "log").status == 201
        self.glob = TagGlob("move:*") if kind == "tagged" else None
        self.journal = str(folder / f"{self.dlq}.jsonl")
        self.letters: list[str] = []
        self.put(LETTERS)

    def put(self, count: int) -> None:
        records = []
        for _ in range(count):
            name = unique("letter")
            self.letters.append(name)
            meta = {"kept": name, "$dead_letter_from": self.target.name, "$dead_letter_src_seq": 1}
            records.append({"data": {"is": name}, "tag": f"move:{name}", "meta": meta})
            if self.kind == "tagged":
                records.append({"data": "stays", "tag": "stay"})
        assert self.api.append_records(self.dlq, records).status == 200

    def redrive(self, *, fuse: Fuse | None = None, late_ms: int = 0, **options: Any) -> Tally:
        tally = Tally()
        fuse = fuse or Fuse()

        async def main() -> None:
            client = FusedClient(parse_url(self.server.url), notice=lambda text: None)
            client.fuse = fuse
            journal = FusedJournal(self.journal)
            journal.fuse = fuse
            try:
                with trio.fail_after(60):
                    await Redrive(
                        client,
                        self.dlq,
                        journal,
                        tally,
                        glob=self.glob,
                        now_ms=lambda: now_ms() + late_ms,
                        **options,
                    ).run()
            finally:
                journal.close()
                await client.aclose()

        trio.run(main)
        return tally

    def moved(self) -> list[str]:
        """The dead letters in the queue."""
        records = self.target.records()
        assert all(record["meta"] == {"kept": record["data"]["is"]} for record in records)
        return [record["data"]["is"] for record in records]

    def waiting(self) -> list[str]:
        """The dead letters where they were."""
        return [record["data"]["is"] for record in read(self.api, self.dlq) if record["data"] != "stays"]

    def assert_done(self) -> None:
        assert sorted(self.moved()) == sorted(self.letters)
        assert self.waiting() == []
        assert os.path.getsize(self.journal) == 0
        if self.kind == "tagged":
            assert [record["data"] for record in read(self.api, self.dlq)] == ["stays"] * len(self.letters)

    def answer(self) -> str:
        """What an operator says who was asked and has looked."""
        found = journals.peek(self.journal)
        doubts = [begun.seq for key, begun in found.begun.items() if key not in found.written]
        assert len(doubts) == 1, "one append is under way at a time"
        doubtful = next(record for record in read(self.api, self.dlq) if record["$seq"] == doubts[0])
        return "remove" if doubtful["data"]["is"] in self.moved() else "write"


def now_ms() -> int:
    return time.time_ns() // 1_000_000


Make = Callable[..., Scene]


@pytest.fixture
def make(server: Server, api1: RawClient, tmp_path: Path) -> Make:
    def build(kind: str, *, window_ms: int = 120_000) -> Scene:
        return Scene(server, api1, tmp_path, kind=kind, window_ms=window_ms)

    return build


def died(make: Make, kind: str, **options: Any) -> Iterator[Scene]:
    """Scenes in which a redrive has died: at its first moment, at its second, and so on."""
    for at in itertools.count(1):
        scene = make(kind, **options)
        try:
            scene.redrive(fuse=Fuse(at))
        except Death:
            yield scene
        else:
            scene.assert_done()
            # Then remove and settle; before and after. From a queue they come as they come, in one batch or in several.
            assert at > WRITTEN + 4
            return


KINDS = ["log", "tagged", "queue"]


# --- it dies once, anywhere --------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_run_again_at_once(make: Make, kind: str) -> None:
    for scene in died(make, kind):
        scene.redrive()
        scene.assert_done()


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_run_again_by_somebody_without_the_journal(make: Make, kind: str) -> None:
    """The target remembers the keys."""
    for scene in died(make, kind):
        os.unlink(scene.journal)
        scene.redrive()
        scene.assert_done()


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_run_again_when_the_keys_are_forgotten(make: Make, kind: str) -> None:
    """The journal knows, but for one append that has no answer; and that is asked and not guessed."""
    asked = 0
    for scene in died(make, kind, window_ms=0):
        before = (scene.moved(), scene.waiting())
        try:
            scene.redrive()
        except CannotMove:
            asked += 1
            assert (scene.moved(), scene.waiting()) == before
            scene.redrive(in_doubt=scene.answer())
        scene.assert_done()
    # Behind each append: done, but not noted yet. In all other cases there is nothing to ask.
    assert asked == 2 * LETTERS or (kind == "queue" and asked > LETTERS)


@pytest.mark.parametrize("window_ms", [120_000, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_it_dies_again_and_again(make: Make, kind: str, window_ms: int) -> None:
    chance = random.Random(5)
    scene = make(kind, window_ms=window_ms)
    scene.put(20)
    deaths = 0
    answer: str | None = None
    while scene.waiting():
        try:
            scene.redrive(fuse=Fuse(chance.randint(1, 60)), in_doubt=answer)
            answer = None
        except Death:
            deaths += 1
        except CannotMove:
            answer = scene.answer()
    scene.redrive()
    scene.assert_done()
    assert deaths > 2


# --- what can't be known -----------------------------------------------------------------------------


def die_behind_the_append(scene: Scene) -> None:
    """begin, publish: it is in the queue, and the journal does not know."""
    with pytest.raises(Death):
        scene.redrive(fuse=Fuse(6))
    assert scene.moved() == scene.letters[:1]


def die_before_the_append(scene: Scene) -> None:
    with pytest.raises(Death):
        scene.redrive(fuse=Fuse(5))
    assert scene.moved() == []


def test_a_copy_that_a_worker_has_done_since_is_not_written_again(make: Make) -> None:
    scene = make("log", window_ms=0)
    die_behind_the_append(scene)
    done = scene.target.take(1)
    scene.target.ack([done[0]["$seq"]])
    with pytest.raises(CannotMove, match=rf"record 1 of {scene.dlq} to {scene.target.name}.*behind seq 0 there"):
        scene.redrive()
    assert len(scene.waiting()) == LETTERS
    tally = scene.redrive(in_doubt="remove")
    assert (tally.moved.total(), tally.finished) == (LETTERS - 1, 1)
    assert scene.moved() == scene.letters[1:]
    assert scene.waiting() == []


def test_what_was_not_written_is_written_without_a_question(make: Make) -> None:
    """Everything that was written to the queue since can be seen, and is something else."""
    scene = make("log", window_ms=0)
    die_before_the_append(scene)
    scene.redrive()
    scene.assert_done()

    scene = make("log", window_ms=0)
    die_before_the_append(scene)
    scene.target.produce(*range(2_500))
    scene.redrive()
    assert [record["data"]["is"] for record in scene.target.records()[2_500:]] == scene.letters


def test_a_job_that_looks_the_same_is_a_question(make: Make) -> None:
    """It may be somebody else's: then removing would lose one."""
    scene = make("log", window_ms=0)
    die_before_the_append(scene)
    name = scene.letters[0]
    scene.target.produce_records([{"data": {"is": name}, "tag": f"move:{name}", "meta": {"kept": name}}])
    with pytest.raises(CannotMove, match="--in-doubt"):
        scene.redrive()
    scene.redrive(in_doubt="write")
    assert sorted(scene.moved()) == sorted([name, *scene.letters])


def test_a_gap_is_a_question(make: Make) -> None:
    scene = make("log", window_ms=0)
    die_before_the_append(scene)
    scene.target.produce("a", "b", "c")
    scene.target.take(2)
    scene.target.ack([2])
    with pytest.raises(CannotMove, match="--in-doubt"):
        scene.redrive()


def test_too_much_to_look_through_is_a_question(make: Make) -> None:
    scene = make("log", window_ms=0)
    die_before_the_append(scene)
    scene.target.produce_records([{"data": n} for n in range(10_000)])
    scene.target.produce("one more")
    with pytest.raises(CannotMove, match="--in-doubt"):
        scene.redrive()


def test_how_long_keys_are_remembered_decides(make: Make) -> None:
    """With the clock a day later the question is asked, although the server, whose clock it is not, still knows."""
    scene = make("log")
    die_behind_the_append(scene)
    with pytest.raises(CannotMove, match="--in-doubt"):
        scene.redrive(late_ms=DAY_MS)
    with pytest.raises(CannotMove, match="--in-doubt"):
        scene.redrive(late_ms=-DAY_MS)  # a clock that was set back says nothing
    scene.redrive(late_ms=60_000)
    scene.assert_done()


@pytest.mark.parametrize("window_ms", [120_000, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_the_machine_dies(make: Make, monkeypatch: pytest.MonkeyPatch, kind: str, window_ms: int) -> None:
    """Only what was synced is there afterwards: the plan. All of it is in question then."""
    scene = make(kind, window_ms=window_ms)
    with pytest.raises(Death):
        scene.redrive(fuse=Fuse(6))  # the first one is written
    lines = Path(scene.journal).read_bytes().splitlines(keepends=True)
    Path(scene.journal).write_bytes(lines[0])
    assert b"planned" in lines[0]
    moved = scene.moved()
    monkeypatch.setattr(journals, "boot_id", lambda: "another")
    assert len(moved) == 1
    if window_ms == 0:
        with pytest.raises(CannotMove, match="--in-doubt"):
            scene.redrive()
        assert scene.moved() == moved
        # What is certainly not there is written all the same.
        assert scene.redrive(in_doubt="remove").moved.total() == LETTERS - len(moved)
    else:
        scene.redrive()
    scene.assert_done()


def test_a_queue_that_is_gone_holds_no_copy(make: Make) -> None:
    scene = make("log", window_ms=0)
    die_behind_the_append(scene)
    scene.api.drop(scene.target.name)
    other = make_queue(scene.api)
    tally = scene.redrive(to=other.name)
    assert (tally.moved.total(), tally.finished) == (LETTERS, 0)
    scene.target = other
    scene.assert_done()


def test_a_queue_that_was_made_again_holds_no_copy(make: Make) -> None:
    scene = make("log", window_ms=0)
    with pytest.raises(Death):
        scene.redrive(fuse=Fuse(12))  # the second one is written
    assert len(scene.moved()) == 2
    scene.api.drop(scene.target.name)
    scene.target = make_queue(scene.api, scene.target.name, idempotency_window_ms=0)
    tally = scene.redrive()
    assert (tally.moved.total(), tally.finished) == (2, 1)
    assert scene.moved() == scene.letters[1:]


def test_dead_letters_that_were_made_again_are_others(make: Make) -> None:
    """The journal holds record 1 as written; the new record 1 is not that one."""
    scene = make("log")
    with pytest.raises(Death):
        scene.redrive(fuse=Fuse(10))
    assert journals.peek(scene.journal).written
    scene.api.drop(scene.dlq)
    assert scene.api.put(scene.dlq).status == 201
    scene.letters, before = [], scene.moved()
    scene.put(2)
    scene.redrive()
    assert scene.moved() == before + scene.letters
    assert scene.waiting() == []
    assert os.path.getsize(scene.journal) == 0


# --- others at the same time -------------------------------------------------------------------------


def test_what_was_made_again_meanwhile_is_not_trimmed(make: Make) -> None:
    """The topic is deleted and made again between the append and the trim: its new records stay."""
    scene = make("log")

    class Meddling(Fuse):
        def moment(self) -> None:
            super().moment()
            if self.moments == WRITTEN:  # the last one is noted as written
                scene.api.drop(scene.dlq)
                assert scene.api.put(scene.dlq).status == 201
                scene.put(LETTERS + 1)

    with pytest.raises(CannotMove, match="was deleted and made again"):
        scene.redrive(fuse=Meddling())
    assert scene.waiting() == scene.letters[LETTERS:]
    scene.redrive()
    scene.assert_done()


def test_dead_letters_that_come_meanwhile_stay(make: Make) -> None:
    for kind in KINDS:
        scene = make(kind)
        first = list(scene.letters)

        class Arriving(Fuse):
            def moment(self) -> None:
                super().moment()
                if self.moments == 6:
                    scene.put(2)  # noqa: B023

        scene.redrive(fuse=Arriving())
        assert sorted(scene.moved()) == sorted(first)
        assert sorted(scene.waiting()) == sorted(scene.letters[LETTERS:])
        if kind == "queue":
            Queue(scene.api, scene.dlq).wait_counters(2, 0)


def test_removed_by_somebody_else_meanwhile(make: Make) -> None:
    scene = make("log")

    class Trimming(Fuse):
        def moment(self) -> None:
            super().moment()
            if self.moments == WRITTEN:
                scene.api.delete(scene.dlq, before_seq=LETTERS + 1)

    scene.redrive(fuse=Trimming())
    scene.assert_done()


@pytest.mark.full
def test_a_lease_that_is_lost_comes_again(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """The gateway dies while dead letters are leased: acks are skipped, and they are removed when they come again."""
    server = start_server()
    with server.client() as api:
        scene = Scene(server, api, tmp_path, kind="queue", window_ms=0)

        class Killing(Fuse):
            def moment(self) -> None:
                super().moment()
                if self.moments == WRITTEN:
                    server.signal_child("gateway-0")
                    eventually(lambda: server.ps().processes[1].restarts == 1, what="another gateway")
                    server.wait_ready()

        tally = scene.redrive(fuse=Killing())
        assert (tally.moved.total(), tally.finished) == (LETTERS, 0)
        scene.assert_done()


# --- identity ----------------------------------------------------------------------------------------


def test_a_leased_dead_letter_is_the_one_that_was_read(server: Server, api1: RawClient) -> None:
    """Its key is the same either way, whatever its bytes."""
    dlq = make_queue(api1)
    body = (
        b'{"records":[{"data": {"n":  1.50, "e": 1e400, "\\u00e9": "\\/"},"tag":"t","node":"n",'
        b'"meta":{"b":  1, "a": 2}},{"data":null},{"data":"x","meta":{}},{"data":1,"tag":"","node":"m"}]}'
    )
    assert api1.send("POST", f"/v0/topics/{dlq.name}", content=body).status == 200

    async def main() -> None:
        client = Client(parse_url(server.url), notice=lambda text: None)
        read_keys = [DeadLetter(dlq.name, record).key for record in await client.read(dlq.name)]
        leased = (await client.claim(dlq.name, "w", max=10)).jobs
        await client.nack(dlq.name, "w", leased)
        async with client.work(dlq.name, "w", max=10) as work:
            pushed = [await anext(work) for _ in leased]
        assert [DeadLetter(dlq.name, job).key for job in leased] == read_keys
        assert [DeadLetter(dlq.name, job).key for job in pushed] == read_keys
        await client.aclose()

    trio.run(main)
