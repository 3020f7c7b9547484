"""The coordinator, message by message: what it answers, in which order it gets to know things, and what it does when
others die."""

from __future__ import annotations

import gc
import os
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from model import Record
from queueplay import House, Job, Sink, run
from test_engine_faults import FaultyDisk
from test_unreadable import flip

from topics import limits
from topics.actors import messages
from topics.actors.messages import Op
from topics.queue import coordinator as queue_process
from topics.shm.counters import State, Word
from topics.storage.config import TopicConfig
from topics.storage.leases import log_name

Script = Callable[[House], Awaitable[None]]
LOGGED_MS = 100  # events that nobody waits for are in the log by then


def play(tmp_path: Path, script: Script, **settings: Any) -> None:
    run(tmp_path, script, **settings)


def seqs(jobs: list[Job]) -> list[int]:
    return [job.seq for job in jobs]


async def is_idle(house: House, ms: int = 5_000) -> None:
    """Nothing is due, and as time goes by hardly anything happens: the coordinator looks around once a second."""
    await house.settle()
    assert house.queue is not None
    assert not house.coordinator._has_work()
    assert not house.queue.is_due
    before = house.queue.rounds
    await house.pass_time(ms)
    assert house.queue.rounds - before <= 3 * ms // 1_000 + 5, "it turns in circles"


# --- a life without incidents ------------------------------------------------------------------------


def test_claim_ack_and_what_is_left(tmp_path: Path) -> None:
    async def script(house: House) -> None:
        house.make("q", 5)
        jobs = await house.claim("q", "a", 2, 1_000)
        assert [(job.seq, job.data, job.deliveries) for job in jobs] == [(1, 1, 1), (2, 2, 1)]
        assert {job.deadline for job in jobs} == {house.wall.wall_ms + 1_000}
        assert await house.counts("q") == (3, 2, 0)
        acked = await house.ask(house.gateway.ack("q", "a", [1, 2, 3]))
        assert (acked.skipped, acked.ready, acked.in_flight) == ([3], 3, 0)
        assert house.live("q") == [3, 4, 5]
        await is_idle(house)

    play(tmp_path, script)


def test_who_waits_for_nothing_asks_for_nothing(tmp_path: Path) -> None:
    async def script(house: House) -> None:
        house.make("q", 1)
        worker = house.gateway.work("q", "w", 5, 60_000)
        await house.pass_time(LOGGED_MS)
        assert worker.seqs == [1]
        asked = house.shard.engine.requests
        await is_idle(house)
        assert house.shard.engine.requests == asked

    play(tmp_path, script)


# --- things that come together -----------------------------------------------------------------------


def test_a_change_that_comes_with_the_answer_that_opens_the_queue(tmp_path: Path) -> None:
    """The later config counts, whoever is told of it first."""

    async def script(house: House) -> None:
        house.make("q", 3, lease_ms=1_000)
        await house.settle()
        house.hold()
        claim = house.gateway.claim("q", "a")
        queue, shard = house.process, house.shard
        await house.step((queue, "gateway-0"), (shard, "queue"))
        shard.shard.put("q", TopicConfig(type="queue", lease_ms=5_000))
        shard.flush()
        assert queue.links["shard-0"].peek() == [Op.OPEN_QUEUE, Op.QUEUE_CHANGED]
        await house.step((queue, "shard-0"))
        house.release()
        await house.settle()
        assert claim.value.jobs[0].deadline == house.wall.wall_ms + 5_000
        assert house.table("q").config.lease_ms == 5_000

    play(tmp_path, script)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_a_topic_that_goes_right_behind_the_answer_that_opens_the_queue(
    tmp_path: Path, again: bool, together: bool
) -> None:
    async def script(house: House) -> None:
        house.make("q", 3)
        await house.settle()
        house.hold()
        claim = house.gateway.claim("q", "a")
        queue, shard = house.process, house.shard
        await house.step((queue, "gateway-0"), (shard, "queue"))
        shard.shard.drop("q")
        shard.flush()
        house.let(queue, "shard-0", 2 if together else 1)
        await house.rest()
        house.release()
        if again:
            house.make("q", 2)
        await house.settle()
        assert claim.done
        if not again:
            assert claim.error == "topic_not_found"
        later = house.gateway.claim("q", "a", 10)
        await house.settle()
        assert later.error == ("" if again else "topic_not_found")
        await is_idle(house)

    play(tmp_path, script)


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_a_topic_that_goes_while_a_claim_is_out(tmp_path: Path, durable: bool, together: bool) -> None:
    """The claim is answered, one way or the other."""

    async def script(house: House) -> None:
        house.make("q", 3, leases_durable=durable)
        await house.claim("q", "a")
        queue, shard = house.process, house.shard
        house.hold()
        claim = house.gateway.claim("q", "b")
        waiting = house.gateway.claim("q", "c")
        await house.step((queue, "gateway-0"), (shard, "queue"))
        assert queue.links["shard-0"].peek() == [Op.TAKE_JOBS]
        shard.shard.drop("q")
        shard.flush()
        house.let(queue, "shard-0", 2 if together else 1)
        await house.rest()
        house.release()
        await house.settle()
        assert claim.done
        assert waiting.done
        await is_idle(house)
        queue.round()  # as it looks around now and then
        assert 1 <= queue.context.row.words[Word.JOBS_CLAIMED] <= 3, "each job is counted once"

    play(tmp_path, script)


def test_counters_of_a_queue_that_goes_while_it_is_asked(tmp_path: Path) -> None:
    """Claimed and acked jobs of a queue that is gone are counted once."""

    async def script(house: House) -> None:
        house.make("q", 3)
        jobs = await house.claim("q", "a", 2)
        queue, shard = house.process, house.shard
        house.hold()
        claim = house.gateway.claim("q", "b", 5)
        ack = house.gateway.ack("q", "a", seqs(jobs))
        await house.step((queue, "gateway-0"))
        shard.shard.drop("q")
        shard.flush()
        house.release()
        await house.settle()
        assert claim.done
        assert ack.done
        await house.pass_time(2_000)
        queue.round()  # as it looks around now and then
        words = queue.context.row.words
        assert (words[Word.JOBS_CLAIMED], words[Word.JOBS_ACKED]) == (2, 0)

    play(tmp_path, script)


# --- what a client may rely on -----------------------------------------------------------------------


