"""Queues whose older jobs are in the cold tier while its disk is away: claims and streams get the others, each in its
turn, and nobody pays for those that wait."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from queueplay import Claimed, House, Sink, run
from test_queue_process import is_idle, seqs
from test_relocator import fill, settings
from test_tier import Disk

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.storage.config import TopicConfig

Script = Callable[["Story"], Awaitable[None]]
AWAY = "shard_unavailable"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAL_RESERVE_BYTES", 1_000)
    monkeypatch.setattr(limits, "BLOCK_RECORDS", 10)


class Story:
    """Jobs 1 to 80 are in the cold tier, 81 to 100 are hot."""

    def __init__(self, house: House, tmp_path: Path) -> None:
        self.house = house
        self.shard = house.shard.shard
        self.asked: list[messages.TakeJobs] = []
        self._round = house.shard.round
        house.shard.round = self._fetching_round  # type: ignore[method-assign]
        self.shard.put("q", TopicConfig(type="queue"))
        fill(self.shard, "q")
        self.shard.relocate()
        self.disk = Disk(tmp_path / "cold")
        take = self.shard.engine._handlers[Op.TAKE_JOBS]

        def taken(request: Any, reply_to: Any, correlation: int) -> Any:
            self.asked.append(request)
            return take(request, reply_to, correlation)

        self.shard.engine._handlers[Op.TAKE_JOBS] = taken

    def _fetching_round(self) -> None:
        """The shard is woken when a block is there."""
        self.shard.engine.fetcher.wait()
        self._round()
        self.shard.engine.fetcher.wait()
        self.shard.engine.commit.write()
        self.house.shard.flush()

    async def claim(self, most: int = 1, node: str = "w") -> list[int] | str:
        """What it gets, or the code of its error."""
        sink: Sink = self.house.gateway.claim("q", node, most)
        await self.house.settle()
        assert sink.error or isinstance(sink.value, Claimed), "nobody is left waiting"
        return sink.error or seqs(sink.value.jobs)

    async def ack(self, *gone: int) -> None:
        await self.house.ask(self.house.gateway.ack("q", "w", list(gone)))

    async def nack(self, *free: int) -> None:
        await self.house.ask(self.house.gateway.nack("q", "w", list(free)))

    async def disk_goes(self) -> None:
        self.disk.go(leaving="an empty folder")
        self.shard.engine.jobs._rendered.clear()
        await self._look(gone=True)

    async def disk_returns(self) -> None:
        self.disk.come_back()
        await self._look(gone=False)

    async def _look(self, *, gone: bool) -> None:
        relocator = self.shard.relocator
        assert relocator is not None
        await self.house.pass_time(2_500)
        relocator.look()
        relocator.wait()
        assert relocator.gone == gone
        self.asked.clear()


def play(tmp_path: Path, script: Script, **more: Any) -> None:
    async def told(house: House) -> None:
        await script(Story(house, tmp_path))

    run(tmp_path / "data", told, **settings(tmp_path, **more))


def test_free_jobs_that_are_hot_do_not_wait_for_those_that_are_not(tmp_path: Path) -> None:
    async def script(story: Story) -> None:
        assert await story.claim(100) == list(range(1, 101))
        await story.ack(*range(4, 98))
        await story.nack(1, 2, 3, 98, 99, 100)
        await story.disk_goes()
        assert await story.claim(1) == [98]
        assert await story.claim(1) == [99]
        assert [request.wanted for request in story.asked] == [[1], [1], [98], [99]], "1 is fetched, then left alone"
        assert await story.claim(3) == [100]
        assert await story.claim(1) == AWAY
        await story.nack(99)
        assert await story.claim(3) == [99]
        await story.nack(98)
        await story.disk_returns()
        assert await story.claim(9) == [1, 2, 3, 98], "in their place"

    play(tmp_path, script)


def test_fresh_jobs_that_are_hot_cost_the_same_however_many_are_held(tmp_path: Path) -> None:
    async def script(story: Story) -> None:
        assert await story.claim(20) == list(range(1, 21))
        await story.disk_goes()
        for seq in range(81, 96):
            assert await story.claim(1) == [seq]
        assert max(len(request.held) for request in story.asked) == 0, "the cursor goes on"
        await story.ack(81, 82)
        await story.nack(85, 3)
        assert await story.claim(9) == [85, 96, 97, 98, 99, 100]
        assert await story.claim(1) == AWAY
        await story.house.pass_time(5_000)
        assert await story.claim(1) == AWAY
        await story.nack(84)
        assert await story.claim(1) == [84]
        await story.disk_returns()
        got: list[Any] = []
        while len(got) < 61:
            got += await story.claim(100)  # fewer where a block has to be fetched
        assert got == [3, *range(21, 81)], "nobody has lost his, and none is left out"

    play(tmp_path, script)


def test_the_return_of_the_disk_shows_with_the_next_pass(tmp_path: Path) -> None:
    """Long before anybody would look again."""

    async def script(story: Story) -> None:
        await story.disk_goes()
        assert await story.claim(1) == [81]
        story.disk.come_back()
        relocator = story.shard.relocator
        assert relocator is not None
        story.shard.wall.pass_ms(0)
        relocator._look_ms = 0
        relocator.look()
        relocator.wait()
        assert await story.claim(1) == [82], "this one tells"
        assert await story.claim(2) == [1, 2]

    play(tmp_path, script)


def test_jobs_that_are_passed_over_make_no_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_LEASES", 4)

    async def script(story: Story) -> None:
        leases = story.house.table
        assert await story.claim(4) == [1, 2, 3, 4]
        await story.nack(1, 2, 3, 4)
        await story.disk_goes()
        for _ in range(5):
            assert await story.claim(4) == AWAY
            assert len(leases("q").leases) == 4
            await story.house.pass_time(700)
        await story.disk_returns()
        assert await story.claim(1) == [1]
        await story.ack(1)
        assert await story.claim(9) == [2, 3, 4, 5], "one has gone, so one may come"
        assert await story.claim(1) == "throttled"

    play(tmp_path, script)


def test_a_job_that_was_removed_makes_room_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_LEASES", 4)

    async def script(story: Story) -> None:
        assert await story.claim(4) == [1, 2, 3, 4]
        await story.nack(1, 2, 3, 4)
        story.shard.delete("q", before_seq=3)
        assert await story.claim(4) == [3, 4, 5, 6]

    play(tmp_path, script)


def test_nothing_is_missed_that_somebody_has(tmp_path: Path) -> None:
    """Then a queue is empty for others, and says so."""

    async def script(story: Story) -> None:
        assert await story.claim(100) == list(range(1, 101))
        await story.disk_goes()
        for _ in range(3):
            assert await story.claim(1) == []
        assert len(story.asked) == 3
        await story.nack(7)
        assert await story.claim(1) == AWAY
        assert await story.claim(1) == AWAY
        assert len(story.asked) < 9

    play(tmp_path, script)


def test_streams_get_what_is_hot_and_then_the_rest(tmp_path: Path) -> None:
    async def script(story: Story) -> None:
        house = story.house
        await story.disk_goes()
        worker = house.gateway.work("q", "s", 50)
        await house.settle()
        assert sorted(worker.seqs) == list(range(81, 101))
        await is_idle(house)
        await story.disk_returns()
        await house.pass_time(2_500)
        assert sorted(worker.seqs) == [*range(1, 31), *range(81, 101)]

    play(tmp_path, script)


def test_a_claim_that_is_repeated_meanwhile_is_told(tmp_path: Path) -> None:
    async def script(story: Story) -> None:
        house = story.house
        first = house.gateway.claim("q", "w", 2, key="k")
        await house.settle()
        assert seqs(first.value.jobs) == [1, 2]
        await story.disk_goes()
        again = house.gateway.claim("q", "w", 2, key="k")
        await house.settle()
        assert again.error == AWAY
        await story.disk_returns()
        again = house.gateway.claim("q", "w", 2, key="k")
        await house.settle()
        assert seqs(again.value.jobs) == [1, 2]

    play(tmp_path, script)
