"""Clients that load a server until it dies under them: all classes, batches of many sizes, keys, tags, deletes.

Each worker deletes only by tags of its own, so it always knows what a delete covers; deletes by seq are the business
of one worker alone, and only of seqs that were acknowledged. A worker whose connection ends stops, unless it is told
that only a part of the server is going to die.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

from crash_oracle import Fate, Given, Oracle, TopicLedger
from crash_server import Client, NoAnswer, Server, eventually

CLASSES = ("fsync", "disk", "memory", "ephemeral")
COUNTS = (1, 1, 1, 2, 3, 10, 60)
PADDINGS = (0, 10, 80, 80, 300, 1_000)
HOUR_MS = 3_600_000


def create_topics(oracle: Oracle, client: Client, *, per_class: int = 2) -> list[TopicLedger]:
    made = []
    for durability in CLASSES:
        for number in range(per_class):
            name = f"{durability}.{number}"
            made.append(oracle.create(client, name, durability, idempotency_window_ms=HOUR_MS, priority=number))
    for durability, cap in (("fsync", 37), ("disk", 150)):
        name = f"capped.{durability}"
        made.append(oracle.create(client, name, durability, idempotency_window_ms=HOUR_MS, cap_records=cap))
    return made


class Worker(threading.Thread):
    def __init__(
        self, name: str, topics: Sequence[TopicLedger], port: int, rng: random.Random, group: Workload
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._topics = topics
        self._port = port
        self._rng = rng
        self._group = group
        self._tags: dict[str, list[str]] = {topic.name: [] for topic in topics}  # whose delete was not asked for yet
        self._used: dict[str, set[str]] = {topic.name: set() for topic in topics}
        self._generation = 0
        self._keys = 0
        self.error: BaseException | None = None
        self.done = 0
        self.unanswered = 0

    def run(self) -> None:
        client = Client(self._port)
        try:
            while not self._group.stopping.is_set():
                try:
                    self._step(client)
                    self.done += 1
                except NoAnswer:
                    self.unanswered += 1
                    self._generation += 1
                    if not self._group.outlives:
                        return
                    time.sleep(0.02)
                if self._group.pace_s:
                    time.sleep(self._group.pace_s)
        except BaseException as error:
            self.error = error
        finally:
            client.close()

    def _step(self, client: Client) -> None:
        rng = self._rng
        topic = rng.choice(self._topics)
        dice = rng.random()
        if topic.cap_records:  # what a cap leaves is easy to say only if nothing is deleted
            self._append(client, topic)
        elif dice < 0.04 and self._tags[topic.name]:
            self._delete_tag(client, topic)
        elif dice < 0.05 and self._tags[topic.name]:
            self._delete_prefix(client, topic)
        elif dice < 0.055 and self._group.deletes_by_seq is self:
            self._delete_before(client, topic)
        elif dice < 0.065 and self._group.configures is self:
            topic.put(
                client, idempotency_window_ms=HOUR_MS, priority=rng.randint(-9, 9), max_deliveries=rng.randint(0, 9)
            )
        elif dice < 0.075:
            self._create_and_drop(client)
        else:
            self._append(client, topic)

    def _append(self, client: Client, topic: TopicLedger) -> None:
        rng = self._rng
        tag = None
        if rng.random() < 0.4:
            tag = f"{self.name}/{self._generation}"
            if tag not in self._tags[topic.name]:
                self._tags[topic.name].append(tag)
                self._used[topic.name].add(tag)
        meta = b'{"k": %d}' % rng.randint(0, 9) if rng.random() < 0.3 else None
        # Bytes of every kind: plain, of two to four bytes in UTF-8, and escaped.
        padding = rng.choice(("x", "x", "é€😀", r"\u00e9\n")) * rng.choice(PADDINGS)
        node = rng.choice((None, None, "node-1", "node-ü"))
        mixed = rng.random() < 0.2
        records: list[Given] = [
            (padding, tag if index % 3 != 1 else None, meta, None if mixed and index % 2 else node)
            for index in range(rng.choice(COUNTS))
        ]
        key = None
        if rng.random() < 0.4:
            self._keys += 1
            key = f"{self.name}-{id(self._group):x}-{self._keys}"
        batch = topic.append(client, records, key)
        if batch.fate is not Fate.ACKED:
            self._generation += 1
            time.sleep(0.02)

    def _delete_tag(self, client: Client, topic: TopicLedger) -> None:
        tag = self._rng.choice(self._tags[topic.name])
        self._generation += 1  # never append to a tag again after asking for its delete
        self._tags[topic.name].remove(tag)
        match = tag if self._rng.random() < 0.5 else ["tag", "Eq", tag]
        topic.delete(client, tags=[tag], match=match)

    def _delete_prefix(self, client: Client, topic: TopicLedger) -> None:
        self._generation += 1
        self._tags[topic.name] = []
        # Also those whose own delete was refused or not answered.
        topic.delete(client, tags=self._used[topic.name], match=["tag", "Glob", f"{self.name}/*"])

    def _delete_before(self, client: Client, topic: TopicLedger) -> None:
        if topic.highest_acked > 50:
            topic.delete(client, before_seq=self._rng.randint(1, topic.highest_acked - 50))

    def _create_and_drop(self, client: Client) -> None:
        """A topic of this worker alone."""
        oracle = self._group.oracle
        ledger = oracle.topic(f"short.{oracle.last_number()}", self._rng.choice(self._group.classes))
        if not ledger.put(client).ok:
            return
        ledger.append(client, [("", None, None)] * 3)
        if self._rng.random() < 0.7:
            ledger.drop(client)


class Workload:
    def __init__(
        self,
        oracle: Oracle,
        server: Server,
        topics: Sequence[TopicLedger],
        *,
        workers: int = 5,
        seed: int,
        outlives: bool = False,
        pace_s: float = 0.0,
        classes: Sequence[str] = CLASSES,
    ) -> None:
        self.oracle = oracle
        self.outlives = outlives
        self.pace_s = pace_s
        self.classes = classes  # of the topics that workers make for themselves
        self.stopping = threading.Event()
        rng = random.Random(seed)
        tag = oracle.last_number()  # names differ from those of any workload before
        self._workers = [
            Worker(f"w{tag}.{number}", topics, server.port, random.Random(rng.random()), self)
            for number in range(workers)
        ]
        self.deletes_by_seq = self._workers[0]
        self.configures = self._workers[-1]
        for worker in self._workers:
            worker.start()

    @property
    def done(self) -> int:
        return sum(worker.done for worker in self._workers)

    @property
    def unanswered(self) -> int:
        return sum(worker.unanswered for worker in self._workers)

    def wait_done(self, more: int, *, within_s: float = 60.0) -> None:
        """Until so many requests more are answered."""
        goal = self.done + more

        def enough() -> bool:
            self._raise()
            return self.done >= goal or not any(worker.is_alive() for worker in self._workers)

        eventually(enough, within_s=within_s, what=f"{more} more answers")

    def finish(self) -> None:
        self.stopping.set()
        for worker in self._workers:
            worker.join(60)
            assert not worker.is_alive(), f"{worker.name} hangs"
        self._raise()

    def _raise(self) -> None:
        for worker in self._workers:
            if worker.error is not None:
                raise worker.error