def test_a_config_is_in_force_when_its_change_is_answered(tmp_path: Path) -> None:
    async def script(house: House) -> None:
        house.make("q", 20, lease_ms=1_000)
        await house.claim("q", "a")
        gateway, shard, queue = house.gateway, house.shard, house.process
        for turn in range(2, 8):
            house.hold()
            put = messages.PutTopic("q", TopicConfig(type="queue", lease_ms=1_000 * turn), None)
            sink = gateway.ask(0, Op.PUT_TOPIC, put)
            await house.step((shard, "gateway-0"), (gateway, "shard-0"))
            assert sink.done
            claim = gateway.claim("q", "a")
            house.release()
            if turn % 2:
                queue.round()  # it finds the claim and the change together
            await house.settle()
            assert claim.value.jobs[0].deadline == house.wall.wall_ms + 1_000 * turn

    play(tmp_path, script)


@pytest.mark.parametrize("word", ["ack", "extend"])
def test_a_job_that_is_taken_back_during_the_pass_does_not_hide_the_others(tmp_path: Path, word: str) -> None:
    """A claim that comes back empty says that the queue is: here it is not."""

    async def script(house: House) -> None:
        house.make("q", 10)
        await house.claim("q", "a", 1, 1_000)
        house.move_clock(2_000)
        house.hold()
        claim = house.gateway.claim("q", "b", 1)
        await house.step((house.queue, "gateway-0"), (house.shard, "queue"))
        said = house.gateway.ack("q", "a", [1]) if word == "ack" else house.gateway.extend("q", "a", [1], 5_000)
        await house.step((house.queue, "gateway-0"))
        house.release()
        await house.settle()
        assert said.value.skipped == []
        assert claim.value.seqs == [2]
        assert await house.counts("q") == ((8, 1, 0) if word == "ack" else (8, 2, 0))

    play(tmp_path, script)


def test_large_jobs_for_several_at_once(tmp_path: Path) -> None:
    """What one answer may hold is not shared: whoever came gets something while there is something."""

    async def script(house: House) -> None:
        house.make("q")
        for number in range(24):
            house.owner("q").shard.append("q", [Record(b'"%d%b"' % (number, b"x" * limits.MIB))])
        await house.settle()
        house.hold()
        claims = [house.gateway.claim("q", name, 10) for name in "abc"]
        house.release()
        await house.settle()
        taken = [claim.value.seqs for claim in claims]
        assert all(taken)
        assert sorted(seq for some in taken for seq in some) == list(range(1, sum(map(len, taken)) + 1))

    play(tmp_path, script)


# --- counters ----------------------------------------------------------------------------------------


def test_counters_while_acks_wait_for_their_sync(tmp_path: Path) -> None:
    """Whatever GET sees of the topic and of its leases, a moment apart: nothing is below zero, and the sum is right."""

    async def script(house: House) -> None:
        house.make("q", 5, durability="fsync", durable=True)
        await house.claim("q", "a", 3, 60_000)
        shard, queue, gateway = house.shard, house.process, house.gateway
        house.hold()
        shard.syncs = False
        ack = gateway.ack("q", "a", [1, 2])
        await house.step((queue, "gateway-0"), (shard, "queue"))
        early = messages_report(house, "q")
        assert early.completing == 2
        shard.sync()
        await house.step((queue, "shard-0"))
        count = gateway.count(early, "q")
        shard.syncs = True
        house.release()
        await house.settle()
        assert ack.value.skipped == []
        shown = count.value.counts[0]
        assert shown.in_flight >= 0
        assert shown.ready + shown.in_flight == early.count
        assert await house.counts("q") == (2, 1, 0)

    play(tmp_path, script)


def test_a_removal_while_an_ack_waits_for_its_sync(tmp_path: Path) -> None:
    async def script(house: House) -> None:
        house.make("q", 5, durability="fsync", durable=True)
        await house.claim("q", "a", 3, 60_000)
        shard, queue, gateway = house.shard, house.process, house.gateway
        house.hold()
        shard.syncs = False
        ack = gateway.ack("q", "a", [2])
        await house.step((queue, "gateway-0"), (shard, "queue"))
        shard.shard.send(Op.DELETE_RECORDS, messages.DeleteRecords("q", 2, None, False))
        count = gateway.count(messages_report(house, "q"), "q")
        await house.step((queue, "gateway-0"), (shard, "queue"), (queue, "shard-0"), (gateway, "queue"))
        assert count.done
        shown = count.value.counts[0]
        assert (shown.ready, shown.in_flight) == (2, 1)
        shard.syncs = True
        house.release()
        await house.settle()
        assert ack.value.skipped == []
        assert await house.counts("q") == (2, 1, 0)

    play(tmp_path, script)


def messages_report(house: House, topic: str) -> messages.TopicReport:
    """GET_TOPIC without waiting for syncs."""
    shard = house.owner(topic).shard
    sent = shard.send(Op.GET_TOPIC, messages.GetTopic(topic, False))
    report: messages.TopicReport = shard.answer(sent)
    return report


def test_a_job_that_is_deleted_between_a_pass_and_a_look(tmp_path: Path) -> None:
    """The coordinator asks which of its jobs are there while another is on its way to it."""

    async def script(house: House) -> None:
        house.make("q")
        house.add("q", range(1, 4), tag="first")
        house.add("q", [4], tag="second")
        await house.claim("q", "a", 3, 60_000)
        shard, queue, gateway = house.shard, house.process, house.gateway
        house.hold()
        claim = gateway.claim("q", "b", 1, 60_000)
        await house.step((queue, "gateway-0"), (shard, "queue"))  # job 4 is on its way
        shard.shard.delete("q", before_seq=2)
        count = gateway.count(house.report("q"), "q")
        await house.step((queue, "gateway-0"))  # it asks which are there
        shard.shard.delete("q", tag="second")
        shard.flush()
        await house.step((shard, "queue"))
        house.release()
        await house.settle()
        assert claim.value.seqs == [4]
        assert count.done
        assert await house.counts("q") == (0, 2, 0)

    play(tmp_path, script)


