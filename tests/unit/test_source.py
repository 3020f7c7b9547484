"""A router's source: news that come right behind the answer, and reads that are shared."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from topics.actors import messages
from topics.actors.messages import Op
from topics.actors.rpc import Unavailable
from topics.router.source import Source


class FakeAsks:
    """Answers as a shard would; `between` happens when the answer is in the ring and nobody has looked at it yet."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.unfollowed: list[int] = []
        self.between: Any = lambda correlation: None
        self.fails = False

    def send(self, shard: int, op: Op, head: Any, body: bytes = b"") -> tuple[int, Any]:
        self.asked.append(head)
        return len(self.asked), None

    async def answer(self, shard: int, correlation: int, entry: Any) -> Any:
        await trio.lowlevel.checkpoint()
        self.between(correlation)
        if self.fails:
            raise Unavailable
        return messages.Following(7, 0, 0)

    async def ask(self, shard: int, op: Op, head: Any, body: bytes = b"") -> tuple[Any, bytes]:
        self.asked.append(head)
        await trio.lowlevel.checkpoint()
        return messages.RawPiece(3, 3, 3, [(1, 3)], 0, True, None), b"batch"

    def unfollow(self, shard: int, correlation: int) -> None:
        self.unfollowed.append(correlation)


def make() -> tuple[Source, FakeAsks]:
    asks = FakeAsks()
    return Source(asks, topic="t", topic_id=7, shard=0), asks  # type: ignore[arg-type]


def test_news_right_behind_the_answer_are_not_lost() -> None:
    source, asks = make()

    def moved(correlation: int) -> None:
        assert source.correlation == correlation  # who takes the news finds the source by it
        source.moved(5)

    asks.between = moved

    async def main() -> None:
        await source.follow()
        with trio.fail_after(5):
            await source.wait_beyond(0)

    trio.run(main)
    assert source.head_seq == 5


def test_a_follow_that_fails_is_taken_back() -> None:
    source, asks = make()
    asks.fails = True

    async def main() -> None:
        with pytest.raises(Unavailable):
            await source.follow()

    trio.run(main)
    assert source.correlation == 0
    assert asks.unfollowed == [1]


@pytest.mark.parametrize(("users", "reads"), [(1, 2), (2, 1)])
def test_a_read_is_shared_by_those_who_come_together(users: int, reads: int) -> None:
    source, asks = make()
    source.users = users

    async def main() -> None:
        await source.read(0)
        await source.read(0)

    trio.run(main, clock=trio.testing.MockClock())  # it stands still
    assert len(asks.asked) == reads


def test_a_read_is_not_shared_for_long() -> None:
    source, asks = make()
    source.users = 2

    async def main() -> None:
        await source.read(0)
        await trio.sleep(0.05)
        await source.read(0)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert len(asks.asked) == 2


def test_whoever_opens_a_pipe_reads_anew() -> None:
    """What it was refused before, and others have read just now, may have been deleted since."""
    source, asks = make()
    source.users = 2

    async def main() -> None:
        await source.read(0)
        await source.read(0, shared=False)

    trio.run(main, clock=trio.testing.MockClock())
    assert len(asks.asked) == 2
