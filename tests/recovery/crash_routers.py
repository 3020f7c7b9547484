"""Who writes to sources and reads destinations while processes die.

- A Writer sends every batch under a key of its own until it is acknowledged, so each of its records is in its topic
  exactly once, in its order.
- A Reader never stops: it follows a topic by `diff`, and reads again what it has read before. A seq that it has seen
  shows the same record for ever, or none; never another one.
- A Watcher follows a topic over one event stream, which has to outlive everything but its gateway.

All of them find the server through a World, which knows the life that goes on now.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from crash_server import DEADLINE_S, Answer, Client, NoAnswer, Server, eventually
from e2e.sse import Ended, EventStream, Silence, Watching
from figures import ACKNOWLEDGED, CHECKED, LOST

from topics.shm.counters import State
from topics.storage.config import owner_of_name

PAUSE_S = 0.02


def name_on(shard: int, stem: str, shards: int = 2) -> str:
    return next(name for n in range(1_000) if owner_of_name(name := f"{stem}-{n}", shards) == shard)


class World:
    """The server that there is now; the folder is the same in all of its lives."""

    def __init__(self, serve: Callable[..., Server], **how: Any) -> None:
        self._serve = serve
        self._how = how
        self.server: Server = serve(**how)
        self.client: Client = self.server.client()

    def restart(self, end: str = "kill", **how: Any) -> None:
        """End this life by "kill" or "stop", and begin the next."""
        self._how |= how
        if end == "kill":
            self.server.kill()
        else:
            assert self.server.stop() == 0, self.server.log()
        self.server = self._serve(**self._how)
        self.client = self.server.client()

    def kill_process(self, name: str) -> None:
        """kill -9 of one process, until its successor serves."""
        before = self.server.restarts(name)
        self.server.signal_child(name)
        eventually(
            lambda: self.server.restarts(name) > before and self.server.state(name) is State.READY,
            what=f"{name} back\n{self.server.log()[-3_000:]}",
        )
        self.server.wait_ready()

    def new_client(self) -> Client:
        return self.server.client(timeout_s=20)

    # --- requests that are repeated until they are answered ---

    def insist(self, call: Callable[[Client], Answer], *, within_s: float = DEADLINE_S) -> Answer:
        """Ask until there is an answer that says yes or no."""
        deadline = time.monotonic() + within_s
        last: object = None
        while time.monotonic() < deadline:
            try:
                answer = call(self.client)
                if answer.status < 500 and answer.status != 429:
                    return answer
                last = answer
            except NoAnswer as error:
                last = error
            time.sleep(PAUSE_S)
        raise AssertionError(f"no answer within {within_s} s; the last: {last}\n{self.server.log()[-3_000:]}")

    def route(self, source: str, dest: str, name: str | None = None, **options: object) -> str:
        name = name or f"{source}->{dest}"
        body = {"source": source, "dest": dest, **options}
        answer = self.insist(lambda client: client.call("PUT", f"/v0/routers/{name}", body))
        assert answer.ok, answer
        return name

    def unroute(self, name: str) -> None:
        assert self.insist(lambda client: client.call("DELETE", f"/v0/routers/{name}")).ok

    def routers(self) -> dict[str, dict[str, Any]]:
        answer = self.insist(lambda client: client.call("GET", "/v0/routers?page_size=1000"))
        return {row["router"]: row for row in answer.body["routers"]}

    def wait_forwarded(self, totals: dict[str, int]) -> None:
        """Until routers say so. Copies are readable a moment before their router hears of it."""

        def told() -> bool:
            found = {name: row["forwarded_total"] for name, row in self.routers().items() if name in totals}
            assert all(found[name] <= total for name, total in totals.items()), found
            return found == totals

        eventually(told, what=f"{totals}")

    def state(self, topic: str) -> dict[str, Any]:
        answer = self.insist(lambda client: client.call("GET", f"/v0/topics/{topic}?touch=false"))
        assert answer.ok, answer
        found: dict[str, Any] = answer.body
        return found

    def read(self, topic: str, from_seq: int = 0) -> list[dict[str, Any]]:
        """Everything, a tombstone where there is one."""
        found: list[dict[str, Any]] = []
        while True:
            at = from_seq
            answer = self.insist(lambda client: client.diff(topic, at, limit=1_000, include_tags=True))  # noqa: B023
            assert answer.ok, answer
            page = answer.body
            if page["tombstone"] is not None:
                found.append(page["tombstone"])
            found += page["records"]
            from_seq = page["next_from_seq"]
            if page["caught_up"]:
                return found

    def data(self, topic: str) -> list[Any]:
        """A tombstone is shown by its reason."""
        return [record.get("data", record.get("reason")) for record in self.read(topic)]

    def seqs(self, topic: str) -> dict[int, Any]:
        return {record["$seq"]: record["data"] for record in self.read(topic) if "$seq" in record}

    def wait_data(self, topic: str, expected: Sequence[Any], *, within_s: float = DEADLINE_S) -> None:
        found: list[Any] = []

        def there() -> bool:
            nonlocal found
            if self.state(topic)["count"] < len(expected) and len(expected) > 100:
                return False  # reading all of it takes longer
            found = self.data(topic)
            return found == list(expected) or len(found) > len(expected)

        try:
            eventually(there, within_s=within_s)
        except AssertionError:
            found = self.data(topic)
        reckon(found, expected)
        assert found == list(expected), _difference(topic, found, list(expected))


def reckon(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Count what was looked for, and what of it is missing."""
    CHECKED.add(len(expected))
    LOST.add((Counter(map(json.dumps, expected)) - Counter(map(json.dumps, found))).total())