# --- leases that have to be durable ------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["full", "broken"])
@pytest.mark.parametrize("word", ["claim", "nack", "extend"])
def test_a_durable_lease_that_could_not_be_written(tmp_path: Path, fault: str, word: str) -> None:
    """Whatever else goes out with it: nobody is told that it is there."""

    async def script(house: House) -> None:
        house.make("q", 10, leases_durable=True, durability="memory")
        await house.claim("q", "a", 4, 60_000)
        disk = house.shard.shard.disk
        assert isinstance(disk, FaultyDisk)
        queue, shard, gateway = house.process, house.shard, house.gateway
        house.hold()
        if word == "claim":
            said: Sink = gateway.claim("q", "b", 2, 60_000)
            await house.step((queue, "gateway-0"), (shard, "queue"))
            ack = gateway.ack("q", "a", [1])
            queue.links["shard-0"].allowed = 9
        else:
            said = gateway.nack("q", "a", [3]) if word == "nack" else gateway.extend("q", "a", [3], 90_000)
            ack = gateway.ack("q", "a", [1])
        await house.step((queue, "gateway-0"))
        assert queue.links["shard-0"].peek() == []
        getattr(disk, fault)()
        house.release()
        await house.settle()
        disk.well()
        assert ack.done
        if said.error == "":
            # It says that it is written: then it must be there for the next one.
            known = {(event.event, seq) for event in shard.events("q") for seq in event.seqs}
            seq = said.value.seqs[0] if word == "claim" else 3
            assert ({"claim": "claimed", "nack": "released", "extend": "extended"}[word], seq) in known
        await house.settle()
        assert await house.ask(gateway.claim("q", "c", 10, 60_000)) != "storage_full"

    play(tmp_path, script, disk=FaultyDisk())


def test_a_stream_whose_jobs_were_taken_back_is_served_later(tmp_path: Path) -> None:
    """What could not be written was never pushed: it does not count as unread."""

    async def script(house: House) -> None:
        house.make("q", leases_durable=True, durability="memory")
        await house.claim("q", "a")
        disk = house.shard.shard.disk
        assert isinstance(disk, FaultyDisk)
        worker = house.gateway.work("q", "w", 1, 60_000)
        await house.settle()
        for number in range(4):
            disk.well()
            await house.settle()
            house.owner("q").shard.append("q", [Record(b'"%d%b"' % (number, b"x" * 3_000))])
            disk.full()
            await house.pass_time(1_000)
            disk.well()
            await house.pass_time(1_000)
            assert len(worker.seqs) == number + 1
            await house.ask(house.gateway.ack("q", "w", worker.seqs))

    play(tmp_path, script, disk=FaultyDisk(), stream_backlog_bytes=4_096)


# --- when a shard dies -------------------------------------------------------------------------------


def test_nobody_turns_in_circles_after_a_refused_pass(tmp_path: Path) -> None:
    """A stream that has what it wants, and a poll whose shard died."""

    async def script(house: House) -> None:
        house.make("q", 5)
        worker = house.gateway.work("q", "w", 2, 600_000)
        await house.settle()
        assert worker.seqs == [1, 2]
        house.hold()
        claim = house.gateway.claim("q", "a")
        await house.step((house.queue, "gateway-0"))
        house.shard_dies()
        house.release()
        await house.settle()
        assert claim.error == "shard_unavailable"
        house.shard_returns()
        await house.pass_time(1_000)
        await is_idle(house)
        await house.ask(house.gateway.ack("q", "w", [1]))
        assert worker.seqs == [1, 2, 3]

    play(tmp_path, script)


@pytest.mark.parametrize("jitter_ms", [0, 500])
def test_claims_that_wait_are_refused_when_their_shard_dies(tmp_path: Path, jitter_ms: int) -> None:
    async def script(house: House) -> None:
        house.make("q", 5, claim_jitter_ms=jitter_ms)
        other = house.gateway.claim("q", "a")
        await house.pass_time(1_000)
        assert other.value.seqs == [1]
        house.hold()
        claims = [house.gateway.claim("q", "b")]
        await house.step((house.queue, "gateway-0"))
        claims.append(house.gateway.claim("q", "c"))
        await house.step((house.queue, "gateway-0"))
        house.shard_dies()
        house.release()
        await house.settle()
        assert [claim.done and claim.error for claim in claims] == ["shard_unavailable"] * 2
        house.shard_returns()
        await house.pass_time(1_000)
        assert await house.counts("q") == (4, 1, 0), "nothing was leased for those who were refused"

    play(tmp_path, script)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_shard_that_dies_right_behind_its_answer(tmp_path: Path, log: bool, again: bool) -> None:
    """Its answer is taken in, and before anybody goes on with it the link is gone: the next one is asked anew."""

    async def script(house: House) -> None:
        house.make("q", 5, lease_ms=1_000)
        if log or again:
            await house.claim("q", "a")
        queue = house.process
        if again:
            house.shard_dies()
            house.shard_returns()
        elif log:
            await house.queue_dies_and_returns()
            queue = house.process
        house.hold()
        claim = None if again or log else house.gateway.claim("q", "b")
        if not again:
            house.let(queue, "gateway-0")
        for _ in range(4):
            await house.rest()
            house.let(house.shard, "queue")
            if Op.OPEN_QUEUE in queue.links["shard-0"].peek():
                break
            house.let(queue, "shard-0")
        house.let(queue, "shard-0")
        house.shard_dies()
        house.shard_returns()
        house.release()
        await house.pass_time(3_000)
        assert claim is None or claim.done
        worker = house.gateway.work("q", "w", 1, 1_000)
        await house.settle()
        house.shard.shard.put("q", TopicConfig(type="queue", lease_ms=7_000))
        await house.settle()
        jobs = await house.claim("q", "b")
        assert jobs[0].deadline == house.wall.wall_ms + 7_000, "it was told of the change"
        held = worker.jobs[-1].seq
        house.shard.shard.delete("q", before_seq=held + 1)
        await house.settle()
        assert worker.jobs[-1].seq != held, "it was told of the removal"
        house.shard.shard.drop("q")
        await house.settle()
        assert worker.errors[-1]["code"] == 404, "it was told of the end"

    play(tmp_path, script)


@pytest.mark.parametrize("after", range(7))
def test_a_shard_that_dies_after_each_message_of_its_return(tmp_path: Path, after: int) -> None:
    async def script(house: House) -> None:
        house.make("q", 9, lease_ms=1_000)
        worker = house.gateway.work("q", "w", 2, 60_000)
        await house.claim("q", "a", 3, 60_000)
        house.shard_dies()
        house.shard_returns()
        house.hold()
        for step in range(after):
            if step % 2:
                house.let(house.shard, "queue", 1)
            else:
                house.let(house.queue, "shard-0", 1)
            if step % 3:
                await house.rest()
        house.shard_dies()
        await house.rest()
        house.shard_returns()
        house.release()
        await house.pass_time(1_000)
        assert await house.counts("q") == (4, 5, 0)
        house.shard.shard.put("q", TopicConfig(type="queue", lease_ms=7_000))
        jobs = await house.claim("q", "b")
        assert jobs[0].deadline == house.wall.wall_ms + 7_000
        await house.ask(house.gateway.ack("q", "w", worker.seqs))
        assert len(worker.seqs) == 4
        await is_idle(house)

    play(tmp_path, script)


