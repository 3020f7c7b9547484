"""Writers that never give up, and a server that is killed under them.

Each record holds a number of its own. A writer repeats an append under the same idempotency key until it is answered,
so what it was told is what must be there, once.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from e2e.client import Client, Lost
from e2e.server import Server, eventually

# Read now: the Spark of the tests takes such variables out of the environment.
_SEED = os.environ.get("TOPICS_TEST_SEED") or "1"  # the same in every usual run
_ROUNDS = os.environ.get("TOPICS_SPARK_ROUNDS")
KILLS_PER_LIFE = 3  # of one process; after five in a minute it stays down


def seed() -> int:
    """Shown when a test fails; TOPICS_TEST_SEED runs it again, or another one; "random" finds one."""
    chosen = random.SystemRandom().randrange(1 << 32) if _SEED == "random" else int(_SEED)
    print(f"TOPICS_TEST_SEED={chosen}")
    return chosen


def rounds(default: int) -> int:
    """TOPICS_SPARK_ROUNDS=100 for a long run."""
    return int(_ROUNDS or default)


class Stage:
    """A folder whose server comes and goes."""

    def __init__(self, start_server: Callable[..., Server], data_dir: Path, dice: random.Random) -> None:
        self._start = start_server
        self._dice = dice
        self.data_dir = data_dir
        self._kills: dict[str, int] = {}
        self.server = self._begin()

    def _begin(self) -> Server:
        self._kills = {}
        return self._start(
            data_dir=self.data_dir,
            TOPICS_SEGMENT_MAX_EVENTS=self._dice.choice([20, 200, 5_000]),
            TOPICS_WAL_FILE_BYTES=1 << 20,
        )

    def kill_all(self) -> None:
        self.server.kill()
        self.server = self._begin()

    def stop(self) -> None:
        assert self.server.stop() == 0, self.server.output()[-2_000:]
        self.server = self._begin()

    def kill_child(self, name: str) -> None:
        if self._kills.get(name, 0) >= KILLS_PER_LIFE:
            self.kill_all()
            return
        self._kills[name] = self._kills.get(name, 0) + 1
        self.server.signal_child(name)
        self.wait_ready()

    def wait_ready(self) -> None:
        def ready() -> bool:
            try:
                with self.server.client() as api:
                    return api.get("/v0/ready").status == 200
            except Lost:
                return False

        eventually(ready, within_s=60, what="a server that serves again")

    def disturb(self) -> str:
        """Something at random; what it was."""
        what = self._dice.choice(["shard-0", "shard-1", "shard-0", "shard-1", "router", "server", "stop", "nothing"])
        if what == "server":
            self.kill_all()
        elif what == "stop":
            self.stop()
        elif what != "nothing":
            self.kill_child(what)
        return what


class Writers:
    """One thread for each topic; `acked` has what they were told: topic -> {seq: number}."""

    def __init__(self, stage: Stage, *topics: str, pause_s: float = 0.01) -> None:
        self._stage = stage
        self._pause_s = pause_s
        self._stop = threading.Event()
        self.failures: list[BaseException] = []
        self.acked: dict[str, dict[int, int]] = {topic: {} for topic in topics}
        self._threads = [threading.Thread(target=self._run, args=(topic,), daemon=True) for topic in topics]

    def __enter__(self) -> Writers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(90)
        assert not any(thread.is_alive() for thread in self._threads)

    def _run(self, topic: str) -> None:
        try:
            self._write(topic)
        except BaseException as failure:
            self.failures.append(failure)
            raise

    def _write(self, topic: str) -> None:
        dice = random.Random(topic)
        number = 0
        while not self._stop.is_set():
            numbers = list(range(number + 1, number + 1 + dice.randint(1, 30)))
            number = numbers[-1]
            for seq, each in zip(self._append(topic, numbers), numbers, strict=True):
                self.acked[topic][seq] = each
            time.sleep(self._pause_s)

    def _client(self) -> Client | None:
        """None if this life has ended before it had a port. What a client then says of an answer is a finding."""
        try:
            return self._stage.server.client()
        except AssertionError:
            return None

    def _append(self, topic: str, numbers: list[int]) -> list[int]:
        """Until it is answered."""
        records = [{"data": {"topic": topic, "number": n}, "tag": f"g{n % 5}"} for n in numbers]
        deadline = time.monotonic() + 80
        last: Any = None
        while time.monotonic() < deadline:
            api = self._client()
            if api is not None:
                try:
                    with api:
                        last = api.append_records(topic, records, idempotency_key=f"{topic}:{numbers[0]}")
                    if last.status in (200, 201):
                        seqs: list[int] = last["seqs"]
                        return seqs
                except Lost as lost:
                    last = lost
            time.sleep(0.05)
        raise AssertionError(f"{topic}: never answered: {last!r}")
