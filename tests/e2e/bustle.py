"""Four clients that do all that clients can do, at random, beside somebody who looks at the folder."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from onlooker import Api

HOUR_MS = 3_600_000
BUSY = ("plain", "caps", "capb", "sure", "tags", "mem", "jobs", "long", "copy", "sure-caps")


def record(number: int, size: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = {"data": {"n": number, "é": "\u2028", "p": "x" * size}}
    if number % 3:
        found["tag"] = f"t{number % 7}"
    if number % 4 == 0:
        found["meta"] = {"k": number, "s": [1.5e3, None]}
    return found


def prepare(api: Api) -> None:
    """The topics that they write to."""
    api.put("jobs", type="queue", lease_ms=HOUR_MS)
    api.put("sure", durability="fsync")
    api.put("sure-caps", durability="fsync", cap_records=50)
    api.put("mem", durability="memory")
    api.put("caps", cap_records=50)
    api.put("capb", cap_bytes=5_000)
    api.must("PUT", "/v0/routers/r", {"source": "plain", "dest": "copy"})
    for name in BUSY:
        api.append(name, [record(0)])


class Writers:
    """Do what clients do, until told to stop. rough: the server is about to die, and requests may fail."""

    def __init__(self, port: int, seed: int, *, rough: bool = False) -> None:
        self._rough = rough
        self._gate = threading.Lock()  # holds them back between two requests
        self._turns = threading.Semaphore(4)
        self._port = port
        self._over = threading.Event()
        self._numbers = count(1)
        self.failures: list[BaseException] = []
        self.done = 0
        self._threads = [threading.Thread(target=self._run, args=(random.Random(seed + at),)) for at in range(4)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def hold(self) -> None:
        """Everything that was asked has been answered, and nothing more is asked."""
        self._gate.acquire()
        for _ in self._threads:
            self._turns.acquire()

    def go_on(self) -> None:
        for _ in self._threads:
            self._turns.release()
        self._gate.release()

    def _run(self, rng: random.Random) -> None:
        api = Api(self._port)
        try:
            while not self._over.is_set():
                with self._gate:
                    self._turns.acquire()
                try:
                    self._do(api, rng)
                    self.done += 1
                except (AssertionError, OSError, http.client.HTTPException):
                    if not self._rough:
                        raise
                    api.close()
                    time.sleep(0.005)
                finally:
                    self._turns.release()
        except BaseException as failure:  # told to the test
            self.failures.append(failure)
        finally:
            api.close()

    def _do(self, api: Api, rng: random.Random) -> None:
        topic = rng.choice(BUSY)
        dice = rng.random()
        if dice < 0.6:
            size = 4_000 if topic == "long" else rng.randrange(60)
            api.append(topic, [record(next(self._numbers), size) for _ in range(rng.randrange(1, 12))])
        elif dice < 0.72 and topic != "jobs":
            api.post(topic, "delete", match=["tag", "Eq", f"t{rng.randrange(7)}"])
        elif dice < 0.8 and topic != "jobs":
            state = api.state(topic)
            api.post(topic, "delete", before_seq=rng.randint(state["earliest_seq"], state["head_seq"] + 1))
        elif dice < 0.86:
            self._configure(api, rng)
        elif dice < 0.9:
            api.append("again-made", [record(next(self._numbers))])
            if rng.random() < 0.4:
                api.ask("DELETE", "/v0/topics/again-made")
        else:
            node = f"w{rng.randrange(3)}"
            mine = [job["$seq"] for job in api.post("jobs", "claim", node=node, max=6)["claimed"]]
            if mine[:4]:
                api.post("jobs", "ack", node=node, seqs=mine[:4])
            if mine[4:]:
                api.post("jobs", "nack", node=node, seqs=mine[4:])

    def _configure(self, api: Api, rng: random.Random) -> None:
        cap = rng.choice([40, 80, 160])
        ways: list[Callable[[], object]] = [
            lambda: api.put("caps", cap_records=cap),
            lambda: api.put("capb", cap_bytes=cap * 60),
            lambda: api.put("sure-caps", cap_records=cap, durability="fsync"),
            lambda: api.put("mem", durability=rng.choice(["memory", "disk", "fsync"]), cap_records=cap * 3),
        ]
        rng.choice(ways)()