# --- when a gateway dies -----------------------------------------------------------------------------


def test_the_next_gateway_may_ask_under_the_same_number(tmp_path: Path) -> None:
    async def script(house: House) -> None:
        house.make("q", 5)
        house.hold()
        first = house.gateway.claim("q", "a")
        await house.step((house.queue, "gateway-0"))
        house.gateway_dies()
        house.hold()
        second = house.gateway.claim("q", "b", 2)
        assert second.correlation == first.correlation
        await house.step((house.queue, "gateway-0"))
        house.release()
        await house.settle()
        assert second.value.seqs == [1, 2]
        assert not first.done

    play(tmp_path, script)


def test_streams_of_a_gateway_that_dies_give_everything_back(tmp_path: Path) -> None:
    async def script(house: House) -> None:
        house.make("q", 10)
        workers = [house.gateways[number].work("q", f"w{number}", 3, 600_000) for number in (0, 1)]
        await house.settle()
        assert await house.counts("q") == (4, 6, 0)
        house.gateway_dies(1)
        await house.settle()
        assert await house.counts("q") == (7, 3, 0)
        assert len(await house.claim("q", "a", 10)) == 7
        assert len(workers[0].jobs) == 3
        assert house.table("q").leases.streams() == [workers[0].number]
        await is_idle(house)

    play(tmp_path, script, gateways=2)


@pytest.mark.parametrize("after", range(6))
def test_a_gateway_that_dies_while_its_stream_opens(tmp_path: Path, after: int) -> None:
    async def script(house: House) -> None:
        house.make("q", 3)
        house.hold()
        house.gateways[1].work("q", "w", 2, 600_000)
        for step in range(after):
            await house.step(
                (house.queue, "gateway-1"), (house.shard, "queue") if step % 2 else (house.queue, "shard-0")
            )
        house.gateway_dies(1)
        house.release()
        await house.settle()
        assert await house.counts("q") == (3, 0, 0)
        assert house.table("q").workers == {}
        await is_idle(house)

    play(tmp_path, script, gateways=2)


# --- when the coordinator dies -----------------------------------------------------------------------


def test_leases_are_as_they_were(tmp_path: Path) -> None:
    async def script(house: House) -> None:
        house.make("q", 10)
        kept = await house.claim("q", "a", 2, 60_000)
        late = await house.claim("q", "b", 2, 1_000)
        back = await house.claim("q", "c", 2, 60_000)
        await house.ask(house.gateway.nack("q", "c", seqs(back), delay_ms=5_000))
        await house.ask(house.gateway.extend("q", "a", [kept[0].seq], 90_000))
        await house.ask(house.gateway.ack("q", "a", [kept[1].seq]))
        house.move_clock(2_000)
        before = await house.counts("q")
        assert before == (6, 1, 0)
        await house.queue_dies_and_returns()
        await house.settle()
        assert await house.counts("q") == before
        ack = await house.ask(house.gateway.ack("q", "b", [late[0].seq], [late[0].lease]))
        assert ack.skipped == [], "nobody else had claimed it"
        jobs = await house.claim("q", "d", 10)
        assert [(job.seq, job.deliveries) for job in jobs] == [(4, 2), (7, 1), (8, 1), (9, 1), (10, 1)]
        await house.pass_time(4_000)
        assert [(job.seq, job.deliveries) for job in await house.claim("q", "d", 10)] == [(5, 2), (6, 2)]
        await is_idle(house)

    play(tmp_path, script)


@pytest.mark.parametrize("gone", [False, True])
def test_streams_come_back_to_their_leases(tmp_path: Path, gone: bool) -> None:
    """Or they don't: then what they held is free soon."""

    async def script(house: House) -> None:
        house.make("q", 10)
        worker = house.gateway.work("q", "w", 3, 600_000)
        await house.pass_time(LOGGED_MS)
        await house.queue_dies()
        if gone:
            worker.close()
        house.queue_begins()
        await house.settle()
        assert await house.counts("q") == (7, 3, 0)
        await house.pass_time(limits.ORPHAN_MS + 1_000)
        assert await house.counts("q") == ((10, 0, 0) if gone else (7, 3, 0))
        if not gone:
            await house.ask(house.gateway.ack("q", "w", [1]))
            assert worker.seqs == [1, 2, 3, 4]
        await is_idle(house)

    play(tmp_path, script)


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("after", range(10))
def test_a_stream_gets_what_was_on_its_way_when_the_coordinator_died(tmp_path: Path, durable: bool, after: int) -> None:
    """Whether it was leased by then or not: the connection is given its jobs, and holds no others."""

    async def script(house: House) -> None:
        house.make("q", 0, leases_durable=durable)
        worker = house.gateway.work("q", "w", 2, 600_000)
        await house.settle()
        house.hold()
        house.add("q", range(1, 6))
        house.shard.round()
        hops = [(house.queue, "shard-0"), (house.shard, "queue")]
        for step in range(after):
            house.let(*hops[step % 2], 1)
            if step % 3 == 2:
                await house.rest()
        await house.queue_dies()
        house.queue_begins()
        house.release()
        await house.pass_time(100)
        assert worker.seqs in ([1, 2], [1, 2, 1, 2]) or sorted(worker.seqs) == [1, 2]
        assert await house.counts("q") == (3, 2, 0)
        held = {job.seq: job.lease for job in worker.jobs}
        acked = await house.ask(house.gateway.ack("q", "w", list(held), list(held.values())))
        assert acked.skipped == []
        await house.settle()
        assert worker.seqs[-2:] == [3, 4]

    play(tmp_path, script)


def test_a_stream_that_closes_while_its_queue_is_being_opened(tmp_path: Path) -> None:
    async def script(house: House) -> None:
        house.make("q", 5)
        house.hold()
        worker = house.gateway.work("q", "w", 2, 600_000)
        await house.step((house.queue, "gateway-0"))
        worker.close()
        house.gateway.calls.flush()
        await house.step((house.queue, "gateway-0"))
        house.release()
        await house.settle()
        assert await house.counts("q") == (5, 0, 0)
        assert house.table("q").workers == {}
        assert house.coordinator._streams == {}

    play(tmp_path, script)


