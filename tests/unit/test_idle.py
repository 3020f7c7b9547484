"""How a process waits: what is there is noticed before it sleeps, whenever it came."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator

import pytest
import trio
from trio.testing import MockClock

from topics.actors.idle import BACKSTOP_S, Idle
from topics.shm.counters import Board
from topics.shm.doorbell import Doorbell


class Bell(Doorbell):
    """Calls back when its owner has announced sleep."""

    __slots__ = ("on_arm",)

    def __init__(self, fd: int, words: memoryview, index: int) -> None:
        super().__init__(fd, words, index)
        self.on_arm: Callable[[], object] = lambda: None

    def arm(self) -> None:
        super().arm()
        self.on_arm()


class Process:
    """One that waits, and what it waits for."""

    def __init__(self) -> None:
        self.words = memoryview(bytearray(8)).cast("Q")
        self.bell = Bell(Doorbell.create_fd(), self.words, 0)
        self.work = False
        self.deadline_ns: int | None = None
        self.idle = Idle(
            self.bell,
            spin_us=0,
            has_work=lambda: self.work,
            next_deadline_ns=lambda: self.deadline_ns,
            row=Board.create(["shard-0"]).row("shard-0"),
        )

    def wait(self) -> tuple[list[tuple[int, int]], float]:
        """What was ready, and how long it slept in trio; the clock jumps over that."""

        async def main() -> tuple[list[tuple[int, int]], float]:
            started = trio.current_time()
            events = await self.idle.wait(expecting=True, linger=False)
            return events, trio.current_time() - started

        found: tuple[list[tuple[int, int]], float] = trio.run(main, clock=MockClock(autojump_threshold=0))
        return found

    def close(self) -> None:
        self.idle.close()
        os.close(self.bell.fileno())


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process()
    yield process
    process.close()


def test_what_came_before_the_flag_was_up_is_not_slept_through(process: Process) -> None:
    """Its sender has looked at the flag already and rings no bell: only a second look at the rings finds it."""

    def publish() -> None:
        process.work = True

    process.bell.on_arm = publish
    assert process.wait() == ([], 0.0)
    assert process.words[0] == 0, "it is awake, and says so"


def test_what_is_there_needs_no_sleep(process: Process) -> None:
    process.work = True
    assert process.wait() == ([], 0.0)


def test_a_bell_wakes_and_is_swallowed(process: Process) -> None:
    process.bell.on_arm = process.bell.ring
    assert process.wait() == ([], 0.0)
    assert process.words[0] == 0
    assert not select.select([process.bell.fileno()], [], [], 0)[0]


def test_a_descriptor_that_is_ready_is_told(process: Process) -> None:
    ours, theirs = os.pipe()
    process.idle.register(ours)
    process.bell.on_arm = lambda: os.write(theirs, b"x")
    assert process.wait() == ([(ours, select.EPOLLIN)], 0.0)
    os.close(ours)
    os.close(theirs)


def test_without_any_bell_it_looks_again_after_a_while(process: Process) -> None:
    assert process.wait() == ([], BACKSTOP_S)
    assert process.words[0] == 0


def test_a_deadline_ends_the_sleep(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = time.monotonic_ns()
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    process.deadline_ns = now_ns + 1_500_000_000
    assert process.wait() == ([], 1.5)
    process.deadline_ns = now_ns - 1_000_000_000  # it has passed
    assert process.wait() == ([], 0.0)
