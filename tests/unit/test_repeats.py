"""Claims that are sent again with their key: the same jobs, whoever has died meanwhile, and never more than once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from queueplay import House, Job, run
from test_engine_faults import FaultyDisk

from topics.actors import messages
from topics.actors.messages import Op

LEASE_MS = 30_000


def play(folder: Path, script: Callable[[House], Awaitable[None]], **settings: Any) -> None:
    run(folder, script, **settings)


async def claim(house: House, key: str, most: int = 2, *, node: str = "w", lease_ms: int | None = None) -> list[Job]:
    claimed = await house.ask(house.gateway.claim("q", node, most, lease_ms, key=key))
    jobs: list[Job] = claimed.jobs
    return jobs


def seqs(jobs: list[Job]) -> list[int]:
    return [job.seq for job in jobs]


def test_the_same_jobs_come_again(tmp_path: Path) -> None:
    async def script(house: House) -> None:
        house.make("q", 6, lease_ms=LEASE_MS)
        first = await claim(house, "k")
        assert seqs(first) == [1, 2]
        await house.pass_time(1_000)
        assert await claim(house, "k") == first
        assert await claim(house, "k", 5, lease_ms=100) == first, "whatever else it asks for"
        assert seqs(await claim(house, "other")) == [3, 4]
        assert seqs(await claim(house, "k", node="x")) == [5, 6]
        assert await claim(house, "k") == first
        assert await house.counts("q") == (0, 6, 0)
        assert house.table("q").claimed == 6
        assert house.table("q").repeats.idle

    play(tmp_path, script)


def test_a_claim_without_jobs_is_none_to_repeat(tmp_path: Path) -> None:
    async def script(house: House) -> None:
        house.make("q", 0)
        assert await claim(house, "k") == []
        house.add("q", [1])
        assert seqs(await claim(house, "k")) == [1]

    play(tmp_path, script)


def test_a_key_means_what_is_left_of_its_leases(tmp_path: Path) -> None:
    async def script(house: House) -> None:
        house.make("q", 9, lease_ms=LEASE_MS)
        assert seqs(await claim(house, "k", 5)) == [1, 2, 3, 4, 5]
        await house.ask(house.gateway.ack("q", "w", [1]))
        await house.ask(house.gateway.nack("q", "w", [2]))
        await house.ask(house.gateway.ask(0, Op.DELETE_RECORDS, messages.DeleteRecords("q", 4, None, False)))
        extended = await house.ask(house.gateway.extend("q", "w", [5], 2 * LEASE_MS))
        again = await claim(house, "k", 5)
        assert seqs(again) == [4, 5]
        assert again[1].deadline == extended.deadline
        assert again[0].deadline < extended.deadline
        await house.pass_time(LEASE_MS + 1_000, step_ms=1_000)
        assert seqs(await claim(house, "k", 5)) == [5]
        await house.ask(house.gateway.ack("q", "w", [5]))
        assert seqs(await claim(house, "k", 2)) == [4, 6]

    play(tmp_path, script)


@pytest.mark.parametrize("written", ["events", "a checkpoint"])
@pytest.mark.parametrize("durable", [True, False])
def test_keys_outlive_the_coordinator(tmp_path: Path, durable: bool, written: str) -> None:
    async def script(house: House) -> None:
        house.make("q", 6, lease_ms=LEASE_MS, leases_durable=durable)
        first, second = await claim(house, "k"), await claim(house, "k", node="x")
        if written == "a checkpoint":
            house.table("q").checkpoint()
            house.coordinator._asks.flush()
        await house.pass_time(200)
        await house.queue_dies_and_returns()
        await house.settle()
        assert await claim(house, "k") == first
        assert await claim(house, "k", node="x") == second
        assert seqs(await claim(house, "other", 4)) == [5, 6]

    play(tmp_path, script)


@pytest.mark.parametrize("jitter_ms", [0, 500])
@pytest.mark.parametrize("durable", [True, False])
def test_two_at_a_time_are_one(tmp_path: Path, durable: bool, jitter_ms: int) -> None:
    async def script(house: House) -> None:
        house.make("q", 6, claim_jitter_ms=jitter_ms, leases_durable=durable)
        house.hold()
        claims = [house.gateway.claim("q", "w", 2, key="k") for _ in range(3)]
        house.release()
        await house.pass_time(1_000)
        assert [one.value.seqs for one in claims] == [[1, 2]] * 3
        assert len({tuple(job.lease for job in one.value.jobs) for one in claims}) == 1
        assert await house.counts("q") == (4, 2, 0)

    play(tmp_path, script)


@pytest.mark.parametrize("by", ["abandon", "leave"])
@pytest.mark.parametrize("in_pass", [True, False])
def test_who_waits_behind_one_that_left_is_served(tmp_path: Path, by: str, in_pass: bool) -> None:
    async def script(house: House) -> None:
        house.make("q", 4, claim_jitter_ms=500)
        house.gateway.claim("q", "nobody", 1, 100)
        await house.pass_time(1_000)
        house.hold()
        first, second = (house.gateway.claim("q", "w", 2, key="k") for _ in range(2))
        await house.step((house.queue, "gateway-0"))
        if in_pass:
            house.move_clock(600)
            house.process.round()
            assert house.shard.links["queue"].peek() == [Op.TAKE_JOBS]
        getattr(house.gateway, by)(first)
        await house.step((house.queue, "gateway-0"))
        house.release()
        await house.pass_time(2_000)
        assert second.value.seqs == [1, 2]
        assert await house.counts("q") == (2, 2, 0)
        assert house.table("q").repeats.idle

    play(tmp_path, script)


@pytest.mark.parametrize("known", [True, False])
def test_who_waits_behind_one_that_is_refused_is_refused(tmp_path: Path, known: bool) -> None:
    async def script(house: House) -> None:
        house.make("q", 4, lease_ms=LEASE_MS)
        before = await claim(house, "k") if known else await claim(house, "x")
        await house.pass_time(200)
        house.hold()
        both = [house.gateway.claim("q", "w", 2, key="k") for _ in range(2)]
        await house.step((house.queue, "gateway-0"))
        house.shard_dies()
        house.release()
        await house.settle()
        assert [one.error for one in both] == ["shard_unavailable"] * 2
        house.shard_returns()
        await house.pass_time(1_000)
        again = await claim(house, "k")
        assert again == before if known else seqs(again) == [3, 4]

    play(tmp_path, script)


def test_leases_that_could_not_be_written_are_nobodys(tmp_path: Path) -> None:
    async def script(house: House) -> None:
        house.make("q", 0, leases_durable=True, durability="memory")
        await claim(house, "k")
        house.add("q", [1, 2])
        disk = house.shard.shard.disk
        assert isinstance(disk, FaultyDisk)
        disk.full()
        both = [house.gateway.claim("q", "w", 2, key="k") for _ in range(2)]
        await house.settle()
        assert [one.error for one in both] == ["storage_full"] * 2
        disk.well()
        await house.pass_time(1_000)
        assert [(job.seq, job.deliveries) for job in await claim(house, "k")] == [(1, 1), (2, 1)]

    play(tmp_path, script, disk=FaultyDisk())


def test_keys_that_mean_nothing_are_not_kept(tmp_path: Path) -> None:
    async def script(house: House) -> None:
        house.make("q", 400)
        for number in range(1, 401):
            assert seqs(await claim(house, f"k{number}", 1)) == [number]
            await house.ask(house.gateway.ack("q", "w", [number]))
        assert len(house.table("q").repeats) <= 65

    play(tmp_path, script)