# --- delivered, and not ------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["poll", "stream"])
def test_what_nobody_got_is_not_a_delivery(tmp_path: Path, way: str) -> None:
    """As long as the leases can't be written, jobs stay what they are."""

    async def script(house: House) -> None:
        house.make("q", leases_durable=True, durability="memory", max_deliveries=3, dead_letter="dead")
        await house.claim("q", "a")
        disk = house.shard.shard.disk
        assert isinstance(disk, FaultyDisk)
        house.add("q", [1])
        disk.full()
        worker = house.gateway.work("q", "w", 1, 60_000) if way == "stream" else None
        for _ in range(10):
            if worker is None:
                assert await house.ask(house.gateway.claim("q", "b")) == "storage_full"
            else:
                await house.pass_time(500)
        disk.well()
        await house.pass_time(2_000)
        jobs = worker.jobs if worker is not None else await house.claim("q", "b")
        assert [(job.seq, job.deliveries) for job in jobs] == [(1, 1)]
        assert "dead" not in house.shard.engine.topics

    play(tmp_path, script, disk=FaultyDisk())


def test_an_ack_that_is_refused_leaves_the_lease_as_it_was(tmp_path: Path) -> None:
    """Also for the next coordinator, and whatever went out in the same round."""

    async def script(house: House) -> None:
        house.make("q", 6, leases_durable=True, durability="memory")
        await house.claim("q", "a", 4, 60_000)
        disk = house.shard.shard.disk
        assert isinstance(disk, FaultyDisk)
        house.hold()
        ack = house.gateway.ack("q", "a", [1])
        nack = house.gateway.nack("q", "a", [2])
        await house.step((house.queue, "gateway-0"))
        writes = len(disk.calls)

        def second_write(call: str) -> Exception | None:
            done = [name for name in disk.calls[writes:] if name == "write"]
            return OSError(5, "bad sector") if call == "write" and len(done) > 1 else None

        disk.when = second_write
        house.release()
        await house.settle()
        disk.well()
        assert nack.done
        refused = ack.error
        await house.queue_dies_and_returns()
        await house.settle()
        if refused:
            lease = house.table("q").leases.get(1)
            assert lease is not None, "it is leased to who held it"
            assert lease.node == "a"
            assert seqs(await house.claim("q", "b", 10)) == [2, 5, 6]
        else:
            assert house.live("q") == [2, 3, 4, 5, 6]

    play(tmp_path, script, disk=FaultyDisk())


def test_a_removed_job_does_not_make_another_come_twice(tmp_path: Path) -> None:
    """A coordinator that has just started knows free jobs, and not yet how far the log was read."""

    async def script(house: House) -> None:
        house.make("q")
        house.add("q", range(1, 4), tag="kept")
        house.add("q", [4], tag="removed")
        house.add("q", range(5, 8), tag="kept")
        await house.claim("q", "a", 4, 1_000)
        await house.pass_time(LOGGED_MS)
        await house.queue_dies_and_returns()
        await house.pass_time(2_000)
        house.shard.shard.delete("q", tag="removed")
        jobs = await house.claim("q", "b", 4)
        assert [(job.seq, job.deliveries) for job in jobs] == [(1, 2), (2, 2), (3, 2), (5, 1)]
        assert await house.counts("q") == (2, 4, 0)

    play(tmp_path, script)


@pytest.mark.parametrize("way", ["delete", "evict"])
def test_a_job_that_went_while_the_coordinator_was_away_makes_room(tmp_path: Path, way: str) -> None:
    async def script(house: House) -> None:
        house.make("q", 3, cap_records=3 if way == "evict" else 0)
        worker = house.gateway.work("q", "w", 1, 600_000)
        await house.pass_time(LOGGED_MS)
        assert worker.seqs == [1]
        await house.queue_dies()
        if way == "delete":
            house.shard.shard.delete("q", before_seq=2)
        else:
            house.add("q", [4])
        house.queue_begins()
        await house.settle()
        assert worker.seqs == [1, 2]

    play(tmp_path, script)


# --- memory ------------------------------------------------------------------------------------------


def coordinators_bytes() -> int:
    """What the coordinator's modules have allocated and not given back."""
    gc.collect()
    folder = os.path.join(os.path.dirname(queue_process.__file__), "*")
    snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, folder)])
    return sum(trace.size for trace in snapshot.traces)