def _difference(topic: str, found: list[Any], expected: list[Any]) -> str:
    at = next(
        (n for n, (x, y) in enumerate(zip(found, expected, strict=False)) if x != y), min(len(found), len(expected))
    )
    missing = [value for value in expected if value not in found]
    twice = [value for n, value in enumerate(found) if value in found[:n]]
    return (
        f"{topic}: {len(found)} records instead of {len(expected)}; from {at} on {found[at : at + 5]} instead of "
        f"{expected[at : at + 5]}; missing {missing[:5]}, twice {twice[:5]}"
    )


class _Actor(threading.Thread):
    """Works in a loop until it is told to stop, and keeps what went wrong."""

    def __init__(self, world: World) -> None:
        super().__init__(daemon=True)
        self.world = world
        self.stopping = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        client: Client | None = None
        server: Server | None = None
        try:
            while not self.stopping.is_set():
                try:
                    if client is None or server is not self.world.server:
                        server = self.world.server
                        client = self.world.new_client()
                    self.step(client)
                except NoAnswer:
                    client = None
                    time.sleep(PAUSE_S)
                except AssertionError:
                    if self.world.server.popen.poll() is None and server is self.world.server:
                        raise
                    time.sleep(PAUSE_S)  # it was the port of a server that has ended
        except BaseException as error:
            self.error = error

    def step(self, client: Client) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        self.stopping.set()
        self.join(60)
        assert not self.is_alive(), f"{self} does not end"
        if self.error is not None:
            raise self.error


class Writer(_Actor):
    def __init__(
        self, world: World, topic: str, name: str, *, seed: int, most: int = 12, pace_s: float = 0.002
    ) -> None:
        super().__init__(world)
        self.topic = topic
        self.label = name
        self.sent = 0  # records that are acknowledged
        self._rng = random.Random(seed)
        self._most = most
        self._pace_s = pace_s
        self._batches = 0
        self._count = 0
        self.start()

    def step(self, client: Client) -> None:
        if not self._count:
            self._count = self._rng.randint(1, self._most)
            self._batches += 1
        data = [[self.label, self.sent + at] for at in range(self._count)]
        answer = client.append(self.topic, *data, idempotency_key=f"{self.label}.{self._batches}")
        if answer.ok:
            self.sent += self._count
            ACKNOWLEDGED.add(self._count)
            self._count = 0
            time.sleep(self._pace_s)
        else:
            assert answer.status in (429, 503), answer
            time.sleep(PAUSE_S)

    def wait_sent(self, more: int) -> None:
        goal = self.sent + more

        def there() -> bool:
            assert self.error is None, self.error
            return self.sent >= goal

        eventually(there, what=f"{more} more records of {self.label}")


class Reader(_Actor):
    """`got` is what it was given in its order; `seen` is what each seq meant."""

    def __init__(self, world: World, topic: str, *, seed: int = 1, pause_s: float = 0.005) -> None:
        super().__init__(world)
        self.topic = topic
        self._pause_s = pause_s  # a shard that is never left alone writes no segments
        self.got: list[Any] = []
        self.tombstones: list[dict[str, Any]] = []
        self.seen: dict[int, Any] = {}
        self.at = 0
        self._rng = random.Random(seed)
        self._turn = 0
        self.start()

    def step(self, client: Client) -> None:
        self._turn += 1
        again = self._turn % 4 == 0
        from_seq = self._rng.randint(max(0, self.at - 500), self.at) if again else self.at
        answer = client.diff(self.topic, from_seq, limit=300)
        if not answer.ok:
            assert answer.status in (429, 503), answer
            time.sleep(PAUSE_S)
            return
        page = answer.body
        for record in page["records"]:
            seq, data = record["$seq"], record["data"]
            assert self.seen.setdefault(seq, data) == data, (
                f"{self.topic}: seq {seq} was {self.seen[seq]} and is {data}"
            )
        if again:
            time.sleep(self._pause_s)
            return
        if page["tombstone"] is not None:
            self.tombstones.append(page["tombstone"])
            assert page["tombstone"]["reason"] != "recreated", f"{self.topic}: head went back: {page}"
        self.got += [record["data"] for record in page["records"]]
        self.at = page["next_from_seq"]
        if not page["records"]:
            time.sleep(self._pause_s)

    def wait_got(self, expected: list[Any]) -> None:
        """Each record once, in the order of the source, and no gap."""
        eventually(lambda: len(self.got) >= len(expected) or self.error, what=f"a reader of {self.topic} at its end")
        self.finish()
        reckon(self.got, expected)
        assert self.got == expected, _difference(f"a reader of {self.topic}", self.got, expected)
        assert self.tombstones == []


class Watcher(threading.Thread):
    """One stream from the topic's start; whatever it gets is checked as any stream's frames are."""

    def __init__(self, world: World, topic: str) -> None:
        super().__init__(daemon=True)
        self.topic = topic
        self.error: BaseException | None = None
        self._expected: int | None = None
        self._watching = Watching(world.server)  # type: ignore[arg-type]
        self.stream: EventStream = self._watching.follow(topic)
        self.start()

    def run(self) -> None:
        try:
            while self._expected is None or len(self.stream.seqs(self.topic)) < self._expected:
                try:
                    self.stream.frame(within_s=0.5)
                except Silence:
                    pass
        except (Ended, BaseException) as error:
            self.error = error

    def wait_got(self, expected: list[Any]) -> None:
        self._expected = len(expected)
        self.join(DEADLINE_S)
        self._watching.close()
        if self.error is not None:
            raise self.error
        found = self.stream.data(self.topic)
        reckon(found, expected)
        assert found == expected, _difference(f"a watcher of {self.topic}", found, expected)
        assert self.stream.of("tombstone") == []
