"""kill -9 of processes of a real server, of each kind and of pairs, under a load of more than 1,000 records a second.

One seed is one folder and some lives of a server on it. In a life every process is killed once or twice, alone or with
another one; then the supervisor, and with it all. A process that dies too often within a minute stays down, as it
should, so lives are short. The load does not stop: one writer for each topic, one in flight, batches; a queue with a
worker; a router with a destination.

    checked after every kill    each acknowledged batch is there, whole, at the seqs of its answer, unchanged; one that
                                was not answered is whole or absent; seqs follow each other, or a tombstone says why not
    after every life            all of that again from the first seq on; the destination has each record of its source
                                once, in order; each job was acked once, or is in the queue
    of the clients              who writes to another shard than the one that died gets no error; nobody waits for more
                                than 20 s
    of the processes            the supervisor has as many descriptors after a life as before; a stop ends all of them
    measured                    from the signal until a client is served through the process again, for one that died
                                alone and for the first time; of router and queue until it is ready
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from crash_server import Client, NoAnswer, Server, children_of, eventually, gone

from topics.shm.counters import State, Word
from topics.storage.config import owner_of_name

from .campaign import Campaign, Finding, Tally

SHARDS = 3
LIVES = 3
BATCH = 40
PATIENCE_S = 20.0
BACK_WITHIN_S = 30.0
AWAY_S = 5.0  # for a read after a process is back
LEAST_RATE = 1_000  # acknowledged records a second; kills of a life with less do not count
SPARE_DESCRIPTORS = 4  # of the supervisor: what it has open for a moment
_DATA = re.compile(rb'\{"b":(\d+),"i":(\d+),"p":"x*"\}')


class Wrong(AssertionError):
    pass


@dataclass(slots=True)
class Batch:
    number: int
    count: int
    first_seq: int = 0  # 0: not known
    answered: bool = False
    refused: bool = False


@dataclass(slots=True)
class Trouble:
    """A request that was not answered with success."""

    at: float
    what: str


class Topic:
    """What one writer sent to it, and what the server owes."""

    def __init__(self, name: str, durability: str) -> None:
        self.name = name
        self.durability = durability
        self.shard = f"shard-{owner_of_name(name, SHARDS)}"
        self.batches: dict[int, Batch] = {}
        self.checked_to = 0
        self._next = 1

    def new_batch(self, count: int) -> tuple[Batch, bytes]:
        batch = Batch(self._next, count)
        self._next += 1
        self.batches[batch.number] = batch
        pad = "x" * (batch.number % 30)
        records = ",".join(f'{{"data":{{"b":{batch.number},"i":{index},"p":"{pad}"}}}}' for index in range(count))
        return batch, f'{{"records":[{records}]}}'.encode()

    def check(self, client: Client, *, whole: bool = False) -> int:
        """From where the last check ended, or all of it; returns how many records were owed and there."""
        from_seq = 0 if whole else self.checked_to
        batches = list(self.batches.values())  # later ones are not looked for
        answered = {batch.number for batch in batches if batch.answered}  # before the first page was asked for
        found: dict[int, list[tuple[int, int]]] = {}
        last = from_seq
        for seq, data in read(client, self.name, from_seq):
            named = _DATA.fullmatch(data)
            if named is None:
                raise Wrong(f"{self.name}: seq {seq} is not what anybody sent: {data[:80]!r}")
            if seq != last + 1:
                raise Wrong(f"{self.name}: seq {seq} follows {last}, and no tombstone says why")
            last = seq
            found.setdefault(int(named[1]), []).append((int(named[2]), seq))
        owed = 0
        for batch in batches:
            there = found.pop(batch.number, None)
            if there is None:
                if batch.number in answered and batch.first_seq > from_seq:
                    raise Wrong(
                        f"{self.name} ({self.durability}): batch {batch.number} was acknowledged at seq "
                        f"{batch.first_seq} and is gone; the topic ends at {last}"
                    )
                continue
            first = there[0][1]
            if there != [(index, first + index) for index in range(batch.count)]:
                raise Wrong(f"{self.name}: batch {batch.number} is not whole: {there[:3]} ... of {batch.count}")
            if batch.refused:
                raise Wrong(f"{self.name}: batch {batch.number} was refused, and is here at {first}")
            if batch.first_seq and batch.first_seq != first:
                raise Wrong(f"{self.name}: batch {batch.number} is at {first}, known to be at {batch.first_seq}")
            batch.first_seq, batch.answered = first, True
            owed += batch.count
        newer = {number for number in list(self.batches) if number > (batches[-1].number if batches else 0)}
        if found.keys() - newer:
            raise Wrong(f"{self.name}: batches that are there twice, or that nobody sent: {sorted(found)[:5]}")
        if not found:
            self.checked_to = max(self.checked_to, last)
        return owed


class _Shown(msgspec.Struct):
    seq: int = msgspec.field(name="$seq")
    data: msgspec.Raw


class _Page(msgspec.Struct):
    records: list[_Shown]
    next_from_seq: int
    caught_up: bool
    tombstone: dict[str, Any] | None


_decode_page = msgspec.json.Decoder(_Page).decode


def read(client: Client, topic: str, from_seq: int) -> list[tuple[int, bytes]]:
    """(seq, data) of everything behind a seq; the data as it was sent, byte for byte."""
    records: list[tuple[int, bytes]] = []
    deadline = time.monotonic() + AWAY_S
    while True:
        answer = client.diff(topic, from_seq, limit=1_000, max_bytes=1 << 22)
        if answer.status == 503 and time.monotonic() < deadline:
            time.sleep(0.01)  # its gateway has not heard yet that the shard is back, or somebody else has died
            continue
        if not answer.ok:
            raise Wrong(f"{topic}: a read is answered with {answer.status} {answer.raw[:200]!r}")
        page = _decode_page(answer.raw)
        if page.tombstone is not None:
            raise Wrong(f"{topic}: {page.tombstone} though nothing may have gone")
        records += [(each.seq, bytes(each.data)) for each in page.records]
        from_seq = page.next_from_seq
        if page.caught_up:
            return records


class Actor(threading.Thread):
    """A client that goes on until it is told to stop."""

    def __init__(self, load: Load, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.load = load
        self.troubles: list[Trouble] = []
        self.error: BaseException | None = None
        self.done = 0
        self.shards: frozenset[str] = frozenset()  # on which it depends

    def run(self) -> None:
        client = Client(self.load.port, timeout_s=PATIENCE_S)
        try:
            while not self.load.stopping.is_set():
                began = time.monotonic()
                try:
                    self.step(client)
                except NoAnswer as error:
                    self.troubles.append(Trouble(began, str(error)))
                    if time.monotonic() - began > PATIENCE_S - 1 and not self.load.stopping.is_set():
                        raise Wrong(f"{self.name}: nobody answered within {PATIENCE_S:.0f} s: {error}") from error
                    time.sleep(0.01)
        except BaseException as error:
            self.error = error
        finally:
            client.close()

    def step(self, client: Client) -> None:
        raise NotImplementedError


class Writer(Actor):
    def __init__(self, load: Load, topic: Topic) -> None:
        super().__init__(load, f"writer of {topic.name}")
        self.topic = topic
        self.shards = frozenset({topic.shard})

    def step(self, client: Client) -> None:
        batch, body = self.topic.new_batch(BATCH)
        began = time.monotonic()
        answer = client.call("POST", f"/v0/topics/{self.topic.name}?return_seqs=false", body)
        if answer.ok:
            batch.first_seq = answer.body["first_seq"]
            batch.answered = True
            self.done += batch.count
            time.sleep(self.load.pace_s)
        else:
            self.troubles.append(Trouble(began, f"{answer.status} {answer.raw[:120]!r}"))
            batch.refused = not answer.outcome_unknown
            time.sleep(0.01)


class Worker(Actor):
    """Puts jobs into a queue, claims and acks them."""

    def __init__(self, load: Load, queue: str) -> None:
        super().__init__(load, f"worker of {queue}")
        self.queue = queue
        self.shards = frozenset({f"shard-{owner_of_name(queue, SHARDS)}", "queue"})
        self.produced: dict[int, int] = load.seed.produced
        self.acked: dict[int, float] = load.seed.acked
        self.unsure: set[int] = load.seed.unsure  # an ack was sent and not answered

    def step(self, client: Client) -> None:
        number = len(self.produced) + 1
        answer = client.call(
            "POST", f"/v0/topics/{self.queue}", {"records": [{"data": number}], "idempotency_key": f"job-{number}"}
        )
        if not answer.ok:
            self.troubles.append(Trouble(time.monotonic(), f"{answer.status} {answer.raw[:120]!r}"))
            time.sleep(0.02)
            return
        self.produced[number] = answer.body["first_seq"]
        sent = time.monotonic()
        claimed = client.call("POST", f"/v0/topics/{self.queue}/claim", {"node": "w", "max": 20})
        if not claimed.ok:
            self.troubles.append(Trouble(sent, f"{claimed.status} {claimed.raw[:120]!r}"))
            time.sleep(0.02)
            return
        seqs = [each["$seq"] for each in claimed.body["claimed"]]
        for seq in seqs:
            if seq in self.acked and self.acked[seq] < sent:
                raise Wrong(f"{self.queue}: seq {seq} was acked and is delivered again")
        if seqs:
            self.unsure.update(seqs)
            acked = client.call("POST", f"/v0/topics/{self.queue}/ack", {"node": "w", "seqs": seqs})
            if acked.ok:
                now = time.monotonic()
                counted = [seq for seq in seqs if seq not in acked.body["skipped"]]
                for seq in counted:
                    if seq in self.acked:
                        raise Wrong(f"{self.queue}: seq {seq} was acked twice")
                    self.acked[seq] = now
                self.unsure.difference_update(counted)
                self.done += 1
        time.sleep(0.02)


@dataclass(slots=True)
class Folder:
    """What outlives a server."""

    topics: list[Topic]
    produced: dict[int, int] = field(default_factory=dict)
    acked: dict[int, float] = field(default_factory=dict)
    unsure: set[int] = field(default_factory=set)


class Load:
    def __init__(self, server: Server, seed: Folder, *, pace_s: float) -> None:
        self.port = server.port
        self.seed = seed
        self.pace_s = pace_s
        self.stopping = threading.Event()
        self.actors: list[Actor] = [Writer(self, topic) for topic in seed.topics]
        self.actors.append(Worker(self, "jobs"))
        self.began = time.monotonic()
        for actor in self.actors:
            actor.start()

    @property
    def records(self) -> int:
        return sum(actor.done for actor in self.actors if isinstance(actor, Writer))

    def raise_errors(self) -> None:
        for actor in self.actors:
            if actor.error is not None:
                raise Wrong(f"{actor.name}: {actor.error}") from actor.error

    def finish(self) -> None:
        self.stopping.set()
        for actor in self.actors:
            actor.join(PATIENCE_S + 10)
            if actor.is_alive():
                raise Wrong(f"{actor.name} hangs")
        self.raise_errors()


# --- one seed ----------------------------------------------------------------------------------------


class Story:
    def __init__(self, seed: int, folder: Path, tally: Tally) -> None:
        self.dice = random.Random(f"kills/{seed}")
        self.tally = tally
        self.folder = folder
        self.life: Counter[str] = Counter()  # kills of the life that there is
        names: dict[int, int] = {}
        topics = []
        for durability in ("fsync", "disk"):
            names.clear()
            for number in range(1_000):
                shard = owner_of_name(f"{durability}-{number}", SHARDS)
                if shard not in names:
                    names[shard] = number
                    topics.append(Topic(f"{durability}-{number}", durability))
        self.state = Folder(topics)

    def run(self) -> None:
        for life in range(LIVES):
            server = Server(self.folder / "data", shards=SHARDS, env={"TOPICS_WAL_FILE_BYTES": str(4 << 20)})
            try:
                server.wait_ready()
                if life == 0:
                    self._furnish(server)
                else:
                    self._check(server, whole=True)
                self._live(server)
            finally:
                server.close()
        server = Server(self.folder / "data", shards=SHARDS)
        try:
            server.wait_ready()
            self._check(server, whole=True)
            self._check_copies(server)
            self._check_jobs(server)
            self._stop(server)
        finally:
            server.close()

    def _furnish(self, server: Server) -> None:
        client = server.client()
        for topic in self.state.topics:
            assert client.put(topic.name, durability=topic.durability).ok
        assert client.put("jobs", type="queue", durability="fsync", lease_ms=2_000, idempotency_window_ms=3_600_000).ok
        source = self.state.topics[0].name
        assert client.put("copies", durability="fsync").ok
        made = client.call("PUT", "/v0/routers/to-copies", {"source": source, "dest": "copies"})
        assert made.ok, made.raw
        client.close()

    def _live(self, server: Server) -> None:
        load = Load(server, self.state, pace_s=0.01)
        names = [row.name for row in server.board.rows() if row.name and row.name != "supervisor"]
        todo = self.dice.sample(names, len(names)) + self.dice.sample(names, 2)
        descriptors = descriptors_of(server.pid)
        self.life.clear()
        try:
            while todo:
                victims = [todo.pop()]
                if todo and self.dice.random() < 0.35 and todo[-1] != victims[0]:
                    victims.append(todo.pop())
                time.sleep(self.dice.uniform(0.05, 0.3))
                self._kill(server, load, victims)
            records, seconds = load.records, time.monotonic() - load.began
            self._check_descriptors(server, descriptors)
            # The supervisor, and with it all: often alone, sometimes with a child.
            if self.dice.random() < 0.3:
                server.signal_child(self.dice.choice(names))
                self.life.update(kills=1, pairs=1)
            os.kill(server.pid, signal.SIGKILL)
            server.popen.wait()
            self.life.update(kills=1, kills_supervisor=1)
            self._count(records, seconds)
        finally:
            load.stopping.set()
        load.finish()

    def _count(self, records: int, seconds: float) -> None:
        """The kills of a life, for the goal if enough was written meanwhile."""
        self.tally.add("records", records)
        self.tally.add("load_ms", int(seconds * 1_000))
        if records >= LEAST_RATE * seconds:
            self.tally.counts.update(self.life)
        else:
            self.tally.add("lives_below_the_rate")
            self.tally.add("uncounted_kills", self.life["kills"])

    def _check_descriptors(self, server: Server, before: int) -> None:
        def few() -> bool:
            return descriptors_of(server.pid) <= before + SPARE_DESCRIPTORS

        try:
            eventually(few, within_s=5.0)
        except AssertionError:
            now = descriptors_of(server.pid)
            raise Wrong(
                f"the supervisor has {now} descriptors after {self.life['kills']} kills, had {before}"
            ) from None

    def _stop(self, server: Server) -> None:
        """In order, and nothing of it is left."""
        tree = children_of(server.pid)
        if (code := server.stop()) != 0:
            raise Wrong(f"a stop ended with {code}:\n{server.log()[-2_000:]}")
        if left := [pid for pid in tree if not gone(pid)]:
            raise Wrong(f"{len(left)} processes outlive a stop: {left}")

    def _kill(self, server: Server, load: Load, victims: list[str]) -> None:
        pids = {name: server.pid_of(name) for name in victims}
        began = time.monotonic()
        for name, pid in pids.items():
            os.kill(pid, signal.SIGKILL)
            self.life.update(["kills", f"kills_{name.partition('-')[0]}"])
        self.life["pairs"] += len(victims) - 1
        for name, pid in pids.items():
            _wait_back(server, name, pid)
            self._wait_served(server, name)
        took_ms = (time.monotonic() - began) * 1_000
        if len(victims) == 1 and server.restarts(victims[0]) == 1:
            self.tally.times_ms.append(took_ms)
        self._check_bystanders(load, victims, began)
        self._check(server, whole=False)
        load.raise_errors()

    def _wait_served(self, server: Server, name: str) -> None:
        """Until a client gets an answer through it; of the router and the queue, ready is all that can be seen."""
        path = "/v0/health"
        if name.startswith("shard"):
            path = "/v0/topics/" + next(topic.name for topic in self.state.topics if topic.shard == name)
        elif not name.startswith("gateway"):
            return
        client = server.client(timeout_s=PATIENCE_S)
        deadline = time.monotonic() + BACK_WITHIN_S
        while True:
            try:
                if client.call("GET", path).ok:
                    break
            except NoAnswer:
                pass
            if time.monotonic() > deadline:
                raise Wrong(f"{name} is ready, and nobody is served through it")
            time.sleep(0.002)
        client.close()

    def _check_bystanders(self, load: Load, victims: list[str], began: float) -> None:
        if any(name.startswith("gateway") for name in victims):
            return
        for actor in load.actors:
            if isinstance(actor, Writer) and not actor.shards & set(victims):
                self.tally.add("bystanders")
                late = [trouble for trouble in actor.troubles if trouble.at >= began]
                if late:
                    raise Wrong(f"{' and '.join(victims)} died, and {actor.name} on {actor.shards} got {late[0].what}")

    def _check(self, server: Server, *, whole: bool) -> None:
        client = server.client()
        try:
            for topic in self.state.topics:
                self.tally.add("checked", topic.check(client, whole=whole))
        finally:
            client.close()

    def _check_copies(self, server: Server) -> None:
        client = server.client()
        source = self.state.topics[0].name
        sent = [data for _, data in read(client, source, 0)]

        def copied() -> bool:
            return bool(client.get("copies").body["count"] >= len(sent))

        try:
            eventually(copied, within_s=30.0, what="the copies")
        except AssertionError as error:
            raise Wrong(f"copies are missing: {client.get('copies').body['count']} of {len(sent)}") from error
        found = read(client, "copies", 0)
        if [data for _, data in found] != sent:
            raise Wrong(f"the destination has {len(found)} records, the source {len(sent)}, or in another order")
        self.tally.add("copies", len(found))
        client.close()

    def _check_jobs(self, server: Server) -> None:
        """What was not acked is delivered, once its lease is over."""
        client = server.client()
        left = set(self.state.produced.values()) - self.state.acked.keys()
        deadline = time.monotonic() + 30
        while left - self.state.unsure and time.monotonic() < deadline:
            claimed = client.call("POST", "/v0/topics/jobs/claim", {"node": "last", "max": 100})
            seqs = [each["$seq"] for each in claimed.body["claimed"]] if claimed.ok else []
            for seq in seqs:
                if seq in self.state.acked:
                    raise Wrong(f"jobs: seq {seq} was acked and is delivered again")
            left.difference_update(seqs)
            if not seqs:
                time.sleep(0.1)
            else:
                client.call("POST", "/v0/topics/jobs/ack", {"node": "last", "seqs": seqs})
        if left - self.state.unsure:
            raise Wrong(f"jobs are lost: {sorted(left - self.state.unsure)[:5]}")
        self.tally.add("jobs", len(self.state.produced))
        client.close()


def descriptors_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _wait_back(server: Server, name: str, pid: int) -> None:
    deadline = time.monotonic() + BACK_WITHIN_S
    while True:
        row = server.board.row(name)
        if row[Word.PID] != pid and row.state is State.READY:
            return
        if row.state is State.FAILED:
            raise Wrong(f"{name} was given up:\n{server.log()[-2_000:]}")
        if time.monotonic() > deadline:
            raise Wrong(f"{name} is not back within {BACK_WITHIN_S:.0f} s: {row.state.name}\n{server.log()[-2_000:]}")
        time.sleep(0.002)


def run(seed: int, only: str | None = None) -> Tally:
    tally = Tally()
    folder = Path(tempfile.mkdtemp(prefix="topics-kills-"))
    kept = False
    try:
        Story(seed, folder, tally).run()
    except (Wrong, NoAnswer, AssertionError) as wrong:
        tally.find(Finding(seed, "", f"{wrong}\n    folder: {folder}"))
        kept = True
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
    return tally


CAMPAIGN = Campaign(
    name="kills",
    title="kill -9 of processes of a real server under load, of each kind and of pairs",
    goal=2_000,
    figure="kills",
    run=run,
    meaning="SIGKILL to a process of a server that acknowledges at least 1,000 records a second, in batches",
)