@pytest.mark.full
def test_memory_follows_leases_and_not_jobs(tmp_path: Path) -> None:
    """Many jobs and few leases, by claims and by a stream; then more of either."""

    async def script(house: House) -> None:
        def more_jobs(count: int) -> None:
            for _ in range(count // 1_000):
                house.add("q", range(1_000))

        async def more_leases(count: int) -> list[Job]:
            return [job for _ in range(count // 500) for job in await house.claim("q", "a", 500, 600_000)]

        house.make("q")
        more_jobs(30_000)
        await house.claim("q", "nobody", 1, 100)
        tracemalloc.start()
        try:
            before = coordinators_bytes()
            first = await more_leases(500)
            some = coordinators_bytes() - before
            assert 25_000 < some < 300_000, "some hundred bytes for each"
            more_jobs(30_000)
            worker = house.gateway.work("q", "w", 1, 600_000)
            await house.settle()
            assert len(worker.jobs) == 1
            assert await house.counts("q") == (59_498, 502, 0)
            assert coordinators_bytes() - before < some + 50_000, "it does not know how many jobs there are"
            second = await more_leases(4_500)
            tenfold = coordinators_bytes() - before
            assert 5 * some < tenfold < 20 * some
            for jobs in (first, second):
                for at in range(0, len(jobs), 500):
                    acked = await house.ask(house.gateway.ack("q", "a", seqs(jobs[at : at + 500])))
                    assert acked.skipped == []
            await house.pass_time(2_000, step_ms=1_000)
            assert coordinators_bytes() - before < tenfold / 4, "and it forgets"
        finally:
            tracemalloc.stop()

    play(tmp_path, script, ring_bytes=1 << 20)


# --- who is woken ------------------------------------------------------------------------------------


def test_what_does_not_fit_into_a_ring_is_not_slept_on(tmp_path: Path) -> None:
    """A table larger than the ring is on its way to the shard, and questions behind it."""

    async def script(house: House) -> None:
        house.make("q", 900)
        for node in "abcdefgh":
            await house.claim("q", node * 100, 100, 600_000)
        await house.pass_time(LOGGED_MS)
        queue = house.table("q")
        queue.checkpoint()
        claim = house.gateway.claim("q", "z", 5)
        await house.settle()
        assert claim.done, "at once, and not when somebody happens to look"
        assert claim.value.seqs == [801, 802, 803, 804, 805]
        ack = house.gateway.ack("q", "z", [801])
        await house.settle()
        assert ack.value.skipped == []

    play(tmp_path, script, ring_bytes=8_192)


@pytest.mark.parametrize("durable", [False, True])
def test_a_coordinator_that_returns_before_the_disk_has_synced(tmp_path: Path, durable: bool) -> None:
    """The first lease of a queue makes its log. What was answered is known to the next one, however slow the disk."""

    async def script(house: House) -> None:
        house.make("q", 2, leases_durable=durable)
        house.shard.syncs = False
        claim = house.gateway.claim("q", "a", 1, 600_000)
        await house.pass_time(LOGGED_MS)
        answered = claim.done
        assert answered is not durable
        await house.queue_dies_and_returns()
        other = house.gateway.claim("q", "b", 2, 600_000)
        await house.pass_time(LOGGED_MS)
        house.shard.syncs = True
        await house.pass_time(LOGGED_MS)
        assert other.value.seqs == [2] or (not answered and other.value.seqs == [1, 2])

    play(tmp_path, script)


def test_a_stream_whose_gateway_has_no_room_to_ask_waits(tmp_path: Path) -> None:
    """More streams come back at once than fit into the ring: nobody is turned away for that."""

    async def script(house: House) -> None:
        house.make("q", 300)
        workers = [house.gateway.work("q", f"{number:0100}", 1, 600_000) for number in range(200)]
        await house.pass_time(2_000)
        assert sum(len(worker.jobs) for worker in workers) == 200
        await house.queue_dies_and_returns()
        await house.pass_time(3_000)
        assert not any(worker.errors for worker in workers)
        assert set(house.table("q").workers) == {worker.number for worker in workers}
        assert await house.counts("q") == (100, 200, 0)
        workers[0].close()
        workers[150].close()
        await house.pass_time(3_000)
        assert await house.counts("q") == (102, 198, 0)
        assert len(house.table("q").workers) == 198

    play(tmp_path, script, ring_bytes=8_192)


# --- cohorts -----------------------------------------------------------------------------------------


def test_a_window_gathers_claims_and_divides(tmp_path: Path) -> None:
    async def script(house: House) -> None:
        house.make("q", 6, claim_jitter_ms=500)
        first = house.gateway.claim("q", "a", 6)
        await house.pass_time(300)
        later = [house.gateway.claim("q", node, 6) for node in "bc"]
        await house.pass_time(199, step_ms=199)
        assert not first.done
        await house.pass_time(1, step_ms=1)
        taken = [claim.value.seqs for claim in (first, *later)]
        assert [len(some) for some in taken] == [2, 2, 2]
        assert sorted(seq for some in taken for seq in some) == [1, 2, 3, 4, 5, 6]
        empty = house.gateway.claim("q", "d")
        await house.pass_time(499, step_ms=499)
        assert not empty.done
        await house.pass_time(1, step_ms=1)
        assert empty.value.seqs == []
        await is_idle(house)

    play(tmp_path, script)


@pytest.mark.parametrize("when", ["in the window", "in the pass", "while the queue is opened"])
def test_who_leaves_a_cohort_gets_nothing(tmp_path: Path, when: str) -> None:
    async def script(house: House) -> None:
        house.make("q", 4, claim_jitter_ms=500)
        if when != "while the queue is opened":
            house.gateway.claim("q", "nobody", 1, 100)
            await house.pass_time(1_000)
        house.hold()
        leaver, stayer = house.gateway.claim("q", "a", 4), house.gateway.claim("q", "b", 2)
        await house.step((house.queue, "gateway-0"))
        if when == "in the pass":
            house.move_clock(600)
            house.process.round()
            assert house.shard.links["queue"].peek() == [Op.TAKE_JOBS]
        house.gateway.abandon(leaver)
        await house.step((house.queue, "gateway-0"))
        house.release()
        await house.pass_time(1_000)
        assert stayer.value.seqs == [1, 2]
        assert await house.counts("q") == (2, 2, 0)
        await is_idle(house)

    play(tmp_path, script)


@pytest.mark.parametrize("jitter_ms", [0, 500])
@pytest.mark.parametrize("when", ["in the window", "in the pass", "while the queue is opened"])
def test_a_claim_whose_client_sends_no_more_is_served_at_once_or_not_at_all(
    tmp_path: Path, when: str, jitter_ms: int
) -> None:
    """A window is not waited for; without one its answer is on its way already."""

    async def script(house: House) -> None:
        house.make("q", 4, claim_jitter_ms=jitter_ms)
        if when != "while the queue is opened":
            house.gateway.claim("q", "nobody", 1, 100)
            await house.pass_time(1_000)
        house.hold()
        leaver = house.gateway.claim("q", "a", 4)
        await house.step((house.queue, "gateway-0"))
        if when == "in the pass":
            house.move_clock(600)
            house.process.round()
            assert house.shard.links["queue"].peek() == [Op.TAKE_JOBS]
        house.gateway.leave(leaver)
        await house.step((house.queue, "gateway-0"))
        house.release()
        await house.settle()
        if jitter_ms:
            assert leaver.error == "request_timeout"
            await house.pass_time(1_000)
            assert await house.counts("q") == (4, 0, 0)
        else:
            assert leaver.value.seqs == [1, 2, 3, 4]
        await is_idle(house)

    play(tmp_path, script)


def test_streams_and_claims_share_a_pass(tmp_path: Path) -> None:
    async def script(house: House) -> None:
        house.make("q", 0, claim_jitter_ms=200)
        workers = [house.gateway.work("q", "w", 4, 600_000) for _ in range(2)]
        await house.settle()
        claim = house.gateway.claim("q", "a", 4)
        await house.pass_time(100)
        house.add("q", range(1, 7))
        await house.pass_time(100)
        assert [len(worker.jobs) for worker in workers] == [2, 2]
        assert len(claim.value.seqs) == 2

    play(tmp_path, script)


def test_claims_without_a_window_are_served_as_they_came(tmp_path: Path) -> None:
    async def script(house: House) -> None:
        house.make("q", 5)
        house.hold()
        claims = [house.gateway.claim("q", node, 3) for node in "abc"]
        house.release()
        await house.settle()
        assert [claim.value.seqs for claim in claims] == [[1, 2, 3], [4, 5], []]
        assert [claim.value.ready for claim in claims] == [0, 0, 0]

    play(tmp_path, script)


# --- bounds, ends and sleeps -------------------------------------------------------------------------


def test_there_is_a_bound_on_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_LEASES", 10)

    async def script(house: House) -> None:
        house.make("q", 30)
        assert len(await house.claim("q", "a", 8, 1_000)) == 8
        assert seqs(await house.claim("q", "b", 8, 600_000)) == [9, 10]
        refused = house.gateway.claim("q", "c")
        await house.settle()
        assert refused.error == "throttled"
        worker = house.gateway.work("q", "w", 3, 600_000)
        await house.settle()
        assert worker.seqs == []
        await is_idle(house, 500)
        await house.pass_time(2_000)
        assert len(worker.seqs) == 3, "what expired is there for others"
        assert len(await house.claim("q", "c", 20)) == 5
        await house.ask(house.gateway.ack("q", "b", [9, 10]))
        assert seqs(await house.claim("q", "c", 20)) == [11, 12]

    play(tmp_path, script)


def test_a_queue_that_nobody_uses_is_forgotten(tmp_path: Path) -> None:
    async def script(house: House) -> None:
        house.make("q", 3)
        jobs = await house.claim("q", "a", 2)
        await house.ask(house.gateway.ack("q", "a", seqs(jobs)))
        await house.pass_time(limits.QUEUE_IDLE_MS + 3_000, step_ms=1_000)
        assert house.coordinator._queues == {}
        assert house.shard.events("q")[-1].event == "checkpoint"
        assert await house.counts("q") == (1, 0, 0)
        assert seqs(await house.claim("q", "a", 5, 600_000)) == [3]
        await house.pass_time(limits.QUEUE_IDLE_MS + 3_000, step_ms=1_000)
        assert list(house.coordinator._queues) == ["q"], "it holds a lease"
        house.shard.shard.put("q", TopicConfig(type="queue", lease_ms=4_000))
        house.add("q", [4])
        jobs = await house.claim("q", "b")
        assert jobs[0].deadline == house.wall.wall_ms + 4_000

    play(tmp_path, script)


def test_a_stop_writes_the_tables_down(tmp_path: Path) -> None:
    async def script(house: House) -> None:
        for name in ("q", "r"):
            house.make(name, 5)
            await house.claim(name, "a", 2, 600_000)
        house.coordinator._finish()
        await house.queue_dies()
        await house.settle()
        for name in ("q", "r"):
            last = house.owner(name).events(name)[-1]
            assert (last.event, [job.seq for job in last.jobs]) == ("checkpoint", [1, 2])
        house.queue_begins()
        await house.settle()
        assert await house.counts("q") == await house.counts("r") == (3, 2, 0)

    play(tmp_path, script)


def test_the_death_of_a_shard_is_not_the_others(tmp_path: Path) -> None:
    async def script(house: House) -> None:
        here, there = "jobs", "jobs.dead"
        for name in (here, there):
            house.make(name, 5)
            await house.claim(name, "a", 1, 600_000)
        number = house.shards.index(house.owner(there))
        house.shard_dies(number)
        assert len(await house.claim(here, "b")) == 1
        refused = house.gateway.claim(there, "b")
        unknown = house.gateway.claim("jobs.dead", "b")
        await house.settle()
        assert refused.error == unknown.error == "shard_unavailable"
        house.shard_returns(number)
        await house.settle()
        assert await house.counts(there) == (4, 1, 0)
        assert await house.counts(here) == (3, 2, 0)
        await is_idle(house)

    play(tmp_path, script, shards=2)


def test_a_clock_that_is_set_back(tmp_path: Path) -> None:
    """Time goes on: leases end, windows close, and a deadline is never before one that was given out."""

    async def script(house: House) -> None:
        house.make("q", 5, claim_jitter_ms=100)
        claim = house.gateway.claim("q", "a", 1, 1_000)
        await house.pass_time(200)
        before = claim.value.jobs[0].deadline
        house.wall.set_back_ms(3_600_000)
        other = house.gateway.claim("q", "b", 1, 1_000)
        await house.pass_time(1_000)
        assert other.value.jobs[0].deadline >= before
        await house.pass_time(6_000)
        assert await house.counts("q") == (5, 0, 0)

    play(tmp_path, script)


def test_who_came_first_is_not_overtaken_for_ever(tmp_path: Path) -> None:
    """Jobs so large that a pass has one of them, and somebody new in every pass."""

    async def script(house: House) -> None:
        house.make("q")
        for number in range(8):
            house.owner("q").shard.append("q", [Record(b'"%d%b"' % (number, b"x" * 5 * limits.MIB))])
        await house.settle()
        house.hold()
        claims = [house.gateway.claim("q", node, 1) for node in "ab"]
        for node in "cdefg":
            claims.append(house.gateway.claim("q", node, 1))
            await house.step((house.queue, "gateway-0"))
            for _ in range(400):
                house.let(house.shard, "queue")
                house.let(house.queue, "shard-0")
                house.let(house.gateway, "queue")
                if not house.shard.links["queue"].waiting and not house.process.links["shard-0"].waiting:
                    break
                await house.rest()
        order = [claim.value.seqs[0] for claim in claims if claim.done]
        assert order == sorted(order), "first come, first served"
        assert claims[1].done
        house.release()
        await house.settle()
        assert [claim.value.seqs for claim in claims] == [[number] for number in range(1, 8)]

    play(tmp_path, script, ring_bytes=1 << 22)


@pytest.mark.parametrize("turn", range(4))
def test_what_a_stream_has_no_room_for_is_a_claims(tmp_path: Path, turn: int) -> None:
    """Of two jobs the stream can be given one: a claim does not come back empty because of the other."""

    async def script(house: House) -> None:
        house.make("q")
        worker = house.gateway.work("q", "w", 10, 600_000)
        await house.settle()
        worker.socket.stalled = True
        house.table("q").passes._turn = turn
        house.hold()
        house.owner("q").shard.append("q", [Record(b'"%b"' % (b"x" * 5_000)) for _ in range(2)])
        house.shard.round()
        claim = house.gateway.claim("q", "a", 1, 600_000)
        house.release()
        await house.settle()
        worker.socket.stalled = False
        await house.settle()
        assert len(claim.value.seqs) == 1
        assert len(worker.jobs) == 1

    play(tmp_path, script, stream_backlog_bytes=4_096)


@pytest.mark.parametrize("written", [False, True])
def test_an_ack_whose_shard_dies_can_be_repeated(tmp_path: Path, written: bool) -> None:
    """Whether the delete was written or not: until somebody knows, the job is held by who held it."""

    async def script(house: House) -> None:
        house.make("q", 3)
        await house.claim("q", "a", 2, 600_000)
        house.hold()
        ack = house.gateway.ack("q", "a", [1])
        await house.step((house.queue, "gateway-0"))
        if written:
            house.let(house.shard, "queue")
        house.shard_dies()
        house.release()
        await house.settle()
        assert ack.error == "shard_unavailable"
        house.shard_returns()
        await house.settle()
        assert seqs(await house.claim("q", "b", 5)) == [3]
        assert await house.counts("q") == (0, 2 if written else 3, 0)
        again = await house.ask(house.gateway.ack("q", "a", [1]))
        assert again.skipped == ([1] if written else [])
        assert await house.counts("q") == (0, 2, 0)
        assert house.live("q") == [2, 3]

    play(tmp_path, script)


@pytest.mark.parametrize("what", ["config", "delete", "drop", "make again"])
def test_changes_while_the_answer_that_opens_the_queue_waits_for_the_disk(tmp_path: Path, what: str) -> None:
    async def script(house: House) -> None:
        house.make("q", 4)
        house.shard.syncs = False
        await house.claim("q", "a", 1, 600_000)
        await house.queue_dies_and_returns()
        claim = house.gateway.claim("q", "b", 1)
        await house.pass_time(LOGGED_MS)
        assert not claim.done
        engine = house.shard.shard
        if what == "config":
            engine.send(Op.PUT_TOPIC, messages.PutTopic("q", TopicConfig(type="queue", lease_ms=7_000), None))
        elif what == "delete":
            engine.send(Op.DELETE_RECORDS, messages.DeleteRecords("q", 2, None, False))
        else:
            engine.send(Op.DROP_TOPIC, messages.DropTopic("q", False))
        house.shard.flush()
        await house.settle()
        if what == "make again":
            engine.send(Op.PUT_TOPIC, messages.PutTopic("q", TopicConfig(type="queue"), None))
        house.shard.syncs = True
        await house.pass_time(1_000)
        assert claim.done
        if what in ("config", "delete"):
            assert claim.value.seqs == [2]
            assert what == "delete" or claim.value.jobs[0].deadline == house.wall.wall_ms - 1_000 + 7_000
            assert await house.counts("q") == ((2, 2, 0) if what == "config" else (2, 1, 0))
        later = house.gateway.claim("q", "c")
        await house.settle()
        assert later.error == ("topic_not_found" if what == "drop" else "")
        await is_idle(house)

    play(tmp_path, script)


def test_a_claim_that_was_given_up_takes_nothing(tmp_path: Path) -> None:
    """A shard that recovers for minutes answers nobody; gateways end their calls. Later nobody waits for those jobs."""

    async def script(house: House) -> None:
        house.make("q", 4)
        gateway = house.gateway
        house.hold()
        gateway.calls.timeout_ms = -4_000  # of this claim there is a second
        claim = gateway.claim("q", "a", 4, 600_000)
        gateway.calls.timeout_ms = 600_000
        await house.step((house.queue, "gateway-0"))
        assert list(house.coordinator._openings) == ["q"]
        while not claim.done:
            gateway.calls.expire()
            time.sleep(0.01)
        assert claim.error == "shard_unavailable"
        gateway._left.add(claim.correlation)
        house.release()
        await house.settle()
        assert await house.counts("q") == (4, 0, 0)

    play(tmp_path, script)


def test_a_damaged_leases_log_costs_nothing_but_answers(tmp_path: Path) -> None:
    async def script(house: House) -> None:
        house.make("q", 4)
        await house.claim("q", "a", 2)
        await house.pass_time(LOGGED_MS)
        shard = house.shard.shard
        await house.queue_dies()
        shard.flush(log_name("q"))
        flip(shard, shard.topic(log_name("q")).rows.front())
        house.queue_begins()
        await house.settle()
        for _ in range(3):
            claim = house.gateway.claim("q", "b")
            await house.settle()
            assert claim.error == "internal"
        assert house.coordinator._opener._watches == [{}]
        house.make("other", 1)
        assert seqs(await house.claim("other", "b")) == [1]

    play(tmp_path, script)


# --- a shard that is replaced ------------------------------------------------------------------------


async def is_replaced(house: House) -> Sink:
    """The shard has gone in order, and somebody has asked for a job since."""
    house.make("q", 4)
    assert seqs(await house.claim("q", "a")) == [1]
    house.process.context.on_hold("shard-0")
    await house.pass_time(LOGGED_MS)
    house.shard_dies()
    claim = house.gateway.claim("q", "b")
    await house.pass_time(1_000)
    assert not claim.done
    return claim


async def is_refused(house: House, claim: Sink) -> None:
    """Who waited, and who comes later; until it is back after all."""
    await house.settle()
    assert claim.error == "shard_unavailable"
    assert 0 not in house.coordinator._holds
    for sink in (house.gateway.claim("q", "b"), house.gateway.ack("q", "a", [1]), house.gateway.claim("other", "b")):
        await house.settle()
        assert sink.error == "shard_unavailable"
    await is_idle(house)
    house.shard_returns()
    await house.pass_time(1_000)
    assert seqs(await house.claim("q", "b")) == [2]
    assert (await house.ask(house.gateway.ack("q", "a", [1]))).skipped == []
    await is_idle(house)


def test_whoever_asks_for_a_queue_of_a_shard_that_is_replaced_waits(tmp_path: Path) -> None:
    async def script(house: House) -> None:
        claim = await is_replaced(house)
        house.shard_returns()
        await house.settle()
        assert claim.value.seqs == [2]
        assert 0 not in house.coordinator._holds
        await is_idle(house)

    play(tmp_path, script)


def test_a_successor_that_dies_before_it_serves(tmp_path: Path) -> None:
    async def script(house: House) -> None:
        claim = await is_replaced(house)
        house.shard_returns()
        house.hold()
        await house.rest()
        house.shard_dies()
        house.release()
        await is_refused(house, claim)

    play(tmp_path, script)


@pytest.mark.parametrize("state", [State.BACKOFF, State.FAILED])
def test_a_successor_that_never_comes(tmp_path: Path, state: State) -> None:
    async def script(house: House) -> None:
        claim = await is_replaced(house)
        house.process.states["shard-0"] = state
        await house.pass_time(LOGGED_MS)
        await is_refused(house, claim)

    play(tmp_path, script)
