"""Random rules, writes, deletes, changes and kills against a naive forwarder.

The model knows of each record in which topics it must be, how often, and where that can't be said. It can't where the
contract leaves it open: a copy in memory whose original was deleted may go with a crash, and behind a topic that mixes
copies with records of its own a crash may copy twice. Everything else is exact, at every moment at which nothing is
under way; and at every other moment a seq that a reader has seen means what it meant.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from crash_routers import Reader, World
from crash_server import EXHAUSTIVE, SMALL, Server, eventually
from figures import HISTORIES

pytestmark = [pytest.mark.recovery, pytest.mark.timeout(3_600 if EXHAUSTIVE else 180)]

TOPICS = [f"t{number}" for number in range(7)]
TAGS = ["a", "ab", "b", None]
MANY = 10**9


@dataclass(frozen=True)
class Route:
    source: str
    dest: str
    prefix: str | None = None
    keeps_tag: bool = True

    def takes(self, tag: str | None) -> bool:
        return self.prefix is None or (tag is not None and tag.startswith(self.prefix))

    def body(self, guarantee: str) -> dict[str, object]:
        return {
            "source": self.source,
            "dest": self.dest,
            "filter": None if self.prefix is None else ["tag", "Glob", f"{self.prefix}*"],
            "preserve_tag": self.keeps_tag,
            "allow_cycle": True,
            "guarantee": guarantee,
        }


@dataclass
class Expected:
    """How many copies of a record a topic holds."""

    low: int
    high: int


@dataclass
class Naive:
    routes: dict[str, Route] = field(default_factory=dict)
    records: dict[str, dict[int, Expected]] = field(default_factory=lambda: {topic: {} for topic in TOPICS})
    mixed: set[str] = field(default_factory=set)  # destinations whose copies may get new seqs in a crash
    loose: set[str] = field(default_factory=set)  # those that may get copies twice because of that

    def pairs(self) -> set[tuple[str, str]]:
        return {(route.source, route.dest) for route in self.routes.values()}

    def source_of(self, topic: str) -> str | None:
        return next((source for source, dest in self.pairs() if dest == topic), None)

    def back(self, topic: str) -> list[str]:
        """The topics a topic gets its records from, the nearest first; it may be among them itself."""
        found: list[str] = []
        at = self.source_of(topic)
        while at is not None and at not in found:
            found.append(at)
            at = self.source_of(at)
        return found

    def ring(self, source: str, dest: str) -> int | None:
        """How many topics the ring has that this arrow is part of."""
        back = self.back(source)
        return back.index(dest) + 2 if dest in back else None

    def may_route(self, route: Route) -> bool:
        return route.source != route.dest and self.source_of(route.dest) in (None, route.source)

    def behind(self, topic: str) -> set[str]:
        return {other for other in TOPICS if topic in self.back(other)}

    # --- what happens ---

    def write(self, topic: str, number: int, tag: str | None) -> None:
        if self.source_of(topic) is not None:
            self.mixed.add(topic)
        queue: list[tuple[str, str | None, int]] = [(topic, tag, 0)]
        found: Counter[str] = Counter()
        while queue:
            at, seen_as, hops = queue.pop(0)
            found[at] += 1
            for route in self.routes.values():
                if route.source != at or not route.takes(seen_as):
                    continue
                ring = self.ring(route.source, route.dest)
                if ring is None:
                    queue.append((route.dest, seen_as if route.keeps_tag else None, 0))
                elif hops < ring - 1:
                    queue.append((route.dest, seen_as if route.keeps_tag else None, hops + 1))
        for other, count in found.items():
            self.records[other][number] = Expected(count, count)
        self.loosen()

    def routed(self) -> None:
        """After a change of the routes."""
        for topic in TOPICS:
            if self.source_of(topic) is not None and self.records[topic]:
                self.mixed.add(topic)  # it may hold records from before it was a destination
        self.loosen()

    def loosen(self) -> None:
        """Behind a topic whose copies may get new seqs in a crash they are taken for new ones."""
        before = -1
        while before != len(self.loose):
            before = len(self.loose)
            for source, dest in self.pairs():
                ring = self.ring(source, dest)
                into = self.source_of(source)
                if ring == 2 or into is None:
                    continue
                in_ring = self.ring(into, source) is not None
                if in_ring or source in self.mixed or source in self.loose:
                    self.loose.add(dest)

    def deleted(self, topic: str, gone: Counter[int]) -> None:
        for number, count in gone.items():
            if number in self.records[topic]:
                expected = self.records[topic][number]
                self.records[topic][number] = Expected(max(0, expected.low - count), max(0, expected.high - count))
        if not gone:
            return
        for other in self.behind(topic) - {topic}:
            self.mixed.add(other)
            for number in gone:
                if number in self.records[other]:
                    self.records[other][number] = replace(self.records[other][number], low=0)
        self.loosen()

    def dropped(self, topic: str) -> list[str]:
        gone = sorted(name for name, route in self.routes.items() if topic in (route.source, route.dest))
        for name in gone:
            del self.routes[name]
        self.records[topic] = {}
        self.mixed.discard(topic)
        self.loose.discard(topic)
        return gone

    # --- what is there ---

    def complaint(self, topic: str, found: list[int]) -> str | None:
        counts = Counter(found)
        for number, expected in self.records[topic].items():
            most = MANY if topic in self.loose else expected.high
            if not expected.low <= counts[number] <= most:
                return f"{topic} holds {counts[number]} of record {number}, expected {expected}"
        strange = counts.keys() - self.records[topic].keys() if topic not in self.loose else set()
        return f"{topic} holds {sorted(strange)[:5]}, which never came there" if strange else None

    def complete(self, topic: str, found: list[int]) -> bool:
        counts = Counter(found)
        return all(counts[number] >= expected.low for number, expected in self.records[topic].items())


class Play:
    """One server, the model beside it, and a random walk through both."""

    def __init__(self, serve: Callable[..., Server], seed: int, env: dict[str, str]) -> None:
        self.rng = random.Random(seed)
        self.world = World(serve, env=env)
        self.naive = Naive()
        self.number = 0
        self.origin: dict[int, str] = {}
        self.log: list[str] = []
        self.readers: dict[str, Reader] = {}
        for topic in TOPICS:
            self._create(topic)

    def _create(self, topic: str) -> None:
        assert self.world.insist(lambda client: client.put(topic, durability=self.rng.choice(["disk", "fsync"]))).ok
        self.readers[topic] = Reader(self.world, topic, seed=self.rng.randrange(1 << 30), pause_s=0.02)

    def numbers_in(self, topic: str) -> list[int]:
        return [record["data"] for record in self.world.read(topic) if "data" in record]

    # --- while nothing is under way ---

    def change_rules(self) -> None:
        naive, rng, world = self.naive, self.rng, self.world
        for _ in range(rng.randint(1, 4)):
            dice = rng.random()
            if dice < 0.25 and naive.routes:
                name = rng.choice(sorted(naive.routes))
                self.log.append(f"unroute {name} {naive.routes[name]}")
                world.unroute(name)
                del naive.routes[name]
                naive.routed()
                continue
            if dice < 0.4 and naive.routes:
                name = rng.choice(sorted(naive.routes))
                route = replace(naive.routes[name], prefix=rng.choice([None, "a", "b"]), keeps_tag=rng.random() < 0.7)
            else:
                name = f"r{rng.randrange(14)}"
                source, dest = rng.sample(TOPICS, 2)
                route = Route(source, dest, rng.choice([None, None, "a"]), rng.random() < 0.8)
                if name in naive.routes or not naive.may_route(route):
                    continue
            body = route.body(rng.choice(["at_least_once", "exactly_once"]))
            answer = world.insist(lambda client, name=name, body=body: client.call("PUT", f"/v0/routers/{name}", body))  # type: ignore[misc]
            assert answer.ok, answer
            self.log.append(f"route {name} {route}")
            naive.routes[name] = route
            naive.routed()

    def delete_some(self) -> None:
        topic = self.rng.choice(TOPICS)
        before = Counter(self.numbers_in(topic))
        if self.rng.random() < 0.5:
            tag = self.rng.choice(["a", "ab", "b"])
            match: object = tag if self.rng.random() < 0.5 else ["tag", "Glob", f"{tag[0]}*"]
            answer = self.world.insist(lambda client: client.delete(topic, match=match))
        else:
            seq = self.world.state(topic)["earliest_seq"] + self.rng.randint(0, 6)
            answer = self.world.insist(lambda client: client.delete(topic, before_seq=seq))
        assert answer.ok, answer
        gone = before - Counter(self.numbers_in(topic))
        self.log.append(f"delete at {topic}: {dict(gone)}")
        self.naive.deleted(topic, gone)

    def drop_one(self) -> None:
        topic = self.rng.choice(TOPICS)
        self.log.append(f"drop {topic}")
        self.readers.pop(topic).finish()
        answer = self.world.insist(lambda client: client.call("DELETE", f"/v0/topics/{topic}"))
        assert answer.body["routers_removed"] == self.naive.dropped(topic)
        self._create(topic)

    def configure(self) -> None:
        topic = self.rng.choice(TOPICS)
        config = {"durability": self.rng.choice(["disk", "fsync", "memory"]), "priority": self.rng.randint(1, 900)}
        self.log.append(f"configure {topic} {config}")
        assert self.world.insist(lambda client: client.put(topic, **config)).ok

    # --- while everything is under way ---

    def write_some(self, batches: int) -> None:
        for _ in range(batches):
            topic = self.rng.choice(TOPICS)
            records: list[dict[str, Any]] = []
            for _ in range(self.rng.randint(1, 5)):
                tag = self.rng.choice(TAGS)
                records.append({"data": self.number, "tag": tag})
                self.origin[self.number] = topic
                self.naive.write(topic, self.number, tag)
                self.number += 1
            self.log.append(f"write {topic} {[record['data'] for record in records]}")
            body = {"records": records, "idempotency_key": f"k{self.number}"}
            path = f"/v0/topics/{topic}"
            answer = self.world.insist(lambda client, path=path, body=body: client.call("POST", path, body))  # type: ignore[misc]
            assert answer.ok, answer

    def kill_something(self) -> None:
        victim = self.rng.choice(["router", "shard-0", "shard-1", "tree", "tree"])
        self.log.append(f"kill {victim}")
        if victim == "tree":
            self.world.restart("kill" if self.rng.random() < 0.8 else "stop")
        else:
            self.world.server.signal_child(victim)

    # --- the comparison ---

    def settle(self) -> None:
        """Until everything that must be somewhere is there, and nothing moves any more."""
        self.world.server.wait_ready()
        last: dict[str, int] = {}

        def at_rest() -> bool:
            nonlocal last
            heads = {topic: self.world.state(topic)["head_seq"] for topic in TOPICS}
            moved, last = heads != last, heads
            if moved:
                time.sleep(0.15)
                return False
            return all(self.naive.complete(topic, self.numbers_in(topic)) for topic in TOPICS)

        try:
            eventually(at_rest)
        except AssertionError:
            complaints = [self.naive.complaint(topic, self.numbers_in(topic)) for topic in TOPICS]
            raise AssertionError(self.story([each for each in complaints if each])) from None

    def story(self, complaints: list[str]) -> str:
        """What has happened so far."""
        return "\n".join([*complaints, *self.log[-60:]])

    def check(self) -> None:
        for topic in TOPICS:
            found = self.numbers_in(topic)
            complaint = self.naive.complaint(topic, found)
            assert complaint is None, self.story([complaint])
            if topic in self.naive.loose:
                continue
            firsts = list(dict.fromkeys(found))
            for origin in set(map(self.origin.__getitem__, firsts)):
                mine = [number for number in firsts if self.origin[number] == origin]
                assert mine == sorted(mine), f"{topic}: what was written to {origin} has another order: {mine}"
        for reader in self.readers.values():
            assert reader.error is None, reader.error
        assert set(self.world.routers()) == set(self.naive.routes)


@pytest.mark.gate
@pytest.mark.parametrize("env", [{}, SMALL], ids=["defaults", "small-files"])
def test_like_a_naive_forwarder(serve: Callable[..., Server], seed: int, env: dict[str, str]) -> None:
    if not env and not EXHAUSTIVE:
        pytest.skip("one of the two is enough for every day")
    play = Play(serve, seed, env)
    HISTORIES.add()
    for _ in range(40 if EXHAUSTIVE else 5):
        play.change_rules()
        for _ in range(2):
            play.write_some(play.rng.randint(2, 12))
            if play.rng.random() < 0.7:
                play.kill_something()
            play.write_some(play.rng.randint(0, 6))
        play.settle()
        play.check()
        for change in play.rng.choices([play.delete_some, play.configure, play.drop_one], [4, 1, 1], k=2):
            change()
            play.check()
    for reader in play.readers.values():
        reader.finish()
